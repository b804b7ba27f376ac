"""Figures as readers want them: short, aligned, and honest about what is unknown."""

from __future__ import annotations

import math

UNKNOWN = "–"  # noqa: RUF001 - the dash printed where a figure is not known


def known(value: float | None) -> bool:
    """Whether there is a finite figure to show."""
    return value is not None and math.isfinite(value)


def percent(value: float | None) -> str:
    """A fraction as per cent with one decimal, without the sign: 0.4132 -> 41.3."""
    return f"{100 * value:.1f}" if value is not None and math.isfinite(value) else UNKNOWN


def points(value: float | None, baseline: float | None) -> str:
    """The difference of two fractions in percentage points, with its sign."""
    if value is None or baseline is None or not (math.isfinite(value) and math.isfinite(baseline)):
        return UNKNOWN
    difference = round(100 * (value - baseline), 1)
    return f"{difference:+.1f}".replace("-", "−") if difference else "±0.0"  # noqa: RUF001 - a true minus sign


def number(value: float | None) -> str:
    """A plain figure with three significant digits, thousands grouped."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if abs(value) >= 1000:
        return f"{value:,.0f}".replace(",", " ")
    return f"{value:.3g}"


def whole(value: float | None) -> str:
    """A count, thousands grouped."""
    return f"{value:,.0f}".replace(",", " ") if value is not None and math.isfinite(value) else UNKNOWN


def duration(seconds: float | None) -> str:
    """Seconds as people say them: 42 s, 12 min 3 s, 5 h 07 min."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    total = round(seconds)
    if total < 60:
        return f"{seconds:.3g} s"
    if total < 3600:
        return f"{total // 60} min {total % 60} s"
    return f"{total // 3600} h {total % 3600 // 60:02d} min"


def plural(count: int, noun: str) -> str:
    """A count with its noun: 1 photo, 2 photos, 3 classes."""
    ending = "" if count == 1 else "es" if noun[-1] in "sx" else "s"
    return f"{whole(count)} {noun}{ending}"


def spoken(count: int) -> str:
    """A count as a sentence begins with it: Two, Three, ... and figures from eleven on."""
    words = ("No", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine", "Ten")
    return words[count] if count < len(words) else whole(count)


def listed(words: tuple[str, ...], limit: int = 20) -> str:
    """Words as a phrase: a, b and c; the tail of a long list is counted."""
    if len(words) > limit:
        return ", ".join(words[:limit]) + f" and {len(words) - limit} more"
    *most, last = words or ("",)
    return f"{', '.join(most)} and {last}" if most else last
