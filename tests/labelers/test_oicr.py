from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from strategies import make_scene
from tag2box.methods import BuiltInLabeler
from tag2box.methods.oicr import Oicr, argmax_pseudo_boxes
from tag2box.ops.boxes import iou
from tag2box.types import LabelerInput, Labeling, Proposals, PseudoLabels, Requirements


@st.composite
def scenes(draw: st.DrawFn) -> LabelerInput:
    images, classes = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    sizes = tuple(draw(st.integers(0, 6)) for _ in range(images))
    tags = [[draw(st.integers(0, 1)) for _ in range(classes)] for _ in range(images)]
    return make_scene(sizes, tags, seed=draw(st.integers(0, 10_000)))


def loop_seeds(scene: LabelerInput, stage: int) -> list[tuple[int, int, float]]:
    """(row, class, score) of every present class of every image, best free proposal each."""
    found = []
    for span, tags in zip(scene.proposals.spans(), scene.tags.tolist(), strict=True):
        taken: set[int] = set()
        for c in [c for c, present in enumerate(tags) if present]:
            if not len(span):
                continue
            free = [r for r in span if r not in taken]
            best = max(free, key=lambda r: (scene.probs[stage][r, c].item(), -r)) if free else span[0]
            taken.add(best)
            found.append((best, c, scene.probs[stage][best, c].item()))
    return found


def loop_labels(
    scene: LabelerInput, seeds: list[tuple[int, int, float]], foreground_iou: float
) -> list[tuple[int, float, list[float]]]:
    """(class, weight, box to regress to) of every proposal: those of the nearest seed in its image."""
    boxes, background = scene.proposals.boxes, scene.tags.shape[1]
    labels = []
    for span in scene.proposals.spans():
        own = [s for s in seeds if s[0] in span]
        for row in span:
            label = (background, 0.0, boxes[row].tolist())
            best = -1.0
            for seed_row, c, score in own:
                overlap = iou(boxes[row][None], boxes[seed_row][None]).item()
                if overlap > best:
                    best = overlap
                    label = (c if overlap > foreground_iou else background, score, boxes[seed_row].tolist())
            labels.append(label)
    return labels


def as_rows(stage: PseudoLabels) -> list[tuple[int, float, list[float]]]:
    return list(zip(stage.cls.tolist(), stage.weight.tolist(), stage.boxes.tolist(), strict=True))


def as_seeds(stage: PseudoLabels) -> list[tuple[int, int, float]]:
    return list(zip(stage.seeds.rows.tolist(), stage.seeds.cls.tolist(), stage.seeds.score.tolist(), strict=True))


def permuted(scene: LabelerInput, order: list[int]) -> tuple[LabelerInput, torch.Tensor]:
    """The scene with its images in another order, and the old row of each new one."""
    spans = scene.proposals.spans()
    rows = torch.tensor([row for image in order for row in spans[image]], dtype=torch.long)
    sizes = tuple(scene.proposals.sizes[image] for image in order)
    moved = replace(
        scene,
        proposals=Proposals(scene.proposals.boxes[rows], sizes),
        tags=scene.tags[order],
        probs=tuple(p[rows] for p in scene.probs),
        embed=scene.embed[rows],
    )
    return moved, rows


@given(scenes(), st.sampled_from([0.3, 0.5, 0.9]))
def test_labels_match_the_loop(scene: LabelerInput, foreground_iou: float) -> None:
    labeling = Oicr(foreground_iou=foreground_iou)(scene)
    assert len(labeling.stages) == len(scene.probs)
    assert labeling.thresholds == ()
    for stage, labels in enumerate(labeling.stages):
        seeds = loop_seeds(scene, stage)
        assert as_seeds(labels) == seeds
        assert as_rows(labels) == loop_labels(scene, seeds, foreground_iou)


@given(scenes(), st.randoms(use_true_random=False))
def test_the_order_of_images_does_not_matter(scene: LabelerInput, random: object) -> None:
    order = list(range(len(scene.tags)))
    random.shuffle(order)  # type: ignore[attr-defined]
    moved, rows = permuted(scene, order)
    for before, after in zip(Oicr()(scene).stages, Oicr()(moved).stages, strict=True):
        assert torch.equal(before.cls[rows], after.cls)
        assert torch.equal(before.weight[rows], after.weight)
        assert torch.equal(before.boxes[rows], after.boxes)
        back = sorted(zip(rows[after.seeds.rows].tolist(), after.seeds.cls.tolist(), strict=True))
        assert back == sorted(zip(before.seeds.rows.tolist(), before.seeds.cls.tolist(), strict=True))


@given(scenes())
def test_every_seed_is_a_present_class_and_its_own_foreground(scene: LabelerInput) -> None:
    images = scene.proposals.image_ids()
    for labels in Oicr()(scene).stages:
        seeds = labels.seeds
        assert scene.tags[images[seeds.rows], seeds.cls].all()
        assert (labels.cls[seeds.rows] < scene.tags.shape[1]).all()


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
    scene = make_scene(sizes, tags)
    for labels in Oicr()(scene).stages:
        assert len(labels.seeds) == 0
        assert labels.seeds.rows.dtype == torch.long
        assert labels.cls.tolist() == [scene.tags.shape[1]] * sum(sizes)
        assert labels.weight.tolist() == [0.0] * sum(sizes)


def test_one_proposal_serves_all_classes() -> None:
    scene = make_scene((1,), [[1, 0, 1]])
    seeds = argmax_pseudo_boxes(scene, 0)
    assert (seeds.rows.tolist(), seeds.cls.tolist()) == ([0, 0], [0, 2])
    assert Oicr()(scene).stages[0].cls.tolist() == [0]  # the first of equally near seeds


def test_many_classes() -> None:
    scene = make_scene((30,), [[1] * 25])
    rows = argmax_pseudo_boxes(scene, 1).rows.tolist()
    assert len(set(rows)) == 25


def test_it_is_known_by_name_and_needs_no_exemplars() -> None:
    assert Oicr in get_args(BuiltInLabeler)
    assert Oicr().needs == Requirements()
    assert isinstance(Oicr()(make_scene((2,), [[1]])), Labeling)
