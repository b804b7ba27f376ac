from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st

from strategies import make_labeler_input
from tag2box import extend
from tag2box.methods.c_midn import CMidnLabeler
from tag2box.methods.oicr import Oicr, argmax_pseudo_boxes
from tag2box.methods.slv import cells_of, likelihood_map
from tag2box.ops.boxes import areas, intersections
from tag2box.ops.losses import assign
from tag2box.types import LabelerInput, Proposals, Requirements, SideInfo

WORLDS = [
    ((), []),
    ((0,), [[1, 1]]),
    ((1,), [[1, 0, 1]]),
    ((4,), [[0, 0]]),
    ((9, 0, 14), [[1, 0, 1], [1, 1, 1], [0, 1, 0]]),
    ((6, 5), [[1], [1]]),
    ((30,), [[1] * 25]),
]


def coupled_inputs(sizes: tuple[int, ...], tags: list[list[int]], seed: int = 0) -> LabelerInput:
    inputs = make_labeler_input(sizes, tags, seed=seed)
    second = torch.rand(inputs.probs[0].shape, generator=torch.Generator().manual_seed(seed + 1))
    evidence = torch.rand(inputs.probs[0].shape, generator=torch.Generator().manual_seed(seed + 2)).square()
    g = torch.Generator().manual_seed(seed + 3)
    segments = tuple(torch.randint(inputs.tags.shape[1] + 1, (8, 10), generator=g) for _ in sizes)
    proposals = Proposals(inputs.proposals.boxes, sizes, ((200, 160),) * len(sizes))  # cells of 20 pixels
    side_info = SideInfo(class_evidence=evidence, segments=segments)
    return replace(inputs, proposals=proposals, second=second, side_info=side_info)


def loop_coupled(inputs: LabelerInput, ours: CMidnLabeler) -> list[tuple[int, int, float]]:
    """(row, class, score) of stage 1, the mask as a set of cells."""
    assert inputs.second is not None
    first, other = argmax_pseudo_boxes(inputs, 0), argmax_pseudo_boxes(replace(inputs, probs=(inputs.second,)), 0)
    boxes, found = inputs.proposals.boxes, []
    for a, b, c in zip(first.rows.tolist(), other.rows.tolist(), first.cls.tolist(), strict=True):
        one, two = (a, c, inputs.probs[0][a, c].item()), (b, c, inputs.second[b, c].item())
        shared = intersections(boxes[a][None], boxes[b][None]).item()
        if shared / min(areas(boxes[[a, b]]).tolist()) <= ours.apart:
            found += [one, two]
            continue
        photo, span = next((i, s) for i, s in enumerate(inputs.proposals.spans()) if a in s)
        inside = slice(span.start, span.stop)
        voters = inputs.probs[0][inside, c] + inputs.second[inside, c]
        if ours.guide == "class_maps" and inputs.side_info.class_evidence is not None:
            voters = inputs.side_info.class_evidence[inside, c]
        votes, cell = likelihood_map(boxes[inside], voters, ours.cell).tolist(), ours.cell
        held = {(x, y) for y, line in enumerate(votes) for x, v in enumerate(line) if v >= ours.mask and v > 0}
        if ours.guide == "segmentation" and inputs.side_info.segments is not None:
            shown, cell = inputs.side_info.segments[photo].tolist(), 20.0
            held = {(x, y) for y, line in enumerate(shown) for x, v in enumerate(line) if v == c}
        fits = []
        for left, up, right, down in cells_of(boxes[[a, b]], cell).tolist():
            own = {(x, y) for x in range(left, right) for y in range(up, down)}
            fits.append(len(own & held) / len(own | held))
        found.append(two if fits[1] > fits[0] else one)
    return found


@pytest.mark.parametrize(("sizes", "tags"), WORLDS)
@pytest.mark.parametrize(
    "ours",
    [
        CMidnLabeler(),
        CMidnLabeler(apart=0.6, foreground_iou=0.3),
        CMidnLabeler(mask=0.8, cell=3.0),
        CMidnLabeler(guide="class_maps"),
        CMidnLabeler(guide="segmentation"),
    ],
    ids=str,
)
def test_labels_match_the_loop(sizes: tuple, tags: list, ours: CMidnLabeler) -> None:
    inputs = coupled_inputs(sizes, tags)
    stages, plain = ours(inputs).stages, Oicr(foreground_iou=ours.foreground_iou)(inputs).stages
    pseudo_boxes = stages[0].pseudo_boxes
    expected = loop_coupled(inputs, ours)
    assert (
        list(zip(pseudo_boxes.rows.tolist(), pseudo_boxes.cls.tolist(), pseudo_boxes.score.tolist(), strict=True))
        == expected
    )
    again = assign(inputs.proposals, pseudo_boxes, inputs.tags.shape[1], ours.foreground_iou)
    assert torch.equal(stages[0].cls, again.cls) and torch.equal(stages[0].weight, again.weight)
    for later, other in zip(stages[1:], plain[1:], strict=True):
        assert torch.equal(later.cls, other.cls) and torch.equal(later.pseudo_boxes.rows, other.pseudo_boxes.rows)


@settings(max_examples=40)
@given(st.integers(0, 300))
def test_one_or_two_pseudo_boxes_per_tag(seed: int) -> None:
    inputs = coupled_inputs((8, 10), [[1, 0, 1], [0, 1, 0]], seed)
    pseudo_boxes = CMidnLabeler()(inputs).stages[0].pseudo_boxes
    image = inputs.proposals.image_ids()[pseudo_boxes.rows]
    for n, c in inputs.tags.nonzero().tolist():
        assert int(((image == n) & (pseudo_boxes.cls == c)).sum()) in (1, 2)
    assert inputs.tags[image, pseudo_boxes.cls].all()


def two_objects(second_top: int) -> LabelerInput:
    boxes = torch.tensor([[0.0, 0, 40, 40], [8, 8, 24, 24], [100, 100, 140, 140]])
    second = torch.zeros(3, 1)
    second[second_top] = 0.6
    inputs = make_labeler_input((3,), [[1]], stages=2)
    probs = (torch.tensor([[0.1], [0.6], [0.0]]), inputs.probs[1])
    return replace(inputs, proposals=Proposals(boxes, (3,)), probs=probs, second=second)


def test_apart_both_are_objects_and_a_part_gives_way_to_the_whole() -> None:
    assert CMidnLabeler()(two_objects(2)).stages[0].pseudo_boxes.rows.tolist() == [1, 2]
    whole = CMidnLabeler(mask=0.3)(two_objects(0)).stages[0].pseudo_boxes
    assert (whole.rows.tolist(), whole.score.tolist()) == ([0], pytest.approx([0.6]))
    assert CMidnLabeler()(two_objects(1)).stages[0].pseudo_boxes.rows.tolist() == [1]


def test_without_a_second_head_it_is_argmax_labelling() -> None:
    inputs = make_labeler_input((9, 5), [[1, 0, 1], [0, 1, 0]])
    for ours, plain in zip(CMidnLabeler()(inputs).stages, Oicr()(inputs).stages, strict=True):
        assert torch.equal(ours.cls, plain.cls) and torch.equal(ours.weight, plain.weight)


def test_it_is_registered_and_requires_two_heads() -> None:
    assert extend.find_part("labeler", "c_midn") is CMidnLabeler
    assert CMidnLabeler().requirements == Requirements(mil_heads=2)
