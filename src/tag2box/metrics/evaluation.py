"""Run metrics by name, print their numbers as a table, and write them as JSON.

A metric is a function ``(truth, detections) -> ClassScores``, or one that returns a dict or a dataclass of numbers.
Built-in metrics are listed in ``tag2box.extend``; any other is named ``package.module:function``.
"""

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from itertools import pairwise

from rich.table import Table

from tag2box import annotations, errors, extend
from tag2box.metrics import challenges, voc_ap

MetricScores = voc_ap.ClassScores | dict[str, float | None]
"""Scores of one metric: a fraction per class, or named numbers."""

MetricSection = dict[str, dict[str, float | None]]
"""Rows of the printed table: row name to metric to number."""


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Scores of the requested metrics by name, in the requested order."""

    scores: dict[str, MetricScores]

    def to_json(self) -> dict[str, voc_ap.JsonNumbers]:
        """All numbers as fractions in full precision; None if undefined, never NaN."""
        return {name: _numbers(scores) for name, scores in self.scores.items()}


def evaluate_detections(
    truth: annotations.Truth,
    detections: Mapping[str, annotations.Detections],
    metrics: Sequence[str],
    *,
    min_score: float = challenges.MIN_SCORE,
    areas: voc_ap.ObjectAreas | None = None,
) -> EvaluationResult:
    """Score detections of the images of ``truth``; an image without an entry has no detections.

    ``min_score`` and ``areas`` are passed to the metrics that have an argument of that name.

    Args:
        metrics: names in ``tag2box.extend.METRICS``, or ``package.module:function``.
        min_score: minimum score of the detections that ``challenges`` counts; the other metrics rank all of them.
        areas: object areas by which ``coco`` tells small, medium and large, if a COCO file has its own.
    """
    functions = {name: _find_metric(name) for name in metrics}
    _check(truth, detections)
    options = {"min_score": min_score, "areas": areas}
    scores: dict[str, MetricScores] = {}
    for name, metric in functions.items():
        accepted = inspect.signature(metric).parameters
        result = metric(truth, detections, **{key: value for key, value in options.items() if key in accepted})
        scores[name] = _checked_scores(name, result)
    return EvaluationResult(scores)


def _find_metric(name: str) -> Callable[..., object]:
    if name not in extend.METRICS and ":" not in name:
        near = difflib.get_close_matches(name.lower(), extend.METRICS, n=1, cutoff=0.0)
        raise errors.UserError(
            f"metric {name!r}: did you mean {near[0]!r}?; the metrics are {', '.join(extend.METRICS)}, "
            'or "package.module:function" of your own'
        )
    try:
        found = extend.find_part("metric", name)
    except errors.UserError as error:
        raise errors.UserError(f"metric {error}") from None
    if not callable(found):
        raise errors.UserError(f"metric {name!r}: must be a function of (truth, detections)")
    metric: Callable[..., object] = found
    return metric


def _checked_scores(name: str, result: object) -> MetricScores:
    if isinstance(result, voc_ap.ClassScores):
        return result
    if is_dataclass(result) and not isinstance(result, type):
        result = asdict(result)
    if not isinstance(result, Mapping):
        raise errors.UserError(
            f"metric {name!r}: must return ClassScores, a dict or a dataclass of numbers, not {result!r}"
        )
    return dict(result)


def metrics_table(result: EvaluationResult) -> Table:
    """Table of all numbers in per cent: a column per metric, a row per class or named number."""
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


def _check(truth: annotations.Truth, detections: Mapping[str, annotations.Detections]) -> None:
    known = set(truth.ids)
    for image_id, found in detections.items():
        if image_id not in known:
            raise errors.UserError(
                f"detections: image {image_id!r} is not in the truth; evaluate against its own truth"
            )
        if len(found) and not 0 <= int(found.labels.min()) <= int(found.labels.max()) < len(truth.classes):
            raise errors.UserError(
                f"detections: image {image_id!r} has a label outside 0..{len(truth.classes) - 1}; "
                "evaluate with the classes of the detector"
            )


def _numbers(scores: MetricScores) -> voc_ap.JsonNumbers:
    if isinstance(scores, voc_ap.ClassScores):
        return {scores.mean_name: scores.mean, "per_class": scores.per_class()}
    return dict(scores)


def _sections(result: EvaluationResult) -> list[MetricSection]:
    """Classes, then their mean, then a section per metric with named numbers."""
    by_class: MetricSection = {}
    mean: MetricSection = {}
    others: list[MetricSection] = []
    for metric, scores in result.scores.items():
        if isinstance(scores, voc_ap.ClassScores):
            for name, value in scores.per_class().items():
                by_class.setdefault(name, {})[metric] = value
            mean.setdefault("mean", {})[metric] = scores.mean
        else:
            others.append({name: {metric: value} for name, value in scores.items()})
    return [section for section in (by_class, mean, *others) if section]


def _per_cent(row: dict[str, float | None], metric: str) -> str:
    if metric not in row:
        return ""
    value = row[metric]
    return "-" if value is None else f"{100 * value:.1f}"
