from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from random_inputs import WORLDS

from strategies import make_labeler_input, no_exemplars
from tag2box import extend
from tag2box.methods.oicr import Oicr
from tag2box.methods.slv import Slv, voted_boxes
from tag2box.ops.boxes import iou
from tag2box.training.criterion import Criterion
from tag2box.types import LabelerInput, Proposals, Requirements


@st.composite
def labeler_inputs(draw: st.DrawFn) -> LabelerInput:
    images, classes = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    sizes = tuple(draw(st.integers(0, 9)) for _ in range(images))
    tags = [[draw(st.integers(0, 1)) for _ in range(classes)] for _ in range(images)]
    inputs = make_labeler_input(sizes, tags, stages=draw(st.integers(1, 3)), seed=draw(st.integers(0, 10_000)))
    return replace(inputs, fraction=draw(st.sampled_from([0.0, 0.25, 1.0])))


def loop_last(labeler: Slv, inputs: LabelerInput) -> tuple[list[tuple], list[tuple[int, float, int]]]:
    """Pseudo boxes (row, class, box) and labels (class, weight, owner) of the last stage."""
    probs, boxes, background = inputs.probs[-1], inputs.proposals.boxes, inputs.tags.shape[1]
    ramp = min(inputs.fraction / labeler.ramp, 1.0)
    pseudo_boxes: list[tuple] = []
    labels = []
    for image, span in enumerate(inputs.proposals.spans()):
        own = len(pseudo_boxes)
        for c in range(background):
            if not inputs.tags[image, c] or not len(span):
                continue
            voters = [r for r in span if probs[r, c] > labeler.min_score]
            voters = voters or [max(span, key=lambda r: (probs[r, c].item(), -r))]
            votes = probs[voters, c] if probs[voters, c].min() > 0 else torch.ones(1)
            for box in voted_boxes(boxes[voters], votes, threshold=labeler.threshold, cell=labeler.cell):
                nearest = max(span, key=lambda r: (iou(boxes[r][None], box[None]).item(), -r))
                pseudo_boxes.append((nearest, c, box.tolist()))
        for r in span:
            overlaps = [
                (-iou(boxes[r][None], torch.tensor([s[2]])).item(), i) for i, s in enumerate(pseudo_boxes) if i >= own
            ]
            if not overlaps:
                labels.append((background, 0.0, -1))
                continue
            negative, owner = min(overlaps)
            cls = pseudo_boxes[owner][1] if -negative >= labeler.foreground_iou else background
            weight = 1.0 if labeler.weights == "even" else probs[pseudo_boxes[owner][0], pseudo_boxes[owner][1]].item()
            labels.append((cls, weight * ramp, owner))
    return pseudo_boxes, labels


@settings(max_examples=40)
@given(
    labeler_inputs(), st.sampled_from(["even", "score"]), st.sampled_from([0.0, 0.5, 0.99]), st.sampled_from([0.3, 1.0])
)
def test_the_last_stage_matches_the_loop(inputs: LabelerInput, weights: str, min_score: float, ramp: float) -> None:
    labeler = Slv(weights=weights, min_score=min_score, ramp=ramp, cell=2.0)  # type: ignore[arg-type]
    last = labeler(inputs).stages[-1]
    pseudo_boxes, labels = loop_last(labeler, inputs)
    assert last.pseudo_boxes.rows.tolist() == [s[0] for s in pseudo_boxes]
    assert last.pseudo_boxes.cls.tolist() == [s[1] for s in pseudo_boxes]
    assert last.pseudo_boxes.placed(inputs.proposals).tolist() == [s[2] for s in pseudo_boxes]
    assert torch.equal(last.pseudo_boxes.score, inputs.probs[-1][last.pseudo_boxes.rows, last.pseudo_boxes.cls])
    assert last.cls.tolist() == [x[0] for x in labels]
    assert last.weight.tolist() == pytest.approx([x[1] for x in labels])
    assert last.owner.tolist() == [x[2] for x in labels]


@settings(max_examples=40)
@given(labeler_inputs())
def test_the_stages_before_are_argmax(inputs: LabelerInput) -> None:
    mine, theirs = Slv()(inputs).stages, Oicr()(inputs).stages
    assert len(mine) == len(theirs)
    for ours, plain in zip(mine[:-1], theirs[:-1], strict=True):
        assert torch.equal(ours.cls, plain.cls)
        assert torch.equal(ours.weight, plain.weight)


@settings(max_examples=40)
@given(labeler_inputs())
def test_every_tag_of_a_photo_with_proposals_gets_a_box(inputs: LabelerInput) -> None:
    pseudo_boxes = Slv()(inputs).stages[-1].pseudo_boxes
    images = inputs.proposals.image_ids()
    pairs = set(zip(images[pseudo_boxes.rows].tolist(), pseudo_boxes.cls.tolist(), strict=True))
    assert pairs == {(i, c) for i, c in inputs.tags.nonzero().tolist() if inputs.proposals.sizes[i]}


def one_class(boxes: list[list[float]], scores: list[float], fraction: float = 1.0) -> LabelerInput:
    probs, embed = torch.tensor(scores)[:, None], torch.zeros(len(boxes), 2)
    proposals = Proposals(torch.tensor(boxes), (len(boxes),))
    tags = torch.ones(1, 1, dtype=torch.bool)
    return LabelerInput(proposals, tags, (probs, probs), embed, no_exemplars(2, 2), fraction=fraction)


BOXES = [[3.3, 7.1, 41.2, 55.9], [5.0, 9.0, 39.0, 50.0], [60.0, 0.0, 90.0, 20.0]]


def test_one_confident_box_returns_that_box() -> None:
    last = Slv()(one_class(BOXES, [0.9, 0.0, 0.0])).stages[-1]
    assert torch.equal(last.pseudo_boxes.placed(one_class(BOXES, [0.9, 0, 0]).proposals), torch.tensor(BOXES[:1]))
    assert last.pseudo_boxes.rows.tolist() == [0]
    assert last.cls.tolist() == [0, 0, 1]


@pytest.mark.parametrize("scores", [[1e-4, 1e-5, 0.0], [float("nan")] * 3, [0.0, 0.0, 0.0]])
def test_if_no_score_is_high_enough_only_the_best_votes(scores: list[float]) -> None:
    pseudo_boxes = Slv()(one_class(BOXES, scores)).stages[-1].pseudo_boxes
    assert pseudo_boxes.placed(one_class(BOXES, scores).proposals).tolist() == [pytest.approx(BOXES[0])]


def test_two_objects_of_one_class_are_two_boxes() -> None:
    pseudo_boxes = Slv()(one_class(BOXES, [0.5, 0.0, 0.4])).stages[-1].pseudo_boxes
    assert pseudo_boxes.boxes is not None
    assert pseudo_boxes.boxes.tolist() == [pytest.approx(BOXES[2]), pytest.approx(BOXES[0])]  # by their first cell


@pytest.mark.parametrize(("fraction", "ramp", "expected"), [(0.0, 1.0, 0.0), (0.3, 1.0, 0.3), (0.3, 0.2, 1.0)])
def test_the_last_stage_grows_with_the_training(fraction: float, ramp: float, expected: float) -> None:
    stages = Slv(ramp=ramp)(one_class(BOXES, [0.9, 0.2, 0.1], fraction)).stages
    assert stages[-1].weight.tolist() == pytest.approx([expected] * 3)
    assert stages[0].weight.tolist() == pytest.approx([0.9] * 3)


@pytest.mark.parametrize(("sizes", "tags"), WORLDS)
def test_it_survives(sizes: tuple[int, ...], tags: list[list[int]]) -> None:
    inputs = replace(make_labeler_input(sizes, tags), fraction=0.5)
    labeling = Slv()(inputs)
    assert len(labeling.stages) == 3
    last = labeling.stages[-1]
    assert len(last.pseudo_boxes) >= sum(sum(t) for t, n in zip(tags, sizes, strict=True) if n)
    assert last.pseudo_boxes.placed(inputs.proposals).shape == (len(last.pseudo_boxes), 4)
    assert last.cls.shape == last.weight.shape == (sum(sizes),)


def test_it_is_registered_and_requires_only_scores() -> None:
    assert extend.find_part("labeler", "slv") is Slv
    assert Slv().requirements == Requirements()


@settings(max_examples=40)
@given(labeler_inputs(), st.sampled_from([("person", "a", "b"), ("a", "person", "b"), ("a", "b", "c")]))
def test_people_have_a_threshold_of_their_own(inputs: LabelerInput, names: tuple[str, ...]) -> None:
    """Class by class as a labeler with one threshold for all."""
    labeler = Slv(threshold=0.7, low_threshold=0.2, cell=1.0)
    found = labeler.for_classes(names).find(inputs, inputs.probs[-1])
    parts = {t: Slv(threshold=t, cell=1.0).find(inputs, inputs.probs[-1]) for t in (0.2, 0.7)}
    for c in range(inputs.tags.shape[1]):
        wanted = parts[0.2 if names[c] == "person" else 0.7]
        for kind in ("rows", "score", "boxes"):
            assert torch.equal(getattr(found, kind)[found.cls == c], getattr(wanted, kind)[wanted.cls == c])


def test_names_of_classes_are_no_setting_and_reach_the_labeler_of_a_criterion() -> None:
    plain = Criterion(labeler=Slv(low_classes=("cat",)))
    bound = plain.for_classes(["dog", "cat"])
    assert isinstance(bound.labeler, Slv) and isinstance(plain.labeler, Slv)
    assert [bound.labeler.threshold_of(c) for c in (0, 1)] == [0.5, 0.2]
    assert [plain.labeler.threshold_of(c) for c in (0, 1)] == [0.5, 0.5]
    assert Criterion(labeler=Oicr()).for_classes(["dog"]) == Criterion(labeler=Oicr())
