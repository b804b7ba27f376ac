from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_scenes import WORLDS
from random_scenes import scenes as random_scenes

from strategies import make_scene
from tag2box.errors import UserError
from tag2box.methods import BuiltInLabeler
from tag2box.methods.wsod2 import Wsod2
from tag2box.ops.boxes import iou
from tag2box.types import LabelerInput, Requirements, SideInfo


def with_evidence(scene: LabelerInput) -> LabelerInput:
    evidence = torch.rand(len(scene.embed), generator=torch.Generator().manual_seed(2))
    return replace(scene, clues=SideInfo(evidence=evidence))


@st.composite
def scenes(draw: st.DrawFn) -> LabelerInput:
    return with_evidence(replace(draw(random_scenes()), progress=draw(st.sampled_from([0.0, 0.3, 1.0]))))


def loop_seeds(labeler: Wsod2, scene: LabelerInput, stage: int) -> list[tuple[int, int]]:
    """(row, class), image after image, best first: a candidate falls to a better kept one of any class."""
    probs, boxes, found = scene.probs[stage], scene.proposals.boxes, []
    for image, span in enumerate(scene.proposals.spans()):
        candidates = []
        for c in scene.tags[image].nonzero().flatten().tolist():
            best = max((probs[r, c] for r in span), default=torch.tensor(0.0))
            candidates += [(r, c) for r in span if probs[r, c] >= labeler.near_best * best]
        kept: list[tuple[int, int]] = []
        for row, c in sorted(candidates, key=lambda x: -probs[x].item()):
            if all(iou(boxes[row][None], boxes[k][None]).item() <= labeler.nms_iou for k, _ in kept):
                kept.append((row, c))
        found += kept
    return found


def loop_labels(
    labeler: Wsod2, scene: LabelerInput, seeds: list[tuple[int, int]], stage: int
) -> list[tuple[int, float]]:
    """(class, weight) of every proposal."""
    boxes, background, evidence = scene.proposals.boxes, scene.tags.shape[1], scene.clues.evidence
    assert evidence is not None
    trust = min(scene.progress / labeler.fade, 1.0)
    labels = []
    for span in scene.proposals.spans():
        for r in span:
            overlaps = [(-iou(boxes[r][None], boxes[s][None]).item(), i) for i, (s, _) in enumerate(seeds) if s in span]
            if not overlaps:
                labels.append((background, 0.0))
            elif -min(overlaps)[0] < labeler.foreground_iou:
                labels.append((background, 1.0))
            else:
                owner = seeds[min(overlaps)[1]]
                belief = 1.0 if labeler.belief == "one" else scene.probs[stage][owner].item()
                labels.append((owner[1], trust * belief + (1 - trust) * evidence[r].item()))
    return labels


@settings(max_examples=40)
@given(scenes(), st.sampled_from([0.3, 0.9, 1.0]), st.sampled_from(["one", "score"]), st.sampled_from([0.5, 1.0]))
def test_seeds_and_labels_match_the_loop(scene: LabelerInput, near_best: float, belief: str, fade: float) -> None:
    labeler = Wsod2(near_best=near_best, belief=belief, fade=fade)  # type: ignore[arg-type]
    for stage, labels in enumerate(labeler(scene).stages):
        seeds = loop_seeds(labeler, scene, stage)
        assert list(zip(labels.seeds.rows.tolist(), labels.seeds.cls.tolist(), strict=True)) == seeds
        assert torch.equal(labels.seeds.score, scene.probs[stage][labels.seeds.rows, labels.seeds.cls])
        expected = loop_labels(labeler, scene, seeds, stage)
        assert labels.cls.tolist() == [x[0] for x in expected]
        assert labels.weight.tolist() == pytest.approx([x[1] for x in expected], abs=1e-6)


@settings(max_examples=40)
@given(scenes())
def test_the_best_of_all_is_a_seed_and_seeds_lie_apart(scene: LabelerInput) -> None:
    labeler = Wsod2()
    for stage, labels in enumerate(labeler(scene).stages):
        rows = set(labels.seeds.rows.tolist())
        for image, span in enumerate(scene.proposals.spans()):
            present = scene.tags[image].nonzero().flatten()
            if len(span) and len(present):
                best = scene.probs[stage][span.start : span.stop][:, present].amax(dim=1).argmax() + span.start
                assert int(best) in rows
            inside = labels.seeds.rows[torch.tensor([r in span for r in labels.seeds.rows.tolist()], dtype=torch.bool)]
            boxes = scene.proposals.boxes[inside]
            assert (iou(boxes, boxes).fill_diagonal_(0) <= labeler.nms_iou).all()


@pytest.mark.parametrize("progress", [0.0, 1.0])
def test_evidence_rules_at_first_and_says_nothing_at_last(progress: float) -> None:
    scene = with_evidence(replace(make_scene((12,), [[1, 1]], stages=1), progress=progress))
    labels = Wsod2()(scene).stages[0]
    is_foreground = labels.cls < 2
    assert is_foreground.any() and (labels.weight[~is_foreground] == 1).all()
    assert scene.clues.evidence is not None
    expected = scene.clues.evidence[is_foreground] if progress == 0 else torch.ones(int(is_foreground.sum()))
    assert torch.allclose(labels.weight[is_foreground], expected)


@pytest.mark.parametrize(("sizes", "tags"), WORLDS)
def test_it_survives(sizes: tuple[int, ...], tags: list[list[int]]) -> None:
    scene = with_evidence(make_scene(sizes, tags))
    for labels in Wsod2()(scene).stages:
        assert len(labels.seeds) >= sum(1 for t, n in zip(tags, sizes, strict=True) if n and any(t))
        assert labels.cls.shape == labels.weight.shape == (sum(sizes),)
        assert labels.weight.isfinite().all()


def test_it_is_known_by_name_and_asks_for_evidence() -> None:
    assert Wsod2 in get_args(BuiltInLabeler)
    assert Wsod2().needs == Requirements(evidence=True)
    with pytest.raises(UserError, match="superpixels"):
        Wsod2()(make_scene((2,), [[1]]))
