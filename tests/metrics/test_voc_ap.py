from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from conftest import GOLDEN, golden_names
from tag2box.annotations import Detections, Objects, Truth
from tag2box.metrics.voc_ap import (
    Curve,
    area_under,
    corloc,
    curves,
    eleven_point,
    from_voc_pixels,
    to_voc_pixels,
    voc07,
    voc12,
)
from worlds import detections, truth_of, worlds

BOX = (10, 10, 30, 30)
HALF = (10, 10, 20, 30)  # IoU with BOX is exactly 0.5


def golden_world(file: Path) -> tuple[Truth, dict[str, Detections]]:
    data = dict(np.load(file, allow_pickle=False))
    truths, found = [], {}
    for image in range(len(data["in_img_wh"])):
        mine, seen = data["gt_img"] == image, data["det_img"] == image
        boxes = from_voc_pixels(torch.tensor(data["gt_xml_1based"][mine], dtype=torch.float64))
        labels = torch.tensor(data["gt_label"][mine]) - 1
        difficult = torch.tensor(data["gt_difficult"][mine]).bool()
        truths.append(Objects(boxes, labels, difficult, torch.zeros_like(difficult)))
        inclusive = torch.tensor(data["det_box_0based"][seen], dtype=torch.float64)
        found[str(image)] = Detections(
            from_voc_pixels(inclusive + 1),
            torch.tensor(data["det_score"][seen]),
            torch.tensor(data["det_label"][seen]) - 1,
        )
    sizes = tuple((int(w), int(h)) for w, h in data["in_img_wh"])
    return Truth(tuple("abcde"), tuple(found), sizes, tuple(truths)), found


@pytest.mark.parametrize(
    ("metric", "key"),
    [
        (voc07, "frcnn_plus1_exact_ap_07"),
        (voc12, "frcnn_plus1_exact_ap_auc"),
        (corloc, "pcl_corloc_exact_offset1"),
    ],
)
def test_the_classic_evaluators_numbers(metric, key):
    for file in (GOLDEN / name for name in golden_names("voc_eval_*.json")):
        expected = json.loads(file.read_text())[key]
        scores = metric(*golden_world(file.with_suffix(".npz")))
        assert scores.values == pytest.approx(expected, abs=1e-12)
        assert scores.mean == pytest.approx(np.mean(expected), abs=1e-12)


CASES = {
    "no images": ([], [], (None, None)),
    "no objects": ([[]], [[(*BOX, 0.9, 0)]], (None, None)),
    "no detections": ([[(*BOX, 0, 0, 0)]], [[]], (0.0, None)),
    "found": ([[(*BOX, 0, 0, 0)]], [[(*BOX, 0.9, 0)]], (1.0, None)),
    "wrong class": ([[(*BOX, 0, 0, 0)]], [[(*BOX, 0.9, 1)]], (0.0, None)),
    "exactly half is not enough": ([[(*BOX, 0, 0, 0)]], [[(*HALF, 0.9, 0)]], (0.0, None)),
    "second match after the first": ([[(*BOX, 0, 0, 0)]], [[(*BOX, 0.9, 0), (*BOX, 0.8, 0)]], (1.0, None)),
    "second match before another object": (
        [[(*BOX, 0, 0, 0), (50, 50, 90, 90, 0, 0, 0)]],
        [[(*BOX, 0.9, 0), (*BOX, 0.8, 0), (50, 50, 90, 90, 0.7, 0)]],
        (0.5 + 0.5 * 2 / 3, None),
    ),
    "only difficult objects": ([[(*BOX, 0, 1, 0)]], [[(*BOX, 0.9, 0)]], (None, None)),
    "difficult neither rewards nor punishes": (
        [[(*BOX, 0, 0, 0), (50, 50, 90, 90, 0, 1, 0)]],
        [[(50, 50, 90, 90, 0.9, 0), (50, 50, 90, 90, 0.8, 0), (*BOX, 0.7, 0)]],
        (1.0, None),
    ),
    "a crowd is like difficult": (
        [[(*BOX, 0, 0, 0), (50, 50, 90, 90, 0, 0, 1)]],
        [[(50, 50, 90, 90, 0.9, 0), (*BOX, 0.7, 0)]],
        (1.0, None),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_area_under_the_curve_of(case):
    images, found, expected = CASES[case]
    world = truth_of(*images)
    scores = voc12(world, {i: detections(rows) for i, rows in zip(world.ids, found, strict=True)})  # type: ignore[call-overload]
    assert scores.values == tuple(None if e is None else pytest.approx(e) for e in expected)


def test_an_image_without_an_entry_has_no_detections():
    assert voc07(truth_of([(*BOX, 0, 0, 0)]), {}).values == (0.0, None)


def test_eleven_points_by_hand():
    curve = Curve(recall=np.array([0.25, 0.25, 0.5]), precision=np.array([1.0, 0.5, 2 / 3]), positives=4)
    assert eleven_point(curve) == pytest.approx((3 * 1 + 3 * 2 / 3) / 11)
    assert area_under(curve) == pytest.approx(0.25 * 1 + 0.25 * 2 / 3)


def _overlap_with_plus_one(a, b):
    """The classic formula, on boxes that include their last pixel."""
    width = min(a[2], b[2]) - max(a[0], b[0]) + 1
    height = min(a[3], b[3]) - max(a[1], b[1]) + 1
    shared = max(width, 0) * max(height, 0)
    size = lambda box: (box[2] - box[0] + 1) * (box[3] - box[1] + 1)  # noqa: E731
    return shared / (size(a) + size(b) - shared)


def _loops(
    truth: Truth, found: dict[str, Detections], label: int, min_iou: float
) -> tuple[list[bool], list[bool], int]:
    """Right and wrong of every detection of a class, best first, written with loops and inclusive 1-based boxes."""
    inclusive = {i: to_voc_pixels(o.boxes).tolist() for i, o in zip(truth.ids, truth.objects, strict=True)}
    by_id = dict(zip(truth.ids, truth.objects, strict=True))
    rows = [
        (float(found[i].scores[k]), i, to_voc_pixels(found[i].boxes)[k].tolist())
        for i in truth.ids
        for k in range(len(found[i]))
        if int(found[i].labels[k]) == label
    ]
    rows.sort(key=lambda row: -row[0])
    taken, right, wrong = set(), [], []
    for _, image, box in rows:
        own = by_id[image]
        best, best_k = -1.0, -1
        for k in range(len(own)):
            if int(own.labels[k]) == label and _overlap_with_plus_one(box, inclusive[image][k]) > best:
                best, best_k = _overlap_with_plus_one(box, inclusive[image][k]), k
        hit = best > min_iou
        skip = hit and bool(own.difficult[best_k] or own.crowd[best_k])
        new = hit and not skip and (image, best_k) not in taken
        taken |= {(image, best_k)} if new else set()
        right.append(new)
        wrong.append(not new and not skip)
    positives = sum(
        int(o.labels[k]) == label and not bool(o.difficult[k] or o.crowd[k])
        for o in truth.objects
        for k in range(len(o))
    )
    return right, wrong, positives


@settings(max_examples=40, deadline=None)
@given(worlds, st.sampled_from([0.05, 0.3, 0.5, 0.9]))
def test_curves_match_the_evaluator_written_with_loops(world, min_iou):
    truth, found = world
    for label, curve in enumerate(curves(truth, found, min_iou=min_iou)):
        right, wrong, positives = _loops(truth, found, label, min_iou)
        assert curve.positives == positives
        tp, fp = np.cumsum(right), np.cumsum(wrong)
        assert curve.precision == pytest.approx(tp / np.maximum(tp + fp, 1))
        assert curve.recall == pytest.approx(tp / max(positives, 1))


@settings(max_examples=30, deadline=None)
@given(worlds)
def test_scores_are_fractions_and_monotone_transforms_of_scores_change_nothing(world):
    truth, found = world
    squashed = {i: Detections(d.boxes, d.scores / 2 + 0.25, d.labels) for i, d in found.items()}
    for metric in (voc07, voc12, corloc):
        scores = metric(truth, found)
        assert all(value is None or 0 <= value <= 1 for value in scores.values)
        assert metric(truth, squashed) == scores


def test_voc_pixels_go_there_and_back():
    boxes = torch.tensor([[0.0, 0.0, 1.0, 1.0], [3.5, 4.0, 9.0, 10.0]])
    assert to_voc_pixels(boxes)[0].tolist() == [1, 1, 1, 1]  # one pixel, the first
    assert torch.equal(from_voc_pixels(to_voc_pixels(boxes)), boxes)
