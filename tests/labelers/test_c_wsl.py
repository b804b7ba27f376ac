from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_scenes import WORLDS, scenes

from strategies import make_scene
from tag2box.methods import BuiltInLabeler
from tag2box.methods.c_wsl import CWsl
from tag2box.methods.oicr import Oicr, argmax_pseudo_boxes
from tag2box.ops.boxes import containment
from tag2box.types import LabelerInput, Labeling, Proposals, Requirements, SideInfo


def with_counts(scene: LabelerInput, counts: torch.Tensor) -> LabelerInput:
    return replace(scene, clues=SideInfo(counts=counts))


def counts_of(scene: LabelerInput, low: int, high: int, seed: int) -> torch.Tensor:
    return torch.randint(low, high + 1, scene.tags.shape, generator=torch.Generator().manual_seed(seed))


def same(a: Labeling, b: Labeling) -> bool:
    return all(
        torch.equal(x.cls, y.cls) and torch.equal(x.weight, y.weight) and torch.equal(x.seeds.rows, y.seeds.rows)
        for x, y in zip(a.stages, b.stages, strict=True)
    )


@given(scenes())
def test_a_count_of_one_is_argmax(scene: LabelerInput) -> None:
    """The property the idea rests on."""
    assert same(CWsl()(with_counts(scene, torch.ones_like(scene.tags, dtype=torch.long))), Oicr()(scene))


@given(scenes())
def test_without_counts_it_is_argmax(scene: LabelerInput) -> None:
    assert same(CWsl()(scene), Oicr()(scene))
    unknown = torch.full_like(scene.tags, -1, dtype=torch.long)
    assert same(CWsl()(with_counts(scene, unknown)), Oicr()(scene))


@given(scenes(), st.integers(0, 1000), st.sampled_from([0.1, 0.5]))
def test_as_many_seeds_as_counted_none_inside_another(scene: LabelerInput, seed: int, overlap: float) -> None:
    counts = counts_of(scene, -1, 4, seed)
    images, boxes = scene.proposals.image_ids(), scene.proposals.boxes
    for labels in CWsl(overlap=overlap)(with_counts(scene, counts)).stages:
        rows, cls = labels.seeds.rows, labels.seeds.cls
        for n, c in scene.tags.nonzero().tolist():
            own = rows[(images[rows] == n) & (cls == c)]
            assert len(own) <= max(int(counts[n, c]), 1)
            assert bool(len(own)) == bool(scene.proposals.sizes[n])
            assert (containment(boxes[own], boxes[own]).fill_diagonal_(0) < overlap).all()


@given(scenes(), st.integers(0, 1000))
def test_a_proposal_serves_one_class_while_others_are_left(scene: LabelerInput, seed: int) -> None:
    seeds = CWsl().find(with_counts(scene, counts_of(scene, 1, 3, seed)), scene.probs[0])
    if all(size >= 3 * scene.tags.shape[1] for size in scene.proposals.sizes):
        assert len(seeds.rows.unique()) == len(seeds)


def test_two_of_a_kind_are_found_and_a_part_is_not_the_second() -> None:
    boxes = torch.tensor([[0.0, 0, 20, 20], [4, 4, 10, 10], [50, 0, 70, 20], [100, 0, 120, 20]])
    probs = torch.tensor([[0.9, 0.1], [0.8, 0.0], [0.5, 0.2], [0.1, 0.7]])
    bare = replace(make_scene((4,), [[1, 1]]), proposals=Proposals(boxes, (4,)), probs=(probs,))
    labels = CWsl()(with_counts(bare, torch.tensor([[2, 1]]))).stages[0]
    assert labels.seeds.rows.tolist() == [0, 2, 3]
    assert labels.seeds.cls.tolist() == [0, 0, 1]
    assert labels.cls.tolist() == [0, 2, 0, 1]
    assert labels.weight.tolist() == pytest.approx([0.9, 0.9, 0.5, 0.7])
    assert argmax_pseudo_boxes(bare, 0).rows.tolist() == [0, 3]


@pytest.mark.parametrize("counts", [None, -1, 0, 1, 3])
@pytest.mark.parametrize(("sizes", "tags"), WORLDS)
def test_it_survives(sizes: tuple[int, ...], tags: list[list[int]], counts: int | None) -> None:
    scene = make_scene(sizes, tags)
    if counts is not None:
        scene = with_counts(scene, torch.full_like(scene.tags, counts, dtype=torch.long))
    for labels in CWsl()(scene).stages:
        assert labels.cls.shape == labels.weight.shape == (sum(sizes),)
        assert labels.seeds.rows.dtype == torch.long
        assert len(labels.seeds) >= sum(sum(t) for t, n in zip(tags, sizes, strict=True) if n)


def test_it_is_known_by_name_and_asks_for_counts() -> None:
    assert CWsl in get_args(BuiltInLabeler)
    assert CWsl().needs == Requirements(counts=True)
