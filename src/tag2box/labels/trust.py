"""Which classes of a label set can be trusted: precision with its interval, calibrated scores, verdicts.

A person has reviewed a random sample of the photos (``labels.reviews``). ``measure_trust`` turns the verdicts into a
``Trust``; ``tag2box label`` and ``tag2box detect`` apply it. Photos that were reviewed because they are hard say
nothing about the others: only those of the random sample count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import torch
from jaxtyping import Bool, Float
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor

from tag2box import storage
from tag2box.annotations import Detections
from tag2box.errors import UserError, printable
from tag2box.labels import calibration as fits
from tag2box.labels.label_set import LabelSet
from tag2box.labels.labelled import LabelBox, LabelledPhotos
from tag2box.labels.reviews import ReviewedPhoto, Reviews, Verdict
from tag2box.labels.shares import Estimate, Interval, effective_trials, trials_until

TRUST_FILE = "trust.json"
TRUST_FORMAT = 1
_KIND = "trust in a label set"
_REMEDY = "write it again with `tag2box trust`"
_Share = Annotated[float, Field(ge=0, le=1)]
ClassVerdict = Literal["use", "review more", "do not use"]


@dataclass(frozen=True, kw_only=True)
class TrustRule:
    """Settings of ``tag2box trust``: when labels of a class are good enough."""

    precision: _Share = 0.9
    """Wanted precision: share of the labels above a class's threshold that are right."""
    threshold_by: Literal["estimate", "lower bound"] = "estimate"
    """What reaches the wanted precision above the threshold: the share in the reviews, or its lower bound."""
    use_from: _Share = 0.7
    """A class is used if the lower bound of its precision is at least this."""
    refuse_below: _Share = 0.5
    """A class is not used if the upper bound of its precision is below this."""
    least: Annotated[int, Field(ge=1, le=10_000)] = 10
    """Reviewed labels of a class, or above a threshold, that a verdict needs."""
    own_from: Annotated[int, Field(ge=1, le=1_000_000)] = 30
    """Reviewed labels from which a class has a calibration of its own; with fewer, that of all classes is shifted."""
    width: Annotated[float, Field(gt=0, le=0.5)] = 0.1
    """Half the width of the interval that further reviews should reach if no verdict can be expected."""
    unusable: Literal["ignore", "drop"] = "ignore"
    """What becomes of labels of a class that is not used: ignore regions, or nothing."""
    folds: Annotated[int, Field(ge=2, le=20)] = 5
    """Parts of the reviews of which each is held out to choose a calibration."""
    seed: Annotated[int, Field(ge=0, le=1 << 32)] = 0
    """Seed of the division into folds."""


@dataclass(frozen=True, slots=True)
class ClassTrust:
    """What the reviews say about one class, or about all."""

    labels: int  # in the label set
    precision: Estimate
    recall: Estimate  # of the reviewed objects, those that had a right label
    verdict: ClassVerdict
    more: int | None = None  # further labels to review until a verdict can be expected; None if there are not as many
    calibration: fits.Calibration = fits.Calibration()
    is_own: bool = True  # whether the calibration is of this class alone
    losses: Mapping[fits.Kind, float] = field(default_factory=dict)  # of the kinds of calibration, on held-out labels
    threshold: float | None = None  # score from which labels have the wanted precision; None: it is not reached
    curve: tuple[fits.PrecisionPoint, ...] = ()

    @property
    def least_probability(self) -> float | None:
        """The threshold as a probability."""
        return None if self.threshold is None else self.calibration.one(self.threshold)


@dataclass(frozen=True, slots=True)
class Reliability:
    """Scores against the share of right labels, before and after calibration; after: on held-out photos."""

    before: tuple[fits.ReliabilityBin, ...] = ()
    after: tuple[fits.ReliabilityBin, ...] = ()
    error_before: float | None = None  # expected calibration error
    error_after: float | None = None


@dataclass(frozen=True)
class Trust:
    """What can be trusted of a label set, and the run that made it.

    Example:
        trust = Trust.read(Path("labels/trust.json"))
        print({name: (own.verdict, own.precision.share) for name, own in trust.classes.items()})
    """

    labels_digest: str
    run: Mapping[str, object]
    rule: TrustRule
    photos: int  # reviewed
    sampled: int  # of them, from the random sample
    overall: ClassTrust
    classes: Mapping[str, ClassTrust]
    reliability: Reliability = Reliability()

    # ---------------------------------------------------------------- on disk

    def write(self, path: Path) -> None:
        """Write it as a JSON file that includes its own digest."""
        storage.write_checked_json(path, {"format": TRUST_FORMAT, "kind": _KIND, **asdict(self)})

    @classmethod
    def read(cls, path: Path) -> Trust:
        """Read a file of ``write``; raises if it is damaged or something else."""
        content = storage.read_checked_json(path, "trust in a label set, written by `tag2box trust`", _REMEDY)
        if content.get("kind") != _KIND or content.get("format") != TRUST_FORMAT:
            raise UserError(f"{path}: expected a file of `tag2box trust` of format {TRUST_FORMAT}; {_REMEDY}")
        try:
            return TypeAdapter(cls).validate_python({k: v for k, v in content.items() if k not in {"kind", "format"}})
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise UserError(printable(f"{path}: {where}: {' '.join(str(first['msg']).split())}; {_REMEDY}")) from None

    def check_labels(self, labels: LabelSet, where: Path) -> None:
        """Raise unless it was measured on this label set."""
        if self.labels_digest != labels.digest:
            raise UserError(f"{where}: belongs to other labels; {_REMEDY}")

    def check_run(self, weights: object, config: object, where: Path) -> None:
        """Raise unless the reviewed labels have the scores of this detector, not calibrated before."""
        if "trust" in self.run:
            raise UserError(f"{where}: its labels had calibrated scores; review labels made without --trust")
        for name, own in (("weights", weights), ("settings", config)):
            if self.run.get(name) != own:
                raise UserError(
                    f"{where}: the reviewed labels are of a run with other {name}, whose scores mean something else; "
                    "label with this run, review, and write it again with `tag2box trust`"
                )

    # ---------------------------------------------------------------- applied

    def of(self, name: str) -> ClassTrust:
        """What is known of a class; of one that the label set did not have, what is known of all."""
        return self.classes.get(name, self.overall)

    def label_boxes(self, boxes: Sequence[LabelBox]) -> tuple[LabelBox, ...]:
        """Boxes with probabilities as scores; labels below the threshold or of classes not to use are ignore regions.

        The best box of a tag is never dropped for its score: it stays as an ignore region.
        """
        kept = []
        for box in boxes:
            own = self.of(box.name)
            if own.verdict == "do not use" and self.rule.unusable == "drop":
                continue
            is_below = own.threshold is None or (box.score is not None and box.score < own.threshold)
            is_demoted = not box.is_doubtful and (is_below or own.verdict == "do not use")
            changed = replace(box, is_doubtful=True, why="doubtful") if is_demoted else box
            kept.append(_calibrated(changed, own.calibration))
        return tuple(kept)

    def detections(self, found: Detections, classes: Sequence[str]) -> Detections:
        """Detections with probabilities as scores."""
        scores = found.scores.double().clone()
        for label in found.labels.unique().tolist():
            rows = found.labels == label
            scores[rows] = self.of(classes[label]).calibration(scores[rows])
        return replace(found, scores=scores.to(found.scores.dtype))

    def kept(self, found: Detections, classes: Sequence[str], min_score: float | None) -> Detections:
        """The calibrated detections of at least a probability; default: that of each class's threshold."""
        if min_score is not None:
            return found[found.scores >= min_score]
        own = [self.of(name) for name in classes]
        least = [math.inf if c.verdict == "do not use" or c.threshold is None else c.least_probability for c in own]
        limits = torch.tensor(least, dtype=found.scores.dtype)
        return found[found.scores >= limits[found.labels] - 1e-6]  # scores are float32


def _calibrated(box: LabelBox, own: fits.Calibration) -> LabelBox:
    if box.score is None:
        return box
    score = own.one(box.score)
    margin = None if box.margin is None else score - own.one(max(box.score - box.margin, 0.0))
    return replace(box, score=score, margin=margin)


# ---------------------------------------------------------------- measured


def measure_trust(labels: LabelSet, reviews: Reviews, rule: TrustRule | None = None) -> Trust:
    """What the reviews of a label set say about each class and about all of them.

    Raises:
        UserError: the reviews are of other labels, or none of the photos is from the random sample.
    """
    rule = rule or TrustRule()
    if reviews.labels_digest != labels.digest:
        raise UserError("the reviews belong to other labels; review these labels")
    sampled = [photo for photo in reviews.photos.values() if photo.is_sampled]
    if not sampled:
        raise UserError(
            f"{len(reviews)} photos are reviewed, none of the random sample; others were chosen because they are hard, "
            "and say nothing about the rest: review some of the sample"
        )
    samples = {name: _Sample.of(sampled, name) for name in labels.classes}
    whole, fitted = _calibrations(samples, rule)
    scores = _label_scores(labels.content)
    classes = {
        name: _class_trust(rule, name, sampled, samples[name], scores[name], fitted[name]) for name in labels.classes
    }
    every = _class_trust(
        rule, None, sampled, _Sample.of(sampled, None), torch.cat([*scores.values()]), _Fitted(whole, True)
    )
    return Trust(
        labels.digest,
        labels.run,
        rule,
        len(reviews),
        len(sampled),
        every,
        classes,
        _reliability(sampled, labels.classes, fitted, rule),
    )


@dataclass(frozen=True, slots=True)
class _Sample:
    """The reviewed labels of a class that have a score."""

    scores: Float[Tensor, " V"]
    right: Bool[Tensor, " V"]

    @classmethod
    def of(cls, photos: Sequence[ReviewedPhoto], name: str | None) -> _Sample:
        own = [v for photo in photos for v in _verdicts(photo, name) if v.box.score is not None]
        scores = torch.tensor([verdict.box.score for verdict in own], dtype=torch.float64)
        return cls(scores, torch.tensor([verdict.is_right for verdict in own], dtype=torch.bool))


@dataclass(frozen=True, slots=True)
class _Fitted:
    choice: fits.CalibrationChoice
    is_own: bool


def _verdicts(photo: ReviewedPhoto, name: str | None) -> list[Verdict]:
    return [verdict for verdict in photo.verdicts if name is None or verdict.box.name == name]


def _label_scores(content: LabelledPhotos) -> dict[str, Float[Tensor, " L"]]:
    found: dict[str, list[float]] = {name: [] for name in content.classes}
    for photo in content.photos:
        for box in photo.labels:
            if box.score is not None:
                found[box.name].append(box.score)
    return {name: torch.tensor(own, dtype=torch.float64) for name, own in found.items()}


def _calibrations(
    samples: Mapping[str, _Sample], rule: TrustRule, kinds: Mapping[str | None, fits.Kind] | None = None
) -> tuple[fits.CalibrationChoice, dict[str, _Fitted]]:
    """The calibration of all labels, and that of each class.

    Args:
        kinds: kinds chosen before, by class; None is all labels.
    """

    def fit(own: _Sample, name: str | None) -> fits.CalibrationChoice:
        if kinds is not None:
            return fits.CalibrationChoice(fits.fit_calibration(kinds[name], own.scores, own.right))
        return fits.choose_calibration(own.scores, own.right, folds=rule.folds, seed=rule.seed)

    both = [(own.scores, own.right) for own in samples.values()] or [(torch.zeros(0), torch.zeros(0).bool())]
    whole = fit(_Sample(*(torch.cat(column) for column in zip(*both, strict=True))), None)
    found = {}
    for name, own in samples.items():
        if len(own.scores) >= rule.own_from and (kinds is None or name in kinds):
            found[name] = _Fitted(fit(own, name), True)
            continue
        base = whole.calibration
        prior = float(base(own.scores).mean()) if len(own.scores) else 0.5
        mean = (float(own.right.sum()) + rule.least * prior) / (len(own.right) + rule.least)
        found[name] = _Fitted(fits.CalibrationChoice(fits.shifted(base, own.scores, mean), whole.losses), False)
    return whole, found


def _class_trust(
    rule: TrustRule,
    name: str | None,
    photos: Sequence[ReviewedPhoto],
    own: _Sample,
    scores: Float[Tensor, " L"],
    fitted: _Fitted,
) -> ClassTrust:
    precision, recall = _estimates(photos, name)
    chosen = fitted.choice.calibration
    if fitted.is_own and len(own.scores) >= rule.own_from:
        threshold = fits.precision_threshold(
            own.scores, own.right, rule.precision, least=rule.least, by=rule.threshold_by
        )
    else:
        threshold = fits.expected_threshold(scores, chosen(scores), rule.precision)
    labels = max(len(scores), precision.count)
    return ClassTrust(
        labels,
        precision,
        recall,
        _verdict(rule, precision),
        _further(rule, precision, labels),
        chosen,
        fitted.is_own,
        fitted.choice.losses,
        threshold,
        fits.precision_curve(own.scores, own.right) if len(own.scores) else (),
    )


def _estimates(photos: Sequence[ReviewedPhoto], name: str | None) -> tuple[Estimate, Estimate]:
    """Precision and recall of the labels of a class, or of all."""
    labels, found, objects = [], [], []
    for photo in photos:
        verdicts = _verdicts(photo, name)
        found.append(sum(verdict.is_right for verdict in verdicts))
        labels.append(len(verdicts))
        own = sum(not box.is_doubtful for box in photo.boxes if name is None or box.name == name)
        objects.append(max(own, found[-1]))
    return (
        Estimate(sum(labels), sum(found), effective_trials(found, labels)),
        Estimate(sum(objects), sum(found), effective_trials(found, objects)),
    )


def _verdict(rule: TrustRule, precision: Estimate) -> ClassVerdict:
    low, high = precision.interval
    if precision.count < rule.least:
        return "review more"
    if low >= rule.use_from:
        return "use"
    return "do not use" if high < rule.refuse_below else "review more"


def _further(rule: TrustRule, precision: Estimate, labels: int) -> int | None:
    """Further labels to review until the verdict is another than "review more", if their share stays what it is.

    If it never would be, because the share lies between the limits: until the interval is narrow enough.
    """
    if _verdict(rule, precision) != "review more":
        return 0
    share = precision.share if precision.share is not None else 0.5

    def decided(own: Interval) -> bool:
        return own.low >= rule.use_from or own.high < rule.refuse_below

    needed = trials_until(share, decided) or trials_until(share, lambda own: own.high - own.low <= 2 * rule.width)
    each = precision.count / precision.trials if precision.trials else 1.0
    more = max(math.ceil((needed or 0) * each), rule.least) - precision.count
    return max(more, 0) if precision.count + more <= labels else None


def _reliability(
    photos: Sequence[ReviewedPhoto], classes: Sequence[str], fitted: Mapping[str, _Fitted], rule: TrustRule
) -> Reliability:
    """Reliability of all labels; after calibration, each photo's by calibrations fitted without it."""
    every = _Sample.of(photos, None)
    folds = min(rule.folds, len(photos))
    if folds < 2 or not len(every.scores):
        return Reliability()
    order = torch.randperm(len(photos), generator=torch.Generator().manual_seed(rule.seed)).tolist()
    kinds: dict[str | None, fits.Kind] = {n: own.choice.calibration.kind for n, own in fitted.items() if own.is_own}
    pooled = fits.choose_calibration(every.scores, every.right, folds=rule.folds, seed=rule.seed)
    kinds[None] = pooled.calibration.kind
    probs, right = [], []
    for number in range(folds):
        inside = [photos[place] for at, place in enumerate(order) if at % folds != number]
        outside = [photos[place] for at, place in enumerate(order) if at % folds == number]
        _, held_out = _calibrations({name: _Sample.of(inside, name) for name in classes}, rule, kinds)
        for name in classes:
            own = _Sample.of(outside, name)
            probs.append(held_out[name].choice.calibration(own.scores))
            right.append(own.right)
    after, hits = torch.cat(probs), torch.cat(right)
    return Reliability(
        fits.reliability(every.scores, every.right),
        fits.reliability(after, hits),
        fits.calibration_error(every.scores, every.right),
        fits.calibration_error(after, hits),
    )
