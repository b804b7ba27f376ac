"""Figures of pseudo labels over training: are they right, do they find all, how many are there, what is tau."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from tag2box.reporting.charts import Bars, Key, Line, grouped_bars, line_chart
from tag2box.reporting.sections import Figure, Section
from tag2box.reporting.text import UNKNOWN, known, number

COLOURS = 6  # classes run-0 .. run-5 of the style sheet


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
    shown = [row for row in rows if row.moments][:COLOURS]
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
        figures.append(_figure(taus, "The threshold τ", "cosine similarity a candidate must reach", number))
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
    return f"run-{index % COLOURS}"


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
    chart = grouped_bars(groups, keys, label="Pseudo boxes for each object", limit=top, show=number)
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
