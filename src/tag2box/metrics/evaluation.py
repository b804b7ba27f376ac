"""Run metrics by name, of detections and of trivial baselines; print their numbers as tables, write them as JSON.

A metric is a function ``(truth, detections) -> ClassScores``, or one that returns a dict or a dataclass of numbers.
Built-in metrics are listed in ``tag2box.extend``; any other is named ``package.module:function``. A metric with an
argument ``min_iou`` can be evaluated at any IoU: ``voc07@0.3``.
"""

import difflib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from itertools import pairwise

from rich.table import Table

from tag2box import annotations, errors, extend
from tag2box.metrics import bootstrap, challenges, voc_ap
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

MARK = "*"
"""Follows a figure that is not above the best trivial baseline."""


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Scores of the requested metrics by name, in the requested order; and those of trivial baselines by row.

    ``intervals`` are of bootstrap over photos; ``differences`` are from other detections in the same photos.
    """

    scores: dict[str, MetricScores]
    baselines: Mapping[str, "EvaluationResult"] = field(default_factory=dict)
    knows_tags: bool = False
    intervals: Mapping[bootstrap.FigurePath, bootstrap.FigureInterval] = field(default_factory=dict)
    differences: Mapping[bootstrap.FigurePath, bootstrap.FigureDifference] = field(default_factory=dict)

    def to_json(self) -> dict[str, voc_ap.JsonNumbers]:
        """All numbers as fractions in full precision; None if undefined, never NaN.

        With baselines, ``baselines`` has the numbers of each row, and ``verdicts`` each figure against the best row.
        ``intervals`` has [low, high], and ``differences`` a comparison, under the names that the numbers have.
        """
        numbers = {name: _numbers(scores) for name, scores in self.scores.items()}
        numbers |= self._bootstrap_json()
        if not self.baselines:
            return numbers
        rows: voc_ap.JsonNumbers = {name: row.to_json() for name, row in self.baselines.items()}
        judged: voc_ap.JsonNumbers = {name: verdict.to_json() for name, verdict in self.verdicts().items()}
        return {**numbers, "baselines": rows, "verdicts": judged}

    def _bootstrap_json(self) -> dict[str, voc_ap.JsonNumbers]:
        ends = bootstrap.nested({path: [own.low, own.high] for path, own in self.intervals.items()})
        gaps = bootstrap.nested({path: own.to_json() for path, own in self.differences.items()})
        return {name: part for name, part in (("intervals", ends), ("differences", gaps)) if part}

    def figures(self) -> Iterator[tuple[str, str, float | None]]:
        """The figures that are compared with baselines: metric, name, value."""
        for kind, names in COMPARED_FIGURES.items():
            for metric in [metric for metric in self.scores if base_metric(metric) == kind]:
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
                if base_metric(metric) in USES_TAGS or not result.knows_tags
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


def base_metric(name: str) -> str:
    """The metric of a name with an IoU: voc07 of voc07@0.3."""
    return name.partition("@")[0]


def metrics_at(metrics: Sequence[str], ious: Sequence[float]) -> list[str]:
    """The names of metrics at some IoUs: voc07 at 0.5, else voc07@0.3; those without an IoU stay as they are.

    >>> metrics_at(["voc07", "coco"], [0.3, 0.5])
    ['voc07@0.3', 'voc07', 'coco']
    """
    names = []
    for name in metrics:
        has_iou = "@" not in name and "min_iou" in inspect.signature(_find_metric(name)).parameters
        names += [name if iou == voc_ap.MATCH_IOU else f"{name}@{iou:g}" for iou in ious] if has_iou else [name]
    return list(dict.fromkeys(names))


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
        metrics: names in ``tag2box.extend.METRICS``, or ``package.module:function``; with an IoU, ``voc07@0.3``.
        min_score: minimum score of the detections that ``challenges`` counts; the other metrics rank all of them.
        areas: object areas by which ``coco`` tells small, medium and large, if a COCO file has its own.
    """
    functions = {name: _find_metric(base_metric(name)) for name in metrics}
    levels = {name: _iou_of(name, metric) for name, metric in functions.items()}
    _check(truth, detections)
    scores: dict[str, MetricScores] = {}
    for name, metric in functions.items():
        accepted = inspect.signature(metric).parameters
        options = {"min_score": min_score, "areas": areas, **levels[name]}
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


def with_intervals(
    result: EvaluationResult,
    truth: annotations.Truth,
    detections: Mapping[str, annotations.Detections],
    *,
    against: Mapping[str, annotations.Detections] | None = None,
    resamples: int = bootstrap.RESAMPLES,
    seed: int = 0,
) -> EvaluationResult:
    """A result with intervals by bootstrap over photos, and its differences from other detections, if there are any.

    Args:
        against: other detections in the same photos, compared under the same resamples (a paired bootstrap).
    """
    weights = bootstrap.photo_weights(len(truth), resamples=resamples, seed=seed)
    names = list(result.scores)
    own = bootstrap.resampled_figures(truth, detections, names, weights)
    gaps = {}
    if against is not None:
        _check(truth, against)
        gaps = bootstrap.differences(own, bootstrap.resampled_figures(truth, against, names, weights))
    return replace(result, intervals=bootstrap.intervals(own), differences=gaps)


def _iou_of(name: str, metric: Callable[..., object]) -> dict[str, float]:
    """The IoU in a metric's name, as its argument; empty without any."""
    _, has_iou, level = name.partition("@")
    if not has_iou:
        return {}
    if "min_iou" not in inspect.signature(metric).parameters:
        raise errors.UserError(f"metric {name!r}: {base_metric(name)} has no IoU to set; leave out @{level}")
    return {"min_iou": checked_iou(level)}


def checked_iou(text: str) -> float:
    """An IoU between 0 and 1, as typed."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < 1:
        raise errors.UserError(f"IoU {text!r}: expected a number above 0 and below 1, e.g. 0.5")
    return value


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

MEAN_ROW = "mean"
INTERVAL_ROW = f"{bootstrap.LEVEL:.0%} interval".replace("%", " %")


def metrics_table(result: EvaluationResult) -> Table:
    """Table of all numbers in per cent: a column per metric, a row per class or named number.

    Metrics that have tables of their own, such as ``errors``, are left out: ``breakdown_tables`` has them. Means that
    are not above the trivial baselines are marked.
    """
    shown = [name for name, scores in result.scores.items() if not _has_tables(scores)]
    sections = _sections(result, shown)
    printed = _right_aligned("", *shown)
    below = {title for title, verdict in result.verdicts().items() if not verdict.is_above}
    for section, following in pairwise([*sections, {}]):
        for name, row in section.items():
            marks = [MARK if figure_title(m, name) in below else "" for m in shown]
            printed.add_row(name, *(f"{_per_cent(row, m)}{mark}" for m, mark in zip(shown, marks, strict=True)))
            if name == MEAN_ROW and result.intervals:
                ends = {path[0]: own.words() for path, own in result.intervals.items() if len(path) == 2}
                printed.add_row(INTERVAL_ROW, *(ends.get(metric, "") for metric in shown))
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
        groups = [(kind, value) for kind, value in scores.items() if isinstance(value, Mapping)]
        printed = _right_aligned(metric, *(name.replace("_", " ") for name in names))
        for path, group in (((), {"all": scores}), *(((kind,), group) for kind, group in groups)):
            for row, numbers in group.items():
                cells: Mapping[str, float | None] = numbers if isinstance(numbers, Mapping) else {}
                place = (metric, *path, *((row,) if path else ()))
                printed.add_row(row, *(_with_interval(result, place, cells, name) for name in names))
            printed.add_section()
        out.append(printed)
    return out


def _with_interval(
    result: EvaluationResult, place: tuple[str, ...], cells: Mapping[str, float | None], name: str
) -> str:
    """A number of a group, with its interval if there is one."""
    own = result.intervals.get((*place, name))
    return _per_cent(cells, name) + ("" if own is None else f" ({own.words()})")


def differences_table(result: EvaluationResult) -> Table:
    """Means of these and of the other detections, their difference, its interval, and the share of resamples above."""
    printed = _right_aligned("", "these", "others", "difference", INTERVAL_ROW, "share above", "significant")
    for (metric, *path), own in result.differences.items():
        value = _numbers(result.scores[metric]).get(path[0])
        if len(path) > 1 or not isinstance(value, float):
            continue  # classes and groups are in the JSON file
        values = [f"{100 * x:.1f}" for x in (value, value - own.value)]
        gaps = [f"{100 * own.value:+.1f}", f"{100 * own.low:+.1f} to {100 * own.high:+.1f}"]
        share = f"{100 * own.share_above:.1f}"
        printed.add_row(figure_title(metric, path[0]), *values, *gaps, share, "yes" if own.is_significant else "no")
    return printed


def baselines_table(result: EvaluationResult) -> Table:
    """The detections, then trivial baselines, in per cent; figures that are not above the best of these are marked."""
    printed = _right_aligned("", *(figure_title(metric, name) for metric, name, _ in result.figures()))
    printed.columns[0].no_wrap = True
    below = {title for title, verdict in result.verdicts().items() if not verdict.is_above}
    for row, own in {"these detections": result, **result.baselines}.items():
        marks = [MARK if own is result and figure_title(m, name) in below else "" for m, name, _ in own.figures()]
        values = [_per_cent({"": value}, "") for _, _, value in own.figures()]
        printed.add_row(row, *(value + mark for value, mark in zip(values, marks, strict=True)))
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
            mean.setdefault(MEAN_ROW, {})[metric] = scores.mean
        else:
            others.append({name: {metric: value} for name, value in scores.items() if not isinstance(value, Mapping)})
    return [section for section in (by_class, mean, *others) if section]


def _per_cent(row: Mapping[str, float | None], metric: str) -> str:
    """A fraction in per cent; counts as they are."""
    if metric not in row:
        return ""
    value = row[metric]
    return "-" if value is None else f"{value}" if isinstance(value, int) else f"{100 * value:.1f}"
