"""Inverted attention: which proposals are hard, which cells are dropped, and the two passes of a step."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from tag2box.methods.oicr import Oicr
from tag2box.methods.wscl import Contrast
from tag2box.models.augment import Augment, rois_of
from tag2box.models.detector import Heads
from tag2box.models.drop_block import DropBlock, InvertedAttention, hardest_rows, inverted_mask
from tag2box.models.rng import StepRng
from tag2box.training.criterion import Criterion
from tag2box.training.grad_cache import inverted, preview
from tag2box.training.step import Forward, Step
from tag2box.types import Batch, Proposals
from tiny import tiny_detector

RNG = StepRng(3, 1)


def mask_with_loops(attention: Tensor, rand: Tensor, top: int, drop: int) -> Tensor:
    result = torch.ones_like(rand)
    for r in range(len(attention)):
        cells = [(y, x) for y in range(attention.shape[1]) for x in range(attention.shape[2])]
        best = sorted(cells, key=lambda at: -float(attention[r][at]))[:top]
        for at in sorted(best, key=lambda at: float(rand[r][at]))[:drop]:
            result[r][at] = 0
    return result


@given(st.integers(0, 4), st.integers(1, 4), st.integers(0, 16), st.integers(0, 16), st.integers(0, 99))
def test_dropped_cells_are_those_of_the_loops(count: int, side: int, top: int, drop: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    attention, rand = torch.randn(count, side, side, generator=g), torch.rand(count, side, side, generator=g)
    mask = inverted_mask(attention, rand, top=top, drop=drop)
    assert torch.equal(mask, mask_with_loops(attention, rand, top, drop))
    assert torch.equal((mask == 0).flatten(1).sum(dim=1), torch.full((count,), min(top, drop, side * side)))


@pytest.mark.parametrize("sizes", [(), (0,), (1,), (4, 0, 7)])
@pytest.mark.parametrize("share", [1 / 6, 0.5, 1.0])
def test_the_hardest_of_each_photo_are_those_of_the_loops(sizes: tuple[int, ...], share: float) -> None:
    g = torch.Generator().manual_seed(1)
    losses, is_object = torch.rand(sum(sizes), generator=g), torch.rand(sum(sizes), generator=g) < 0.6
    expected, start = [False] * sum(sizes), 0
    for size in sizes:
        rows = [r for r in range(start, start + size) if is_object[r]]
        for r in sorted(rows, key=lambda r: -float(losses[r]))[: math.ceil(share * len(rows))]:
            expected[r] = True
        start += size
    assert hardest_rows(losses, is_object, sizes, share).tolist() == expected


def make_step(regularizer: object, **how: object) -> Step:
    detector = tiny_detector(3, frozen=False, heads=Heads(embed_dim=6)).double()
    criterion = Criterion(labeler=Oicr(), contrast=Contrast(enabled=False))
    return Step(detector, criterion, regularizer, Augment(), **how)  # type: ignore[arg-type]


def make_batch() -> Batch:
    g = torch.Generator().manual_seed(2)
    corner = torch.rand(12, 2, generator=g) * 20
    boxes = torch.cat([corner, corner + 8 + torch.rand(12, 2, generator=g) * 12], dim=1).double()
    tags = torch.tensor([[1, 0, 1], [0, 1, 0]], dtype=torch.bool)
    images = torch.rand(2, 3, 40, 44, generator=g, dtype=torch.float64) * 255
    return Batch(("a", "b"), tags, Proposals(boxes, (7, 5)), images=images)


IA = InvertedAttention(hardest=0.5)


def test_the_gradient_of_a_cell_is_that_of_finite_differences_and_hard_rows_lose_their_best_cells() -> None:
    """The property of inverted attention: cells whose removal would raise the loss the most are dropped."""
    step, batch = make_step(replace(IA, top=2 / 9, drop=2 / 9)), make_batch()
    values = inverted(step, step.regularizer, batch, RNG, 0.0).regularizer.values  # type: ignore[union-attr,arg-type]
    changed = (values == 0).flatten(1).any(dim=1).nonzero().flatten().tolist()
    assert changed and all(int((values[r] == 0).sum()) == 2 for r in changed)

    labeling, images = preview(step, batch, RNG).labeling, batch.proposals.image_ids()
    forward, rois = Forward(step, step.detector, RNG), rois_of(step.detector, batch)

    def refine(factors: Tensor) -> float:
        scores = forward.outputs(rois, factors, images).scores
        return step.criterion.refine.cls_loss(scores, labeling, batch.proposals.sizes).item()

    row, small = changed[0], 1e-4
    slopes = []
    for cell in range(9):
        ends = []
        for sign in (1, -1):
            factors = torch.ones(12, 9, dtype=torch.float64)
            factors[row, cell] += sign * small
            ends.append(refine(factors.view(12, 3, 3)))
        slopes.append((ends[0] - ends[1]) / (2 * small))
    lowest = sorted(range(9), key=lambda cell: slopes[cell])[:2]
    assert sorted(lowest) == (values[row].flatten() == 0).nonzero().flatten().tolist()


@pytest.mark.parametrize("fraction", [0.0, 0.7])
def test_plain_and_exact_steps_agree_and_differ_from_those_without(fraction: float) -> None:
    batch, found = make_batch(), []
    for regularizer, memory in ((IA, "plain"), (IA, "exact"), (DropBlock(drop=0.0), "plain")):
        step = make_step(regularizer, memory=memory)
        loss = step(batch, RNG, fraction)
        grads = torch.cat([p.grad.flatten() for p in step.detector.parameters() if p.grad is not None])
        found.append((loss.total, grads))
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-12)
    assert not torch.equal(found[0][1], found[2][1])


def test_later_more_cells_are_dropped_and_nothing_without_stages() -> None:
    gradient, hard = torch.randn(3, 7, 7), torch.tensor([True, False, True])
    early, late = (IA.invert(gradient, torch.rand(3, 7, 7), hard, late=late) for late in (False, True))
    assert [(x == 0).flatten(1).sum(dim=1).tolist() for x in (early, late)] == [[16, 0, 16], [20, 0, 20]]
    detector = tiny_detector(3, frozen=False, heads=Heads(embed_dim=6, stages=0)).double()
    step = Step(detector, Criterion(labeler=Oicr(), contrast=Contrast(enabled=False)), IA, Augment())
    values = inverted(step, IA, make_batch(), RNG, 0.0).regularizer.values  # type: ignore[union-attr]
    assert bool((values == 1).all())
