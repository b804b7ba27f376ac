"""Photos of a study: which ones to show, with the detections or pseudo labels of each row; ``reporting`` draws them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tag2box import annotations, recipes
from tag2box.experiments import experiment, study_data
from tag2box.metrics.challenges import object_outcomes
from tag2box.ops.boxes import iou
from tag2box.reporting import formatting as fmt, study_tables
from tag2box.reporting.gallery import MOMENTS, evenly_spaced, gallery_photos
from tag2box.reporting.records import RunRecord
from tag2box.training.events import GalleryPhoto

SIDE_BY_SIDE_PHOTOS = 4
PICTURE_PHOTOS = 4  # per challenge
SCORE = 0.5  # minimum score of detections for the challenges
DIFFICULT_IOU = 0.5
PICTURED_CHALLENGES = {
    "part": ("Part domination", "shows only in part"),
    "grouped": ("Grouped instances", "groups into one box with others"),
    "missed": ("Missing objects", "misses"),
}
DETECTION_LEGEND = (("right", "right (IoU 0.5 or more)"), ("wrong", "wrong"), ("missed", "object without a right box"))
PSEUDO_LEGEND = (
    ("pseudo", "pseudo box of the last stage, with its score"),
    ("truth", "true object, not used in training"),
)


def best_boxes(found: annotations.Detections, objects: annotations.Objects) -> annotations.Detections:
    """The top-scoring detections of a photo, as many as it has objects that count."""
    count = int((~(objects.difficult | objects.crowd)).sum())
    return found[torch.argsort(found.scores, descending=True, stable=True)[:count]]


def last_gallery(record: RunRecord) -> dict[str, GalleryPhoto]:
    """The training photos of a run's last ``gallery`` event, by id; empty without any."""
    return {photo.id: photo for photo in record.galleries[-1].photos} if record.galleries else {}


def same_photos(records: Sequence[RunRecord], count: int) -> tuple[str, ...]:
    """Training photos in the last gallery of every run, evenly spaced."""
    galleries = [last_gallery(record) for record in records]
    shared = [photo for photo in (galleries[0] if galleries else {}) if all(photo in own for own in galleries)]
    return evenly_spaced(shared, count)


def _by_id(truth: annotations.Truth) -> dict[str, annotations.Objects]:
    return dict(zip(truth.ids, truth.objects, strict=True))


# ---------------------------------------------------------------- all rows side by side


def side_by_side(results: experiment.StudyResults, *, prefix: str = "") -> tuple[study_tables.StudySection, ...]:
    """All rows on a few test photos and a few training photos of the first seed; empty without rows.

    Args:
        prefix: of the ids of the sections, for pages with several datasets.
    """
    seed, data = results.first
    records = [own[seed].record(data, name=name) for name, own in results.results.items()]
    sections = (
        study_tables.StudySection(
            f"{prefix}detections",
            f"Detections, {data.name}",
            f"Test photos evenly spaced through the dataset, not picked by hand; seed {seed}. Scores of these "
            "systems are not comparable, so each shows as many of its top boxes as the photo has objects.",
            legend=DETECTION_LEGEND,
            photos=_detection_rows(records, data),
        ),
        study_tables.StudySection(
            f"{prefix}taught",
            f"Pseudo boxes, {data.name}",
            "Pseudo labels at the end of training, on training photos evenly spaced through those that every run "
            f"records; seed {seed}.",
            legend=PSEUDO_LEGEND,
            photos=_pseudo_rows(records, data),
        ),
    )
    return tuple(section for section in sections if section.photos)


def _detection_rows(records: Sequence[RunRecord], data: study_data.StudyData) -> tuple[study_tables.PhotoRow, ...]:
    truth = _by_id(data.test)
    rows = []
    for photo in evenly_spaced(data.test_photos, SIDE_BY_SIDE_PHOTOS) if records else ():
        panels = []
        for record in records:
            found = best_boxes(
                (record.test_detections or {}).get(photo.id, annotations.Detections.empty()), truth[photo.id]
            )
            panels.append(study_tables.DetectionPanel(photo, record.name, found, truth[photo.id]))
        rows.append(study_tables.PhotoRow(photo.id, data.test.classes, tuple(panels)))
    return tuple(rows)


def _pseudo_rows(records: Sequence[RunRecord], data: study_data.StudyData) -> tuple[study_tables.PhotoRow, ...]:
    truth, photos = _by_id(data.train), _training_photos(data)
    rows = []
    for name in same_photos(records, SIDE_BY_SIDE_PHOTOS):
        panels = tuple(
            study_tables.PseudoPanel(
                photos[name], record.name, record.galleries[-1].iteration, last_gallery(record)[name], truth[name]
            )
            for record in records
        )
        rows.append(study_tables.PhotoRow(name, data.train.classes, panels))
    return tuple(rows)


def _training_photos(data: study_data.StudyData) -> dict[str, annotations.Photo]:
    return {photo.id: photo for photo in data.tagged.photos}


# ---------------------------------------------------------------- figure 5


@dataclass(frozen=True)
class _PhotoPair:
    """A test photo under two methods: detections of each, and the outcome of each counted object."""

    photo: annotations.Photo
    objects: annotations.Objects
    found: tuple[annotations.Detections, annotations.Detections]
    outcomes: tuple[tuple[str, ...], tuple[str, ...]]

    def fixed(self, outcome: str) -> int:
        """Objects with this outcome under the first method that the second method finds."""
        return sum(a == outcome and b == "found" for a, b in zip(*self.outcomes, strict=True))

    def lost(self) -> int:
        """Objects that the first method finds and the second does not."""
        return sum(a == "found" and b != "found" for a, b in zip(*self.outcomes, strict=True))

    def not_found(self) -> int:
        """Objects that the second method does not find."""
        return sum(b != "found" for b in self.outcomes[1])


def challenge_pictures(results: experiment.StudyResults, base: recipes.Config) -> experiment.Analysis:
    """Figure 5: two methods on the same test photos, for each of the three challenges, and failures of the second."""
    seed, data = results.first
    names = tuple(results.results)[:2]
    runs = [results.results[name][seed].record(data, name=name).test_detections or {} for name in names]
    photos = {photo.id: photo for photo in data.test_photos}
    pairs = [
        _photo_pair(photos[name], objects, runs) for name, objects in zip(data.test.ids, data.test.objects, strict=True)
    ]
    numbers = {outcome: _challenge_numbers(pairs, outcome) for outcome in PICTURED_CHALLENGES}
    sections = [_challenge_section(outcome, pairs, data, names) for outcome in PICTURED_CHALLENGES]
    return experiment.Analysis((*sections, *_failure_section(pairs, data, names)), {"challenges": numbers})


def _photo_pair(
    photo: annotations.Photo, objects: annotations.Objects, found: Sequence[Mapping[str, annotations.Detections]]
) -> _PhotoPair:
    kept = [each.get(photo.id, annotations.Detections.empty()) for each in found]
    first, second = (each[each.scores >= SCORE] for each in kept)
    return _PhotoPair(
        photo, objects, (first, second), (object_outcomes(first, objects), object_outcomes(second, objects))
    )


def _challenge_numbers(pairs: Sequence[_PhotoPair], outcome: str) -> dict[str, int]:
    ends = Counter(b for pair in pairs for a, b in zip(*pair.outcomes, strict=True) if a == outcome)
    new = sum(a == "found" and b == outcome for pair in pairs for a, b in zip(*pair.outcomes, strict=True))
    return {"first_method": ends.total(), "of_these_found_by_second": ends["found"], "new_under_second": new}


def _challenge_section(
    outcome: str, pairs: Sequence[_PhotoPair], data: study_data.StudyData, names: tuple[str, ...]
) -> study_tables.StudySection:
    title, verb = PICTURED_CHALLENGES[outcome]
    count = _challenge_numbers(pairs, outcome)
    words = (
        f"Of {fmt.plural(count['first_method'], 'object')} that {names[0]} {verb}, {names[1]} finds "
        f"{count['of_these_found_by_second']}; it {verb} {count['new_under_second']} that {names[0]} finds. "
        f"Detections of score {SCORE:g} and up. "
    )
    best = sorted((p for p in pairs if p.fixed(outcome)), key=lambda p: (-p.fixed(outcome), p.photo.id))
    words += "Shown: the photos with the largest gain." if best else "There is no photo to show."
    photos = _pair_rows(best[:PICTURE_PHOTOS], data, names)
    return study_tables.StudySection(outcome, title, words, legend=DETECTION_LEGEND, photos=photos)


def _failure_section(
    pairs: Sequence[_PhotoPair], data: study_data.StudyData, names: tuple[str, ...]
) -> list[study_tables.StudySection]:
    worst = sorted((p for p in pairs if p.not_found()), key=lambda p: (-p.lost(), -p.not_found(), p.photo.id))
    lost, not_found = sum(p.lost() for p in pairs), sum(p.not_found() for p in pairs)
    words = (
        f"{names[1]} does not find {fmt.plural(not_found, 'object')}, {lost} of which {names[0]} finds. Shown: the "
        "photos with the largest loss."
    )
    photos = _pair_rows(worst[:PICTURE_PHOTOS], data, names)
    return (
        [study_tables.StudySection("failures", "Failure cases", words, legend=DETECTION_LEGEND, photos=photos)]
        if photos
        else []
    )


def _pair_rows(
    pairs: Sequence[_PhotoPair], data: study_data.StudyData, names: tuple[str, ...]
) -> tuple[study_tables.PhotoRow, ...]:
    rows = []
    for pair in pairs:
        panels = tuple(
            study_tables.DetectionPanel(pair.photo, name, found, pair.objects, SCORE)
            for name, found in zip(names, pair.found, strict=True)
        )
        rows.append(study_tables.PhotoRow(pair.photo.id, data.test.classes, panels))
    return tuple(rows)


# ---------------------------------------------------------------- figure 6


def label_pictures(results: experiment.StudyResults, base: recipes.Config) -> experiment.Analysis:
    """Figure 6: pseudo labels of all methods at some iterations of training, and difficult objects among them."""
    seed, data = results.first
    records = [own[seed].record(name=name) for name, own in results.results.items()]
    words = (
        "Pseudo labels of each method on the same training photos, at the same iterations. Photos evenly spaced "
        "through the dataset: not picked by hand."
    )
    title = "Pseudo ground truth over training"
    moments = study_tables.StudySection(
        "moments", title, words, legend=PSEUDO_LEGEND, photos=_moment_rows(records, data)
    )
    caught = {record.name: _difficult_row(record, data) for record in records}
    numbers = {name: count for name, (_, count) in caught.items()}
    rows = tuple(row for row, _ in caught.values() if row.panels)
    return experiment.Analysis((moments, *_difficult_section(numbers, rows)), {"difficult": numbers})


def _moment_rows(records: Sequence[RunRecord], data: study_data.StudyData) -> tuple[study_tables.PhotoRow, ...]:
    truth, photos = _by_id(data.train), _training_photos(data)
    shown = [(record, evenly_spaced(record.galleries, MOMENTS)) for record in records if record.galleries]
    rows = []
    for name in gallery_photos((moment for _, moments in shown for moment in moments), photos):
        for record, moments in shown:
            panels = tuple(
                study_tables.PseudoPanel(photos[name], "", moment.iteration, labels, truth[name])
                for moment in moments
                for labels in moment.of(name)
            )
            rows.append(study_tables.PhotoRow(f"{name}: {record.name}", record.start.classes, panels))
    return tuple(rows)


def _difficult_section(
    numbers: Mapping[str, Mapping[str, int]], rows: tuple[study_tables.PhotoRow, ...]
) -> list[study_tables.StudySection]:
    counts = "; ".join(f"{name} {n['caught']} of {n['difficult']}" for name, n in numbers.items())
    words = (
        f"Objects marked difficult on these photos that a pseudo box fits at the last iteration: {counts}. They count "
        "neither for nor against a detector."
    )
    is_any = any(n["difficult"] for n in numbers.values())
    return [study_tables.StudySection("difficult", "Difficult objects caught", words, photos=rows)] if is_any else []


def _difficult_row(record: RunRecord, data: study_data.StudyData) -> tuple[study_tables.PhotoRow, dict[str, int]]:
    truth, photos = _by_id(data.train), _training_photos(data)
    count = {"difficult": 0, "caught": 0}
    panels: list[study_tables.DifficultPanel] = []
    for labels in record.galleries[-1].photos if record.galleries else ():
        known = truth[labels.id]
        objects = annotations.Objects.of(known.boxes[known.difficult], known.labels[known.difficult])
        rows = zip(objects.boxes.tolist(), objects.labels.tolist(), strict=True)
        caught = tuple(_fits(labels, box, label) for box, label in rows)
        count["difficult"] += len(caught)
        count["caught"] += sum(caught)
        if any(caught):
            panels.append(study_tables.DifficultPanel(photos[labels.id], objects, caught))
    return study_tables.PhotoRow(record.name, data.train.classes, tuple(panels), limit=PICTURE_PHOTOS), count


def _fits(photo: GalleryPhoto, box: Sequence[float], label: int) -> bool:
    own = [corners for corners, cls in zip(photo.boxes, photo.labels, strict=True) if cls == label]
    overlap = iou(annotations.Objects.of(own, [label] * len(own)).boxes, annotations.Objects.of([box], [label]).boxes)
    return bool(len(own)) and float(overlap.max()) >= DIFFICULT_IOU
