from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from conftest import golden_names, load_golden
from strategies import random_boxes
from tag2box.annotations import Detections
from tag2box.inference.predict import Inference, Predict, Scored, merge_passes, rescale, scored, unflip
from tag2box.ops.boxes import areas, clip, decode, encode, iou
from tag2box.types import StageScores

EDGE = torch.tensor([0.0, 0.0, 1.0, 1.0])  # the reference counts pixels inclusively


def random_scored(count: int, classes: int, seed: int = 0) -> Scored:
    generator = torch.Generator().manual_seed(seed)
    boxes = torch.stack([random_boxes(count, generator) for _ in range(classes)], dim=1)
    probs = torch.rand(count, classes, generator=generator)
    return Scored(probs, boxes.reshape(count, 4 * classes), probs.sum(dim=1))


def logits(rows: int, columns: int, seed: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def overlap(a: list[float], b: list[float]) -> float:
    return iou(torch.tensor([a], dtype=torch.float32), torch.tensor([b], dtype=torch.float32)).item()


def loop_predict(predict: Predict, seen: Scored, width: int, height: int) -> list[tuple[float, int, list[float]]]:
    """(score, class, box), best first: threshold, clip, drop what fell off, greedy NMS within a class, best of all."""
    kept: list[tuple[float, int, list[float]]] = []
    for c in range(seen.probs.shape[1]):
        mine: list[tuple[float, int, list[float]]] = []
        for row in sorted(range(len(seen.probs)), key=lambda r: -seen.probs[r, c].item()):
            score = seen.probs[row, c].item()
            x1, y1, x2, y2 = seen.boxes[row, 4 * c : 4 * c + 4].tolist()
            box = [min(max(x1, 0), width), min(max(y1, 0), height), min(max(x2, 0), width), min(max(y2, 0), height)]
            clear = all(overlap(box, b) <= predict.nms_iou for _, _, b in mine)
            is_on_image = box[0] < box[2] and box[1] < box[3]
            if score > predict.score_threshold and clear and is_on_image:
                mine.append((score, c, box))
        kept += mine
    return sorted(kept, key=lambda d: -d[0])[: predict.max_detections]


@given(
    st.integers(0, 12),
    st.integers(1, 3),
    st.integers(0, 999),
    st.sampled_from([0.0, 0.5]),
    st.sampled_from([1, 3, 100]),
)
def test_detections_match_the_loop(count: int, classes: int, seed: int, threshold: float, most: int) -> None:
    predict = Predict(score_threshold=threshold, max_detections=most)
    seen = random_scored(count, classes, seed)
    found = predict(seen, 90, 80)
    expected = loop_predict(predict, seen, 90, 80)
    assert found.scores.tolist() == [score for score, _, _ in expected]
    assert found.labels.tolist() == [label for _, label, _ in expected]
    assert found.boxes.tolist() == [pytest.approx(box, abs=1e-4) for _, _, box in expected]


def loop_vote(predict: Predict, seen: Scored, found: Detections, width: int, height: int) -> list[list[float]]:
    """Each detection replaced by the weighted mean of the boxes of its class that overlap it enough."""
    assert predict.vote_iou is not None
    voted = []
    for box, label in zip(found.boxes, found.labels.tolist(), strict=True):
        total, sides = 0.0, [0.0] * 4
        for row in range(len(seen.probs)):
            own = clip(seen.boxes[row, 4 * label : 4 * label + 4][None], width, height)
            weight, near = seen.probs[row, label].item(), overlap(box.tolist(), own[0].tolist())
            if areas(own)[0] > 0 and weight > predict.score_threshold and near >= predict.vote_iou:
                total += weight
                sides = [side + weight * x for side, x in zip(sides, own[0].tolist(), strict=True)]
        voted.append([side / total for side in sides])
    return voted


@given(st.integers(0, 12), st.integers(1, 3), st.integers(0, 999), st.sampled_from([0.0, 0.5]))
def test_voted_boxes_match_the_loop(count: int, classes: int, seed: int, threshold: float) -> None:
    seen = random_scored(count, classes, seed)
    plain = Predict(score_threshold=threshold)
    predict = replace(plain, vote_iou=0.35)
    found, before = predict(seen, 90, 80), plain(seen, 90, 80)
    assert torch.equal(found.scores, before.scores) and torch.equal(found.labels, before.labels)
    assert found.boxes.tolist() == [pytest.approx(box, abs=1e-3) for box in loop_vote(predict, seen, before, 90, 80)]


def test_a_box_that_nothing_overlaps_votes_for_itself_alone() -> None:
    seen = Scored(torch.tensor([[0.5], [0.4]]), torch.tensor([[0.0, 0, 5, 5], [20, 20, 30, 30]]), torch.ones(2))
    assert Predict(vote_iou=0.5)(seen, 40, 40).boxes.tolist() == seen.boxes.tolist()


@pytest.mark.parametrize(("share", "right"), [(0.0, 10.0), (0.5, 15.0), (1.0, 20.0)])
def test_boxes_go_part_of_the_way_of_their_regression(share: float, right: float) -> None:
    seen = Scored(torch.ones(1, 2), torch.tensor([[0.0, 0, 20, 10, 0, 0, 20, 10]]), torch.ones(1))
    moved = Inference(regression=share).moved(seen, torch.tensor([[0.0, 0, 10, 10]]))
    assert moved.boxes.tolist() == [[0, 0, right, 10, 0, 0, right, 10]]
    nothing = Scored(torch.ones(0, 2), torch.ones(0, 8), torch.ones(0))
    assert Inference(regression=share).moved(nothing, torch.ones(0, 4)).boxes.shape == (0, 8)


@pytest.mark.parametrize("classes", [1, 20])
@pytest.mark.parametrize("regress", [False, True])
def test_no_proposals_give_no_detections(classes: int, regress: bool) -> None:
    deltas = (torch.zeros(0, 4 * classes),) if regress else ()
    none = torch.zeros(0, classes)
    seen = scored(StageScores(none, none, (torch.zeros(0, classes + 1),), deltas), torch.zeros(0, 4), classes)
    merged = merge_passes([rescale(seen, 0.5, 2.0), rescale(unflip(seen, 30), 0.5, 2.0)])
    assert merged.boxes.shape == (0, 4 * classes)
    assert len(Predict()(merged, 20, 10)) == 0


def test_the_threshold_is_exceeded_not_met() -> None:
    seen = Scored(torch.tensor([[0.5], [0.4]]), torch.tensor([[0.0, 0, 5, 5], [20, 20, 30, 30]]), torch.ones(2))
    assert Predict(score_threshold=0.4)(seen, 40, 40).scores.tolist() == [0.5]
    assert len(Predict(score_threshold=0.5)(seen, 40, 40)) == 0
    assert len(Predict()(Scored(torch.zeros(2, 1), seen.boxes, torch.ones(2)), 40, 40)) == 0


def test_boxes_end_at_the_borders() -> None:
    seen = Scored(torch.tensor([[0.9]]), torch.tensor([[-5.0, -3, 50, 60]]), torch.ones(1))
    assert Predict()(seen, 40, 30).boxes.tolist() == [[0, 0, 40, 30]]


def test_classes_do_not_suppress_each_other() -> None:
    boxes = torch.tensor([[0.0, 0, 10, 10] * 2, [0.0, 0, 10, 9] * 2])
    seen = Scored(torch.tensor([[0.9, 0.8], [0.7, 0.6]]), boxes, torch.ones(2))
    found = Predict(nms_iou=0.5)(seen, 20, 20)
    assert found.labels.tolist() == [0, 1]
    assert found.scores.tolist() == pytest.approx([0.9, 0.8])


def test_one_pass_is_the_mean_of_the_stages() -> None:
    stages, rows, classes = 3, 4, 2
    boxes = random_boxes(rows, torch.Generator().manual_seed(1))
    refine = tuple(logits(rows, classes + 1, k) for k in range(stages))
    deltas = tuple(logits(rows, 4 * classes, 10 + k) for k in range(stages))
    seen = scored(StageScores(refine[0], refine[0], refine, deltas), boxes, classes)
    for r in range(rows):
        for c in range(classes):
            mean = sum(x[r].softmax(dim=0)[c].item() for x in refine) / stages
            assert seen.probs[r, c].item() == pytest.approx(mean, rel=1e-5)
            code = sum(d[r, 4 * c : 4 * c + 4] for d in deltas) / stages
            moved = decode(code[None], boxes[r][None])[0]  # type: ignore[index]
            assert seen.boxes[r, 4 * c : 4 * c + 4].tolist() == pytest.approx(moved.tolist(), rel=1e-4, abs=1e-3)


def test_without_regression_every_class_has_the_proposal_itself() -> None:
    boxes = random_boxes(3, torch.Generator().manual_seed(2))
    seen = scored(StageScores(boxes, boxes, (logits(3, 3, 0),), ()), boxes, 2)
    assert torch.equal(seen.boxes.reshape(3, 2, 4), boxes[:, None].expand(3, 2, 4))


@pytest.mark.parametrize(("rows", "classes", "background"), [(0, 2, 0), (1, 1, 1), (5, 3, 0), (5, 3, 1)])
def test_without_stages_the_mil_head_detects(rows: int, classes: int, background: int) -> None:
    boxes = random_boxes(rows, torch.Generator().manual_seed(2))
    cls, det = logits(rows, classes + background, 0), logits(rows, classes + background, 1)
    seen = scored(StageScores(cls, det, (), ()), boxes, classes)
    assert seen.probs.shape == (rows, classes)
    for r in range(rows):
        for c in range(classes):
            expected = cls[r].softmax(dim=0)[c] * det[:, c].softmax(dim=0)[r]
            assert seen.probs[r, c].item() == pytest.approx(expected.item(), rel=1e-5)
    assert torch.equal(seen.boxes, boxes.repeat(1, classes))


def test_deltas_that_encode_a_target_land_on_it() -> None:
    proposals, targets = (random_boxes(5, torch.Generator().manual_seed(s)) for s in (3, 4))
    deltas = encode(targets, proposals)
    seen = scored(StageScores(deltas, deltas, (logits(5, 2, 0),) * 2, (deltas, deltas)), proposals, 1)
    assert torch.allclose(seen.boxes, targets, atol=1e-3)


@given(st.integers(0, 6), st.integers(1, 3), st.integers(0, 99))
def test_mirroring_twice_and_scaling_back_change_nothing(count: int, classes: int, seed: int) -> None:
    seen = random_scored(count, classes, seed)
    there = rescale(unflip(seen, 150.0), 1.5, 0.4)
    back = unflip(rescale(there, 1 / 1.5, 1 / 0.4), 150.0)
    assert torch.equal(back.probs, seen.probs)
    assert torch.allclose(back.boxes, seen.boxes, atol=1e-3)


def test_unflip_and_rescale_table() -> None:
    seen = Scored(torch.ones(1, 2), torch.tensor([[1.0, 2, 4, 8, 0, 0, 10, 10]]), torch.ones(1))
    assert unflip(seen, 10).boxes.tolist() == [[6, 2, 9, 8, 0, 0, 10, 10]]
    assert rescale(seen, 2, 3).boxes.tolist() == [[2, 6, 8, 24, 0, 0, 20, 30]]


@pytest.mark.parametrize("passes", [1, 3])
def test_merge_is_the_mean_of_the_passes(passes: int) -> None:
    seen = [random_scored(4, 2, s) for s in range(passes)]
    merged = merge_passes(seen)
    for r in range(4):
        for c in range(2):
            assert merged.probs[r, c].item() == pytest.approx(sum(s.probs[r, c].item() for s in seen) / passes)
        for v in range(8):
            assert merged.boxes[r, v].item() == pytest.approx(sum(s.boxes[r, v].item() for s in seen) / passes)


@dataclass(frozen=True)
class Reference:
    """A reference run of test-time augmentation: background column first, inclusive pixels, the 800 frame."""

    numbers: dict[str, Tensor]

    @classmethod
    def load(cls, name: str) -> Reference:
        return cls({key: torch.as_tensor(value) for key, value in load_golden(name).items()})

    def passes(self) -> list[Scored]:
        """Each view decoded by us, cut at its borders as the reference cuts it, and brought to the first view."""
        g, found = self.numbers, []
        width, height = g["out_wh"].tolist()
        for v, (w, h) in enumerate(g["view_wh"].tolist()):
            moved = decode(g["view_reg"][v], g["view_rois"][v] + EDGE).reshape(-1, 4)
            boxes = (clip(moved, w, h) - EDGE).reshape(len(g["view_reg"][v]), -1)[:, 4:]
            seen = Scored(g["view_prob"][v][:, 1:], boxes, torch.ones(len(boxes)))
            found.append(rescale(unflip(seen, w - 1) if v % 2 else seen, width / w, height / h))
        return found


@pytest.mark.parametrize("name", golden_names("tta_*.npz"))
def test_averaged_views_match_the_reference(name: str) -> None:
    reference = Reference.load(name)
    g, merged = reference.numbers, merge_passes(reference.passes())
    columns = merged.probs.shape[1] + 1
    assert torch.allclose(merged.probs, g["out_merged_scores"].reshape(-1, columns)[:, 1:], atol=1e-6)
    assert torch.allclose(merged.boxes, g["out_merged_boxes"].reshape(len(merged.probs), -1)[:, 4:], atol=1e-3)


@pytest.mark.parametrize("name", golden_names("tta_*.npz"))
def test_detections_of_averaged_views_match_the_reference(name: str) -> None:
    reference = Reference.load(name)
    g = reference.numbers
    predict = Predict(
        nms_iou=float(g["in_nms"]),
        score_threshold=float(g["in_score_thresh"]),
        max_detections=int(g["in_dets_per_img"]),
    )
    found = predict(merge_passes(reference.passes()), *g["out_wh"].tolist())
    best_first = g["out_scores"].argsort(descending=True, stable=True)
    assert torch.allclose(found.scores, g["out_scores"][best_first], atol=1e-6)
    assert torch.equal(found.labels + 1, g["out_labels"][best_first])
    assert torch.allclose(found.boxes, g["out_boxes"][best_first], atol=1e-3)
