"""Signs of a run's quality that need no true box, from its best boxes on its own training photos.

With T_c the photos that are tagged with class c, N_c those that certainly do not show it, and s_i(c) the score of the
best box of class c in photo i,

    score(c)  = mean of s_i(c) over T_c               a class that was not learned has low ones
    margin(c) = score(c) - mean of s_i(c) over N_c    near 0 if the class is not told from the others

``score`` and ``margin`` of a run are means over its classes. ``mean_overlap`` compares best boxes: of the last two
refinement stages, of two moments of training, or of two runs. None is a measure of correctness: a run may be sure of
the surroundings of a class, and always choose them. Scores are comparable between runs of one recipe only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import torch
from pydantic import TypeAdapter, ValidationError

from tag2box import io
from tag2box.annotations import Detections
from tag2box.errors import UserError, printable
from tag2box.labels.labelled import LabelledPhotos
from tag2box.labels.rule import PhotoTags
from tag2box.ops.boxes import row_iou

SIGNS_FILE = "quality-signs.json"
"""Of a label set, of the run whose training photos were labelled, and of a folder of runs with several seeds."""
SURE = 2.0
"""Standard errors from which a difference counts."""
Tag = tuple[str, str]
"""A photo and a class."""
BoxCorners = Sequence[float]


@dataclass(frozen=True, slots=True)
class BestBoxes:
    """The best boxes of a run: corners and scores of the tags, and scores of the classes that are certainly absent."""

    boxes: Mapping[Tag, BoxCorners]
    scores: Mapping[Tag, float]
    absent: Mapping[Tag, float]


def best_of_classes(found: Detections) -> Detections:
    """The box with the highest score of each class, in the order of the classes; the first of equal ones.

    >>> best_of_classes(Detections(torch.zeros(3, 4), torch.tensor([0.1, 0.5, 0.2]), torch.tensor([1, 0, 1]))).scores
    tensor([0.5000, 0.2000])
    """
    order = found.scores.argsort(descending=True, stable=True)
    labels = found.labels[order].tolist()
    return found[order[torch.tensor([labels.index(label) for label in sorted(set(labels))], dtype=torch.long)]]


def boxes_of_tags(found: Mapping[str, Detections], tags: Mapping[str, PhotoTags], classes: Sequence[str]) -> BestBoxes:
    """The best boxes of a run in some photos; unsure tags are neither present nor absent."""
    boxes: dict[Tag, BoxCorners] = {}
    scores: dict[Tag, float] = {}
    absent: dict[Tag, float] = {}
    for photo, detections in found.items():
        own, best = tags[photo], best_of_classes(detections)
        rows = zip(best.boxes.tolist(), best.scores.tolist(), best.labels.tolist(), strict=True)
        for box, score, label in rows:
            tag = (photo, classes[label])
            if label in own.present:
                boxes[tag], scores[tag] = box, score
            elif label not in own.unsure:
                absent[tag] = score
    return BestBoxes(boxes, scores, absent)


def with_absent(candidates: Detections, found: Detections, tags: PhotoTags) -> Detections:
    """The candidates, and the best box of every other class that has none and is certainly absent."""
    best, known = best_of_classes(found), set(candidates.labels.tolist()) | tags.present | tags.unsure
    more = best[torch.tensor([label not in known for label in best.labels.tolist()], dtype=torch.bool)]
    parts = [(candidates.boxes, more.boxes), (candidates.scores, more.scores), (candidates.labels, more.labels)]
    boxes, scores, labels = (torch.cat([one.to(two.dtype), two]) for one, two in parts)
    return Detections(boxes, scores, labels)


def labelled_scores(content: LabelledPhotos) -> dict[Tag, float]:
    """The score of the best label of every tag, reviewed photos apart."""
    found: dict[Tag, float] = {}
    for photo in content.photos:
        for box in () if photo.is_reviewed else photo.labels:
            if box.score is not None and box.name in photo.tags:
                tag = (photo.file, box.name)
                found[tag] = max(box.score, found.get(tag, box.score))
    return found


# ---------------------------------------------------------------- formulas


def by_class(scores: Mapping[Tag, float]) -> dict[str, list[float]]:
    """The numbers of each class, in the order in which classes first appear."""
    found: dict[str, list[float]] = {}
    for (_, name), score in scores.items():
        found.setdefault(name, []).append(score)
    return found


def mean_score(scores: Mapping[Tag, float]) -> float | None:
    """Mean over the classes of the mean score of their best boxes; None without any.

    >>> mean_score({("a", "cat"): 0.5, ("b", "cat"): 1.0, ("a", "dog"): 0.25})
    0.5
    """
    return _mean(fmean(own) for own in by_class(scores).values())


def mean_overlap(one: Mapping[Tag, BoxCorners], two: Mapping[Tag, BoxCorners]) -> float | None:
    """Mean IoU of the best boxes of the tags that both have; None if they share none.

    >>> mean_overlap({("a", "cat"): (0, 0, 4, 4)}, {("a", "cat"): (0, 0, 4, 2)})
    0.5
    """
    return seed_overlap(one, [two])


def seed_overlap(own: Mapping[Tag, BoxCorners], others: Sequence[Mapping[Tag, BoxCorners]]) -> float | None:
    """Mean IoU of the best boxes of a run with those of the others, over runs and the tags that both have."""
    pairs = [(own[tag], other[tag]) for other in others for tag in own if tag in other]
    corners = torch.tensor(pairs, dtype=torch.float64).reshape(-1, 2, 4)
    return float(row_iou(corners[:, 0], corners[:, 1]).mean()) if pairs else None


@dataclass(frozen=True, slots=True)
class ScoreLead:
    """A difference of two means, and its standard error."""

    mean: float
    error: float

    @property
    def is_sure(self) -> bool:
        """Whether the first mean is higher by at least ``SURE`` standard errors."""
        return self.mean > 0 and self.mean >= SURE * self.error


def unpaired_difference(one: Sequence[float], two: Sequence[float]) -> ScoreLead | None:
    """mean(one) - mean(two), with the error sqrt(var(one) / n + var(two) / m); None without numbers of both.

    >>> unpaired_difference([1.0, 3.0], [0.5, 0.5])
    ScoreLead(mean=1.5, error=1.0)
    """
    if not (one and two):
        return None
    return ScoreLead(fmean(one) - fmean(two), math.sqrt(_squared_error(one) + _squared_error(two)))


def paired_difference(one: Mapping[Tag, float], two: Mapping[Tag, float]) -> ScoreLead | None:
    """The difference of two runs' mean scores over the tags that both have, with its error over photos.

    With d_i(c) the difference of the scores of a tag, n_c their number and C that of classes,

        mean = 1/C sum_c mean_i d_i(c),    error = 1/C sqrt(sum_c var_i d_i(c) / n_c)

    None if they share no tag. The photos are what varies: that another seed would differ is not in the error.
    """
    classes = by_class({tag: one[tag] - two[tag] for tag in one if tag in two})
    if not classes:
        return None
    squares = sum(_squared_error(own) for own in classes.values())
    return ScoreLead(fmean(fmean(own) for own in classes.values()), math.sqrt(squares) / len(classes))


def _squared_error(numbers: Sequence[float]) -> float:
    """var / n with n - 1 degrees of freedom; of a single number, whose variance is unknown, its square."""
    if len(numbers) == 1:
        return numbers[0] ** 2
    centre = fmean(numbers)
    return sum((number - centre) ** 2 for number in numbers) / (len(numbers) - 1) / len(numbers)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


# ---------------------------------------------------------------- the signs of a run


@dataclass(frozen=True, slots=True)
class ClassSigns:
    """The signs of one class."""

    photos: int  # tagged with it, that have a box of it
    score: float | None = None
    margin: float | None = None  # None without photos that certainly do not show it
    error: float | None = None  # standard error of the margin over photos

    @property
    def is_unrecognised(self) -> bool:
        """Whether the class is not told from the others: its margin is no ``SURE`` standard errors above 0."""
        known = self.margin is not None and self.error is not None
        return known and not ScoreLead(self.margin or 0.0, self.error or 0.0).is_sure


@dataclass(frozen=True, slots=True)
class QualitySigns:
    """The signs of a run, by class and of its records: mean IoU of best boxes, None if they were not recorded."""

    classes: Mapping[str, ClassSigns]
    stages: float | None = None  # of the last two refinement stages, at the end
    stability: float | None = None  # of the last stage, between the last two recorded moments of training

    @property
    def score(self) -> float | None:
        """Mean over the classes."""
        return _mean(own.score for own in self.classes.values())

    @property
    def margin(self) -> float | None:
        """Mean over the classes."""
        return _mean(own.margin for own in self.classes.values())

    @property
    def unrecognised(self) -> list[str]:
        """The classes that are not told from the others."""
        return [name for name, own in self.classes.items() if own.is_unrecognised]

    def to_json(self) -> dict[str, object]:
        """As written to ``SIGNS_FILE``."""
        return {"score": self.score, "margin": self.margin, **asdict(self)}

    def words(self) -> list[str]:
        """What the signs say, in plain sentences."""
        lines = []
        if self.score is not None and self.margin is not None:
            lines.append(
                f"best boxes score {self.score:.2f} on photos with the tag, {self.score - self.margin:.2f} on others "
                f"(means over classes)"
            )
        if self.unrecognised:
            names = ", ".join(self.unrecognised)
            lines.append(f"not recognised: {names}: boxes score no higher with the tag than without it; review these")
        moments = (("last two refinement stages", self.stages), ("end of training and a moment before", self.stability))
        shown = [f"{name} {value:.2f}" for name, value in moments if value is not None]
        return [*lines, *([f"overlap of best boxes: {', '.join(shown)}"] if shown else [])]


def quality_signs(
    best: BestBoxes,
    classes: Sequence[str],
    moments: Sequence[Mapping[str, Detections]] = (),
    stages: Sequence[Mapping[str, Detections]] = (),
) -> QualitySigns:
    """The signs of a run from its best boxes, and from those that it recorded.

    Args:
        moments: boxes of the last stage in the recorded photos, at each moment in order.
        stages: boxes of each stage at the last moment, in order.
    """
    present, absent = by_class(best.scores), by_class(best.absent)
    found = {}
    for name in classes:
        own = present.get(name, [])
        margin = unpaired_difference(own, absent.get(name, []))
        score = fmean(own) if own else None
        known = (None, None) if margin is None else (margin.mean, margin.error)
        found[name] = ClassSigns(len(own), score, *known)
    return QualitySigns(found, _last_overlap(stages), _last_overlap(moments))


def _last_overlap(series: Sequence[Mapping[str, Detections]]) -> float | None:
    """Mean overlap of the best boxes of the last two of a series."""
    if len(series) < 2:
        return None
    last, before = ({photo: best_of_classes(own) for photo, own in found.items()} for found in series[:-3:-1])
    corners = [
        {(photo, str(label)): box for photo, own in found.items() for label, box in _labelled_corners(own)}
        for found in (last, before)
    ]
    return mean_overlap(*corners)


def _labelled_corners(found: Detections) -> list[tuple[int, BoxCorners]]:
    return list(zip(found.labels.tolist(), found.boxes.tolist(), strict=True))


def read_signs(path: Path) -> QualitySigns:
    """The signs in a file."""
    content = io.read_json(path, "the signs of a run's quality")
    try:
        return TypeAdapter(QualitySigns).validate_python(content)
    except ValidationError as error:
        where = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise UserError(printable(f"{path}: {where or 'content'}: wrong; remove the file and label again")) from None


# ---------------------------------------------------------------- choosing among runs


@dataclass(frozen=True, slots=True)
class RunChoice:
    """The run with the highest mean score, and whether it is above the next one."""

    scores: Mapping[str, float]  # of all runs, highest first
    lead: ScoreLead | None  # over the next one; None if there is one run only

    @property
    def best(self) -> str:
        """The run with the highest mean score."""
        return next(iter(self.scores))

    @property
    def is_sure(self) -> bool:
        """Whether the lead counts."""
        return self.lead is not None and self.lead.is_sure

    def words(self) -> str:
        """The choice in one sentence."""
        (best, own), *others = self.scores.items()
        if self.lead is None or not others:
            return f"{best}: the only run, so there is nothing to choose"
        (second, other), size = others[0], self.lead.mean / self.lead.error if self.lead.error else math.inf
        errors = f"{size:.1f} standard errors" if math.isfinite(size) else "without spread"
        if self.is_sure:
            return f"best by the mean score of its boxes: {best}, {own:.3f} against {other:.3f} of {second} ({errors})"
        return f"cannot tell which is best: {best} {own:.3f}, {second} {other:.3f} (difference: {errors})"


def choose_run(runs: Mapping[str, Mapping[Tag, float]]) -> RunChoice | None:
    """The run with the highest mean score over the tags that all have; None if they share no tag.

    Runs of one recipe with other seeds, on the same photos. What is sure is the sign, not the boxes: the sign finds a
    run that did not learn a class, and says little among runs that learned all (docs/real-photos.md).
    """
    shared = [tag for tag in next(iter(runs.values()), {}) if all(tag in own for own in runs.values())]
    if not shared:
        return None
    kept = {name: {tag: own[tag] for tag in shared} for name, own in runs.items()}
    scores = {name: score for name, own in kept.items() if (score := mean_score(own)) is not None}
    order = sorted(scores, key=lambda name: -scores[name])
    lead = paired_difference(kept[order[0]], kept[order[1]]) if len(order) > 1 else None
    return RunChoice({name: scores[name] for name in order}, lead)
