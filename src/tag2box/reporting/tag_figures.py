"""Figures of tags and photos: balance, tags a photo, what comes with what, sizes and shapes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from markupsafe import Markup

from tag2box.data.stats import PhotoSizes, TagStats
from tag2box.reporting.charts import Bars, Key, grouped_bars
from tag2box.reporting.object_figures import by_number, in_columns
from tag2box.reporting.plots import Bubble, Column, bubble_chart, columns, gather, matrix
from tag2box.reporting.sections import Figure
from tag2box.reporting.text import listed, percent, plural, whole

MANY = 9  # tags a photo from which columns are put together
EVEN = 1.2  # times as many photos up to which classes are called balanced
NAMED = 8  # pairs of classes that are named
SHAPES = {"1:2": 1 / 2, "2:3": 2 / 3, "3:4": 3 / 4, "1:1": 1.0, "4:3": 4 / 3, "3:2": 3 / 2, "16:9": 16 / 9, "2:1": 2.0}


def number_figure(stats: TagStats) -> Figure:
    """How many tags a photo has."""
    counts = [*stats.per_photo[:MANY], *([sum(stats.per_photo[MANY:])] if len(stats.per_photo) > MANY else [])]
    bars = [Column(f"{n}+" if n == MANY else str(n), float(count)) for n, count in enumerate(counts)]
    mean = sum(stats.per_class) / stats.photos if stats.photos else 0.0
    several = sum(stats.per_photo[2:]) / stats.photos if stats.photos else 0.0
    reading = f"A photo has {mean:.2f} tags on average; {percent(several)} % have two or more"
    reading += (
        f", and {plural(len(stats.untagged), 'photo')} none at all." if stats.untagged else ", and none is without."
    )
    chart = columns(bars, label="Photos by number of tags", x_label="tags of a photo", y_label="photos")
    return Figure("Tags a photo", "how many photos have how many", (Markup(chart),), reading)


def balance_figure(stats: TagStats) -> Figure:
    """How many photos each class has."""
    keys = (Key("photos", "run-0"),)
    order, top = by_number(stats.per_class), float(max(stats.per_class, default=1) or 1)

    def draw(rows: Sequence[int]) -> str:
        groups = [Bars(stats.classes[c], (float(stats.per_class[c]),)) for c in rows]
        return grouped_bars(groups, keys, label="Photos of each class", limit=top, show=whole)

    return Figure(
        "Class balance", "photos tagged with each class", in_columns(order, draw), _balance_reading(stats, order)
    )


def _balance_reading(stats: TagStats, order: Sequence[int]) -> str:
    if not order:
        return "No photo has a tag."
    first, last = ((stats.classes[c], stats.per_class[c]) for c in (order[0], order[-1]))
    if len(order) == 1:
        return f"The only class, {first[0]}, is on {plural(first[1], 'photo')}."
    if first[1] == last[1]:
        return f"All classes are on as many photos: {whole(first[1])}."
    if first[1] < EVEN * last[1]:
        return f"Well balanced: from {plural(last[1], 'photo')} ({last[0]}) to {whole(first[1])} ({first[0]})."
    ratio = f"{first[1] / last[1]:.1f} times as many as {last[0]} ({whole(last[1])})"
    return f"{first[0]} is on {plural(first[1], 'photo')}, {ratio}."


def together_figure(stats: TagStats) -> Figure:
    """Which classes come with which; on the diagonal, how often a class comes alone."""
    order = by_number(stats.per_class)
    table = stats.together.tolist()

    def share(a: int, b: int) -> float:
        return (stats.alone[a] if a == b else table[a][b]) / stats.per_class[a]

    def tip(row: int, column: int) -> str:
        a, b = order[row], order[column]
        with_whom = "alone" if a == b else f"with {stats.classes[b]}"
        return f"{stats.classes[a]} {with_whom}: {percent(share(a, b))} % of its {plural(stats.per_class[a], 'photo')}"

    values = [[share(a, b) for b in order] for a in order]
    chart = matrix([stats.classes[c] for c in order], values, label="Classes on the same photos", tip=tip)
    keys = (Key("with the class of the column", "run-0"), Key("alone", "run-1"))
    note = "per cent of the photos of the class on the left"
    return Figure("Tags that come together", note, (Markup(chart),), _together_reading(stats, order), keys)


def _together_reading(stats: TagStats, order: Sequence[int]) -> str:
    tagged = sum(stats.per_photo[1:])
    words = f"{percent(sum(stats.alone) / tagged)} % of the tagged photos show a single class" if tagged else "No tags"
    couples = [(int(stats.together[a, b]), a, b) for a in order for b in order if a < b]
    count, a, b = max(couples, default=(0, 0, 0))
    if not count:
        return f"{words}; no two classes share a photo." if len(order) > 1 else f"{words}."
    return f"{words}; most often together are {stats.classes[a]} and {stats.classes[b]} ({plural(count, 'photo')})."


def tag_warnings(stats: TagStats) -> tuple[str, ...]:
    """What in the tags will make learning hard or impossible, a sentence each."""
    names = stats.classes
    twins = stats.inseparable()
    bound = [(a, b) for a, b in stats.never_without() if (min(a, b), max(a, b)) not in set(twins)]
    out = []
    if twins:
        words = _some([f"{names[a]} and {names[b]}" for a, b in twins])
        out.append(f"Never apart: {words}. From tags alone no method can tell such classes from each other.")
    if bound:
        words = _some([f"{names[a]} (with {names[b]})" for a, b in bound])
        out.append(f"Never without another class: {words}. Photos of such a class without the other would help.")
    if stats.unused:
        out.append(f"No photo has these tags: {_some(stats.unused)}.")
    if stats.untagged:
        words = f"{plural(len(stats.untagged), 'photo')} without any tag: {_some(stats.untagged)}."
        out.append(f"{words} They teach what none of the classes looks like.")
    if any(stats.unsure):
        most = by_number(stats.unsure)
        words = _some([f"{names[c]} ({whole(stats.unsure[c])})" for c in most])
        out.append(f"{plural(sum(stats.unsure), 'unsure tag')}, neither taught nor denied: {words}.")
    return tuple(out)


def _some(words: Sequence[str]) -> str:
    return listed(tuple(words), NAMED)


# ---------------------------------------------------------------- sizes and shapes of the photos


def size_figure(stats: PhotoSizes) -> Figure:
    """Width against height."""
    bubbles = gather([Bubble(float(w), float(h), n) for (w, h), n in zip(stats.sizes, stats.counts, strict=True)])
    chart = bubble_chart(bubbles, label="Sizes of the photos", x_label="width, pixels", y_label="height, pixels")
    reading = "There is no photo."
    if stats.sizes:
        (width, height), photos = stats.sizes[0], sum(stats.counts)
        short = sorted((min(size), n) for size, n in zip(stats.sizes, stats.counts, strict=True))
        reading = (
            f"{plural(len(stats.sizes), 'different size')} in {plural(photos, 'photo')}; the most frequent is "
            f"{width} x {height} ({percent(stats.counts[0] / photos)} %). Short sides go from {short[0][0]} to "
            f"{short[-1][0]} pixels, half of them up to {_median(short)}."
        )
    note = "a bubble's area shows how many photos; dashed: square photos"
    return Figure("Width and height", note, (Markup(chart),), reading)


def _median(weighted: Sequence[tuple[int, int]]) -> int:
    """The value half of the weight lies at or below; sorted values in."""
    half, below = sum(n for _, n in weighted) / 2, 0
    for value, count in weighted:
        below += count
        if below >= half:
            return value
    return 0


def shape_figure(stats: PhotoSizes) -> Figure:
    """Width over height, each photo at the nearest of the usual shapes."""
    counts: Counter[str] = Counter()
    for (width, height), n in zip(stats.sizes, stats.counts, strict=True):
        counts[min(SHAPES, key=lambda name: abs(math.log(width / height / SHAPES[name])))] += n
    bars = [Column(name, float(counts[name])) for name in SHAPES]
    chart = columns(
        bars, label="Shapes of the photos", x_label="width : height, the nearest of these", y_label="photos"
    )
    reading = "There is no photo."
    if stats.sizes:
        upright, lying = stats.shares(lambda w, h: h > w), stats.shares(lambda w, h: w > h)
        widest = max(max(w / h, h / w) for w, h in stats.sizes)
        reading = (
            f"{percent(lying)} % of the photos lie, {percent(upright)} % stand upright and "
            f"{percent(1 - lying - upright)} % are square; the most stretched has sides of {widest:.1f} : 1."
        )
    return Figure("Shape", "photos by width : height", (Markup(chart),), reading)
