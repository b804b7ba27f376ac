"""Photos on the page: which are chosen, how they are embedded, positions of boxes."""

from __future__ import annotations

import base64
import re
from io import BytesIO
from pathlib import Path

import pytest
import torch
from PIL import Image

from tag2box.annotations import Detections, Objects
from tag2box.reporting.gallery import Album, Shot, detection_tile, draw_box, evenly_spaced, pseudo_tile
from tag2box.training.events import GalleryPhoto


@pytest.mark.parametrize(
    ("size", "count", "chosen"),
    [(0, 4, ()), (1, 4, (0,)), (4, 4, (0, 1, 2, 3)), (9, 1, (0,)), (10, 4, (0, 3, 6, 9)), (100, 3, (0, 50, 99))],
)
def test_choice_is_evenly_spaced_from_first_to_last(size: int, count: int, chosen: tuple[int, ...]) -> None:
    assert evenly_spaced(range(size), count) == chosen


def test_a_photo_is_embedded_once_small_and_upright(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # stored lying on its side
    Image.new("RGB", (1200, 600)).save(tmp_path / "a.jpg", exif=exif)
    album = Album()
    assert album.add(tmp_path / "a.jpg") == Shot("photo-0", 600, 1200)
    assert album.add(tmp_path / "a.jpg") == Shot("photo-0", 600, 1200)
    data = re.findall(r"base64,([^\"]+)", album.style)
    assert len(data) == 1
    with Image.open(BytesIO(base64.b64decode(data[0]))) as small:
        assert (small.format, small.size) == ("JPEG", (240, 480))


@pytest.mark.parametrize("content", [None, b"", b"not a picture"])
def test_a_photo_that_cannot_be_read_is_left_out_and_listed(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "b.jpg").write_bytes(content)
    album = Album()
    assert album.add(tmp_path / "b.jpg") is None
    assert (album.style, album.unreadable) == ("", ("b.jpg",))


def test_boxes_are_per_cent_of_the_photo_and_end_at_its_edges() -> None:
    box = draw_box(Shot("photo-0", 200, 100), [-10.0, 50.0, 100.0, 130.0], kind="right", name="cat", score=0.456)
    assert (box.left, box.top, box.width, box.height) == (0.0, 50.0, 50.0, 50.0)
    assert (box.label, box.score, box.hint) == ("cat", "0.46", "right: cat 0.46")


@pytest.mark.parametrize(
    ("kind", "corners", "place"),
    [
        ("right", [0, 50, 50, 90], "above"),
        ("right", [0, 2, 50, 90], "below"),
        ("right", [0, 2, 50, 95], "inside"),
        ("wrong", [80, 50, 90, 90], "above flip"),
        ("missed", [0, 2, 50, 80], "below"),
        ("missed", [0, 2, 50, 99], "floor"),
    ],
)
def test_labels_find_room(kind: str, corners: list[float], place: str) -> None:
    assert draw_box(Shot("photo-0", 100, 100), corners, kind=kind).place == place


def test_detections_are_judged_after_the_score_is_applied() -> None:
    shot = Shot("photo-0", 100, 100)
    corners = torch.tensor([[0.0, 0, 10, 10], [50, 50, 70, 70], [80, 80, 90, 90]])
    found = Detections(corners, torch.tensor([0.2, 0.9, 0.5]), torch.tensor([0, 0, 7]))
    objects = Objects.of(corners[:2], [0, 0])
    tile = detection_tile(shot, found, objects, classes=("cat",), photo="p", min_score=0.3)
    assert [(b.kind, b.label) for b in tile.boxes] == [("missed", "cat"), ("wrong", "class 7"), ("right", "cat")]
    assert tile.caption.replace("\N{NO-BREAK SPACE}", " ") == "1 right · 1 wrong · 1 missed"
    plain = detection_tile(shot, found, None, classes=("cat",), photo="p", min_score=0.3)
    assert [b.kind for b in plain.boxes] == ["plain", "plain"]
    assert plain.caption == "2 detections"


def test_boxes_for_the_slider_are_there_but_hidden() -> None:
    """What is shown at a score is what would be drawn at that score without the others."""
    shot, generator = Shot("photo-0", 100, 100), torch.Generator().manual_seed(0)
    objects = Objects.of(torch.tensor([[0.0, 0, 10, 10], [50, 50, 70, 70], [20, 20, 40, 40]]), [0, 0, 1])
    corners = objects.boxes.repeat(4, 1) + torch.rand(12, 4, generator=generator) * 4
    found = Detections(corners, torch.rand(12, generator=generator), objects.labels.repeat(4))

    def tile(score: float, floor: float | None = None):
        return detection_tile(shot, found, objects, classes=("a", "b"), photo="p", min_score=score, floor=floor)

    whole = tile(0.5, 0.05)
    assert tile(0.5).caption == whole.caption and not any(b.is_hidden for b in tile(0.5).boxes)
    for score in (0.05, 0.3, 0.5, 0.8, 1.0):
        shown = [
            (b.kind, b.left, b.top)
            for b in whole.boxes
            if (b.until_score is None or b.until_score < score) and (b.from_score is None or b.from_score >= score)
        ]
        assert sorted(shown) == sorted((b.kind, b.left, b.top) for b in tile(score).boxes)


def test_a_photo_without_objects_or_detections_is_still_a_tile() -> None:
    none = Objects.of([], [])
    tile = detection_tile(Shot("photo-0", 9, 9), Detections.empty(), none, classes=(), photo="p", min_score=0.3)
    assert tile.boxes == ()
    tile = pseudo_tile(Shot("photo-0", 9, 9), GalleryPhoto("p"), none.boxes, classes=(), iteration=5)
    assert (tile.boxes, tile.caption) == ((), "iteration 5 · 0 boxes")


def test_true_boxes_lie_below_pseudo_boxes() -> None:
    taught = GalleryPhoto("p", ((1.0, 1.0, 5.0, 5.0),), (0,), (0.5,))
    tile = pseudo_tile(Shot("s", 9, 9), taught, torch.tensor([[0.0, 0, 4, 4]]), classes=("cat",), iteration=1)
    assert [b.kind for b in tile.boxes] == ["truth", "pseudo"]
