"""What a study says of itself, in words and in numbers: shared by all that write a page."""

from __future__ import annotations

from collections.abc import Sequence

from tag2box.commands.runs import machine, versions
from tag2box.recipes import Config
from tag2box.reporting.quality_figures import Followed
from tag2box.reporting.sections import Fact
from tag2box.reporting.study_page import StudyTable, reading, table_json
from tag2box.reporting.tables import Row, Table
from tag2box.reporting.text import duration, listed, plural, whole
from tag2box.studies.datasets import SCENES
from tag2box.studies.experiment import Drawn, Findings
from tag2box.studies.quality import mean_moments, quality_json


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


def about(findings: Findings, base: Config, commands: Sequence[str]) -> tuple[Table, ...]:
    """How it was made: commands, schedule, machine and versions."""
    made = [Row("command", (command,)) for command in commands]
    if findings.results:
        made.append(Row("one run again", ("tag2box train --config cells/NAME/config.toml --out runs/again",)))
        made.append(Row("schedule", (f"{base.plan.iterations} iterations of {base.feed.batch} photos",)))
    made += [Row(name, (value,)) for name, value in (machine() | versions()).items()]
    return (Table("Commands, machine and versions", ("",), tuple(made)),)


def numbers(
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
