"""The tables of a report, cells already written out as text."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tag2box.reporting.charts import UNKNOWN, duration, format_number, known, percent, points, whole
from tag2box.reporting.curves import NamedRun
from tag2box.reporting.records import ClassRecord, Metrics, ProposalRecall, RunRecord


@dataclass(frozen=True, slots=True)
class TableRow:
    """A row: its name and a cell a column."""

    name: str
    cells: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """Column heads (without the first, empty one; a head may have two lines) and rows."""

    caption: str
    heads: tuple[str, ...]
    rows: tuple[TableRow, ...]


@dataclass(frozen=True, slots=True)
class Score:
    """One run's figure in the headline."""

    run: str
    css: str
    value: str
    difference: str  # from the first run, empty for that one
    better: bool


@dataclass(frozen=True, slots=True)
class Headline:
    """A figure that sums the report up, run by run."""

    name: str
    note: str
    scores: tuple[Score, ...]


def headlines(runs: Sequence[NamedRun]) -> tuple[Headline, ...]:
    """mAP50 on the test photos and CorLoc on the training photos, each with its difference from the first run."""
    measures: tuple[tuple[str, str, list[ClassRecord | None]], ...] = (
        ("mAP50", "test photos: are the boxes right, and ranked right?", [r.record.metrics.ap for r in runs]),
        ("CorLoc", "training photos: is the best box of each tag right?", [r.record.metrics.corloc for r in runs]),
    )
    out = []
    for name, note, scores in measures:
        means = [s.mean if s else None for s in scores]
        if any(known(mean) for mean in means):
            out.append(Headline(name, note, _scores(runs, means)))
    return tuple(out)


def _scores(runs: Sequence[NamedRun], means: Sequence[float | None]) -> tuple[Score, ...]:
    first = means[0]
    out = []
    for index, (run, mean) in enumerate(zip(runs, means, strict=True)):
        compared = index > 0 and mean is not None and first is not None
        difference = points(mean, first) if compared else ""
        out.append(Score(run.name, run.css, percent(mean), difference, difference.startswith("+")))
    return tuple(out)


def figures_table(runs: Sequence[NamedRun]) -> Table | None:
    """Every mean the evaluation knows, one row a figure."""
    named: dict[str, list[float | None]] = {}
    for index, run in enumerate(runs):
        for name, value in _figures(run.record.metrics).items():
            named.setdefault(name, [None] * len(runs))[index] = value
    rows = tuple(TableRow(name, _compared(values)) for name, values in named.items() if any(map(known, values)))
    return Table("All figures, in per cent", _heads(runs), rows) if rows else None


def _figures(metrics: Metrics) -> dict[str, float | None]:
    out: dict[str, float | None] = {}
    if metrics.test:
        if metrics.test.voc07:
            out["mAP50, VOC 2007 (11 points)"] = metrics.test.voc07.mean
        if metrics.test.voc12:
            out["mAP50, VOC 2012 (area)"] = metrics.test.voc12.mean
        out |= {f"COCO {name}": value for name, value in metrics.test.coco.items()}
    if metrics.corloc:
        out["CorLoc, training photos"] = metrics.corloc.mean
    return out


def class_table(runs: Sequence[NamedRun]) -> Table | None:
    """AP and CorLoc of each class, run by run, with the difference between the last run and the first."""
    kinds: tuple[tuple[str, list[ClassRecord | None]], ...] = (
        ("AP50", [run.record.metrics.ap for run in runs]),
        ("CorLoc", [run.record.metrics.corloc for run in runs]),
    )
    kinds = tuple((name, scores) for name, scores in kinds if any(s and s.per_class for s in scores))
    classes = tuple(dict.fromkeys(c for _, scores in kinds for s in scores if s for c in s.per_class))
    if not classes:
        return None
    heads = tuple(f"{kind}\n{head}" for kind, _ in kinds for head in _heads(runs))
    rows = [
        TableRow(
            c,
            tuple(
                cell for _, scores in kinds for cell in _compared([s.per_class.get(c) if s else None for s in scores])
            ),
        )
        for c in classes
    ]
    means = tuple(cell for _, scores in kinds for cell in _compared([s.mean if s else None for s in scores]))
    return Table("Each class, in per cent", heads, (*rows, TableRow("mean", means)))


def _heads(runs: Sequence[NamedRun]) -> tuple[str, ...]:
    return (*(run.name for run in runs), *(("difference",) if len(runs) > 1 else ()))


def _compared(values: Sequence[float | None]) -> tuple[str, ...]:
    difference = (points(values[-1], values[0]),) if len(values) > 1 else ()
    return (*(percent(value) for value in values), *difference)


FACTS: tuple[tuple[str, Callable[[RunRecord], str]], ...] = (
    ("training photos", lambda run: whole(run.start.train_photos)),
    ("iterations done", lambda run: whole(_iterations_done(run))),
    ("seed", lambda run: UNKNOWN if run.start.seed is None else str(run.start.seed)),
    ("proposals a photo", lambda run: format_number(run.start.proposals_per_photo)),
    ("training time", lambda run: duration(run.end.seconds if run.end else None)),
    ("time per iteration (median)", lambda run: duration(_median_seconds(run))),
    (
        "peak memory",
        lambda run: f"{whole(run.end.peak_memory_mb)} MB" if run.end and run.end.peak_memory_mb else UNKNOWN,
    ),
    ("resumed at iteration", lambda run: ", ".join(str(i) for i in run.resumed_at) or UNKNOWN),
)


def facts_table(runs: Sequence[NamedRun]) -> Table | None:
    """What each run took; rows nobody has a figure for are left out."""
    rows = [TableRow(name, tuple(fact(run.record) for run in runs)) for name, fact in FACTS]
    return _runs_table("Training", runs, rows)


def machine_table(runs: Sequence[NamedRun]) -> Table | None:
    """Where the runs ran."""
    tables = [run.record.start.machine for run in runs]
    names = dict.fromkeys(name for table in tables for name in table)
    return _runs_table("Machine", runs, [TableRow(n, tuple(t.get(n, UNKNOWN) for t in tables)) for n in names])


def versions_table(runs: Sequence[NamedRun]) -> Table | None:
    """The versions of the software underneath."""
    tables = [run.record.start.versions for run in runs]
    names = dict.fromkeys(name for table in tables for name in table)
    return _runs_table("Versions", runs, [TableRow(n, tuple(t.get(n, UNKNOWN) for t in tables)) for n in names])


def _runs_table(caption: str, runs: Sequence[NamedRun], rows: Sequence[TableRow]) -> Table | None:
    """A column a run, or a single one where the runs agree on everything."""
    kept = tuple(row for row in rows if any(cell != UNKNOWN for cell in row.cells))
    if not kept:
        return None
    if len(runs) > 1 and all(len(set(row.cells)) == 1 for row in kept):
        return Table(caption, ("all runs",), tuple(TableRow(row.name, row.cells[:1]) for row in kept))
    return Table(caption, tuple(run.name for run in runs), kept)


def _iterations_done(run: RunRecord) -> int | None:
    if run.end:
        return run.end.iteration
    return run.steps[-1].iteration if run.steps else None


def _median_seconds(run: RunRecord) -> float | None:
    seconds = [step.seconds for step in run.steps if step.seconds is not None]
    return statistics.median(seconds) if seconds else None


def recall_table(splits: Sequence[tuple[str, ProposalRecall]]) -> Table | None:
    """What the bars of the proposal section do not show."""
    rows = (
        TableRow("boxes a photo", tuple(format_number(split.boxes_per_photo) for _, split in splits)),
        TableRow("mean best overlap", tuple(percent(split.mean_best_overlap) for _, split in splits)),
    )
    kept = tuple(row for row in rows if any(cell != UNKNOWN for cell in row.cells))
    return Table("Proposals", tuple(name for name, _ in splits), kept) if kept else None
