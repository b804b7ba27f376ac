from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from random_inputs import WORLDS, random_inputs

from strategies import make_labeler_input, no_exemplars
from tag2box import extend
from tag2box.errors import UserError
from tag2box.methods.oicr import Oicr, argmax_pseudo_boxes
from tag2box.methods.oim import Oim
from tag2box.ops.boxes import iou
from tag2box.training.criterion import run_labeler
from tag2box.types import LabelerInput, Proposals, PseudoBoxes, Requirements


def with_vectors(inputs: LabelerInput, dim: int = 3) -> LabelerInput:
    """Feature vectors that correlate with the position, so that neighbours are similar."""
    noise = torch.randn(len(inputs.embed), dim, generator=torch.Generator().manual_seed(1))
    return replace(inputs, vectors=noise + inputs.proposals.boxes[:, :dim] / 50)


@st.composite
def labeler_inputs(draw: st.DrawFn) -> LabelerInput:
    return with_vectors(replace(draw(random_inputs()), fraction=draw(st.sampled_from([0.0, 0.5, 1.0]))))


def loop_pseudo_boxes(labeler: Oim, inputs: LabelerInput, stage: int) -> list[tuple[int, int]]:
    """(row, class): all cores, then what each of them mines, one proposal at a time."""
    cores = argmax_pseudo_boxes(inputs, stage)
    found = list(zip(cores.rows.tolist(), cores.cls.tolist(), strict=True))
    taken = {row for row, _ in found}
    reach = labeler.late_reach if inputs.fraction >= labeler.late_from else labeler.reach
    boxes, vectors = inputs.proposals.boxes, inputs.vectors
    assert vectors is not None
    for core, c in list(found):
        span = next(span for span in inputs.proposals.spans() if core in span)
        far = {r: torch.dist(vectors[r], vectors[core]).item() for r in span}
        near = [r for r in span if iou(boxes[r][None], boxes[core][None]).item() >= labeler.foreground_iou]
        limit = reach * sum(far[r] for r in near) / len(near)
        accepted = [core]
        for row in sorted(span, key=lambda r: far[r]):
            apart = all(iou(boxes[row][None], boxes[a][None]).item() <= labeler.apart_iou for a in accepted)
            if far[row] < limit and row not in taken and apart:
                accepted.append(row)
        taken |= set(accepted)
        found += [(row, c) for row in accepted[1:]]
    return found


@settings(max_examples=40)
@given(labeler_inputs(), st.sampled_from([1.0, 5.0]), st.sampled_from([1e-6, 0.3]))
def test_pseudo_boxes_match_the_loop(inputs: LabelerInput, reach: float, apart_iou: float) -> None:
    labeler = Oim(reach=reach, late_reach=0.7, late_from=0.5, apart_iou=apart_iou)
    for stage, labels in enumerate(labeler(inputs).stages):
        pseudo_boxes = labels.pseudo_boxes
        found = list(zip(pseudo_boxes.rows.tolist(), pseudo_boxes.cls.tolist(), strict=True))
        assert found == loop_pseudo_boxes(labeler, inputs, stage)
        assert torch.equal(pseudo_boxes.score, inputs.probs[stage][pseudo_boxes.rows, pseudo_boxes.cls])


@settings(max_examples=40)
@given(labeler_inputs())
def test_mined_boxes_are_positive_alone_and_no_proposal_is_mined_twice(inputs: LabelerInput) -> None:
    images, background = inputs.proposals.image_ids(), inputs.tags.shape[1]
    for stage, labels in enumerate(Oim()(inputs).stages):
        cores = argmax_pseudo_boxes(inputs, stage)
        mined = labels.pseudo_boxes.rows[len(cores) :]
        assert len(set(mined.tolist()) | set(cores.rows.tolist())) == len(mined) + len(set(cores.rows.tolist()))
        assert torch.equal(labels.cls[mined], labels.pseudo_boxes.cls[len(cores) :])
        assert inputs.tags[images[labels.pseudo_boxes.rows], labels.pseudo_boxes.cls].all()
        others = torch.ones(len(images), dtype=torch.bool)
        others[mined] = False
        owned = others & (labels.owner >= len(cores))
        assert (labels.cls[owned] == background).all()


@settings(max_examples=40)
@given(labeler_inputs())
def test_without_reach_it_is_argmax(inputs: LabelerInput) -> None:
    mine, theirs = Oim(reach=0, late_reach=0)(inputs), Oicr()(inputs)
    for ours, plain in zip(mine.stages, theirs.stages, strict=True):
        assert torch.equal(ours.cls, plain.cls)
        assert torch.equal(ours.weight, plain.weight)
        assert torch.equal(ours.pseudo_boxes.rows, plain.pseudo_boxes.rows)


def twins(fraction: float = 0.0) -> LabelerInput:
    """A core, its neighbour, a translated copy of both, and a place that is half alike; one high score."""
    boxes = torch.tensor([[0.0, 0, 10, 10], [1, 0, 11, 10], [50, 0, 60, 10], [51, 0, 61, 10], [80, 0, 90, 10]])
    vectors = torch.tensor([[1.0, 0], [1, 0.2], [1, 0], [1, 0.2], [1, 0.4]])
    probs = torch.tensor([[0.9], [0.1], [0.1], [0.2], [0.1]])
    tags = torch.ones(1, 1, dtype=torch.bool)
    embed = torch.zeros(5, 2)
    return LabelerInput(Proposals(boxes, (5,)), tags, (probs,), embed, no_exemplars(2, 1), vectors, fraction=fraction)


def test_it_finds_a_translated_copy_of_the_core() -> None:
    labels = Oim()(twins()).stages[0]  # D = 0.1, so a reach of 5 takes what is nearer than 0.5
    assert labels.pseudo_boxes.rows.tolist() == [0, 2, 4]
    assert labels.cls.tolist() == [0, 0, 0, 1, 0]


@pytest.mark.parametrize(("fraction", "rows"), [(0.0, [0, 2, 4]), (0.77, [0, 2, 4]), (0.78, [0, 2]), (1.0, [0, 2])])
def test_late_in_training_it_reaches_less_far(fraction: float, rows: list[int]) -> None:
    assert Oim()(twins(fraction)).stages[0].pseudo_boxes.rows.tolist() == rows


@pytest.mark.parametrize(("sizes", "tags"), WORLDS)
def test_it_survives(sizes: tuple[int, ...], tags: list[list[int]]) -> None:
    inputs = with_vectors(make_labeler_input(sizes, tags))
    for labels in Oim()(inputs).stages:
        assert len(labels.pseudo_boxes) >= sum(sum(t) for t, n in zip(tags, sizes, strict=True) if n)
        assert labels.cls.shape == labels.owner.shape == labels.weight.shape == (sum(sizes),)
        assert labels.weight.isfinite().all()


def test_nothing_is_differentiated() -> None:
    inputs = with_vectors(make_labeler_input((6,), [[1, 1]]))
    inputs = replace(inputs, vectors=inputs.vectors.clone().requires_grad_())  # type: ignore[union-attr]
    assert not run_labeler(Oim(), inputs).stages[0].weight.requires_grad


def test_it_is_registered_and_requires_vectors() -> None:
    assert extend.find_part("labeler", "oim") is Oim
    assert Oim().requirements == Requirements(vectors=True)
    with pytest.raises(UserError, match="feature vectors"):
        Oim()(make_labeler_input((2,), [[1]]))


def test_pseudo_boxes_are_proposals() -> None:
    pseudo_boxes = Oim()(twins()).stages[0].pseudo_boxes
    assert isinstance(pseudo_boxes, PseudoBoxes) and pseudo_boxes.boxes is None
