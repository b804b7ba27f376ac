from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from strategies import box_sets, random_boxes
from tag2box.methods.slv import cells_of, likelihood_map, voted_boxes
from tag2box.ops.boxes import iou


def lines_of(box: Tensor, cell: float) -> tuple[int, int, int, int]:
    x1, y1, x2, y2 = (round(max(v, 0.0) / cell) for v in box.tolist())
    return x1, y1, max(x2, x1 + 1), max(y2, y1 + 1)


def map_with_loops(boxes: Tensor, scores: Tensor, cell: float) -> list[list[float]]:
    """Scores added up cell by cell, then divided by the largest sum."""
    lines = [lines_of(box, cell) for box in boxes]
    width, height = max((x for _, _, x, _ in lines), default=0), max((y for _, _, _, y in lines), default=0)
    grid = [
        [
            sum(s for s, (x1, y1, x2, y2) in zip(scores.tolist(), lines, strict=True) if x1 <= x < x2 and y1 <= y < y2)
            for x in range(width)
        ]
        for y in range(height)
    ]
    most = max((max(row) for row in grid), default=0.0)
    return [[value / most if most else 0.0 for value in row] for row in grid]


def some_scores(count: int, seed: int) -> Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(seed)) + 1e-3


@given(box_sets(), st.sampled_from([1.0, 2.5, 4.0]), st.integers(0, 1000))
def test_the_map_matches_the_definition_written_with_loops(boxes: Tensor, cell: float, seed: int) -> None:
    scores = some_scores(len(boxes), seed)
    expected = map_with_loops(boxes, scores, cell)
    got = likelihood_map(boxes, scores, cell)
    assert got.shape == (len(expected), len(expected[0]) if expected else 0)
    assert got.flatten().tolist() == pytest.approx([v for row in expected for v in row], abs=1e-6)


@given(box_sets(low=1), st.integers(0, 1000), st.randoms(use_true_random=False))
def test_votes_are_exact_in_any_order(boxes: Tensor, seed: int, random: object) -> None:
    scores, order = some_scores(len(boxes), seed), list(range(len(boxes)))
    random.shuffle(order)  # type: ignore[attr-defined]
    assert torch.equal(likelihood_map(boxes, scores, 2.0), likelihood_map(boxes[order], scores[order], 2.0))


@given(box_sets(low=1), st.integers(0, 1000))
def test_the_map_lies_between_zero_and_one_and_reaches_one(boxes: Tensor, seed: int) -> None:
    votes = likelihood_map(boxes, some_scores(len(boxes), seed), 1.0)
    assert votes.min() >= 0
    assert votes.max() == 1


@pytest.mark.parametrize("scores", [[0.0], [0.0, 0.0]])
def test_votes_of_nothing_are_nothing(scores: list[float]) -> None:
    boxes = torch.tensor([[0.0, 0, 8, 8]]).repeat(len(scores), 1)
    assert likelihood_map(boxes, torch.tensor(scores), 4.0).tolist() == [[0.0, 0.0], [0.0, 0.0]]


@given(box_sets(), st.sampled_from([1.0, 2.5, 4.0]))
def test_cells_match_the_definition(boxes: Tensor, cell: float) -> None:
    assert cells_of(boxes, cell).tolist() == [list(lines_of(box, cell)) for box in boxes]


@given(
    st.tuples(*[st.floats(0, 200, width=32)] * 2),
    st.tuples(*[st.floats(0.5, 200, width=32)] * 2),
    st.floats(2**-20, 1, width=32),
    st.sampled_from([1.0, 4.0, 16.0]),
)
def test_one_confident_box_returns_that_box(
    corner: tuple[float, float], size: tuple[float, float], score: float, cell: float
) -> None:
    box = torch.tensor([[*corner, corner[0] + size[0], corner[1] + size[1]]])
    assert torch.equal(voted_boxes(box, torch.tensor([score]), threshold=0.5, cell=cell), box)


@given(box_sets(low=1), st.integers(0, 1000), st.sampled_from([0.1, 0.5, 1.0]), st.sampled_from([1.0, 4.0]))
def test_voted_boxes_are_boxes_within_a_cell_of_the_grids(
    boxes: Tensor, seed: int, threshold: float, cell: float
) -> None:
    scores = some_scores(len(boxes), seed)
    found = voted_boxes(boxes, scores, threshold=threshold, cell=cell)
    assert len(found) >= 1
    assert (found[:, 2:] > found[:, :2]).all()
    assert (found[:, :2] >= boxes[:, :2].amin(dim=0) - cell).all()
    assert (found[:, 2:] <= boxes[:, 2:].amax(dim=0) + cell).all()


@given(box_sets(low=1), st.integers(0, 1000), st.sampled_from([0.1, 0.5, 1.0]))
def test_whatever_was_voted_for_is_in_a_box(boxes: Tensor, seed: int, threshold: float) -> None:
    scores = some_scores(len(boxes), seed)
    found = voted_boxes(boxes, scores, threshold=threshold, cell=1.0)
    for y, x in (likelihood_map(boxes, scores, 1.0) >= threshold).nonzero().tolist():
        assert iou(found, torch.tensor([[x, y, x + 1.0, y + 1.0]])).max() > 0


@given(box_sets(low=1), st.integers(0, 1000))
def test_sides_of_voted_boxes_are_sides_of_voters_where_pixels_are_cells(boxes: Tensor, seed: int) -> None:
    found = voted_boxes(boxes, some_scores(len(boxes), seed), threshold=0.5, cell=1.0)
    for side in range(4):
        assert set(found[:, side].tolist()) <= set(boxes[:, side].tolist())


@pytest.mark.parametrize(
    ("threshold", "expected"),
    [
        (0.2, [[0.0, 0, 30, 10], [50, 50, 61, 63]]),
        (0.5, [[0.0, 0, 30, 10]]),
        (0.9, [[10.0, 0, 20, 10]]),
    ],
)
def test_agreement_of_two_and_a_far_third(threshold: float, expected: list[list[float]]) -> None:
    """Two boxes share a third of what they cover; another, weaker, lies apart."""
    boxes = torch.tensor([[0.0, 0, 20, 10], [10, 0, 30, 10], [50, 50, 61, 63]])
    found = voted_boxes(boxes, torch.tensor([1.0, 1.0, 0.4]), threshold=threshold, cell=1.0)
    assert found.tolist() == expected


def test_no_voters_no_boxes() -> None:
    assert voted_boxes(torch.zeros(0, 4), torch.zeros(0), threshold=0.5, cell=4.0).shape == (0, 4)


@pytest.mark.parametrize("cell", [1.0, 4.0])
def test_boxes_without_area_vote_as_one_cell(cell: float) -> None:
    found = voted_boxes(torch.tensor([[8.0, 8, 8, 8]]), torch.ones(1), threshold=0.5, cell=cell)
    assert found.tolist() == [[8.0, 8.0, 8.0 + cell, 8.0 + cell]]


def test_sides_of_tiny_voters_never_cross() -> None:
    boxes = torch.tensor([[5.9, 0, 30, 8], [2.1, 0, 3.0, 8]])  # both begin at the second line; the small one ends there
    for scores in ([1.0, 0.9], [0.9, 1.0]):
        found = voted_boxes(boxes, torch.tensor(scores), threshold=0.99, cell=4.0)
        assert (found[:, 2:] > found[:, :2]).all()


def test_many_boxes_of_a_large_photo() -> None:
    generator = torch.Generator().manual_seed(0)
    boxes, scores = random_boxes(2000, generator, size=800), torch.rand(2000, generator=generator)
    votes = likelihood_map(boxes, scores, 4.0)
    edges = cells_of(boxes, 4.0)
    sums = []
    for at in (75, 40):  # ratios of cells are those of the sums of what covers them
        covers = (edges[:, :2] <= at).all(dim=1) & (edges[:, 2:] > at).all(dim=1)
        sums.append(scores[covers].double().sum().item())
    assert float(votes[75, 75] / votes[40, 40]) == pytest.approx(sums[0] / sums[1], rel=1e-5)
