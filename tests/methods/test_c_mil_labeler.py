from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
import torch
from hypothesis import given, settings, strategies as st

from strategies import make_labeler_input
from tag2box import extend
from tag2box.methods.c_mil import CMil, CMilLabeler, continuation
from tag2box.methods.oicr import Oicr
from tag2box.ops.boxes import iou
from tag2box.types import BatchMeta, LabelerInput, Requirements, StageScores

SUBSETS = CMilLabeler(positives="subset")
WORLDS = [
    ((), []),
    ((0,), [[1, 1]]),
    ((1,), [[1, 0, 1]]),
    ((4,), [[0, 0]]),
    ((9, 0, 14), [[1, 0, 1], [1, 1, 1], [0, 1, 0]]),
    ((30,), [[1] * 25]),
]


@pytest.mark.parametrize(("sizes", "tags"), WORLDS)
@pytest.mark.parametrize("fraction", [0.0, 0.001, 0.1, 1.0])
@pytest.mark.parametrize("steepness", [1.0, 2000.0])
def test_labels_match_the_loop(sizes: tuple, tags: list, fraction: float, steepness: float) -> None:
    inputs = replace(make_labeler_input(sizes, tags), fraction=fraction)
    half = continuation(fraction, steepness) / 2
    classes = inputs.tags.shape[1]
    boxes = inputs.proposals.boxes
    for ours, plain in zip(CMilLabeler(steepness=steepness)(inputs).stages, Oicr()(inputs).stages, strict=True):
        assert torch.equal(ours.pseudo_boxes.rows, plain.pseudo_boxes.rows) and torch.equal(ours.owner, plain.owner)
        for r, owner in enumerate(plain.owner.tolist()):
            cls, weight = classes, 0.0
            if owner >= 0:
                overlap = iou(boxes[r][None], boxes[plain.pseudo_boxes.rows[owner]][None]).item()
                sure = overlap >= 1 - half or overlap < half
                cls = int(plain.pseudo_boxes.cls[owner]) if overlap >= 1 - half else classes
                weight = plain.pseudo_boxes.score[owner].item() if sure else 0.0
            assert (int(ours.cls[r]), ours.weight[r].item()) == (cls, weight)


@settings(max_examples=40)
@given(st.integers(0, 500))
def test_in_the_end_it_is_argmax_labelling(seed: int) -> None:
    inputs = replace(make_labeler_input((12, 9), [[1, 0, 1], [0, 1, 0]], seed=seed), fraction=1.0)
    for ours, plain in zip(CMilLabeler()(inputs).stages, Oicr()(inputs).stages, strict=True):
        assert torch.equal(ours.cls, plain.cls) and torch.equal(ours.weight, plain.weight)


def loop_subset_labels(inputs: LabelerInput, half: float) -> tuple[list[tuple], list[tuple]]:
    """(row, class, score) of the chosen subsets; (class, weight) of every proposal. Stage 1, by the definition."""
    probs, boxes, classes = inputs.probs[0], inputs.proposals.boxes, inputs.tags.shape[1]
    assert inputs.subsets is not None
    ids, pseudo, labels = inputs.subsets.tolist(), [], []
    for image, span in enumerate(inputs.proposals.spans()):
        taken: list[int] = []
        chosen = []
        for c in inputs.tags[image].nonzero().flatten().tolist() if len(span) else []:
            groups = {s: [r for r in span if ids[r] == s] for s in sorted({ids[r] for r in span})}
            free = {s: rows for s, rows in groups.items() if any(r not in taken for r in rows)}
            f = {s: sum(probs[r, c].item() for r in rows) for s, rows in groups.items()}
            best = max(free, key=lambda s: f[s], default=min(groups))
            row = max(
                (r for r in groups[best] if r not in taken), key=lambda r: probs[r, c].item(), default=groups[best][0]
            )
            taken.append(row)
            chosen.append((row, c, f[best], groups[best]))
        pseudo += [x[:3] for x in chosen]
        for r in span:
            near = [(max(iou(boxes[r][None], boxes[m][None]).item() for m in x[3]), x) for x in chosen]
            most = max((overlap for overlap, _ in near), default=0.0)
            equal = [x for overlap, x in near if overlap == most]
            owner = max(equal, key=lambda x: x[2] if most > 0 else 0.0, default=None)
            if owner is None or half <= most < 1 - half:
                labels.append((classes, 0.0))
            else:
                labels.append((owner[1] if most >= 1 - half else classes, owner[2]))
    return pseudo, labels


@pytest.mark.parametrize(("sizes", "tags"), [*WORLDS, ((2,), [[1, 1, 1]])])
@pytest.mark.parametrize("fraction", [0.0, 0.001, 0.1, 1.0])
@pytest.mark.parametrize("share", ["best", "all"])
def test_labels_of_the_first_stage_follow_the_chosen_subsets(
    sizes: tuple, tags: list, fraction: float, share: Literal["best", "all"]
) -> None:
    inputs = replace(make_labeler_input(sizes, tags), fraction=fraction)
    total, classes = inputs.probs[0].shape
    g = torch.Generator().manual_seed(1)
    logits = torch.randn(2, total, classes, generator=g)
    made = CMil(share=share)(
        StageScores(logits[0], logits[1], (), ()), BatchMeta(inputs.proposals, inputs.tags), fraction
    )
    inputs = replace(inputs, probs=(made.scores, *inputs.probs[1:]), subsets=made.subsets)
    ours = SUBSETS(inputs).stages
    pseudo, expected = loop_subset_labels(inputs, continuation(fraction, 2000.0) / 2)
    own = ours[0].pseudo_boxes
    assert list(zip(own.rows.tolist(), own.cls.tolist(), strict=True)) == [x[:2] for x in pseudo]
    assert own.score.tolist() == pytest.approx([x[2] for x in pseudo])
    assert ours[0].cls.tolist() == [x[0] for x in expected]
    assert ours[0].weight.tolist() == pytest.approx([x[1] for x in expected])
    for later, top in zip(ours[1:], CMilLabeler()(inputs).stages[1:], strict=True):
        assert torch.equal(later.cls, top.cls) and torch.equal(later.weight, top.weight)


@settings(max_examples=40)
@given(st.integers(0, 500))
def test_subsets_of_one_box_give_argmax_labelling_in_the_end(seed: int) -> None:
    inputs = replace(make_labeler_input((12, 9), [[1, 0, 1], [0, 1, 0]], seed=seed), fraction=1.0)
    inputs = replace(inputs, subsets=torch.arange(21))
    for ours, plain in zip(SUBSETS(inputs).stages, Oicr()(inputs).stages, strict=True):
        assert torch.equal(ours.cls, plain.cls) and torch.equal(ours.weight, plain.weight)
        assert torch.equal(ours.pseudo_boxes.rows, plain.pseudo_boxes.rows) and torch.equal(ours.boxes, plain.boxes)


def test_at_first_all_boxes_of_the_subset_are_positive() -> None:
    inputs = replace(make_labeler_input((12,), [[0, 1, 0]]), subsets=torch.zeros(12, dtype=torch.long))
    first, *later = SUBSETS(inputs).stages
    assert (first.cls == 1).all() and (first.weight > 0).all()
    assert all(int((labels.cls < 3).sum()) == 1 for labels in later)


def test_at_first_only_the_pseudo_boxes_themselves_are_certain() -> None:
    inputs = make_labeler_input((12,), [[1, 1, 0]])
    for labels in CMilLabeler()(inputs).stages:
        sure = (labels.weight > 0).nonzero().flatten().tolist()
        assert sure == sorted(labels.pseudo_boxes.rows.tolist())
        assert (labels.cls[sure] < 3).all()


def test_without_subsets_the_first_stage_has_the_top_box_too() -> None:
    inputs = replace(make_labeler_input((12, 5), [[1, 1, 0], [0, 0, 1]]), fraction=0.01)
    for ours, plain in zip(SUBSETS(inputs).stages, CMilLabeler()(inputs).stages, strict=True):
        assert torch.equal(ours.cls, plain.cls) and torch.equal(ours.weight, plain.weight)


def test_doubt_shrinks_with_training() -> None:
    inputs = make_labeler_input((60,), [[1, 1]])
    doubt = [int((CMilLabeler()(replace(inputs, fraction=t)).stages[0].weight == 0).sum()) for t in (0, 0.01, 0.1, 1)]
    assert doubt == sorted(doubt, reverse=True)
    assert doubt[-1] == 0


def test_it_is_registered() -> None:
    assert extend.find_part("labeler", "c_mil") is CMilLabeler
    assert CMilLabeler().requirements == Requirements()
