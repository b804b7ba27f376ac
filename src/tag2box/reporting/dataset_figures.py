"""Figures of a dataset: objects (missed by one box per tag, per photo, sizes, neighbours), tags, photo sizes."""

import math
from collections import Counter
from collections.abc import Callable, Sequence

from markupsafe import Markup

from tag2box.data.stats import SIZE_EDGES, ObjectStats, PhotoSizes, TagStats
from tag2box.reporting import formatting as fmt, plots, sections
from tag2box.reporting.charts import Bars, Key, grouped_bars

LONG = 24  # classes above which a chart is split into two
NUMBERS = ((1, 1), (2, 2), (3, 3), (4, 6), (7, None))  # bins of objects per photo, from and to
OBJECTS = (Key("objects", "left-out"), Key("image-class pairs: what one box per tag can find", "level-3"))
MANY = 9  # tags per photo from which on columns are merged
EVEN = 1.2  # ratio of photos up to which classes count as balanced
TAGS_NAMED = 8  # names listed in a warning
SHAPES = {"1:2": 1 / 2, "2:3": 2 / 3, "3:4": 3 / 4, "1:1": 1.0, "4:3": 4 / 3, "3:2": 3 / 2, "16:9": 16 / 9, "2:1": 2.0}


def in_columns(rows: Sequence[int], draw: Callable[[Sequence[int]], str]) -> tuple[Markup, ...]:
    """A chart of some classes, split into two halves if it would be long."""
    half = -(-len(rows) // 2)
    parts = (rows[:half], rows[half:]) if len(rows) > LONG else (rows,)
    return tuple(Markup(draw(part)) for part in parts)


def by_number(counts: Sequence[int]) -> list[int]:
    """Classes with a count above zero, the most frequent first."""
    return sorted((c for c, n in enumerate(counts) if n), key=lambda c: (-counts[c], c))


# ---------------------------------------------------------------- objects


def missed_figure(stats: ObjectStats) -> sections.Figure:
    """Objects against image-class pairs: figure 1(c) of the OD-WSCL paper for any dataset."""
    order, top = by_number(stats.objects), float(max(stats.objects, default=1))

    def draw(rows: Sequence[int]) -> str:
        groups = [Bars(stats.classes[c], (float(stats.objects[c]), float(stats.pairs[c]))) for c in rows]
        return grouped_bars(groups, OBJECTS, label="Objects and image-class pairs per class", limit=top, show=fmt.whole)

    share = [m / o if o else 0.0 for m, o in zip(stats.missed, stats.objects, strict=True)]
    worst = sorted((c for c in order if stats.missed[c]), key=lambda c: -share[c])[:3]
    found, all_of_them = sum(stats.pairs), sum(stats.objects)
    reading = (
        f"One box per class and photo finds at most {fmt.whole(found)} of {fmt.plural(all_of_them, 'object')}: "
        f"{fmt.whole(all_of_them - found)} ({fmt.percent(stats.missed_share)} %) are left out"
    )
    hardest = fmt.listed(tuple(f"{stats.classes[c]} ({fmt.percent(share[c])} %)" for c in worst))
    reading += f"; most of all {hardest}." if worst else ": every photo shows its classes once."
    return sections.Figure("Objects and image-class pairs", "number of each", in_columns(order, draw), reading, OBJECTS)


def objects_per_photo_figure(stats: ObjectStats) -> sections.Figure:
    """Objects of a class on the photos that show it: figure 7 of the OD-WSCL paper for any dataset."""
    order = by_number(stats.objects)
    table = stats.per_pair.tolist()
    names = [
        str(low) if low == high else f"{low} or more" if high is None else f"{low} to {high}" for low, high in NUMBERS
    ]
    keys = tuple(Key(name, f"level-{i}") for i, name in enumerate(names))
    means = {c: stats.objects[c] / stats.pairs[c] for c in order}

    def draw(rows: Sequence[int]) -> str:
        shares = [
            plots.Shares(
                stats.classes[c],
                tuple(sum(table[c][low - 1 : high]) for low, high in NUMBERS),
                f"{means[c]:.1f} (most {_most(table[c])})",
            )
            for c in rows
        ]
        return plots.share_bars(shares, keys, label="Objects of a class on the photos that show it")

    ordered = sorted(order, key=lambda c: (-means[c], c))
    charts = in_columns(ordered, draw)
    return sections.Figure(
        "Objects of a class on a photo that shows it",
        "share of the photos; after the bar: the mean, and the maximum on one photo",
        charts,
        _number_reading(stats, ordered, means),
        keys,
    )


def _number_reading(stats: ObjectStats, order: Sequence[int], means: dict[int, float]) -> str:
    pairs = sum(stats.pairs)
    single = int(stats.per_pair[:, 0].sum()) / pairs
    words = (
        f"A class on a photo has {sum(stats.objects) / pairs:.2f} objects there on average, and a single one on "
        f"{fmt.percent(single)} % of the photos"
    )
    if len(order) == 1:
        return f"{words}."
    first, last = order[0], order[-1]
    return (
        f"{words}; {stats.classes[first]} has the most ({means[first]:.1f} per photo), "
        f"{stats.classes[last]} the fewest ({means[last]:.1f})."
    )


def _most(row: Sequence[int]) -> int:
    return max(number for number, photos in enumerate(row, start=1) if photos)


def object_size_figure(stats: ObjectStats) -> sections.Figure:
    """Sizes of objects relative to their photos."""
    small, large = (f"{100 * edge:g} %" for edge in SIZE_EDGES)
    names = (f"small: below {small}", "medium", f"large: {large} or more")
    keys = tuple(Key(name, f"level-{i + 1}") for i, name in enumerate(names))
    total = stats.by_size.sum(0).tolist()
    order = by_number(stats.objects)
    shares = [fmt.percent(n / sum(total)) for n in total]
    smallest = max(order, key=lambda c: int(stats.by_size[c, 0]) / stats.objects[c])
    reading = f"{shares[0]} % of the objects are small, {shares[1]} % medium and {shares[2]} % large"
    if total[0]:
        most = fmt.percent(int(stats.by_size[smallest, 0]) / stats.objects[smallest])
        reading += f"; the class with the largest share of small ones is {stats.classes[smallest]} ({most} %)"
    rows = _rows(stats, stats.by_size.tolist(), column=2)
    charts = in_columns(
        range(len(rows)), lambda part: plots.share_bars([rows[i] for i in part], keys, label="Sizes of objects")
    )
    note = "share of the objects by their part of the photo's area; after the bar: per cent large"
    return sections.Figure("Size of the objects", note, charts, f"{reading}.", keys)


def neighbour_figure(stats: ObjectStats) -> sections.Figure:
    """How often objects of one class touch each other, and so are easily grouped into one box."""
    keys = (
        Key("the only one of its class", "level-0"),
        Key("others apart", "level-2"),
        Key("touching another", "left-out"),
    )
    total = stats.by_adjacency.sum(0).tolist()
    order = by_number(stats.objects)
    closest = max(order, key=lambda c: int(stats.by_adjacency[c, 2]) / stats.objects[c])
    several = total[1] + total[2]
    reading = f"{fmt.percent(total[2] / sum(total))} % of the objects touch another of their class"
    if several:
        reading += f" ({fmt.percent(total[2] / several)} % of those that are not alone)"
    if total[2]:
        most = fmt.percent(int(stats.by_adjacency[closest, 2]) / stats.objects[closest])
        reading += f", {stats.classes[closest]} most often ({most} %): one box around both is a typical error"
    rows = _rows(stats, stats.by_adjacency.tolist(), column=2)
    charts = in_columns(
        range(len(rows)), lambda part: plots.share_bars([rows[i] for i in part], keys, label="Touching objects")
    )
    note = "share of the objects whose box meets or overlaps another of the class; after the bar: per cent touching"
    return sections.Figure("Grouped objects", note, charts, f"{reading}.", keys)


def _rows(stats: ObjectStats, table: Sequence[Sequence[int]], *, column: int) -> list[plots.Shares]:
    """Rows of shares, sorted by the share in a column, the largest first."""
    order = sorted(by_number(stats.objects), key=lambda c: (-table[c][column] / stats.objects[c], c))
    return [
        plots.Shares(stats.classes[c], tuple(table[c]), fmt.percent(table[c][column] / stats.objects[c])) for c in order
    ]


# ---------------------------------------------------------------- tags


def tags_per_photo_figure(stats: TagStats) -> sections.Figure:
    """Histogram of tags per photo."""
    counts = [*stats.per_photo[:MANY], *([sum(stats.per_photo[MANY:])] if len(stats.per_photo) > MANY else [])]
    bars = [plots.PlotColumn(f"{n}+" if n == MANY else str(n), float(count)) for n, count in enumerate(counts)]
    mean = sum(stats.per_class) / stats.photos if stats.photos else 0.0
    several = sum(stats.per_photo[2:]) / stats.photos if stats.photos else 0.0
    reading = f"A photo has {mean:.2f} tags on average; {fmt.percent(several)} % have two or more"
    reading += (
        f", and {fmt.plural(len(stats.untagged), 'photo')} none at all." if stats.untagged else ", and none is without."
    )
    chart = plots.columns(bars, label="Photos by number of tags", x_label="tags of a photo", y_label="photos")
    return sections.Figure("Tags per photo", "photos by number of tags", (Markup(chart),), reading)


def balance_figure(stats: TagStats) -> sections.Figure:
    """Photos per class."""
    keys = (Key("photos", "run-0"),)
    order, top = by_number(stats.per_class), float(max(stats.per_class, default=1) or 1)

    def draw(rows: Sequence[int]) -> str:
        groups = [Bars(stats.classes[c], (float(stats.per_class[c]),)) for c in rows]
        return grouped_bars(groups, keys, label="Photos per class", limit=top, show=fmt.whole)

    return sections.Figure("Class balance", "photos per tag", in_columns(order, draw), _balance_reading(stats, order))


def _balance_reading(stats: TagStats, order: Sequence[int]) -> str:
    if not order:
        return "No photo has a tag."
    first, last = ((stats.classes[c], stats.per_class[c]) for c in (order[0], order[-1]))
    if len(order) == 1:
        return f"The only class, {first[0]}, is on {fmt.plural(first[1], 'photo')}."
    if first[1] == last[1]:
        return f"All classes are on the same number of photos: {fmt.whole(first[1])}."
    if first[1] < EVEN * last[1]:
        return f"Well balanced: from {fmt.plural(last[1], 'photo')} ({last[0]}) to {fmt.whole(first[1])} ({first[0]})."
    ratio = f"{first[1] / last[1]:.1f} times as many as {last[0]} ({fmt.whole(last[1])})"
    return f"{first[0]} is on {fmt.plural(first[1], 'photo')}, {ratio}."


def together_figure(stats: TagStats) -> sections.Figure:
    """Co-occurrence of classes; on the diagonal, how often a class is alone."""
    order = by_number(stats.per_class)
    table = stats.together.tolist()

    def share(a: int, b: int) -> float:
        return (stats.alone[a] if a == b else table[a][b]) / stats.per_class[a]

    def tip(row: int, column: int) -> str:
        a, b = order[row], order[column]
        context = "alone" if a == b else f"with {stats.classes[b]}"
        photos = fmt.plural(stats.per_class[a], "photo")
        return f"{stats.classes[a]} {context}: {fmt.percent(share(a, b))} % of its {photos}"

    values = [[share(a, b) for b in order] for a in order]
    chart = plots.matrix([stats.classes[c] for c in order], values, label="Classes on the same photos", tip=tip)
    keys = (Key("with the class of the column", "run-0"), Key("alone", "run-1"))
    note = "per cent of the photos of the class on the left"
    return sections.Figure("Tags that occur together", note, (Markup(chart),), _together_reading(stats, order), keys)


def _together_reading(stats: TagStats, order: Sequence[int]) -> str:
    tagged = sum(stats.per_photo[1:])
    words = (
        f"{fmt.percent(sum(stats.alone) / tagged)} % of the tagged photos show a single class" if tagged else "No tags"
    )
    couples = [(int(stats.together[a, b]), a, b) for a in order for b in order if a < b]
    count, a, b = max(couples, default=(0, 0, 0))
    if not count:
        return f"{words}; no two classes share a photo." if len(order) > 1 else f"{words}."
    return f"{words}; most often together are {stats.classes[a]} and {stats.classes[b]} ({fmt.plural(count, 'photo')})."


def tag_warnings(stats: TagStats) -> tuple[str, ...]:
    """Sentences about tags that make learning hard or impossible."""
    names = stats.classes
    twins = stats.inseparable()
    bound = [(a, b) for a, b in stats.never_without() if (min(a, b), max(a, b)) not in set(twins)]
    out = []
    if twins:
        words = _some([f"{names[a]} and {names[b]}" for a, b in twins])
        out.append(f"Never apart: {words}. From tags alone no method can distinguish such classes.")
    if bound:
        words = _some([f"{names[a]} (with {names[b]})" for a, b in bound])
        out.append(f"Never without another class: {words}. Photos of such a class without the other would help.")
    if stats.unused:
        out.append(f"No photo has these tags: {_some(stats.unused)}.")
    if stats.untagged:
        words = f"{fmt.plural(len(stats.untagged), 'photo')} without any tag: {_some(stats.untagged)}."
        out.append(f"{words} They are examples without any of the classes.")
    if any(stats.unsure):
        most = by_number(stats.unsure)
        words = _some([f"{names[c]} ({fmt.whole(stats.unsure[c])})" for c in most])
        out.append(f"{fmt.plural(sum(stats.unsure), 'unsure tag')}, neither positive nor negative: {words}.")
    return tuple(out)


def _some(words: Sequence[str]) -> str:
    return fmt.listed(tuple(words), TAGS_NAMED)


# ---------------------------------------------------------------- sizes and shapes of the photos


def photo_size_figure(stats: PhotoSizes) -> sections.Figure:
    """Widths and heights of the photos."""
    bubbles = plots.gather_bubbles(
        [plots.Bubble(float(w), float(h), n) for (w, h), n in zip(stats.sizes, stats.counts, strict=True)]
    )
    chart = plots.bubble_chart(bubbles, label="Sizes of the photos", x_label="width, pixels", y_label="height, pixels")
    reading = "There is no photo."
    if stats.sizes:
        (width, height), photos = stats.sizes[0], sum(stats.counts)
        short = sorted((min(size), n) for size, n in zip(stats.sizes, stats.counts, strict=True))
        reading = (
            f"{fmt.plural(len(stats.sizes), 'different size')} in {fmt.plural(photos, 'photo')}; the most frequent is "
            f"{width} x {height} ({fmt.percent(stats.counts[0] / photos)} %). Short sides range from {short[0][0]} to "
            f"{short[-1][0]} pixels, with a median of {_median(short)}."
        )
    note = "a bubble's area shows how many photos; dashed: square photos"
    return sections.Figure("Width and height", note, (Markup(chart),), reading)


def _median(weighted: Sequence[tuple[int, int]]) -> int:
    """The weighted median of sorted values."""
    half, below = sum(n for _, n in weighted) / 2, 0
    for value, count in weighted:
        below += count
        if below >= half:
            return value
    return 0


def shape_figure(stats: PhotoSizes) -> sections.Figure:
    """Aspect ratios, each photo counted at the nearest common one."""
    counts: Counter[str] = Counter()
    for (width, height), n in zip(stats.sizes, stats.counts, strict=True):
        counts[min(SHAPES, key=lambda name: abs(math.log(width / height / SHAPES[name])))] += n
    bars = [plots.PlotColumn(name, float(counts[name])) for name in SHAPES]
    chart = plots.columns(
        bars, label="Shapes of the photos", x_label="width : height, the nearest of these", y_label="photos"
    )
    reading = "There is no photo."
    if stats.sizes:
        portrait, landscape = stats.shares(lambda w, h: h > w), stats.shares(lambda w, h: w > h)
        widest = max(max(w / h, h / w) for w, h in stats.sizes)
        reading = (
            f"{fmt.percent(landscape)} % of the photos are landscape, {fmt.percent(portrait)} % portrait and "
            f"{fmt.percent(1 - landscape - portrait)} % square; the most extreme aspect ratio is {widest:.1f} : 1."
        )
    return sections.Figure("Aspect ratio", "photos by width : height", (Markup(chart),), reading)
