from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings, strategies as st
from random_inputs import WORLDS, random_inputs

from strategies import make_labeler_input
from tag2box import extend
from tag2box.errors import UserError
from tag2box.methods.wsod2 import Wsod2
from tag2box.ops.boxes import decode, encode, iou
from tag2box.recipes import Config
from tag2box.systems import SYSTEMS
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


SHAPE = (20, 30)  # of the superpixel maps: a fifth of the photos' 150 x 100 pixels


def with_superpixels(inputs: LabelerInput, seed: int = 0) -> LabelerInput:
    """Photos of 150 x 100 pixels with superpixels of random rectangles."""
    g, maps = torch.Generator().manual_seed(seed), []
    for _ in inputs.proposals.sizes:
        labels = torch.zeros(SHAPE, dtype=torch.int32)
        for number in range(1, 9):
            y, x = (int(torch.randint(side, (), generator=g)) for side in SHAPE)
            labels[y : y + 8, x : x + 12] = number
        maps.append(labels)
    proposals = replace(inputs.proposals, frames=((150, 100),) * len(maps))
    return replace(inputs, proposals=proposals, side_info=SideInfo(superpixels=tuple(maps)))


def loop_evidence(labels: torch.Tensor, box: torch.Tensor) -> float:
    """Straddling of one box, cell by cell."""
    x1, y1, x2, y2 = (box * box.new_tensor(0.2)).round().tolist()
    inside, outside = Counter[int](), Counter[int]()
    for y, x in product(range(SHAPE[0]), range(SHAPE[1])):
        (inside if x1 <= x < x2 and y1 <= y < y2 else outside)[int(labels[y, x])] += 1
    area = inside.total()
    return 1 - sum(min(n, outside[label]) for label, n in inside.items()) / area if area else 0.0


def loop_regressed(labels: PseudoLabels, deltas: torch.Tensor, inputs: LabelerInput) -> list[float]:
    """One proposal at a time: moved by the regression of its class, then compared with the superpixels."""
    assert inputs.side_info.superpixels is not None
    found, boxes = [0.0] * len(inputs.proposals.boxes), inputs.proposals.boxes
    for image, span in enumerate(inputs.proposals.spans()):
        for r in span:
            c = int(labels.cls[r])
            if c < inputs.tags.shape[1]:
                moved = decode(deltas[r : r + 1, 4 * c : 4 * c + 4], boxes[r : r + 1])[0]
                found[r] = loop_evidence(inputs.side_info.superpixels[image], moved)
    return found


def random_deltas(inputs: LabelerInput, reach: float) -> tuple[torch.Tensor, ...]:
    classes, total = inputs.tags.shape[1], len(inputs.proposals.boxes)
    g = torch.Generator().manual_seed(total)
    return tuple(reach * torch.randn(total, 4 * classes, generator=g) for _ in inputs.probs)


@settings(max_examples=30)
@given(labeler_inputs(), st.floats(0, 8), st.sampled_from(["last", "own"]))
def test_the_evidence_of_regressed_boxes_matches_the_loop(inputs: LabelerInput, reach: float, regressor: str) -> None:
    """It is that of the regressed boxes themselves, wherever the proposals are."""
    classes, deltas = inputs.tags.shape[1], random_deltas(inputs, reach)
    labeler = Wsod2(evidence_of="regressed", near_best=0.5, regressor=regressor)  # type: ignore[arg-type]
    plain = replace(labeler, evidence_of="proposal")(inputs)
    shown = replace(with_superpixels(inputs), deltas=deltas, fraction=0.0)
    for stage, labels in enumerate(labeler(shown).stages):
        assert torch.equal(labels.cls, plain.stages[stage].cls)
        expected = loop_regressed(labels, deltas[-1 if regressor == "last" else stage], shown)
        weights = [e if c < classes else 1.0 for e, c in zip(expected, labels.cls.tolist(), strict=True)]
        assigned = (labels.owner >= 0).tolist()
        assert labels.weight.tolist() == pytest.approx([w * a for w, a in zip(weights, assigned, strict=True)])


@settings(max_examples=30)
@given(labeler_inputs(), st.floats(0, 8))
def test_weights_of_the_system_match_the_loop(inputs: LabelerInput, reach: float) -> None:
    """a times the score of the pseudo box, plus 1 - a times the evidence of the box that regression moves to."""
    labeler = SYSTEMS["wsod2"](Config()).criterion.labeler
    assert isinstance(labeler, Wsod2) and (labeler.belief, labeler.evidence_of) == ("score", "regressed")
    classes, shown = inputs.tags.shape[1], replace(with_superpixels(inputs), deltas=random_deltas(inputs, reach))
    for stage, labels in enumerate(labeler(shown).stages):
        evidence = loop_regressed(labels, shown.deltas[-1], shown)
        for r, owner in enumerate(labels.owner.tolist()):
            expected = 0.0 if owner < 0 else 1.0
            if owner >= 0 and int(labels.cls[r]) < classes:
                row, c = int(labels.pseudo_boxes.rows[owner]), int(labels.pseudo_boxes.cls[owner])
                trained = shown.fraction
                expected = trained * shown.probs[stage][row, c].item() + (1 - trained) * evidence[r]
            assert labels.weight[r].item() == pytest.approx(expected, abs=1e-6)


@settings(max_examples=30)
@given(labeler_inputs(), st.floats(0, 8))
def test_pseudo_boxes_move_only_to_where_the_evidence_is_as_high(inputs: LabelerInput, reach: float) -> None:
    shown = replace(with_superpixels(inputs), deltas=random_deltas(inputs, reach))
    before, after = (Wsod2(evidence_of="regressed", targets=x)(shown).stages for x in ("proposals", "regressed"))  # type: ignore[arg-type]
    assert shown.side_info.superpixels is not None
    images = shown.proposals.image_ids()
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old.pseudo_boxes.rows, new.pseudo_boxes.rows)
        placed = new.pseudo_boxes.placed(shown.proposals)
        for row, c, box in zip(new.pseudo_boxes.rows.tolist(), new.pseudo_boxes.cls.tolist(), placed, strict=True):
            labels, own = shown.side_info.superpixels[int(images[row])], shown.proposals.boxes[row]
            moved = decode(shown.deltas[-1][row : row + 1, 4 * c : 4 * c + 4], own[None])[0]
            is_better = loop_evidence(labels, moved) >= loop_evidence(labels, own)
            assert torch.equal(box, moved if is_better else own)


def test_a_regression_onto_an_object_weighs_more_than_one_beside_it() -> None:
    """Also where no proposal is near: here the box of the superpixel lies between both proposals."""
    boxes, target = torch.tensor([[0.0, 0, 60, 60], [70.0, 0, 90, 20]]), torch.tensor([[20.0, 20, 60, 60]])
    inputs = make_labeler_input((2,), [[1]], stages=1)
    labels = torch.zeros(20, 30, dtype=torch.int32)
    labels[4:12, 4:12] = 1
    inputs = replace(
        inputs,
        proposals=Proposals(boxes, (2,), ((150, 100),)),
        probs=(torch.tensor([[0.9], [0.1]]),),
        side_info=SideInfo(superpixels=(labels,)),
    )
    labeler = Wsod2(evidence_of="regressed")
    assert labeler.requirements == Requirements(superpixels=True, deltas=True)
    for deltas, weight in (
        ((torch.zeros(2, 4),), 1 - 80 / 144),  # 12 x 12 cells, 80 of them of the background
        ((encode(target.expand(2, 4), boxes),), 1.0),
        ((encode(target.expand(2, 4) + 10, boxes),), 1 - (28 + 28) / 64),  # 36 cells of the object
        ((), 1 - 80 / 144),  # without box regression
    ):
        assert labeler(replace(inputs, deltas=deltas)).stages[0].weight[0].item() == pytest.approx(weight)
    with pytest.raises(UserError, match="superpixels"):
        labeler(make_labeler_input((2,), [[1]]))


def test_superpixels_are_flipped_with_the_photo() -> None:
    inputs = with_superpixels(make_labeler_input((6, 4), [[1], [1]], stages=1))
    labeler, maps = Wsod2(evidence_of="regressed"), inputs.side_info.superpixels
    assert maps is not None
    x1, y1, x2, y2 = (inputs.proposals.boxes / 5).round().mul(5).clamp(max=150).unbind(dim=1)
    upright = replace(inputs, proposals=replace(inputs.proposals, boxes=torch.stack([x1, y1, x2, y2], dim=1)))
    flipped = replace(
        upright,
        proposals=replace(inputs.proposals, boxes=torch.stack([150 - x2, y1, 150 - x1, y2], dim=1)),
        side_info=SideInfo(superpixels=tuple(labels.flip(1) for labels in maps)),
    )
    assert torch.equal(labeler(upright).stages[0].weight, labeler(flipped).stages[0].weight)
