from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from grid_boxes import grid_boxes
from tag2box.methods.mist import far_from_better
from tag2box.ops.boxes import iou, nms


def seeds_with_loops(boxes: torch.Tensor, scores: list[float], share: float, apart: float) -> list[int]:
    """Rank after rank, by the definition."""
    ranked = sorted(range(len(scores)), key=lambda r: (-scores[r], r))[: max(int(share * len(scores)), 1)]
    overlap = iou(boxes, boxes)
    return [row for i, row in enumerate(ranked) if all(overlap[row, better] < apart for better in ranked[:i])]


@given(
    st.integers(0, 14),
    st.integers(0, 10_000),
    st.sampled_from([0.01, 0.15, 0.5, 1.0]),
    st.sampled_from([0.1, 0.2, 1.0]),
)
def test_pseudo_boxes_match_the_definition_written_with_loops(size: int, seed: int, share: float, apart: float) -> None:
    boxes = grid_boxes(size, seed)
    g = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, 6, (len(boxes),), generator=g) / 6  # ties
    assert far_from_better(boxes, scores, share=share, apart=apart).tolist() == seeds_with_loops(
        boxes, scores.tolist(), share, apart
    )


@pytest.mark.parametrize(("count", "share", "expected"), [(0, 0.15, 0), (1, 0.15, 1), (7, 0.15, 1), (20, 0.15, 3)])
def test_how_many_may_be_pseudo_boxes(count: int, share: float, expected: int) -> None:
    apart = torch.arange(count)[:, None] * 10.0 + torch.tensor([0.0, 0.0, 5.0, 5.0])
    assert len(far_from_better(apart, torch.rand(count), share=share)) == expected


def test_every_round_share_is_whole() -> None:
    """0.15 R is floored in floating point: no R a photo may have loses one to rounding."""
    assert [r for r in range(20, 10_000, 20) if int(0.15 * r) != r * 3 // 20] == []


@given(st.integers(1, 14), st.integers(0, 10_000), st.sampled_from([0.1, 0.2, 0.5]))
def test_it_is_stricter_than_nms_and_keeps_the_best(size: int, seed: int, apart: float) -> None:
    """Several pseudo boxes, each of them far from all better proposals."""
    boxes = grid_boxes(size, seed)
    scores = torch.rand(len(boxes), generator=torch.Generator().manual_seed(seed))
    pseudo_boxes = far_from_better(boxes, scores, share=1.0, apart=apart)
    assert set(pseudo_boxes.tolist()) <= set(nms(boxes, scores, apart).tolist())
    assert pseudo_boxes[0] == scores.argmax()


def test_a_box_that_is_not_chosen_still_suppresses_worse_ones() -> None:
    boxes = torch.tensor([[0.0, 0, 10, 10], [5, 0, 15, 10], [10, 0, 20, 10]])  # a chain: the ends do not touch
    scores = torch.tensor([0.9, 0.8, 0.7])
    assert far_from_better(boxes, scores, share=1.0, apart=0.2).tolist() == [0]
    assert nms(boxes, scores, 0.2).tolist() == [0, 2]
