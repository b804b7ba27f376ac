"""The page about proposals: recall of one or more proposal sources, and the photos with most objects out of reach."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from markupsafe import Markup

from tag2box.annotations import Objects, Photo
from tag2box.data.stats import SIZE_EDGES
from tag2box.proposals.recall import Miss, RecallCurves
from tag2box.reporting import charts, formatting as fmt, gallery, plots
from tag2box.reporting.sections import Figure, Section, SectionPage, TileRow, write_page

RECALL_COLOURS = 6  # CSS classes run-0 .. run-5
COMPARED = 100  # boxes per photo at which sources are also compared, if they have more
BY_SIZE = 2  # IoU thresholds drawn by object size, the lowest first
LISTED = 12  # missing photos listed by name
IN_A_ROW = 3  # photos per row if there is a single source
LABELLED = 3  # most missed objects of a photo that still get labels
SIZES = (f"small: below {100 * SIZE_EDGES[0]:g} %", "medium", f"large: {100 * SIZE_EDGES[1]:g} % or more")


@dataclass(frozen=True, slots=True)
class RecallSource:
    """One proposal source: its name on the page, its origin in words, its recall, photos it has no boxes for."""

    name: str
    origin: str
    reach: RecallCurves
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PhotoMisses:
    """The objects of one photo that no box of a source fits, with the best box of each (None without any)."""

    misses: tuple[Miss, ...]
    best: tuple[tuple[float, ...] | None, ...]


@dataclass(frozen=True, slots=True)
class WorstPhoto:
    """A photo with objects out of reach, per source."""

    photo: Photo
    objects: Objects
    missed: tuple[PhotoMisses, ...]


@dataclass(frozen=True, slots=True)
class RecallInputs:
    """Everything the page shows; all sources were measured on the same photos."""

    title: str
    classes: tuple[str, ...]
    sources: tuple[RecallSource, ...]
    worst: tuple[WorstPhoto, ...] = ()

    def keys(self) -> tuple[charts.Key, ...]:
        """Legend: names of the sources with their colours."""
        return tuple(charts.Key(source.name, f"run-{i % RECALL_COLOURS}") for i, source in enumerate(self.sources))


def write_recall_page(inputs: RecallInputs, out: Path) -> None:
    """Write the page about proposals as one self-contained HTML file."""
    write_page(build_recall_page(inputs), out)


def build_recall_page(inputs: RecallInputs) -> SectionPage:
    """Turn recall figures into everything the template shows."""
    album = gallery.Album()
    sections = (_curve_section(inputs), _source_section(inputs), _size_section(inputs), _class_section(inputs))
    return SectionPage(
        kicker="tag2box proposals",
        title=inputs.title,
        lede=_lede(inputs),
        facts=_facts(inputs),
        sections=(*sections, *_worst_section(inputs, album)),
        style=Markup(album.style),
        unreadable=album.unreadable,
    )


def _lede(inputs: RecallInputs) -> str:
    first = inputs.sources[0].reach
    names = fmt.listed(tuple(source.name for source in inputs.sources))
    return (
        f"A detector trained on tags selects among proposals: it cannot find an object that no box fits. Measured on "
        f"{fmt.plural(first.photos, 'photo')} with {fmt.plural(int(first.objects.sum()), 'object')}: {names}."
    )


def _facts(inputs: RecallInputs) -> tuple[fmt.Fact, ...]:
    best = max(inputs.sources, key=lambda source: float(source.reach.recall()[0, -1]))
    recall, overlap = best.reach.recall()[:, -1].tolist(), float(best.reach.best_overlap()[-1])
    whose = f"{best.name}, " if len(inputs.sources) > 1 else ""
    facts = [
        fmt.Fact(f"Recall at IoU {t:g}", fmt.percent(share), "%", f"{whose}all boxes")
        for t, share in zip(best.reach.thresholds, recall, strict=True)
    ]
    per_photo = fmt.format_number(float(best.reach.boxes_per_photo()[-1]))
    return (
        *facts,
        fmt.Fact("Mean best overlap", fmt.percent(overlap), "%", f"{whose}all boxes"),
        fmt.Fact("Boxes per photo", per_photo, "", f"{whose}at most {fmt.whole(best.reach.most)}"),
    )


# ---------------------------------------------------------------- curves


def _curve_section(inputs: RecallInputs) -> Section:
    figures = []
    for row, t in enumerate(inputs.sources[0].reach.thresholds):
        shares = [source.reach.recall()[row].tolist() for source in inputs.sources]
        note = f"objects that a box overlaps by {t:g} or more"
        figures.append(_curve_figure(inputs, shares, title=f"Recall at IoU {t:g}", note=note, gain="of the objects"))
    overlaps = [source.reach.best_overlap().tolist() for source in inputs.sources]
    note = "mean IoU of each object with its best box"
    figures.append(_curve_figure(inputs, overlaps, title="Mean best overlap", note=note, gain="overlap on average"))
    return Section(
        "curves",
        "Recall by number of boxes",
        "Recall of the first n boxes of each photo. The x axis is logarithmic; a line ends at the number that includes "
        "all boxes of every photo. Ranked boxes are ordered by score, others as stored, in random order.",
        figures=tuple(figures),
    )


def _curve_figure(
    inputs: RecallInputs, values: Sequence[Sequence[float]], *, title: str, note: str, gain: str
) -> Figure:
    several = len(values) > 1
    lines = []
    for source, key, row in zip(inputs.sources, inputs.keys(), values, strict=True):
        reach = source.reach
        below = [(float(n), 100 * v) for n, v in zip(reach.budgets, row, strict=False) if n < reach.most]
        points = (*below, (float(reach.most), 100 * row[-1])) if reach.most else ()
        lines.append(charts.Line(key.name if several else "all boxes", key.css, points))
    chart = plots.budget_chart(lines, label=title, x_label="boxes per photo", y_label="per cent")
    few = max((n for n in inputs.sources[0].reach.budgets if n <= COMPARED), default=0)
    reading = _compare(inputs, [row[-1] for row in values], "All boxes", gain)
    if few and any(source.reach.most > few for source in inputs.sources):
        column = inputs.sources[0].reach.budgets.index(few)
        reading += " " + _compare(inputs, [row[column] for row in values], f"The first {few} of each photo", gain)
    return Figure(title, note, (Markup(chart),), reading, inputs.keys() if several else ())


def _compare(inputs: RecallInputs, shares: Sequence[float], subject: str, gain: str) -> str:
    """A sentence about one number of boxes: the best and the worst source."""
    order = sorted(range(len(shares)), key=lambda i: (-shares[i], i))
    best, last = order[0], order[-1]
    if best == last:
        return f"{subject}: {fmt.percent(shares[0])} % {gain}."
    if fmt.percent(shares[best]) == fmt.percent(shares[last]):
        return f"{subject}: {fmt.percent(shares[best])} % {gain}, whatever the source."
    names = [source.name for source in inputs.sources]
    return (
        f"{subject}: {fmt.percent(shares[best])} % {gain} with {names[best]}, the best, and "
        f"{fmt.percent(shares[last])} % with {names[last]}, the last."
    )


# ---------------------------------------------------------------- sizes and classes


def _size_section(inputs: RecallInputs) -> Section:
    thresholds = inputs.sources[0].reach.thresholds[:BY_SIZE]
    figures = tuple(_size_figure(inputs, row, t) for row, t in enumerate(thresholds))
    words = "Objects by their part of the photo's area, with all boxes."
    return Section("sizes", "Recall by object size", words, figures=figures)


def _size_figure(inputs: RecallInputs, row: int, threshold: float) -> Figure:
    shares = [source.reach.recall_by_size()[row].tolist() for source in inputs.sources]
    counts = inputs.sources[0].reach.objects.sum(0).tolist()
    groups = [
        charts.Bars(size, tuple(share[b] for share in shares)) for b, size in enumerate(("small", "medium", "large"))
    ]
    label = f"Recall at IoU {threshold:g} by object size"
    chart = charts.grouped_bars(groups, inputs.keys(), label=label)
    best = max(range(len(shares)), key=lambda i: float(inputs.sources[i].reach.recall()[row, -1]))
    parts = [
        f"{fmt.percent(shares[best][b])} % of {fmt.whole(counts[b])} {name.split(':')[0]}"
        for b, name in enumerate(SIZES)
        if counts[b]
    ]
    whose = f"{inputs.sources[best].name} reaches" if len(shares) > 1 else "The boxes reach"
    return Figure(
        f"Recall at IoU {threshold:g}",
        f"per cent of the objects; {'; '.join(SIZES)}",
        (Markup(chart),),
        f"{whose} {fmt.listed(tuple(parts))} objects.",
        inputs.keys() if len(shares) > 1 else (),
    )


def _class_section(inputs: RecallInputs) -> Section:
    reaches = [source.reach for source in inputs.sources]
    measures = [f"IoU {t:g}" for t in reaches[0].thresholds] + ["best overlap"]
    names = [source.name for source in inputs.sources]
    heads = [f"{measure}\n{name}" if len(names) > 1 else measure for measure in measures for name in names]
    by_class = [torch.cat([r.recall_by_class(), r.best_overlap_by_class()[None]]) for r in reaches]  # (T + 1, C) each
    rows = []
    for c, name in enumerate(inputs.classes):
        cells = [fmt.percent(float(table[row, c])) for row in range(len(measures)) for table in by_class]
        rows.append(fmt.TableRow(name, (fmt.whole(int(reaches[0].objects[c].sum())), *cells)))
    table = fmt.Table("Each class, in per cent, with all boxes", ("objects", *heads), tuple(rows))
    return Section("classes", "Recall by class", _class_words(inputs), tables=(table,))


def _class_words(inputs: RecallInputs) -> str:
    reach, name = inputs.sources[0].reach, inputs.sources[0].name
    shares = reach.recall_by_class()[0].tolist()  # nan, and so not below one, for classes without objects
    worst = sorted((c for c in range(len(shares)) if shares[c] < 1), key=lambda c: (shares[c], c))[:3]
    if not worst:
        return f"At IoU {reach.thresholds[0]:g}, {name} reaches every object of every class."
    hardest = fmt.listed(tuple(f"{inputs.classes[c]} ({fmt.percent(shares[c])} %)" for c in worst))
    return f"Hardest to reach at IoU {reach.thresholds[0]:g} for {name}: {hardest}."


def _source_section(inputs: RecallInputs) -> Section:
    rows = []
    for source in inputs.sources:
        order = "by score" if source.reach.ranked else "as stored"
        per_photo = fmt.format_number(float(source.reach.boxes_per_photo()[-1]))
        rows.append(fmt.TableRow(source.name, (per_photo, fmt.whole(source.reach.most), order, source.origin)))
    table = fmt.Table("Proposal sources", ("boxes per photo", "most", "order", "origin"), tuple(rows))
    warnings = tuple(
        f"{source.name} has no boxes for {fmt.plural(len(source.missing), 'photo')}: "
        f"{fmt.listed(source.missing, LISTED)}. All sources were measured without these."
        for source in inputs.sources
        if source.missing
    )
    words = f"Measured on {fmt.plural(inputs.sources[0].reach.photos, 'photo')}, the same for every source."
    return Section("sources", "Sources", words, tables=(table,), prose=True, warnings=warnings)


# ---------------------------------------------------------------- the worst photos


def _worst_section(inputs: RecallInputs, album: gallery.Album) -> list[Section]:
    shots = [(worst, album.add(worst.photo.path)) for worst in inputs.worst]
    shown = [(worst, shot) for worst, shot in shots if shot]
    if not shown:
        return []
    sources = range(len(inputs.sources))
    if len(sources) > 1:
        shelves = [TileRow(w.photo.id, "", tuple(_tile(inputs, w, i, shot) for i in sources)) for w, shot in shown]
    else:
        tiles = [_tile(inputs, worst, 0, shot) for worst, shot in shown]
        shelves = [TileRow("", "", tuple(tiles[i : i + IN_A_ROW])) for i in range(0, len(tiles), IN_A_ROW)]
    boxes = (
        ("missed", "object no box fits (IoU below 0.5)"),
        ("pseudo", "the best box for it, with their overlap"),
        ("truth", "object a box fits"),
    )
    words = "The photos with most objects out of reach, summed over all sources, and the best proposal for each object."
    return [Section("worst", "The worst photos", words, boxes=boxes, shelves=tuple(shelves))]


def _tile(inputs: RecallInputs, worst: WorstPhoto, index: int, shot: gallery.Shot) -> gallery.Tile:
    missed, name = worst.missed[index], inputs.sources[index].name
    corners, labels = worst.objects.boxes.tolist(), worst.objects.labels.tolist()
    gone = {miss.row for miss in missed.misses}
    counted = (~(worst.objects.difficult | worst.objects.crowd)).nonzero().flatten().tolist()
    boxes = [gallery.draw_box(shot, corners[row], kind="truth") for row in counted if row not in gone]
    for miss, best in zip(missed.misses, missed.best, strict=True):
        what = gallery.class_name(inputs.classes, labels[miss.row])
        drawn = [gallery.draw_box(shot, corners[miss.row], kind="missed", name=what)]
        if best is not None:
            box = gallery.draw_box(shot, best, kind="pseudo", name=f"{miss.overlap:.2f}")
            drawn.append(replace(box, hint=f"best box for {what}: overlap {miss.overlap:.2f}"))
        boxes += drawn if len(gone) <= LABELLED else [replace(box, label="") for box in drawn]
    caption = f"{len(gone)} of {fmt.plural(len(counted), 'object')} out of reach"
    caption = f"{name if len(inputs.sources) > 1 else worst.photo.id}: {caption}"
    return gallery.Tile(shot, tuple(boxes), caption, f"Photo {worst.photo.id}, {caption}")
