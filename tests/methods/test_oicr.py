from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, strategies as st

from strategies import make_labeler_input
from tag2box import extend
from tag2box.methods.oicr import Oicr, argmax_pseudo_boxes
from tag2box.ops.boxes import iou
from tag2box.types import LabelerInput, Labeling, Proposals, PseudoLabels, Requirements


@st.composite
def labeler_inputs(draw: st.DrawFn) -> LabelerInput:
    images, classes = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    sizes = tuple(draw(st.integers(0, 6)) for _ in range(images))
    tags = [[draw(st.integers(0, 1)) for _ in range(classes)] for _ in range(images)]
    return make_labeler_input(sizes, tags, seed=draw(st.integers(0, 10_000)))


def loop_pseudo_boxes(inputs: LabelerInput, stage: int) -> list[tuple[int, int, float]]:
    """(row, class, score) of every present class of every image, best free proposal each."""
    found = []
    for span, tags in zip(inputs.proposals.spans(), inputs.tags.tolist(), strict=True):
        taken: set[int] = set()
        for c in [c for c, present in enumerate(tags) if present]:
            if not len(span):
                continue
            free = [r for r in span if r not in taken]
            best = max(free, key=lambda r: (inputs.probs[stage][r, c].item(), -r)) if free else span[0]
            taken.add(best)
            found.append((best, c, inputs.probs[stage][best, c].item()))
    return found


def loop_labels(
    inputs: LabelerInput, pseudo_boxes: list[tuple[int, int, float]], foreground_iou: float
) -> list[tuple[int, float, list[float]]]:
    """(class, weight, box to regress to) of every proposal: those of the nearest pseudo box in its image."""
    boxes, background = inputs.proposals.boxes, inputs.tags.shape[1]
    labels = []
    for span in inputs.proposals.spans():
        own = [s for s in pseudo_boxes if s[0] in span]
        for row in span:
            label = (background, 0.0, boxes[row].tolist())
            best = -1.0
            for pseudo_row, c, score in own:
                overlap = iou(boxes[row][None], boxes[pseudo_row][None]).item()
                if overlap > best:
                    best = overlap
                    label = (c if overlap > foreground_iou else background, score, boxes[pseudo_row].tolist())
            labels.append(label)
    return labels


def as_rows(stage: PseudoLabels) -> list[tuple[int, float, list[float]]]:
    return list(zip(stage.cls.tolist(), stage.weight.tolist(), stage.boxes.tolist(), strict=True))


def as_pseudo_boxes(stage: PseudoLabels) -> list[tuple[int, int, float]]:
    return list(
        zip(
            stage.pseudo_boxes.rows.tolist(),
            stage.pseudo_boxes.cls.tolist(),
            stage.pseudo_boxes.score.tolist(),
            strict=True,
        )
    )


def permuted(inputs: LabelerInput, order: list[int]) -> tuple[LabelerInput, torch.Tensor]:
    """The inputs with their images in another order, and the old row of each new one."""
    spans = inputs.proposals.spans()
    rows = torch.tensor([row for image in order for row in spans[image]], dtype=torch.long)
    sizes = tuple(inputs.proposals.sizes[image] for image in order)
    moved = replace(
        inputs,
        proposals=Proposals(inputs.proposals.boxes[rows], sizes),
        tags=inputs.tags[order],
        probs=tuple(p[rows] for p in inputs.probs),
        embed=inputs.embed[rows],
    )
    return moved, rows


@given(labeler_inputs(), st.sampled_from([0.3, 0.5, 0.9]))
def test_labels_match_the_loop(inputs: LabelerInput, foreground_iou: float) -> None:
    labeling = Oicr(foreground_iou=foreground_iou)(inputs)
    assert len(labeling.stages) == len(inputs.probs)
    assert labeling.thresholds == ()
    for stage, labels in enumerate(labeling.stages):
        pseudo_boxes = loop_pseudo_boxes(inputs, stage)
        assert as_pseudo_boxes(labels) == pseudo_boxes
        assert as_rows(labels) == loop_labels(inputs, pseudo_boxes, foreground_iou)


@given(labeler_inputs(), st.randoms(use_true_random=False))
def test_the_order_of_images_does_not_matter(inputs: LabelerInput, random: object) -> None:
    order = list(range(len(inputs.tags)))
    random.shuffle(order)  # type: ignore[attr-defined]
    moved, rows = permuted(inputs, order)
    for before, after in zip(Oicr()(inputs).stages, Oicr()(moved).stages, strict=True):
        assert torch.equal(before.cls[rows], after.cls)
        assert torch.equal(before.weight[rows], after.weight)
        assert torch.equal(before.boxes[rows], after.boxes)
        back = sorted(zip(rows[after.pseudo_boxes.rows].tolist(), after.pseudo_boxes.cls.tolist(), strict=True))
        assert back == sorted(zip(before.pseudo_boxes.rows.tolist(), before.pseudo_boxes.cls.tolist(), strict=True))


@given(labeler_inputs())
def test_every_pseudo_box_has_a_present_class_and_is_its_own_foreground(inputs: LabelerInput) -> None:
    images = inputs.proposals.image_ids()
    for labels in Oicr()(inputs).stages:
        pseudo_boxes = labels.pseudo_boxes
        assert inputs.tags[images[pseudo_boxes.rows], pseudo_boxes.cls].all()
        assert (labels.cls[pseudo_boxes.rows] < inputs.tags.shape[1]).all()


@pytest.mark.parametrize(
    ("sizes", "tags"),
    [
        ((0,), [[1, 1]]),  # no proposals
        ((3,), [[0, 0]]),  # no tags
        ((0, 0), [[1], [0]]),
        ((2, 0), [[0, 0], [1, 0]]),
    ],
)
def test_nothing_to_find_gives_background_of_no_weight(sizes: tuple[int, ...], tags: list[list[int]]) -> None:
    inputs = make_labeler_input(sizes, tags)
    for labels in Oicr()(inputs).stages:
        assert len(labels.pseudo_boxes) == 0
        assert labels.pseudo_boxes.rows.dtype == torch.long
        assert labels.cls.tolist() == [inputs.tags.shape[1]] * sum(sizes)
        assert labels.weight.tolist() == [0.0] * sum(sizes)


def test_one_proposal_serves_all_classes() -> None:
    inputs = make_labeler_input((1,), [[1, 0, 1]])
    pseudo_boxes = argmax_pseudo_boxes(inputs, 0)
    assert (pseudo_boxes.rows.tolist(), pseudo_boxes.cls.tolist()) == ([0, 0], [0, 2])
    assert Oicr()(inputs).stages[0].cls.tolist() == [0]  # the first of equally near pseudo boxes


def test_many_classes() -> None:
    inputs = make_labeler_input((30,), [[1] * 25])
    rows = argmax_pseudo_boxes(inputs, 1).rows.tolist()
    assert len(set(rows)) == 25


def test_it_is_registered_and_requires_no_exemplars() -> None:
    assert extend.find_part("labeler", "oicr") is Oicr
    assert Oicr().requirements == Requirements()
    assert isinstance(Oicr()(make_labeler_input((2,), [[1]])), Labeling)
