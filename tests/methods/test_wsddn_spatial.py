from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from strategies import box_sets
from tag2box.methods.wsddn import feature_spread, top_and_neighbours
from tag2box.ops.boxes import iou


@settings(max_examples=40)
@given(box_sets(), st.integers(1, 9), st.sampled_from([0.0, 0.3, 0.6]), st.integers(0, 99))
def test_neighbours_match_the_loop(boxes: torch.Tensor, count: int, threshold: float, seed: int) -> None:
    scores = torch.randint(5, (len(boxes),), generator=torch.Generator().manual_seed(seed)) / 5
    got = top_and_neighbours(boxes, scores, count=count, iou_threshold=threshold).tolist()
    ranked = sorted(range(len(boxes)), key=lambda r: (-scores[r].item(), r))
    near = [r for r in ranked[1 : count + 1] if iou(boxes[r][None], boxes[ranked[0]][None]).item() > threshold]
    assert got == [*ranked[:1], *near]


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_the_spread_matches_the_loop(rows: int) -> None:
    vectors, best = torch.randn(2, rows, 3, dtype=torch.float64)
    scores, expected = torch.rand(rows, dtype=torch.float64), 0.0
    for r in range(rows):
        expected += 0.5 * sum((scores[r] * (a - b)).item() ** 2 for a, b in zip(vectors[r], best[r], strict=True))
    assert feature_spread(vectors, best, scores).item() == pytest.approx(expected, abs=1e-12)


def test_its_gradient_is_that_of_differences() -> None:
    vectors, best = (torch.randn(4, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    scores = torch.rand(4, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda v, b: feature_spread(v, b, scores), (vectors, best))


def test_it_pulls_vectors_together_and_leaves_scores_alone() -> None:
    vectors = torch.tensor([[2.0]], requires_grad=True)
    best = torch.tensor([[0.0]], requires_grad=True)
    scores = torch.tensor([1.0], requires_grad=True)
    feature_spread(vectors, best, scores).backward()
    assert vectors.grad is not None and best.grad is not None
    assert (vectors.grad.item(), best.grad.item()) == (2, -2)
    assert scores.grad is None
