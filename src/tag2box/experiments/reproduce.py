"""``tag2box reproduce``: a table or figure of the paper at a size one can afford, beside the paper's own."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tag2box import settings
from tag2box.data.scenes import Scenes
from tag2box.errors import UserError
from tag2box.experiments import EXPERIMENTS
from tag2box.experiments import summary as telling
from tag2box.experiments.experiment import Experiment, Findings
from tag2box.experiments.grid import GridRun, RunResult
from tag2box.experiments.run_queue import finish_all
from tag2box.experiments.study_data import Place, Splits, StudyData, open_data
from tag2box.experiments.summary import study_table
from tag2box.io import write_json, write_text
from tag2box.progress import Progress, silent
from tag2box.proposals.importers.proposal_files import Imported
from tag2box.recipes import RECIPES, Config
from tag2box.reporting.gallery import Album
from tag2box.reporting.study_figures import quality_sections
from tag2box.reporting.study_page import StudyInputs, markdown, write_study_page

GRID_FOLDER = "cells"
UNASKED = "not asked for"
GALLERY = "plan.gallery=24"  # photos on which pseudo labels are followed: enough for shares to mean something


@dataclass(frozen=True)
class Written:
    """What a study left: its page, its numbers and, where it has a table, that as Markdown."""

    page: Path
    numbers: Path
    table: str  # Markdown; empty without rows


def reproduce(  # noqa: PLR0913 - one keyword an option of the command
    name: str,
    place: Place,
    out: Path,
    *,
    rows: Sequence[str] = (),
    seeds: Sequence[int] = (),
    recipe: str | None = None,
    overrides: Sequence[str] = (),
    commands: Sequence[str] = (),
    progress: Progress = silent,
) -> Written:
    """Run an experiment where it has not been run, and write ``out/NAME.html``, ``.json`` and ``.md``.

    Broken off, the same call goes on; what is finished is never run again, in this experiment or another of ``out``.

    Args:
        rows: the rows to run, by their labels; default: all that can be.
        seeds: of training, and of scenes; default: the experiment's own.
        recipe: settings to start from; default: ``scenes`` on scenes, else ``photos``.
        overrides: settings for all rows, as ``--set`` takes them; the rows' own changes come on top.
        commands: how it was called, for the page.
    """
    experiment = only(find_experiment(name), rows)
    base = settle(experiment, place, recipe, overrides)
    data = {seed: open_data(place, seed, out, progress=progress) for seed in distinct(seeds or experiment.seeds)}
    findings = run(experiment, base, data, out, progress=progress)
    return write_study(findings, base, out, commands=commands)


def find_experiment(name: str) -> Experiment:
    """An experiment by its name."""
    if name not in EXPERIMENTS:
        near = difflib.get_close_matches(name, EXPERIMENTS, 1, 0.0)[0]
        raise UserError(f"{name}: nothing of this name in the paper; did you mean {near}? --list names all")
    return EXPERIMENTS[name]


def only(experiment: Experiment, labels: Sequence[str]) -> Experiment:
    """The experiment with some of its rows to run; of the others the paper's figures stay. No labels are all rows."""
    known = {row.label for row in experiment.rows}
    strange = next((label for label in labels if label not in known), None)
    if strange is not None:
        there = "; ".join(row.label for row in experiment.rows) or "none"
        raise UserError(f"--row {strange}: {experiment.name} has no row of this name; there are: {there}")
    if not labels:
        return experiment
    rows = (row if row.label in labels else replace(row, absent=row.absent or UNASKED) for row in experiment.rows)
    return replace(experiment, rows=tuple(rows))


def settle(experiment: Experiment, place: Place, recipe: str | None, overrides: Sequence[str]) -> Config:
    """The settings that the rows of an experiment change."""
    is_scenes = isinstance(place, Scenes)
    start = recipe or ("scenes" if is_scenes else "photos")
    if start not in RECIPES:
        near = difflib.get_close_matches(start, RECIPES, 1, 0.0)[0]
        raise UserError(f"--recipe {start}: unknown; did you mean {near}? There are {', '.join(RECIPES)}")
    light = experiment.light if is_scenes and recipe is None else ()
    config = settings.load(Config, [], [GALLERY, *light], base=RECIPES[start]())
    if isinstance(place, Splits) and place.boxes is not None:
        config = replace(config, proposals=Imported())
    config = settings.load(Config, [], list(overrides), base=config)
    check_overrides(overrides)
    return config


def check_overrides(overrides: Sequence[str]) -> None:
    """Raise where somebody sets what a study sets itself."""
    for key, option in (("plan.seed", "--seeds"), ("data", "--on and its companions"), ("feature_cache", "--out")):
        if any(o.partition("=")[0].strip().split(".")[: key.count(".") + 1] == key.split(".") for o in overrides):
            raise UserError(f"--set {key}: a study has its own; use {option}")


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
    done = finish_all(list(cells.values()), out / GRID_FOLDER, progress=progress)
    return gather_results(experiment, data, cells, done)


def gather_results(
    experiment: Experiment,
    data: Mapping[int, StudyData],
    cells: Mapping[tuple[str, int], GridRun],
    done: Mapping[str, RunResult],
) -> Findings:
    """What finished cells found, by row and seed."""
    results = {
        row.label: {seed: done[cells[row.label, seed].name] for seed in data}
        for row in experiment.rows
        if not row.obstacle()
    }
    left_out = {row.label: row.obstacle() for row in experiment.rows if row.obstacle()}
    return Findings(experiment, data, results, left_out)


def write_study(findings: Findings, base: Config, out: Path, *, commands: Sequence[str] = ()) -> Written:
    """Write the page, the numbers and the table of what was found."""
    experiment, album = findings.experiment, Album()
    table = study_table(findings, out)
    drawn = experiment.draw(findings, base, album)
    followed = telling.follow(findings)
    page, numbers = out / f"{experiment.name}.html", out / f"{experiment.name}.json"
    inputs = StudyInputs(
        kicker="tag2box reproduce",
        title=experiment.title,
        shows=f"The paper: {experiment.shows}",
        setting=telling.setting(findings),
        origin=experiment.origin,
        table=table,
        facts=telling.facts(findings, table),
        notes=experiment.notes,
        sections=(*drawn.sections, *quality_sections(followed)),
        about=telling.about_study(findings, base, commands),
        album=album,
    )
    write_study_page(inputs, page)
    write_json(numbers, telling.study_numbers(findings, table, drawn, followed))
    text = "" if table is None else markdown(table)
    if text:
        write_text(out / f"{experiment.name}.md", text)
    return Written(page, numbers, text)
