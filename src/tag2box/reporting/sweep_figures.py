"""Figures of a setting that was swept: the mean over the seeds at each value, and how far the seeds lie apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from tag2box.reporting.charts import BOTTOM, HEIGHT, Frame, axes
from tag2box.reporting.sections import Figure
from tag2box.reporting.study_page import SeedFigures
from tag2box.reporting.svg import escape, hint, nice_ticks, tag

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
        body += tag("text", f"{value:g}", class_=css, x=at, y=HEIGHT - BOTTOM + 14, text_anchor="middle")
    points = tuple((places[value], figure.mean) for value, figure in known if figure.mean is not None)
    line = tag("path", class_="line", d=frame.path(points))
    for value, figure in known:
        line += _whisker(frame, places[value], figure, f"{sweep.name} {value:g}")
    body += tag("g", line, class_="run-0")
    label = f"{what} at values of {sweep.name}"
    return tag("svg", body, class_="chart", viewBox=f"0 0 360 {HEIGHT:g}", role="img", aria_label=escape(label))


def _whisker(frame: Frame, place: float, figure: SeedFigures, name: str) -> str:
    """Mean, smallest and largest at one value."""
    if figure.mean is None or figure.ends is None:
        return ""
    x, (low, high) = frame.x(place), figure.ends
    parts = tag("line", stroke="currentColor", stroke_width=1.5, x1=x, x2=x, y1=frame.y(low), y2=frame.y(high))
    for end in (low, high):
        y = frame.y(end)
        parts += tag("line", stroke="currentColor", stroke_width=1.5, x1=x - 4, x2=x + 4, y1=y, y2=y)
    words = hint(f"{name}: {figure.words()}")
    return parts + tag("circle", words, class_="dot end", cx=x, cy=frame.y(figure.mean), r=3.2)
