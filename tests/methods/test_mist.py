from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, strategies as st
from random_inputs import WORLDS, random_inputs

from conftest import background_last, golden_names, load_golden
from strategies import make_labeler_input
from tag2box import extend
from tag2box.methods.mist import Mist
from tag2box.methods.oicr import argmax_pseudo_boxes
from tag2box.ops.boxes import encode, iou
from tag2box.types import LabelerInput, Proposals, Requirements

EDGE = torch.tensor([0.0, 0.0, 1.0, 1.0])  # the references count pixels inclusively


def loop_pseudo_boxes(labeler: Mist, inputs: LabelerInput, stage: int) -> list[tuple[int, int]]:
    """(row, class) of all pseudo boxes, one rank at a time."""
    found, boxes = [], inputs.proposals.boxes
    for span, tags in zip(inputs.proposals.spans(), inputs.tags.tolist(), strict=True):
        for c in [c for c, present in enumerate(tags) if present]:
            ranked = sorted(span, key=lambda r: (-inputs.probs[stage][r, c].item(), r))
            top = ranked[: max(int(labeler.share * len(span)), 1)]
            for i, row in enumerate(top):
                if all(iou(boxes[row][None], boxes[b][None]).item() < labeler.apart for b in top[:i]):
                    found.append((row, c))
    return found


def loop_labels(
    labeler: Mist, inputs: LabelerInput, pseudo_boxes: list[tuple[int, int]], stage: int
) -> list[tuple[int, float]]:
    """(class, weight) of every proposal: those of the nearest pseudo box in its image, the first if equally near."""
    labels, boxes, background = [], inputs.proposals.boxes, inputs.tags.shape[1]
    for span in inputs.proposals.spans():
        own = [s for s in pseudo_boxes if s[0] in span]
        for row in span:
            near = [iou(boxes[row][None], boxes[s][None]).item() for s, _ in own]
            best = near.index(max(near)) if near else -1
            is_foreground = best >= 0 and near[best] >= labeler.foreground_iou
            weight = inputs.probs[stage][own[best]].item() if best >= 0 else 0.0
            labels.append((own[best][1] if is_foreground else background, weight))
    return labels


@given(
    random_inputs(), st.sampled_from([0.15, 0.5, 1.0]), st.sampled_from([0.1, 0.2, 0.6]), st.sampled_from([0.3, 0.5])
)
def test_labels_match_the_loop(inputs: LabelerInput, share: float, apart: float, foreground_iou: float) -> None:
    labeler = Mist(share=share, apart=apart, foreground_iou=foreground_iou)
    for stage, labels in enumerate(labeler(inputs).stages):
        pseudo_boxes = loop_pseudo_boxes(labeler, inputs, stage)
        assert (
            list(zip(labels.pseudo_boxes.rows.tolist(), labels.pseudo_boxes.cls.tolist(), strict=True)) == pseudo_boxes
        )
        expected = loop_labels(labeler, inputs, pseudo_boxes, stage)
        assert list(zip(labels.cls.tolist(), labels.weight.tolist(), strict=True)) == expected


@pytest.mark.parametrize(("sizes", "tags"), WORLDS)
def test_it_survives(sizes: tuple[int, ...], tags: list[list[int]]) -> None:
    inputs = make_labeler_input(sizes, tags)
    pairs = sum(sum(t) for t, n in zip(tags, sizes, strict=True) if n)
    for labels in Mist()(inputs).stages:
        assert labels.cls.shape == labels.weight.shape == (sum(sizes),)
        assert len(labels.pseudo_boxes) >= pairs if pairs else len(labels.pseudo_boxes) == 0
        assert labels.pseudo_boxes.rows.dtype == torch.long


@given(random_inputs())
def test_the_best_proposal_of_a_class_is_always_a_pseudo_box(inputs: LabelerInput) -> None:
    """Unlike with argmax, one proposal may be a pseudo box of two classes."""
    for stage, labels in enumerate(Mist(share=0.5)(inputs).stages):
        pairs = set(zip(labels.pseudo_boxes.rows.tolist(), labels.pseudo_boxes.cls.tolist(), strict=True))
        for span, tags in zip(inputs.proposals.spans(), inputs.tags, strict=True):
            for c in tags.nonzero().flatten().tolist() if len(span) else ():
                top = int(inputs.probs[stage][span.start : span.stop, c].argmax()) + span.start
                assert (top, c) in pairs


def test_with_a_share_of_one_proposal_it_is_argmax() -> None:
    inputs = make_labeler_input((30, 20), [[1, 0], [0, 1]])
    assert torch.equal(Mist(share=0.01).find(inputs, inputs.probs[0]).rows, argmax_pseudo_boxes(inputs, 0).rows)


@pytest.mark.parametrize("name", golden_names("mist_layer_*.npz"))
def test_labels_weights_and_targets_are_those_of_the_reference(name: str) -> None:
    """Labels exact; weights and targets to float32 rounding (targets 1e-4: logs of ratios)."""
    g = load_golden(name)
    boxes = torch.as_tensor(g["in_boxes"]) + EDGE
    probs = background_last(torch.as_tensor(g["in_source_score"]))[:, :-1]
    classes = probs.shape[1]
    bare = make_labeler_input((len(boxes),), [[0] * classes])
    tags = torch.as_tensor(g["in_labels"])[None, 1:] > 0
    inputs = replace(bare, proposals=Proposals(boxes, (len(boxes),)), tags=tags, probs=(probs,))
    labels = Mist(share=round(float(g["in_p"]), 6), apart=round(float(g["in_iou_th"]), 6))(inputs).stages[0]
    reference = torch.as_tensor(g["out_pseudo_labels"])
    assert torch.equal(labels.cls, torch.where(reference == 0, classes, reference - 1))
    torch.testing.assert_close(labels.weight, torch.as_tensor(g["out_loss_weights"]).float())
    if len(labels.pseudo_boxes):
        expected = torch.as_tensor(g["out_regression_targets"])
        torch.testing.assert_close(encode(labels.boxes, boxes), expected, atol=1e-4, rtol=1e-4)


def test_it_is_registered_and_requires_nothing_more() -> None:
    assert extend.find_part("labeler", "mist") is Mist
    assert Mist().requirements == Requirements()
