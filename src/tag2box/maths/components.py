"""Connected parts of a mask, and the rectangles around them."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Int


def rectangles(mask: Bool[np.ndarray, "h w"]) -> Int[np.ndarray, "n 4"]:
    """The smallest rectangle (xyxy, exclusive) around every connected part, corners connecting too.

    In the order of the first cell of each, read line by line. Works on runs of cells, not on cells.
    """
    runs = _runs(mask)
    part = _joined(len(runs), _touching(runs, mask.shape[1]))
    firsts, which = np.unique(part, return_inverse=True)
    found = np.empty((len(firsts), 4), np.int64)
    found[:, :2], found[:, 2:] = np.iinfo(np.int64).max, 0
    row, begin, end = runs.T
    for column, values, reduce in (
        (0, begin, np.minimum), (1, row, np.minimum), (2, end, np.maximum), (3, row + 1, np.maximum),
    ):  # fmt: skip
        reduce.at(found[:, column], which, values)
    return found


def _runs(mask: Bool[np.ndarray, "h w"]) -> Int[np.ndarray, "r 3"]:
    """(row, first column, column after the last) of every unbroken run, in reading order."""
    padded = np.zeros((mask.shape[0], mask.shape[1] + 2), np.int8)
    padded[:, 1:-1] = mask
    change = np.diff(padded, axis=1)
    row, begin = np.nonzero(change == 1)
    _, end = np.nonzero(change == -1)
    return np.stack([row, begin, end], axis=1)


def _touching(runs: Int[np.ndarray, "r 3"], width: int) -> Int[np.ndarray, "t 2"]:
    """Pairs of runs of neighbouring rows that touch, by an edge or a corner."""
    row, begin, end = runs.T
    line = width + 2  # longer than a row, so that runs of different rows never compare as neighbours
    first = np.searchsorted(row * line + end, (row + 1) * line + begin, side="left")
    last = np.searchsorted(row * line + begin, (row + 1) * line + end, side="right")
    count = np.maximum(last - first, 0)
    upper = np.repeat(np.arange(len(runs)), count)
    lower = np.arange(count.sum()) - np.repeat(count.cumsum() - count, count) + np.repeat(first, count)
    return np.stack([upper, lower], axis=1)


def _joined(count: int, pairs: Int[np.ndarray, "t 2"]) -> Int[np.ndarray, " r"]:
    """The first member of the group each run belongs to."""
    above = list(range(count))

    def root(i: int) -> int:
        while above[i] != i:
            above[i] = above[above[i]]
            i = above[i]
        return i

    for a, b in pairs.tolist():
        low, high = sorted((root(a), root(b)))
        above[high] = low
    return np.array([root(i) for i in range(count)], np.int64)
