"""RoIPool, RoIAlign and the reductions of RoI features, exact and with their gradients.

RoIPool rests on ``window_max``, the maximum over many small rectangles of feature maps. Tables of "maximum over an
s x t window that starts here" are built for powers of two, each from the one before; a rectangle is then the largest
of four overlapping windows. Maps are flat, cell after cell in reading order: a window's neighbour is a fixed number of
cells away, and windows that run over an edge are never read.

On a CPU large jobs use the compiled kernels of ``tag2box.ops.kernels``; plain torch does the rest, on any device.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

_WINDOW_CHUNK = 1 << 20  # elements gathered at a time: bounds the memory beyond the result itself
_MIN_COMPILED_WINDOWS = 1 << 22  # fewer maxima are computed faster than a compiled kernel is loaded
_MIN_COMPILED_CELLS = 1 << 20  # the same for the values of ``masked_mean`` and the samples of ``roi_align``
_CHANNEL_MEAN_ROWS = 8  # proposals at a time: intermediate results then stay in the CPU cache
_LOW = (1 << 32) - 1
_LOGS = 64  # more than the logarithm of any side
_UP_TO_SINGLE = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Windows:
    """R x B rectangles, in cells; a height or width of zero or less marks an empty one."""

    image: Int[Tensor, " R"]
    top: Int[Tensor, "R B"]
    left: Int[Tensor, "R B"]
    height: Int[Tensor, "R B"]
    width: Int[Tensor, "R B"]


@dataclass(frozen=True, slots=True)
class LookUp:
    """The windows of some rows that read one table, and the four cells of that table which each of them reads."""

    log_height: int
    log_width: int
    windows: Int[Tensor, " q"]  # index into the flattened (rows, B)
    cells: Int[Tensor, "q 4"]


@dataclass(frozen=True, slots=True)
class WindowMaxima:
    """Maxima of windows, and the cell of the map that holds each; -1 for an empty window."""

    value: Float[Tensor, "R ch B"]
    cell: Int[Tensor, "R ch B"]


def roi_pool(
    features: Float[Tensor, "N ch H W"],
    boxes: Float[Tensor, "R 4"],
    image_ids: Int[Tensor, " R"],
    *,
    size: int,
    scale: float,
) -> Float[Tensor, "R ch size size"]:
    """RoIPool (Girshick, Fast R-CNN, ICCV 2015) of boxes with exclusive right and bottom edges.

    The last pixel of a box is x2 - 1.

    >>> features = torch.arange(16.0).view(1, 1, 4, 4)
    >>> roi_pool(features, torch.tensor([[0.0, 0.0, 4.0, 4.0]]), torch.tensor([0]), size=2, scale=1.0)
    tensor([[[[ 5.,  7.],
              [13., 15.]]]])
    """
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

    A bin outside the map gives 0. The gradient of a bin goes to its first maximum in reading order.
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
    """C's ``round``: halves go away from zero, while torch.round goes to the even neighbour."""
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
    """RoIAlign (He et al., Mask R-CNN, ICCV 2017) with one bilinear sample per bin, at its centre.

    Cell i of the map is centred on pixel (i + 1/2) / scale; samples beyond the outer cells take the border's values.
    Convolutions that follow get values distributed as in pre-training, while a maximum over cells is biased upwards.
    A sample is a weighted sum of four rows of the map, channels last.
    """
    height, width = features.shape[-2:]
    columns, across = _between(boxes[:, 0], boxes[:, 2], size=size, scale=scale, limit=width)
    lines, down = _between(boxes[:, 1], boxes[:, 3], size=size, scale=scale, limit=height)
    rows = features.permute(0, 2, 3, 1).reshape(-1, features.shape[1])
    places = ((lines + image_ids.view(-1, 1, 1) * height) * width, columns, down, across)
    sampled: Tensor
    if rows.device.type == "cpu" and _is_large_single(rows, across, samples=len(boxes) * size**2):
        sampled = _BilinearSamples.apply(rows.float(), *places).to(rows.dtype)  # type: ignore[no-untyped-call]
    else:
        sampled = bilinear_samples_torch(rows, *places)
    return sampled.permute(0, 3, 1, 2)


def _is_large_single(rows: Tensor, shares: Tensor, samples: int) -> bool:
    is_single = rows.dtype in _UP_TO_SINGLE and shares.dtype == torch.float32
    return is_single and samples * rows.shape[1] >= _MIN_COMPILED_CELLS


def _between(start: Tensor, end: Tensor, *, size: int, scale: float, limit: int) -> tuple[Tensor, Tensor]:
    """The two cells around each bin centre along one axis, and their weights; (R, size, 2) both."""
    share = (torch.arange(size, device=start.device, dtype=start.dtype) + 0.5) / size
    place = (start[:, None] + share * (end - start)[:, None]) * scale - 0.5
    place = place.detach().clamp(0, limit - 1)
    first = place.floor().long()
    second = (first + 1).clamp(max=limit - 1)
    return torch.stack([first, second], dim=2), torch.stack([first + 1 - place, place - first], dim=2)


class _BilinearSamples(torch.autograd.Function):
    """Saves the places of the samples for backward, not the map."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, *places: Tensor) -> Tensor:
        ctx.save_for_backward(*places)
        ctx.shape = rows.shape
        sampled: Tensor = _kernels("box_kernels").bilinear_forward(rows, *places)
        return sampled

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        of_rows = _kernels("box_kernels").bilinear_backward(grads[0], *ctx.saved_tensors, ctx.shape)
        return of_rows, None, None, None, None


def bilinear_samples_torch(
    rows: Float[Tensor, "cells ch"],
    lines: Int[Tensor, "R size 2"],
    columns: Int[Tensor, "R size 2"],
    down: Float[Tensor, "R size 2"],
    across: Float[Tensor, "R size 2"],
) -> Float[Tensor, "R size size ch"]:
    """Bilinear samples in plain torch: any device, any dtype. Each is an ``embedding_bag`` of four rows of the map."""
    cells = (lines[:, :, None, :, None] + columns[:, None, :, None, :]).reshape(-1, 4)
    shares = (down[:, :, None, :, None] * across[:, None, :, None, :]).reshape(-1, 4)
    sampled = functional.embedding_bag(cells, rows, per_sample_weights=shares.to(rows.dtype), mode="sum")
    return sampled.view(len(lines), lines.shape[1], columns.shape[1], rows.shape[1])


def window_max(features: Float[Tensor, "N ch H W"], windows: Windows) -> Float[Tensor, "R ch B"]:
    """Maximum of each rectangle in every channel; 0 for an empty one. NaN is larger than every number."""
    result: Tensor = _WindowMax.apply(features, windows)  # type: ignore[no-untyped-call]
    return result


class _WindowMax(torch.autograd.Function):
    """Saves the cell of each maximum for backward."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, windows: Windows) -> Tensor:
        found = find_maxima(features, windows)
        ctx.save_for_backward(found.cell, windows.image)
        ctx.shape = features.shape
        return found.value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        cell, image = ctx.saved_tensors
        return scatter_gradient(grads[0], cell, image, ctx.shape), None


def find_maxima(features: Float[Tensor, "N ch H W"], windows: Windows) -> WindowMaxima:
    """Maxima and their cells, by the compiled kernel if the job is large enough."""
    if _use_window_max_kernel(features, windows.top.numel()):
        maxima: WindowMaxima = _kernels().window_max_forward(features, windows)
        return maxima
    return find_maxima_torch(features, windows)


def scatter_gradient(
    grad: Float[Tensor, "R ch B"], cell: Int[Tensor, "R ch B"], image: Int[Tensor, " R"], shape: torch.Size
) -> Float[Tensor, "N ch H W"]:
    """Gradient of ``window_max``: each maximum's gradient is added to the cell that holds it."""
    if _use_window_max_kernel(grad, image.numel() * cell.shape[2]):
        scattered: Tensor = _kernels().window_max_backward(grad, cell, image, shape)
        return scattered
    return scatter_gradient_torch(grad, cell, image, shape)


def _use_window_max_kernel(x: Tensor, windows: int) -> bool:
    return x.device.type == "cpu" and x.dtype in _UP_TO_SINGLE and windows * x.shape[1] >= _MIN_COMPILED_WINDOWS


def cell_dtype(cells: int) -> torch.dtype:
    """The smallest integer type that holds every cell of a map, and -1: maxima are many, and kept for backward."""
    return torch.int16 if cells <= torch.iinfo(torch.int16).max else torch.int32


def look_ups(windows: Windows, rows: Int[Tensor, " r"], width: int) -> list[LookUp]:
    """The tables that the windows of some rows read, in the order in which they can be built."""
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


def find_maxima_torch(features: Float[Tensor, "N ch H W"], windows: Windows) -> WindowMaxima:
    """``find_maxima`` in plain torch: any device, any dtype."""
    _, channels, height, width = features.shape
    count, bins = windows.top.shape
    value = features.new_zeros(count * bins, channels)
    cell = torch.full(value.shape, -1, dtype=cell_dtype(height * width), device=value.device)
    for image, map_ in enumerate(features.detach()):
        rows = (windows.image == image).nonzero().flatten()
        flat = (rows[:, None] * bins + torch.arange(bins, device=rows.device)).flatten()
        table = map_.permute(1, 2, 0).reshape(-1, channels)
        levels, rank = table.unique(return_inverse=True)  # ranks order like their values and fit 32 bits
        rank = rank.clamp(max=len(levels) - int(levels.isnan().sum()))  # NaNs sort last, each with a rank of its own
        reverse = _LOW - torch.arange(len(table), device=rows.device)  # on ties the earlier cell is the larger
        for where, packed in _maxima((rank << 32) | reverse[:, None], look_ups(windows, rows, width), width):
            value[flat[where]] = levels[packed >> 32]
            cell[flat[where]] = (_LOW - (packed & _LOW)).to(cell.dtype)
    return WindowMaxima(_by_channel(value, count), _by_channel(cell, count))


def scatter_gradient_torch(
    grad: Float[Tensor, "R ch B"], cell: Int[Tensor, "R ch B"], image: Int[Tensor, " R"], shape: torch.Size
) -> Float[Tensor, "N ch H W"]:
    """``scatter_gradient`` in plain torch: any device, any dtype."""
    images, channels, height, width = shape
    total = grad.new_zeros(images * height * width + 1, channels)  # one extra row for the gradients of empty windows
    step = max(1, _WINDOW_CHUNK // max(1, channels * cell.shape[2]))
    for grads, cells, images_ in zip(grad.split(step), cell.split(step), image.split(step), strict=True):
        flat = torch.where(cells < 0, len(total) - 1, cells + images_.view(-1, 1, 1) * (height * width))
        rows = flat.transpose(1, 2).reshape(-1, channels)
        total.scatter_add_(0, rows, grads.transpose(1, 2).reshape(-1, channels))
    return total[:-1].view(images, height, width, channels).permute(0, 3, 1, 2)


def _maxima(table: Int[Tensor, "cells ch"], tables: list[LookUp], width: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (windows, their packed maxima), a bounded number at a time."""
    tall, log_height = table, 0
    wide, log_width = table, 0
    for look_up in tables:
        if look_up.log_height > log_height:
            for log in range(log_height, look_up.log_height):
                tall = _double(tall, width << log)
            wide, log_height, log_width = tall, look_up.log_height, 0
        for log in range(log_width, look_up.log_width):
            wide = _double(wide, 1 << log)
        log_width = look_up.log_width
        step = max(1, _WINDOW_CHUNK // max(1, table.shape[1]))
        for where, cells in zip(look_up.windows.split(step), look_up.cells.split(step), strict=True):
            corners = [wide.index_select(0, corner) for corner in cells.unbind(dim=1)]
            yield where, torch.stack(corners).amax(dim=0)


def _double(table: Int[Tensor, "cells ch"], shift: int) -> Int[Tensor, "fewer ch"]:
    """Table of windows twice as long: the maximum of each cell with the one ``shift`` cells later."""
    return torch.maximum(table[:-shift], table[shift:])


def _by_channel(rows: Tensor, count: int) -> Tensor:
    return rows.view(count, -1 if count else 0, rows.shape[1]).transpose(1, 2)


def masked_mean(
    x: Float[Tensor, "R n F"], factors: Float[Tensor, "R n"], bias: Float[Tensor, " F"]
) -> Float[Tensor, "R F"]:
    """Mean over n cells of ReLU6(factor * x + bias)."""
    if not _use_masked_mean_kernel(x):
        return masked_mean_torch(x, factors, bias)
    result: Tensor = _MaskedMean.apply(x, factors, bias)  # type: ignore[no-untyped-call]
    return result


def masked_mean_torch(
    x: Float[Tensor, "R n F"], factors: Float[Tensor, "R n"], bias: Float[Tensor, " F"]
) -> Float[Tensor, "R F"]:
    """``masked_mean`` in plain torch: any device, any dtype."""
    return functional.relu6(x * factors[:, :, None].to(x.dtype) + bias).mean(dim=1)


class _MaskedMean(torch.autograd.Function):
    """Saves only x, which all augmented copies share, for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factors: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, factors, bias)
        mean: Tensor = _kernels().masked_mean_forward(x, factors, bias)
        return mean

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        kernels = _kernels()
        (x, factors, bias), needed, grad = ctx.saved_tensors, ctx.needs_input_grad, grads[0]
        of_x = of_factors = of_bias = None
        if needed[0] or needed[2]:
            of_x, of_bias = kernels.masked_mean_backward(x, factors, bias, grad)
        if needed[1]:
            of_factors = kernels.masked_mean_factor_grad(x, factors, bias, grad)
        return of_x, of_factors, of_bias


def _use_masked_mean_kernel(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype in _UP_TO_SINGLE and x.numel() >= _MIN_COMPILED_CELLS


def channel_mean(x: Float[Tensor, "R n F"], bias: Float[Tensor, " F"]) -> Float[Tensor, "R n"]:
    """Mean over channels of ReLU6(x + bias), without an intermediate tensor of the size of x."""
    result: Tensor = _ChannelMean.apply(x, bias)  # type: ignore[no-untyped-call]
    return result


class _ChannelMean(torch.autograd.Function):
    """Saves only x, which the neck stores anyway; proposals without gradient cost nothing in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, bias)
        blocks = x.split(_CHANNEL_MEAN_ROWS)
        return torch.cat([x.new_zeros(0, x.shape[1]), *(functional.relu6(b + bias).mean(dim=2) for b in blocks)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, bias = ctx.saved_tensors
        share = grads[0] / x.shape[2]
        of_x, of_bias = torch.zeros_like(x), torch.zeros_like(bias)
        for rows in share.any(dim=1).nonzero().flatten().split(_CHANNEL_MEAN_ROWS):
            inner = x[rows] + bias
            passed = ((inner > 0) & (inner < 6)).to(x.dtype) * share[rows, :, None]
            of_x[rows] = passed
            of_bias += passed.sum(dim=(0, 1))
        return of_x, of_bias


def _kernels(name: str = "kernels") -> ModuleType:
    """A module of compiled kernels, imported on first use: numba takes a while to load."""
    return import_module(f"tag2box.ops.{name}")
