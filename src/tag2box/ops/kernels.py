"""CPU kernels compiled by numba for operations of ``tag2box.ops`` that torch has no fast counterpart for."""

import math
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numba
import numpy as np
import torch
from torch import Tensor

from tag2box.ops.roi import WindowMaxima, Windows, cell_dtype

_T = TypeVar("_T")
_SIX = np.float32(6)
_ZERO = np.float32(0)
_LANES = 32  # channels side by side: the 16-bit ranks of a cell are one cache line
_CHANNELS = 32  # whose gradients are summed at a time: long runs of memory are read, and the sums stay in the CPU cache
_DIGIT = 11  # bits sorted at a time; three digits cover a key of 32 bits
_SHIFTS = (np.uint64(32), np.uint64(32 + _DIGIT), np.uint64(32 + 2 * _DIGIT))
_DIGIT_MASK = np.uint64((1 << _DIGIT) - 1)
_HALF = np.uint64(32)
_LOW = np.uint64((1 << 32) - 1)
_SIGN = np.uint64(1 << 63)
_MAGNITUDE = np.int32(0x7FFFFFFF)
_INFINITY = np.int32(0x7F800000)
_MIN_BLOCK = 1 << 24  # bytes of a result whose memory is used again
_SPARE_BLOCKS = 3  # maxima and cells of RoIPool, or samples of RoIAlign, and one more
_BLOCKS: list[Any] = []
_LOCK = threading.Lock()
_UNUSED = 2  # references: that of the list, and the argument of ``getrefcount``
_LOGS = 64  # more than the logarithm of any side
_HALF_ROWS = 8  # proposals of half precision that are converted at a time


def compiled(kernel: Callable[..., _T]) -> Callable[..., _T]:
    """Compile a kernel on first call, without the GIL, and cache it on disk if there is a writable folder."""
    try:
        fast: Callable[..., _T] = numba.njit(nogil=True, cache=True, error_model="numpy")(kernel)
    except RuntimeError:  # no writable cache folder
        fast = numba.njit(nogil=True, error_model="numpy")(kernel)
    return fast


def in_threads(work: Callable[[int, int], None], count: int, block: int = 1) -> None:
    """Split a range into as many parts as torch has threads, at multiples of ``block``; kernels release the GIL."""
    threads = torch.get_num_threads()
    blocks = -(-count // block)
    edges = [min(count, block * (blocks * i // threads)) for i in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, edges[:-1], edges[1:]))


def large_empty(shape: tuple[int, ...], dtype: Any) -> Any:
    """Uninitialised array in the memory of an earlier result that nothing refers to any more, if there is one.

    Large results are made and dropped in every training step, and the first touch of new memory costs more than the
    computation. At most ``_SPARE_BLOCKS`` are held; numpy, unlike torch, asks for huge pages for a new one.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if size < _MIN_BLOCK:
        return np.empty(shape, dtype)
    with _LOCK:
        for i in range(len(_BLOCKS)):
            is_unused = sys.getrefcount(_BLOCKS[i]) <= _UNUSED
            if is_unused and size <= _BLOCKS[i].nbytes <= 2 * size:
                _BLOCKS.append(_BLOCKS.pop(i))  # the last one is the most recent
                return _BLOCKS[-1][:size].view(dtype).reshape(shape)
        _BLOCKS.append(np.empty(size, np.uint8))
        del _BLOCKS[:-_SPARE_BLOCKS]
        return _BLOCKS[-1].view(dtype).reshape(shape)


def masked_mean_forward(x: Tensor, factors: Tensor, bias: Tensor) -> Tensor:
    """Forward of ``masked_mean``, in single precision whatever the dtype of x."""
    weights, biases = _single(factors), _single(bias)
    out = np.empty((x.shape[0], x.shape[2]), np.float32)  # numpy allocates huge pages, torch does not

    def work(first: int, last: int) -> None:
        for rows in _row_blocks(x, first, last):
            own = _single(x[rows])
            _masked_mean_forward(own, weights[rows], biases, 0, len(own), out[rows])

    in_threads(work, len(x))
    return torch.from_numpy(out)


def masked_mean_backward(x: Tensor, factors: Tensor, bias: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the bias."""
    weights, biases, grads = _single(factors), _single(bias), _single(grad)
    is_single, of_bias = x.dtype == torch.float32, np.empty_like(grads)
    of_x = torch.from_numpy(large_empty(tuple(x.shape), np.float32)) if is_single else torch.empty_like(x)

    def work(first: int, last: int) -> None:
        for rows in _row_blocks(x, first, last):
            own = _single(x[rows])
            slopes = of_x[rows].numpy() if is_single else np.empty_like(own)
            _masked_mean_backward(own, weights[rows], biases, grads[rows], 0, len(own), slopes, of_bias[rows])
            if not is_single:
                of_x[rows] = torch.from_numpy(slopes)

    in_threads(work, len(x))
    return of_x, torch.from_numpy(of_bias).sum(dim=0)


def masked_mean_factor_grad(x: Tensor, factors: Tensor, bias: Tensor, grad: Tensor) -> Tensor:
    """Gradient of the factors, for learned masks."""
    weights, biases, grads = _single(factors), _single(bias), _single(grad)
    of_factors = np.empty(factors.shape, np.float32)

    def work(first: int, last: int) -> None:
        for rows in _row_blocks(x, first, last):
            own = _single(x[rows])
            _masked_mean_factor_grad(own, weights[rows], biases, grads[rows], 0, len(own), of_factors[rows])

    in_threads(work, len(x))
    return torch.from_numpy(of_factors)


def _single(tensor: Tensor) -> Any:
    return tensor.detach().float().contiguous().numpy()


def _row_blocks(x: Tensor, first: int, last: int) -> Iterator[slice]:
    """Rows that are converted to single precision at a time; all of them if there is nothing to convert."""
    step = max(1, last - first) if x.dtype == torch.float32 else _HALF_ROWS
    return (slice(start, min(start + step, last)) for start in range(first, last, step))


@compiled
def _masked_mean_forward(x: Any, factors: Any, bias: Any, first: int, last: int, out: Any) -> None:
    cells = x.shape[1]
    share = np.float32(1.0 / cells)
    for row in range(first, last):
        sums = out[row]
        sums[:] = _ZERO
        for cell in range(cells):
            factor, values = factors[row, cell], x[row, cell]
            for column in range(len(sums)):
                sums[column] += min(max(factor * values[column] + bias[column], _ZERO), _SIX)
        for column in range(len(sums)):
            sums[column] *= share


@compiled
def _masked_mean_backward(
    x: Any, factors: Any, bias: Any, grad: Any, first: int, last: int, of_x: Any, of_bias: Any
) -> None:
    cells = x.shape[1]
    share = np.float32(1.0 / cells)
    for row in range(first, last):
        biases, grads = of_bias[row], grad[row]
        biases[:] = _ZERO
        for cell in range(cells):
            factor, values, slopes = factors[row, cell], x[row, cell], of_x[row, cell]
            for column in range(len(biases)):
                inner = factor * values[column] + bias[column]
                passed = grads[column] * share if (inner > _ZERO) & (inner < _SIX) else _ZERO
                slopes[column] = passed * factor
                biases[column] += passed


@compiled
def _masked_mean_factor_grad(
    x: Any, factors: Any, bias: Any, grad: Any, first: int, last: int, of_factors: Any
) -> None:
    cells = x.shape[1]
    share = np.float32(1.0 / cells)
    for row in range(first, last):
        for cell in range(cells):
            factor, values, total = factors[row, cell], x[row, cell], _ZERO
            for column in range(len(bias)):
                inner = factor * values[column] + bias[column]
                if (inner > _ZERO) & (inner < _SIX):
                    total += grad[row, column] * values[column]
            of_factors[row, cell] = total * share


def window_max_forward(features: Tensor, windows: Windows) -> WindowMaxima:
    """Maxima and their cells; half precision is computed exactly in single precision.

    The cells of a channel are sorted once, and tables hold ranks, which have 16 bits on maps of fewer than 65,535
    cells: a quarter of a value with its cell. A maximum's rank then gives both.
    """
    maps = features.detach().float().contiguous()
    images, channels, height, width = maps.shape
    bits = maps.view(torch.int32).view(images, channels, -1).numpy()
    count, bins = windows.top.shape
    corners, table = np.empty((count, bins, 4), np.int32), np.empty(count, np.int64)
    sides = (side.contiguous().numpy() for side in (windows.top, windows.left, windows.height, windows.width))
    _plan(*sides, width, corners, table)
    rank_type = np.uint16 if height * width < (1 << 16) - 1 else np.uint32
    value = large_empty((count, channels, bins), np.int32)
    cell = large_empty(value.shape, np.int16 if cell_dtype(height * width) == torch.int16 else np.int32)
    image_ids = windows.image.numpy()
    orders = [np.flatnonzero(image_ids == image) for image in range(images)]
    orders = [rows[np.argsort(table[rows], kind="stable")] for rows in orders]

    def work(first: int, last: int) -> None:
        tables = np.zeros((3, height * width * _LANES), rank_type)
        for image, order in enumerate(orders):
            if len(order):
                _window_max_forward(bits[image], order, table, corners, width, (first, last), tables, (value, cell))

    in_threads(work, channels, block=_LANES)
    found = torch.from_numpy(value).view(torch.float32)
    return WindowMaxima(found.to(features.dtype), torch.from_numpy(cell))


def window_max_backward(grad: Tensor, cell: Tensor, image: Tensor, shape: torch.Size) -> Tensor:
    """Gradient, summed in single precision in the order of the windows, whatever the number of threads."""
    total = np.zeros((shape[0], shape[1], shape[2] * shape[3]), np.float32)
    arrays = (grad.detach().float().contiguous().numpy(), cell.contiguous().numpy(), image.numpy())
    in_threads(lambda first, last: _window_max_backward(*arrays, first, last, total), shape[1], block=_LANES)
    return torch.from_numpy(total).view(shape).to(grad.dtype)


@compiled
def _log2(x: int) -> int:
    log = 0
    while (2 << log) <= x:
        log += 1
    return log


@compiled
def _plan(top: Any, left: Any, height: Any, width: Any, columns: int, corners: Any, table: Any) -> None:
    """The table that the windows of each row read, and the four cells that each window reads of it.

    The table is that of the row's smallest window. A window of more than twice its sides is stored as
    (-1 - first cell, height, width), and an empty one with a height of zero.
    """
    for row in range(top.shape[0]):
        low, narrow = 1 << 30, 1 << 30
        for b in range(top.shape[1]):
            if height[row, b] > 0 and width[row, b] > 0:
                low, narrow = min(low, height[row, b]), min(narrow, width[row, b])
        log_y, log_x = (_log2(low), _log2(narrow)) if low < 1 << 30 else (0, 0)
        table[row] = log_y * _LOGS + log_x
        for b in range(top.shape[1]):
            high, wide = height[row, b], width[row, b]
            first, own = top[row, b] * columns + left[row, b], corners[row, b]
            across, down = wide - (1 << log_x), (high - (1 << log_y)) * columns
            if high <= 0 or wide <= 0:
                own[0], own[1], own[2] = -1, 0, 0
            elif high > 2 << log_y or wide > 2 << log_x:
                own[0], own[1], own[2] = -1 - first, high, wide
            else:
                own[0], own[1], own[2], own[3] = first, first + across, first + down, first + across + down


@compiled
def _sort_cells(bits: Any, keys: Any, spare: Any, starts: Any) -> None:
    """Sort (value, cell) of a channel into ``spare``, ascending; of equal values the earliest cell is last."""
    count = len(bits)
    starts[:] = 0
    for i in range(count):
        key = bits[count - 1 - i]
        if (key & _MAGNITUDE) > _INFINITY:  # NaN, of either sign
            key = _MAGNITUDE
        elif key < 0:
            key = (key ^ _MAGNITUDE) + np.int32(1)  # + 1 makes -0.0 equal to 0.0
        packed = (np.uint64(np.int64(key)) << _HALF) ^ _SIGN | np.uint64(count - 1 - i)
        keys[i] = packed
        starts[0, (packed >> _SHIFTS[0]) & _DIGIT_MASK] += 1
        starts[1, (packed >> _SHIFTS[1]) & _DIGIT_MASK] += 1
        starts[2, packed >> _SHIFTS[2]] += 1
    _sort_digit(keys, _SHIFTS[0], starts[0], spare)
    _sort_digit(spare, _SHIFTS[1], starts[1], keys)
    _sort_digit(keys, _SHIFTS[2], starts[2], spare)


@compiled
def _sort_digit(keys: Any, shift: Any, starts: Any, out: Any) -> None:
    """One pass of a radix sort; ``starts`` has the number of keys of each digit."""
    begin = 0
    for digit in range(len(starts)):
        size = starts[digit]
        starts[digit] = begin
        begin += size
    for i in range(len(keys)):
        digit = (keys[i] >> shift) & _DIGIT_MASK
        place = starts[digit]
        starts[digit] = place + 1
        out[np.uint64(place)] = keys[i]


@compiled
def _rank(bits: Any, first: int, last: int, table: Any, found: Any) -> None:
    """Ranks of the cells, channels side by side, and the (value, cell) of each rank; rank 0 is an empty window."""
    count = bits.shape[1]
    keys, spare = np.empty(count, np.uint64), np.empty(count, np.uint64)
    starts = np.empty((3, 1 << _DIGIT), np.int32)
    for lane in range(last - first):
        _sort_cells(bits[first + lane], keys, spare, starts)
        own = found[lane]
        own[0] = _LOW  # value 0, cell -1
        for i in range(count):
            cell = spare[i] & _LOW
            key = np.int32(np.int64(spare[i] ^ _SIGN) >> 32)
            value = key if key >= 0 else (key - np.int32(1)) ^ _MAGNITUDE
            own[i + 1] = (np.uint64(np.int64(value)) << _HALF) | cell
            table[cell * np.uint64(_LANES) + np.uint64(lane)] = i + 1


@compiled
def _double(table: Any, shift: int, out: Any) -> None:
    early, late = table[: len(table) - shift], table[shift:]  # slices: indices that cannot be negative are vectorised
    for i in range(len(early)):
        out[i] = max(early[i], late[i])


@compiled
def _row_maxima(table: Any, corners: Any, sides: Any, columns: int, best: Any) -> None:
    """Ranks of the maxima of one row's windows, channels side by side; ``sides`` are those of the table's windows."""
    for b in range(corners.shape[0]):
        if corners[b, 0] >= 0:
            a, c = np.uint64(corners[b, 0]), np.uint64(corners[b, 1])
            d, e = np.uint64(corners[b, 2]), np.uint64(corners[b, 3])
            for lane in range(_LANES):
                best[b, lane] = max(table[a, lane], table[c, lane], table[d, lane], table[e, lane])
            continue
        best[b] = 0
        first, high, wide = -1 - corners[b, 0], corners[b, 1], corners[b, 2]
        for y in range(0, high, sides[0]):
            for x in range(0, wide, sides[1]):
                cell = first + min(y, high - sides[0]) * columns + min(x, wide - sides[1])
                for lane in range(_LANES):
                    best[b, lane] = max(best[b, lane], table[cell, lane])


@compiled
def _look_up(best: Any, found: Any, values: Any, cells: Any) -> None:
    for lane in range(len(values)):
        own, value, cell = found[lane], values[lane], cells[lane]
        for b in range(len(value)):
            packed = own[np.uint64(best[b, lane])]
            value[b] = np.int32(np.int64(packed) >> 32)
            cell[b] = np.int32(packed)


@compiled
def _window_max_forward(
    bits: Any, order: Any, table: Any, corners: Any, columns: int, span: Any, tables: Any, out: Any
) -> None:
    """Maxima of the channels of a span; ``order`` lists the rows of an image by their tables."""
    tall, wide, spare = tables[0], tables[1], tables[2]
    best = np.zeros((corners.shape[1], _LANES), tables.dtype)
    found = np.empty((_LANES, bits.shape[1] + 1), np.uint64)
    for first in range(span[0], span[1], _LANES):
        last = min(first + _LANES, span[1])
        _rank(bits, first, last, tall, found)
        wide[:] = tall
        log_y, log_x = 0, 0
        for row in order:
            if table[row] // _LOGS > log_y:
                while log_y < table[row] // _LOGS:
                    _double(tall, (columns << log_y) * _LANES, spare)
                    tall, spare = spare, tall
                    log_y += 1
                wide[:] = tall
                log_x = 0
            while log_x < table[row] % _LOGS:
                _double(wide, _LANES << log_x, spare)
                wide, spare = spare, wide
                log_x += 1
            _row_maxima(wide.reshape(-1, _LANES), corners[row], (1 << log_y, 1 << log_x), columns, best)
            _look_up(best, found, out[0][row, first:last], out[1][row, first:last])


@compiled
def _window_max_backward(grad: Any, cell: Any, image: Any, first: int, last: int, total: Any) -> None:
    for begin in range(first, last, _CHANNELS):
        for row in range(grad.shape[0]):
            for channel in range(begin, min(begin + _CHANNELS, last)):
                sums, grads, places = total[image[row], channel], grad[row, channel], cell[row, channel]
                for column in range(len(places)):
                    if places[column] >= 0:
                        sums[np.uint64(places[column])] += grads[column]
