from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from tag2box.ops.superpixels import straddling


def straddling_with_loops(labels: np.ndarray, boxes: np.ndarray) -> list[float]:
    """Pixels counted one by one."""
    height, width = labels.shape
    out = []
    for x1, y1, x2, y2 in np.rint(boxes).astype(int).tolist():
        inside: dict[int, int] = {}
        outside: dict[int, int] = {}
        area = 0
        for y in range(height):
            for x in range(width):
                within = x1 <= x < x2 and y1 <= y < y2
                area += within
                counted = inside if within else outside
                counted[int(labels[y, x])] = counted.get(int(labels[y, x]), 0) + 1
        straddled = sum(min(n, outside.get(label, 0)) for label, n in inside.items())
        out.append(1 - straddled / area if area else 0.0)
    return out


@st.composite
def worlds(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """A small map of few labels, connected or not, and boxes that may leave it."""
    height, width = draw(st.integers(1, 7)), draw(st.integers(1, 7))
    cells = draw(st.lists(st.integers(-1, 3), min_size=height * width, max_size=height * width))
    rows = [
        [draw(st.integers(-2, 8)), draw(st.integers(-2, 8)), draw(st.integers(0, 9)), draw(st.integers(0, 9))]
        for _ in range(draw(st.integers(0, 5)))
    ]
    boxes = np.array(rows, np.float32).reshape(-1, 4)
    boxes[:, 2:] += boxes[:, :2]
    return np.array(cells, np.int32).reshape(height, width), boxes


@given(worlds())
def test_evidence_matches_the_definition_written_with_loops(world: tuple[np.ndarray, np.ndarray]) -> None:
    labels, boxes = world
    got = straddling(labels, boxes)
    assert got.dtype == np.float32
    assert got.tolist() == pytest.approx(straddling_with_loops(labels, boxes), abs=1e-6)


@given(worlds())
def test_evidence_lies_between_zero_and_one(world: tuple[np.ndarray, np.ndarray]) -> None:
    got = straddling(*world)
    assert ((got >= 0) & (got <= 1)).all()


@given(worlds(), st.permutations(range(5)))
def test_names_of_superpixels_do_not_matter(world: tuple[np.ndarray, np.ndarray], names: list[int]) -> None:
    labels, boxes = world
    assert np.array_equal(straddling(labels, boxes), straddling(np.array(names)[labels + 1], boxes))


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 5), st.data())
def test_a_box_made_of_whole_superpixels_has_one(down: int, across: int, side: int, data: st.DataObject) -> None:
    labels = np.arange(down * across).reshape(down, across).repeat(side, axis=0).repeat(side, axis=1)
    x1, y1 = data.draw(st.integers(0, across - 1)), data.draw(st.integers(0, down - 1))
    x2, y2 = data.draw(st.integers(x1 + 1, across)), data.draw(st.integers(y1 + 1, down))
    assert straddling(labels, side * np.array([[x1, y1, x2, y2]], np.float64)).tolist() == [1.0]


@pytest.mark.parametrize(
    ("box", "expected"),
    [
        ([0, 0, 4, 4], 1.0),  # the whole photo
        ([0, 0, 2, 4], 1.0),  # one superpixel
        ([0, 0, 1, 4], 0.0),  # half of one: all of the box straddles
        ([0, 0, 3, 4], 1 - 4 / 12),  # one, and half of the other
        ([0.4, 0, 2.4, 4], 1.0),  # edges go to the nearest pixel
        ([-9, -9, 2, 9], 1.0),  # what is outside the photo is nothing
        ([2, 2, 2, 4], 0.0),  # no pixel
        ([9, 9, 12, 12], 0.0),  # nowhere
    ],
)
def test_two_halves(box: list[float], expected: float) -> None:
    labels = np.array([[7, 7, 9, 9]] * 4)
    assert straddling(labels, np.array([box], np.float64)).tolist() == pytest.approx([expected])


def test_no_boxes_and_one_superpixel() -> None:
    assert straddling(np.zeros((3, 5), np.int64), np.zeros((0, 4))).shape == (0,)
    whole, part = straddling(np.zeros((3, 5), np.int64), np.array([[0, 0, 5, 3], [0, 0, 1, 1]], np.float32)).tolist()
    assert (whole, part) == (1.0, 0.0)


@pytest.mark.parametrize("kind", [np.uint8, np.int16, np.int32, np.int64])
def test_labels_of_any_whole_kind(kind: type) -> None:
    labels = np.array([[0, 0, 255], [3, 3, 255]]).astype(kind)
    assert straddling(labels, np.array([[0.0, 0, 2, 2]])).tolist() == [1.0]


def test_a_photo_without_pixels_has_no_superpixels() -> None:
    assert straddling(np.zeros((0, 4), np.int64), np.array([[0.0, 0, 1, 1]])).tolist() == [0.0]


def test_boxes_far_outside_the_photo_and_infinite_ones() -> None:
    boxes = np.array([[-1e30, -1e30, 1e30, 1e30], [-np.inf, 0, np.inf, 4]], np.float32)
    assert straddling(np.array([[7, 7, 9, 9]] * 4), boxes).tolist() == [1.0, 1.0]
