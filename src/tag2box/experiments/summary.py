"""The results of a study as tables, facts, sentences and JSON."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.table import Table as RichTable

from tag2box.cli import evaluate
from tag2box.experiments import EXPERIMENTS, grid, outcomes, study_data
from tag2box.experiments.experiment import Analysis, StudyColumn, StudyResults, StudyVariant
from tag2box.formats.detection_files import read_detections
from tag2box.metrics import baselines, bootstrap, error_analysis, evaluation
from tag2box.metrics.error_analysis import ERROR_KINDS
from tag2box.recipes import Config
from tag2box.reporting import error_figures, formatting as fmt, interval_figures, study_tables
from tag2box.reporting.error_figures import SPLIT_NAMES
from tag2box.runs import machine, versions


def study_table(results: StudyResults, out: Path) -> study_tables.StudyTable | None:
    """All rows, including those not run; None without rows. Links are relative to ``out``."""
    experiment = results.experiment
    heads = tuple(dict.fromkeys(name for row in experiment.rows for name in row.paper))
    if not experiment.rows:
        return None
    return study_tables.StudyTable(
        columns=tuple(column.name for column in experiment.columns),
        paper=heads,
        rows=tuple(_row(row, results, heads, out) for row in experiment.rows),
        against=_row_name(experiment.against, results),
        trivial=_trivial_rows(results, heads),
        remarks=tuple(_remarks(results)),
    )


def _row_name(label: str, results: StudyResults) -> str:
    """The label of a row, with what its runs use beyond tags."""
    uses = sorted({result.uses() for result in results.results.get(label, {}).values()} - {""})
    return f"{label} (uses {', '.join(uses)})" if uses else label


def _row(row: StudyVariant, results: StudyResults, heads: tuple[str, ...], out: Path) -> study_tables.StudyRow:
    own = results.results.get(row.label, {})
    return study_tables.StudyRow(
        name=_row_name(row.label, results),
        figures=tuple(column.over_seeds(own) for column in results.experiment.columns),
        paper=tuple(row.paper.get(head) for head in heads),
        runs={seed: Path(os.path.relpath(result.folder, out)).as_posix() for seed, result in own.items()},
        settings=row.settings,
        state=row.state,
        missing=results.left_out.get(row.label, ""),
        below=frozenset(at for at, column in enumerate(results.experiment.columns) if _is_below(column, own)),
    )


# ---------------------------------------------------------------- trivial boxes and errors

BEST_SCORES = "best class scores"


def _trivial_rows(results: StudyResults, heads: tuple[str, ...]) -> tuple[study_tables.StudyRow, ...]:
    """A row per trivial baseline. With class scores of the rows themselves, the best of these counts, seed by seed."""
    figures = [result.figures for own in results.results.values() for result in own.values()]
    names = dict.fromkeys(
        name for each in figures for split in SPLIT_NAMES for name in (each.get(split) or {}).get("baselines") or ()
    )
    rows = []
    for name in names:
        cells = tuple(_trivial_figures(column, name, results) for column in results.experiment.columns)
        title = name.replace(baselines.SAME_SCORES, BEST_SCORES)
        rows.append(study_tables.StudyRow(title, cells, paper=(None,) * len(heads)))
    return tuple(rows)


def _trivial_figures(column: StudyColumn, row: str, results: StudyResults) -> study_tables.SeedFigures:
    """A column's figure of a trivial row: the highest over the rows of the study, per seed."""
    split, *rest = column.path
    there = replace(column, path=(split, "baselines", row, *rest))
    found: dict[int, float] = {}
    for own in results.results.values():
        for seed, value in there.over_seeds(own).by_seed.items():
            found[seed] = max(value, found.get(seed, value))
    return study_tables.SeedFigures(found)


def _bars(column: StudyColumn) -> StudyColumn | None:
    """The column of the best trivial row of a figure; None for figures that are not compared."""
    split, metric, name = (*column.path, "", "")[:3]
    if split not in SPLIT_NAMES or name not in evaluation.COMPARED_FIGURES.get(metric, ()):
        return None
    return replace(column, path=(split, "verdicts", evaluation.figure_title(metric, name), "best"))


def _is_below(column: StudyColumn, own: Mapping[int, grid.RunResult]) -> bool:
    """Whether the mean of a figure over the seeds is not above that of the best trivial row."""
    bars = _bars(column)
    mean, bar = column.over_seeds(own).mean, None if bars is None else bars.over_seeds(own).mean
    return mean is not None and bar is not None and mean <= bar


def _remarks(results: StudyResults) -> Iterator[str]:
    """For each column with trivial rows, the rows of the study that are not above the best of these."""
    for column in results.experiment.columns:
        bars = _bars(column)
        if bars is None:
            continue
        split, metric = column.path[:2]
        pairs = [
            (label, column.over_seeds(own).mean, bars.over_seeds(own).mean) for label, own in results.results.items()
        ]
        known = [(label, mean, bar) for label, mean, bar in pairs if mean is not None and bar is not None]
        below = [f"{label} ({mean:.1f}; {bar:.1f})" for label, mean, bar in known if mean <= bar]
        words = f"{' '.join(column.name.split())}, {'training' if split == 'train' else 'test'} photos"
        box = "a trivial box" if metric in evaluation.USES_TAGS else "a trivial box with the same class scores"
        if below:
            yield f"{words}: not above {box}: {', '.join(below)}."
        elif known:
            yield f"{words}: every row is above {box}."


def errors_section(results: StudyResults, prefix: str = "") -> tuple[study_tables.StudySection, ...]:
    """What the top boxes of all rows, and of trivial boxes, are; empty without records."""
    tables = []
    for split, words in SPLIT_NAMES.items():
        found = errors_by_row(results, split)
        rows = tuple(fmt.TableRow(name, tuple(f.words() for f in own.values())) for name, own in found.items())
        heads = tuple(error_figures.kind_name(kind).replace(" ", "\n") for kind in ERROR_KINDS)
        tables += [fmt.Table(f"Top boxes on {words}", heads, rows)] if rows else []
        tables += [
            table for group in _ERROR_GROUPS if (table := _kinds_table(results, split, group, heads)) is not None
        ]
        tables += [table for table in [_extent_table(results, split)] if table is not None]
    meanings = " ".join(f"{error_figures.kind_name(k).capitalize()}: {w}" for k, w in error_figures.MEANINGS.items())
    text = f"The best-scored box of every tag of every photo; the first kind that holds counts, in per cent. {meanings}"
    title = f"What the top boxes are, {results.first[1].name}"
    return (study_tables.StudySection(f"{prefix}errors", title, text, tables=tuple(tables)),) if tables else ()


_ERROR_GROUPS = {"by_size": "size of the largest object", "by_count": "number of objects", "by_class": "class"}


def _kinds_table(results: StudyResults, split: str, group: str, heads: tuple[str, ...]) -> fmt.Table | None:
    """Kinds of the top boxes of every row by size, count or class; None without any."""
    own = [result.figures for found in results.results.values() for result in found.values()]
    tables = [((each.get(split) or {}).get("errors") or {}).get(group) or {} for each in own]
    rows = []
    for name in dict.fromkeys(name for table in tables for name in table):
        for label, found in results.results.items():
            shares = [StudyColumn(kind, (split, "errors", group, name, kind)).over_seeds(found) for kind in ERROR_KINDS]
            if any(share.by_seed for share in shares):
                rows.append(fmt.TableRow(f"{name}: {label}", tuple(share.words() for share in shares)))
    return (
        fmt.Table(f"Top boxes on {SPLIT_NAMES[split]}, by {_ERROR_GROUPS[group]}", heads, tuple(rows)) if rows else None
    )


def _extent_table(results: StudyResults, split: str) -> fmt.Table | None:
    """What proposals allowed in every row, and what their scores prefer; None without any."""
    columns = [StudyColumn(words, (split, "extents", name)) for name, words in error_figures.EXTENTS.items()]
    shares = {label: [column.over_seeds(own) for column in columns] for label, own in results.results.items()}
    rows = tuple(
        fmt.TableRow(label, tuple(share.words() for share in own))
        for label, own in shares.items()
        if any(share.by_seed for share in own)
    )
    heads = tuple(column.name for column in columns)
    return fmt.Table(f"The proposals and their scores, {SPLIT_NAMES[split]}", heads, rows) if rows else None


def errors_by_row(results: StudyResults, split: str) -> dict[str, dict[str, study_tables.SeedFigures]]:
    """Shares of the kinds of errors, in per cent, by row and kind; rows without any are left out."""
    columns = {kind: StudyColumn(kind, (split, "errors", kind)) for kind in ERROR_KINDS}
    rows = {label: {k: c.over_seeds(own) for k, c in columns.items()} for label, own in results.results.items()}
    for box in baselines.TRIVIAL_BOXES:
        name = f"{box}, {baselines.TAGS_KNOWN}"
        rows[box] = {kind: _trivial_figures(column, name, results) for kind, column in columns.items()}
    return {label: own for label, own in rows.items() if any(figures.by_seed for figures in own.values())}


def errors_json(results: StudyResults) -> dict[str, object]:
    """Shares of the kinds of errors, in per cent, by split, row, kind and seed."""
    return {
        split: {
            label: {kind: dict(figures.by_seed) for kind, figures in own.items()}
            for label, own in errors_by_row(results, split).items()
        }
        for split in SPLIT_NAMES
    }


# ---------------------------------------------------------------- intervals, sizes and counts

ResampledRows = Mapping[str, Mapping[str, bootstrap.FloatArray | None]]
"""Figures under bootstrap over photos, by figure and row."""


def intervals_section(
    results: StudyResults, drawn: ResampledRows, prefix: str = ""
) -> tuple[study_tables.StudySection, ...]:
    """mAP50 and CorLoc with intervals and paired differences from the baseline row; AP50 by size and count."""
    tables = []
    for figure, rows in drawn.items():
        names = list(rows)
        against = names.index(results.experiment.against) if results.experiment.against in rows else 0
        if any(own is not None for own in rows.values()):
            tables.append(interval_figures.resampled_table(figure, names, list(rows.values()), against=against))
    tables += _group_table(results)
    text = (
        "Photos are drawn 1,000 times with replacement. 95 % of the figures, means over the seeds, are within the "
        "interval; differences are taken on the same drawn photos, and an interval that contains 0 means that two rows "
        "cannot be told apart on these photos. The range over the seeds is in the table above."
    )
    title = f"How sure the figures are, {results.first[1].name}"
    return (study_tables.StudySection(f"{prefix}intervals", title, text, tables=tuple(tables)),) if tables else ()


def resampled_rows(results: StudyResults) -> ResampledRows:
    """mAP50 and CorLoc of each row under bootstrap over photos, the mean over its seeds; None without detections.

    Seeds that share their photos share the resamples, too.
    """
    files = {"mAP50": evaluate.DETECTIONS_FILE, "CorLoc": evaluate.TOP_BOXES_FILE}
    captions = {"mAP50": "mAP50, test photos, in per cent", "CorLoc": "CorLoc, training photos, in per cent"}
    out: dict[str, dict[str, bootstrap.FloatArray | None]] = {}
    for figure, file in files.items():
        out[captions[figure]] = {
            label: _resampled(figure, file, own, results.data) for label, own in results.results.items()
        }
    return out


def _resampled(
    figure: str, file: str, own: Mapping[int, grid.RunResult], data: Mapping[int, study_data.StudyData]
) -> bootstrap.FloatArray | None:
    path, drawn = interval_figures.FIGURES[figure], []
    for seed, result in own.items():
        truth = data[seed].test if figure == "mAP50" else data[seed].train
        if not (result.folder / file).exists():
            return None
        is_shared = all(other.fingerprint == data[seed].fingerprint for other in data.values())
        weights = bootstrap.photo_weights(len(truth), seed=0 if is_shared else seed)
        found = read_detections(result.folder / file, truth)
        drawn.append(bootstrap.resampled_figures(truth, found, path[:1], weights)[path])
    return np.mean(drawn, axis=0) if drawn else None


def _group_table(results: StudyResults) -> list[fmt.Table]:
    """AP50 on test photos by size and number of objects, of all rows and of trivial boxes."""
    groups = [("by_size", name) for name, _ in error_analysis.SIZE_BINS]
    groups += [("by_count", name) for name, _ in error_analysis.COUNT_BINS]
    columns = [StudyColumn(path[1], ("test", "breakdown", *path, "ap")) for path in groups]
    rows = {label: [column.over_seeds(own) for column in columns] for label, own in results.results.items()}
    trivial = {
        f"{box}, {BEST_SCORES}": [_trivial_figures(c, f"{box}, {baselines.SAME_SCORES}", results) for c in columns]
        for box in baselines.TRIVIAL_BOXES
    }
    kept = [at for at in range(len(columns)) if any(own[at].by_seed for own in rows.values())]
    if not kept:
        return []
    bars = {at: max((own[at].mean or 0.0 for own in trivial.values()), default=0.0) for at in kept}
    lines = []
    for label, figures in (*rows.items(), *trivial.items()):
        below = frozenset(at for at in kept if label in rows and (figures[at].mean or 0.0) <= bars[at])
        row = study_tables.StudyRow(label, tuple(figures), below=below)
        lines.append(fmt.TableRow(label, tuple(row.words(at) for at in kept)))
    heads = tuple(columns[at].name.replace(" of the photo", "\nof the photo") for at in kept)
    return [fmt.Table(f"AP50 by size and number of objects, test photos ({fmt.BELOW})", heads, tuple(lines))]


def intervals_json(results: StudyResults, drawn: ResampledRows) -> dict[str, object]:
    """Intervals, and differences from the baseline row, by figure and row; as fractions."""
    out: dict[str, object] = {}
    for figure, rows in drawn.items():
        first = rows.get(results.experiment.against, next(iter(rows.values()), None))
        found: dict[str, object] = {}
        for label, own in rows.items():
            ends = None if own is None else bootstrap.interval(own)
            gap = None if own is None or first is None or own is first else bootstrap.difference(own, first)
            if own is not None and ends is not None:
                compared = {} if gap is None else {"difference": gap.to_json()}
                found[label] = {"value": float(own[0]), "interval": [ends.low, ends.high], **compared}
        out[figure.partition(",")[0]] = found
    return out


# ---------------------------------------------------------------- the rest of the page


def quality_curves(results: StudyResults) -> tuple[study_tables.QualityCurve, ...]:
    """Label quality of the tracked rows over training, averaged over the seeds."""
    tracked = {label: results.results.get(label, {}).values() for label in results.experiment.tracked}
    rows = [
        study_tables.QualityCurve(label, outcomes.mean_quality([r.moments for r in own]))
        for label, own in tracked.items()
    ]
    return tuple(row for row in rows if row.moments)


def setting(results: StudyResults) -> str:
    """Data and seeds of a study, in a sentence."""
    _, data = results.first
    seeds = fmt.listed([str(seed) for seed in results.data])
    extra = "Each seed has its own photos." if data.name == study_data.SCENES and len(results.data) > 1 else ""
    words = (
        f"Run on {data.name}: {fmt.plural(len(data.tagged), 'training photo')} with tags, "
        f"{fmt.plural(len(data.test_photos), 'test photo')}, {fmt.plural(len(data.test.classes), 'class')}."
    )
    return f"{words} {'Seeds' if len(results.data) > 1 else 'Seed'} {seeds}. {extra}".strip()


def study_facts(results: StudyResults, table: study_tables.StudyTable | None) -> tuple[fmt.Fact, ...]:
    """The best row, the number of runs, and their cost."""
    folders = {result.folder: result for own in results.results.values() for result in own.values()}
    if table is None or not folders:
        return ()
    seconds = sum(result.figure(("cost", "seconds")) or 0.0 for result in folders.values())
    memory = max((result.figure(("cost", "peak_memory_mb")) or 0.0 for result in folders.values()), default=0.0)
    rows = [(row.name, row.figures[0].mean) for row in table.rows]
    known = [(name, mean) for name, mean in rows if mean is not None]
    best = max(known, key=lambda pair: pair[1], default=("", 0.0))
    return (
        fmt.Fact(f"Best {table.columns[0]}", f"{best[1]:.1f}", "%", f"{best[0]}. {study_tables.reading(table)}"),
        fmt.Fact(
            "Runs",
            fmt.whole(len(folders)),
            "",
            f"{fmt.plural(len(results.data), 'seed')}; equal rows are one run",
        ),
        fmt.Fact("Training", fmt.duration(seconds), "", f"all runs together, at most {fmt.whole(memory)} MB"),
    )


def about_study(results: StudyResults, base: Config, commands: Sequence[str]) -> tuple[fmt.Table, ...]:
    """Commands, schedule, machine and versions."""
    made = [fmt.TableRow("command", (command,)) for command in commands]
    if results.results:
        made.append(fmt.TableRow("repeat one run", ("tag2box train --config cells/NAME/config.toml --out runs/again",)))
        made.append(
            fmt.TableRow("schedule", (f"{base.plan.iterations} iterations of {base.loader.batch_size} photos",))
        )
    made += [fmt.TableRow(name, (value,)) for name, value in (machine() | versions()).items()]
    return (fmt.Table("Commands, machine and versions", ("",), tuple(made)),)


def study_json(
    results: StudyResults,
    table: study_tables.StudyTable | None,
    analysis: Analysis,
    quality: Sequence[study_tables.QualityCurve],
    drawn: ResampledRows,
) -> dict[str, object]:
    """All results as JSON values."""
    _, data = results.first
    return {
        "experiment": results.experiment.name,
        "on": data.name,
        "seeds": list(results.data),
        "train_photos": len(data.tagged),
        "test_photos": len(data.test_photos),
        "machine": machine(),
        "versions": versions(),
        "rows": [] if table is None else study_tables.table_json(table, table.rows),
        "trivial_rows": [] if table is None else study_tables.table_json(table, table.trivial),
        "remarks": [] if table is None else list(table.remarks),
        "errors": errors_json(results),
        "intervals": intervals_json(results, drawn),
        "pseudo_labels": {row.name: outcomes.quality_json(row.moments) for row in quality},
        **analysis.numbers,
    }


def experiments_table() -> RichTable:
    """Every experiment: its name, its title, its number of runs per seed, its seeds."""
    listed = RichTable("NAME", "what it is", "rows to run", "seeds")
    for experiment in EXPERIMENTS.values():
        able = [row for row in experiment.rows if not row.skip_reason()]
        seeds = ",".join(str(seed) for seed in experiment.seeds)
        listed.add_row(experiment.name, experiment.title, str(len(able)), seeds)
    return listed
