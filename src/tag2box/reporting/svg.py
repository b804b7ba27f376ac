"""The few pieces of SVG the charts are made of. Colours come from the page's style sheet, through class names."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from html import escape as html_escape

_NOT_XML = re.compile("[^\t\n\r -\ud7ff\ue000-�\U00010000-\U0010ffff]")


def escape(text: str) -> str:
    """Text made safe inside SVG elements and attributes; characters XML has no place for are dropped."""
    return html_escape(_NOT_XML.sub("", text), quote=True)


def tag(name: str, body: str = "", /, **attributes: str | float) -> str:
    """An element; ``class_`` and ``stroke_width`` become ``class`` and ``stroke-width``. The body is markup already."""
    pairs = "".join(f' {k.strip("_").replace("_", "-")}="{_attribute(v)}"' for k, v in attributes.items())
    return f"<{name}{pairs}>{body}</{name}>"


def hint(text: str) -> str:
    """A tooltip."""
    return tag("title", escape(text))


def shorten(text: str, limit: int) -> str:
    """Text cut to ``limit`` characters, the last of them an ellipsis."""
    return text if len(text) <= limit else text[: limit - 1].rstrip() + "…"


def nice_ticks(low: float, high: float, count: int = 4) -> tuple[float, ...]:
    """About ``count`` round numbers from at or below ``low`` to at or above ``high``."""
    size = max(abs(low), abs(high))
    if high - low < 1e-9 * max(size, 1.0):  # as good as one value: make room around it
        room = 0.5 * size if size > 1e-6 else 0.5
        low, high = low - room, high + room
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return tuple(round(k * step, 12) for k in range(first, last + 1))


def spread(wanted: Sequence[float], gap: float, *, low: float, high: float) -> tuple[float, ...]:
    """Positions near the wanted ones, at least ``gap`` apart, in the same order from ``low`` to about ``high``."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    placed = [0.0] * len(wanted)
    at = low - gap
    for i in order:
        at = max(wanted[i], at + gap)
        placed[i] = at
    ceiling = high
    for i in reversed(order):
        placed[i] = min(placed[i], ceiling)
        ceiling = placed[i] - gap
    return tuple(placed)


def _attribute(value: str | float) -> str:
    return escape(value) if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")
