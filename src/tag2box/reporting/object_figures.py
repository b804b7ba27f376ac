"""Figures of a dataset's objects: what one box a tag must miss, how many to a photo, how large, how close."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from markupsafe import Markup

from tag2box.data.stats import SIZE_EDGES, ObjectStats
from tag2box.reporting.charts import Bars, Key, grouped_bars
from tag2box.reporting.plots import Shares, share_bars
from tag2box.reporting.sections import Figure
from tag2box.reporting.text import listed, percent, plural, whole

LONG = 24  # classes from which a chart is cut into two
NUMBERS = ((1, 1), (2, 2), (3, 3), (4, 6), (7, None))  # objects on a photo, from and to

OBJECTS = (Key("objects", "left-out"), Key("image-class pairs: what one box a tag can find", "level-3"))


def in_columns(rows: Sequence[int], draw: Callable[[Sequence[int]], str]) -> tuple[Markup, ...]:
    """A chart of some classes, cut into two halves where it would be long."""
    half = -(-len(rows) // 2)
    parts = (rows[:half], rows[half:]) if len(rows) > LONG else (rows,)
    return tuple(Markup(draw(part)) for part in parts)


def by_number(counts: Sequence[int]) -> list[int]:
    """Classes that have any, the most frequent first."""
    return sorted((c for c, n in enumerate(counts) if n), key=lambda c: (-counts[c], c))


def missed_figure(stats: ObjectStats) -> Figure:
    """Figure 1(c) of the paper for any dataset: objects against image-class pairs."""
    order, top = by_number(stats.objects), float(max(stats.objects, default=1))

    def draw(rows: Sequence[int]) -> str:
        groups = [Bars(stats.classes[c], (float(stats.objects[c]), float(stats.pairs[c]))) for c in rows]
        return grouped_bars(groups, OBJECTS, label="Objects and image-class pairs by class", limit=top, show=whole)

    share = [m / o if o else 0.0 for m, o in zip(stats.missed, stats.objects, strict=True)]
    worst = sorted((c for c in order if stats.missed[c]), key=lambda c: -share[c])[:3]
    found, all_of_them = sum(stats.pairs), sum(stats.objects)
    reading = (
        f"One box for each class on a photo finds at most {whole(found)} of {plural(all_of_them, 'object')}: "
        f"{whole(all_of_them - found)} ({percent(stats.missed_share)} %) are left out"
    )
    hardest = listed(tuple(f"{stats.classes[c]} ({percent(share[c])} %)" for c in worst))
    reading += f"; most of all {hardest}." if worst else ": every photo shows its classes once."
    return Figure("Objects and image-class pairs", "number of each", in_columns(order, draw), reading, OBJECTS)


def number_figure(stats: ObjectStats) -> Figure:
    """The paper's appendix figure: how many objects of a class are on the photos that show it."""
    order = by_number(stats.objects)
    table = stats.per_pair.tolist()
    names = [
        str(low) if low == high else f"{low} or more" if high is None else f"{low} to {high}" for low, high in NUMBERS
    ]
    keys = tuple(Key(name, f"level-{i}") for i, name in enumerate(names))
    means = {c: stats.objects[c] / stats.pairs[c] for c in order}

    def draw(rows: Sequence[int]) -> str:
        shares = [
            Shares(
                stats.classes[c],
                tuple(sum(table[c][low - 1 : high]) for low, high in NUMBERS),
                f"{means[c]:.1f} (most {_most(table[c])})",
            )
            for c in rows
        ]
        return share_bars(shares, keys, label="Objects of a class on the photos that show it")

    ordered = sorted(order, key=lambda c: (-means[c], c))
    charts = in_columns(ordered, draw)
    return Figure(
        "Objects of a class on a photo that shows it",
        "share of the photos; behind the bar: the mean, and the most on one photo",
        charts,
        _number_reading(stats, ordered, means),
        keys,
    )


def _number_reading(stats: ObjectStats, order: Sequence[int], means: dict[int, float]) -> str:
    pairs = sum(stats.pairs)
    single = int(stats.per_pair[:, 0].sum()) / pairs
    words = (
        f"A class that is on a photo is there {sum(stats.objects) / pairs:.2f} times on average, and only once on "
        f"{percent(single)} % of the photos"
    )
    if len(order) == 1:
        return f"{words}."
    first, last = order[0], order[-1]
    return (
        f"{words}; {stats.classes[first]} comes in the largest numbers ({means[first]:.1f} a photo), "
        f"{stats.classes[last]} in the smallest ({means[last]:.1f})."
    )


def _most(row: Sequence[int]) -> int:
    return max(number for number, photos in enumerate(row, start=1) if photos)


def size_figure(stats: ObjectStats) -> Figure:
    """How large objects are on their photos."""
    small, large = (f"{100 * edge:g} %" for edge in SIZE_EDGES)
    names = (f"small: below {small}", "medium", f"large: {large} or more")
    keys = tuple(Key(name, f"level-{i + 1}") for i, name in enumerate(names))
    total = stats.by_size.sum(0).tolist()
    order = by_number(stats.objects)
    shares = [percent(n / sum(total)) for n in total]
    smallest = max(order, key=lambda c: int(stats.by_size[c, 0]) / stats.objects[c])
    reading = f"{shares[0]} % of the objects are small, {shares[1]} % medium and {shares[2]} % large"
    if total[0]:
        most = percent(int(stats.by_size[smallest, 0]) / stats.objects[smallest])
        reading += f"; the class with the largest share of small ones is {stats.classes[smallest]} ({most} %)"
    rows = _rows(stats, stats.by_size.tolist(), column=2)
    charts = in_columns(
        range(len(rows)), lambda part: share_bars([rows[i] for i in part], keys, label="Sizes of objects")
    )
    note = "share of the objects by their part of the photo's area; behind the bar: per cent large"
    return Figure("Size of the objects", note, charts, f"{reading}.", keys)


def company_figure(stats: ObjectStats) -> Figure:
    """How often objects of one class touch each other, and so are easily taken for one."""
    keys = (
        Key("the only one of its class", "level-0"),
        Key("others apart", "level-2"),
        Key("touching another", "left-out"),
    )
    total = stats.by_company.sum(0).tolist()
    order = by_number(stats.objects)
    closest = max(order, key=lambda c: int(stats.by_company[c, 2]) / stats.objects[c])
    several = total[1] + total[2]
    reading = f"{percent(total[2] / sum(total))} % of the objects touch another of their class"
    if several:
        reading += f" ({percent(total[2] / several)} % of those that are not alone)"
    if total[2]:
        most = percent(int(stats.by_company[closest, 2]) / stats.objects[closest])
        reading += f", {stats.classes[closest]} most often ({most} %): one box around both is the easy mistake"
    rows = _rows(stats, stats.by_company.tolist(), column=2)
    charts = in_columns(
        range(len(rows)), lambda part: share_bars([rows[i] for i in part], keys, label="Touching objects")
    )
    note = "share of the objects whose box meets or overlaps another of the class; behind the bar: per cent touching"
    return Figure("Grouped objects", note, charts, f"{reading}.", keys)


def _rows(stats: ObjectStats, table: Sequence[Sequence[int]], *, column: int) -> list[Shares]:
    """Rows of shares, the class with the largest share in a column first."""
    order = sorted(by_number(stats.objects), key=lambda c: (-table[c][column] / stats.objects[c], c))
    return [Shares(stats.classes[c], tuple(table[c]), percent(table[c][column] / stats.objects[c])) for c in order]
