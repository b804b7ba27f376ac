"""The figures of a study as a table: for the page, for Markdown and for programs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.table import Table as RichTable

from tag2box.commands.runs import machine, versions
from tag2box.experiments import EXPERIMENTS
from tag2box.experiments.experiment import Drawn, Findings, StudyColumn, StudyVariant
from tag2box.experiments.grid import RunResult
from tag2box.experiments.label_quality import mean_moments, quality_json
from tag2box.experiments.study_data import SCENES
from tag2box.recipes import Config
from tag2box.reporting.charts import duration, listed, plural, whole
from tag2box.reporting.sections import Fact
from tag2box.reporting.study_figures import Followed
from tag2box.reporting.study_page import SeedFigures, StudyRow, StudyTable, reading, table_json
from tag2box.reporting.tables import Table, TableRow


def study_table(findings: Findings, out: Path) -> StudyTable | None:
    """All rows, those of the paper alone among them; None without rows. Links are relative to ``out``."""
    experiment = findings.experiment
    heads = tuple(dict.fromkeys(name for row in experiment.rows for name in row.paper))
    if not experiment.rows:
        return None
    return StudyTable(
        columns=tuple(column.name for column in experiment.columns),
        paper=heads,
        rows=tuple(_row(row, findings, heads, out) for row in experiment.rows),
        against=experiment.against,
    )


def _row(row: StudyVariant, findings: Findings, heads: tuple[str, ...], out: Path) -> StudyRow:
    results = findings.results.get(row.label, {})
    return StudyRow(
        name=row.label,
        figures=tuple(_figures(column, results) for column in findings.experiment.columns),
        paper=tuple(row.paper.get(head) for head in heads),
        runs={seed: Path(os.path.relpath(result.folder, out)).as_posix() for seed, result in results.items()},
        settings=row.settings,
        missing=findings.left_out.get(row.label, ""),
    )


def _figures(column: StudyColumn, results: Mapping[int, RunResult]) -> SeedFigures:
    found = {seed: result.figure(column.path) for seed, result in results.items()}
    return SeedFigures({seed: column.scale * value for seed, value in found.items() if value is not None})


def follow(findings: Findings) -> list[Followed]:
    """The pseudo labels of the watched rows through training, seeds taken together."""
    watched = {label: findings.results.get(label, {}).values() for label in findings.experiment.watched}
    rows = [Followed(label, mean_moments([r.moments for r in results])) for label, results in watched.items()]
    return [row for row in rows if row.moments]


def setting(findings: Findings) -> str:
    """Where and how often it was run, in a sentence."""
    _, data = findings.first
    seeds = listed(tuple(str(seed) for seed in findings.data))
    what = "Each seed has photos of its own." if data.name == SCENES and len(findings.data) > 1 else ""
    words = (
        f"Run on {data.name}: {plural(len(data.tagged), 'photo')} with tags to learn from, "
        f"{plural(len(data.test_photos), 'photo')} to be measured on, {plural(len(data.test.classes), 'class')}."
    )
    return f"{words} {'Seeds' if len(findings.data) > 1 else 'Seed'} {seeds}. {what}".strip()


def facts(findings: Findings, table: StudyTable | None) -> tuple[Fact, ...]:
    """The best row, how many runs, and what they took."""
    folders = {result.folder: result for results in findings.results.values() for result in results.values()}
    if table is None or not folders:
        return ()
    seconds = sum(result.figure(("cost", "seconds")) or 0.0 for result in folders.values())
    memory = max((result.figure(("cost", "peak_memory_mb")) or 0.0 for result in folders.values()), default=0.0)
    rows = [(row.name, row.figures[0].mean) for row in table.rows]
    known = [(name, mean) for name, mean in rows if mean is not None]
    best = max(known, key=lambda pair: pair[1], default=("", 0.0))
    return (
        Fact(f"Best {table.columns[0]}", f"{best[1]:.1f}", "%", f"{best[0]}. {reading(table)}"),
        Fact("Runs", whole(len(folders)), "", f"{plural(len(findings.data), 'seed')}; equal rows are one run"),
        Fact("Training", duration(seconds), "", f"all runs together, at most {whole(memory)} MB"),
    )


def about_study(findings: Findings, base: Config, commands: Sequence[str]) -> tuple[Table, ...]:
    """How it was made: commands, schedule, machine and versions."""
    made = [TableRow("command", (command,)) for command in commands]
    if findings.results:
        made.append(TableRow("one run again", ("tag2box train --config cells/NAME/config.toml --out runs/again",)))
        made.append(TableRow("schedule", (f"{base.plan.iterations} iterations of {base.loader.batch_size} photos",)))
    made += [TableRow(name, (value,)) for name, value in (machine() | versions()).items()]
    return (Table("Commands, machine and versions", ("",), tuple(made)),)


def study_numbers(
    findings: Findings, table: StudyTable | None, drawn: Drawn, followed: Sequence[Followed]
) -> dict[str, object]:
    """All that was found, for programs."""
    _, data = findings.first
    return {
        "experiment": findings.experiment.name,
        "on": data.name,
        "seeds": list(findings.data),
        "train_photos": len(data.tagged),
        "test_photos": len(data.test_photos),
        "machine": machine(),
        "versions": versions(),
        "rows": [] if table is None else table_json(table),
        "pseudo_labels": {row.name: quality_json(row.moments) for row in followed},
        **drawn.numbers,
    }


def experiments_table() -> RichTable:
    """Every experiment: its name, its title, how many runs a seed takes, its seeds."""
    grid = RichTable("NAME", "what it is", "rows to run", "seeds")
    for experiment in EXPERIMENTS.values():
        able = [row for row in experiment.rows if not row.obstacle()]
        seeds = ",".join(str(seed) for seed in experiment.seeds)
        grid.add_row(experiment.name, experiment.title, str(len(able)), seeds)
    return grid
