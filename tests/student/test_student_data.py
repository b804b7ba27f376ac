"""Training pictures: labels follow their pixels, and a picture depends on its iteration and place alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from PIL import Image

from tag2box.annotations import Photo
from tag2box.student.student_data import Augmentation, StudentBatches, TrainingPicture, coloured, cut_to, moved, scaled
from tag2box.student.targets import PhotoLabels

GREY, RED = (90, 90, 90), (250, 10, 10)
BOX = (30, 20, 60, 50)


def labels(*boxes: tuple[float, float, float, float]) -> PhotoLabels:
    count = len(boxes)
    return PhotoLabels(
        torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4), torch.arange(count), torch.ones(count),
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
