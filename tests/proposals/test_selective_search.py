from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from PIL import Image

from tag2box.annotations import Photo, Truth
from tag2box.data.scenes import Scenes
from tag2box.errors import UserError
from tag2box.images import read_photo
from tag2box.ops.boxes import iou
from tag2box.parallel.pool import LocalPool
from tag2box.proposals.base import method_from_source
from tag2box.proposals.build import build_proposals
from tag2box.proposals.edge_boxes import EdgeBoxes
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


OTHER = {"mode": "quality", "engine": "opencv", "short_side": 128, "max_boxes": 5, "min_side": 30, "seed": 1,
         "thinning": 0.5, "min_share": 0.3}  # fmt: skip


def test_every_setting_has_an_effect(image: torch.Tensor) -> None:
    assert {f.name for f in fields(SelectiveSearch)} == {*OTHER, "kind"}
    base = SelectiveSearch(short_side=112, min_side=16, max_boxes=400)
    before = base(image).boxes
    for name, value in OTHER.items():
        assert not torch.equal(before, replace(base, **{name: value})(image).boxes), name


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
    found = replace(SEARCH, engine="opencv", seed=7, max_boxes=None)(image).boxes
    assert [tuple(box) for box in found.tolist()] == expected


@pytest.mark.parametrize("mode", ["fast", "quality"])
def test_most_boxes_are_those_of_opencv(image: torch.Tensor, mode: str) -> None:
    """Same images, tolerances and similarities; only the gradients of the texture histogram differ."""
    bgr = image.permute(1, 2, 0).numpy()[..., ::-1].copy()
    ours, theirs = (
        set(map(tuple, SelectiveSearch(mode=mode, engine=engine).search(bgr, 0).corners.tolist()))
        for engine in ("tag2box", "opencv")
    )
    assert len(ours & theirs) > 0.8 * len(theirs) and abs(len(ours) - len(theirs)) < 0.1 * len(theirs)


@pytest.mark.parametrize("shape", [(1, 1), (1, 40), (40, 1), (2, 2), (30, 40)])
@pytest.mark.parametrize("mode", ["fast", "quality"])
def test_tiny_grey_and_constant_images_give_the_whole_image(shape: tuple[int, int], mode: str) -> None:
    grey = np.random.default_rng(0).integers(0, 256, (*shape, 1), np.uint8).repeat(3, axis=2)
    for bgr in (grey, np.zeros_like(grey), np.full_like(grey, 255)):
        found = SelectiveSearch(mode=mode).search(bgr, 0).corners
        assert (found == [0, 0, shape[1], shape[0]]).all(1).any()
        assert (found[:, :2] >= 0).all() and (found[:, 2:] <= [shape[1], shape[0]]).all()


def _boxes(index: int) -> list[list[float]]:
    boxes: list[list[float]] = SEARCH(_scene(index)).boxes.tolist()
    return boxes


def _lost(index: int, number: int) -> list[list[float]]:
    return []


@pytest.mark.slow
def test_other_processes_find_the_same_boxes() -> None:
    found = dict(LocalPool(2)(_boxes, [0, 1], lost=_lost))  # type: ignore[type-var]
    assert found == {0: _boxes(0), 1: _boxes(1)}


# ---------------------------------------------------------------- stores of before


OLD_SOURCE = {
    "kind": "selective_search", "short_side": 200, "max_boxes": 2000, "min_side": 20, "mode": "fast", "seed": 0,
}  # fmt: skip


def test_a_store_without_an_engine_is_one_of_opencv() -> None:
    old, new = method_from_source(OLD_SOURCE), SelectiveSearch(short_side=200)
    assert old == replace(new, engine="opencv") and old.source() == OLD_SOURCE
    assert new.source() == {**OLD_SOURCE, "engine": "tag2box"}
    assert method_from_source(new.source()) == new


@pytest.mark.parametrize("thinning", [0.9, 0.6])
def test_thinning_is_nms_in_the_order_of_the_shuffle(image: torch.Tensor, thinning: float) -> None:
    whole = replace(SEARCH, max_boxes=None)(image).boxes
    kept: list[torch.Tensor] = []
    for box in whole:
        if all(float(iou(box[None], other[None])) <= thinning for other in kept):
            kept.append(box)
    found = replace(SEARCH, max_boxes=None, thinning=thinning)(image).boxes
    assert torch.equal(found, torch.stack(kept)) and len(found) < len(whole)
    assert torch.equal(replace(SEARCH, max_boxes=5, thinning=thinning)(image).boxes, found[:5])


def test_an_old_store_is_completed_as_it_was_begun_and_never_mixed(tmp_path: Path) -> None:
    Image.fromarray(Scenes().draw("train", 0).image).save(tmp_path / "a.png")
    photo, method = Photo("a", tmp_path / "a.png", 224, 192), replace(SEARCH, engine="opencv")
    stored = build_proposals([photo], method, tmp_path / "store", read=read_photo, workers=1)
    assert "engine" not in stored.source  # as written by versions without the setting
    with pytest.raises(UserError, match=r'store: made with engine "opencv", not "tag2box"; remove it, or name another'):
        build_proposals([photo], SEARCH, tmp_path / "store", read=read_photo, workers=1)
    again = build_proposals([photo], method_from_source(stored.source), tmp_path / "store", read=read_photo, workers=1)
    assert torch.equal(again.boxes("a"), stored.boxes("a"))


def test_it_finds_the_objects_of_generated_scenes() -> None:
    scenes = [Scenes().draw("test", i) for i in range(8)]
    boxes = [replace(SEARCH, max_boxes=200)(torch.from_numpy(s.image).permute(2, 0, 1)).boxes for s in scenes]
    truth = Truth(Scenes().classes, tuple("abcdefgh"), ((224, 192),) * 8, tuple(s.objects for s in scenes))
    found = measure_recall(boxes, truth)
    assert found.recall[0] >= 0.9 and found.boxes_per_image <= 200


@pytest.mark.parametrize("method", [SelectiveSearch(short_side=64, min_side=4), EdgeBoxes(short_side=64, min_side=4)])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.4])
def test_small_boxes_are_dropped_relative_to_the_photo(
    image: torch.Tensor, method: SelectiveSearch | EdgeBoxes, share: float
) -> None:
    shortest, everything = max(4, share * min(image.shape[1:])), method(image).boxes
    kept = replace(method, min_share=share)(image).boxes
    sides = (kept[:, 2:] - kept[:, :2]).amin(dim=1)
    large = everything[(everything[:, 2:] - everything[:, :2]).amin(dim=1) >= shortest]
    assert len(kept) and sides.min() >= shortest
    if isinstance(method, SelectiveSearch):  # the search of edge boxes itself depends on the smallest side
        assert {tuple(box) for box in kept.tolist()} == {tuple(box) for box in large.tolist()}
    assert len(kept) < len(everything) or share < 0.4
    assert replace(method, min_share=share).source().get("min_share", 0.0) == share
