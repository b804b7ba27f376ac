from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from strategies import box_sets, make_labeler_input, random_boxes
from tag2box.methods.c_mil import (
    continuation,
    drop_uncertain,
    greedy_subsets,
    member_scores,
    subset_means,
    subset_sizes,
)
from tag2box.methods.oicr import argmax_pseudo_boxes
from tag2box.ops.boxes import iou, row_iou
from tag2box.ops.losses import assign
from tag2box.types import Proposals, PseudoBoxes, PseudoLabels

THRESHOLDS = st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.8, 1.0])
LIMITS = st.one_of(st.none(), st.integers(1, 8))


def loop_subsets(
    boxes: torch.Tensor, objectness: list[float], threshold: float, top: int | None, window: int | None
) -> list[int]:
    """The definition: open a subset, iterate over the ranking, compare with every member."""
    count = len(boxes)
    ranked = sorted(range(count), key=lambda r: (-objectness[r], r))
    merged = ranked[: count if top is None else top] if threshold < 1 else []
    groups = [[r] for r in ranked if r not in merged]
    free = list(range(len(merged)))
    while free:
        opener, members = free[0], [free[0]]
        for rank in free[1:]:
            near = window is None or rank - opener < window
            pair = [iou(boxes[merged[rank]][None], boxes[merged[m]][None]).item() for m in members]
            if near and all(x >= threshold for x in pair):
                members.append(rank)
        groups.append([merged[m] for m in members])
        free = [rank for rank in free if rank not in members]
    groups.sort(key=min)
    return [next(i for i, group in enumerate(groups) if row in group) for row in range(count)]


@pytest.mark.parametrize("steepness", [0.001, 1.0, 2000.0])
def test_lambda_goes_from_nought_to_one(steepness: float) -> None:
    values = [continuation(t / 20, steepness) for t in range(21)]
    assert values[0] == 0 and values[-1] == 1
    assert values == sorted(values)
    assert (continuation(-1, steepness), continuation(2, steepness)) == (0, 1)


def test_lambda_is_the_papers_formula_over_epochs() -> None:
    epochs = 20
    for e in (0.0, 0.5, 1.0, 7.0, 20.0):
        expected = (math.log(e + 0.01) - math.log(0.01)) / (math.log(epochs + 0.01) - math.log(0.01))
        assert continuation(e / epochs, 100 * epochs) == pytest.approx(expected, abs=1e-12)


@settings(max_examples=40)
@given(box_sets(), THRESHOLDS, LIMITS, LIMITS, st.integers(0, 99))
def test_subsets_match_the_loop(
    boxes: torch.Tensor, threshold: float, top: int | None, window: int | None, seed: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    objectness = torch.randint(4, (len(boxes),), generator=g) / 4  # ties happen
    got = greedy_subsets(boxes, objectness, threshold, top=top, window=window)
    assert got.dtype == torch.long
    assert got.tolist() == loop_subsets(boxes, objectness.tolist(), threshold, top, window)


@settings(max_examples=40)
@given(box_sets(high=12), THRESHOLDS)
def test_all_boxes_of_a_subset_overlap_each_other(boxes: torch.Tensor, threshold: float) -> None:
    subsets = greedy_subsets(boxes, torch.arange(len(boxes)).float(), threshold)
    together = subsets[:, None] == subsets[None, :]
    together.fill_diagonal_(False)
    assert (iou(boxes, boxes)[together] >= threshold).all()


@settings(max_examples=40)
@given(box_sets(low=1))
def test_nothing_is_merged_at_one_and_everything_at_nought(boxes: torch.Tensor) -> None:
    scores = torch.rand(len(boxes))
    assert greedy_subsets(boxes, scores, 1.0).tolist() == list(range(len(boxes)))
    assert greedy_subsets(boxes, scores, 0.0).tolist() == [0] * len(boxes)


def test_copies_of_a_box_stay_apart_at_one_alone() -> None:
    boxes = torch.tensor([[0.0, 0, 4, 4]] * 3)
    assert greedy_subsets(boxes, torch.ones(3), 1.0).tolist() == [0, 1, 2]
    assert greedy_subsets(boxes, torch.ones(3), 0.999).tolist() == [0, 0, 0]


def test_a_box_without_area_is_alone() -> None:
    boxes = torch.tensor([[0.0, 0, 0, 4], [0, 0, 4, 4], [0, 0, 4, 4]])
    assert greedy_subsets(boxes, torch.tensor([3.0, 2, 1]), 0.5).tolist() == [0, 1, 1]


@pytest.mark.parametrize("subsets", [[], [0], [0, 0, 1, 0, 2, 1], list(range(5))])
@pytest.mark.parametrize("columns", [1, 4])
def test_means_and_shares_match_loops(subsets: list[int], columns: int) -> None:
    ids, own = torch.tensor(subsets, dtype=torch.long), torch.rand(len(subsets), columns)
    groups = [[r for r, s in enumerate(subsets) if s == i] for i in range(max(subsets, default=-1) + 1)]
    means, merged = subset_means(own, ids), torch.rand(len(groups), columns)
    best, even = member_scores(merged, ids, own, "best"), member_scores(merged, ids, own, "all")
    assert subset_sizes(ids).tolist() == [len(group) for group in groups]
    assert means.shape == merged.shape and best.shape == even.shape == own.shape
    for i, group in enumerate(groups):
        for c in range(columns):
            values = [own[r, c].item() for r in group]
            top = group[values.index(max(values))]
            assert means[i, c].item() == pytest.approx(sum(values) / len(group))
            for r in group:
                assert best[r, c].item() == (merged[i, c].item() if r == top else 0)
                assert even[r, c].item() == pytest.approx(merged[i, c].item() / len(group))
    for shared in (best, even):
        torch.testing.assert_close(shared.sum(dim=0), merged.sum(dim=0))


def test_the_first_of_equals_is_the_best() -> None:
    merged, own = torch.tensor([[0.7]]), torch.tensor([[0.2], [0.3], [0.3]])
    assert member_scores(merged, torch.zeros(3, dtype=torch.long), own, "best").flatten().tolist() == pytest.approx(
        [0, 0.7, 0]
    )


def test_what_is_not_a_number_stays_visible() -> None:
    own = torch.full((2, 1), torch.nan)
    for to in ("best", "all"):
        assert member_scores(own[:1], torch.tensor([0, 0]), own, to).isnan().all()  # type: ignore[arg-type]


def loop_judged(labels: PseudoLabels, boxes: torch.Tensor, classes: int, high: float, low: float) -> list[tuple]:
    found = []
    for row, owner in enumerate(labels.owner.tolist()):
        overlap = iou(boxes[row][None], labels.boxes[row][None]).item()
        if owner < 0:
            found.append((classes, 0.0))
        elif overlap >= high:
            found.append((int(labels.pseudo_boxes.cls[owner]), labels.weight[row].item()))
        else:
            found.append((classes, labels.weight[row].item() if overlap < low else 0.0))
    return found


@pytest.mark.parametrize(
    ("sizes", "tags"),
    [((), []), ((0,), [[1]]), ((1,), [[1, 1]]), ((3,), [[0, 0]]), ((9, 0, 12), [[1, 0, 1], [1, 1, 1], [0, 1, 0]])],
)
@pytest.mark.parametrize(("high", "low"), [(1.0, 0.0), (0.8, 0.2), (0.5, 0.5)])
def test_dropping_the_uncertain_matches_the_loop(sizes: tuple, tags: list, high: float, low: float) -> None:
    inputs = make_labeler_input(sizes, tags)
    classes = inputs.tags.shape[1]
    labels = assign(inputs.proposals, argmax_pseudo_boxes(inputs, 0), classes)
    overlap = row_iou(inputs.proposals.boxes, labels.boxes)
    got = drop_uncertain(labels, overlap, classes, positive_iou=high, negative_iou=low)
    rows = list(zip(got.cls.tolist(), got.weight.tolist(), strict=True))
    assert rows == loop_judged(labels, inputs.proposals.boxes, classes, high, low)


@settings(max_examples=40)
@given(st.integers(0, 999))
def test_one_overlap_for_both_is_the_plain_assignment(seed: int) -> None:
    boxes = random_boxes(20, torch.Generator().manual_seed(seed))
    proposals, pseudo_boxes = (
        Proposals(boxes, (20,)),
        PseudoBoxes(torch.tensor([3, 8]), torch.tensor([1, 0]), torch.tensor([0.4, 1])),
    )
    labels = assign(proposals, pseudo_boxes, 2)
    got = drop_uncertain(labels, row_iou(boxes, labels.boxes), 2, positive_iou=0.5, negative_iou=0.5)
    assert torch.equal(got.cls, labels.cls) and torch.equal(got.weight, labels.weight)
