"""Rows of a study on the same photos: what each detects, and what each was taught as objects in the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tag2box.annotations import Detections, Objects
from tag2box.experiments.experiment import Drawn, Findings
from tag2box.experiments.study_data import StudyData
from tag2box.metrics.challenges import object_fates
from tag2box.ops.boxes import iou
from tag2box.recipes import Config
from tag2box.reporting.charts import plural
from tag2box.reporting.curves import NamedRun
from tag2box.reporting.gallery import (
    Album,
    DrawnBox,
    Tile,
    class_name,
    compare_pseudo,
    detection_tile,
    draw_box,
    evenly_spaced,
    pseudo_tile,
)
from tag2box.reporting.records import GalleryPhoto, ReportInputs, RunRecord
from tag2box.reporting.sections import Section, Shelf

SIDE_BY_SIDE_PHOTOS = 4
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


def last_preview(record: RunRecord) -> dict[str, GalleryPhoto]:
    """The training photos of a run's last look, by id; none where it never looked."""
    return {photo.id: photo for photo in record.galleries[-1].photos} if record.galleries else {}


def same_photos(records: Sequence[RunRecord], count: int) -> tuple[str, ...]:
    """Training photos that every run looked at, at even distances."""
    views_per_image = [last_preview(record) for record in records]
    shared = [
        photo
        for photo in (views_per_image[0] if views_per_image else {})
        if all(photo in look for look in views_per_image)
    ]
    return evenly_spaced(shared, count)


def _detections(records: Sequence[RunRecord], data: StudyData, album: Album) -> tuple[Shelf, ...]:
    truth = dict(zip(data.test.ids, data.test.objects, strict=True))
    shelves = []
    for photo in evenly_spaced(data.test_photos, SIDE_BY_SIDE_PHOTOS) if records else ():
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
    for photo in same_photos(records, SIDE_BY_SIDE_PHOTOS):
        shot = album.add(paths[photo])
        if shot is None:
            continue
        tiles = []
        for record in records:
            tile = pseudo_tile(
                shot,
                last_preview(record)[photo],
                truth[photo].boxes,
                classes=data.train.classes,
                iteration=record.galleries[-1].iteration,
            )
            tiles.append(_named(tile, record.name))
        shelves.append(Shelf(photo, "", tuple(tiles)))
    return tuple(shelves)


def _named(tile: Tile, name: str) -> Tile:
    return replace(tile, caption=f"{name}: {tile.caption}")


PICTURE_PHOTOS = 4  # of each challenge
SCORE = 0.5  # detections below it are neither drawn nor judged here
PICTURED_CHALLENGES = {
    "part": ("Part domination", "shows only in part"),
    "grouped": ("Grouped instances", "puts into one box with others"),
    "missed": ("Missing objects", "misses"),
}
BOXES = (("right", "right (IoU 0.5 or more)"), ("wrong", "wrong"), ("missed", "object without a right box"))
DIFFICULT_IOU = 0.5


@dataclass(frozen=True)
class _Seen:
    """A test photo as both methods saw it: detections and the fate of each counted object."""

    photo: str
    objects: Objects
    found: tuple[Detections, Detections]
    fates: tuple[tuple[str, ...], tuple[str, ...]]

    def healed(self, fate: str) -> int:
        """Objects with this fate under the first method that the second finds."""
        return sum(a == fate and b == "found" for a, b in zip(*self.fates, strict=True))

    def lost(self) -> int:
        """Objects the first method finds and the second does not."""
        return sum(a == "found" and b != "found" for a, b in zip(*self.fates, strict=True))

    def unfound(self) -> int:
        """Objects the second method does not find."""
        return sum(b != "found" for b in self.fates[1])


def challenge_pictures(findings: Findings, base: Config, album: Album) -> Drawn:
    """Figure 5: both methods on the same test photos, for each of the three challenges, and where ours fails."""
    seed, data = findings.first
    names = tuple(findings.results)[:2]
    runs = [findings.results[name][seed].record(data, name=name) for name in names]
    seen = [
        _seen(photo, objects, [run.test_detections or {} for run in runs])
        for photo, objects in zip(data.test.ids, data.test.objects, strict=True)
    ]
    numbers = {fate: _fate_numbers(seen, fate) for fate in PICTURED_CHALLENGES}
    sections = [_challenge(fate, seen, data, names, album=album) for fate in PICTURED_CHALLENGES]
    return Drawn((*sections, *_failures(seen, data, names, album)), {"challenges": numbers})


def _seen(photo: str, objects: Objects, found: Sequence[Mapping[str, Detections]]) -> _Seen:
    kept = [each.get(photo, Detections.empty()) for each in found]
    kept = [each[each.scores >= SCORE] for each in kept]
    return _Seen(photo, objects, (kept[0], kept[1]), (object_fates(kept[0], objects), object_fates(kept[1], objects)))


def _fate_numbers(seen: Sequence[_Seen], fate: str) -> dict[str, int]:
    ends = Counter(b for photo in seen for a, b in zip(*photo.fates, strict=True) if a == fate)
    new = sum(a == "found" and b == fate for photo in seen for a, b in zip(*photo.fates, strict=True))
    return {"first_method": ends.total(), "of_these_found_by_second": ends["found"], "new_under_second": new}


def _challenge(fate: str, seen: Sequence[_Seen], data: StudyData, names: tuple[str, ...], *, album: Album) -> Section:
    title, verb = PICTURED_CHALLENGES[fate]
    count = _fate_numbers(seen, fate)
    words = (
        f"Of {plural(count['first_method'], 'object')} that {names[0]} {verb}, {names[1]} finds "
        f"{count['of_these_found_by_second']}; it {verb} {count['new_under_second']} that {names[0]} had found. "
        f"Detections of score {SCORE:g} and up. "
    )
    best = sorted((p for p in seen if p.healed(fate)), key=lambda p: (-p.healed(fate), p.photo))[:PICTURE_PHOTOS]
    words += "Shown: the photos where it helps most, by rule." if best else "There is no photo to show."
    return Section(fate, title, words, boxes=BOXES if best else (), shelves=_shelves(best, data, names, album))


def _failures(seen: Sequence[_Seen], data: StudyData, names: tuple[str, ...], album: Album) -> list[Section]:
    worst = sorted((p for p in seen if p.unfound()), key=lambda p: (-p.lost(), -p.unfound(), p.photo))[:PICTURE_PHOTOS]
    lost, unfound = sum(p.lost() for p in seen), sum(p.unfound() for p in seen)
    words = (
        f"{names[1]} does not find {plural(unfound, 'object')}, {lost} of which {names[0]} found. Shown: the photos "
        "where it loses most, by rule."
    )
    shelves = _shelves(worst, data, names, album)
    return [Section("failures", "Failure cases", words, boxes=BOXES, shelves=shelves)] if shelves else []


def _shelves(photos: Sequence[_Seen], data: StudyData, names: tuple[str, ...], album: Album) -> tuple[Shelf, ...]:
    paths = {photo.id: photo.path for photo in data.test_photos}
    shelves = []
    for seen in photos:
        shot = album.add(paths[seen.photo])
        if shot is None:
            continue
        tiles = [
            detection_tile(shot, found, seen.objects, classes=data.test.classes, photo=seen.photo, min_score=SCORE)
            for found in seen.found
        ]
        named = (Tile(t.shot, t.boxes, f"{n}: {t.caption}", t.alt) for n, t in zip(names, tiles, strict=True))
        shelves.append(Shelf(seen.photo, "", tuple(named)))
    return tuple(shelves)


# ---------------------------------------------------------------- figure 6


def label_pictures(findings: Findings, base: Config, album: Album) -> Drawn:
    """Figure 6: pseudo ground truth of both methods at moments of training, and difficult objects that were caught."""
    seed, data = findings.first
    records = [results[seed].record(name=name) for name, results in findings.results.items()]
    runs = [NamedRun(record.name, f"run-{i}", record) for i, record in enumerate(records)]
    inputs = ReportInputs(
        title="", runs=records, train_photos={p.id: p.path for p in data.tagged.photos}, train_truth=data.train
    )
    shelves = [
        Shelf(f"{photo.photo}: {column.name}", "", column.tiles)
        for photo in compare_pseudo(runs, inputs, album)
        for column in photo.columns
    ]
    words = (
        "What each method was taught as objects on the same training photos, at the same moments. Photos at even "
        "distances through the dataset: not picked by hand."
    )
    boxes = (("pseudo", "pseudo box of the last stage, with its score"), ("truth", "true object, for the reader only"))
    caught = [_difficult(record, data, album) for record in records]
    shown = tuple(shelf for shelf, _ in caught if shelf is not None)
    numbers = {record.name: count for record, (_, count) in zip(records, caught, strict=True)}
    moments = Section("moments", "Pseudo ground truth over training", words, boxes=boxes, shelves=tuple(shelves))
    return Drawn((moments, *_difficult_section(numbers, shown)), {"difficult": numbers})


def _difficult_section(numbers: Mapping[str, Mapping[str, int]], shelves: tuple[Shelf, ...]) -> list[Section]:
    told = "; ".join(f"{name} {n['caught']} of {n['difficult']}" for name, n in numbers.items())
    words = (
        f"Objects marked difficult on these photos, and those that a pseudo box fits at the last look: {told}. "
        "They count neither for nor against a detector."
    )
    is_any = any(n["difficult"] for n in numbers.values())
    return [Section("difficult", "Difficult objects caught", words, shelves=shelves)] if is_any else []


def _difficult(record: RunRecord, data: StudyData, album: Album) -> tuple[Shelf | None, dict[str, int]]:
    truth, paths = dict(zip(data.train.ids, data.train.objects, strict=True)), _paths(data)
    count = {"difficult": 0, "caught": 0}
    tiles: list[Tile] = []
    for photo in record.galleries[-1].photos if record.galleries else ():
        objects = truth[photo.id]
        boxes, labels = objects.boxes[objects.difficult], objects.labels[objects.difficult].tolist()
        caught = [_fits(photo, box.tolist(), label) for box, label in zip(boxes, labels, strict=True)]
        count["difficult"] += len(caught)
        count["caught"] += sum(caught)
        shot = album.add(paths[photo.id]) if any(caught) and len(tiles) < PICTURE_PHOTOS else None
        if shot is not None:
            kinds = ("right" if is_caught else "ignored" for is_caught in caught)
            drawn: list[DrawnBox] = [
                draw_box(shot, box.tolist(), kind=kind, name=class_name(data.train.classes, label))
                for box, label, kind in zip(boxes, labels, kinds, strict=True)
            ]
            tiles.append(Tile(shot, tuple(drawn), photo.id, f"Photo {photo.id}, its difficult objects"))
    return (Shelf(record.name, "", tuple(tiles)) if tiles else None), count


def _fits(photo: GalleryPhoto, box: Sequence[float], label: int) -> bool:
    own = [corners for corners, cls in zip(photo.boxes, photo.labels, strict=True) if cls == label]
    overlap = iou(Objects.of(own, [label] * len(own)).boxes, Objects.of([box], [label]).boxes)
    return bool(len(own)) and float(overlap.max()) >= DIFFICULT_IOU


def _paths(data: StudyData) -> dict[str, Path]:
    return {photo.id: photo.path for photo in data.tagged.photos}
