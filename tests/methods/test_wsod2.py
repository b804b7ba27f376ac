from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from random_inputs import WORLDS, random_inputs

from strategies import make_labeler_input
from tag2box import extend
from tag2box.errors import UserError
from tag2box.methods.wsod2 import Wsod2
from tag2box.ops.boxes import decode, encode, iou
from tag2box.types import LabelerInput, Proposals, PseudoLabels, Requirements, SideInfo


def with_evidence(inputs: LabelerInput) -> LabelerInput:
    evidence = torch.rand(len(inputs.embed), generator=torch.Generator().manual_seed(2))
    return replace(inputs, side_info=SideInfo(evidence=evidence))


@st.composite
def labeler_inputs(draw: st.DrawFn) -> LabelerInput:
    return with_evidence(replace(draw(random_inputs()), fraction=draw(st.sampled_from([0.0, 0.3, 1.0]))))


def loop_pseudo_boxes(labeler: Wsod2, inputs: LabelerInput, stage: int) -> list[tuple[int, int]]:
    """(row, class), image after image, best first: a candidate falls to a better kept one of any class."""
    probs, boxes, found = inputs.probs[stage], inputs.proposals.boxes, []
    for image, span in enumerate(inputs.proposals.spans()):
        candidates = []
        for c in inputs.tags[image].nonzero().flatten().tolist():
            best = max((probs[r, c] for r in span), default=torch.tensor(0.0))
            candidates += [(r, c) for r in span if probs[r, c] >= labeler.near_best * best]
        kept: list[tuple[int, int]] = []
        for row, c in sorted(candidates, key=lambda x: -probs[x].item()):
            if all(iou(boxes[row][None], boxes[k][None]).item() <= labeler.nms_iou for k, _ in kept):
                kept.append((row, c))
        found += kept
    return found


def loop_labels(
    labeler: Wsod2, inputs: LabelerInput, pseudo_boxes: list[tuple[int, int]], stage: int
) -> list[tuple[int, float]]:
    """(class, weight) of every proposal."""
    boxes, background, evidence = inputs.proposals.boxes, inputs.tags.shape[1], inputs.side_info.evidence
    assert evidence is not None
    trust = min(inputs.fraction / labeler.fade, 1.0)
    labels = []
    for span in inputs.proposals.spans():
        for r in span:
            overlaps = [
                (-iou(boxes[r][None], boxes[s][None]).item(), i) for i, (s, _) in enumerate(pseudo_boxes) if s in span
            ]
            if not overlaps:
                labels.append((background, 0.0))
            elif -min(overlaps)[0] < labeler.foreground_iou:
                labels.append((background, 1.0))
            else:
                owner = pseudo_boxes[min(overlaps)[1]]
                belief = 1.0 if labeler.belief == "one" else inputs.probs[stage][owner].item()
                labels.append((owner[1], trust * belief + (1 - trust) * evidence[r].item()))
    return labels


@settings(max_examples=40)
@given(
    labeler_inputs(), st.sampled_from([0.3, 0.9, 1.0]), st.sampled_from(["one", "score"]), st.sampled_from([0.5, 1.0])
)
def test_pseudo_boxes_and_labels_match_the_loop(
    inputs: LabelerInput, near_best: float, belief: str, fade: float
) -> None:
    labeler = Wsod2(near_best=near_best, belief=belief, fade=fade)  # type: ignore[arg-type]
    for stage, labels in enumerate(labeler(inputs).stages):
        pseudo_boxes = loop_pseudo_boxes(labeler, inputs, stage)
        assert (
            list(zip(labels.pseudo_boxes.rows.tolist(), labels.pseudo_boxes.cls.tolist(), strict=True)) == pseudo_boxes
        )
        assert torch.equal(
            labels.pseudo_boxes.score, inputs.probs[stage][labels.pseudo_boxes.rows, labels.pseudo_boxes.cls]
        )
        expected = loop_labels(labeler, inputs, pseudo_boxes, stage)
        assert labels.cls.tolist() == [x[0] for x in expected]
        assert labels.weight.tolist() == pytest.approx([x[1] for x in expected], abs=1e-6)


@settings(max_examples=40)
@given(labeler_inputs())
def test_the_best_of_all_is_a_pseudo_box_and_pseudo_boxes_lie_apart(inputs: LabelerInput) -> None:
    labeler = Wsod2()
    for stage, labels in enumerate(labeler(inputs).stages):
        rows = set(labels.pseudo_boxes.rows.tolist())
        for image, span in enumerate(inputs.proposals.spans()):
            present = inputs.tags[image].nonzero().flatten()
            if len(span) and len(present):
                best = inputs.probs[stage][span.start : span.stop][:, present].amax(dim=1).argmax() + span.start
                assert int(best) in rows
            inside = labels.pseudo_boxes.rows[
                torch.tensor([r in span for r in labels.pseudo_boxes.rows.tolist()], dtype=torch.bool)
            ]
            boxes = inputs.proposals.boxes[inside]
            assert (iou(boxes, boxes).fill_diagonal_(0) <= labeler.nms_iou).all()


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_evidence_decides_at_first_and_has_no_weight_at_the_end(fraction: float) -> None:
    inputs = with_evidence(replace(make_labeler_input((12,), [[1, 1]], stages=1), fraction=fraction))
    labels = Wsod2()(inputs).stages[0]
    is_foreground = labels.cls < 2
    assert is_foreground.any() and (labels.weight[~is_foreground] == 1).all()
    assert inputs.side_info.evidence is not None
    expected = inputs.side_info.evidence[is_foreground] if fraction == 0 else torch.ones(int(is_foreground.sum()))
    assert torch.allclose(labels.weight[is_foreground], expected)


@pytest.mark.parametrize(("sizes", "tags"), WORLDS)
def test_it_survives(sizes: tuple[int, ...], tags: list[list[int]]) -> None:
    inputs = with_evidence(make_labeler_input(sizes, tags))
    for labels in Wsod2()(inputs).stages:
        assert len(labels.pseudo_boxes) >= sum(1 for t, n in zip(tags, sizes, strict=True) if n and any(t))
        assert labels.cls.shape == labels.weight.shape == (sum(sizes),)
        assert labels.weight.isfinite().all()


def test_it_is_registered_and_requires_evidence() -> None:
    assert extend.find_part("labeler", "wsod2") is Wsod2
    assert Wsod2().requirements == Requirements(evidence=True)
    with pytest.raises(UserError, match="superpixels"):
        Wsod2()(make_labeler_input((2,), [[1]]))


def loop_regressed(labels: PseudoLabels, deltas: torch.Tensor, inputs: LabelerInput) -> list[float]:
    """One proposal at a time: move it, then take the evidence of the first proposal of its photo nearest to it."""
    assert inputs.side_info.evidence is not None
    found, boxes = inputs.side_info.evidence.tolist(), inputs.proposals.boxes
    for span in inputs.proposals.spans():
        for r in span:
            c = int(labels.cls[r])
            if c == inputs.tags.shape[1]:
                continue
            moved = decode(deltas[r : r + 1, 4 * c : 4 * c + 4], boxes[r : r + 1])
            overlaps = [iou(moved, boxes[other][None]).item() for other in span]
            best = max(overlaps)
            if best >= 0.5:
                found[r] = inputs.side_info.evidence[span[overlaps.index(best)]].item()
    return found


@settings(max_examples=40)
@given(labeler_inputs(), st.floats(0, 8))
def test_the_evidence_of_regressed_boxes_matches_the_loop(inputs: LabelerInput, reach: float) -> None:
    classes, total = inputs.tags.shape[1], len(inputs.proposals.boxes)
    g = torch.Generator().manual_seed(total)
    deltas = tuple(reach * torch.randn(total, 4 * classes, generator=g) for _ in inputs.probs)
    labeler = Wsod2(evidence_of="regressed", near_best=0.5)
    plain = replace(labeler, evidence_of="proposal")(inputs)
    for stage, labels in enumerate(labeler(replace(inputs, deltas=deltas, fraction=0.0)).stages):
        assert torch.equal(labels.cls, plain.stages[stage].cls)
        expected = loop_regressed(labels, deltas[stage], inputs)
        weights = [e if c < classes else 1.0 for e, c in zip(expected, labels.cls.tolist(), strict=True)]
        assigned = (labels.owner >= 0).tolist()
        assert labels.weight.tolist() == pytest.approx([w * a for w, a in zip(weights, assigned, strict=True)])


def test_a_regression_that_moves_nothing_changes_nothing_and_one_onto_another_takes_its_evidence() -> None:
    boxes = torch.tensor([[0.0, 0, 10, 10], [4.0, 0, 14, 10], [30.0, 0, 40, 10]])
    inputs = make_labeler_input((3,), [[1]], stages=1)
    inputs = replace(
        inputs,
        proposals=Proposals(boxes, (3,)),
        probs=(torch.tensor([[0.9], [0.1], [0.1]]),),
        side_info=SideInfo(evidence=torch.tensor([0.2, 0.7, 0.5])),
    )
    labeler = Wsod2(evidence_of="regressed")
    assert labeler.requirements == Requirements(evidence=True, deltas=True)
    for deltas, weight in ((torch.zeros(3, 4), 0.2), (encode(boxes[[1, 1, 2]], boxes), 0.7)):
        assert labeler(replace(inputs, deltas=(deltas,))).stages[0].weight[0].item() == pytest.approx(weight)
    away = torch.tensor([[100.0, 100, 0, 0]]).repeat(3, 1)  # to a place without proposals
    assert labeler(replace(inputs, deltas=(away,))).stages[0].weight[0].item() == pytest.approx(0.2)
    assert labeler(inputs).stages[0].weight[0].item() == pytest.approx(0.2)  # without box regression
