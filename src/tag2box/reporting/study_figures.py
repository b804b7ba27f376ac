"""Figures of pseudo labels over training: are they right, do they find all, how many are there, what is tau."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from tag2box.reporting.charts import (
    BOTTOM,
    HEIGHT,
    UNKNOWN,
    Bars,
    Frame,
    Key,
    Line,
    axes,
    escape,
    format_number,
    grouped_bars,
    hint,
    known,
    line_chart,
    nice_ticks,
    svg_tag,
)
from tag2box.reporting.sections import Figure, Section
from tag2box.reporting.study_page import SeedFigures

STAGE_COLOURS = 6  # classes run-0 .. run-5 of the style sheet


@dataclass(frozen=True, slots=True)
class Moment:
    """The pseudo boxes of the last stage on some training photos, at one iteration, against the truth."""

    iteration: int
    photos: int
    precision: Mapping[str, float | None]  # by IoU, as "0.5"
    recall: Mapping[str, float | None]
    boxes: Mapping[str, int]  # by class
    objects: Mapping[str, int]  # true ones, by class
    threshold: float | None  # mean tau


@dataclass(frozen=True, slots=True)
class Followed:
    """One row of a study, followed through training."""

    name: str
    moments: tuple[Moment, ...]


def quality_sections(rows: Sequence[Followed]) -> tuple[Section, ...]:
    """Pseudo labels of some rows over training; nothing where nobody looked."""
    shown = [row for row in rows if row.moments][:STAGE_COLOURS]
    if not shown:
        return ()
    overlaps = list(shown[0].moments[0].precision)
    figures = [
        figure
        for overlap in overlaps
        for figure in (
            _share(shown, f"Precision at IoU {overlap}", "pseudo boxes that fit an object", _precision(overlap)),
            _share(shown, f"Recall at IoU {overlap}", "objects that a pseudo box fits", _recall(overlap)),
        )
    ]
    taus = _lines(shown, lambda moment: moment.threshold)
    if taus:
        figures.append(_figure(taus, "The threshold τ", "cosine similarity a candidate must reach", format_number))
    figures.append(_counts(shown))
    photos = shown[0].moments[0].photos
    words = (
        f"What the last stage was taught as objects, compared with boxes that training never sees: {photos} training "
        "photos of all seeds, the same at every look. Means over the seeds."
    )
    return (Section("labels", "Pseudo labels over training", words, figures=tuple(figures)),)


Value = Callable[[Moment], float | None]


def _precision(overlap: str) -> Value:
    return lambda moment: moment.precision.get(overlap)


def _recall(overlap: str) -> Value:
    return lambda moment: moment.recall.get(overlap)


def _lines(rows: Sequence[Followed], value: Value, scale: float = 1.0) -> list[Line]:
    lines = []
    for index, row in enumerate(rows):
        found = [(float(moment.iteration), value(moment)) for moment in row.moments]
        points = tuple((x, scale * y) for x, y in found if y is not None and known(y))
        if points:
            lines.append(Line(row.name, _css(index), points))
    return lines


def _css(index: int) -> str:
    return f"run-{index % STAGE_COLOURS}"


def _share(rows: Sequence[Followed], title: str, note: str, value: Value) -> Figure:
    lines = _lines(rows, value, 100.0)
    return _figure(lines, title, f"per cent; {note}", lambda y: UNKNOWN if y is None else f"{y:.1f}")


def _figure(lines: Sequence[Line], title: str, note: str, show: Callable[[float | None], str]) -> Figure:
    keys = tuple(Key(line.name, line.css) for line in lines)
    told = [f"{line.name} {show(line.points[0][1])} to {show(line.points[-1][1])}" for line in lines]
    reading = f"From the first look to the last: {'; '.join(told)}." if told else "Nothing was labelled."
    return Figure(title, note, (Markup(line_chart(lines, label=title)),), reading, keys)


def _counts(rows: Sequence[Followed]) -> Figure:
    """Boxes of each class at the last look, as multiples of the true number."""
    last = [row.moments[-1] for row in rows]
    names = [name for name, count in last[0].objects.items() if count]
    groups = [Bars(name, tuple(_ratio(moment, name) for moment in last), 1.0) for name in names]
    keys = tuple(Key(row.name, _css(index)) for index, row in enumerate(rows))
    top = max([1.0, *(v for group in groups for v in group.values if v is not None)])
    chart = grouped_bars(groups, keys, label="Pseudo boxes for each object", limit=top, show=format_number)
    totals = [
        f"{row.name} {sum(moment.boxes.values())} for {sum(moment.objects.values())} objects"
        for row, moment in zip(rows, last, strict=True)
    ]
    return Figure(
        "Pseudo boxes for each true object", "at the last look; the dashed mark is one", (Markup(chart),),
        f"In all: {'; '.join(totals)}.", keys,
    )  # fmt: skip


def _ratio(moment: Moment, name: str) -> float | None:
    return moment.boxes.get(name, 0) / moment.objects[name] if moment.objects.get(name) else None


NARROW = 10.0  # points that the upright axis shows at least, so that a small difference looks small
MARGIN = 0.6  # of a step, left and right of the values


@dataclass(frozen=True, slots=True)
class Sweep:
    """A setting, its values in order, and what was measured at each; ``chosen`` is the value the paper takes."""

    name: str
    key: str
    values: tuple[float, ...]
    figures: tuple[SeedFigures, ...]
    chosen: float


def sweep_figure(sweep: Sweep, what: str) -> Figure:
    """One panel of figure 4."""
    known = [(v, f) for v, f in zip(sweep.values, sweep.figures, strict=True) if f.mean is not None]
    means = [(v, f.mean) for v, f in known if f.mean is not None]
    if not means:
        return Figure(sweep.name, sweep.key, (), "Nothing was measured.")
    (worst, low), (best, high) = (pick(means, key=lambda pair: pair[1]) for pick in (min, max))
    apart = max(f.ends[1] - f.ends[0] for _, f in known if f.ends is not None)
    reading = (
        f"From {low:.1f} at {worst:g} to {high:.1f} at {best:g}: {high - low:.1f} points between the means; the seeds "
        f"of one value lie up to {apart:.1f} apart."
    )
    note = f"{what} against {sweep.key}; bars reach from the smallest to the largest seed; the paper takes {{}}"
    return Figure(sweep.name, note.format(f"{sweep.chosen:g}"), (Markup(_chart(sweep, known, what)),), reading)


def _chart(sweep: Sweep, known: Sequence[tuple[float, SeedFigures]], what: str) -> str:
    ends = [end for _, figure in known for end in (figure.ends or ())]
    middle, half = (min(ends) + max(ends)) / 2, max(NARROW, max(ends) - min(ends)) / 2
    ticks = nice_ticks(max(middle - half, 0.0), min(middle + half, 100.0) if max(ends) <= 100 else middle + half)
    places = {value: float(index) for index, value in enumerate(sweep.values)}
    frame = Frame(-MARGIN, len(places) - 1 + MARGIN, ticks[0], ticks[-1], right=14.0)
    body = axes(frame, (), ticks, sweep.key)
    for value, place in places.items():
        css = "tick name run-0" if value == sweep.chosen else "tick"
        at = frame.x(place)
        body += svg_tag("text", f"{value:g}", class_=css, x=at, y=HEIGHT - BOTTOM + 14, text_anchor="middle")
    points = tuple((places[value], figure.mean) for value, figure in known if figure.mean is not None)
    line = svg_tag("path", class_="line", d=frame.path(points))
    for value, figure in known:
        line += _whisker(frame, places[value], figure, f"{sweep.name} {value:g}")
    body += svg_tag("g", line, class_="run-0")
    label = f"{what} at values of {sweep.name}"
    return svg_tag("svg", body, class_="chart", viewBox=f"0 0 360 {HEIGHT:g}", role="img", aria_label=escape(label))


def _whisker(frame: Frame, place: float, figure: SeedFigures, name: str) -> str:
    """Mean, smallest and largest at one value."""
    if figure.mean is None or figure.ends is None:
        return ""
    x, (low, high) = frame.x(place), figure.ends
    parts = svg_tag("line", stroke="currentColor", stroke_width=1.5, x1=x, x2=x, y1=frame.y(low), y2=frame.y(high))
    for end in (low, high):
        y = frame.y(end)
        parts += svg_tag("line", stroke="currentColor", stroke_width=1.5, x1=x - 4, x2=x + 4, y1=y, y2=y)
    words = hint(f"{name}: {figure.words()}")
    return parts + svg_tag("circle", words, class_="dot end", cx=x, cy=frame.y(figure.mean), r=3.2)
