"""Bootstrap over photos: confidence intervals of AP, CorLoc and recall, and paired comparison of two detectors.

Bradley Efron and Robert Tibshirani: An Introduction to the Bootstrap, 1993. A resample draws as many photos as there
are, with replacement; a photo that is drawn twice counts twice, with its detections and its objects. Detections are
matched once, because matching stays within a photo; a resample only changes how often each of them counts.

AP takes the best precision beyond each recall, which makes it higher on fewer different photos: resamples are above
the figure on average. An interval is therefore the spread of the resamples around their mean, moved to the figure.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from tag2box.annotations import Detections, Truth
from tag2box.metrics import error_analysis, voc_ap

RESAMPLES = 1000
LEVEL = 0.95
"""Share of the resamples within an interval."""
_BLOCK = 250  # resamples computed at a time: bounds the memory

FigurePath = tuple[str, ...]
"""Place of a figure in the JSON of an evaluation: ("voc07", "mAP"), ("breakdown", "by_count", "1 object", "ap")."""
FloatArray = Float[np.ndarray, " S"]
Resampled = dict[FigurePath, FloatArray]
"""A figure of the photos as they are, followed by that of each resample; NaN where it is undefined."""

RESAMPLED_METRICS = ("voc07", "voc12", "corloc", "breakdown")


def photo_weights(photos: int, *, resamples: int = RESAMPLES, seed: int = 0) -> Int[np.ndarray, "S N"]:
    """How often each photo counts: once in the first row, then as often as it was drawn in each resample.

    >>> photo_weights(3, resamples=2).sum(axis=1).tolist()
    [3, 3, 3]
    """
    drawn = np.random.default_rng(seed).integers(0, max(photos, 1), size=(resamples, photos))
    rows = np.repeat(np.arange(resamples), photos)
    counts = voc_ap.table_counts(rows, drawn.reshape(-1), (resamples, photos))
    return np.concatenate([np.ones((1, photos), dtype=np.int64), counts])


# ---------------------------------------------------------------- figures under weights


def weighted_ap(
    ranked: voc_ap.RankedClass, weights: Int[np.ndarray, "S N"], *, eleven_points: bool = False
) -> Float[np.ndarray, " S"]:
    """AP of a class if the photos count as often as each row of ``weights`` says; NaN without objects.

    The precision-recall curve only rises at true positives, so that the curve at these is all that AP depends on: with
    w the weights, r_t the sum of w over the true positives up to t, and f_t that over the false positives ranked above
    t, precision is r_t / (r_t + f_t), and recall r_t / (sum of w over all objects).
    """
    blocks = (weights[at : at + _BLOCK] for at in range(0, len(weights), _BLOCK))
    return np.concatenate([np.zeros(0), *(_weighted_ap(ranked, block, eleven_points) for block in blocks)])


def _weighted_ap(
    ranked: voc_ap.RankedClass, weights: Int[np.ndarray, "S N"], eleven_points: bool
) -> Float[np.ndarray, " S"]:
    total = weights @ ranked.positives  # (S,)
    true = np.flatnonzero(ranked.is_true)
    if not len(true):
        return np.where(total > 0, 0.0, np.nan)
    by_photo = np.ascontiguousarray(weights.T)  # (N, S)
    gains = by_photo[ranked.photos[true]]  # (T, S)
    right, wrong = gains.cumsum(axis=0), _false_before(ranked, true, by_photo)
    precision = right / np.maximum(right + wrong, 1)
    best_beyond = np.maximum.accumulate(precision[::-1])[::-1]
    recall = right / np.maximum(total, 1)
    if eleven_points:
        padded = np.concatenate([best_beyond, np.zeros((1, len(weights)))])
        first = [(recall < 0.1 * level).sum(axis=0) for level in range(11)]  # the first point at or beyond the recall
        value = np.mean([padded[at, np.arange(len(weights))] for at in first], axis=0)
    else:
        value = (gains * best_beyond).sum(axis=0) / np.maximum(total, 1)
    return np.where(total > 0, value, np.nan)


def _false_before(
    ranked: voc_ap.RankedClass, true: Int[np.ndarray, " T"], by_photo: Int[np.ndarray, "N S"]
) -> Int[np.ndarray, "T S"]:
    """Sum of the weights of the false positives ranked above each true positive."""
    false = np.flatnonzero(ranked.is_false[: true[-1]])
    out = np.zeros((len(true), by_photo.shape[1]), dtype=by_photo.dtype)
    if len(false):
        following, starts = np.unique(np.searchsorted(true, false), return_index=True)
        out[following] = np.add.reduceat(by_photo[ranked.photos[false]], starts, axis=0)
    return out.cumsum(axis=0)


def weighted_shares(shares: voc_ap.PhotoShares, weights: Int[np.ndarray, "S N"]) -> Float[np.ndarray, "S C"]:
    """Share of right ones of each class under weights; NaN for a class without cases."""
    right, total = weights @ shares.right, weights @ shares.total
    return np.where(total > 0, right / np.maximum(total, 1), np.nan)


def class_means(values: Float[np.ndarray, "S C"]) -> Float[np.ndarray, " S"]:
    """Mean over the classes that have a value; NaN without any."""
    known = ~np.isnan(values)
    sums = np.where(known, values, 0.0).sum(axis=1)
    return np.where(known.any(axis=1), sums / np.maximum(known.sum(axis=1), 1), np.nan)


def resampled_figures(
    truth: Truth, detections: Mapping[str, Detections], metrics: Sequence[str], weights: Int[np.ndarray, "S N"]
) -> Resampled:
    """Every figure of some metrics under each row of weights; metrics that cannot be resampled are left out.

    Args:
        metrics: of ``RESAMPLED_METRICS``, at any IoU: ``voc07``, ``corloc@0.3``.
    """
    out: Resampled = {}
    for name in metrics:
        metric, _, level = name.partition("@")
        min_iou = float(level) if level else voc_ap.MATCH_IOU
        if metric == "breakdown":
            groups = error_analysis.object_groups(truth, detections, min_iou=min_iou)
            out |= {(name, *path): values for path, values in _of_groups(groups, weights)}
        elif metric in RESAMPLED_METRICS:
            values = _of_classes(metric, truth, detections, min_iou=min_iou, weights=weights)
            out[name, "mean" if metric == "corloc" else "mAP"] = class_means(values)
            out |= {(name, "per_class", c): values[:, at] for at, c in enumerate(truth.classes)}
    return out


def _of_classes(
    metric: str,
    truth: Truth,
    detections: Mapping[str, Detections],
    *,
    min_iou: float,
    weights: Int[np.ndarray, "S N"],
) -> Float[np.ndarray, "S C"]:
    if metric == "corloc":
        return weighted_shares(voc_ap.localised(truth, detections, min_iou=min_iou), weights)
    matches = voc_ap.match_set(truth, detections, min_iou=min_iou)
    ranked = voc_ap.ranked_classes(matches, matches.objects.counts)
    return _columns(ranked, weights, eleven_points=metric == "voc07")


def _columns(
    ranked: Sequence[voc_ap.RankedClass], weights: Int[np.ndarray, "S N"], *, eleven_points: bool = False
) -> Float[np.ndarray, "S C"]:
    columns = [weighted_ap(own, weights, eleven_points=eleven_points) for own in ranked]
    return np.stack(columns, axis=1) if columns else np.zeros((len(weights), 0))


def _of_groups(
    groups: Mapping[tuple[str, str], error_analysis.ObjectGroup], weights: Int[np.ndarray, "S N"]
) -> Iterator[tuple[FigurePath, Float[np.ndarray, " S"]]]:
    for (kind, name), group in groups.items():
        if kind and not group.recalled.total.any():
            continue
        values = (
            _columns(group.ranked, weights),
            weighted_shares(group.located, weights),
            weighted_shares(group.recalled, weights),
        )
        for figure, own in zip(error_analysis.BREAKDOWN_FIGURES, values, strict=True):
            yield ((kind, name, figure) if kind else (figure,)), class_means(own)


# ---------------------------------------------------------------- intervals and differences


@dataclass(frozen=True, slots=True)
class FigureInterval:
    """Ends of the interval that contains ``LEVEL`` of the resampled figures."""

    low: float
    high: float

    def words(self) -> str:
        """In per cent: 19.8 to 25.3."""
        return f"{100 * self.low:.1f} to {100 * self.high:.1f}"


@dataclass(frozen=True, slots=True)
class FigureDifference:
    """A figure of one detector minus that of another, on the same photos."""

    value: float
    low: float
    high: float
    share_above: float  # of the resamples in which the first is above the second; equal ones count half

    @property
    def is_significant(self) -> bool:
        """Whether the interval is on one side of zero."""
        return self.low > 0 or self.high < 0

    def to_json(self) -> dict[str, object]:
        """The comparison as JSON values."""
        return {**asdict(self), "is_significant": self.is_significant}


def centred(values: Float[np.ndarray, " S"]) -> Float[np.ndarray, " K"]:
    """The defined resamples of a figure, moved so that their mean is the figure itself, which is the first value."""
    drawn: FloatArray = values[1:][~np.isnan(values[1:])]
    shift: float = values[0] - drawn.mean() if len(drawn) else 0.0
    return drawn + shift


def interval(values: Float[np.ndarray, " S"]) -> FigureInterval | None:
    """Interval of a figure from its resamples; None if it is undefined, or without resamples."""
    drawn = centred(values)
    if np.isnan(values[0]) or not len(drawn):
        return None
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return FigureInterval(float(low), float(high))


def intervals(resampled: Resampled) -> dict[FigurePath, FigureInterval]:
    """The intervals of all figures that are defined, within 0 and 1."""
    found = {path: interval(values) for path, values in resampled.items()}
    return {
        path: FigureInterval(max(own.low, 0.0), min(own.high, 1.0)) for path, own in found.items() if own is not None
    }


def difference(first: Float[np.ndarray, " S"], second: Float[np.ndarray, " S"]) -> FigureDifference | None:
    """Two detectors' figures compared resample by resample, under the same weights; None if undefined."""
    gaps = first - second
    ends, drawn = interval(gaps), centred(gaps)
    if ends is None:
        return None
    above = float(np.mean(drawn > 0) + np.mean(drawn == 0) / 2)
    return FigureDifference(float(gaps[0]), ends.low, ends.high, above)


def differences(first: Resampled, second: Resampled) -> dict[FigurePath, FigureDifference]:
    """The differences of all figures that both have and that are defined."""
    found = {path: difference(own, second[path]) for path, own in first.items() if path in second}
    return {path: own for path, own in found.items() if own is not None}


def nested(values: Mapping[FigurePath, object]) -> voc_ap.JsonNumbers:
    """Values by path as nested dicts, as the numbers of an evaluation are.

    >>> nested({("voc07", "mAP"): 1, ("voc07", "per_class", "cat"): 2})
    {'voc07': {'mAP': 1, 'per_class': {'cat': 2}}}
    """
    out: dict[str, Any] = {}
    for path, value in values.items():
        place = out
        for key in path[:-1]:
            place = place.setdefault(key, {})
        place[path[-1]] = value
    return out
