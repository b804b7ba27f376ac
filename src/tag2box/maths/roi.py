"""RoIPool (Girshick, "Fast R-CNN", 2015): max-pooling of boxes to a fixed grid, exact and vectorised in plain torch.

A pooled cell is the maximum over a small rectangle of the map. Tables of "maximum over an s x t window starting here"
are built one after the other, each from the one before; a rectangle is then one look-up where s x t is its size, and
the larger of two or four overlapping ones otherwise. Tables keep channels last, so that a look-up copies whole rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

_EXACT = 3  # windows up to this side have a table of their own; larger ones are covered by powers of two
_CHUNK = 1 << 20  # elements looked up at a time: bounds the memory beyond the result itself
_LOW = (1 << 32) - 1


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
    The result keeps channels last in memory.
    """
    height, width = features.shape[-2:]
    cells = _round_half_away(corners.detach().float() * scale)
    left, right = _bins(cells[:, 0], cells[:, 2], size=size, limit=width)
    top, bottom = _bins(cells[:, 1], cells[:, 3], size=size, limit=height)
    shape = (len(corners), size, size)
    windows = _Windows(
        image=image_ids.view(-1, 1, 1).expand(shape).reshape(-1),
        top=top[:, :, None].expand(shape).reshape(-1),
        left=left[:, None, :].expand(shape).reshape(-1),
        height=(bottom - top)[:, :, None].expand(shape).reshape(-1),
        width=(right - left)[:, None, :].expand(shape).reshape(-1),
    )
    rows = _window_max(features, windows)  # (R * size * size, ch)
    return rows.view(*shape, features.shape[1]).permute(0, 3, 1, 2)


def roi_align(
    features: Float[Tensor, "N ch H W"],
    boxes: Float[Tensor, "R 4"],
    image_ids: Int[Tensor, " R"],
    *,
    size: int,
    scale: float,
) -> Float[Tensor, "R ch size size"]:
    """RoIAlign (He et al., "Mask R-CNN", 2017) with one bilinear sample a bin, at its centre.

    Cell i of the map is centred on pixel (i + 1/2) / scale; samples beyond the outer cells take the border's values.
    Convolutions that follow see values of the kind they were trained on, where a maximum over cells is biased upwards.
    """
    table = features.permute(0, 2, 3, 1)  # (N, H, W, ch)
    _, height, width, channels = table.shape
    left, right, across = _between(boxes[:, 0], boxes[:, 2], size=size, scale=scale, limit=width)
    top, bottom, down = _between(boxes[:, 1], boxes[:, 3], size=size, scale=scale, limit=height)
    rows = table.reshape(-1, channels)
    shape = (len(boxes), size, size)

    def cells(y: Tensor, x: Tensor) -> Tensor:
        index = (image_ids.view(-1, 1, 1) * height + y[:, :, None]) * width + x[:, None, :]
        return rows.index_select(0, index.reshape(-1)).view(*shape, channels)

    weight = across.to(rows.dtype).view(-1, 1, size, 1)
    upper = torch.lerp(cells(top, left), cells(top, right), weight)
    lower = torch.lerp(cells(bottom, left), cells(bottom, right), weight)
    return torch.lerp(upper, lower, down.to(rows.dtype).view(-1, size, 1, 1)).permute(0, 3, 1, 2)


def _between(start: Tensor, end: Tensor, *, size: int, scale: float, limit: int) -> tuple[Tensor, Tensor, Tensor]:
    """The two cells around each bin centre along one axis, and how far from the first to the second; (R, size) each."""
    share = (torch.arange(size, device=start.device, dtype=start.dtype) + 0.5) / size
    place = (start[:, None] + share * (end - start)[:, None]) * scale - 0.5
    place = place.detach().clamp(0, limit - 1)
    first = place.floor().long()
    return first, (first + 1).clamp(max=limit - 1), place - first


@dataclass(frozen=True, slots=True)
class _Windows:
    """Q rectangles of feature maps, in cells; a side of zero or less marks an empty one."""

    image: Int[Tensor, " Q"]
    top: Int[Tensor, " Q"]
    left: Int[Tensor, " Q"]
    height: Int[Tensor, " Q"]
    width: Int[Tensor, " Q"]


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


def _window_max(features: Tensor, windows: _Windows) -> Float[Tensor, "Q ch"]:
    if torch.is_grad_enabled() and features.requires_grad:
        result: Tensor = _WindowMax.apply(features, windows)  # type: ignore[no-untyped-call]
        return result
    table = features.permute(0, 2, 3, 1).contiguous()
    rows = table.new_zeros(len(windows.image), table.shape[-1])
    for where, found in _look_up(table, windows):
        rows[where] = found
    return rows


class _WindowMax(torch.autograd.Function):
    """The maximum of each window and, for the way back, where it was found."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, windows: _Windows) -> Tensor:
        table = _pack(features.permute(0, 2, 3, 1))
        rows = features.new_zeros(len(windows.image), table.shape[-1])
        cell = torch.full(rows.shape, -1, dtype=torch.int32, device=rows.device)
        for where, found in _look_up(table, windows):
            value, index = _unpack(found)
            rows[where] = value.to(rows.dtype)
            cell[where] = index
        ctx.save_for_backward(cell)
        ctx.shape = features.shape
        return rows

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (cell,) = ctx.saved_tensors
        n, channels, height, width = ctx.shape
        # one row more than there are cells: empty windows drop their gradient there
        total = grads[0].new_zeros(n * height * width + 1, channels)
        step = max(1, _CHUNK // max(1, channels))
        for index, grad in zip(torch.split(cell, step), torch.split(grads[0], step), strict=True):
            total.scatter_add_(0, torch.where(index < 0, n * height * width, index).long(), grad)
        return total[:-1].view(n, height, width, channels).permute(0, 3, 1, 2), None


def _pack(table: Float[Tensor, "N H W ch"]) -> Int[Tensor, "N H W ch"]:
    """Value and place in one integer: its order is that of the values and, among equals, of the earlier cells."""
    bits = (table.float() + 0.0).contiguous().view(torch.int32)  # + 0.0 makes -0.0 equal to 0.0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    n, height, width, _ = table.shape
    place = torch.arange(n * height * width, device=table.device).view(n, height, width, 1)
    return (ordered << 32) | (_LOW - place)


def _unpack(packed: Int[Tensor, "Q ch"]) -> tuple[Float[Tensor, "Q ch"], Int[Tensor, "Q ch"]]:
    ordered = (packed >> 32).int()
    bits = torch.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered)
    return bits.view(torch.float32), (_LOW - (packed & _LOW)).int()


def _look_up(table: Tensor, windows: _Windows) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (rows, their maxima) for all windows that are not empty, a bounded number at a time."""
    side_y, side_x = _table_side(windows.height), _table_side(windows.width)
    filled = (windows.height > 0) & (windows.width > 0)
    for y in _ladder(side_y[filled]):
        table = table if y == 1 else _grow(table, axis=1, side=y)
        wide = table
        in_row = filled & (side_y == y)
        for x in _ladder(side_x[in_row]):
            wide = wide if x == 1 else _grow(wide, axis=2, side=x)
            group = (in_row & (side_x == x)).nonzero().squeeze(1)
            for where in torch.split(group, max(1, _CHUNK // max(1, table.shape[-1]))):
                yield where, _gather(wide, windows, where, (y, x))


def _table_side(side: Int[Tensor, " Q"]) -> Int[Tensor, " Q"]:
    """The side of the table that answers for a window: its own if small, else the largest power of two inside it."""
    power = 2 ** side.clamp(min=1).double().log2().floor().long()
    return torch.where(side <= _EXACT, side, power)


def _ladder(sides: Int[Tensor, " Q"]) -> list[int]:
    """Table sides from 1 up to the largest one asked for; each is at most twice the one before."""
    largest = int(sides.max()) if len(sides) else 0
    return [*range(1, min(largest, _EXACT) + 1), *(2**k for k in range(2, 31) if 2**k <= largest)]


def _grow(table: Tensor, *, axis: int, side: int) -> Tensor:
    """The table of the next ladder side: the larger of two overlapping windows of the side before."""
    before = side - 1 if side <= _EXACT + 1 else side // 2
    kept = table.shape[axis] - (side - before)
    return torch.maximum(table.narrow(axis, 0, kept), table.narrow(axis, side - before, kept))


def _gather(table: Tensor, windows: _Windows, where: Tensor, sides: tuple[int, int]) -> Tensor:
    """The maxima of chosen windows from the table of the given sides: one look-up an axis if exact, else two."""
    rows = table.reshape(-1, table.shape[-1])
    top, left = windows.top[where], windows.left[where]
    tops = [top] if sides[0] <= _EXACT else [top, top + windows.height[where] - sides[0]]
    lefts = [left] if sides[1] <= _EXACT else [left, left + windows.width[where] - sides[1]]
    found: Tensor | None = None
    for y in tops:
        for x in lefts:
            index = (windows.image[where] * table.shape[1] + y) * table.shape[2] + x
            values = rows.index_select(0, index)
            found = values if found is None else torch.maximum(found, values)
    assert found is not None
    return found
