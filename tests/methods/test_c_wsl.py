from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, strategies as st
from random_inputs import WORLDS, random_inputs

from strategies import make_labeler_input
from tag2box import extend
from tag2box.methods.c_wsl import CWsl
from tag2box.methods.oicr import Oicr, argmax_pseudo_boxes
from tag2box.ops.boxes import containment
from tag2box.types import LabelerInput, Labeling, Proposals, Requirements, SideInfo


def with_counts(inputs: LabelerInput, counts: torch.Tensor) -> LabelerInput:
    return replace(inputs, side_info=SideInfo(counts=counts))


def counts_of(inputs: LabelerInput, low: int, high: int, seed: int) -> torch.Tensor:
    return torch.randint(low, high + 1, inputs.tags.shape, generator=torch.Generator().manual_seed(seed))


def same(a: Labeling, b: Labeling) -> bool:
    return all(
        torch.equal(x.cls, y.cls)
        and torch.equal(x.weight, y.weight)
        and torch.equal(x.pseudo_boxes.rows, y.pseudo_boxes.rows)
        for x, y in zip(a.stages, b.stages, strict=True)
    )


@given(random_inputs())
def test_a_count_of_one_is_argmax(inputs: LabelerInput) -> None:
    """The property the idea rests on."""
    assert same(CWsl()(with_counts(inputs, torch.ones_like(inputs.tags, dtype=torch.long))), Oicr()(inputs))


@given(random_inputs())
def test_without_counts_it_is_argmax(inputs: LabelerInput) -> None:
    assert same(CWsl()(inputs), Oicr()(inputs))
    unknown = torch.full_like(inputs.tags, -1, dtype=torch.long)
    assert same(CWsl()(with_counts(inputs, unknown)), Oicr()(inputs))


@given(random_inputs(), st.integers(0, 1000), st.sampled_from([0.1, 0.5]))
def test_as_many_pseudo_boxes_as_counted_none_inside_another(inputs: LabelerInput, seed: int, overlap: float) -> None:
    counts = counts_of(inputs, -1, 4, seed)
    images, boxes = inputs.proposals.image_ids(), inputs.proposals.boxes
    for labels in CWsl(overlap=overlap)(with_counts(inputs, counts)).stages:
        rows, cls = labels.pseudo_boxes.rows, labels.pseudo_boxes.cls
        for n, c in inputs.tags.nonzero().tolist():
            own = rows[(images[rows] == n) & (cls == c)]
            assert len(own) <= max(int(counts[n, c]), 1)
            assert bool(len(own)) == bool(inputs.proposals.sizes[n])
            assert (containment(boxes[own], boxes[own]).fill_diagonal_(0) < overlap).all()


@given(random_inputs(), st.integers(0, 1000))
def test_a_proposal_serves_one_class_while_others_are_left(inputs: LabelerInput, seed: int) -> None:
    pseudo_boxes = CWsl().find(with_counts(inputs, counts_of(inputs, 1, 3, seed)), inputs.probs[0])
    if all(size >= 3 * inputs.tags.shape[1] for size in inputs.proposals.sizes):
        assert len(pseudo_boxes.rows.unique()) == len(pseudo_boxes)


def test_two_of_a_kind_are_found_and_a_part_is_not_the_second() -> None:
    boxes = torch.tensor([[0.0, 0, 20, 20], [4, 4, 10, 10], [50, 0, 70, 20], [100, 0, 120, 20]])
    probs = torch.tensor([[0.9, 0.1], [0.8, 0.0], [0.5, 0.2], [0.1, 0.7]])
    bare = replace(make_labeler_input((4,), [[1, 1]]), proposals=Proposals(boxes, (4,)), probs=(probs,))
    labels = CWsl()(with_counts(bare, torch.tensor([[2, 1]]))).stages[0]
    assert labels.pseudo_boxes.rows.tolist() == [0, 2, 3]
    assert labels.pseudo_boxes.cls.tolist() == [0, 0, 1]
    assert labels.cls.tolist() == [0, 2, 0, 1]
    assert labels.weight.tolist() == pytest.approx([0.9, 0.9, 0.5, 0.7])
    assert argmax_pseudo_boxes(bare, 0).rows.tolist() == [0, 3]


@pytest.mark.parametrize("counts", [None, -1, 0, 1, 3])
@pytest.mark.parametrize(("sizes", "tags"), WORLDS)
def test_it_survives(sizes: tuple[int, ...], tags: list[list[int]], counts: int | None) -> None:
    inputs = make_labeler_input(sizes, tags)
    if counts is not None:
        inputs = with_counts(inputs, torch.full_like(inputs.tags, counts, dtype=torch.long))
    for labels in CWsl()(inputs).stages:
        assert labels.cls.shape == labels.weight.shape == (sum(sizes),)
        assert labels.pseudo_boxes.rows.dtype == torch.long
        assert len(labels.pseudo_boxes) >= sum(sum(t) for t, n in zip(tags, sizes, strict=True) if n)


def test_it_is_registered_and_requires_counts() -> None:
    assert extend.find_part("labeler", "c_wsl") is CWsl
    assert CWsl().requirements == Requirements(counts=True)
