from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st
from scipy import ndimage

from tag2box.methods.slv import rectangles


def rectangles_with_loops(mask: np.ndarray) -> list[list[int]]:
    """A flood from every cell not reached yet, in reading order."""
    height, width = mask.shape
    seen: set[tuple[int, int]] = set()
    found = []
    for start in [(y, x) for y in range(height) for x in range(width) if mask[y, x]]:
        if start in seen:
            continue
        part, pending = [], [start]
        seen.add(start)
        while pending:
            y, x = pending.pop()
            part.append((y, x))
            for near in [(y + dy, x + dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1)]:
                inside = 0 <= near[0] < height and 0 <= near[1] < width
                if inside and mask[near] and near not in seen:
                    seen.add(near)
                    pending.append(near)
        ys, xs = zip(*part, strict=True)
        found.append([min(xs), min(ys), max(xs) + 1, max(ys) + 1])
    return found


@st.composite
def masks(draw: st.DrawFn) -> np.ndarray:
    height, width = draw(st.integers(0, 9)), draw(st.integers(0, 9))
    cells = draw(st.lists(st.booleans(), min_size=height * width, max_size=height * width))
    return np.array(cells, bool).reshape(height, width)


@given(masks())
def test_rectangles_match_a_flood_fill(mask: np.ndarray) -> None:
    assert rectangles(mask).tolist() == rectangles_with_loops(mask)


@pytest.mark.parametrize("density", [0.1, 0.4, 0.6, 0.9])
def test_rectangles_match_another_library(density: float) -> None:
    mask = np.random.default_rng(1).random((60, 83)) < density
    labels, count = ndimage.label(mask, structure=np.ones((3, 3)))
    theirs = [[x.start, y.start, x.stop, y.stop] for y, x in ndimage.find_objects(labels)]
    assert count > 1 or density > 0.3
    assert sorted(rectangles(mask).tolist()) == sorted(theirs)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([], []),  # no cell at all
        (["..", ".."], []),
        (["#"], [[0, 0, 1, 1]]),
        (["#.", ".#"], [[0, 0, 2, 2]]),  # corners connect
        (["#.#", "#.#", "###"], [[0, 0, 3, 3]]),  # joined at the end
        (["#.#", "...", "#.#"], [[0, 0, 1, 1], [2, 0, 3, 1], [0, 2, 1, 3], [2, 2, 3, 3]]),
        (["#####", "#...#", "#.#.#", "#...#", "#####"], [[0, 0, 5, 5], [2, 2, 3, 3]]),  # one inside the other
        (["..#", "#..", "..#"], [[2, 0, 3, 1], [0, 1, 1, 2], [2, 2, 3, 3]]),  # ends of lines are no neighbours
    ],
)
def test_known_shapes(rows: list[str], expected: list[list[int]]) -> None:
    mask = np.array([[c == "#" for c in row] for row in rows], bool).reshape(len(rows), -1 if rows else 0)
    assert rectangles(mask).tolist() == expected
