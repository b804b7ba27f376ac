"""CPU kernels compiled by numba for the operations of ``tag2box.ops.roi`` that torch has no fast counterpart for."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numba
import numpy as np
import torch
from torch import Tensor

from tag2box.ops.roi import LookUp, WindowMaxima, Windows, look_ups

_T = TypeVar("_T")
_SIX = np.float32(6)
_ZERO = np.float32(0)
_LANES = 8  # channels side by side: one cache line
_LOW = np.int64((1 << 32) - 1)
_MAGNITUDE = np.int32(0x7FFFFFFF)
_INFINITY = np.int32(0x7F800000)


def compiled(kernel: Callable[..., _T]) -> Callable[..., _T]:
    """Compile a kernel on first call, without the GIL, and cache it on disk if there is a writable folder."""
    try:
        fast: Callable[..., _T] = numba.njit(nogil=True, cache=True)(kernel)
    except RuntimeError:  # no writable cache folder
        fast = numba.njit(nogil=True)(kernel)
    return fast


def _in_threads(work: Callable[[int, int], None], count: int, block: int = 1) -> None:
    """Split a range into as many parts as torch has threads, at multiples of ``block``; kernels release the GIL."""
    threads = torch.get_num_threads()
    blocks = -(-count // block)
    edges = [min(count, block * (blocks * i // threads)) for i in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, edges[:-1], edges[1:]))


def masked_mean_forward(x: Tensor, factors: Tensor, bias: Tensor) -> Tensor:
    """Forward of ``masked_mean``."""
    arrays = _masked_mean_arrays(x, factors, bias)
    out = np.empty((x.shape[0], x.shape[2]), np.float32)  # numpy allocates huge pages, torch does not
    _in_threads(lambda first, last: _masked_mean_forward(*arrays, first, last, out), len(x))
    return torch.from_numpy(out)


def masked_mean_backward(x: Tensor, factors: Tensor, bias: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the bias."""
    arrays = _masked_mean_arrays(x, factors, bias)
    grads = grad.detach().contiguous().numpy()
    of_x, of_bias = np.empty(x.shape, np.float32), np.empty_like(grads)
    _in_threads(lambda first, last: _masked_mean_backward(*arrays, grads, first, last, of_x, of_bias), len(x))
    return torch.from_numpy(of_x), torch.from_numpy(of_bias).sum(dim=0)


def masked_mean_factor_grad(x: Tensor, factors: Tensor, bias: Tensor, grad: Tensor) -> Tensor:
    """Gradient of the factors, for learned masks."""
    arrays = _masked_mean_arrays(x, factors, bias)
    grads = grad.detach().contiguous().numpy()
    of_factors = np.empty(factors.shape, np.float32)
    _in_threads(lambda first, last: _masked_mean_factor_grad(*arrays, grads, first, last, of_factors), len(x))
    return torch.from_numpy(of_factors)


def _masked_mean_arrays(*tensors: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.detach().float().contiguous().numpy() for tensor in tensors)


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
    """Maxima and their cells; half precision is computed exactly in single precision."""
    maps = features.detach().float().contiguous()
    images, channels, _, width = maps.shape
    bits = maps.view(torch.int32).view(images, channels, -1).numpy()
    shape = (len(windows.image), channels, windows.top.shape[1])
    value, cell = np.empty(shape, np.int32), np.empty(shape, np.int32)  # numpy allocates huge pages, torch does not
    rows = [(windows.image == image).nonzero().flatten() for image in range(images)]
    tables = [_packed(look_ups(windows, chosen, width)) for chosen in rows]

    def work(first: int, last: int) -> None:
        for image in range(images):
            _window_max_forward(bits[image], *tables[image], width, rows[image].numpy(), (first, last), (value, cell))

    _in_threads(work, channels, block=_LANES)
    found = torch.from_numpy(value).view(torch.float32)
    return WindowMaxima(found.to(features.dtype), torch.from_numpy(cell))


def window_max_backward(grad: Tensor, cell: Tensor, image: Tensor, shape: torch.Size) -> Tensor:
    """Gradient, summed in single precision in the order of the windows, whatever the number of threads."""
    total = torch.zeros(shape)
    flat = total.view(shape[0], shape[1], -1).numpy()
    arrays = (grad.detach().float().contiguous().numpy(), cell.contiguous().numpy(), image.numpy())

    _in_threads(lambda first, last: _window_max_backward(*arrays, first, last, flat), shape[1], block=_LANES)
    return total.to(grad.dtype)


def _packed(look_ups_: list[LookUp]) -> tuple[Any, Any, Any]:
    """Look-ups as three arrays: (log height, log width, end) of each table, then windows and cells of all."""
    ends = np.cumsum([len(a.windows) for a in look_ups_])
    tables = np.array([(a.log_height, a.log_width, end) for a, end in zip(look_ups_, ends, strict=True)], np.int64)
    windows = torch.cat([torch.zeros(0, dtype=torch.long), *(a.windows for a in look_ups_)])
    cells = torch.cat([torch.zeros(0, 4, dtype=torch.long), *(a.cells for a in look_ups_)])
    return tables.reshape(-1, 3), windows.int().numpy(), cells.int().numpy()


@compiled
def _pack(bits: Any, first: int, last: int, table: Any) -> None:
    for lane in range(last - first):
        for cell in range(bits.shape[1]):
            key = bits[first + lane, cell]
            if (key & _MAGNITUDE) > _INFINITY:  # NaN, of either sign
                key = _MAGNITUDE
            elif key < 0:
                key = (key ^ _MAGNITUDE) + np.int32(1)  # + 1 makes -0.0 equal to 0.0
            table[cell, lane] = (np.int64(key) << 32) | (_LOW - cell)


@compiled
def _double(table: Any, shift: int, out: Any) -> None:
    for cell in range(table.shape[0] - shift):
        for lane in range(_LANES):
            out[cell, lane] = max(table[cell, lane], table[cell + shift, lane])


@compiled
def _gather(table: Any, windows: Any, cells: Any, best: Any) -> None:
    for i in range(len(windows)):
        a, b, c, d = cells[i, 0], cells[i, 1], cells[i, 2], cells[i, 3]
        for lane in range(_LANES):
            best[windows[i], lane] = max(table[a, lane], table[b, lane], table[c, lane], table[d, lane])


@compiled
def _unpack(best: Any, rows: Any, first: int, last: int, value: Any, cell: Any) -> None:
    bins = value.shape[2]
    for i, row in enumerate(rows):
        for lane in range(last - first):
            values, places = value[row, first + lane], cell[row, first + lane]
            for column in range(bins):
                packed = best[i * bins + column, lane]
                key = np.int32(packed >> 32)
                values[column] = key if key >= 0 else (key - np.int32(1)) ^ _MAGNITUDE
                places[column] = np.int32(_LOW - (packed & _LOW))


@compiled
def _window_max_forward(
    bits: Any, tables: Any, windows: Any, cells: Any, width: int, rows: Any, span: Any, found: Any
) -> None:
    size = (bits.shape[1], _LANES)
    tall, wide, spare = np.zeros(size, np.int64), np.zeros(size, np.int64), np.zeros(size, np.int64)
    best = np.zeros((len(rows) * found[0].shape[2], _LANES), np.int64)  # zero encodes value 0 and cell -1
    for first in range(span[0], span[1], _LANES):
        last = min(first + _LANES, span[1])
        _pack(bits, first, last, tall)
        wide[:] = tall
        log_height, log_width, begin = 0, 0, 0
        for log_y, log_x, end in tables:
            if log_y > log_height:
                while log_height < log_y:
                    _double(tall, width << log_height, spare)
                    tall, spare = spare, tall
                    log_height += 1
                wide[:] = tall
                log_width = 0
            while log_width < log_x:
                _double(wide, 1 << log_width, spare)
                wide, spare = spare, wide
                log_width += 1
            _gather(wide, windows[begin:end], cells[begin:end], best)
            begin = end
        _unpack(best, rows, first, last, found[0], found[1])


@compiled
def _window_max_backward(grad: Any, cell: Any, image: Any, first: int, last: int, total: Any) -> None:
    for channel in range(first, last):
        for row in range(grad.shape[0]):
            sums, grads, places = total[image[row], channel], grad[row, channel], cell[row, channel]
            for column in range(len(places)):
                if places[column] >= 0:
                    sums[places[column]] += grads[column]
