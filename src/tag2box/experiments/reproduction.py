"""``tag2box reproduce``: a table or figure of the paper at an affordable scale, beside the paper's figures."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tag2box import errors, io, recipes, settings
from tag2box.data.scenes import Scenes
from tag2box.experiments import EXPERIMENTS, grid, study_data, summary
from tag2box.experiments.experiment import Experiment, StudyResults
from tag2box.progress import Progress, silent
from tag2box.reporting import study_page, study_tables

GRID_FOLDER = "cells"
NOT_SELECTED = "not selected"
GALLERY = "plan.gallery=24"  # photos for label quality: enough for meaningful shares


@dataclass(frozen=True)
class StudyFiles:
    """The files of a study: its page, its numbers and its table."""

    page: Path
    numbers: Path
    table: str  # Markdown; empty without rows


def reproduce(  # noqa: PLR0913 - one keyword per option of the command
    name: str,
    source: study_data.StudySource,
    out: Path,
    *,
    rows: Sequence[str] = (),
    seeds: Sequence[int] = (),
    recipe: str | None = None,
    overrides: Sequence[str] = (),
    commands: Sequence[str] = (),
    progress: Progress = silent,
) -> StudyFiles:
    """Run an experiment, and write ``out/NAME.html``, ``.json`` and ``.md``.

    Interrupted, the same call resumes. Finished runs are cached in ``out`` and shared by all experiments.

    Args:
        rows: labels of the rows to run; default: all that can be run.
        seeds: of training, and of scenes; default: those of the experiment.
        recipe: settings to start from; default: ``scenes`` on scenes, else ``photos-frozen``.
        overrides: settings of all rows, in the form of ``--set``; changes of a row are applied after them.
        commands: command lines shown on the page.
    """
    experiment = select_rows(find_experiment(name), rows)
    base = base_config(experiment, source, recipe, overrides)
    io.check_writable(out / f"{experiment.name}.html")
    data = {
        seed: study_data.open_data(source, seed, out, progress=progress)
        for seed in unique_seeds(seeds or experiment.seeds)
    }
    results = run_experiment(experiment, base, data, out, progress=progress)
    return write_study(results, base, out, commands=commands)


def find_experiment(name: str) -> Experiment:
    """An experiment by its name."""
    if name not in EXPERIMENTS:
        near = difflib.get_close_matches(name, EXPERIMENTS, 1, 0.0)[0]
        raise errors.UserError(f"{name}: no such table or figure; did you mean {near}? --list names all")
    return EXPERIMENTS[name]


def select_rows(experiment: Experiment, labels: Sequence[str]) -> Experiment:
    """The experiment with some of its rows to run, all without labels; the others keep the paper's figures."""
    known = {row.label for row in experiment.rows}
    unknown = next((label for label in labels if label not in known), None)
    if unknown is not None:
        available = "; ".join(row.label for row in experiment.rows) or "none"
        raise errors.UserError(f"--row {unknown}: {experiment.name} has no row of this name; there are: {available}")
    if not labels:
        return experiment
    rows = (row if row.label in labels else replace(row, absent=row.absent or NOT_SELECTED) for row in experiment.rows)
    return replace(experiment, rows=tuple(rows))


def base_config(
    experiment: Experiment, source: study_data.StudySource, recipe: str | None, overrides: Sequence[str]
) -> recipes.Config:
    """The settings that the rows of an experiment change."""
    is_scenes = isinstance(source, Scenes)
    start = recipe or ("scenes" if is_scenes else "photos-frozen")
    if start not in recipes.RECIPES:
        near = difflib.get_close_matches(start, recipes.RECIPES, 1, 0.0)[0]
        raise errors.UserError(
            f"--recipe {start}: unknown; did you mean {near}? There are {', '.join(recipes.RECIPES)}"
        )
    light = experiment.light if is_scenes and recipe is None else ()
    config = settings.load(recipes.Config, [], [GALLERY, *light], base=recipes.RECIPES[start]())
    if isinstance(source, study_data.Splits) and source.boxes is not None:
        config = replace(config, proposals=source.boxes.method())
    config = settings.load(recipes.Config, [], list(overrides), base=config)
    check_overrides(overrides)
    return config


def check_overrides(overrides: Sequence[str]) -> None:
    """Raise if an override sets what the study itself sets."""
    for key, option in (("plan.seed", "--seeds"), ("data", "--on and its companions"), ("feature_cache", "--out")):
        if any(o.partition("=")[0].strip().split(".")[: key.count(".") + 1] == key.split(".") for o in overrides):
            raise errors.UserError(f"--set {key}: set by the study itself; use {option}")


def unique_seeds(seeds: Sequence[int]) -> tuple[int, ...]:
    """Seeds without duplicates, in order."""
    if any(seed < 0 for seed in seeds):
        raise errors.UserError(f"--seeds: {min(seeds)} is below 0; expected whole numbers from 0 on")
    return tuple(dict.fromkeys(seeds))


def run_experiment(
    experiment: Experiment,
    base: recipes.Config,
    data: Mapping[int, study_data.StudyData],
    out: Path,
    *,
    progress: Progress = silent,
) -> StudyResults:
    """Finish all runs of an experiment."""
    runs = experiment.runs(base, data)
    done = grid.finish_all(list(runs.values()), out / GRID_FOLDER, progress=progress)
    return gather_results(experiment, data, runs, done)


def gather_results(
    experiment: Experiment,
    data: Mapping[int, study_data.StudyData],
    runs: Mapping[tuple[str, int], grid.GridRun],
    done: Mapping[str, grid.RunResult],
) -> StudyResults:
    """Results of finished runs, by row and seed."""
    results = {
        row.label: {seed: done[runs[row.label, seed].name] for seed in data}
        for row in experiment.rows
        if not row.skip_reason()
    }
    left_out = {row.label: row.skip_reason() for row in experiment.rows if row.skip_reason()}
    return StudyResults(experiment, data, results, left_out)


def write_study(results: StudyResults, base: recipes.Config, out: Path, *, commands: Sequence[str] = ()) -> StudyFiles:
    """Write the page, the numbers and the table of a study."""
    experiment = results.experiment
    table = summary.study_table(results, out)
    analysis, quality = experiment.analyze(results, base), summary.quality_curves(results)
    drawn = summary.resampled_rows(results)
    inputs = study_tables.StudyInputs(
        kicker="tag2box reproduce",
        title=experiment.title,
        shows=f"The paper: {experiment.shows}",
        setting=summary.setting(results),
        origin=experiment.origin,
        table=table,
        facts=summary.study_facts(results, table),
        notes=experiment.notes,
        sections=(*analysis.sections, *summary.intervals_section(results, drawn), *summary.errors_section(results)),
        quality=quality,
        about=summary.about_study(results, base, commands),
    )
    files = StudyFiles(
        page=out / f"{experiment.name}.html",
        numbers=out / f"{experiment.name}.json",
        table="" if table is None else study_tables.markdown(table),
    )
    study_page.write_study_page(inputs, files.page)
    io.write_json(files.numbers, summary.study_json(results, table, analysis, quality, drawn))
    if files.table:
        io.write_text(out / f"{experiment.name}.md", files.table)
    return files
