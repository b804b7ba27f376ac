"""Rescoring: low-scored proposals are dropped from labels, losses and detections, never the last one of a photo."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, strategies as st
from torch.nn import functional

from strategies import box_sets, make_labeler_input, plain_views
from tag2box.methods.discovery import Discovery
from tag2box.methods.oicr import Oicr
from tag2box.methods.wscl import Contrast
from tag2box.methods.wsrpn import KEEP_EVERYTHING, Rescore
from tag2box.ops.boxes import iou
from tag2box.training.criterion import Criterion, LossOutput
from tag2box.types import BatchMeta, Outputs, Proposals, StageScores

APART = torch.tensor([[0.0, 0, 10, 10], [20, 0, 30, 10], [40, 0, 50, 10], [60, 0, 70, 10]])
HALF = Rescore(keep=0.5, begin=0.0)


def meta_of(boxes: torch.Tensor, sizes: tuple[int, ...], views_per_image: int = 1) -> BatchMeta:
    return BatchMeta(
        Proposals(boxes, sizes), torch.ones(len(sizes), 1, dtype=torch.bool), views_per_image=views_per_image
    )


@pytest.mark.parametrize(
    ("sizes", "worth", "expected"),
    [
        ((), [], []),
        ((0,), [], []),
        ((1,), [0.0], [True]),  # the last one stays, whatever its score
        ((0, 1), [0.1], [True]),
        ((4,), [0.1, 0.4, 0.3, 0.2], [False, True, True, False]),
        ((2, 2), [0.9, 0.8, 0.1, 0.2], [True, False, False, True]),  # each photo by itself
    ],
)
def test_the_better_half_of_each_photo_stays(sizes: tuple[int, ...], worth: list[float], expected: list[bool]) -> None:
    stays = HALF(torch.tensor(worth), meta_of(APART[: len(worth)], sizes))
    assert stays.tolist() == expected


def test_all_views_of_a_photo_keep_the_same() -> None:
    boxes = torch.cat([APART, APART.flip(0)])  # the scores of the second view have no effect
    stays = HALF(torch.tensor([0.1, 0.4, 0.3, 0.2] * 2), meta_of(boxes, (4, 4), views_per_image=2))
    assert stays.tolist() == [False, True, True, False] * 2


def test_of_two_alike_the_better_one_stays() -> None:
    boxes = torch.tensor([[0.0, 0, 10, 10], [0, 0, 10, 9], [20, 0, 30, 10], [40, 0, 50, 10]])
    stays = HALF(torch.tensor([0.8, 0.9, 0.1, 0.2]), meta_of(boxes, (4,)))
    assert stays.tolist() == [False, True, False, True]


def best_by_loops(boxes: torch.Tensor, worth: torch.Tensor, most: int, nms_iou: float) -> list[int]:
    kept: list[int] = []
    for row in sorted(range(len(boxes)), key=lambda r: (-worth[r].item(), r)):
        alike = any(bool(iou(boxes[row : row + 1], boxes[k : k + 1]) > nms_iou) for k in kept)  # in single precision
        if len(kept) < most and not alike:
            kept.append(row)
    return kept


@given(box_sets(high=12), st.sampled_from([0.1, 0.3, 0.5, 0.9, 1.0]), st.sampled_from([0.1, 0.5, 0.75, 1.0]))
def test_the_best_of_a_photo_are_those_of_the_loops(boxes: torch.Tensor, keep: float, nms_iou: float) -> None:
    worth = torch.rand(len(boxes), generator=torch.Generator().manual_seed(len(boxes)))
    expected = best_by_loops(boxes, worth, max(1, round(keep * len(boxes))), nms_iou)
    assert Rescore(keep=keep, nms_iou=nms_iou).best(worth, boxes).tolist() == expected


@pytest.mark.parametrize(
    ("rescore", "fraction", "acts"),
    [
        (KEEP_EVERYTHING, 1.0, False),
        (HALF, 0.0, True),
        (Rescore(keep=0.5), 0.2, False),
        (Rescore(keep=0.5), 0.25, True),
    ],
)
def test_when_proposals_are_rescored(rescore: Rescore, fraction: float, acts: bool) -> None:
    assert rescore.acts(fraction) is acts


def rescored(criterion: Criterion, fraction: float = 1.0) -> tuple[LossOutput, torch.Tensor, StageScores]:
    """Losses of a criterion on two photos, and which of their proposals should have stayed."""
    torch.manual_seed(0)
    inputs = make_labeler_input((8, 5), [[1, 0, 1], [0, 1, 0]])
    leaves = [torch.randn(13, width, requires_grad=True) for width in (3, 3, 4, 4, 4, 12, 12, 12)]
    scores = StageScores(leaves[0], leaves[1], tuple(leaves[2:5]), tuple(leaves[5:]))
    embed = functional.normalize(torch.randn(13, 8), dim=1)
    meta = BatchMeta(inputs.proposals, inputs.tags)
    views = plain_views(replace(inputs, embed=embed))
    outcome = criterion(Outputs(scores, embed, embed[:, :0]), meta, views, fraction=fraction)  # type: ignore[arg-type]
    worth = criterion.mil(scores, meta, fraction).scores.detach().sum(dim=1)
    return outcome, criterion.rescore(worth, meta), scores


@pytest.mark.parametrize("labeler", [Oicr(), Discovery()], ids=["oicr", "discovery"])
def test_dropped_proposals_are_no_pseudo_boxes_and_get_no_gradient(labeler: Oicr | Discovery) -> None:
    criterion = Criterion(labeler=labeler, rescore=HALF, contrast=Contrast(enabled=False))
    outcome, stays, scores = rescored(criterion)
    assert 0 < stays.sum() < len(stays)
    assert all(
        stays[labels.pseudo_boxes.rows].all() and len(labels.pseudo_boxes.rows) for labels in outcome.labeling.stages
    )
    outcome.total.backward()
    for stage in (*scores.refine, *scores.deltas):
        assert stage.grad is not None and not stage.grad[~stays].any()
    assert all(stage.grad is not None and stage.grad[stays].any() for stage in scores.refine)
    assert all(not labels.weight[~stays].any() and labels.weight[stays].any() for labels in outcome.labeling.stages)
    assert scores.mil_cls.grad is not None and scores.mil_cls.grad[~stays].any()  # the MIL head itself learns from all


def test_before_it_begins_nothing_changes() -> None:
    late, plain = Criterion(rescore=Rescore(keep=0.5, begin=0.5)), Criterion()
    assert torch.equal(rescored(late, 0.4)[0].total, rescored(plain, 0.4)[0].total)
    assert not torch.equal(rescored(late, 0.5)[0].total, rescored(plain, 0.5)[0].total)
