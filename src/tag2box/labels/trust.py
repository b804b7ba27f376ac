"""Which classes of a label set can be trusted: precision with its interval, calibrated scores, verdicts.

A person has reviewed a random sample of the photos (``labels.reviews``). ``labels.trust_measure`` turns the verdicts
into a ``Trust``; ``tag2box label`` and ``tag2box detect`` apply it. Photos that were reviewed because they are hard say
nothing about the others: only those of the random sample count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field, TypeAdapter, ValidationError

from tag2box import storage
from tag2box.annotations import Detections
from tag2box.errors import UserError, printable
from tag2box.labels import calibration as fits
from tag2box.labels.label_set import LabelSet
from tag2box.labels.labelled import LabelBox
from tag2box.labels.shares import Estimate

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
    """Reviewed labels from which a class has a threshold of its own and, if enough of them are right and enough wrong,
    a calibration of its own; with fewer, the calibration of all classes is shifted."""
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


# ---------------------------------------------------------------- in words


def advice(found: Trust) -> tuple[str, ...]:
    """What to do next, a line per class that is not simply used."""
    lines = []
    for name, own in found.classes.items():
        words = _next_step(own, found.rule)
        if words:
            lines.append(f"{name}: {words}")
    return tuple(lines)


def _next_step(own: ClassTrust, rule: TrustRule) -> str:
    low, high = own.precision.interval
    wanted = f"{100 * rule.precision:g} %"
    if not own.labels:
        return "no labels"
    if own.verdict == "do not use":
        return f"do not use: at most {100 * high:.0f} % of its labels are right; train longer, or label it by hand"
    if own.verdict == "use":
        return "" if own.threshold is not None else f"use; {wanted} are not reached at any score, lower --precision"
    if own.more is None and own.precision.count < rule.least <= own.labels:
        return f"review {rule.least - own.precision.count} more labels, then ask again"
    if own.more is None:
        above = "" if own.threshold is None else f", or use those from a score of {own.threshold:.3f} on"
        return f"no sample decides: correct all of its {own.labels} labels{above}"
    share = own.precision.share
    if share is not None and rule.refuse_below <= share < rule.use_from and own.precision.count >= rule.least:
        if not own.more:
            return f"{100 * low:.0f} to {100 * high:.0f} % are right: correct its labels before use"
        return f"about {100 * share:.0f} % are right: correct its labels, or review {own.more} more to be sure"
    return f"review {own.more} more labels"
