"""Precision and length of numbers."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

_SHORTEST = 1e-6  # rows that are no longer have no direction


def at_least_single(x: Tensor) -> Tensor:
    """Half-precision numbers in single precision, others as they are: for sums, softmaxes and logarithms."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def unit_rows(x: Float[Tensor, "R D"]) -> Float[Tensor, "R D"]:
    """Each row over its length. A row of length zero stays, and teaches nothing: which way it should turn is unknown.

    (Divided by a tiny number instead, as is common, its gradient would outweigh all others by orders of magnitude.)
    """
    length = x.norm(dim=1, keepdim=True)
    return torch.where(length > _SHORTEST, x / length.clamp(min=_SHORTEST), torch.zeros_like(x))


CODE_WEIGHTS = (10.0, 10.0, 5.0, 5.0)
"""Scale of (dx, dy, dw, dh): spreads of about 0.1, 0.1, 0.2 and 0.2 become one."""

MAX_LOG_SIZE = math.log(1000.0 / 16)
"""Predicted log-sizes are clipped here, before exp() can overflow."""


def areas(boxes: Float[Tensor, "A 4"]) -> Float[Tensor, " A"]:
    """Area of each box; zero for an empty one."""
    return (boxes[:, 2] - boxes[:, 0]).clamp(min=0) * (boxes[:, 3] - boxes[:, 1]).clamp(min=0)


def intersections(a: Float[Tensor, "A 4"], b: Float[Tensor, "B 4"]) -> Float[Tensor, "A B"]:
    """Area shared by every box of ``a`` with every box of ``b``."""
    across, down = (_shared_sides(a[:, axis::2], b[:, axis::2]) for axis in (0, 1))
    return across * down


def _shared_sides(a: Float[Tensor, "A 2"], b: Float[Tensor, "B 2"]) -> Float[Tensor, "A B"]:
    """Length that every interval of ``a`` shares with every one of ``b``."""
    begins, ends = b.T.contiguous()  # each in one piece: several times faster to spread over A rows
    return (torch.minimum(a[:, 1:], ends) - torch.maximum(a[:, :1], begins)).clamp_(min=0)


def iou(a: Float[Tensor, "A 4"], b: Float[Tensor, "B 4"]) -> Float[Tensor, "A B"]:
    """Intersection over union of all pairs; zero where both boxes are empty."""
    shared = intersections(a, b)
    union = areas(a)[:, None] + areas(b)[None, :] - shared
    return torch.where(union > 0, shared / union, shared.new_zeros(()))


def row_iou(a: Float[Tensor, "A 4"], b: Float[Tensor, "A 4"]) -> Float[Tensor, " A"]:
    """Intersection over union of each box of ``a`` with the box of ``b`` in its row."""
    shared = areas(torch.cat([torch.maximum(a[:, :2], b[:, :2]), torch.minimum(a[:, 2:], b[:, 2:])], dim=1))
    union = areas(a) + areas(b) - shared
    return torch.where(union > 0, shared / union, shared.new_zeros(()))


def containment(a: Float[Tensor, "A 4"], b: Float[Tensor, "B 4"]) -> Float[Tensor, "A B"]:
    """The larger share of either box that lies inside the other, of all pairs: shared area over the smaller one."""
    smaller = torch.minimum(areas(a)[:, None], areas(b)[None, :])
    return torch.where(smaller > 0, intersections(a, b) / smaller, smaller.new_zeros(()))


def clip(boxes: Float[Tensor, "A 4"], width: float, height: float) -> Float[Tensor, "A 4"]:
    """Boxes cut at the borders of an image."""
    limit = boxes.new_tensor([width, height, width, height])
    return torch.minimum(boxes.clamp(min=0), limit)


def _centres(boxes: Float[Tensor, "A 4"]) -> tuple[Float[Tensor, "A 2"], Float[Tensor, "A 2"]]:
    size = boxes[:, 2:] - boxes[:, :2]
    return boxes[:, :2] + 0.5 * size, size


def encode(targets: Float[Tensor, "A 4"], proposals: Float[Tensor, "A 4"]) -> Float[Tensor, "A 4"]:
    """The deltas that move each proposal onto its target."""
    to_centre, to_size = _centres(targets)
    centre, size = _centres(proposals)
    deltas = torch.cat([(to_centre - centre) / size, (to_size / size).log()], dim=1)
    return deltas * deltas.new_tensor(CODE_WEIGHTS)


def decode(deltas: Float[Tensor, "A c4"], proposals: Float[Tensor, "A 4"]) -> Float[Tensor, "A c4"]:
    """Proposals moved by their deltas; several classes side by side give as many boxes side by side."""
    count = deltas.shape[1] // 4
    centre, size = _centres(proposals)
    codes = deltas.reshape(len(deltas), count, 4) / deltas.new_tensor(CODE_WEIGHTS)
    new_centre = codes[..., :2] * size[:, None] + centre[:, None]  # (A, count, 2)
    new_size = codes[..., 2:].clamp(max=MAX_LOG_SIZE).exp() * size[:, None]
    return torch.cat([new_centre - 0.5 * new_size, new_centre + 0.5 * new_size], dim=2).reshape(deltas.shape)
