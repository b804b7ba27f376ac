"""Photos shown run beside run: detections on test photos, and pseudo ground truth at moments of training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tag2box.reporting.curves import NamedRun
from tag2box.reporting.data import Gallery, ReportInputs
from tag2box.reporting.gallery import Album, Shot, Tile, detection_tile, evenly_spaced, pseudo_tile
from tag2box.types import Detections, Objects, Truth

TEST_PHOTOS, PSEUDO_PHOTOS, MOMENTS = 12, 8, 4


@dataclass(frozen=True, slots=True)
class Column:
    """One run's tiles of one photo."""

    name: str
    css: str
    tiles: tuple[Tile, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One photo, run beside run."""

    photo: str
    columns: tuple[Column, ...]


def list_test_photos(runs: Sequence[NamedRun], truth: Truth | None) -> tuple[str, ...]:
    """The test photos in order: the truth's, else the order in which the runs wrote their detections."""
    if truth is not None:
        return truth.ids
    return tuple(dict.fromkeys(photo for run in runs for photo in run.record.test_detections or {}))


def compare_detections(runs: Sequence[NamedRun], inputs: ReportInputs, album: Album) -> tuple[Comparison, ...]:
    """Every run's detections on photos evenly spaced through the test list."""
    shown = [run for run in runs if run.record.test_detections is not None]
    ids = [photo for photo in list_test_photos(runs, inputs.test_truth) if photo in inputs.test_photos]
    objects = _objects(inputs.test_truth)
    out = []
    for photo in evenly_spaced(ids, TEST_PHOTOS) if shown else ():
        shot = album.add(inputs.test_photos[photo])
        if shot is not None:
            columns = (_detections(run, shot, photo, objects.get(photo), inputs=inputs) for run in shown)
            out.append(Comparison(photo, tuple(columns)))
    return tuple(out)


def _detections(run: NamedRun, shot: Shot, photo: str, objects: Objects | None, *, inputs: ReportInputs) -> Column:
    found = (run.record.test_detections or {}).get(photo, Detections.empty())
    classes = inputs.test_truth.classes if inputs.test_truth else run.record.start.classes
    tile = detection_tile(shot, found, objects, classes=classes, photo=photo, min_score=inputs.draw_score)
    return Column(run.name, run.css, (tile,))


def compare_pseudo(runs: Sequence[NamedRun], inputs: ReportInputs, album: Album) -> tuple[Comparison, ...]:
    """The pseudo ground truth of every run on the same training photos, at up to four moments."""
    shown = [(run, evenly_spaced(run.record.galleries, MOMENTS)) for run in runs if run.record.galleries]
    ids = dict.fromkeys(photo.id for _, moments in shown for moment in moments for photo in moment.photos)
    objects = _objects(inputs.train_truth)
    out = []
    for photo in evenly_spaced([i for i in ids if i in inputs.train_photos], PSEUDO_PHOTOS):
        shot = album.add(inputs.train_photos[photo])
        if shot is not None:
            columns = (_pseudo(run, shot, photo, moments, objects=objects.get(photo)) for run, moments in shown)
            out.append(Comparison(photo, tuple(columns)))
    return tuple(out)


def _pseudo(run: NamedRun, shot: Shot, photo: str, moments: Sequence[Gallery], *, objects: Objects | None) -> Column:
    true_boxes = None if objects is None else objects.boxes
    classes = run.record.start.classes
    tiles = [
        pseudo_tile(shot, taught, true_boxes, classes=classes, iteration=moment.iteration)
        for moment in moments
        for taught in moment.photos
        if taught.id == photo
    ]
    return Column(run.name, run.css, tuple(tiles))


def _objects(truth: Truth | None) -> Mapping[str, Objects]:
    return dict(zip(truth.ids, truth.objects, strict=True)) if truth else {}
