"""``tag2box reproduce``: a table or figure of the paper at a size one can afford, beside the paper's own."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tag2box import settings
from tag2box.commands.runs import machine, versions
from tag2box.data.scenes import Scenes
from tag2box.engine.progress import Progress, silent
from tag2box.errors import UserError
from tag2box.files import write_json, write_text
from tag2box.proposals.imported import Imported
from tag2box.recipes import RECIPES, Config
from tag2box.reporting.gallery import Album
from tag2box.reporting.quality_figures import Followed, quality_sections
from tag2box.reporting.sections import Fact
from tag2box.reporting.study_page import StudyInputs, StudyTable, markdown, reading, table_json, write_study_page
from tag2box.reporting.tables import Row, Table
from tag2box.reporting.text import duration, listed, plural, whole
from tag2box.studies.datasets import SCENES, Parts, Place, StudyData, open_data
from tag2box.studies.experiment import Drawn, Experiment, Findings
from tag2box.studies.experiments import EXPERIMENTS
from tag2box.studies.quality import mean_moments, quality_json
from tag2box.studies.queue import finish_all
from tag2box.studies.tables import study_table

CELLS = "cells"
GALLERY = "plan.gallery=24"  # photos on which pseudo labels are followed: enough for shares to mean something


@dataclass(frozen=True)
class Written:
    """What a study left: its page, its numbers and, where it has a table, that as Markdown."""

    page: Path
    numbers: Path
    table: str  # Markdown; empty without rows


def reproduce(
    name: str,
    place: Place,
    out: Path,
    *,
    seeds: Sequence[int] = (),
    recipe: str | None = None,
    overrides: Sequence[str] = (),
    commands: Sequence[str] = (),
    progress: Progress = silent,
) -> Written:
    """Run an experiment where it has not been run, and write ``out/NAME.html``, ``.json`` and ``.md``.

    Broken off, the same call goes on; what is finished is never run again, in this experiment or another of ``out``.

    Args:
        seeds: of training, and of scenes; default: the experiment's own.
        recipe: settings to start from; default: ``scenes`` on scenes, else ``photos``.
        overrides: settings for all rows, as ``--set`` takes them; the rows' own changes come on top.
        commands: how it was called, for the page.
    """
    experiment = find(name)
    base = settle(experiment, place, recipe, overrides)
    data = {seed: open_data(place, seed, out, progress=progress) for seed in distinct(seeds or experiment.seeds)}
    findings = run(experiment, base, data, out, progress=progress)
    return tell(findings, base, out, commands=commands)


def find(name: str) -> Experiment:
    """An experiment by its name."""
    if name not in EXPERIMENTS:
        near = difflib.get_close_matches(name, EXPERIMENTS, 1, 0.0)[0]
        raise UserError(f"{name}: nothing of this name in the paper; did you mean {near}? --list names all")
    return EXPERIMENTS[name]


def settle(experiment: Experiment, place: Place, recipe: str | None, overrides: Sequence[str]) -> Config:
    """The settings that the rows of an experiment change."""
    is_scenes = isinstance(place, Scenes)
    start = recipe or ("scenes" if is_scenes else "photos")
    if start not in RECIPES:
        near = difflib.get_close_matches(start, RECIPES, 1, 0.0)[0]
        raise UserError(f"--recipe {start}: unknown; did you mean {near}? There are {', '.join(RECIPES)}")
    light = experiment.light if is_scenes and recipe is None else ()
    config = settings.load(Config, [], [GALLERY, *light], base=RECIPES[start]())
    if isinstance(place, Parts) and place.boxes is not None:
        config = replace(config, proposals=Imported())
    config = settings.load(Config, [], list(overrides), base=config)
    for key, option in (("plan.seed", "--seeds"), ("data", "--on and its companions"), ("maps", "--out")):
        if any(o.partition("=")[0].strip().split(".")[: key.count(".") + 1] == key.split(".") for o in overrides):
            raise UserError(f"--set {key}: a study has its own; use {option}")
    return config


def distinct(seeds: Sequence[int]) -> tuple[int, ...]:
    """Seeds, each once, in order."""
    if any(seed < 0 for seed in seeds):
        raise UserError(f"--seeds: {min(seeds)} is below 0; expected whole numbers from 0 on")
    return tuple(dict.fromkeys(seeds))


def run(
    experiment: Experiment, base: Config, data: dict[int, StudyData], out: Path, *, progress: Progress = silent
) -> Findings:
    """Finish all cells of an experiment."""
    cells = experiment.cells(base, data)
    done = finish_all(list(cells.values()), out / CELLS, progress=progress)
    results = {
        row.label: {seed: done[cells[row.label, seed].name] for seed in data}
        for row in experiment.rows
        if not row.obstacle()
    }
    left_out = {row.label: row.obstacle() for row in experiment.rows if row.obstacle()}
    return Findings(experiment, data, results, left_out)


def tell(findings: Findings, base: Config, out: Path, *, commands: Sequence[str] = ()) -> Written:
    """Write the page, the numbers and the table of what was found."""
    experiment, album = findings.experiment, Album()
    table = study_table(findings, out)
    drawn = experiment.draw(findings, base, album)
    followed = follow(findings)
    page, numbers = out / f"{experiment.name}.html", out / f"{experiment.name}.json"
    inputs = StudyInputs(
        kicker="tag2box reproduce",
        title=experiment.title,
        shows=f"The paper: {experiment.shows}",
        setting=_setting(findings),
        origin=experiment.origin,
        table=table,
        facts=_facts(findings, table),
        notes=experiment.notes,
        sections=(*drawn.sections, *quality_sections(followed)),
        about=_about(findings, base, commands),
        album=album,
    )
    write_study_page(inputs, page)
    write_json(numbers, _numbers(findings, table, drawn, followed))
    text = "" if table is None else markdown(table)
    if text:
        write_text(out / f"{experiment.name}.md", text)
    return Written(page, numbers, text)


def follow(findings: Findings) -> list[Followed]:
    """The pseudo labels of the watched rows through training, seeds taken together."""
    watched = {label: findings.results.get(label, {}).values() for label in findings.experiment.watched}
    rows = [Followed(label, mean_moments([r.moments for r in results])) for label, results in watched.items()]
    return [row for row in rows if row.moments]


# ---------------------------------------------------------------- words and numbers of the page


def _setting(findings: Findings) -> str:
    _, data = findings.first
    seeds = listed(tuple(str(seed) for seed in findings.data))
    what = "Each seed has photos of its own." if data.name == SCENES and len(findings.data) > 1 else ""
    words = (
        f"Run on {data.name}: {plural(len(data.tagged), 'photo')} with tags to learn from, "
        f"{plural(len(data.test_photos), 'photo')} to be measured on, {plural(len(data.test.classes), 'class')}."
    )
    return f"{words} {'Seeds' if len(findings.data) > 1 else 'Seed'} {seeds}. {what}".strip()


def _facts(findings: Findings, table: StudyTable | None) -> tuple[Fact, ...]:
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


def _about(findings: Findings, base: Config, commands: Sequence[str]) -> tuple[Table, ...]:
    made = [Row("command", (command,)) for command in commands]
    if findings.results:
        made.append(Row("one run again", ("tag2box train --config cells/NAME/config.toml --out runs/again",)))
        made.append(Row("schedule", (f"{base.plan.iterations} iterations of {base.feed.batch} photos",)))
    made += [Row(name, (value,)) for name, value in (machine() | versions()).items()]
    return (Table("Commands, machine and versions", ("",), tuple(made)),)


def _numbers(
    findings: Findings, table: StudyTable | None, drawn: Drawn, followed: Sequence[Followed]
) -> dict[str, object]:
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
