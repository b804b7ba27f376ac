"""The results of a study as tables, facts, sentences and JSON."""

import os
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table as RichTable

from tag2box.experiments import EXPERIMENTS, outcomes, study_data
from tag2box.experiments.experiment import Analysis, StudyResults, StudyVariant
from tag2box.recipes import Config
from tag2box.reporting import formatting as fmt, study_tables
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
        against=experiment.against,
    )


def _row(row: StudyVariant, results: StudyResults, heads: tuple[str, ...], out: Path) -> study_tables.StudyRow:
    own = results.results.get(row.label, {})
    return study_tables.StudyRow(
        name=row.label,
        figures=tuple(column.over_seeds(own) for column in results.experiment.columns),
        paper=tuple(row.paper.get(head) for head in heads),
        runs={seed: Path(os.path.relpath(result.folder, out)).as_posix() for seed, result in own.items()},
        settings=row.settings,
        missing=results.left_out.get(row.label, ""),
    )


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
        "rows": [] if table is None else study_tables.table_json(table),
        "pseudo_labels": {row.name: outcomes.quality_json(row.moments) for row in quality},
        **analysis.numbers,
    }


def experiments_table() -> RichTable:
    """Every experiment: its name, its title, its number of runs per seed, its seeds."""
    grid = RichTable("NAME", "what it is", "rows to run", "seeds")
    for experiment in EXPERIMENTS.values():
        able = [row for row in experiment.rows if not row.skip_reason()]
        seeds = ",".join(str(seed) for seed in experiment.seeds)
        grid.add_row(experiment.name, experiment.title, str(len(able)), seeds)
    return grid
