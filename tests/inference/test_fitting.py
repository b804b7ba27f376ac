"""Trimming of detections by colour, and snapping to masks."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from PIL import Image

from fake_sam import use_fake_sam
from tag2box.annotations import Detections, Photo
from tag2box.inference import fitting
from tag2box.inference.fitting import (
    Snap,
    SnapCandidates,
    SnapPhotos,
    Trim,
    TrimPhotos,
    box_mask,
    first_of_each,
    grabcut,
    highest_peaks,
    highest_per_class,
    mask_agreement,
    mask_box,
    peak_in,
    trimap_of_box,
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
    monkeypatch.setattr(fitting, "photo_maps", lambda net, own: maps)
    class_maps = ClassMaps(Lite0().build(pretrained=False), num_classes=1, side=64).eval()
    found = detections(([0, 0, 40, 40], 0.9, 0), ([50, 0, 80, 30], 0.8, 0))
    there = torch.tensor([104.0, 104.0])

    boxes = SnapPhotos(Snap(evidence=2.0), class_maps)(photo, found).boxes
    assert ((boxes[:, :2] <= there) & (boxes[:, 2:] >= there)).all(dim=1).tolist() == [True, False]


# ---------------------------------------------------------------- trimming


def trimap_by_loops(probs: torch.Tensor, inside: torch.Tensor, how: Trim) -> list[list[int]]:
    """The rule of the trimap, pixel by pixel; 0 background, 1 object, 2 likely background, 3 likely object."""
    cells = [(y, x) for y in range(probs.shape[0]) for x in range(probs.shape[1])]
    highest = max((float(probs[cell]) for cell in cells if inside[cell]), default=float(probs.max()))
    numbers = [[0] * probs.shape[1] for _ in range(probs.shape[0])]
    for y, x in cells:
        if inside[y, x]:
            p = float(probs[y, x])
            numbers[y][x] = 1 if p > how.sure * highest else 3 if p > how.likely * highest else 2
    return numbers


@given(
    st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]), min_size=12, max_size=12),
    st.lists(st.booleans(), min_size=12, max_size=12),
    st.sampled_from([(0.9, 0.5), (0.5, 0.5), (0.3, 0.8), (1.0, 0.0)]),
)
def test_the_trimap_is_that_of_the_loops(values, places, shares) -> None:
    probs, inside, how = (
        torch.tensor(values).view(3, 4),
        torch.tensor(places).view(3, 4),
        Trim(sure=shares[0], likely=shares[1]),
    )
    assert trimap_of_box(probs, inside, how).tolist() == trimap_by_loops(probs, inside, how)


def disc_photo(side: int = 60, centre: tuple[int, int] = (36, 24), radius: int = 10) -> torch.Tensor:
    """A red disc on green, with some noise."""
    rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    is_disc = (columns - centre[0]) ** 2 + (rows - centre[1]) ** 2 <= radius**2
    colour = torch.where(is_disc, torch.tensor([[[200]], [[40]], [[40]]]), torch.tensor([[[40]], [[160]], [[60]]]))
    noise = torch.randint(-15, 16, colour.shape, generator=torch.Generator().manual_seed(1))
    return (colour + noise).clamp(0, 255).byte()


def test_grabcut_finds_a_disc_from_its_centre() -> None:
    pixels = disc_photo()
    inside = box_mask(torch.tensor([5.0, 2.0, 58.0, 55.0]), (60, 60), (60, 60))
    probs = torch.zeros(60, 60)
    probs[20:29, 32:41] = 1.0
    trimap = trimap_of_box(probs, inside, Trim())
    found = grabcut(pixels, trimap)
    assert mask_box(found, (60, 60)).tolist() == pytest.approx([26, 14, 47, 35], abs=1)
    np.random.seed(3)  # the result does not depend on any random state
    assert torch.equal(grabcut(pixels, trimap), found)


@pytest.mark.parametrize("value", [0, 1, 2, 3])
def test_without_a_second_part_there_is_nothing_to_cut(value: int) -> None:
    trimap = np.full((4, 5), value, np.uint8)
    assert grabcut(torch.zeros(3, 4, 5, dtype=torch.uint8), trimap).all().item() is (value != 0)


@pytest.mark.parametrize(
    "box",
    [[5.0, 2, 58, 55], [0.0, 0, 60, 60], [30.0, 18, 42, 30], [59.9, 0.0, 60.0, 60.0], [3.2, 3.2, 3.3, 3.3]],
)
def test_trimmed_boxes_stay_inside_their_box(tmp_path: Path, monkeypatch, box) -> None:
    Image.fromarray(disc_photo().permute(1, 2, 0).numpy()).save(tmp_path / "a.png")
    photo = Photo("a", tmp_path / "a.png", 60, 60)
    maps = torch.full((1, 6, 6), 0.01)
    maps[0, 2, 3] = 0.9
    monkeypatch.setattr(fitting, "photo_maps", lambda net, own: maps)
    class_maps = ClassMaps(Lite0().build(pretrained=False), num_classes=1, side=64).eval()
    found = detections((box, 0.9, 0))
    trimmed = TrimPhotos(Trim(long_side=120, least_left=0.0), class_maps)(photo, found)
    assert trimmed.scores.tolist() == found.scores.tolist() and trimmed.labels.tolist() == [0]
    assert (trimmed.boxes[0, :2] >= found.boxes[0, :2]).all()
    assert (trimmed.boxes[0, 2:] <= found.boxes[0, 2:]).all()
    assert (trimmed.boxes[0, 2:] > trimmed.boxes[0, :2]).all()
    assert len(TrimPhotos(Trim(), class_maps)(photo, detections())) == 0


def test_boxes_with_low_scores_are_not_trimmed(tmp_path: Path, monkeypatch) -> None:
    Image.fromarray(disc_photo().permute(1, 2, 0).numpy()).save(tmp_path / "a.png")
    photo = Photo("a", tmp_path / "a.png", 60, 60)
    monkeypatch.setattr(fitting, "photo_maps", lambda net, own: torch.eye(6)[None].repeat(2, 1, 1))
    class_maps = ClassMaps(Lite0().build(pretrained=False), num_classes=2, side=64).eval()
    found = detections(
        ([0, 0, 50, 50], 0.9, 0), ([0, 30, 60, 60], 0.5, 0), ([30, 0, 60, 30], 0.4, 0), ([1, 0, 50, 50], 0.3, 1)
    )
    every = Trim(least_left=0.0)
    cases = (
        (every, 0.5, [2]),
        (replace(every, max_boxes=1), 0.0, [1, 2]),
        (every, 0.0, []),
        (Trim(least_left=1.0), 0.0, [0, 1, 2, 3]),
    )
    assert len({str(TrimPhotos(how, class_maps, least_share=least).identity()) for how, least, _ in cases}) == len(
        cases
    )
    for how, least, same in cases:
        trimmed = TrimPhotos(how, class_maps, least_share=least)(photo, found)
        assert [n for n in range(4) if torch.equal(trimmed.boxes[n], found.boxes[n])] == same
