from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from tag2box.images import Resize, View, boxes_in_view, flip_boxes, render_view, resized, view_size

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


VIEWS = [View(None), View(None, True), View(45, False, 55), View(17, True), View(30, True), View(60, False, 70)]


@pytest.mark.parametrize("view", VIEWS)
def test_pixels_and_boxes_agree_on_the_size_that_is_seen(view: View) -> None:
    height, width = view_size(view, (30, 40))
    assert render_view(view, torch.rand(3, 30, 40), (30, 40)).shape == (3, height, width)
    whole = boxes_in_view(view, torch.tensor([[0.0, 0.0, 40.0, 30.0]]), (30, 40))
    assert torch.allclose(whole, torch.tensor([[0.0, 0.0, width, height]]), atol=1e-5)


@pytest.mark.parametrize("rows", [0, 1, 2])
def test_boxes_follow_their_pixels(rows: int) -> None:
    assert view_size(View(45, False, 55), (30, 40)) == (41, 55)
    boxes = boxes_in_view(View(45, False, 55), BOXES[:rows], (30, 40))
    assert boxes.shape == (rows, 4) and torch.allclose(boxes, BOXES[:rows] * torch.tensor([55 / 40, 41 / 30] * 2))


def test_a_constant_photo_stays_constant_and_a_resize_to_itself_is_nothing() -> None:
    image = torch.full((3, 30, 40), 200.0)
    assert torch.allclose(render_view(View(17), image, (30, 40)), torch.tensor(200.0))
    for view in (View(None), View(30)):
        assert render_view(view, image, (30, 40)) is image
        assert torch.equal(boxes_in_view(view, BOXES, (30, 40)), BOXES)


@pytest.mark.parametrize("view", VIEWS)
def test_a_reduced_copy_is_shown_in_the_size_of_the_photo(view: View) -> None:
    smooth = torch.linspace(0, 255, 160).expand(3, 120, 160).contiguous()
    reduced = torch.nn.functional.avg_pool2d(smooth, 2)
    size = (120, 160)
    seen = render_view(view, reduced, size)
    assert seen.shape == render_view(view, smooth, size).shape
    assert (seen - render_view(view, smooth, size)).abs().mean() < 1


@pytest.mark.parametrize("rows", [0, 1, 2])
def test_mirrored_twice_is_nothing(rows: int) -> None:
    image, view = torch.rand(3, 30, 40), View(None, True)
    once = render_view(view, image, (30, 40))
    assert torch.equal(once[:, :, 0], image[:, :, -1])
    assert torch.equal(render_view(view, once, (30, 40)), image)
    assert torch.equal(flip_boxes(flip_boxes(BOXES[:rows], 40), 40), BOXES[:rows])


def test_a_flipped_box_holds_the_same_pixels() -> None:
    image, view = torch.rand(3, 30, 40), View(None, True)
    flipped, boxes = render_view(view, image, (30, 40)), boxes_in_view(view, BOXES, (30, 40))
    for before, after in zip(BOXES.int().tolist(), boxes.int().tolist(), strict=True):
        crop = image[:, before[1] : before[3], before[0] : before[2]]
        assert torch.equal(flipped[:, after[1] : after[3], after[0] : after[2]], crop.flip(2))


def test_a_view_resizes_then_flips() -> None:
    image = torch.rand(3, 30, 40)
    plain = render_view(View(60, False, 70), image, (30, 40))
    assert torch.equal(render_view(View(60, True, 70), image, (30, 40)), plain.flip(2))
    expected = flip_boxes(boxes_in_view(View(60, False, 70), BOXES, (30, 40)), plain.shape[2])
    assert torch.equal(boxes_in_view(View(60, True, 70), BOXES, (30, 40)), expected)


def test_views_depend_on_seed_epoch_and_photo_only() -> None:
    resize = Resize()
    views = [resize.view(seed, epoch, index) for seed in (0, 1) for epoch in (0, 1) for index in range(100)]
    assert views == [resize.view(seed, epoch, index) for seed in (0, 1) for epoch in (0, 1) for index in range(100)]
    assert {view.short for view in views} == set(resize.scales)
    assert 0.35 < sum(view.flip for view in views) / len(views) < 0.65
    assert len({tuple(views[k : k + 100]) for k in range(0, 400, 100)}) == 4


def test_every_resize_setting_has_an_effect() -> None:
    only = Resize(scales=(64,), long_max=80, flip=0.0)
    assert {only.view(0, 0, i) for i in range(20)} == {View(64, False, 80)}
