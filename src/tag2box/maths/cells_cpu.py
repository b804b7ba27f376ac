"""``cell_mean`` for CPUs, compiled: values are read once and nothing of their size is written on the way there.

The twin in plain torch is ``cells.cell_mean_with_torch``.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tag2box.maths.compiled import compiled

_SIX = np.float32(6)
_ZERO = np.float32(0)


def forward(x: Tensor, factors: Tensor, bias: Tensor) -> Tensor:
    """The means."""
    arrays = _arrays(x, factors, bias)
    out = np.empty((x.shape[0], x.shape[2]), np.float32)  # numpy asks for large pages, torch does not
    _in_threads(lambda first, last: _forward(*arrays, first, last, out), len(x))
    return torch.from_numpy(out)


def backward(x: Tensor, factors: Tensor, bias: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of x and of the bias."""
    arrays = _arrays(x, factors, bias)
    grads = grad.detach().contiguous().numpy()
    of_x, of_bias = np.empty(x.shape, np.float32), np.empty_like(grads)
    _in_threads(lambda first, last: _backward(*arrays, grads, first, last, of_x, of_bias), len(x))
    return torch.from_numpy(of_x), torch.from_numpy(of_bias).sum(dim=0)


def factor_gradient(x: Tensor, factors: Tensor, bias: Tensor, grad: Tensor) -> Tensor:
    """The gradient of the factors, for those that are learnt."""
    arrays = _arrays(x, factors, bias)
    grads = grad.detach().contiguous().numpy()
    of_factors = np.empty(factors.shape, np.float32)
    _in_threads(lambda first, last: _of_factors(*arrays, grads, first, last, of_factors), len(x))
    return torch.from_numpy(of_factors)


def _arrays(*tensors: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.detach().float().contiguous().numpy() for tensor in tensors)


def _in_threads(work: Callable[[int, int], None], rows: int) -> None:
    """Share the rows out to as many threads as torch uses; kernels run without Python's lock."""
    threads = torch.get_num_threads()
    edges = [rows * i // threads for i in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, edges[:-1], edges[1:]))


@compiled
def _forward(x: Any, factors: Any, bias: Any, first: int, last: int, out: Any) -> None:
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
def _backward(x: Any, factors: Any, bias: Any, grad: Any, first: int, last: int, of_x: Any, of_bias: Any) -> None:
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
def _of_factors(x: Any, factors: Any, bias: Any, grad: Any, first: int, last: int, of_factors: Any) -> None:
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
