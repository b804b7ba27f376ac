"""How time and memory grow: exponents fitted to the curves of ``make bench``, each with a verdict.

An exponent is the slope of the logarithm of a value over that of a size, by least squares: 1 is linear, 2 quadratic.
Fixed costs at small sizes lower it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

LINEAR = 1.2
"""The largest exponent that counts as linear."""
PAIRS = {("contrastive loss", "exemplars"), ("criterion", "proposals"), ("criterion", "images")}
"""Curves that are quadratic in the end: the contrastive loss compares all pairs of exemplars."""
_SMALLEST = 1e-9
_NAMES = {"WSCL": "contrastive loss"}

Figures = dict[str, Any]


@dataclass(frozen=True)
class Growth:
    """A curve: what grows with what, from where to where, and the exponents."""

    what: str
    against: str
    least: float
    most: float
    time: float
    memory: float | None

    @property
    def verdict(self) -> str:
        """Whether the growth is linear at most, or as expected."""
        if max(self.time, self.memory or 0.0) <= LINEAR:
            return f"<= {LINEAR:g}"
        is_expected = (self.what, self.against) in PAIRS and (self.memory or 0.0) <= LINEAR
        return "quadratic: pairs of exemplars" if is_expected else "**faster than linear**"


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """b of the least-squares fit log value = a + b log size; NaN for less than two sizes."""
    if len(set(sizes)) < 2:
        return float("nan")
    x, y = (np.log(np.maximum(np.asarray(each, float), _SMALLEST)) for each in (sizes, values))
    return round(float(np.polyfit(x, y, 1)[0]), 3)


def growths(figures: dict[str, Figures]) -> Iterator[Growth]:
    """The curves of the criterion and of the kernels."""
    points = [("criterion", row["against"], row[row["against"]], row) for row in _curves(figures, "criterion")]
    points += [
        (_NAMES.get(row["kernel"], row["kernel"]), row["against"], row["x"], row) for row in _curves(figures, "kernels")
    ]
    for what, against in dict.fromkeys((what, against) for what, against, _, _ in points):
        own = [(size, row) for name, variable, size, row in points if (name, variable) == (what, against)]
        sizes, rows = zip(*own, strict=True)
        memory = exponent(sizes, [row["peak_mb"] for row in rows]) if all("peak_mb" in row for row in rows) else None
        time = exponent(sizes, [row["cpu"]["median"] for row in rows])
        if len(set(sizes)) > 1:
            yield Growth(what, against, min(sizes), max(sizes), time, memory)


def _curves(figures: dict[str, Figures], part: str) -> list[dict[str, Any]]:
    return list(figures.get(part, {}).get("curves", ()))


@dataclass(frozen=True)
class RowsFit:
    """The criterion's time t over the number r of contrastive rows: t = linear x r + quadratic x r^2."""

    linear: float
    quadratic: float
    largest_error: float  # relative

    @property
    def equal_at(self) -> float:
        """The number of rows at which both parts take the same time."""
        return self.linear / self.quadratic if self.quadratic > 0 else float("inf")


def fit_rows(rows: Sequence[float], seconds: Sequence[float]) -> RowsFit:
    """The least squares fit of relative errors: of linear r / t + quadratic r^2 / t to 1."""
    r, t = np.asarray(rows, float), np.asarray(seconds, float)
    relative = np.stack([r, r**2], axis=1) / t[:, None]
    linear, quadratic = np.linalg.lstsq(relative, np.ones(len(t)), rcond=None)[0].tolist()
    error = np.abs(relative @ np.array([linear, quadratic]) - 1).max(initial=0.0)
    return RowsFit(linear, quadratic, float(error))


def growth_lines(figures: dict[str, Figures]) -> list[str]:
    """A table of the curves, and the fit of the criterion's time."""
    found = list(growths(figures))
    if not found:
        return []
    lines = ["| | from - to | exponent of CPU time | of peak memory | verdict |", "|---|---|---|---|---|"]
    for one in found:
        memory = "" if one.memory is None else f"{one.memory:.2f}"
        span = f"{one.least:,g} - {one.most:,g}"
        lines.append(f"| {one.what}, against {one.against} | {span} | {one.time:.2f} | {memory} | {one.verdict} |")
    curves = _curves(figures, "criterion")
    if len({row["rows"] for row in curves}) > 1:
        rows, seconds = [row["rows"] for row in curves], [row["cpu"]["median"] for row in curves]
        fit = fit_rows(rows, seconds)
        lines += [
            "",
            f"The criterion's CPU seconds over the number r of contrastive rows, all {len(curves)} points: exponent "
            f"{exponent(rows, seconds):.2f}; {fit.linear:.2g} r + {fit.quadratic:.2g} r^2, within "
            f"{100 * fit.largest_error:.0f} %; the second term is the larger one from {fit.equal_at:,.0f} rows on.",
        ]
    return lines
