from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from tag2box.data.scene_objects import OBJECT_CLASSES, draw_object
from tag2box.data.scenes import Scenes
from tag2box.errors import UserError
from tag2box.formats.coco_boxes import read_coco_truth
from tag2box.formats.csv_tags import read_tags
from tag2box.images import read_photo

SMALL = Scenes(train=3, test=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("scenes") / "small"
    SMALL.write(out)
    return out


def test_a_photo_is_a_function_of_settings_split_and_number() -> None:
    first, again = SMALL.draw("train", 1), replace(SMALL, train=9).draw("train", 1)
    assert np.array_equal(first.image, again.image) and torch.equal(first.objects.boxes, again.objects.boxes)
    others = (SMALL.draw("test", 1), SMALL.draw("train", 2), replace(SMALL, seed=1).draw("train", 1))
    assert all(not np.array_equal(first.image, other.image) for other in others)


OTHER = {
    "seed": 5,
    "width": 240,
    "height": 200,
    "classes": ("fish", "mug"),
    "most_classes": 1,
    "most_instances": 1,
    "smallest": 60.0,
    "largest": 70.0,
    "part": 0.0,
    "touch": 0.0,
    "crowd": 1.0,
    "clutter": 1.0,
}


def test_every_dial_changes_the_pictures() -> None:
    assert {f.name for f in fields(Scenes)} == {*OTHER, "kind", "train", "test"}
    before = [SMALL.draw("train", i).image for i in range(6)]
    for name, value in OTHER.items():
        other = replace(SMALL, **{name: value})
        assert any(not np.array_equal(a, other.draw("train", i).image) for i, a in enumerate(before)), name


def test_boxes_are_inside_whole_pixels_and_every_photo_shows_something() -> None:
    for index in range(20):
        scene = SMALL.draw("train", index)
        boxes = scene.objects.boxes
        assert scene.image.shape == (192, 224, 3) and len(boxes) >= 1
        assert (boxes[:, :2] >= 0).all() and (boxes[:, 2] <= 224).all() and (boxes[:, 3] <= 192).all()
        assert torch.equal(boxes, boxes.round()) and (boxes[:, 2:] - boxes[:, :2]).min() >= 12
        assert 1 <= scene.objects.labels.unique().numel() <= 3


def _count(scenes: Scenes, photos: int = 25) -> tuple[float, float]:
    """Objects per class shown, and the share of same-class pairs whose boxes meet."""
    counts, meets = [], []
    for index in range(photos):
        objects = scenes.draw("train", index).objects
        for label in objects.labels.unique():
            boxes = objects.boxes[objects.labels == label]
            counts.append(len(boxes))
            for i in range(len(boxes)):
                for j in range(i):
                    gap = torch.maximum(boxes[i, :2], boxes[j, :2]) - torch.minimum(boxes[i, 2:], boxes[j, 2:])
                    meets.append(float((gap <= 1).all()))
    return float(np.mean(counts)), float(np.mean(meets)) if meets else 0.0


def test_crowd_and_touch_have_their_effect() -> None:
    assert _count(replace(SMALL, crowd=0.0))[0] == 1.0
    alone, together = _count(replace(SMALL, touch=0.0)), _count(replace(SMALL, touch=1.0))
    assert alone[1] < 0.2 < 0.4 < together[1]
    assert 2.3 < _count(SMALL)[0] < 3.3


def test_a_loud_mark_stands_out_more_than_a_quiet_one() -> None:
    def contrast(name: str, *, loud: bool) -> float:
        sprite = draw_object(np.random.default_rng(3), name, 80.0, loud=loud, behind=(0.5, 0.5, 0.5))
        return float(sprite.rgb[sprite.alpha > 0.9].mean(1).std())

    quieter = [contrast(name, loud=True) > contrast(name, loud=False) for name in OBJECT_CLASSES]
    assert all(quieter)


@pytest.mark.parametrize("name", OBJECT_CLASSES)
def test_every_object_is_one_connected_shape_of_about_the_given_size(name: str) -> None:
    for seed in range(4):
        sprite = draw_object(np.random.default_rng(seed), name, 72.0, loud=True, behind=(0.2, 0.6, 0.2))
        solid = (sprite.alpha > 0.4).astype(np.uint8)
        ys, xs = np.nonzero(solid)
        longest = max(np.ptp(ys), np.ptp(xs)) + 1
        assert 50 <= longest <= 108 and cv2.connectedComponents(solid)[0] == 2
        assert solid[0].sum() + solid[-1].sum() + solid[:, 0].sum() + solid[:, -1].sum() == 0  # not cut by its canvas


def test_the_folder_reads_back_as_tags_and_truth(folder: Path) -> None:
    for split, count in (("train", 3), ("test", 2)):
        tagged = read_tags(folder / split / "tags.csv", folder / split / "photos", OBJECT_CLASSES)
        truth = read_coco_truth(folder / split / "truth.json")
        assert len(tagged) == len(truth) == count and truth.classes == OBJECT_CLASSES
        assert tuple(photo.id for photo in tagged.photos) == truth.ids
        for photo, tags, objects in zip(tagged.photos, tagged.tags, truth.objects, strict=True):
            assert (photo.width, photo.height) == (224, 192)
            assert tags.nonzero().flatten().tolist() == objects.labels.unique().tolist()
        drawn = SMALL.draw(split, 0)
        assert torch.equal(truth.objects[0].boxes, drawn.objects.boxes)
        seen = read_photo(tagged.photos[0].path).permute(1, 2, 0).numpy()
        assert np.abs(seen.astype(int) - drawn.image).mean() < 4  # JPEG
    assert (folder / "classes.txt").read_text().split() == list(OBJECT_CLASSES)


def test_a_complete_folder_is_left_alone_and_a_broken_one_mended(folder: Path) -> None:
    photo, other = folder / "train/photos/train_00000.jpg", folder / "train/photos/train_00001.jpg"
    before, content = photo.stat().st_mtime_ns, photo.read_bytes()
    SMALL.write(folder)
    assert photo.stat().st_mtime_ns == before
    other.unlink()
    SMALL.write(folder)
    assert other.exists() and photo.read_bytes() == content


def test_progress_counts_all_photos(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    replace(SMALL, train=1, test=1).write(tmp_path / "new", on_progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 2), (2, 2)]


def test_a_folder_of_other_settings_or_of_strangers_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"made with touch = 0.5, not 0.0"):
        replace(SMALL, touch=0.0).write(folder)
    (tmp_path / "diary.txt").write_text("mine")
    with pytest.raises(UserError, match="holds other files"):
        SMALL.write(tmp_path)


@pytest.mark.parametrize(
    ("change", "says"),
    [({"classes": ("unicorn",)}, "unicorn"), ({"classes": ()}, "none"), ({"smallest": 99.0}, "99.0 is above largest")],
)
def test_settings_that_cannot_be_drawn_are_refused(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        replace(SMALL, **change).write(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_folder_of_an_older_drawing_is_refused(tmp_path: Path) -> None:
    settings = replace(SMALL, train=1, test=0)
    settings.write(tmp_path / "old")
    card = json.loads((tmp_path / "old/scenes.json").read_text())
    (tmp_path / "old/scenes.json").write_text(json.dumps({**card, "drawing": 0}))
    with pytest.raises(UserError, match="another version of the drawing"):
        settings.write(tmp_path / "old")
