"""The page of a study: figures over seeds beside those of the paper, label quality, sweeps, and photos of the runs."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from markupsafe import Markup

from tag2box.reporting import charts, dataset_figures, formatting as fmt, gallery, study_tables
from tag2box.reporting.sections import Figure, Section, SectionPage, TileRow, write_page

STYLE = (
    ".shelf{--tall:300px}.tiles{gap:14px}td small{display:block;color:var(--soft);font-size:11.5px}"
    ".stack+.scroll,.pair+.scroll{margin-top:24px}"
)
CURVE_COLOURS = 6  # CSS classes run-0 .. run-5
NARROW = 10.0  # minimum range of the y axis in points, so that a small difference appears small
MARGIN = 0.6  # of a step, left and right of the values

Value = Callable[[study_tables.LabelQuality], float | None]


def write_study_page(inputs: study_tables.StudyInputs, out: Path) -> None:
    """Write the page of a study as one self-contained HTML file."""
    write_page(build_study_page(inputs), out)


def build_study_page(inputs: study_tables.StudyInputs) -> SectionPage:
    """Draw the table, the sections of the experiment, and how the study was made."""
    album, table = gallery.Album(), inputs.table
    sections = [] if table is None else [draw_section(_table_section(table, inputs), album)]
    sections += [draw_section(section, album) for section in inputs.sections]
    sections += quality_sections(inputs.quality)
    if table is None and inputs.notes:
        sections.append(Section("notes", "Notes", "What is different here.", warnings=inputs.notes))
    about = (*study_tables.settings_table(table), *inputs.about)
    sections.append(Section("about", "How it was made", inputs.setting, tables=about, prose=True))
    return SectionPage(
        kicker=inputs.kicker,
        title=inputs.title,
        lede=inputs.shows,
        facts=inputs.facts,
        sections=tuple(sections),
        style=Markup(f"{STYLE}\n{album.style}"),
        unreadable=album.unreadable,
    )


def draw_section(section: study_tables.StudySection, album: gallery.Album) -> Section:
    """A section with its figures and photos drawn."""
    table, shelves = section.table, draw_photos(section.photos, album)
    return Section(
        section.id,
        section.title,
        section.words,
        wide=section.wide,
        figures=tuple(draw_figure(figure) for figure in section.figures),
        warnings=section.warnings if table is None else (*table.remarks, *section.warnings, *_reasons(table)),
        tables=(*(_study_tables(table) if table is not None else ()), *section.tables),
        boxes=section.legend if shelves else (),
        shelves=shelves,
    )


# ---------------------------------------------------------------- tables


def _table_section(table: study_tables.StudyTable, inputs: study_tables.StudyInputs) -> study_tables.StudySection:
    words = (
        f"{inputs.setting} Each figure is the mean over the seeds, in per cent, with the smallest and the largest: "
        "differences within this range are not significant."
    )
    if any(table.paper):
        words += f" The paper's figures ({inputs.origin}) were obtained on other data and at another scale: compare "
        words += "the order of the rows and the differences between them, not the figures."
    return study_tables.StudySection("table", "Here and in the paper", words, table=table, warnings=inputs.notes)


def _study_tables(table: study_tables.StudyTable) -> tuple[fmt.Table, ...]:
    """Measured figures beside the paper's, differences per seed, and rows that were not run."""
    return (_main_table(table), *_difference_table(table), *_absent_table(table))


def _main_table(table: study_tables.StudyTable) -> fmt.Table:
    order = table.column_order()
    heads = tuple(table.columns[at] if is_ours else f"paper:\n{table.paper[at]}" for is_ours, at in order)
    shown = (*table.measured(), *table.trivial)
    states = {row.name: (row.state or fmt.UNKNOWN,) if table.has_states else () for row in shown}
    cells = {row.name: (*(_cell(row, *at) for at in order), *states[row.name], _links(row)) for row in shown}
    rows = tuple(fmt.TableRow(row.name, cells[row.name]) for row in shown)
    heads += ("system",) if table.has_states else ()
    note = f" ({fmt.BELOW})" if any(row.below for row in shown) else ""
    return fmt.Table(f"Measured here, and reported{note}", (*heads, "runs,\nby seed"), rows)


def _cell(row: study_tables.StudyRow, is_ours: bool, at: int) -> str:
    if not is_ours:
        return study_tables.reported(row.paper[at])
    mean, _, spread = row.words(at).partition(" ")
    return Markup("{}<small>{}</small>").format(mean, spread.strip("()")) if spread else mean


def _links(row: study_tables.StudyRow) -> Markup:
    return Markup(" ").join(Markup('<a href="{}/">{}</a>').format(folder, seed) for seed, folder in row.runs.items())


def _difference_table(table: study_tables.StudyTable) -> list[fmt.Table]:
    """Differences from the baseline in the first column, per seed: what the range over seeds hides."""
    base = table.baseline()
    if base is None:
        return []
    first = base.figures[0].by_seed
    heads = (*(f"seed {seed}" for seed in first), "mean")
    out = []
    for row in table.measured():
        own = row.figures[0].by_seed
        differences = {seed: own[seed] - first[seed] for seed in first if seed in own}
        cells = [f"{differences[seed]:+.1f}" if seed in differences else fmt.UNKNOWN for seed in first]
        mean = study_tables.SeedFigures(differences).mean
        out.append(fmt.TableRow(row.name, (*cells, fmt.UNKNOWN if mean is None else f"{mean:+.1f}")))
    others = tuple(row for row in out if row.name != base.name)
    return [fmt.Table(f"{table.columns[0]} above {base.name}, on the same photos", heads, others)]


def _absent_table(table: study_tables.StudyTable) -> list[fmt.Table]:
    """Rows that were not run, with the paper's figures; rows without any are only in the warnings."""
    rows = [row for row in table.rows if not row.runs and any(value is not None for value in row.paper)]
    shown = tuple(fmt.TableRow(row.name, tuple(study_tables.reported(value) for value in row.paper)) for row in rows)
    return [fmt.Table("Reported in the paper, not run here", table.paper, shown)] if shown else []


def _reasons(table: study_tables.StudyTable) -> tuple[str, ...]:
    """Why rows were not run, grouped by reason."""
    why: dict[str, list[str]] = {}
    for row in table.rows:
        if not row.runs and row.missing:
            why.setdefault(row.missing, []).append(row.name)
    return tuple(f"{'; '.join(names)}: {reason}" for reason, names in why.items())


# ---------------------------------------------------------------- figures


def draw_figure(figure: study_tables.Sweep | study_tables.MissedObjects | study_tables.ObjectsPerPhoto) -> Figure:
    """A figure of a study, drawn."""
    match figure:
        case study_tables.Sweep():
            return sweep_figure(figure)
        case study_tables.MissedObjects(stats):
            return dataset_figures.missed_figure(stats)
        case study_tables.ObjectsPerPhoto(stats):
            return dataset_figures.objects_per_photo_figure(stats)


# ---------------------------------------------------------------- photos


def draw_photos(rows: Sequence[study_tables.PhotoRow], album: gallery.Album) -> tuple[TileRow, ...]:
    """Rows of photos with boxes; photos that cannot be read are left out."""
    drawn = [TileRow(row.name, "", _tiles(row, album)) for row in rows]
    return tuple(row for row in drawn if row.tiles)


def _tiles(row: study_tables.PhotoRow, album: gallery.Album) -> tuple[gallery.Tile, ...]:
    tiles: list[gallery.Tile] = []
    for panel in row.panels:
        if row.limit is not None and len(tiles) >= row.limit:
            break
        shot = album.add(panel.photo.path)
        if shot is not None:
            tiles.append(_tile(panel, shot, row.classes))
    return tuple(tiles)


def _tile(
    panel: study_tables.DetectionPanel | study_tables.PseudoPanel | study_tables.DifficultPanel,
    shot: gallery.Shot,
    classes: tuple[str, ...],
) -> gallery.Tile:
    photo = panel.photo.id
    match panel:
        case study_tables.DetectionPanel(run=run, found=found, objects=objects, min_score=score):
            tile = gallery.detection_tile(shot, found, objects, classes=classes, photo=photo, min_score=score)
        case study_tables.PseudoPanel(run=run, iteration=iteration, labels=labels, objects=objects):
            tile = gallery.pseudo_tile(shot, labels, objects.boxes, classes=classes, iteration=iteration)
        case study_tables.DifficultPanel():
            return _difficult_tile(panel, shot, classes)
    return replace(tile, caption=f"{run}: {tile.caption}") if run else tile


def _difficult_tile(panel: study_tables.DifficultPanel, shot: gallery.Shot, classes: tuple[str, ...]) -> gallery.Tile:
    rows = zip(panel.objects.boxes.tolist(), panel.objects.labels.tolist(), panel.is_caught, strict=True)
    boxes = tuple(
        gallery.draw_box(shot, box, kind="right" if caught else "ignored", name=gallery.class_name(classes, label))
        for box, label, caught in rows
    )
    return gallery.Tile(shot, boxes, panel.photo.id, f"Photo {panel.photo.id}, its difficult objects")


# ---------------------------------------------------------------- label quality


def quality_sections(rows: Sequence[study_tables.QualityCurve]) -> tuple[Section, ...]:
    """Quality of the pseudo labels of some rows over training; empty without records."""
    shown = [row for row in rows if row.moments][:CURVE_COLOURS]
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
        figures.append(_figure(taus, "The threshold τ", "minimum cosine similarity of a candidate", fmt.format_number))
    figures.append(_counts(shown))
    photos = shown[0].moments[0].photos
    words = (
        f"Pseudo boxes of the last stage, compared with true boxes, which training does not use: {photos} training "
        "photos of all seeds, the same at every iteration. Means over the seeds."
    )
    return (Section("labels", "Pseudo labels over training", words, figures=tuple(figures)),)


def _precision(overlap: str) -> Value:
    return lambda moment: moment.precision.get(overlap)


def _recall(overlap: str) -> Value:
    return lambda moment: moment.recall.get(overlap)


def _lines(rows: Sequence[study_tables.QualityCurve], value: Value, scale: float = 1.0) -> list[charts.Line]:
    lines = []
    for index, row in enumerate(rows):
        found = [(float(moment.iteration), value(moment)) for moment in row.moments]
        points = tuple((x, scale * y) for x, y in found if y is not None and fmt.known(y))
        if points:
            lines.append(charts.Line(row.name, _css(index), points))
    return lines


def _css(index: int) -> str:
    return f"run-{index % CURVE_COLOURS}"


def _share(rows: Sequence[study_tables.QualityCurve], title: str, note: str, value: Value) -> Figure:
    lines = _lines(rows, value, 100.0)
    return _figure(lines, title, f"per cent; {note}", lambda y: fmt.UNKNOWN if y is None else f"{y:.1f}")


def _figure(lines: Sequence[charts.Line], title: str, note: str, show: Callable[[float | None], str]) -> Figure:
    keys = tuple(charts.Key(line.name, line.css) for line in lines)
    ranges = [f"{line.name} {show(line.points[0][1])} to {show(line.points[-1][1])}" for line in lines]
    reading = f"From the first record to the last: {'; '.join(ranges)}." if ranges else "There are no pseudo boxes."
    return Figure(title, note, (Markup(charts.line_chart(lines, label=title)),), reading, keys)


def _counts(rows: Sequence[study_tables.QualityCurve]) -> Figure:
    """Boxes per class at the last record, as multiples of the true number."""
    last = [row.moments[-1] for row in rows]
    names = [name for name, count in last[0].objects.items() if count]
    groups = [charts.Bars(name, tuple(_ratio(moment, name) for moment in last), 1.0) for name in names]
    keys = tuple(charts.Key(row.name, _css(index)) for index, row in enumerate(rows))
    top = max([1.0, *(v for group in groups for v in group.values if v is not None)])
    chart = charts.grouped_bars(groups, keys, label="Pseudo boxes per object", limit=top, show=fmt.format_number)
    totals = [
        f"{row.name} {sum(moment.boxes.values())} for {sum(moment.objects.values())} objects"
        for row, moment in zip(rows, last, strict=True)
    ]
    return Figure(
        "Pseudo boxes per true object", "at the last record; the dashed mark is one", (Markup(chart),),
        f"In all: {'; '.join(totals)}.", keys,
    )  # fmt: skip


def _ratio(moment: study_tables.LabelQuality, name: str) -> float | None:
    return moment.boxes.get(name, 0) / moment.objects[name] if moment.objects.get(name) else None


# ---------------------------------------------------------------- sweeps


def sweep_figure(sweep: study_tables.Sweep) -> Figure:
    """Mean and range over the seeds at each value of a setting."""
    what = sweep.measure
    present = [(v, f) for v, f in zip(sweep.values, sweep.figures, strict=True) if f.mean is not None]
    means = [(v, f.mean) for v, f in present if f.mean is not None]
    if not means:
        return Figure(sweep.name, sweep.key, (), "Nothing was measured.")
    (worst, low), (best, high) = (pick(means, key=lambda pair: pair[1]) for pick in (min, max))
    apart = max(f.ends[1] - f.ends[0] for _, f in present if f.ends is not None)
    reading = (
        f"From {low:.1f} at {worst:g} to {high:.1f} at {best:g}: {high - low:.1f} points between the means; the "
        f"seeds of one value differ by up to {apart:.1f}."
    )
    note = f"{what} against {sweep.key}; bars range from the smallest to the largest seed; the paper uses {{}}"
    return Figure(sweep.name, note.format(f"{sweep.chosen:g}"), (Markup(_sweep_chart(sweep, present)),), reading)


def _sweep_chart(sweep: study_tables.Sweep, present: Sequence[tuple[float, study_tables.SeedFigures]]) -> str:
    ends = [end for _, figure in present for end in (figure.ends or ())]
    middle, half = (min(ends) + max(ends)) / 2, max(NARROW, max(ends) - min(ends)) / 2
    ticks = charts.nice_ticks(max(middle - half, 0.0), min(middle + half, 100.0) if max(ends) <= 100 else middle + half)
    positions = {value: float(index) for index, value in enumerate(sweep.values)}
    frame = charts.Frame(-MARGIN, len(positions) - 1 + MARGIN, ticks[0], ticks[-1], right=14.0)
    body = charts.axes(frame, (), ticks, sweep.key)
    for value, position in positions.items():
        css = "tick name run-0" if value == sweep.chosen else "tick"
        at = frame.x(position)
        body += charts.svg_tag(
            "text", f"{value:g}", class_=css, x=at, y=charts.HEIGHT - charts.BOTTOM + 14, text_anchor="middle"
        )
    points = tuple((positions[value], figure.mean) for value, figure in present if figure.mean is not None)
    line = charts.svg_tag("path", class_="line", d=frame.path(points))
    for value, figure in present:
        line += _whisker(frame, positions[value], figure, f"{sweep.name} {value:g}")
    body += charts.svg_tag("g", line, class_="run-0")
    label = f"{sweep.measure} at values of {sweep.name}"
    return charts.svg_tag(
        "svg", body, class_="chart", viewBox=f"0 0 360 {charts.HEIGHT:g}", role="img", aria_label=charts.escape(label)
    )


def _whisker(frame: charts.Frame, position: float, figure: study_tables.SeedFigures, name: str) -> str:
    """Mean, minimum and maximum at one value."""
    if figure.mean is None or figure.ends is None:
        return ""
    x, (low, high) = frame.x(position), figure.ends
    parts = charts.svg_tag(
        "line", stroke="currentColor", stroke_width=1.5, x1=x, x2=x, y1=frame.y(low), y2=frame.y(high)
    )
    for end in (low, high):
        y = frame.y(end)
        parts += charts.svg_tag("line", stroke="currentColor", stroke_width=1.5, x1=x - 4, x2=x + 4, y1=y, y2=y)
    words = charts.hint(f"{name}: {figure.words()}")
    return parts + charts.svg_tag("circle", words, class_="dot end", cx=x, cy=frame.y(figure.mean), r=3.2)
