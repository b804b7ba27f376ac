from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
import torch
from hypothesis import given, settings, strategies as st
from test_discovery import loop_candidate
from torch import Tensor
from torch.nn import functional

from strategies import make_labeler_input, random_boxes
from tag2box import extend
from tag2box.methods.discovery import CANDIDATE_RULES, Discovery
from tag2box.methods.oicr import Oicr, argmax_pseudo_boxes
from tag2box.ops.boxes import containment, iou
from tag2box.ops.losses import assign
from tag2box.training.criterion import run_labeler
from tag2box.types import Exemplars, LabelerInput, Proposals, PseudoBoxes, Requirements

Criterion = Literal["similarity", "score_fixed", "score_adaptive"]
Rule = Literal["paper", "exclusive", "published"]
CRITERIA: tuple[Criterion, ...] = ("similarity", "score_fixed", "score_adaptive")


def with_exemplars(inputs: LabelerInput, seed: int = 0, each: int = 3) -> LabelerInput:
    """The inputs with ``each`` random exemplars of every class, leaning to the middle of the embeddings."""
    generator = torch.Generator().manual_seed(seed + 1)
    classes, dim = inputs.tags.shape[1], inputs.embed.shape[1]
    total = classes * each
    lean = inputs.embed.sum(dim=0)
    embed = functional.normalize(torch.randn(total, dim, generator=generator) + lean, dim=1)
    cls = torch.arange(classes).repeat(each)
    probs = tuple(torch.rand(total, generator=generator) for _ in inputs.probs)
    zeros = torch.zeros(total, dtype=torch.long)
    return replace(inputs, exemplars=Exemplars(embed, cls, torch.rand(total, generator=generator), zeros, probs))


@st.composite
def labeler_inputs(draw: st.DrawFn) -> LabelerInput:
    images, classes = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    sizes = tuple(draw(st.integers(0, 8)) for _ in range(images))
    tags = [[draw(st.integers(0, 1)) for _ in range(classes)] for _ in range(images)]
    seed = draw(st.integers(0, 10_000))
    return with_exemplars(make_labeler_input(sizes, tags, dim=3, stages=2, seed=seed), seed)


def loop_tops(inputs: LabelerInput, stage: int, image: int) -> dict[int, int]:
    """The top row of each present class of one image, classes in order, no row twice while others are left."""
    span = inputs.proposals.spans()[image]
    tops: dict[int, int] = {}
    for c in range(inputs.tags.shape[1]):
        if inputs.tags[image, c] and len(span):
            free = [r for r in span if r not in tops.values()]
            tops[c] = max(free, key=lambda r: (inputs.probs[stage][r, c].item(), -r)) if free else span[0]
    return tops


def loop_find(labeler: Discovery, inputs: LabelerInput, stage: int) -> tuple[list[tuple[int, int]], list[float]]:
    """(row, class) of all pseudo boxes and tau of all pairs, one proposal at a time."""
    found: list[tuple[int, int]] = []
    taus: list[float] = []
    boxes, z = inputs.proposals.boxes, inputs.embed
    for image, span in enumerate(inputs.proposals.spans()):
        tops = loop_tops(inputs, stage, image)
        for c, top in tops.items():
            of_class = [i for i in range(len(inputs.exemplars)) if inputs.exemplars.cls[i] == c]
            if labeler.criterion == "similarity":
                tau = sum((inputs.exemplars.embed[i] @ z[top]).item() for i in of_class) / len(of_class)
            elif labeler.criterion == "score_fixed":
                tau = labeler.score_threshold
            else:
                tau = sum(inputs.exemplars.probs[stage][i].item() for i in of_class) / len(of_class)
            candidates, least = [], (labeler.score_share * inputs.probs[stage][top, c]).item()
            for row in span:
                score = inputs.probs[stage][row, c].item()
                close = (z[row] @ z[top]).item() if labeler.criterion == "similarity" else score
                rule = labeler.rule if labeler.criterion == "similarity" else "paper"
                to_others = [(z[row] @ z[tops[other]]).item() for other in tops if other != c]
                near = loop_candidate(rule, close, tau, [min(x, 1.0) for x in to_others])
                if row != top and near and score >= least:
                    candidates.append((-score, row))
            kept = [top]
            for _, row in sorted(candidates):
                if all(iou(boxes[row][None], boxes[k][None]).item() <= labeler.nms_iou for k in kept):
                    kept.append(row)
            found += [(row, c) for row in kept]
            taus.append(tau)
    return found, taus


@pytest.mark.parametrize("rule", CANDIDATE_RULES)
@pytest.mark.parametrize("criterion", CRITERIA)
@settings(max_examples=40)
@given(
    inputs=labeler_inputs(),
    nms_iou=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    score_share=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_pseudo_boxes_and_thresholds_match_the_loop(
    criterion: Criterion, rule: Rule, inputs: LabelerInput, nms_iou: float, score_share: float
) -> None:
    labeler = Discovery(criterion=criterion, rule=rule, nms_iou=nms_iou, score_share=score_share)
    labeling = labeler(inputs)
    for stage, (labels, tau) in enumerate(zip(labeling.stages, labeling.thresholds, strict=True)):
        found, taus = loop_find(labeler, inputs, stage)
        pseudo_boxes = labels.pseudo_boxes
        assert list(zip(pseudo_boxes.rows.tolist(), pseudo_boxes.cls.tolist(), strict=True)) == found
        assert torch.equal(pseudo_boxes.score, inputs.probs[stage][pseudo_boxes.rows, pseudo_boxes.cls])
        assert tau.tolist() == pytest.approx(taus, abs=1e-6)
        again = assign(inputs.proposals, pseudo_boxes, inputs.tags.shape[1], labeler.foreground_iou)
        assert torch.equal(labels.cls, again.cls)
        assert torch.equal(labels.weight, again.weight)


@pytest.mark.parametrize("criterion", CRITERIA)
@given(inputs=labeler_inputs())
def test_the_top_proposal_is_always_a_pseudo_box(criterion: Criterion, inputs: LabelerInput) -> None:
    labeler = Discovery(criterion=criterion)
    for stage in range(len(inputs.probs)):
        tops = argmax_pseudo_boxes(inputs, stage)
        pseudo_boxes, tau = labeler.find(inputs, stage)
        pairs = set(zip(pseudo_boxes.rows.tolist(), pseudo_boxes.cls.tolist(), strict=True))
        assert set(zip(tops.rows.tolist(), tops.cls.tolist(), strict=True)) <= pairs
        assert len(tau) == len(tops)


@given(labeler_inputs(), st.sampled_from([0.0, 0.1, 0.5]))
def test_pseudo_boxes_of_a_class_keep_apart(inputs: LabelerInput, nms_iou: float) -> None:
    images = inputs.proposals.image_ids()
    pseudo_boxes, _ = Discovery(nms_iou=nms_iou).find(inputs, 0)
    overlap = iou(inputs.proposals.boxes[pseudo_boxes.rows], inputs.proposals.boxes[pseudo_boxes.rows]).fill_diagonal_(
        0
    )
    same = (images[pseudo_boxes.rows][:, None] == images[pseudo_boxes.rows]) & (
        pseudo_boxes.cls[:, None] == pseudo_boxes.cls
    )
    assert (overlap[same] <= nms_iou).all()


@given(labeler_inputs(), st.sampled_from([0.0, 0.3, 0.5]))
def test_no_pseudo_box_of_a_class_is_a_part_of_another(inputs: LabelerInput, inside: float) -> None:
    images, labeler = inputs.proposals.image_ids(), Discovery(nms_iou=1.0, inside=inside)
    pseudo_boxes, _ = labeler.find(inputs, 0)
    boxes = inputs.proposals.boxes[pseudo_boxes.rows]
    same = (images[pseudo_boxes.rows][:, None] == images[pseudo_boxes.rows]) & (
        pseudo_boxes.cls[:, None] == pseudo_boxes.cls
    )
    assert (containment(boxes, boxes).fill_diagonal_(0)[same] <= inside).all()
    everything, _ = Discovery(nms_iou=1.0).find(inputs, 0)
    assert pairs_of(argmax_pseudo_boxes(inputs, 0)) <= pairs_of(pseudo_boxes) <= pairs_of(everything)


@given(labeler_inputs())
def test_a_share_of_the_whole_score_leaves_the_top_proposals_and_their_equals(inputs: LabelerInput) -> None:
    pseudo_boxes, _ = Discovery(nms_iou=1.0, score_share=1.0).find(inputs, 0)
    tops = argmax_pseudo_boxes(inputs, 0)
    images, probs = inputs.proposals.image_ids(), inputs.probs[0]
    of_top = {(int(images[r]), int(c)): float(probs[r, c]) for r, c in zip(tops.rows, tops.cls, strict=True)}
    for row, c in pairs_of(pseudo_boxes):
        assert probs[row, c] >= of_top[int(images[row]), c]


def pairs_of(pseudo_boxes: PseudoBoxes) -> set[tuple[int, int]]:
    return set(zip(pseudo_boxes.rows.tolist(), pseudo_boxes.cls.tolist(), strict=True))


@given(labeler_inputs(), st.floats(0, 1), st.floats(0, 1))
def test_raising_a_fixed_threshold_never_adds_pseudo_boxes(inputs: LabelerInput, a: float, b: float) -> None:
    low, high = sorted((a, b))
    loose, _ = Discovery(criterion="score_fixed", score_threshold=low, nms_iou=1.0).find(inputs, 0)
    strict, _ = Discovery(criterion="score_fixed", score_threshold=high, nms_iou=1.0).find(inputs, 0)
    assert set(zip(strict.rows.tolist(), strict.cls.tolist(), strict=True)) <= set(
        zip(loose.rows.tolist(), loose.cls.tolist(), strict=True)
    )


def alike(count: int, exemplar: list[float]) -> LabelerInput:
    """One image of one class, all its proposals with the same embedding, and one exemplar."""
    generator = torch.Generator().manual_seed(count)
    boxes, probs = random_boxes(count, generator), torch.rand(count, 1, generator=generator)
    one = torch.zeros(1, dtype=torch.long)
    exemplars = Exemplars(torch.tensor([exemplar]), one, torch.ones(1), one, (torch.ones(1),))
    embed = torch.tensor([[1.0, 0.0]]).repeat(count, 1)
    return LabelerInput(Proposals(boxes, (count,)), torch.ones(1, 1, dtype=torch.bool), (probs,), embed, exemplars)


@pytest.mark.parametrize("count", [1, 2, 9])
def test_equal_embeddings_are_all_found_when_nms_lets_them_and_only_strictly_above_tau(count: int) -> None:
    below = alike(count, [0.8, 0.6])  # tau = 0.8 < 1: everything resembles the top more than that
    pseudo_boxes, tau = Discovery(nms_iou=1.0).find(below, 0)
    assert sorted(pseudo_boxes.rows.tolist()) == list(range(count))
    assert tau.tolist() == pytest.approx([0.8])
    at = alike(count, [1.0, 0.0])  # tau = 1: nothing is above it, the top alone remains
    assert Discovery(nms_iou=1.0).find(at, 0)[0].rows.tolist() == [int(at.probs[0].argmax())]


def two_class_inputs() -> LabelerInput:
    """One image, four far boxes; 0 is the top of class 0, 1 of class 1, 2 lies between them, 3 is near class 0."""
    angles = torch.tensor([0.0, 60.0, 40.0, 10.0]).deg2rad()
    embed = torch.stack([angles.cos(), angles.sin()], dim=1)
    probs = torch.tensor([[0.9, 0.0], [0.0, 0.9], [0.5, 0.5], [0.4, 0.1]])
    boxes = torch.tensor([[20.0 * i, 0, 20.0 * i + 10, 10] for i in range(4)])
    cls = torch.tensor([0, 1])
    tau = torch.tensor(50.0).deg2rad()  # both classes: similarity above cos 50
    exemplar = torch.stack([torch.stack([tau.cos(), tau.sin()]), torch.stack([(tau / 5).cos(), (tau / 5).sin()])])
    exemplars = Exemplars(exemplar, cls, torch.ones(2), cls, (torch.ones(2),))
    return LabelerInput(Proposals(boxes, (4,)), torch.ones(1, 2, dtype=torch.bool), (probs,), embed, exemplars)


def test_what_lies_between_two_classes_and_what_lies_behind_both() -> None:
    def pairs(labeler: Discovery) -> set[tuple[int, int]]:
        pseudo_boxes, _ = labeler.find(two_class_inputs(), 0)
        return set(zip(pseudo_boxes.rows.tolist(), pseudo_boxes.cls.tolist(), strict=True))

    near = {(0, 0), (3, 0), (1, 1), (2, 1)}
    assert pairs(Discovery(rule="exclusive")) == near
    assert pairs(Discovery(rule="paper")) == near | {(2, 0)} <= pairs(Discovery(rule="published"))
    away = two_class_inputs()
    away.embed[3] = -away.embed[2]  # far from both classes
    pseudo_boxes, _ = Discovery(rule="published").find(away, 0)
    assert {(3, 0), (3, 1)} <= pairs_of(pseudo_boxes)
    for rule in ("paper", "exclusive"):
        assert not {(3, 0), (3, 1)} & pairs_of(Discovery(rule=rule).find(away, 0)[0])


@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize(
    ("sizes", "tags"),
    [
        ((0,), [[1]]),  # no proposals
        ((4,), [[0, 0]]),  # no tags
        ((1,), [[1, 1, 1]]),  # one proposal, several classes
        ((3, 0, 2), [[1], [1], [0]]),
        ((40,), [[1] * 30]),  # many classes
    ],
)
def test_every_criterion_survives(criterion: Criterion, sizes: tuple[int, ...], tags: list[list[int]]) -> None:
    inputs = with_exemplars(make_labeler_input(sizes, tags))
    labeling = Discovery(criterion=criterion)(inputs)
    expected = sum(sum(t) for t, n in zip(tags, sizes, strict=True) if n)
    for labels, tau in zip(labeling.stages, labeling.thresholds, strict=True):
        assert len(tau) == expected
        assert len(labels.pseudo_boxes) >= expected
        assert labels.cls.shape == (sum(sizes),)
        assert torch.isfinite(tau).all()


def test_scores_alone_do_without_embeddings() -> None:
    inputs = replace(make_labeler_input((5, 2), [[1, 1], [0, 1]]), embed=torch.zeros(7, 0))
    assert len(Discovery(criterion="score_fixed")(inputs).stages[0].pseudo_boxes) >= 3


def test_without_exemplars_similarity_finds_what_argmax_finds() -> None:
    inputs = make_labeler_input((6, 3), [[1, 1], [0, 1]])
    for ours, theirs in zip(Discovery()(inputs).stages, Oicr()(inputs).stages, strict=True):
        assert torch.equal(ours.cls, theirs.cls)
        assert torch.equal(ours.pseudo_boxes.rows, theirs.pseudo_boxes.rows)


def test_nothing_is_differentiated() -> None:
    inputs = with_exemplars(make_labeler_input((6,), [[1, 1]]))
    inputs = replace(inputs, embed=inputs.embed.clone().requires_grad_())
    labeling = run_labeler(Discovery(), inputs)
    tensors: list[Tensor] = [labeling.stages[0].weight, labeling.thresholds[0]]
    assert not any(t.requires_grad for t in tensors)


@pytest.mark.parametrize(
    ("criterion", "uses"), [("similarity", True), ("score_fixed", False), ("score_adaptive", True)]
)
def test_what_reads_exemplars(criterion: Criterion, uses: bool) -> None:
    assert Discovery(criterion=criterion).requirements == Requirements(exemplars=uses)
    assert extend.find_part("labeler", "discovery") is Discovery


def test_a_fixed_threshold_reads_no_exemplars_at_all() -> None:
    inputs = make_labeler_input((8,), [[1, 0]])
    ours = Discovery(criterion="score_fixed")
    again = ours(with_exemplars(inputs))
    assert torch.equal(ours(inputs).stages[0].cls, again.stages[0].cls)


@given(labeler_inputs())
def test_a_higher_foreground_iou_never_adds_foreground(inputs: LabelerInput) -> None:
    background = inputs.tags.shape[1]
    loose = Discovery(foreground_iou=0.2)(inputs).stages[0].cls < background
    strict = Discovery(foreground_iou=0.8)(inputs).stages[0].cls < background
    assert not (strict & ~loose).any()


@pytest.mark.parametrize(("begin", "fraction", "discovers"), [(0.0, 0.0, True), (0.5, 0.49, False), (0.5, 0.5, True)])
def test_before_it_begins_labels_are_those_of_argmax(begin: float, fraction: float, discovers: bool) -> None:
    inputs = replace(make_labeler_input((12, 9), [[1, 0], [1, 1]], seed=2), fraction=fraction)
    ours, argmax = (
        labeler(inputs) for labeler in (Discovery(begin=begin, criterion="score_fixed", score_threshold=0), Oicr())
    )
    same = all(
        torch.equal(a.pseudo_boxes.rows, b.pseudo_boxes.rows) for a, b in zip(ours.stages, argmax.stages, strict=True)
    )
    assert same is not discovers
    assert (ours.thresholds == ()) is not discovers
