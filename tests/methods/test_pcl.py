from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, strategies as st
from random_inputs import WORLDS, random_inputs

from conftest import golden_names, load_golden
from strategies import make_labeler_input
from tag2box import extend
from tag2box.methods.pcl import Pcl, top_group
from tag2box.ops.boxes import iou
from tag2box.types import LabelerInput, Proposals, Requirements

EDGE = torch.tensor([0.0, 0.0, 1.0, 1.0])  # the references count pixels inclusively


def loop_pseudo_boxes(labeler: Pcl, inputs: LabelerInput, stage: int) -> list[tuple[int, int, float]]:
    """(row, class, score) of all centres, one class of one image at a time."""
    pseudo_boxes: list[tuple[int, int, float]] = []
    probs, overlap = inputs.probs[stage], iou(inputs.proposals.boxes, inputs.proposals.boxes)
    for span, tags in zip(inputs.proposals.spans(), inputs.tags.tolist(), strict=True):
        taken: set[int] = set()
        for c in [c for c, present in enumerate(tags) if present and len(span)]:
            if len(taken) == len(span):
                taken = set()
            pool = [r for r in span if r not in taken]
            top = top_group(probs[pool, c], labeler.groups).tolist()
            left, centres = [r for r, high in zip(pool, top, strict=True) if high], []
            while left and (not centres or len(left) > labeler.leave):
                near = {r: [o for o in left if o == r or overlap[r, o] > labeler.graph_iou] for r in left}
                centre = max(left, key=lambda r: (len(near[r]), probs[r, c].item(), -r))
                centres.append((centre, c, max(probs[o, c].item() for o in near[centre])))
                left = [r for r in left if r not in near[centre]]
            centres = sorted(centres, key=lambda s: -s[2])[: labeler.max_centres]
            taken |= {row for row, _, _ in centres}
            pseudo_boxes += centres
    return pseudo_boxes


def loop_labels(
    labeler: Pcl, inputs: LabelerInput, pseudo_boxes: list[tuple[int, int, float]]
) -> list[tuple[int, float]]:
    """(class, weight) of every proposal, by the nearest centre of its image."""
    labels, boxes, background = [], inputs.proposals.boxes, inputs.tags.shape[1]
    for span in inputs.proposals.spans():
        own = [s for s in pseudo_boxes if s[0] in span]
        for row in span:
            near = [iou(boxes[row][None], boxes[s[0]][None]).item() for s in own]
            if not near:
                labels.append((background, 0.0))
                continue
            best = near.index(max(near))
            cls = own[best][1] if near[best] >= labeler.foreground_iou else background
            labels.append((cls, own[best][2] if near[best] >= labeler.ignore_below else 0.0))
    return labels


@given(
    random_inputs(high=14),
    st.sampled_from([2, 3]),
    st.integers(0, 5),
    st.integers(1, 5),
    st.sampled_from([0.0, 0.1, 0.3]),
)
def test_labels_match_the_loop(inputs: LabelerInput, groups: int, leave: int, most: int, ignore_below: float) -> None:
    labeler = Pcl(groups=groups, graph_iou=0.2, leave=leave, max_centres=most, ignore_below=ignore_below)
    for stage, labels in enumerate(labeler(inputs).stages):
        pseudo_boxes = loop_pseudo_boxes(labeler, inputs, stage)
        got = zip(
            labels.pseudo_boxes.rows.tolist(),
            labels.pseudo_boxes.cls.tolist(),
            labels.pseudo_boxes.score.tolist(),
            strict=True,
        )
        assert list(got) == pseudo_boxes
        expected = loop_labels(labeler, inputs, pseudo_boxes)
        assert list(zip(labels.cls.tolist(), labels.weight.tolist(), strict=True)) == expected


@pytest.mark.parametrize(("sizes", "tags"), WORLDS)
def test_it_survives(sizes: tuple[int, ...], tags: list[list[int]]) -> None:
    inputs = make_labeler_input(sizes, tags)
    pairs = {(n, c) for n, (t, size) in enumerate(zip(tags, sizes, strict=True)) for c in range(len(t)) if t[c] * size}
    images = inputs.proposals.image_ids()
    for labels in Pcl()(inputs).stages:
        assert labels.cls.shape == labels.weight.shape == (sum(sizes),)
        assert labels.pseudo_boxes.rows.dtype == torch.long
        found = set(zip(images[labels.pseudo_boxes.rows].tolist(), labels.pseudo_boxes.cls.tolist(), strict=True))
        assert found == pairs  # every tag has a centre if there is any proposal


@given(random_inputs(high=14))
def test_no_more_centres_than_wanted_and_none_for_two_classes(inputs: LabelerInput) -> None:
    images, classes = inputs.proposals.image_ids(), inputs.tags.shape[1]
    for labels in Pcl(graph_iou=0.1, leave=0, max_centres=2)(inputs).stages:
        pseudo_boxes = labels.pseudo_boxes
        each = torch.bincount(images[pseudo_boxes.rows] * classes + pseudo_boxes.cls, minlength=1)
        assert each.max() <= 2
        if all(size > 2 * classes for size in inputs.proposals.sizes):
            assert len(pseudo_boxes.rows.unique()) == len(pseudo_boxes)


def test_two_groups_of_good_proposals_make_two_clusters_where_argmax_makes_one() -> None:
    """What it is for: the middle of each group is its centre, and has the group's best score."""
    left = [[0.0, 0, 20, 20], [0, 2, 20, 22], [0, 4, 20, 24]]
    right = [[50.0, 0, 70, 20], [50, 2, 70, 22], [50, 4, 70, 24]]
    far = [[200.0 + 30 * i, 0, 220 + 30 * i, 20] for i in range(6)]
    scores = torch.tensor([0.9, 0.8, 0.85, 0.7, 0.75, 0.72, 0.1, 0.11, 0.3, 0.31, 0.12, 0.13])[:, None]
    bare = make_labeler_input((12,), [[1]])
    inputs = replace(bare, proposals=Proposals(torch.tensor(left + right + far), (12,)), probs=(scores,))
    labels = Pcl(graph_iou=0.8, leave=2)(inputs).stages[0]
    assert labels.pseudo_boxes.rows.tolist() == [1, 4]
    assert labels.pseudo_boxes.score.tolist() == pytest.approx([0.9, 0.75])
    assert labels.cls.tolist() == [0] * 6 + [1] * 6
    assert labels.weight.tolist() == pytest.approx([0.9] * 3 + [0.75] * 3 + [0.0] * 6)


@pytest.mark.parametrize("name", golden_names("pcl_*.npz"))
def test_labels_weights_and_clusters_are_those_of_the_reference(name: str) -> None:
    g = load_golden(name)
    tags = torch.as_tensor(g["in_im_labels"]) > 0
    classes, count = tags.shape[1], len(g["in_boxes"])
    probs = torch.as_tensor(g["in_source_prob"])[:, -classes:]  # later teachers have background in front
    proposals = Proposals(torch.as_tensor(g["in_boxes"]) + EDGE, (count,))
    inputs = replace(make_labeler_input((count,), [[0] * classes]), proposals=proposals, tags=tags, probs=(probs,))
    labels = Pcl()(inputs).stages[0]
    centres = [row for c in g["positive_classes"] for row in g[f"c{c}_final_centers_orig"].tolist()]
    assert labels.pseudo_boxes.rows.tolist() == centres
    assert torch.equal(labels.pseudo_boxes.cls + 1, torch.as_tensor(g["out_gt_classes"]).flatten())
    reference = torch.as_tensor(g["out_labels"]).flatten()
    assert torch.equal(labels.cls, torch.where(reference == 0, classes, reference - 1))
    assert torch.equal(labels.weight, torch.as_tensor(g["out_cls_loss_weights"]).flatten())
    owner = torch.where(labels.cls < classes, labels.owner, -1)
    assert torch.equal(owner, torch.as_tensor(g["out_gt_assignment"]).flatten().long())


def test_it_is_registered_and_requires_nothing_more() -> None:
    assert extend.find_part("labeler", "pcl") is Pcl
    assert Pcl().requirements == Requirements()
