from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tag2box.data.transforms import Resize, View, apply, flip, place, resize_short, resized

BOXES = torch.tensor([[0.0, 0.0, 40.0, 30.0], [4.0, 3.0, 12.0, 9.0]])


@pytest.mark.parametrize(
    ("size", "short", "long_max", "expected"),
    [
        ((1, 1), 16, None, (16, 16)),
        ((30, 40), 30, None, (30, 40)),
        ((30, 40), 60, 100, (60, 80)),
        ((30, 40), 90, 100, (75, 100)),
        ((40, 30), 90, 100, (100, 75)),
        ((3, 1000), 30, 100, (1, 100)),
    ],
)
def test_resized_sides(size: tuple[int, int], short: int, long_max: int | None, expected: tuple[int, int]) -> None:
    assert resized(size, short, long_max) == expected


@given(st.integers(1, 900), st.integers(1, 900), st.integers(16, 600), st.integers(600, 1200))
def test_a_resized_photo_keeps_its_shape_and_both_limits(height: int, width: int, short: int, long_max: int) -> None:
    rows, cols = resized((height, width), short, long_max)
    assert min(rows, cols) <= max(short, 1) and max(rows, cols) <= long_max
    assert abs(rows / cols * width / height - 1) < 1 / min(rows, cols) + 1e-9


@pytest.mark.parametrize("rows", [0, 1, 2])
def test_boxes_follow_their_pixels(rows: int) -> None:
    image, boxes = resize_short(torch.rand(3, 30, 40), BOXES[:rows], 45, 55)
    assert image.shape == (3, 41, 55) and boxes.shape == (rows, 4)
    assert torch.allclose(boxes, BOXES[:rows] * torch.tensor([55 / 40, 41 / 30] * 2))


def test_a_constant_photo_stays_constant_and_a_resize_to_itself_is_nothing() -> None:
    image = torch.full((3, 30, 40), 200.0)
    assert torch.allclose(resize_short(image, BOXES, 17)[0], torch.tensor(200.0))
    same, boxes = resize_short(image, BOXES, 30)
    assert same is image and boxes is BOXES


@pytest.mark.parametrize("rows", [0, 1, 2])
def test_flip_twice_is_nothing(rows: int) -> None:
    image = torch.rand(3, 30, 40)
    once = flip(image, BOXES[:rows])
    assert torch.equal(once[0][:, :, 0], image[:, :, -1])
    twice = flip(*once)
    assert torch.equal(twice[0], image) and torch.equal(twice[1], BOXES[:rows])


def test_a_flipped_box_holds_the_same_pixels() -> None:
    image = torch.rand(3, 30, 40)
    mirrored, boxes = flip(image, BOXES)
    for before, after in zip(BOXES.int().tolist(), boxes.int().tolist(), strict=True):
        crop = image[:, before[1] : before[3], before[0] : before[2]]
        assert torch.equal(mirrored[:, after[1] : after[3], after[0] : after[2]], crop.flip(2))


def test_apply_resizes_then_mirrors() -> None:
    image = torch.rand(3, 30, 40)
    expected = flip(*resize_short(image, BOXES, 60, 70))
    for got, want in zip(apply(View(60, True, 70), image, BOXES), expected, strict=True):
        assert torch.equal(got, want)
    assert apply(View(None), image, BOXES)[0] is image


@pytest.mark.parametrize("view", [View(None), View(None, True), View(45, False, 55), View(17, True), View(30, True)])
@pytest.mark.parametrize("rows", [0, 2])
def test_boxes_placed_without_pixels_are_those_placed_with_them(view: View, rows: int) -> None:
    placed = place(view, BOXES[:rows], (30, 40))
    assert torch.allclose(placed, apply(view, torch.rand(3, 30, 40), BOXES[:rows])[1])


def test_views_depend_on_seed_epoch_and_photo_only() -> None:
    resize = Resize()
    views = [resize.view(seed, epoch, index) for seed in (0, 1) for epoch in (0, 1) for index in range(100)]
    assert views == [resize.view(seed, epoch, index) for seed in (0, 1) for epoch in (0, 1) for index in range(100)]
    assert {view.short for view in views} == set(resize.scales)
    assert 0.35 < sum(view.flip for view in views) / len(views) < 0.65
    assert len({tuple(views[k : k + 100]) for k in range(0, 400, 100)}) == 4


def test_every_resize_setting_is_heard() -> None:
    only = Resize(scales=(64,), long_max=80, flip=0.0)
    assert {only.view(0, 0, i) for i in range(20)} == {View(64, False, 80)}
