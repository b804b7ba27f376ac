"""Metrics by name: run them, print them, write them down."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from itertools import pairwise

from jaxtyping import Float
from rich.table import Table
from torch import Tensor

from tag2box.annotations import Detections, Truth
from tag2box.errors import UserError
from tag2box.metrics.challenges import MIN_SCORE, ChallengeShares, challenges
from tag2box.metrics.coco_ap import CocoScores, coco_scores
from tag2box.metrics.voc_ap import ClassScores, JsonNumbers, corloc, voc07, voc12

MetricScores = ClassScores | CocoScores | ChallengeShares

METRICS: dict[str, Callable[[Truth, Mapping[str, Detections]], MetricScores]] = {
    "voc07": voc07,
    "voc12": voc12,
    "corloc": corloc,
    "coco": coco_scores,
    "challenges": challenges,
}

_MEAN_NAMES = {"voc07": "mAP", "voc12": "mAP", "corloc": "mean"}


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """The scores of every metric asked for, by name, in the order asked."""

    scores: dict[str, MetricScores]

    def to_json(self) -> dict[str, JsonNumbers]:
        """All numbers as fractions in full precision; None where undefined, never NaN."""
        return {name: _numbers(name, scores) for name, scores in self.scores.items()}


def evaluate_detections(
    truth: Truth,
    detections: Mapping[str, Detections],
    metrics: Sequence[str],
    *,
    min_score: float = MIN_SCORE,
    areas: Mapping[str, Float[Tensor, " B"]] | None = None,
) -> EvaluationResult:
    """Score detections of the images of ``truth``; an image without an entry has no detections.

    Args:
        min_score: detections from this score up count for ``challenges``; the other metrics rank all of them.
        areas: what ``coco`` takes for small, medium and large, where a COCO file brings its own.
    """
    for name in metrics:
        if name not in METRICS:
            raise UserError(f"metric {name!r}: {_nearest(name)}; the metrics are {', '.join(METRICS)}")
    _check(truth, detections)
    chosen = METRICS | {
        "coco": partial(coco_scores, areas=areas),
        "challenges": partial(challenges, min_score=min_score),
    }
    return EvaluationResult({name: chosen[name](truth, detections) for name in metrics})


def metrics_table(result: EvaluationResult) -> Table:
    """All numbers in per cent: a column for each metric, a row for each class or named number."""
    sections = _sections(result)
    printed = Table("", *result.scores)
    for column in printed.columns[1:]:
        column.justify = "right"
    for section, following in pairwise([*sections, {}]):
        for name, row in section.items():
            printed.add_row(name, *(_per_cent(row, metric) for metric in result.scores))
        if following:
            printed.add_section()
    return printed


def _nearest(name: str) -> str:
    near = difflib.get_close_matches(name.lower(), METRICS, n=1, cutoff=0.0)
    return f"did you mean {near[0]!r}?"


def _check(truth: Truth, detections: Mapping[str, Detections]) -> None:
    known = set(truth.ids)
    for image_id, found in detections.items():
        if image_id not in known:
            raise UserError(f"detections: image {image_id!r} is not in the truth; evaluate against its own truth")
        if len(found) and not 0 <= int(found.labels.min()) <= int(found.labels.max()) < len(truth.classes):
            raise UserError(
                f"detections: image {image_id!r} has a label outside 0..{len(truth.classes) - 1}; "
                "evaluate with the classes of the detector"
            )


def _numbers(name: str, scores: MetricScores) -> JsonNumbers:
    if isinstance(scores, ClassScores):
        return {_MEAN_NAMES[name]: scores.mean, "per_class": scores.per_class()}
    return asdict(scores)


MetricSection = dict[str, dict[str, float | None]]  # row name -> metric -> number


def _sections(result: EvaluationResult) -> list[MetricSection]:
    """Classes, then their mean, then one section for each metric with numbers of its own."""
    by_class: MetricSection = {}
    mean: MetricSection = {}
    others: list[MetricSection] = []
    for metric, scores in result.scores.items():
        if isinstance(scores, ClassScores):
            for name, value in scores.per_class().items():
                by_class.setdefault(name, {})[metric] = value
            mean.setdefault("mean", {})[metric] = scores.mean
        else:
            others.append({field.name: {metric: getattr(scores, field.name)} for field in fields(scores)})
    return [section for section in (by_class, mean, *others) if section]


def _per_cent(row: dict[str, float | None], metric: str) -> str:
    if metric not in row:
        return ""
    value = row[metric]
    return "-" if value is None else f"{100 * value:.1f}"
