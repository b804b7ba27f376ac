"""More charts as SVG text: columns, shares, bubbles, a matrix, and curves over a logarithmic axis."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tag2box.reporting import charts, formatting as fmt

ABOVE = 14.0  # space above the plot for the title of the y axis
ROW, PLOT_THICK = 20.0, 14.0  # a row of shares, and the bar in it
INTERVAL_ROOM = 52.0  # per cent of the width of an interval from 0 to 1; longer figures follow
PLOT_ROOM = 61.0  # per cent of the width of a full bar; its figure follows
MAX_BUBBLES, CROWD = 400, 150  # numbers of bubbles above which they are merged, and drawn small
MATRIX_CELLS = 56  # grid cells along each axis for merging bubbles
NUMBERED, MATRIX_NAMED = 14, 40  # most classes for which a matrix shows numbers, and tooltips


@dataclass(frozen=True, slots=True)
class PlotColumn:
    """One vertical bar: its name below it, its value above it."""

    name: str
    value: float


def columns(bars: Sequence[PlotColumn], *, label: str, x_label: str, y_label: str) -> str:
    """Vertical bars of counts, as in a histogram."""
    ticks = charts.nice_ticks(0, max([b.value for b in bars], default=1.0) or 1.0)
    frame = charts.Frame(0.0, max(len(bars), 1), 0.0, ticks[-1], right=8.0)
    body = charts.axes(frame, (), ticks, x_label, y_label)
    gap = 0.12 if len(bars) > 1 else 0.4
    for index, bar in enumerate(bars):
        left, right, top = frame.x(index + gap), frame.x(index + 1 - gap), frame.y(bar.value)
        tip = charts.hint(f"{bar.name}: {fmt.whole(bar.value)}")
        body += charts.svg_tag(
            "rect", tip, class_="bar", x=left, y=top, width=right - left, height=max(frame.y(0) - top, 0.0)
        )
        middle = (left + right) / 2
        body += charts.svg_tag(
            "text",
            charts.escape(bar.name),
            class_="tick",
            x=middle,
            y=charts.HEIGHT - charts.BOTTOM + 14,
            text_anchor="middle",
        )
        body += charts.svg_tag("text", short(bar.value), class_="bar-value", x=middle, y=top - 3, text_anchor="middle")
    return _plot(charts.svg_tag("g", body, class_="run-0"), label)


def short(value: float) -> str:
    """A count that fits above a narrow bar: thousands become k."""
    return f"{value / 1000:.3g}k" if value >= 10_000 else fmt.whole(value)


def budget_chart(lines: Sequence[charts.Line], *, label: str, x_label: str, y_label: str) -> str:
    """Lines over a logarithmic axis that starts at 1; values in per cent."""
    top = max([x for line in lines for x, _ in line.points], default=10.0)
    decades = [10.0**k for k in range(math.ceil(math.log10(max(top, 10.0)) - 1e-9) + 1)]
    frame = charts.Frame(
        1.0, max(top, 10.0), 0.0, 100.0, right=charts.name_margin([line.name for line in lines]), log=True
    )
    body = charts.axes(frame, [d for d in decades if d <= frame.x_high], (0, 25, 50, 75, 100), x_label, y_label)
    body += "".join(charts.curve(frame, line, x_label) for line in lines) + charts.end_names(frame, lines)
    return _plot(body, label)


def _plot(body: str, label: str) -> str:
    box = f"0 {-ABOVE:g} {charts.WIDTH:g} {charts.HEIGHT + ABOVE:g}"
    return charts.svg_tag("svg", body, class_="chart", viewBox=box, role="img", aria_label=label)


# ---------------------------------------------------------------- shares


@dataclass(frozen=True, slots=True)
class Shares:
    """One row of counts shown as shares of their sum; ``figure`` is printed after the bar."""

    name: str
    counts: tuple[int, ...]
    figure: str = ""


def share_bars(rows: Sequence[Shares], keys: Sequence[charts.Key], *, label: str) -> str:
    """Full-length bars divided into shares, one per row. A row without counts has no bar."""
    body = ""
    for index, row in enumerate(rows):
        top = index * ROW
        name = charts.escape(charts.shorten(row.name, 14)) + charts.hint(row.name)
        body += charts.svg_tag(
            "text", name, class_="bar-label", x=f"{charts.GUTTER - 1.5}%", y=top + PLOT_THICK - 3, text_anchor="end"
        )
        body += _share_row(row, keys, top)
        body += charts.svg_tag(
            "text",
            charts.escape(row.figure),
            class_="bar-value",
            x=f"{charts.GUTTER + PLOT_ROOM + 1.2}%",
            y=top + PLOT_THICK - 3,
        )
    height = max(len(rows), 1) * ROW
    return charts.svg_tag("svg", body, class_="chart bars", width="100%", height=height, role="img", aria_label=label)


def _share_row(row: Shares, keys: Sequence[charts.Key], top: float) -> str:
    total, left, body = sum(row.counts), charts.GUTTER, ""
    for key, count in zip(keys, row.counts, strict=True):
        if count:
            width = PLOT_ROOM * count / total
            tip = charts.hint(f"{row.name}, {key.name}: {fmt.whole(count)} ({fmt.percent(count / total)} %)")
            body += charts.svg_tag(
                "rect",
                tip,
                class_=f"share {key.css}",
                x=f"{left:.3f}%",
                y=top,
                width=f"{width:.3f}%",
                height=PLOT_THICK,
            )
            left += width
    return body


# ---------------------------------------------------------------- bubbles


@dataclass(frozen=True, slots=True)
class Bubble:
    """Photos of one size; the bubble's area shows how many."""

    x: float
    y: float
    count: int


def gather_bubbles(bubbles: Sequence[Bubble], limit: int = MAX_BUBBLES) -> tuple[Bubble, ...]:
    """At most about ``limit`` bubbles: if there are more, those in the same grid cell are merged at their mean."""
    if len(bubbles) <= limit:
        return tuple(bubbles)
    step = max(max(b.x, b.y) for b in bubbles) / MATRIX_CELLS
    cells: dict[tuple[int, int], list[Bubble]] = {}
    for b in bubbles:
        cells.setdefault((int(b.x / step), int(b.y / step)), []).append(b)
    return tuple(_mean(inside) for inside in cells.values())


def _mean(bubbles: Sequence[Bubble]) -> Bubble:
    total = sum(b.count for b in bubbles)
    x, y = (sum(v * b.count for v, b in zip(values, bubbles, strict=True)) / total for values in _coordinates(bubbles))
    return Bubble(x, y, total)


def _coordinates(bubbles: Sequence[Bubble]) -> tuple[list[float], list[float]]:
    return [b.x for b in bubbles], [b.y for b in bubbles]


def bubble_chart(bubbles: Sequence[Bubble], *, label: str, x_label: str, y_label: str) -> str:
    """Bubbles over two lengths, with a dashed diagonal."""
    ticks = [charts.nice_ticks(0, max(values, default=1.0) or 1.0) for values in _coordinates(bubbles)]
    frame = charts.Frame(0.0, ticks[0][-1], 0.0, ticks[1][-1], right=14.0)
    body = charts.axes(frame, ticks[0], ticks[1], x_label, y_label)
    end = min(frame.x_high, frame.y_high)
    diagonal = charts.svg_tag(
        "line", charts.hint("square"), x1=frame.x(0), y1=frame.y(0), x2=frame.x(end), y2=frame.y(end)
    )
    body += charts.svg_tag("g", diagonal, class_="reference")
    most = max((b.count for b in bubbles), default=1)
    reach = 9.0 if len(bubbles) <= CROWD else 3.5  # radius of the largest
    for b in sorted(bubbles, key=lambda b: -b.count):  # small ones on top, so that the pointer can reach them
        tip = charts.hint(f"{b.x:.0f} x {b.y:.0f}: {fmt.whole(b.count)}")
        body += charts.svg_tag(
            "circle", tip, class_="bubble", cx=frame.x(b.x), cy=frame.y(b.y), r=1.5 + reach * (b.count / most) ** 0.5
        )
    return _plot(charts.svg_tag("g", body, class_="run-0"), label)


# ---------------------------------------------------------------- matrix


def matrix(
    names: Sequence[str], values: Sequence[Sequence[float]], *, label: str, tip: Callable[[int, int], str]
) -> str:
    """A square matrix of shares, darker for larger values; the diagonal has its own colour."""
    count = len(names)
    cell = 30.0 if count <= NUMBERED else 17.0 if count <= MATRIX_NAMED else 9.5
    font = {30.0: 11.0, 17.0: 10.5, 9.5: 7.0}[cell]
    side, head = 7.2 * font, 5.6 * font
    body = ""
    for i, name in enumerate(names):
        words, at = charts.escape(charts.shorten(name, 14)), (i + 0.5) * cell
        style = f"font-size:{font:g}px"
        body += charts.svg_tag(
            "text", words, style=style, class_="cell-name", x=side - 5, y=head + at + 3.5, text_anchor="end"
        )
        turn = f"translate({side + at + 3:.1f} {head - 5:.1f}) rotate(-50)"
        body += charts.svg_tag("text", words, style=style, class_="cell-name", transform=turn)
        body += _matrix_row(i, values[i], side=side, top=head + i * cell, cell=cell, tip=tip)
    width, height = side + count * cell + 5.0 * font, head + count * cell + 4
    size = f"max-width:{1.0 * width:.0f}px"
    box = f"0 0 {width:.1f} {height:.1f}"
    return charts.svg_tag("svg", body, class_="chart matrix", viewBox=box, style=size, role="img", aria_label=label)


def _matrix_row(
    row: int, values: Sequence[float], *, side: float, top: float, cell: float, tip: Callable[[int, int], str]
) -> str:
    body, count = "", len(values)
    for column, value in enumerate(values):
        left = side + column * cell
        words = charts.hint(tip(row, column)) if count <= MATRIX_NAMED else ""
        css = "heat alone" if row == column else "heat"
        shade = 0.06 + 0.94 * value**0.7 if value else 0.0
        if value or count <= MATRIX_NAMED:
            body += charts.svg_tag(
                "rect", words, class_=css, fill_opacity=shade, x=left, y=top, width=cell - 1, height=cell - 1
            )
        if value and count <= NUMBERED:
            middle, css = left + (cell - 1) / 2, "cell over" if shade > 0.55 else "cell"
            body += charts.svg_tag(
                "text", f"{100 * value:.0f}", class_=css, x=middle, y=top + cell / 2 + 3.5, text_anchor="middle"
            )
    return body


# ---------------------------------------------------------------- shares with their intervals


@dataclass(frozen=True, slots=True)
class IntervalRow:
    """A share with its interval; ``css`` is the class of its colour and of the shape of its mark."""

    name: str
    low: float
    high: float
    share: float | None
    figure: str
    css: str


def interval_bars(rows: Sequence[IntervalRow], limits: Sequence[tuple[float, str]], *, label: str) -> str:
    """One line per row from the lower to the upper bound, a mark at the share; dashed limits across all."""
    height = max(len(rows), 1) * ROW
    body = ""
    for value, words in limits:
        at = _across(value)
        rule = charts.svg_tag("line", charts.hint(words), class_="mark", x1=at, x2=at, y1=0, y2=height)
        body += rule + charts.svg_tag(
            "text", f"{100 * value:g}", class_="tick", x=at, y=height + 12, text_anchor="middle"
        )
    for index, row in enumerate(rows):
        middle = index * ROW + ROW / 2
        name = charts.escape(charts.shorten(row.name, 14)) + charts.hint(row.name)
        body += charts.svg_tag(
            "text", name, class_="bar-label", x=f"{charts.GUTTER - 1.5}%", y=middle + 4, text_anchor="end"
        )
        tip = charts.hint(f"{row.name}: {row.figure}, {100 * row.low:.0f} to {100 * row.high:.0f} %")
        low, high = _across(row.low), _across(row.high)
        inner = charts.svg_tag("line", tip, class_="whisker", x1=low, x2=high, y1=middle, y2=middle)
        inner += "" if row.share is None else _mark(row.css, _across(row.share), middle)
        body += charts.svg_tag("g", inner, class_=row.css)
        body += charts.svg_tag(
            "text",
            charts.escape(row.figure),
            class_="bar-value",
            x=f"{charts.GUTTER + INTERVAL_ROOM + 1.2}%",
            y=middle + 4,
        )
    return charts.svg_tag(
        "svg", body, class_="chart bars", width="100%", height=height + 16, role="img", aria_label=label
    )


def _across(share: float) -> str:
    return f"{charts.GUTTER + INTERVAL_ROOM * min(max(share, 0.0), 1.0):.2f}%"


def _mark(css: str, x: str, y: float) -> str:
    """A disc, or for ``verdict-not`` a square: the shape says what the colour says."""
    if css == "verdict-not":
        inner = charts.svg_tag("rect", class_="point", x=-5, y=y - 5, width=10, height=10)
        return charts.svg_tag("svg", inner, x=x, y=0, overflow="visible")
    hollow = " hollow" if css == "verdict-more" else ""
    return charts.svg_tag("circle", class_=f"point{hollow}", cx=x, cy=y, r=5)


@dataclass(frozen=True, slots=True)
class Dots:
    """A series of points, each with a number of labels as its size."""

    key: charts.Key
    points: tuple[tuple[float, float, int], ...]


def reliability_chart(series: Sequence[Dots], *, label: str) -> str:
    """Shares of right labels over probabilities, in per cent; on the dashed diagonal, probabilities are right."""
    frame = charts.Frame(0.0, 100.0, 0.0, 100.0, right=14.0)
    ticks = (0, 25, 50, 75, 100)
    body = charts.axes(frame, ticks, ticks, "score or probability, per cent", "labels that are right, per cent")
    diagonal = charts.svg_tag("line", x1=frame.x(0), y1=frame.y(0), x2=frame.x(100), y2=frame.y(100))
    body += charts.svg_tag("g", diagonal, class_="reference")
    most = max((count for own in series for *_, count in own.points), default=1)
    for own in series:
        line = tuple((100 * x, 100 * y) for x, y, _ in own.points)
        inner = charts.svg_tag("path", class_="line", d=frame.path(line)) if line else ""
        for (x, y), (*_, count) in zip(line, own.points, strict=True):
            tip = charts.hint(f"{own.key.name}: {fmt.whole(count)} labels, {x:.0f} % expected, {y:.0f} % right")
            size = 2.5 + 5 * (count / most) ** 0.5
            inner += charts.svg_tag("circle", tip, class_="bubble", cx=frame.x(x), cy=frame.y(y), r=size)
        body += charts.svg_tag("g", inner, class_=own.key.css)
    return _plot(body, label)
