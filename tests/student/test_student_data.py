"""Training pictures: labels follow their pixels, and a picture depends on its iteration and place alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from PIL import Image

from tag2box.annotations import Photo
from tag2box.student.student_data import (
    Augmentation,
    PhotoLabels,
    StudentBatches,
    TrainingPicture,
    coloured,
    covered,
    cut_to,
    moved,
    pasted,
    scaled,
)

GREY, RED = (90, 90, 90), (250, 10, 10)
BOX = (30, 20, 60, 50)


def labels(*boxes: tuple[float, float, float, float]) -> PhotoLabels:
    count = len(boxes)
    return PhotoLabels(
        torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4), torch.arange(count), torch.ones(count),
        torch.zeros(count, dtype=torch.bool),
        torch.zeros(0, 4), torch.zeros(0, dtype=torch.long),
    )  # fmt: skip


@pytest.fixture(scope="module")
def photo(tmp_path_factory: pytest.TempPathFactory) -> Photo:
    """Grey, with a red box."""
    path = tmp_path_factory.mktemp("data") / "a.png"
    image = Image.new("RGB", (96, 64), GREY)
    image.paste(RED, BOX)
    image.save(path)
    return Photo("a", path, 96, 64)


def batches(photo: Photo, **changes: object) -> StudentBatches:
    how = replace(Augmentation(sides=(64,), colour=0.0), **changes)  # type: ignore[arg-type]
    neutral = (0.0, 0.0, 0.0)
    return StudentBatches([photo] * 5, [labels(BOX)] * 5, how, batch_size=4, seed=3, iterations=50, colour=neutral)


@pytest.mark.parametrize("mosaic", [0.0, 1.0])
def test_labels_are_where_their_pixels_are(photo: Photo, mosaic: float) -> None:
    source, seen = batches(photo, mosaic=mosaic, plain_end=0.0, least_visible=0.0), 0
    for iteration in range(8):
        for picture in source.batch(iteration):
            is_red = picture.pixels[0] - picture.pixels[1] > 60
            shown = torch.zeros_like(is_red)
            for x1, y1, x2, y2 in picture.labels.boxes.round().int().tolist():
                shown[y1:y2, x1:x2] = True
                seen += 1
            grown = torch.nn.functional.max_pool2d(shown[None].float(), 5, 1, 2)[0] > 0
            assert not (is_red & ~grown).any()
            assert (is_red & shown).sum() >= 0.6 * shown.sum() - 60  # borders are blurred by the resize
    assert seen > 20


def test_a_picture_depends_on_iteration_and_place_alone(photo: Photo) -> None:
    source = batches(photo)
    whole, part = source.batch(7), source.batch(7, range(1, 3))
    for a, b in zip(whole[1:3], part, strict=True):
        assert torch.equal(a.pixels, b.pixels) and torch.equal(a.labels.boxes, b.labels.boxes)
    assert not torch.equal(source.batch(8)[0].pixels, whole[0].pixels)


def test_every_photo_is_seen_once_per_epoch(photo: Photo) -> None:
    source = batches(photo)
    order = [index for iteration in range(5) for index in source.order(iteration)]
    assert all(sorted(order[first : first + 5]) == [0, 1, 2, 3, 4] for first in range(0, 20, 5))


def test_the_end_of_each_round_has_no_mosaics(photo: Photo) -> None:
    source = batches(photo, mosaic=1.0, plain_end=0.5, zoom=(0.5, 0.5), least_visible=0.0)
    counts = {iteration: [len(picture.labels) for picture in source.batch(iteration)] for iteration in (0, 25, 50, 99)}
    assert counts[25] == counts[99] == [1] * 4
    assert min(counts[0] + counts[50]) >= 3


# ---------------------------------------------------------------- pasted boxes


@pytest.mark.parametrize("mosaic", [0.0, 1.0])
def test_pasted_boxes_have_their_pixels_and_their_label(photo: Photo, mosaic: float) -> None:
    plain, source = (batches(photo, mosaic=mosaic, copy_paste=share, least_visible=0.0) for share in (0.0, 1.0))
    grown = 0
    for iteration in range(8):
        for before, picture in zip(plain.batch(iteration), source.batch(iteration), strict=True):
            grown += len(picture.labels) > len(before.labels)
            changed = (picture.pixels != before.pixels).any(dim=0)
            shown = torch.zeros_like(changed)
            for x1, y1, x2, y2 in picture.labels.boxes.tolist():
                shown[int(y1) : -int(-y2 // 1), int(x1) : -int(-x2 // 1)] = True
            assert not (changed & ~shown).any()  # the other pixels are those without it
    assert grown > 16
    pairs = zip(source.batch(7)[1:3], source.batch(7, range(1, 3)), strict=True)
    assert all(torch.equal(a.pixels, b.pixels) for a, b in pairs)


def test_at_the_end_and_without_a_certain_label_nothing_is_pasted(photo: Photo) -> None:
    plain, source = (batches(photo, mosaic=0.0, plain_end=0.5, copy_paste=share) for share in (0.0, 1.0))
    weak = replace(source, labels=[replace(labels(BOX), weights=torch.tensor([0.5]))] * 5)
    for made, iteration in ((source, 25), (weak, 0)):
        for a, b in zip(plain.batch(iteration), made.batch(iteration), strict=True):
            assert torch.equal(a.pixels, b.pixels)


def picture(value: float, own: PhotoLabels) -> TrainingPicture:
    return TrainingPicture(torch.full((3, 32, 32), value), own)


def test_a_pasted_class_is_there_and_regions_of_both_photos_stay() -> None:
    whole = torch.tensor([[0.0, 0.0, 32.0, 32.0]])
    below = replace(labels((0, 0, 32, 32)), regions=whole, region_labels=torch.tensor([7]))
    other = labels((8.4, 8.0, 24.0, 23.5), (20.0, 8.0, 40.0, 30.0))
    above = replace(other, labels=torch.tensor([5, 6]), weights=torch.tensor([1.0, 0.3]), regions=whole,
                    region_labels=torch.tensor([9]))  # fmt: skip
    found = pasted(picture(0.0, below), picture(9.0, above), 0.5, np.random.default_rng(0))
    assert found.labels.labels.tolist() == [0, 5]  # the weak label beside it is cut to a small rest
    assert found.labels.boxes[1].tolist() == pytest.approx([8.4, 8.0, 24.0, 23.5])
    assert found.labels.region_labels.tolist() == [7, 9, 6]
    assert found.labels.regions.tolist() == [[0, 0, 32, 32], [8, 8, 24, 24], [20, 8, 24, 24]]
    inside = torch.zeros(32, 32, dtype=torch.bool)
    inside[8:24, 8:24] = True
    assert ((found.pixels == 9) == inside).all() and ((found.pixels == 0) == ~inside).all()
    for source in (labels(), replace(labels(BOX), weights=torch.tensor([0.5]))):
        assert pasted(picture(0.0, below), picture(9.0, source), 0.5, np.random.default_rng(0)).labels is below


def slow_covered(own: PhotoLabels, cover: tuple[float, ...], least: float) -> list[str]:
    """What becomes of each label, counted in squares of one pixel."""
    outcomes = []
    for x1, y1, x2, y2 in own.boxes.int().tolist():
        cells = [(x, y) for x in range(x1, x2) for y in range(y1, y2)]
        seen = [(x, y) for x, y in cells if not (cover[0] <= x < cover[2] and cover[1] <= y < cover[3])]
        share = len(seen) / len(cells)
        outcomes.append("gone" if share == 0 else "label" if share >= least else "region")
    return outcomes


@given(
    st.lists(st.tuples(*[st.integers(0, 9)] * 2, *[st.integers(1, 9)] * 2), max_size=4),
    st.tuples(*[st.integers(0, 9)] * 2, *[st.integers(1, 9)] * 2),
)
def test_labels_behind_a_box_are_those_found_square_by_square(rows: list, cover: tuple[int, ...]) -> None:
    own = labels(*((x, y, x + w, y + h) for x, y, w, h in rows))
    front = (cover[0], cover[1], cover[0] + cover[2], cover[1] + cover[3])
    found, outcomes = covered(own, torch.tensor(front, dtype=torch.float32), 0.31), slow_covered(own, front, 0.31)
    assert found.labels.tolist() == [row for row, kind in enumerate(outcomes) if kind == "label"]
    assert found.region_labels.tolist() == [row for row, kind in enumerate(outcomes) if kind == "region"]


# ---------------------------------------------------------------- boxes


def test_what_is_left_of_a_label_may_be_too_little() -> None:
    own = labels((0, 0, 20, 20), (-15, 0, 5, 20), (-30, 0, -10, 20), (50, 50, 90, 70))
    found = cut_to(own, (64, 64), 0.3)
    assert found.labels.tolist() == [0]
    assert found.boxes.tolist() == [[0, 0, 20, 20]]
    assert found.regions.tolist() == [[0, 0, 5, 20], [50, 50, 64, 64]]
    assert found.region_labels.tolist() == [1, 3]
    assert len(cut_to(labels(), (64, 64), 0.3)) == 0


@given(
    st.tuples(st.floats(0, 40), st.floats(0, 40), st.floats(1, 40), st.floats(1, 40)),
    st.tuples(st.floats(0.2, 3), st.floats(0.2, 3)),
)
def test_a_label_flipped_twice_is_back(box: tuple[float, ...], factors: tuple[float, float]) -> None:
    x, y, w, h = box
    own = labels((x, y, x + w, y + h))
    twice = scaled(scaled(own, factors, 80 * factors[0]), (1.0, 1.0), 80 * factors[0])
    assert torch.allclose(twice.boxes, scaled(own, factors).boxes, atol=1e-3)
    assert torch.allclose(moved(moved(own, 3, 5), -3, -5).boxes, own.boxes, atol=1e-4)


def test_colours_change_within_their_range_and_labels_stay() -> None:
    picture = TrainingPicture(torch.rand(3, 8, 8) * 255, labels(BOX))
    same = coloured(picture, 0.0, np.random.default_rng(0))
    other = coloured(picture, 0.3, np.random.default_rng(0))
    assert torch.allclose(same.pixels, picture.pixels, atol=1e-3)
    assert not torch.allclose(other.pixels, picture.pixels, atol=1)
    assert other.pixels.min() >= 0 and other.pixels.max() <= 255 and other.labels is picture.labels
