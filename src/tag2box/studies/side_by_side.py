"""Rows of a study on the same photos: what each detects, and what each was taught as objects in the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from tag2box.reporting.data import GalleryPhoto, RunRecord
from tag2box.reporting.gallery import Album, Tile, detection_tile, evenly_spaced, pseudo_tile
from tag2box.reporting.sections import Section, Shelf
from tag2box.studies.datasets import StudyData
from tag2box.studies.experiment import Findings
from tag2box.types import Detections, Objects

PHOTOS = 4
FOUND = (("right", "right (IoU 0.5 or more)"), ("wrong", "wrong"), ("missed", "object without a right box"))
TAUGHT = (("pseudo", "pseudo box of the last stage, with its score"), ("truth", "true object, for the reader only"))


def side_by_side(findings: Findings, album: Album, *, prefix: str = "") -> tuple[Section, ...]:
    """Every row on a few test photos and a few training photos, of the first seed; nothing without rows.

    Args:
        prefix: begins the sections' names, where a page has several of them.
    """
    seed, data = findings.first
    records = [results[seed].record(data, name=name) for name, results in findings.results.items()]
    sections = (
        Section(
            f"{prefix}detections",
            f"Detections, {data.name}",
            f"Test photos at even distances through the dataset, not picked by hand; seed {seed}. Scores of these "
            "systems cannot be compared, so each shows as many of its best boxes as the photo has objects.",
            boxes=FOUND,
            shelves=_detections(records, data, album),
        ),
        Section(
            f"{prefix}taught",
            f"Pseudo boxes, {data.name}",
            "What each was taught as objects in the end, on training photos at even distances through those that "
            f"every run looks at; seed {seed}.",
            boxes=TAUGHT,
            shelves=_taught(records, data, album),
        ),
    )
    return tuple(section for section in sections if section.shelves)


def best_boxes(found: Detections, objects: Objects) -> Detections:
    """As many of a photo's best detections as it has objects that count."""
    count = int((~(objects.difficult | objects.crowd)).sum())
    return found[torch.argsort(found.scores, descending=True, stable=True)[:count]]


def last_look(record: RunRecord) -> dict[str, GalleryPhoto]:
    """The training photos of a run's last look, by id; none where it never looked."""
    return {photo.id: photo for photo in record.galleries[-1].photos} if record.galleries else {}


def same_photos(records: Sequence[RunRecord], count: int) -> tuple[str, ...]:
    """Training photos that every run looked at, at even distances."""
    looks = [last_look(record) for record in records]
    shared = [photo for photo in (looks[0] if looks else {}) if all(photo in look for look in looks)]
    return evenly_spaced(shared, count)


def _detections(records: Sequence[RunRecord], data: StudyData, album: Album) -> tuple[Shelf, ...]:
    truth = dict(zip(data.test.ids, data.test.objects, strict=True))
    shelves = []
    for photo in evenly_spaced(data.test_photos, PHOTOS) if records else ():
        shot, objects = album.add(photo.path), truth[photo.id]
        if shot is None:
            continue
        tiles = []
        for record in records:
            found = best_boxes((record.test_detections or {}).get(photo.id, Detections.empty()), objects)
            tile = detection_tile(shot, found, objects, classes=data.test.classes, photo=photo.id, min_score=0.0)
            tiles.append(_named(tile, record.name))
        shelves.append(Shelf(photo.id, "", tuple(tiles)))
    return tuple(shelves)


def _taught(records: Sequence[RunRecord], data: StudyData, album: Album) -> tuple[Shelf, ...]:
    truth = dict(zip(data.train.ids, data.train.objects, strict=True))
    paths = {photo.id: photo.path for photo in data.tagged.photos}
    shelves = []
    for photo in same_photos(records, PHOTOS):
        shot = album.add(paths[photo])
        if shot is None:
            continue
        tiles = []
        for record in records:
            tile = pseudo_tile(
                shot,
                last_look(record)[photo],
                truth[photo].boxes,
                classes=data.train.classes,
                iteration=record.galleries[-1].iteration,
            )
            tiles.append(_named(tile, record.name))
        shelves.append(Shelf(photo, "", tuple(tiles)))
    return tuple(shelves)


def _named(tile: Tile, name: str) -> Tile:
    return replace(tile, caption=f"{name}: {tile.caption}")
