"""Runs against trivial boxes, and what their top boxes are: charts, tables and examples of each kind of error."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from tag2box import annotations
from tag2box.metrics import baselines
from tag2box.metrics.error_analysis import ERROR_KINDS, TopBox, error_shares, top_boxes
from tag2box.ops import iou
from tag2box.reporting import charts, formatting as fmt, gallery, records, run_figures, sections
from tag2box.training.events import Gallery

EXAMPLES = 4  # photos per kind
MEANINGS = {
    "correct": "it fits an object of its class (IoU 0.5 or more).",
    "other_class": "it fits an object of another class (IoU 0.5 or more).",
    "part": "at least 80 % of it lies inside an object of its class: a face for a person.",
    "too_large": "it contains at least 80 % of an object of its class, with much besides, or several of them.",
    "surroundings": "it overlaps an object of its class partly (IoU 0.1 or more).",
    "nowhere": "none of these, or there is no box of the class.",
}
EXTENTS = {
    "oracle_corloc": "CorLoc of a perfect choice among the proposals",
    "above_part": "best-fitting proposal scored above every part",
    "above_enlargement": "best-fitting proposal scored above every enlargement",
    "above_both": "above both",
}
SPLIT_NAMES = {"test": "test photos", "train": "training photos"}


@dataclass(frozen=True, slots=True)
class ErrorSection:
    """What the top boxes are."""

    bars: tuple[run_figures.Chart, ...]  # one per split: runs, and trivial boxes
    kinds: tuple[tuple[str, str, str], ...]  # CSS class, name, meaning
    tables: tuple[fmt.Table, ...]
    training: tuple[run_figures.Chart, ...]  # of the last run, one per recorded stage
    examples: tuple[sections.TileRow, ...]
    run: str  # the last run, of which tables, curves and examples are


@dataclass(frozen=True, slots=True)
class BaselineSection:
    """Runs against trivial boxes."""

    tables: tuple[fmt.Table, ...]
    verdicts: tuple[str, ...]


def kind_name(kind: str) -> str:
    """A kind as text."""
    return kind.replace("_", " ")


# ---------------------------------------------------------------- trivial boxes


def baseline_section(runs: Sequence[run_figures.NamedRun]) -> BaselineSection:
    """A table per figure, with each run's own trivial rows, and whether the run is above them."""
    return BaselineSection(tuple(_baseline_tables(runs)), tuple(_verdicts(runs)))


def _verdicts(runs: Sequence[run_figures.NamedRun]) -> Iterator[str]:
    for run in runs:
        metrics = run.record.metrics
        for name, verdict in (("mAP50", metrics.ap_verdict), ("CorLoc", metrics.corloc_verdict)):
            if verdict is not None:
                yield f"{run.name}: {name} {fmt.percent(verdict.value)} is {verdict.words()}."


def _baseline_tables(runs: Sequence[run_figures.NamedRun]) -> Iterator[fmt.Table]:
    heads = tuple(run.name for run in runs)
    measured = [run.record.metrics for run in runs]
    groups: tuple[tuple[str, list[records.ClassRecord | None], list[Mapping[str, records.BaselineRecord]]], ...] = (
        ("mAP50, test photos", [m.ap for m in measured], [m.test.baselines if m.test else {} for m in measured]),
        (
            "CorLoc, training photos",
            [m.corloc for m in measured],
            [m.train.baselines if m.train else {} for m in measured],
        ),
    )
    verdicts = ([m.ap_verdict for m in measured], [m.corloc_verdict for m in measured])
    for (caption, own, rows), bars in zip(groups, verdicts, strict=True):
        names = tuple(dict.fromkeys(name for row in rows for name in row))
        if names:
            lines = [fmt.TableRow(name, tuple(fmt.percent(_mean(row.get(name))) for row in rows)) for name in names]
            pairs = zip(own, bars, strict=True)
            cells = tuple(fmt.marked(s.mean if s else None, bar.best if bar else None) for s, bar in pairs)
            first = fmt.TableRow("detections of the run", cells)
            yield fmt.Table(f"{caption}, in per cent ({fmt.BELOW})", heads, (first, *lines))


def _mean(row: records.BaselineRecord | None) -> float | None:
    scores = None if row is None else row.corloc or row.voc07 or row.voc12
    return None if scores is None else scores.mean


# ---------------------------------------------------------------- all figures, marked


def figures_table(runs: Sequence[run_figures.NamedRun]) -> fmt.Table | None:
    """Every mean score of the evaluation, one row per score; those not above the best trivial box are marked."""
    named: dict[str, list[tuple[float | None, baselines.Verdict | None]]] = {}
    for index, run in enumerate(runs):
        for name, figure in _figures(run.record.metrics).items():
            named.setdefault(name, [(None, None)] * len(runs))[index] = figure
    rows = tuple(
        fmt.TableRow(name, _compared([v for v, _ in own], [None if bar is None else bar.best for _, bar in own]))
        for name, own in named.items()
        if any(fmt.known(value) for value, _ in own)
    )
    return fmt.Table(f"All figures, in per cent ({fmt.BELOW})", _heads(runs), rows) if rows else None


def _figures(metrics: records.Metrics) -> dict[str, tuple[float | None, baselines.Verdict | None]]:
    out: dict[str, tuple[float | None, baselines.Verdict | None]] = {}
    if metrics.test:
        bars = metrics.test.verdicts
        if metrics.test.voc07:
            out["mAP50, VOC 2007 (11 points)"] = metrics.test.voc07.mean, bars.get("voc07")
        if metrics.test.voc12:
            out["mAP50, VOC 2012 (area)"] = metrics.test.voc12.mean, bars.get("voc12")
        out |= {f"COCO {name}": (value, bars.get(f"coco {name}")) for name, value in metrics.test.coco.items()}
    if metrics.corloc:
        out["CorLoc, training photos"] = metrics.corloc.mean, metrics.corloc_verdict
    return out


def class_table(runs: Sequence[run_figures.NamedRun]) -> fmt.Table | None:
    """AP and CorLoc per class and run, with the difference between the last run and the first."""
    kinds: tuple[tuple[str, list[tuple[records.ClassRecord | None, records.ClassRecord]]], ...] = (
        ("AP50", [(run.record.metrics.ap, _class_bars(run.record.metrics.test)) for run in runs]),
        ("CorLoc", [(run.record.metrics.corloc, _class_bars(run.record.metrics.train)) for run in runs]),
    )
    kinds = tuple((name, scores) for name, scores in kinds if any(s and s.per_class for s, _ in scores))
    classes = tuple(dict.fromkeys(c for _, scores in kinds for s, _ in scores if s for c in s.per_class))
    if not classes:
        return None
    heads = tuple(f"{kind}\n{head}" for kind, _ in kinds for head in _heads(runs))
    rows = []
    for c in classes:
        cells = (
            _compared([s.per_class.get(c) if s else None for s, _ in own], [bar.per_class.get(c) for _, bar in own])
            for _, own in kinds
        )
        rows.append(fmt.TableRow(c, tuple(cell for own in cells for cell in own)))
    means = (_compared([s.mean if s else None for s, _ in own], [bar.mean for _, bar in own]) for _, own in kinds)
    last = fmt.TableRow("mean", tuple(cell for own in means for cell in own))
    return fmt.Table(f"Each class, in per cent ({fmt.BELOW})", heads, (*rows, last))


def _class_bars(part: records.Measured | None) -> records.ClassRecord:
    """The best trivial row of each class, and of their mean; in AP, rows that know the tags are no bar."""
    rows = {} if part is None else part.baselines
    found = [
        scores
        for name, row in rows.items()
        if (scores := row.corloc or (None if baselines.TAGS_KNOWN in name else row.voc07 or row.voc12)) is not None
    ]
    best: dict[str, float] = {}
    for name, value in [pair for scores in found for pair in (*scores.per_class.items(), ("", scores.mean))]:
        if value is not None:
            best[name] = max(value, best.get(name, value))
    return records.ClassRecord(best.pop("", None), best)


def _heads(runs: Sequence[run_figures.NamedRun]) -> tuple[str, ...]:
    return (*(run.name for run in runs), *(("difference",) if len(runs) > 1 else ()))


def _compared(values: Sequence[float | None], bars: Sequence[float | None]) -> tuple[str, ...]:
    difference = (fmt.points(values[-1], values[0]),) if len(values) > 1 else ()
    return (*(fmt.marked(value, bar) for value, bar in zip(values, bars, strict=True)), *difference)


# ---------------------------------------------------------------- kinds of errors


def error_section(
    runs: Sequence[run_figures.NamedRun], inputs: records.ReportInputs, album: gallery.Album
) -> ErrorSection | None:
    """Kinds of the top boxes of all runs; None if no run has them."""
    last = runs[-1]
    found = {split: _by_row(runs, inputs, split) for split in SPLIT_NAMES}
    bars = tuple(
        run_figures.Chart(words, _pairs_note(found[split]), _bars(found[split], f"Top boxes, {words}"))
        for split, words in SPLIT_NAMES.items()
        if found[split]
    )
    if not bars:
        return None
    tops = _tops(last, inputs)
    tables = [_breakdown(split, found[split][last.name]) for split in SPLIT_NAMES if last.name in found[split]]
    return ErrorSection(
        bars=bars,
        kinds=tuple((f"part-{kind}", kind_name(kind), words) for kind, words in MEANINGS.items()),
        tables=(*tables, *_extent_table(runs)),
        training=_training(last, inputs.train_truth),
        examples=tuple(_examples(tops, inputs, album)),
        run=last.name,
    )


def _tops(run: run_figures.NamedRun, inputs: records.ReportInputs) -> tuple[TopBox, ...]:
    found = run.record.test_detections
    return () if found is None or inputs.test_truth is None else top_boxes(inputs.test_truth, found)


def _by_row(
    runs: Sequence[run_figures.NamedRun], inputs: records.ReportInputs, split: str
) -> dict[str, records.ErrorRecord]:
    """Errors of the runs by name, then of the trivial boxes; from truth and detections, if the metrics have none."""
    rows: dict[str, records.ErrorRecord] = {}
    trivial: dict[str, records.ErrorRecord] = {}
    for run in runs:
        part = run.record.metrics.test if split == "test" else run.record.metrics.train
        own = part.errors if part else None
        if own is None and split == "test" and inputs.test_truth is not None:
            own = _computed(_tops(run, inputs), inputs.test_truth.classes)
        if own is not None and own.pairs:
            rows[run.name] = own
        for box in baselines.TRIVIAL_BOXES:
            known = part.baselines.get(f"{box}, {baselines.TAGS_KNOWN}") if part else None
            if known is not None and known.errors is not None:
                trivial[box] = known.errors
    return {**rows, **trivial} if rows else {}


def _computed(tops: Sequence[TopBox], classes: Sequence[str]) -> records.ErrorRecord | None:
    return records.parse_errors(error_shares(tops, classes)) if tops else None


def _bars(rows: Mapping[str, records.ErrorRecord], label: str) -> str:
    stacks = [
        charts.Stack(name, tuple(getattr(own, kind) or 0.0 for kind in ERROR_KINDS)) for name, own in rows.items()
    ]
    return charts.stacked_bars(stacks, ERROR_KINDS, label=label)


def _pairs_note(rows: Mapping[str, records.ErrorRecord]) -> str:
    return f"{fmt.plural(max(own.pairs for own in rows.values()), 'pair')} of a photo and a tag, in per cent"


def _breakdown(split: str, errors: records.ErrorRecord) -> fmt.Table:
    """Kinds of errors of all pairs, by class, by size and by count."""
    whole = {**{kind: getattr(errors, kind) for kind in ERROR_KINDS}, "pairs": errors.pairs}
    groups = ({"all": whole}, errors.by_size, errors.by_count, errors.by_class)
    names = [*ERROR_KINDS, "pairs"]
    rows = tuple(
        fmt.TableRow(name, tuple(fmt.whole(own.get(n)) if n == "pairs" else fmt.percent(own.get(n)) for n in names))
        for group in groups
        for name, own in group.items()
    )
    return fmt.Table(f"Top boxes on {SPLIT_NAMES[split]}, in per cent", tuple(map(kind_name, names)), rows)


def _extent_table(runs: Sequence[run_figures.NamedRun]) -> list[fmt.Table]:
    """What proposals allowed, and what their scores prefer, per run and split."""
    columns: list[tuple[str, Mapping[str, float | None]]] = []
    for run in runs:
        for split, part in (("test", run.record.metrics.test), ("train", run.record.metrics.train)):
            if part is not None and part.extents:
                columns.append((f"{run.name}\n{SPLIT_NAMES[split]}", part.extents))
    rows = tuple(
        fmt.TableRow(words, tuple(fmt.percent(own.get(name)) for _, own in columns)) for name, words in EXTENTS.items()
    )
    heads = tuple(head for head, _ in columns)
    return [fmt.Table("The proposals and their scores, in per cent", heads, rows)] if columns else []


# ---------------------------------------------------------------- over training


def _training(run: run_figures.NamedRun, truth: annotations.Truth | None) -> tuple[run_figures.Chart, ...]:
    """Kinds of the top pseudo boxes of the recorded training photos over training, stage by stage."""
    galleries = run.record.galleries
    if truth is None or not galleries:
        return ()
    stages = min(each.stages for each in galleries)  # runs of older versions recorded the last one only
    charts_found = (_stage_chart(galleries, truth, stage, stages) for stage in range(stages))
    return tuple(chart for chart in charts_found if chart is not None)


def _stage_chart(
    galleries: Sequence[Gallery], truth: annotations.Truth, stage: int, stages: int
) -> run_figures.Chart | None:
    shares = [(each.iteration, _gallery_shares(each, truth, each.stages - stages + stage)) for each in galleries]
    lines = []
    for kind in ERROR_KINDS:
        points = tuple((float(at), 100.0 * own[kind]) for at, own in shares if own)
        if points:
            lines.append(charts.Line(kind_name(kind), f"part-{kind}", points))
    if not lines:
        return None
    photos = fmt.plural(len(galleries[0].photos), "recorded training photo")
    words = f"stage {stage + 1} of {stages}" if stages > 1 else "the last stage"
    svg = charts.line_chart(lines, label=f"Kinds of the top pseudo boxes over training, {words}")
    return run_figures.Chart(f"Over training, {words}", f"top pseudo box, {photos}, in per cent", svg)


def _gallery_shares(moment: Gallery, truth: annotations.Truth, stage: int) -> dict[str, float]:
    """Shares of the kinds among the recorded photos at one iteration and stage; empty without pairs."""
    pseudo = moment.of_stage(stage)
    part = truth.part([photo in pseudo for photo in truth.ids])
    tops = top_boxes(part, pseudo)
    return {kind: sum(top.kind == kind for top in tops) / len(tops) for kind in ERROR_KINDS} if tops else {}


# ---------------------------------------------------------------- examples


def _examples(tops: Sequence[TopBox], inputs: records.ReportInputs, album: gallery.Album) -> Iterator[sections.TileRow]:
    """A few photos of each kind, evenly spaced through the test list."""
    truth = inputs.test_truth
    objects = {} if truth is None else dict(zip(truth.ids, truth.objects, strict=True))
    for kind in ERROR_KINDS:
        own = [top for top in tops if top.kind == kind and top.photo in inputs.test_photos]
        tiles = []
        for top in gallery.evenly_spaced(own, EXAMPLES):
            shot = album.add(inputs.test_photos[top.photo])
            if shot is not None and truth is not None:
                tiles.append(_example(shot, top, objects[top.photo], truth.classes))
        if tiles:
            yield sections.TileRow(kind_name(kind), f"{len(tiles)} of {len(own)}", tuple(tiles))


def _example(shot: gallery.Shot, top: TopBox, objects: annotations.Objects, classes: Sequence[str]) -> gallery.Tile:
    """The true objects of the class, and the top box; the caption names the other class that it fits, if any."""
    name, kind = gallery.class_name(classes, top.label), kind_name(top.kind)
    own = objects.boxes[(objects.labels == top.label) & ~objects.crowd]
    boxes = [gallery.draw_box(shot, box, kind="truth") for box in own.tolist()]
    if top.box is not None:
        css = "right" if top.kind == "correct" else "wrong"
        boxes.append(gallery.draw_box(shot, top.box, kind=css, name=name, score=top.score))
    if top.kind == "other_class" and top.box is not None:
        others = objects.boxes[(objects.labels != top.label) & ~objects.crowd]
        labels = objects.labels[(objects.labels != top.label) & ~objects.crowd]
        best = int(iou(torch.tensor([top.box], dtype=others.dtype), others)[0].argmax())
        kind = f"{kind}, {gallery.class_name(classes, int(labels[best]))}"
    caption = f"{name}: {'no box' if top.box is None else kind}"
    return gallery.Tile(shot, tuple(boxes), caption, f"Photo {top.photo}, top box of {caption}")
