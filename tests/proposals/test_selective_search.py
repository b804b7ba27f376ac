from __future__ import annotations

from dataclasses import fields, replace

import cv2
import numpy as np
import pytest
import torch

from tag2box.annotations import Truth
from tag2box.data.scenes import Scenes
from tag2box.proposals.recall import measure_recall
from tag2box.proposals.selective_search import SelectiveSearch

SEARCH = SelectiveSearch(short_side=112, min_side=16, max_boxes=60)


def _scene(index: int) -> torch.Tensor:
    return torch.from_numpy(Scenes().draw("train", index).image).permute(2, 0, 1)


@pytest.fixture(scope="module")
def image() -> torch.Tensor:
    return _scene(3)


@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 30), (16, 16), (40, 25)])
def test_a_plain_photo_gives_at_most_boxes_inside_it(height: int, width: int) -> None:
    found = SelectiveSearch(min_side=20)(torch.full((3, height, width), 90, dtype=torch.uint8))
    boxes = found.boxes
    assert not found.scores.any()  # it does not rank
    assert boxes.shape == (len(boxes), 4) and boxes.dtype == torch.float32
    assert (boxes >= 0).all() and (boxes[:, 2] <= width).all() and (boxes[:, 3] <= height).all()


def test_the_same_photo_gives_the_same_boxes_in_the_same_order_every_time(image: torch.Tensor) -> None:
    first = SEARCH(image).boxes
    SEARCH(_scene(4))  # whatever was searched before
    assert torch.equal(first, SEARCH(image).boxes)


def test_boxes_are_distinct_big_enough_inside_and_capped(image: torch.Tensor) -> None:
    boxes = SEARCH(image).boxes
    assert len(boxes) == 60 == len(boxes.unique(dim=0))
    assert (boxes[:, 2:] - boxes[:, :2]).min() >= 16
    assert (boxes >= 0).all() and (boxes[:, 2] <= 224).all() and (boxes[:, 3] <= 192).all()
    assert boxes[:, 2].max() == 224 and boxes[:, 3].max() == 192  # right and bottom are exclusive


def test_the_cap_takes_the_first_of_a_longer_list(image: torch.Tensor) -> None:
    everything = replace(SEARCH, max_boxes=None)(image).boxes
    assert len(everything) > 60 and torch.equal(everything[:60], SEARCH(image).boxes)


OTHER = {"mode": "quality", "short_side": 128, "max_boxes": 5, "min_side": 30, "seed": 1}


def test_every_setting_has_an_effect(image: torch.Tensor) -> None:
    assert {f.name for f in fields(SelectiveSearch)} == {*OTHER, "kind"}
    small = torch.nn.functional.interpolate(image[None].float(), (64, 75))[0].to(torch.uint8)
    base = SelectiveSearch(short_side=64, min_side=8, max_boxes=40)
    before = base(small).boxes
    for name, value in OTHER.items():
        assert not torch.equal(before, replace(base, **{name: value})(small).boxes), name


def test_a_working_resolution_still_gives_boxes_of_the_original(image: torch.Tensor) -> None:
    whole = torch.tensor([0.0, 0.0, 224.0, 192.0])
    boxes = replace(SEARCH, max_boxes=None, short_side=100)(image).boxes
    assert (boxes == whole).all(1).any()


def test_the_result_is_a_shuffle_of_what_opencv_finds(image: torch.Tensor) -> None:
    """The steps written out once more: runs of before and after a change of this code must compare."""
    bgr = np.ascontiguousarray(image.permute(1, 2, 0).numpy()[..., ::-1])
    small = cv2.resize(bgr, (131, 112), interpolation=cv2.INTER_AREA)
    search = cv2.ximgproc.segmentation.createSelectiveSearchSegmentation()
    search.setBaseImage(small)
    search.switchToSelectiveSearchFast()
    kept = set()
    for x, y, w, h in search.process().tolist():
        corners = np.array([x * 224 / 131, y * 192 / 112, (x + w) * 224 / 131, (y + h) * 192 / 112], np.float32)
        if min(corners[2:] - corners[:2]) >= 16:
            kept.add(tuple(corners.tolist()))
    order = np.random.default_rng(7).permutation(len(kept))
    expected = [sorted(kept)[i] for i in order]
    found = replace(SEARCH, seed=7, max_boxes=None)(image).boxes
    assert [tuple(box) for box in found.tolist()] == expected


def test_it_finds_the_objects_of_generated_scenes() -> None:
    scenes = [Scenes().draw("test", i) for i in range(8)]
    boxes = [replace(SEARCH, max_boxes=200)(torch.from_numpy(s.image).permute(2, 0, 1)).boxes for s in scenes]
    truth = Truth(Scenes().classes, tuple("abcdefgh"), ((224, 192),) * 8, tuple(s.objects for s in scenes))
    found = measure_recall(boxes, truth)
    assert found.recall[0] >= 0.9 and found.boxes_per_image <= 200
