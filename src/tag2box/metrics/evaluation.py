"""Run metrics by name, of detections and of trivial baselines; print their numbers as tables, write them as JSON.

A metric is a function ``(truth, detections) -> ClassScores``, or one that returns a dict or a dataclass of numbers.
Built-in metrics are listed in ``tag2box.extend``; any other is named ``package.module:function``.
"""

import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from itertools import pairwise

from rich.table import Table

from tag2box import annotations, errors, extend
from tag2box.metrics import challenges, voc_ap
from tag2box.metrics.baselines import Baseline, Verdict, best_verdict, trivial_baselines

MetricScores = voc_ap.ClassScores | voc_ap.JsonNumbers
"""Scores of one metric: a fraction per class, or named numbers, or tables of named numbers."""

MetricSection = dict[str, dict[str, float | None]]
"""Rows of the printed table: row name to metric to number."""

COMPARED_FIGURES = {
    "voc07": ("mAP",),
    "voc12": ("mAP",),
    "corloc": ("mean",),
    "coco": ("AP", "AP50"),
    "challenges": ("found",),
    "errors": ("correct",),
}
"""Figures that are compared with trivial baselines; higher is better."""

USES_TAGS = ("corloc", "errors")
"""Metrics that take the tags of a photo as known: rows that know them are a bar, too."""


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Scores of the requested metrics by name, in the requested order; and those of trivial baselines by row."""

    scores: dict[str, MetricScores]
    baselines: Mapping[str, "EvaluationResult"] = field(default_factory=dict)
    knows_tags: bool = False

    def to_json(self) -> dict[str, voc_ap.JsonNumbers]:
        """All numbers as fractions in full precision; None if undefined, never NaN.

        With baselines, ``baselines`` has the numbers of each row, and ``verdicts`` each figure against the best row.
        """
        numbers = {name: _numbers(scores) for name, scores in self.scores.items()}
        if not self.baselines:
            return numbers
        rows: voc_ap.JsonNumbers = {name: row.to_json() for name, row in self.baselines.items()}
        judged: voc_ap.JsonNumbers = {name: verdict.to_json() for name, verdict in self.verdicts().items()}
        return {**numbers, "baselines": rows, "verdicts": judged}

    def figures(self) -> Iterator[tuple[str, str, float | None]]:
        """The figures that are compared with baselines: metric, name, value."""
        for metric, names in COMPARED_FIGURES.items():
            if metric in self.scores:
                numbers = _numbers(self.scores[metric])
                for name in names:
                    value = numbers[name]
                    yield metric, name, None if isinstance(value, Mapping) else value

    def verdicts(self) -> dict[str, Verdict]:
        """Each figure against the best trivial row, by the title of the figure; undefined ones are left out."""
        found = {}
        for metric, name, value in self.figures():
            rows = [
                (row, own)
                for row, result in self.baselines.items()
                if metric in USES_TAGS or not result.knows_tags
                for other, label, own in result.figures()
                if (other, label) == (metric, name)
            ]
            verdict = best_verdict(value, rows)
            if verdict is not None:
                found[figure_title(metric, name)] = verdict
        return found


def figure_title(metric: str, name: str) -> str:
    """A figure's name in tables: voc07, corloc, coco AP50, challenges found."""
    return metric if name in ("mAP", "mean") else f"{metric} {name}"


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


def evaluate_with_baselines(
    truth: annotations.Truth,
    detections: Mapping[str, annotations.Detections],
    metrics: Sequence[str],
    *,
    further: Sequence[Baseline] = (),
    min_score: float = challenges.MIN_SCORE,
    areas: voc_ap.ObjectAreas | None = None,
) -> EvaluationResult:
    """``evaluate_detections``, also of the trivial baselines, and of ``further`` rows."""

    def scored(found: Mapping[str, annotations.Detections]) -> EvaluationResult:
        return evaluate_detections(truth, found, metrics, min_score=min_score, areas=areas)

    result = scored(detections)
    rows = [*trivial_baselines(truth, detections), *further]
    return replace(
        result, baselines={row.name: replace(scored(row.detections), knows_tags=row.knows_tags) for row in rows}
    )


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


# ---------------------------------------------------------------- tables


def metrics_table(result: EvaluationResult) -> Table:
    """Table of all numbers in per cent: a column per metric, a row per class or named number.

    Metrics that have tables of their own, such as ``errors``, are left out: ``breakdown_tables`` has them.
    """
    shown = [name for name, scores in result.scores.items() if not _has_tables(scores)]
    sections = _sections(result, shown)
    printed = _right_aligned("", *shown)
    for section, following in pairwise([*sections, {}]):
        for name, row in section.items():
            printed.add_row(name, *(_per_cent(row, metric) for metric in shown))
        if following:
            printed.add_section()
    return printed


def breakdown_tables(result: EvaluationResult) -> list[Table]:
    """A table for each metric with tables of its own: columns are its numbers, rows are all, then each group."""
    out = []
    for metric, scores in result.scores.items():
        if isinstance(scores, voc_ap.ClassScores) or not _has_tables(scores):
            continue
        names = [name for name, value in scores.items() if not isinstance(value, Mapping)]
        groups = [value for value in scores.values() if isinstance(value, Mapping)]
        printed = _right_aligned(metric, *(name.replace("_", " ") for name in names))
        for group in ({"all": scores}, *groups):
            for row, numbers in group.items():
                cells: Mapping[str, float | None] = numbers if isinstance(numbers, Mapping) else {}
                printed.add_row(row, *(_per_cent(cells, name) for name in names))
            printed.add_section()
        out.append(printed)
    return out


def baselines_table(result: EvaluationResult) -> Table:
    """The detections, then trivial baselines, in per cent."""
    printed = _right_aligned("", *(figure_title(metric, name) for metric, name, _ in result.figures()))
    printed.columns[0].no_wrap = True
    for row, own in {"these detections": result, **result.baselines}.items():
        printed.add_row(row, *(_per_cent({"": value}, "") for _, _, value in own.figures()))
        if own is result:
            printed.add_section()
    return printed


def verdict_lines(result: EvaluationResult) -> list[str]:
    """A line for each figure that is not above the trivial baselines, or one if all are; none if nothing is known."""
    judged = result.verdicts()
    lines = [
        f"{name}: {100 * verdict.value:.1f} is {verdict.words()} [{verdict.best_row}]"
        for name, verdict in judged.items()
        if not verdict.is_above
    ]
    return lines or (["All figures are above the trivial boxes."] if judged else [])


def _right_aligned(*heads: str) -> Table:
    printed = Table(*heads)
    for column in printed.columns[1:]:
        column.justify = "right"
    return printed


def _has_tables(scores: MetricScores) -> bool:
    return not isinstance(scores, voc_ap.ClassScores) and any(isinstance(v, Mapping) for v in scores.values())


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


def _sections(result: EvaluationResult, metrics: Sequence[str]) -> list[MetricSection]:
    """Classes, then their mean, then a section per metric with named numbers."""
    by_class: MetricSection = {}
    mean: MetricSection = {}
    others: list[MetricSection] = []
    for metric in metrics:
        scores = result.scores[metric]
        if isinstance(scores, voc_ap.ClassScores):
            for name, value in scores.per_class().items():
                by_class.setdefault(name, {})[metric] = value
            mean.setdefault("mean", {})[metric] = scores.mean
        else:
            others.append({name: {metric: value} for name, value in scores.items() if not isinstance(value, Mapping)})
    return [section for section in (by_class, mean, *others) if section]


def _per_cent(row: Mapping[str, float | None], metric: str) -> str:
    """A fraction in per cent; counts as they are."""
    if metric not in row:
        return ""
    value = row[metric]
    return "-" if value is None else f"{value}" if isinstance(value, int) else f"{100 * value:.1f}"
