"""Scores turned into the probability that a label is right, fitted to reviewed labels. ``labels.trust`` uses it.

V is the number of reviewed labels: each has a score, and was right or not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tag2box.labels.shares import binomial_interval

EDGE = 1e-6
"""Scores and probabilities nearer to 0 or 1 are moved here before a logarithm is taken."""
_RIDGE = 1e-3  # of beta calibration: keeps slopes finite if a score separates right from wrong
_NEWTON_STEPS = 60
_BISECTIONS = 60

# ---------------------------------------------------------------- mappings of scores

Kind = Literal["raw", "constant", "beta", "isotonic"]
CALIBRATION_KINDS: tuple[Kind, ...] = ("raw", "constant", "beta", "isotonic")
"""Kinds of calibration, the simplest first."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """A non-decreasing mapping from scores to the probability that a label is right.

    Below the lowest reviewed score nothing is known: there, the probability falls to zero in proportion to the score.
    """

    kind: Kind = "raw"
    knots: tuple[tuple[float, float], ...] = ()  # score and probability; linear between. One knot: a constant
    slopes: tuple[float, float, float] = (1.0, 1.0, 0.0)  # beta: of log(s) and of -log(1 - s); the intercept
    lowest: float = 0.0  # reviewed score
    shift: float = 0.0  # added to the logit of the probability

    def __post_init__(self) -> None:
        numbers = (*self.slopes, self.lowest, self.shift, *(value for knot in self.knots for value in knot))
        columns = (list(column) for column in zip(*self.knots, strict=True))
        if not all(map(math.isfinite, numbers)) or any(column != sorted(column) for column in columns):
            raise ValueError("expected finite numbers, and knots in ascending order")
        if not self.knots and self.kind in {"constant", "isotonic"}:
            raise ValueError(f"{self.kind}: expected at least one knot")

    def __call__(self, scores: Float[Tensor, " V"]) -> Float[Tensor, " V"]:
        """The probabilities of some scores."""
        given = scores.double().clamp(0.0, 1.0)
        found = self._inside(given.clamp(min=self.lowest))
        if self.shift:
            found = torch.sigmoid(torch.logit(found, eps=EDGE) + self.shift)
        return torch.where(given < self.lowest, found * given / max(self.lowest, EDGE), found)

    def one(self, score: float) -> float:
        """The probability of one score."""
        return float(self(torch.tensor([score], dtype=torch.float64))[0])

    def _inside(self, scores: Float[Tensor, " V"]) -> Float[Tensor, " V"]:
        if self.kind == "raw":
            return scores
        if self.kind == "beta":
            a, b, c = self.slopes
            first, second = _beta_features(scores)
            return torch.sigmoid(a * first + b * second + c)
        x, y = (np.array(column) for column in zip(*self.knots, strict=True))
        return torch.from_numpy(np.interp(scores.numpy(), x, y))


def fit_calibration(kind: Kind, scores: Float[Tensor, " V"], right: Bool[Tensor, " V"]) -> Calibration:
    """Fit a calibration of some kind; without labels, scores stay as they are."""
    if kind == "raw" or not len(scores):
        return Calibration()
    given, lowest = scores.double().clamp(0.0, 1.0), float(scores.min().clamp(0.0, 1.0))
    if kind == "beta":
        return Calibration("beta", slopes=fit_beta(given, right), lowest=lowest)
    if kind == "constant":
        share = (int(right.sum()) + 0.5) / (len(right) + 1)  # Krichevsky and Trofimov: never 0 or 1
        return Calibration("constant", ((lowest, share),), lowest=lowest)
    return Calibration("isotonic", _isotonic_knots(given, right), lowest=lowest)


def _isotonic_knots(scores: Float[Tensor, " V"], right: Bool[Tensor, " V"]) -> tuple[tuple[float, float], ...]:
    """Both ends of every block of equal probability; a share of 0 or 1 of V labels is not certain, so it is bounded."""
    distinct, where, counts = scores.unique(return_inverse=True, return_counts=True)
    means = torch.zeros(len(distinct), dtype=torch.float64).index_add_(0, where, right.double()) / counts
    margin = 0.5 / (len(scores) + 1)
    fitted = isotonic_regression(means.tolist(), counts.tolist())
    knots: list[tuple[float, float]] = []
    for at, (score, value) in enumerate(zip(distinct.tolist(), fitted, strict=True)):
        ends = at in {0, len(fitted) - 1} or value != fitted[at - 1] or value != fitted[at + 1]
        if ends:
            knots.append((score, min(max(value, margin), 1 - margin)))
    return tuple(knots)


def isotonic_regression(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The non-decreasing values nearest to the given ones in weighted squares, by pooling adjacent violators."""
    blocks: list[tuple[float, float, int]] = []  # mean, weight, length
    for value, weight in zip(values, weights, strict=True):
        mean, total, length = float(value), float(weight), 1
        while blocks and blocks[-1][0] >= mean:
            before, own, count = blocks.pop()
            mean, total, length = (before * own + mean * total) / (own + total), own + total, length + count
        blocks.append((mean, total, length))
    return [mean for mean, _, length in blocks for _ in range(length)]


# ---------------------------------------------------------------- beta calibration


def fit_beta(scores: Float[Tensor, " V"], right: Bool[Tensor, " V"]) -> tuple[float, float, float]:
    """Beta calibration (Kull et al. 2017, eq. 6): logit p = a log(s) - b log(1 - s) + c with a, b >= 0.

    Maximum likelihood with Platt's targets, so that few labels never make anything certain, and a slight ridge. Each
    slope is free or zero: of the four fits by Newton's method, the most likely one with no negative slope is the
    optimum under the constraints, because the problem is convex.
    """
    positive, negative = int(right.sum()), int((~right).sum())
    targets = torch.where(right, (positive + 1) / (positive + 2), 1 / (negative + 2)).double()
    columns = torch.stack([*_beta_features(scores), torch.ones_like(scores, dtype=torch.float64)], dim=1)
    best, least = (0.0, 0.0, 0.0), math.inf
    for free in ((0, 1, 2), (0, 2), (1, 2), (2,)):
        found = _logistic(columns[:, list(free)], targets)
        weights = torch.zeros(3, dtype=torch.float64)
        weights[list(free)] = found
        loss = logistic_loss(columns, targets, weights)
        if float(weights[:2].min()) >= 0 and loss < least - 1e-12:
            best, least = (float(weights[0]), float(weights[1]), float(weights[2])), loss
    return best


def _beta_features(scores: Float[Tensor, " V"]) -> tuple[Float[Tensor, " V"], Float[Tensor, " V"]]:
    inside = scores.double().clamp(EDGE, 1 - EDGE)
    return inside.log(), -torch.log1p(-inside)


def logistic_loss(columns: Float[Tensor, "V f"], targets: Float[Tensor, " V"], weights: Float[Tensor, " f"]) -> float:
    """Negative log likelihood of logistic regression, with the ridge of beta calibration."""
    logits = columns @ weights
    likelihood = torch.nn.functional.binary_cross_entropy_with_logits(logits, targets, reduction="sum")
    return float(likelihood + _RIDGE / 2 * (weights**2).sum())


def _logistic(columns: Float[Tensor, "V f"], targets: Float[Tensor, " V"]) -> Float[Tensor, " f"]:
    """Logistic regression by Newton's method; a step that does not lower the loss is halved."""
    weights = torch.zeros(columns.shape[1], dtype=torch.float64)
    loss = logistic_loss(columns, targets, weights)
    ridge = _RIDGE * torch.eye(len(weights), dtype=torch.float64)
    for _ in range(_NEWTON_STEPS):
        probs = torch.sigmoid(columns @ weights)
        gradient = columns.T @ (probs - targets) + _RIDGE * weights
        curvature = columns.T @ (columns * (probs * (1 - probs))[:, None]) + ridge
        step = torch.linalg.solve(curvature, gradient)
        size = 1.0
        while (reached := logistic_loss(columns, targets, weights - size * step)) > loss and size > 1e-9:
            size /= 2
        if loss - reached < 1e-12:
            break
        weights, loss = weights - size * step, reached
    return weights


# ---------------------------------------------------------------- which mapping


@dataclass(frozen=True, slots=True)
class CalibrationChoice:
    """A calibration, and the losses on held-out labels by which it was chosen; empty if there was nothing to choose."""

    calibration: Calibration
    losses: Mapping[Kind, float] = field(default_factory=dict)


def choose_calibration(
    scores: Float[Tensor, " V"], right: Bool[Tensor, " V"], *, folds: int = 5, repeats: int = 4, seed: int = 0
) -> CalibrationChoice:
    """The kind of calibration with the lowest Brier score on held-out labels, fitted to all of them.

    Labels are divided into folds at random, right and wrong ones evenly, several times. Of equal scores, the simplest
    kind wins. With fewer than two right or two wrong labels per fold nothing can be compared: a constant.
    """
    if not len(scores):
        return CalibrationChoice(Calibration())
    if min(int(right.sum()), int((~right).sum())) < folds * 2:
        return CalibrationChoice(fit_calibration("constant", scores, right))
    generator = torch.Generator().manual_seed(seed)
    sums = dict.fromkeys(CALIBRATION_KINDS, 0.0)
    for _ in range(repeats):
        fold = _folds(right, folds, generator)
        for number in range(folds):
            inside, outside = fold != number, fold == number
            for kind in CALIBRATION_KINDS:
                probs = fit_calibration(kind, scores[inside], right[inside])(scores[outside])
                sums[kind] += float(((probs - right[outside].double()) ** 2).sum())
    losses = {kind: total / (repeats * len(scores)) for kind, total in sums.items()}
    best = min(CALIBRATION_KINDS, key=lambda kind: round(losses[kind], 6))
    return CalibrationChoice(fit_calibration(best, scores, right), losses)


def _folds(right: Bool[Tensor, " V"], folds: int, generator: torch.Generator) -> Int[Tensor, " V"]:
    """A fold for each label, at random; right and wrong labels are divided evenly."""
    order = torch.randperm(len(right), generator=generator)
    order = order[right[order].long().argsort(stable=True)]
    fold = torch.empty(len(right), dtype=torch.long)
    fold[order] = torch.arange(len(right)) % folds
    return fold


def shifted(calibration: Calibration, scores: Float[Tensor, " V"], mean: float) -> Calibration:
    """The calibration with a constant added to its logits so that the mean probability of some scores is ``mean``."""
    if not len(scores):
        return calibration
    low, high = -20.0, 20.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        found = float(replace(calibration, shift=middle)(scores).mean())
        low, high = (middle, high) if found < mean else (low, middle)
    return replace(calibration, shift=(low + high) / 2)


# ---------------------------------------------------------------- quality


@dataclass(frozen=True, slots=True)
class ReliabilityBin:
    """Labels of about equal probability."""

    count: int
    probability: float  # mean
    precision: float  # share that is right


def reliability(probs: Float[Tensor, " V"], right: Bool[Tensor, " V"], bins: int = 10) -> tuple[ReliabilityBin, ...]:
    """Bins of equal mass, by probability; labels of equal probability stay in one bin, so that their order is nothing.

    The expected calibration error (``calibration_error``) is the mean distance of precision and probability over them.
    """
    order = probs.argsort(stable=True).tolist()
    values, hits = probs.double().tolist(), right.tolist()
    groups: list[list[int]] = []
    for place, row in enumerate(order):
        is_new = not groups or place * bins // len(order) > (place - len(groups[-1])) * bins // len(order)
        if groups and (not is_new or values[row] == values[groups[-1][-1]]):
            groups[-1].append(row)
        else:
            groups.append([row])
    return tuple(
        ReliabilityBin(
            len(rows), sum(values[row] for row in rows) / len(rows), sum(hits[row] for row in rows) / len(rows)
        )
        for rows in groups
    )


def calibration_error(probs: Float[Tensor, " V"], right: Bool[Tensor, " V"], bins: int = 10) -> float:
    """Expected calibration error: mean distance of precision and probability over bins of equal mass."""
    if not len(probs):
        return 0.0
    return sum(own.count * abs(own.precision - own.probability) for own in reliability(probs, right, bins)) / len(probs)


# ---------------------------------------------------------------- thresholds


class PrecisionPoint(NamedTuple):
    """The labels of at least a score."""

    score: float
    labels: int
    right: int

    @property
    def precision(self) -> float:
        """Share of them that is right."""
        return self.right / self.labels


def precision_curve(scores: Float[Tensor, " V"], right: Bool[Tensor, " V"]) -> tuple[PrecisionPoint, ...]:
    """The precision of the labels above each score that occurs, the highest score first."""
    order = scores.argsort(descending=True, stable=True)
    values, hits = scores[order].double().tolist(), right[order].long().cumsum(0).tolist()
    return tuple(
        PrecisionPoint(value, at + 1, hits[at])
        for at, value in enumerate(values)
        if at + 1 == len(values) or values[at + 1] != value
    )


def precision_threshold(
    scores: Float[Tensor, " V"],
    right: Bool[Tensor, " V"],
    wanted: float,
    *,
    least: int = 10,
    by: Literal["estimate", "lower bound"] = "estimate",
) -> float | None:
    """The smallest score above which the precision reaches the wanted one; None if it is not reached.

    Args:
        least: reviewed labels above the threshold; fewer say nothing.
        by: whether the share itself, or the lower end of its 95 % interval has to reach it.
    """
    reached = None
    for point in precision_curve(scores, right):
        low = point.precision if by == "estimate" else binomial_interval(point.right, point.labels).low
        if point.labels >= least and low >= wanted:
            reached = point.score
    return reached


def expected_threshold(scores: Float[Tensor, " L"], probs: Float[Tensor, " L"], wanted: float) -> float | None:
    """The smallest score above which the mean probability reaches the wanted one; None if it does not."""
    order = scores.argsort(descending=True, stable=True)
    values, sums = scores[order].double().tolist(), probs[order].double().cumsum(0).tolist()
    reached = None
    for at, value in enumerate(values):
        is_last = at + 1 == len(values) or values[at + 1] != value
        if is_last and sums[at] / (at + 1) >= wanted:
            reached = value
    return reached
