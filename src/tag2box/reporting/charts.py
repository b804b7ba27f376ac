"""Charts as SVG text: lines, stacked and grouped bars, and the elements, axes and ticks they are made of."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape as html_escape

from tag2box.reporting.formatting import format_number, known, percent

Points = tuple[tuple[float, float], ...]

WIDTH, HEIGHT = 360.0, 216.0
LEFT, RIGHT, TOP, BOTTOM = 40.0, 70.0, 12.0, 34.0  # plot margins; the right one is wider if line names are long
AWAY, LONGEST, LETTER = 7.0, 18, 6.0  # line names: distance from the plot, maximum length, width of a letter
MAX_HINTS = 40  # tooltips per line
GUTTER, ROOM, THICK = 27.0, 62.0, 12.0  # grouped bars: per cent of the width for names and bars, pixels per bar

_NOT_XML = re.compile("[^\t\n\r -\ud7ff\ue000-�\U00010000-\U0010ffff]")


def escape(text: str) -> str:
    """Text escaped for SVG elements and attributes; characters that XML does not allow are dropped."""
    return html_escape(_NOT_XML.sub("", text), quote=True)


def svg_tag(name: str, body: str = "", /, **attributes: str | float) -> str:
    """An SVG element; ``class_`` and ``stroke_width`` become ``class`` and ``stroke-width``. ``body`` is markup."""
    pairs = "".join(f' {k.strip("_").replace("_", "-")}="{_attribute(v)}"' for k, v in attributes.items())
    return f"<{name}{pairs}>{body}</{name}>"


def hint(text: str) -> str:
    """A tooltip."""
    return svg_tag("title", escape(text))


def shorten(text: str, limit: int) -> str:
    """Text cut to ``limit`` characters, the last one an ellipsis."""
    return text if len(text) <= limit else text[: limit - 1].rstrip() + "…"


def nice_ticks(low: float, high: float, count: int = 4) -> tuple[float, ...]:
    """About ``count`` round numbers from at or below ``low`` to at or above ``high``."""
    size = max(abs(low), abs(high))
    if high - low < 1e-9 * max(size, 1.0):  # a single value: add a margin around it
        margin = 0.5 * size if size > 1e-6 else 0.5
        low, high = low - margin, high + margin
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return tuple(round(k * step, 12) for k in range(first, last + 1))


def spread_labels(wanted: Sequence[float], gap: float, *, low: float, high: float) -> tuple[float, ...]:
    """Positions near the wanted ones, at least ``gap`` apart and in the same order, from ``low`` to about ``high``."""
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


# ---------------------------------------------------------------- lines


@dataclass(frozen=True, slots=True)
class Line:
    """One curve: its points and, drawn pale behind them, the raw values before smoothing."""

    name: str
    css: str  # CSS class of its colour
    points: Points
    raw: Points = ()


@dataclass(frozen=True, slots=True)
class Reference:
    """A dashed level across a line chart."""

    name: str
    value: float


def line_chart(
    lines: Sequence[Line], *, label: str, x_label: str = "iteration", reference: Reference | None = None
) -> str:
    """A line chart with axes, ticks and a name at the end of each line. The value axis starts at zero or below."""
    everything = [p for line in lines for p in (*line.points, *line.raw)]
    values = [y for _, y in everything] + ([reference.value] if reference else []) or [1.0]
    x_ticks = nice_ticks(0, max([x for x, _ in everything], default=1.0) or 1.0)
    y_ticks = nice_ticks(min(0.0, *values), max(values) if max(values) > 0 else 1.0)
    names = [line.name for line in lines] + ([reference.name] if reference else [])
    frame = Frame(0.0, x_ticks[-1], y_ticks[0], y_ticks[-1], right=name_margin(names))
    body = axes(frame, x_ticks, y_ticks, x_label)
    if reference:
        y = frame.y(reference.value)
        words = hint(f"{reference.name}: {format_number(reference.value)}")
        rule = svg_tag("line", words, x1=LEFT, x2=WIDTH - frame.right, y1=y, y2=y)
        body += svg_tag("g", rule, class_="reference")
    for line in lines:
        body += curve(frame, line, x_label)
    body += end_names(frame, lines, reference)
    return svg_tag("svg", body, class_="chart", viewBox=f"0 0 {WIDTH:g} {HEIGHT:g}", role="img", aria_label=label)


@dataclass(frozen=True, slots=True)
class Frame:
    """Maps data to drawing coordinates: values at the plot's edges, the right margin, and a linear or log x axis."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float
    right: float = RIGHT
    log: bool = False

    def x(self, value: float) -> float:
        """Horizontal position of a value."""
        low, high, at = (math.log(v) if self.log else v for v in (self.x_low, self.x_high, value))
        return LEFT + (WIDTH - LEFT - self.right) * (at - low) / (high - low)

    def y(self, value: float) -> float:
        """Vertical position of a value, from the top."""
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - self.y_low) / (self.y_high - self.y_low)

    def path(self, points: Points) -> str:
        """SVG path data of a line through points."""
        return "M" + "L".join(f"{self.x(a):.1f} {self.y(b):.1f}" for a, b in points)


def axes(frame: Frame, x_ticks: Sequence[float], y_ticks: Sequence[float], x_label: str, y_label: str = "") -> str:
    """Grid, tick labels and titles of both axes; the title of the y axis is above the plot."""
    parts = []
    right = WIDTH - frame.right
    for value in y_ticks:
        y = frame.y(value)
        parts.append(svg_tag("line", class_="axis" if value == y_ticks[0] else "grid", x1=LEFT, x2=right, y1=y, y2=y))
        parts.append(svg_tag("text", f"{value:g}", class_="tick", x=LEFT - 6, y=y + 3.5, text_anchor="end"))
    for value in x_ticks:
        words = f"{value / 1000:g}k" if value >= 10000 else f"{value:g}"
        parts.append(
            svg_tag("text", words, class_="tick", x=frame.x(value), y=HEIGHT - BOTTOM + 14, text_anchor="middle")
        )
    middle = (LEFT + right) / 2
    parts.append(svg_tag("text", escape(x_label), class_="tick", x=middle, y=HEIGHT - 4, text_anchor="middle"))
    if y_label:
        parts.append(svg_tag("text", escape(y_label), class_="tick", x=0, y=-2))
    return "".join(parts)


def curve(frame: Frame, line: Line, x_label: str) -> str:
    """A line with tooltips at some of its points."""
    body = svg_tag("path", class_="raw", d=frame.path(line.raw)) if line.raw else ""
    if line.points:
        body += svg_tag("path", class_="line", d=frame.path(line.points))
    stride = -(-len(line.points) // MAX_HINTS) or 1
    for x, y in (*line.points[::stride], *line.points[-1:]):
        dot = "dot end" if (x, y) == line.points[-1] else "dot"
        words = f"{line.name}, {x_label} {x:g}: {format_number(y)}"
        body += svg_tag("circle", hint(words), class_=dot, cx=frame.x(x), cy=frame.y(y), r=2.6)
    return svg_tag("g", body, class_=line.css)


def name_margin(names: Sequence[str]) -> float:
    """Right margin that fits the names of the lines."""
    return max(RIGHT, AWAY + LETTER * min(LONGEST, max(map(len, names), default=0)))


def end_names(frame: Frame, lines: Sequence[Line], reference: Reference | None = None) -> str:
    """Names of the lines at their right ends, without overlap."""
    names = [(line.name, line.css, line.points[-1][1]) for line in lines if line.points]
    if reference:
        names.append((reference.name, "reference", reference.value))
    heights = spread_labels([frame.y(value) for _, _, value in names], 13, low=TOP, high=HEIGHT - BOTTOM)
    return "".join(
        svg_tag(
            "text", escape(shorten(name, LONGEST)) + tip, class_=f"name {css}", x=WIDTH - frame.right + AWAY, y=y + 3.5
        )
        for (name, css, value), y in zip(names, heights, strict=True)
        for tip in [hint(f"{name}: {format_number(value)}")]
    )


# ---------------------------------------------------------------- bars


@dataclass(frozen=True, slots=True)
class Stack:
    """One bar divided into shares that add up to about one."""

    name: str
    shares: tuple[float, ...]


def stacked_bars(stacks: Sequence[Stack], parts: Sequence[str], *, label: str) -> str:
    """Horizontal bars of full width, one per stack; ``parts`` names the shares, with CSS classes ``part-<name>``."""
    row = 58.0
    body = ""
    for index, stack in enumerate(stacks):
        top = index * row
        body += svg_tag("text", escape(stack.name), class_="bar-name", x=0, y=top + 15)
        total = sum(stack.shares) or 1.0
        left = 0.0
        for part, share in zip(parts, stack.shares, strict=True):
            words = f"{stack.name}, {part.replace('_', ' ')}: {percent(share)} %"
            body += _segment(words, f"part-{part}", left, share / total, top + 22)
            left += share / total
    return svg_tag(
        "svg", body, class_="chart bars", width="100%", height=max(len(stacks), 1) * row, role="img", aria_label=label
    )


def _segment(words: str, css: str, left: float, share: float, top: float) -> str:
    bar = svg_tag("rect", hint(words), x=f"{100 * left:.2f}%", y=top, width=f"{100 * share:.2f}%", height=30)
    if share < 0.08:  # too narrow for its number on a phone
        return svg_tag("g", bar, class_=css)
    figure = svg_tag(
        "text", f"{100 * share:.0f}", x=f"{100 * (left + share / 2):.2f}%", y=top + 20, text_anchor="middle"
    )
    return svg_tag("g", bar + figure, class_=css)


@dataclass(frozen=True, slots=True)
class Bars:
    """A group of bars under one name, one value per series; ``mark`` is a dashed tick for comparison."""

    name: str
    values: tuple[float | None, ...]
    mark: float | None = None


@dataclass(frozen=True, slots=True)
class Key:
    """Legend entry of a series: its name and the CSS class of its colour."""

    name: str
    css: str


def grouped_bars(
    groups: Sequence[Bars],
    keys: Sequence[Key],
    *,
    label: str,
    limit: float = 1.0,
    show: Callable[[float | None], str] = percent,
) -> str:
    """Horizontal bars in groups; a bar of value ``limit`` has full length. Unknown values are shown as a dash."""
    height = THICK * len(keys)
    body = ""
    for index, group in enumerate(groups):
        top = 4 + index * (height + THICK)
        name = escape(shorten(group.name, 14)) + hint(group.name)
        body += svg_tag(
            "text", name, class_="bar-label", x=f"{GUTTER - 1.5}%", y=top + height / 2 + 4, text_anchor="end"
        )
        body += _bars(group, keys, top, limit=limit, show=show)
    total = 4 + len(groups) * (height + THICK)
    return svg_tag("svg", body, class_="chart bars", width="100%", height=total, role="img", aria_label=label)


def _bars(group: Bars, keys: Sequence[Key], top: float, *, limit: float, show: Callable[[float | None], str]) -> str:
    bars, figures = "", ""  # figures are drawn last, on top of the mark
    for index, (key, value) in enumerate(zip(keys, group.values, strict=True)):
        words, y, share = show(value), top + index * THICK, _bar_length(value, limit)
        width, tip = f"{max(share, 0.3):.2f}%", hint(f"{group.name}, {key.name}: {words}")
        bars += svg_tag("rect", tip, class_=f"bar {key.css}", x=f"{GUTTER}%", y=y + 1, width=width, height=THICK - 2)
        figures += svg_tag("text", words, class_="bar-value", x=f"{GUTTER + share + 1:.2f}%", y=y + THICK - 2.5)
    mark = ""
    if known(group.mark):
        at = f"{GUTTER + _bar_length(group.mark, limit):.2f}%"
        words = hint(f"{group.name}, true number: {show(group.mark)}")
        mark = svg_tag("line", words, class_="mark", x1=at, x2=at, y1=top - 3, y2=top + THICK * len(keys) + 3)
    return bars + mark + figures


def _bar_length(value: float | None, limit: float) -> float:
    """Length of a bar in per cent of the chart's width."""
    if value is None or not known(value):
        return 0.0
    return ROOM * min(max(value, 0.0) / limit, 1.0)
