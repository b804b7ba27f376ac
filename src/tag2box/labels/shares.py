"""Shares and their confidence: what a sample of reviewed labels says about a precision or a recall."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

CONFIDENCE = 0.95
_MOST_TRIALS = 1 << 20
_BISECTIONS = 60


class Interval(NamedTuple):
    """A confidence interval."""

    low: float
    high: float


def binomial_interval(successes: float, trials: float, confidence: float = CONFIDENCE) -> Interval:
    """The interval of Clopper and Pearson (1934) for a share: its coverage is at least ``confidence`` for every share.

    Wilson's and Jeffreys' intervals are narrower, and cover less for shares near 0 or 1 and few trials. Counts need not
    be whole numbers (``effective_trials``). Without trials, the share can be anything.
    """
    if trials <= 0:
        return Interval(0.0, 1.0)
    tail = (1 - confidence) / 2
    failures = max(trials - successes, 0.0)
    low = 0.0 if successes <= 0 else _beta_quantile(tail, successes, failures + 1)
    high = 1.0 if failures <= 0 else _beta_quantile(1 - tail, successes + 1, failures)
    return Interval(low, high)


def _beta_quantile(share: float, a: float, b: float) -> float:
    """The x at which the beta distribution's cumulative probability is ``share``, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if beta_cumulative(middle, a, b) < share else (low, middle)
    return (low + high) / 2


def beta_cumulative(x: float, a: float, b: float) -> float:
    """The regularized incomplete beta function I_x(a, b), by its continued fraction (DLMF 8.17.22)."""
    if not 0 < x < 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # where the fraction converges slowly
        return 1 - beta_cumulative(1 - x, b, a)
    factor = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    fraction, upper, lower = 1.0, 1.0, 0.0  # Lentz's evaluation of 1 + d1 / (1 + d2 / (1 + ...))
    for step in range(1, 5000):
        m = step // 2
        if step % 2:
            term = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            term = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        lower, upper = 1 / _nonzero(1 + term * lower), _nonzero(1 + term / upper)
        fraction *= upper * lower
        if abs(upper * lower - 1) < 1e-14:
            break
    return min(1.0, math.exp(factor) / (a * fraction))


def _nonzero(value: float) -> float:
    return value if abs(value) > 1e-300 else 1e-300


def effective_trials(right: Sequence[int], total: Sequence[int]) -> float:
    """The number of independent trials that labels reviewed photo by photo are worth.

    Labels of one photo tend to be right or wrong together. The variance of the share is estimated from the photos (the
    ratio estimator of cluster sampling); the number of trials is that of a binomial share with the same variance, at
    least the number of photos and at most that of labels. If all labels are right, or all wrong, the variance cannot be
    estimated, and every photo counts as one trial.

    Args:
        right, total: labels of each photo.
    """
    groups = [(r, n) for r, n in zip(right, total, strict=True) if n]
    labels, photos = sum(n for _, n in groups), len(groups)
    if photos < 2:
        return float(photos)
    share = sum(r for r, _ in groups) / labels
    if share in {0.0, 1.0}:
        return float(photos)
    variance = photos / (photos - 1) * sum((r - share * n) ** 2 for r, n in groups) / labels**2
    wanted = share * (1 - share) / variance if variance else labels
    return min(max(wanted, float(photos)), float(labels))


def trials_until(share: float, is_enough: Callable[[Interval], bool]) -> int | None:
    """The smallest number of trials whose interval is enough if the share stays what it is; None if none is."""

    def holds(trials: int) -> bool:
        return is_enough(binomial_interval(share * trials, trials))

    high = 1
    while not holds(high):
        high *= 2
        if high > _MOST_TRIALS:
            return None
    low = high // 2  # does not hold, or is 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


@dataclass(frozen=True, slots=True)
class Estimate:
    """A share, from reviewed labels or objects."""

    count: int = 0
    hits: int = 0
    trials: float = 0.0  # independent ones that the count is worth (``effective_trials``)

    @property
    def share(self) -> float | None:
        """The share; None without any."""
        return self.hits / self.count if self.count else None

    @property
    def interval(self) -> Interval:
        """Its 95 % interval."""
        return binomial_interval((self.share or 0.0) * self.trials, self.trials)
