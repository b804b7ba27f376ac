from __future__ import annotations

from itertools import combinations

import pytest
import torch
from hypothesis import given, strategies as st

from grid_boxes import grid_boxes
from tag2box.methods.c_wsl import counted_boxes
from tag2box.ops.boxes import areas, containment, intersections


def inside(boxes: torch.Tensor, a: int, b: int) -> float:
    """The larger share of either box that the two have in common."""
    shared = intersections(boxes[a : a + 1], boxes[b : b + 1]).item()
    return max((shared / areas(boxes)[i].item() if areas(boxes)[i] > 0 else 0.0) for i in (a, b))


def sets_with_loops(
    boxes: torch.Tensor, scores: list[float], count: int, overlap: float, openers: int
) -> list[list[int]]:
    """The set every opener grows, box after box in the order of scores."""
    ranked = sorted(range(len(scores)), key=lambda r: (-scores[r], r))
    grown = []
    for opener in ranked[:openers]:
        members = [opener]
        for row in ranked:
            fits = row not in members and all(inside(boxes, row, m) < overlap for m in members)
            if fits and len(members) < count and scores[row] >= 0:
                members.append(row)
        grown.append(sorted(members, key=ranked.index))
    return grown


def total(scores: list[float], rows: list[int]) -> float:
    return sum(scores[r] for r in rows)


@given(
    st.integers(1, 10),
    st.integers(0, 10_000),
    st.integers(1, 5),
    st.sampled_from([0.1, 0.5, 1.0]),
    st.sampled_from([1, 3, 100]),
)
def test_the_set_matches_the_definition_written_with_loops(
    size: int, seed: int, count: int, overlap: float, openers: int
) -> None:
    boxes = grid_boxes(size, seed)
    scores = torch.rand(len(boxes), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    got = counted_boxes(boxes, scores, count, overlap=overlap, openers=openers).tolist()
    ways = sets_with_loops(boxes, scores.tolist(), count, overlap, openers)
    best = max(total(scores.tolist(), rows) for rows in ways)
    assert got in [rows for rows in ways if total(scores.tolist(), rows) >= best - 1e-9]


@given(st.integers(1, 10), st.integers(0, 10_000), st.integers(1, 4), st.sampled_from([0.1, 0.5]))
def test_no_more_than_counted_none_inside_another_and_never_worse_than_greedy(
    size: int, seed: int, count: int, overlap: float
) -> None:
    boxes = grid_boxes(size, seed)
    scores = torch.rand(len(boxes), generator=torch.Generator().manual_seed(seed))
    rows = counted_boxes(boxes, scores, count, overlap=overlap)
    assert 1 <= len(rows) <= count and len(rows.unique()) == len(rows)
    assert all(inside(boxes, a, b) < overlap for a, b in combinations(rows.tolist(), 2))
    greedy = counted_boxes(boxes, scores, count, overlap=overlap, openers=1)
    assert scores[rows].sum() >= scores[greedy].sum() - 1e-6
    assert rows.tolist() == sorted(rows.tolist(), key=lambda r: (-scores[r].item(), r))  # best first


@pytest.mark.parametrize("count", [1, 0, -1])
@given(size=st.integers(1, 8), seed=st.integers(0, 10_000))
def test_a_count_of_one_or_unknown_is_argmax(count: int, size: int, seed: int) -> None:
    boxes = grid_boxes(size, seed)
    scores = torch.rand(len(boxes), generator=torch.Generator().manual_seed(seed))
    assert counted_boxes(boxes, scores, count).tolist() == [int(scores.argmax())]


@pytest.mark.parametrize(
    ("boxes", "scores", "count", "expected"),
    [
        ([], [], 3, []),
        ([[0, 0, 5, 5]], [0.5], 3, [0]),  # more counted than there are
        ([[0, 0, 5, 5], [20, 0, 25, 5]], [0.1, 0.9], 2, [1, 0]),
        ([[0, 0, 5, 5], [1, 1, 3, 3], [20, 0, 25, 5]], [0.9, 0.8, 0.1], 2, [0, 2]),  # a part of the first is skipped
        # the best box covers two good ones: without it the sum is larger
        ([[0, 0, 30, 10], [0, 0, 10, 10], [20, 0, 30, 10]], [0.9, 0.8, 0.7], 2, [1, 2]),
        ([[0, 0, 0, 0], [0, 0, 0, 0]], [0.9, 0.8], 3, [0, 1]),  # empty boxes join once
        ([[0, 0, 5, 5], [20, 0, 25, 5]], [0.9, -1.0], 2, [0]),  # taken
        ([[0, 0, 5, 5], [20, 0, 25, 5]], [-1.0, -1.0], 2, [0]),  # all taken: the first, as argmax
    ],
)
def test_cases(boxes: list[list[float]], scores: list[float], count: int, expected: list[int]) -> None:
    got = counted_boxes(torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4), torch.tensor(scores), count)
    assert got.tolist() == expected


def test_a_box_inside_another_is_wholly_contained_whichever_comes_first() -> None:
    boxes = torch.tensor([[0.0, 0, 10, 10], [2, 2, 4, 4], [8, 0, 12, 10], [5, 5, 5, 5]])
    expected = [[1, 1, 0.5, 0], [1, 1, 0, 0], [0.5, 0, 1, 0], [0, 0, 0, 0]]
    assert containment(boxes, boxes).tolist() == expected
