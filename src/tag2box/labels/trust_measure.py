"""``measure_trust``: what reviews of a random sample say about the classes of a label set."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tag2box.errors import UserError
from tag2box.labels import calibration as fits
from tag2box.labels.label_set import LabelSet
from tag2box.labels.labelled import LabelledPhotos
from tag2box.labels.reviews import ReviewedPhoto, Reviews, Verdict
from tag2box.labels.shares import Estimate, Interval, effective_trials, trials_until
from tag2box.labels.trust import ClassTrust, ClassVerdict, Reliability, Trust, TrustRule


def measure_trust(labels: LabelSet, reviews: Reviews, rule: TrustRule | None = None) -> Trust:
    """What the reviews of a label set say about each class and about all of them.

    Raises:
        UserError: the reviews are of other labels, or none of the photos is from the random sample.
    """
    rule = rule or TrustRule()
    if reviews.labels_digest != labels.digest:
        raise UserError("the reviews belong to other labels; review these labels")
    sampled = [photo for photo in reviews.photos.values() if photo.is_sampled]
    if not len(reviews):
        raise UserError("no photo is reviewed; review some of the random sample, or name corrected boxes (--reviewed)")
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
        rule,
        None,
        sampled,
        _Sample.of(sampled, None),
        torch.cat([torch.zeros(0).double(), *scores.values()]),
        _Fitted(whole, True),
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
        if _has_own(own, rule) if kinds is None else name in kinds:
            found[name] = _Fitted(fit(own, name), True)
            continue
        base = whole.calibration
        prior = float(base(own.scores).mean()) if len(own.scores) else 0.5
        mean = (float(own.right.sum()) + rule.least * prior) / (len(own.right) + rule.least)
        found[name] = _Fitted(fits.CalibrationChoice(fits.shifted(base, own.scores, mean), whole.losses), False)
    return whole, found


def _has_own(own: _Sample, rule: TrustRule) -> bool:
    """Whether a class has enough right and wrong labels to choose a calibration of its own."""
    right = int(own.right.sum())
    return len(own.right) >= rule.own_from and min(right, len(own.right) - right) >= 2 * rule.folds


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
    if len(own.scores) >= rule.own_from:
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
