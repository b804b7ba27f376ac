"""The maximum over many small rectangles of feature maps, exact, with the gradient to the first maximum.

Tables of "maximum over an s x t window starting here" are built for powers of two, each from the one before; a
rectangle is then the largest of four overlapping windows. Maps are flat, cell after cell in reading order: a window's
neighbour is a fixed number of cells away, and what runs over an edge is never looked up.

On a CPU large jobs go to the compiled kernel in ``window_max_cpu``; plain torch does the rest, on any device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

_CHUNK = 1 << 20  # elements looked up at a time: bounds the memory beyond the result itself
_WORTH_COMPILING = 1 << 22  # fewer results are there before a compiled kernel is loaded
_LOW = (1 << 32) - 1
_LOGS = 64  # more than the logarithm of any side


@dataclass(frozen=True, slots=True)
class Windows:
    """R times B rectangles, in cells; a side of zero or less marks an empty one."""

    image: Int[Tensor, " R"]
    top: Int[Tensor, "R B"]
    left: Int[Tensor, "R B"]
    height: Int[Tensor, "R B"]
    width: Int[Tensor, "R B"]


@dataclass(frozen=True, slots=True)
class LookUp:
    """The windows of some rows that one table answers for, and the four cells of the table to look at."""

    log_height: int
    log_width: int
    windows: Int[Tensor, " q"]  # in the flat list of rows times B
    cells: Int[Tensor, "q 4"]


@dataclass(frozen=True, slots=True)
class Found:
    """Maxima of windows, and the cell of the map each was found in; -1 for an empty one."""

    value: Float[Tensor, "R ch B"]
    cell: Int[Tensor, "R ch B"]


def window_max(features: Float[Tensor, "N ch H W"], windows: Windows) -> Float[Tensor, "R ch B"]:
    """The maximum of each rectangle in every channel; 0 for an empty one. NaN wins over every number."""
    result: Tensor = _WindowMax.apply(features, windows)  # type: ignore[no-untyped-call]
    return result


class _WindowMax(torch.autograd.Function):
    """The maxima and, for the way back, where they were found."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, windows: Windows) -> Tensor:
        found = find(features, windows)
        ctx.save_for_backward(found.cell, windows.image)
        ctx.shape = features.shape
        return found.value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        cell, image = ctx.saved_tensors
        return spread(grads[0], cell, image, ctx.shape), None


def find(features: Float[Tensor, "N ch H W"], windows: Windows) -> Found:
    """Maxima and their cells, by whichever way is faster."""
    if _is_compiled(features, windows.top.numel()):
        from tag2box.maths import window_max_cpu

        return window_max_cpu.find(features, windows)
    return find_with_torch(features, windows)


def spread(
    grad: Float[Tensor, "R ch B"], cell: Int[Tensor, "R ch B"], image: Int[Tensor, " R"], shape: torch.Size
) -> Float[Tensor, "N ch H W"]:
    """The gradient of every maximum added to the cell it was found in."""
    if _is_compiled(grad, image.numel() * cell.shape[2]):
        from tag2box.maths import window_max_cpu

        return window_max_cpu.spread(grad, cell, image, shape)
    return spread_with_torch(grad, cell, image, shape)


def _is_compiled(x: Tensor, windows: int) -> bool:
    single = x.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return x.device.type == "cpu" and single and windows * x.shape[1] >= _WORTH_COMPILING


def look_ups(windows: Windows, rows: Int[Tensor, " r"], width: int) -> list[LookUp]:
    """The tables that the windows of some rows ask for, in the order they can be built."""
    top, left = windows.top[rows].flatten(), windows.left[rows].flatten()
    height, across = windows.height[rows].flatten(), windows.width[rows].flatten()
    log_y, log_x = (side.clamp(min=1).double().log2().floor().long() for side in (height, across))
    lines = torch.stack([top, top + height - (1 << log_y)], dim=1)
    columns = torch.stack([left, left + across - (1 << log_x)], dim=1)
    cells = (lines[:, :, None] * width + columns[:, None, :]).flatten(1)  # (q, 4)
    table = torch.where((height > 0) & (across > 0), log_y * _LOGS + log_x, -1)
    order = table.argsort(stable=True)
    tables, counts = table[order].unique_consecutive(return_counts=True)
    groups = zip(tables.tolist(), order.split(counts.tolist()), strict=True)
    return [LookUp(t // _LOGS, t % _LOGS, group, cells[group]) for t, group in groups if t >= 0]


# ---------------------------------------------------------------- in plain torch


def find_with_torch(features: Float[Tensor, "N ch H W"], windows: Windows) -> Found:
    """Maxima and their cells on any device, in any precision."""
    _, channels, _, width = features.shape
    count, bins = windows.top.shape
    value = features.new_zeros(count * bins, channels)
    cell = torch.full(value.shape, -1, dtype=torch.int32, device=value.device)
    for image, map_ in enumerate(features.detach()):
        rows = (windows.image == image).nonzero().flatten()
        flat = (rows[:, None] * bins + torch.arange(bins, device=rows.device)).flatten()
        table = map_.permute(1, 2, 0).reshape(-1, channels)
        levels, rank = table.unique(return_inverse=True)  # a rank orders as its value, and fits half a word
        rank = rank.clamp(max=len(levels) - int(levels.isnan().sum()))  # NaNs come last, each with its own rank
        reverse = _LOW - torch.arange(len(table), device=rows.device)  # so that of equals the earlier cell is larger
        for where, packed in _maxima((rank << 32) | reverse[:, None], look_ups(windows, rows, width), width):
            value[flat[where]] = levels[packed >> 32]
            cell[flat[where]] = (_LOW - (packed & _LOW)).int()
    return Found(_by_channel(value, count), _by_channel(cell, count))


def spread_with_torch(
    grad: Float[Tensor, "R ch B"], cell: Int[Tensor, "R ch B"], image: Int[Tensor, " R"], shape: torch.Size
) -> Float[Tensor, "N ch H W"]:
    """The gradient on any device, in any precision."""
    images, channels, height, width = shape
    total = grad.new_zeros(images * height * width + 1, channels)  # one row more, where empty windows drop theirs
    step = max(1, _CHUNK // max(1, channels * cell.shape[2]))
    for grads, cells, images_ in zip(grad.split(step), cell.split(step), image.split(step), strict=True):
        flat = torch.where(cells < 0, len(total) - 1, cells + images_.view(-1, 1, 1) * (height * width))
        rows = flat.transpose(1, 2).reshape(-1, channels)
        total.scatter_add_(0, rows, grads.transpose(1, 2).reshape(-1, channels))
    return total[:-1].view(images, height, width, channels).permute(0, 3, 1, 2)


def _maxima(table: Int[Tensor, "cells ch"], asked: list[LookUp], width: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (windows, their maxima), a bounded number at a time."""
    tall, log_height = table, 0
    wide, log_width = table, 0
    for look_up in asked:
        if look_up.log_height > log_height:
            for log in range(log_height, look_up.log_height):
                tall = _grow(tall, width << log)
            wide, log_height, log_width = tall, look_up.log_height, 0
        for log in range(log_width, look_up.log_width):
            wide = _grow(wide, 1 << log)
        log_width = look_up.log_width
        step = max(1, _CHUNK // max(1, table.shape[1]))
        for where, cells in zip(look_up.windows.split(step), look_up.cells.split(step), strict=True):
            corners = [wide.index_select(0, corner) for corner in cells.unbind(dim=1)]
            yield where, torch.stack(corners).amax(dim=0)


def _grow(table: Int[Tensor, "cells ch"], shift: int) -> Int[Tensor, "fewer ch"]:
    """Windows twice as long: the larger of each with the one ``shift`` cells on."""
    return torch.maximum(table[:-shift], table[shift:])


def _by_channel(rows: Tensor, count: int) -> Tensor:
    return rows.view(count, -1 if count else 0, rows.shape[1]).transpose(1, 2)
