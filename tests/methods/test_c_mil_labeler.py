from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st

from strategies import make_labeler_input
from tag2box import extend
from tag2box.methods.c_mil import CMilLabeler, continuation
from tag2box.methods.oicr import Oicr
from tag2box.ops.boxes import iou
from tag2box.types import Requirements

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


def test_at_first_only_the_pseudo_boxes_themselves_are_certain() -> None:
    inputs = make_labeler_input((12,), [[1, 1, 0]])
    for labels in CMilLabeler()(inputs).stages:
        sure = (labels.weight > 0).nonzero().flatten().tolist()
        assert sure == sorted(labels.pseudo_boxes.rows.tolist())
        assert (labels.cls[sure] < 3).all()


def test_doubt_shrinks_with_training() -> None:
    inputs = make_labeler_input((60,), [[1, 1]])
    doubt = [int((CMilLabeler()(replace(inputs, fraction=t)).stages[0].weight == 0).sum()) for t in (0, 0.01, 0.1, 1)]
    assert doubt == sorted(doubt, reverse=True)
    assert doubt[-1] == 0


def test_it_is_registered() -> None:
    assert extend.find_part("labeler", "c_mil") is CMilLabeler
    assert CMilLabeler().requirements == Requirements()
