"""Plain values of a page: numbers as text, tables, headline facts. Nothing here draws."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tag2box.metrics.evaluation import MARK

UNKNOWN = "–"  # noqa: RUF001 - the dash that stands for a missing value
BELOW = f"{MARK} not above the best trivial box"
"""What the mark behind a figure means."""


@dataclass(frozen=True, slots=True)
class TableRow:
    """A row: its name and one cell per column."""

    name: str
    cells: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """Column heads (without the first, empty one; a head may have two lines) and rows."""

    caption: str
    heads: tuple[str, ...]
    rows: tuple[TableRow, ...]


@dataclass(frozen=True, slots=True)
class Fact:
    """A figure at the head of a page."""

    name: str
    value: str
    unit: str
    note: str


# ---------------------------------------------------------------- numbers as text


def known(value: float | None) -> bool:
    """Whether a value is present and finite."""
    return value is not None and math.isfinite(value)


def percent(value: float | None) -> str:
    """A fraction as per cent with one decimal, without the sign: 0.4132 -> 41.3."""
    return f"{100 * value:.1f}" if value is not None and math.isfinite(value) else UNKNOWN


def marked(value: float | None, bar: float | None) -> str:
    """A fraction as per cent, with a mark if it is not above the best trivial box: 41.3*."""
    is_below = value is not None and bar is not None and value <= bar
    return f"{percent(value)}{MARK if is_below else ''}"


def points(value: float | None, baseline: float | None) -> str:
    """The signed difference of two fractions in percentage points."""
    if value is None or baseline is None or not (math.isfinite(value) and math.isfinite(baseline)):
        return UNKNOWN
    difference = round(100 * (value - baseline), 1)
    return f"{difference:+.1f}".replace("-", "−") if difference else "±0.0"  # noqa: RUF001 - a true minus sign


def format_number(value: float | None) -> str:
    """A number with three significant digits, thousands grouped."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if abs(value) >= 1000:
        return f"{value:,.0f}".replace(",", " ")
    return f"{value:.3g}"


def whole(value: float | None) -> str:
    """A count, thousands grouped."""
    return f"{value:,.0f}".replace(",", " ") if value is not None and math.isfinite(value) else UNKNOWN


def duration(seconds: float | None) -> str:
    """Seconds in readable units: 42 s, 12 min 3 s, 5 h 07 min."""
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


def count_word(count: int) -> str:
    """A count that starts a sentence: Two, Three, ...; digits from eleven on."""
    words = ("No", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine", "Ten")
    return words[count] if count < len(words) else whole(count)


def listed(words: Sequence[str], limit: int = 20) -> str:
    """Words as a phrase: a, b and c; words beyond ``limit`` are counted."""
    if len(words) > limit:
        return ", ".join(words[:limit]) + f" and {len(words) - limit} more"
    *most, last = words or ("",)
    return f"{', '.join(most)} and {last}" if most else last
