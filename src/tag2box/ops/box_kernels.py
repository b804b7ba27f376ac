"""CPU kernels compiled by numba for boxes: NMS and the bilinear samples of RoIAlign."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tag2box.ops.kernels import compiled, in_threads, large_empty


def survivors(boxes: Tensor, areas: Tensor, sizes: list[int], iou_threshold: float) -> Tensor:
    """Which boxes survive greedy NMS within consecutive groups of the given sizes, best first in each."""
    sides, own_areas = boxes.T.contiguous().numpy(), areas.numpy()
    alive = np.ones(len(boxes), np.uint8)
    _suppress(sides, own_areas, np.array([0, *sizes], np.int64).cumsum(), own_areas.dtype.type(iou_threshold), alive)
    return torch.from_numpy(alive).bool()


@compiled
def _suppress(sides: Any, areas: Any, edges: Any, threshold: Any, alive: Any) -> None:
    x1, y1, x2, y2 = sides[0], sides[1], sides[2], sides[3]
    for group in range(len(edges) - 1):
        for i in range(edges[group], edges[group + 1]):
            if not alive[i]:
                continue
            rest = slice(i + 1, edges[group + 1])
            others = (x1[rest], y1[rest], x2[rest], y2[rest], areas[rest])
            _suppress_by(x1[i], y1[i], x2[i], y2[i], areas[i], others, threshold, alive[rest])


@compiled
def _suppress_by(
    left: Any, top: Any, right: Any, bottom: Any, area: Any, others: Any, threshold: Any, alive: Any
) -> None:
    """Suppress what one kept box overlaps: the arithmetic of ``boxes.iou``, operation by operation, ties included."""
    x1, y1, x2, y2, areas = others
    zero = area - area
    for j in range(len(alive)):
        across = max(min(right, x2[j]) - max(left, x1[j]), zero)
        shared = across * max(min(bottom, y2[j]) - max(top, y1[j]), zero)
        union = area + areas[j] - shared
        overlap = shared / union
        is_over = (union > zero) & (overlap > threshold)
        alive[j] = np.uint8(0) if is_over else alive[j]


def bilinear_forward(rows: Tensor, lines: Tensor, columns: Tensor, down: Tensor, across: Tensor) -> Tensor:
    """Forward of ``bilinear_samples``."""
    arrays = [x.detach().contiguous().numpy() for x in (rows, lines, columns, down, across)]
    count, size = lines.shape[:2]
    out = large_empty((count, size, size, rows.shape[1]), np.float32)
    in_threads(lambda first, last: _bilinear_forward(*arrays, first, last, out), count)
    return torch.from_numpy(out)


def bilinear_backward(
    grad: Tensor, lines: Tensor, columns: Tensor, down: Tensor, across: Tensor, shape: torch.Size
) -> Tensor:
    """Gradient of the rows, summed in the order of the samples, whatever the number of threads.

    A gradient with channels first in memory is turned around RoI by RoI, in the cache, not as a whole.
    """
    places = [x.detach().contiguous().numpy() for x in (lines, columns, down, across)]
    total, planes = np.zeros(tuple(shape), np.float32), grad.detach().permute(0, 3, 1, 2)
    if planes.is_contiguous() and not grad.is_contiguous():
        kernel, values = _bilinear_backward_planes, planes.flatten(2)
    else:
        kernel, values = _bilinear_backward, grad.detach().contiguous().flatten(1, 2)
    array = values.numpy()
    in_threads(lambda first, last: kernel(array, *places, first, last, total), shape[1], block=16)
    return torch.from_numpy(total)


@compiled
def _bilinear_forward(
    rows: Any, lines: Any, columns: Any, down: Any, across: Any, first: int, last: int, out: Any
) -> None:
    for r in range(first, last):
        for y in range(lines.shape[1]):
            for x in range(columns.shape[1]):
                a, b = rows[lines[r, y, 0] + columns[r, x, 0]], rows[lines[r, y, 0] + columns[r, x, 1]]
                c, d = rows[lines[r, y, 1] + columns[r, x, 0]], rows[lines[r, y, 1] + columns[r, x, 1]]
                of_a, of_b = down[r, y, 0] * across[r, x, 0], down[r, y, 0] * across[r, x, 1]
                of_c, of_d = down[r, y, 1] * across[r, x, 0], down[r, y, 1] * across[r, x, 1]
                sample = out[r, y, x]
                for channel in range(len(sample)):
                    upper = of_a * a[channel] + of_b * b[channel]
                    sample[channel] = upper + of_c * c[channel] + of_d * d[channel]


@compiled
def _bilinear_backward(
    grad: Any, lines: Any, columns: Any, down: Any, across: Any, first: int, last: int, total: Any
) -> None:
    for r in range(len(grad)):
        _add_samples(grad[r, :, first:last], lines[r], columns[r], down[r], across[r], first, total)


@compiled
def _bilinear_backward_planes(
    grad: Any, lines: Any, columns: Any, down: Any, across: Any, first: int, last: int, total: Any
) -> None:
    samples = np.empty((grad.shape[2], last - first), np.float32)
    for r in range(len(grad)):
        for channel in range(first, last):
            plane = grad[r, channel]
            for i in range(len(plane)):
                samples[i, channel - first] = plane[i]
        _add_samples(samples, lines[r], columns[r], down[r], across[r], first, total)


@compiled
def _add_samples(grad: Any, lines: Any, columns: Any, down: Any, across: Any, first: int, total: Any) -> None:
    size, channels = len(lines), grad.shape[1]
    for i in range(len(grad)):
        y, x, grads = i // size, i % size, grad[i]
        for corner in range(4):
            share = down[y, corner // 2] * across[x, corner % 2]
            sums = total[lines[y, corner // 2] + columns[x, corner % 2]]
            for channel in range(channels):
                sums[first + channel] += share * grads[channel]
