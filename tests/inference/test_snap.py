"""Snapping of detections to masks."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from PIL import Image

from fake_sam import use_fake_sam
from tag2box.annotations import Detections, Photo
from tag2box.inference import snap as snapping
from tag2box.inference.snap import (
    Snap,
    SnapCandidates,
    SnapPhotos,
    first_of_each,
    highest_peaks,
    highest_per_class,
    mask_agreement,
    peak_in,
)
from tag2box.models.class_maps import ClassMaps
from tag2box.models.lite0 import Lite0


def detections(*rows: tuple[list[float], float, int]) -> Detections:
    boxes = torch.tensor([row[0] for row in rows]).reshape(-1, 4)
    return Detections(boxes, torch.tensor([row[1] for row in rows]), torch.tensor([row[2] for row in rows]).long())


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (detections(), []),
        (detections(([0, 0, 9, 9], 0.2, 0)), [0]),
        (detections(([0, 0, 9, 9], 0.2, 0), ([0, 0, 9, 8], 0.3, 0)), [1]),  # one suppresses the other
        (detections(([0, 0, 9, 9], 0.2, 0), ([0, 0, 9, 8], 0.3, 1)), [1, 0]),  # but not of another class
        (detections(*(([20.0 * i, 0, 20.0 * i + 9, 9], 0.1 * i, 0) for i in range(4))), [3, 2]),
    ],
)
def test_the_highest_of_each_class_are_snapped(found, expected):
    assert highest_per_class(found, 0.4, 2).tolist() == expected


@pytest.mark.parametrize(
    ("box", "expected"),
    [([0.0, 0, 8, 8], [2, 2]), ([3.0, 0, 8, 8], [6, 6]), ([4.5, 0.0, 5.5, 1.0], [5, 0.5])],  # the last has no centre
)
def test_a_peak_is_the_highest_cell_in_the_box(box, expected):
    assert peak_in(torch.tensor([[0.9, 0.1], [0.2, 0.5]]), torch.tensor(box), (8, 8)).tolist() == [expected]


def test_peaks_of_a_photo_are_apart_and_highest_first():
    probs = torch.zeros(6, 12)
    probs[1, 1], probs[1, 2], probs[4, 9], probs[0, 6] = 0.5, 0.4, 0.9, 0.2
    assert highest_peaks(probs, (120, 60), 2).tolist() == [[95, 45], [15, 15]]
    assert [65, 5] in highest_peaks(probs, (120, 60), 3).tolist()


@given(st.integers(0, 10_000), st.integers(0, 4))
def test_the_agreement_of_masks_and_map_is_that_of_loops(seed, count):
    draw = torch.Generator().manual_seed(seed)
    masks = torch.rand(count, 3, 4, generator=draw) < torch.rand(count, 1, 1, generator=draw) * 1.4
    probs, region = torch.rand(3, 4, generator=draw).double(), torch.rand(3, 4, generator=draw) < 0.7
    contrast, recall = mask_agreement(masks, probs, region)
    for mask, got_contrast, got_recall in zip(masks.tolist(), contrast.tolist(), recall.tolist(), strict=True):
        inside, outside, covered, total = [], [], 0.0, 0.0
        for y in range(3):
            for x in range(4):
                value = probs[y, x].item()
                (inside if mask[y][x] else outside).append(value)
                total += value * region[y, x].item()
                covered += value * region[y, x].item() * mask[y][x]
        expected = sum(inside) / max(1, len(inside)) - sum(outside) / max(1, len(outside))
        assert got_contrast == pytest.approx(expected)
        assert got_recall == pytest.approx(covered / max(total, 1e-6))


@given(st.integers(0, 10_000), st.integers(1, 6))
def test_the_choice_is_that_of_loops(seed, count):
    draw = torch.Generator().manual_seed(seed)
    corners = torch.rand(count, 2, 2, generator=draw).double() * 20
    boxes = torch.cat([corners.amin(1), corners.amax(1)], dim=1)
    factors = [torch.rand(count, generator=draw).double() - 0.1 for _ in range(4)]
    powers = (1.5, 0.3, 0.2, 0.7)
    snap = Snap(quality=1.5, contrast=0.3, recall=0.2, evidence=0.7)
    best, expected = -math.inf, 0
    for k in range(count):
        x1, y1, x2, y2 = boxes[k].tolist()
        if k > 0 and (x2 - x1 < 1 or y2 - y1 < 1):
            continue
        fit = math.prod(max(factor[k].item(), 1e-3) ** power for factor, power in zip(factors, powers, strict=True))
        if fit > best:
            best, expected = fit, k
    assert snap.choose(SnapCandidates(boxes, *factors)) == expected


def test_detections_move_to_masks_and_keep_scores_and_classes(tmp_path: Path, monkeypatch):
    use_fake_sam(monkeypatch)
    rng = np.random.default_rng(0)
    Image.fromarray(rng.integers(0, 255, (96, 128, 3), dtype=np.uint8)).save(tmp_path / "a.png")
    photo = Photo("a", tmp_path / "a.png", 128, 96)
    class_maps = ClassMaps(Lite0().build(pretrained=False), num_classes=2, side=64).eval()
    found = detections(([0, 0, 128, 96], 0.9, 1), ([2, 2, 126, 96], 0.8, 1), ([10, 10, 50, 60], 0.4, 0))
    snapped = SnapPhotos(Snap(own_quality=0.0), class_maps)(photo, found)
    assert snapped.scores.tolist() == pytest.approx([0.9, 0.4]) and snapped.labels.tolist() == [1, 0]
    assert not torch.equal(snapped.boxes, found.boxes[[0, 2]])
    assert (snapped.boxes[:, :2] >= 0).all() and (snapped.boxes[:, 2:] <= torch.tensor([128, 96])).all()
    certain = Snap(own_quality=1.0, quality=10.0, contrast=0.0, recall=0.0, evidence=0.0)
    stays = SnapPhotos(certain, class_maps)(photo, found)
    assert torch.equal(stays.boxes, found.boxes[[0, 2]])
    assert len(SnapPhotos(Snap(), class_maps)(photo, detections())) == 0


@pytest.mark.parametrize(
    ("labels", "expected"), [([], []), ([3], [True]), ([1, 1, 0, 1, 0], [True, False, True, False, False])]
)
def test_the_first_of_each_label(labels, expected):
    assert first_of_each(torch.tensor(labels, dtype=torch.long)).tolist() == expected


def test_the_best_box_of_a_class_moves_to_the_peak_of_the_photo(tmp_path: Path, monkeypatch):
    use_fake_sam(monkeypatch)
    Image.fromarray(np.zeros((128, 128, 3), dtype=np.uint8)).save(tmp_path / "a.png")
    photo = Photo("a", tmp_path / "a.png", 128, 128)
    maps = torch.full((1, 8, 8), 0.01)
    maps[0, 6, 6] = 0.9  # its centre is (104, 104), outside of both boxes
    monkeypatch.setattr(snapping, "photo_maps", lambda net, own: maps)
    class_maps = ClassMaps(Lite0().build(pretrained=False), num_classes=1, side=64).eval()
    found = detections(([0, 0, 40, 40], 0.9, 0), ([50, 0, 80, 30], 0.8, 0))
    there = torch.tensor([104.0, 104.0])

    boxes = SnapPhotos(Snap(evidence=2.0), class_maps)(photo, found).boxes
    assert ((boxes[:, :2] <= there) & (boxes[:, 2:] >= there)).all(dim=1).tolist() == [True, False]
