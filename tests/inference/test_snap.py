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
from tag2box.inference.snap import Snap, SnapPhotos, first_of_each, highest_per_class, peaks
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


def test_a_peak_is_the_highest_cell_in_the_box():
    maps = torch.tensor([[[0.9, 0.1], [0.2, 0.5]]]).expand(3, 2, 2)
    boxes = torch.tensor([[0.0, 0, 8, 8], [3.0, 0, 8, 8], [4.5, 0.0, 5.5, 1.0]])
    assert peaks(maps, boxes, (8, 8)).tolist() == [[2, 2], [6, 6], [5, 0.5]]  # the last has no centre of a cell
    assert peaks(maps[:0], boxes[:0], (8, 8)).shape == (0, 2)


@given(st.integers(0, 10_000), st.integers(0, 5), st.integers(1, 6))
def test_the_choice_is_that_of_loops(seed, count, candidates):
    draw = torch.Generator().manual_seed(seed)
    corners = torch.rand(count, candidates, 2, 2, generator=draw) * 20
    boxes = torch.cat([corners.amin(2), corners.amax(2)], dim=2)
    quality, evidence, shares = (torch.rand(count, candidates, generator=draw).double() for _ in range(3))
    snap = Snap(quality=1.5, evidence=0.7, area=0.2)
    for row, got in enumerate(snap.choose(boxes, quality, evidence, shares).tolist()):
        best, expected = -math.inf, 0
        for k in range(candidates):
            x1, y1, x2, y2 = boxes[row, k].tolist()
            if k > 0 and (x2 - x1 < 1 or y2 - y1 < 1):
                continue
            fit = max(quality[row, k].item(), 1e-3) ** 1.5 * max(evidence[row, k].item(), 1e-3) ** 0.7
            fit *= max(shares[row, k].item(), 1e-6) ** 0.2
            if fit > best:
                best, expected = fit, k
        assert got == expected


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
    stays = SnapPhotos(Snap(own_quality=1.0, quality=10.0, evidence=0.0), class_maps)(photo, found)
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

    def holds(peak: str) -> list[bool]:
        boxes = SnapPhotos(Snap(peak=peak, evidence=2.0), class_maps)(photo, found).boxes  # type: ignore[arg-type]
        return ((boxes[:, :2] <= there) & (boxes[:, 2:] >= there)).all(dim=1).tolist()

    assert holds("box") == [False, False]
    assert holds("photo") == [True, False]
