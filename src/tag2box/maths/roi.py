"""RoIPool (Girshick, "Fast R-CNN", 2015) and RoIAlign (He et al., "Mask R-CNN", 2017): boxes to a fixed grid."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from tag2box.maths.window_max import Windows, window_max


def roi_pool(
    features: Float[Tensor, "N ch H W"],
    boxes: Float[Tensor, "R 4"],
    image_ids: Int[Tensor, " R"],
    *,
    size: int,
    scale: float,
) -> Float[Tensor, "R ch size size"]:
    """RoIPool of boxes with exclusive right and bottom edges: the last pixel of a box is x2 - 1."""
    inclusive = boxes - boxes.new_tensor([0.0, 0.0, 1.0, 1.0])
    return roi_pool_inclusive(features, inclusive, image_ids, size=size, scale=scale)


def roi_pool_inclusive(
    features: Float[Tensor, "N ch H W"],
    corners: Float[Tensor, "R 4"],
    image_ids: Int[Tensor, " R"],
    *,
    size: int,
    scale: float,
) -> Float[Tensor, "R ch size size"]:
    """RoIPool of inclusive corners, as published: round to the map, split into floor/ceil bins, take the maximum.

    A bin outside the map gives 0. The gradient goes to the first maximum of a bin, in reading order.
    """
    height, width = features.shape[-2:]
    cells = _round_half_away(corners.detach().float() * scale)
    left, right = _bins(cells[:, 0], cells[:, 2], size=size, limit=width)
    top, bottom = _bins(cells[:, 1], cells[:, 3], size=size, limit=height)
    shape = (len(corners), size, size)
    windows = Windows(
        image=image_ids,
        top=top[:, :, None].expand(shape).flatten(1),
        left=left[:, None, :].expand(shape).flatten(1),
        height=(bottom - top)[:, :, None].expand(shape).flatten(1),
        width=(right - left)[:, None, :].expand(shape).flatten(1),
    )
    return window_max(features, windows).view(len(corners), features.shape[1], size, size)


def _round_half_away(x: Tensor) -> Tensor:
    """C's ``round``: halves go away from zero, where torch.round goes to the even neighbour."""
    whole = x.trunc()
    return whole + torch.where((x - whole).abs() >= 0.5, x.sign(), 0.0)


def _bins(start: Tensor, end: Tensor, *, size: int, limit: int) -> tuple[Tensor, Tensor]:
    """First and one-past-last cell of each bin along one axis, (R, size) each, clipped to the map.

    The products stay in float32: a bin edge such as 7 * (3 / 7) must round as it does in the published operator.
    """
    step = (end - start + 1).clamp(min=1) / size
    index = torch.arange(size, device=start.device, dtype=start.dtype)
    first = (index * step[:, None]).floor() + start[:, None]
    last = ((index + 1) * step[:, None]).ceil() + start[:, None]
    return first.clamp(0, limit).long(), last.clamp(0, limit).long()


def roi_align(
    features: Float[Tensor, "N ch H W"],
    boxes: Float[Tensor, "R 4"],
    image_ids: Int[Tensor, " R"],
    *,
    size: int,
    scale: float,
) -> Float[Tensor, "R ch size size"]:
    """RoIAlign with one bilinear sample a bin, at its centre.

    Cell i of the map is centred on pixel (i + 1/2) / scale; samples beyond the outer cells take the border's values.
    Convolutions that follow see values of the kind they were trained on, where a maximum over cells is biased upwards.
    A sample is a weighted sum of four rows of the map, channels last: a bag of four, in torch's words.
    """
    height, width = features.shape[-2:]
    columns, across = _between(boxes[:, 0], boxes[:, 2], size=size, scale=scale, limit=width)
    lines, down = _between(boxes[:, 1], boxes[:, 3], size=size, scale=scale, limit=height)
    line_ids = image_ids.view(-1, 1, 1, 1, 1) * height + lines[:, :, None, :, None]
    cells = (line_ids * width + columns[:, None, :, None, :]).reshape(-1, 4)
    shares = (down[:, :, None, :, None] * across[:, None, :, None, :]).reshape(-1, 4)
    rows = features.permute(0, 2, 3, 1).reshape(-1, features.shape[1])
    sampled = functional.embedding_bag(cells, rows, per_sample_weights=shares.to(rows.dtype), mode="sum")
    return sampled.view(len(boxes), size, size, features.shape[1]).permute(0, 3, 1, 2)


def _between(start: Tensor, end: Tensor, *, size: int, scale: float, limit: int) -> tuple[Tensor, Tensor]:
    """The two cells around each bin centre along one axis, and the share of each; (R, size, 2) both."""
    share = (torch.arange(size, device=start.device, dtype=start.dtype) + 0.5) / size
    place = (start[:, None] + share * (end - start)[:, None]) * scale - 0.5
    place = place.detach().clamp(0, limit - 1)
    first = place.floor().long()
    second = (first + 1).clamp(max=limit - 1)
    return torch.stack([first, second], dim=2), torch.stack([first + 1 - place, place - first], dim=2)
