"""``tag2box compare``: any systems on any datasets under any seeds, on equal terms, told on one page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tag2box.commands.requirements import check_photos
from tag2box.commands.train import read_training
from tag2box.experiments.compare_page import NAME, PAPER, write_compare_page
from tag2box.experiments.experiment import CORLOC, LABELS, MAP, Experiment, Findings, StudyColumn, StudyVariant
from tag2box.experiments.grid import GridRun, is_finished
from tag2box.experiments.outcomes import KEY, with_fates
from tag2box.experiments.reproduce import GRID_FOLDER, Written, check_overrides, distinct, gather_results, settle
from tag2box.experiments.run_queue import finish_all
from tag2box.experiments.study_data import Place, StudyData, open_data
from tag2box.progress import Progress, silent
from tag2box.recipes import Config
from tag2box.systems import SYSTEMS, System, changes, find_system

COMPARE_COLUMNS = ("found", "part", "grouped", "missed")
FATE_COLUMNS = tuple(StudyColumn(fate, (KEY, fate)) for fate in COMPARE_COLUMNS)
COST = (
    StudyColumn("ms\na step", ("cost", "step_seconds"), 1000.0),
    StudyColumn("MB\nat most", ("cost", "peak_memory_mb"), 1.0),
)


@dataclass(frozen=True)
class Contest:
    """All systems on one dataset."""

    experiment: Experiment
    base: Config
    data: Mapping[int, StudyData]

    @property
    def cells(self) -> dict[tuple[str, int], GridRun]:
        """A cell for each system and seed."""
        return self.experiment.cells(self.base, self.data)


def compare(
    names: Sequence[str],
    places: Sequence[Place],
    out: Path,
    *,
    seeds: Sequence[int] = (),
    recipe: str | None = None,
    overrides: Sequence[str] = (),
    commands: Sequence[str] = (),
    progress: Progress = silent,
) -> Written:
    """Run systems where they have not been run, and write ``out/compare.html``, ``.json`` and ``.md``.

    Broken off, the same call goes on; what is finished is never run again, here or by ``reproduce`` into ``out``.

    Args:
        names: of ``SYSTEMS``; none are all.
        seeds: of training, and of scenes; default: 0, 1 and 2.
        recipe: settings to start from; default: ``scenes`` on scenes, else ``photos``.
        overrides: settings for all systems, as ``--set`` takes them, on top of what a system changes.
        commands: how it was called, for the page.
    """
    contests = open_contests(names, places, out, seeds=seeds, recipe=recipe, overrides=overrides, progress=progress)
    return write_compare_page(
        finish_contests(contests, out, progress=progress), contests[0].base, out, commands=commands
    )


def open_contests(
    names: Sequence[str],
    places: Sequence[Place],
    out: Path,
    *,
    seeds: Sequence[int] = (),
    recipe: str | None = None,
    overrides: Sequence[str] = (),
    progress: Progress = silent,
) -> list[Contest]:
    """What there is to be run; every mistake that can be seen beforehand is, before anything is written."""
    check_overrides(overrides)
    systems = [find_system(name) for name in dict.fromkeys(names or SYSTEMS)]
    bare, settled = _experiment((), ()), []
    for place in places:
        base = settle(bare, place, recipe, ())
        experiment = _experiment(systems, [_row(system, base, overrides) for system in systems])
        for row in experiment.rows:
            row.config(base, 0)  # a setting that a system does not have is told now
        settled.append((place, experiment, base))
    chosen = distinct(seeds or bare.seeds)
    return [
        Contest(experiment, base, {seed: open_data(place, seed, out, progress=progress) for seed in chosen})
        for place, experiment, base in settled
    ]


def finish_contests(contests: Sequence[Contest], out: Path, *, progress: Progress = silent) -> list[Findings]:
    """Train and measure what is open, in one queue."""
    folder = out / GRID_FOLDER
    cells = [cell for contest in contests for cell in contest.cells.values()]
    for cell in cells:
        if not is_finished(cell, folder):
            _check(cell)
    done = finish_all(cells, folder, progress=progress)
    found = [gather_results(contest.experiment, contest.data, contest.cells, done) for contest in contests]
    return [_with_fates(findings) for findings in found]


def _check(cell: GridRun) -> None:
    """Raise where a dataset lacks what a system asks for: now, not when its turn has come."""
    config = cell.data.placed(cell.config)
    check_photos(config, read_training(config) if config.criterion.requirements.counts else cell.data.tagged)


def _experiment(systems: Sequence[System], rows: Sequence[StudyVariant]) -> Experiment:
    titles = [system.title for system in systems]
    against = "OICR+" if "OICR+" in titles else (titles or [""])[0]
    return Experiment(
        name=NAME,
        title="Systems compared",
        shows="",
        origin="its tables 1 and 2; VGG16",
        rows=tuple(rows),
        columns=(MAP, CORLOC, *FATE_COLUMNS, *LABELS, *COST),
        against=against,
        watched=tuple(titles),
    )


def _row(system: System, base: Config, overrides: Sequence[str]) -> StudyVariant:
    figures = {name: system.reported(dataset) for dataset, name in PAPER.items()}
    return StudyVariant(
        label=system.title,
        settings=(*changes(base, system(base)), *overrides),
        paper={name: figure for name, figure in figures.items() if figure is not None},
    )


def _with_fates(findings: Findings) -> Findings:
    results = {
        label: {seed: with_fates(result, findings.data[seed]) for seed, result in by_seed.items()}
        for label, by_seed in findings.results.items()
    }
    return replace(findings, results=results)
