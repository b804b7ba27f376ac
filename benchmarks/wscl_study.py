"""Studies as one queue of runs, most telling rows first: discovery's rules, WSCL, all systems, levers, labelers.

    python benchmarks/wscl_study.py --studies discovery,wscl --seeds 0,1,2 --work runs/studies --out studies.json
    python benchmarks/wscl_study.py --studies systems --on VOC2007 --work runs/studies --out systems.json
    python benchmarks/wscl_study.py --studies levers,labelers --on fruit --recipe photos --seeds 0 --out fruit.json
    python benchmarks/wscl_study.py --list          # the queue, with the minutes that are left
    python benchmarks/wscl_study.py --most 5        # the next five runs, then stop

discovery: OICR+, and object discovery by each of the three rules, without and with WSCL. wscl: omega (share, batch,
pair) x optimizer (SGD, Adam) x lambda over three decades x what is trained beside the heads (head convolution, tail,
whole lite0), each beside a row without WSCL; rows of a lower tier come first, for all seeds. systems: the fourteen
systems of `tag2box compare`. levers: the recipe ``photos`` with each of its parts left out, and each alone. labelers:
OICR+, discovery, WSCL, both and MIST's labels, all else that of the recipe; the first four also with heads.neck=512.

Runs are those of `compare` and `reproduce` and are shared with them if ``--work`` is their ``--out``; what is
interrupted resumes, what is there is not trained again. The JSON file is written after every run. Settings are to be
chosen by CorLoc of training photos; mAP50 of test photos is for the report.

On the scenes a run of the head convolution is 150 iterations of 0.4 to 0.8 seconds (MIST and CASD 1.2; one thread,
quiet machine, docs/compare.md), and its evaluation about as long: 2 to 4 minutes. `--list` estimates the rest from the
runs that are done.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from tag2box.data.scenes import Scenes
from tag2box.experiments import grid, reproduction, study_data
from tag2box.experiments.commands import study_source
from tag2box.experiments.experiment import CORLOC, LABELS, MAP, Experiment, StudyColumn, StudyVariant
from tag2box.formats.datasets import class_names
from tag2box.formats.listing import DataSource
from tag2box.io import write_json
from tag2box.progress import Progress, TerminalProgress, silent
from tag2box.recipes import Config
from tag2box.systems import SYSTEMS, changes
from tag2box.training.events import read_events

STUDIES = ("discovery", "wscl", "systems", "levers", "labelers")
RULES = ("paper", "exclusive", "published")
OMEGAS = ("share", "batch", "pair")
LAMBDAS = (0.03, 0.3, 3.0, 0.003)  # the paper's first
OPTIMIZERS = {"SGD": ("plan.optimizer.kind=sgd", "plan.optimizer.lr=0.01"), "Adam": ("plan.optimizer.kind=adam",)}
PARTS = {
    "head": (),
    "tail": ("backbone.train_tail=true",),
    "whole": ("backbone.train_tail=true", "backbone.train_trunk=true"),
}
OICR_PLUS = ("criterion.labeler.kind=oicr", "criterion.contrast.enabled=false")
COLUMNS = (MAP, CORLOC, *LABELS, StudyColumn("ms a step", ("cost", "step_seconds"), 1000.0))
LEVERS = {
    "adaptation": ("adaptation.epochs=0",),
    "context": ("heads.context.on=none",),
    "area": ("criterion.prior.area=0", "inference.prior.area=0"),
    "class maps": ("criterion.prior.evidence=0", "inference.prior.evidence=0"),
    "preselection": ("adaptation.keep_boxes=1000000",),
}
"""What switches a part of the recipe ``photos`` off."""
OF_MAPS = ("class maps", "preselection")
"""Levers that read the class maps of adaptation."""
DISCOVERY = ("criterion.labeler.kind=discovery", "criterion.labeler.rule=exclusive")
LABELERS = {
    "OICR+": (("criterion.labeler.kind=oicr",), False),
    "+ OD": (DISCOVERY, False),
    "+ WSCL": (("criterion.labeler.kind=oicr",), True),
    "+ both (OD-WSCL)": (DISCOVERY, True),
    "MIST labels": (("criterion.labeler.kind=mist",), False),
}
TABLE_3A = ("OICR+", "+ OD", "+ WSCL", "+ both (OD-WSCL)")
NECK = ("heads.neck=512",)
OTHERS = 4
"""Tier of the combinations that no question asks for."""


@dataclass(frozen=True)
class StudyRow:
    """A row of a study; rows of a lower tier are run first."""

    study: str
    name: str
    settings: tuple[str, ...]
    tier: int = 0
    system: str = ""

    def config(self, base: Config, seed: int) -> Config:
        """The settings of the row."""
        return StudyVariant(label=self.name, settings=self.settings).config(base, seed)


def discovery_rows() -> Iterator[StudyRow]:
    """Discovery by each rule against OICR+; then the same with WSCL."""
    yield StudyRow("discovery", "OICR+", OICR_PLUS)
    for tier, has_wscl in enumerate((False, True)):
        for rule in RULES:
            chosen = ("criterion.labeler.kind=discovery", f"criterion.labeler.rule={rule}")
            name = f"discovery, {rule}" + (", WSCL" if has_wscl else "")
            yield StudyRow("discovery", name, (*chosen, f"criterion.contrast.enabled={str(has_wscl).lower()}"), tier)


def wscl_rows() -> Iterator[StudyRow]:
    """WSCL on OICR+ labels: all combinations, and a row without WSCL for each optimizer and trained part."""
    for (optimizer, one), (part, two) in product(OPTIMIZERS.items(), PARTS.items()):
        tier = list(PARTS).index(part) and 1 + list(PARTS).index(part)
        yield StudyRow("wscl", f"none, {optimizer}, {part}", (*OICR_PLUS, *one, *two), tier)
    for (optimizer, one), (part, two), omega, weight in product(OPTIMIZERS.items(), PARTS.items(), OMEGAS, LAMBDAS):
        own = ("criterion.labeler.kind=oicr", "criterion.contrast.enabled=true", f"criterion.contrast.omega={omega}")
        name, chosen = f"omega {omega}, lambda {weight:g}, {optimizer}, {part}", f"criterion.contrast.weight={weight}"
        yield StudyRow("wscl", name, (*own, chosen, *one, *two), _tier(omega, weight, part))


def _tier(omega: str, weight: float, part: str) -> int:
    """0: omega; 1: lambda of two omegas; 2 and 3: the tail and the whole network; then all others."""
    is_paper = weight == LAMBDAS[0]
    if part == "head":
        return 0 if is_paper else 1 if omega != "pair" else OTHERS
    return 1 + list(PARTS).index(part) if is_paper and omega != "pair" else OTHERS


def system_rows(base: Config) -> Iterator[StudyRow]:
    """All systems."""
    for system in SYSTEMS.values():
        yield StudyRow("systems", system.title, tuple(changes(base, system(base))), 0, system.name)


def lever_rows() -> Iterator[StudyRow]:
    """All levers of the recipe; each left out; one that it does not have; none; each alone.

    Levers that read class maps are alone with adaptation, which makes these maps.
    """
    yield StudyRow("levers", "all", ())
    for name in LEVERS:
        left_out = ("adaptation", *OF_MAPS) if name == "adaptation" else (name,)
        yield StudyRow("levers", f"without {name}", _without(left_out))
    yield StudyRow("levers", "with certain negatives", ("criterion.negatives.weight=1",))
    yield StudyRow("levers", "none", _without(LEVERS), 1)
    for name in LEVERS:
        kept = {name, "adaptation"} if name in OF_MAPS else {name}
        title = " and ".join(lever for lever in LEVERS if lever in kept)
        yield StudyRow("levers", f"{title} alone", _without([lever for lever in LEVERS if lever not in kept]), 1)


def _without(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(setting for name in names for setting in LEVERS[name])


def labeler_rows() -> Iterator[StudyRow]:
    """The paper's table 3a and MIST's labels, all else equal; then table 3a with a layer that WSCL can shape."""
    for name, (labeler, has_wscl) in LABELERS.items():
        yield StudyRow("labelers", name, (*labeler, f"criterion.contrast.enabled={str(has_wscl).lower()}"))
    for name in TABLE_3A:
        labeler, has_wscl = LABELERS[name]
        chosen = (*labeler, f"criterion.contrast.enabled={str(has_wscl).lower()}", *NECK)
        yield StudyRow("labelers", f"{name}, neck", chosen, 1)


def rows_of(studies: Sequence[str], base: Config) -> list[StudyRow]:
    """The rows of some studies, those of a lower tier first."""
    rows = {
        "discovery": discovery_rows(),
        "wscl": wscl_rows(),
        "systems": system_rows(base),
        "levers": lever_rows(),
        "labelers": labeler_rows(),
    }
    return sorted((row for study in studies for row in rows[study]), key=lambda row: row.tier)


@dataclass(frozen=True)
class Queue:
    """Runs of rows and seeds, in the order in which they are made: by tier, then by seed, then by row."""

    base: Config
    data: Mapping[int, study_data.StudyData]
    rows: Sequence[StudyRow]
    folder: Path  # of the runs

    def runs(self) -> list[tuple[StudyRow, int, grid.GridRun]]:
        """All runs."""
        order = [(row.tier, seed, row) for row in self.rows for seed in self.data]
        order.sort(key=lambda item: item[:2])
        return [(row, seed, grid.GridRun(row.config(self.base, seed), self.data[seed])) for _, seed, row in order]

    def open(self) -> list[tuple[StudyRow, int, grid.GridRun]]:
        """The runs that are not finished."""
        return [one for one in self.runs() if not grid.is_finished(one[2], self.folder)]

    def results(self) -> list[dict[str, Any]]:
        """Figures of the finished rows by seed, in per cent."""
        found: dict[tuple[str, str], dict[int, grid.RunResult]] = {}
        for row, seed, run in self.runs():
            if grid.is_finished(run, self.folder):
                found.setdefault((row.study, row.name), {})[seed] = grid.read_result(self.folder / run.name)
        return [self._row(row, found[row.study, row.name]) for row in self.rows if (row.study, row.name) in found]

    def _row(self, row: StudyRow, results: Mapping[int, grid.RunResult]) -> dict[str, Any]:
        figures = {" ".join(column.name.split()): column.over_seeds(results).by_seed for column in COLUMNS}
        shares = {seed: share for seed, result in results.items() if (share := contrast_share(result)) is not None}
        state = SYSTEMS[row.system].state(row.config(self.base, 0)) if row.system else None
        return {
            "study": row.study,
            "row": row.name,
            "tier": row.tier,
            "settings": list(row.settings),
            "state": state,
            "figures": {name: {str(seed): value for seed, value in own.items()} for name, own in figures.items()},
            "contrast_share": {str(seed): value for seed, value in shares.items()},
            "runs": {str(seed): result.folder.name for seed, result in results.items()},
        }


def contrast_share(result: grid.RunResult) -> float | None:
    """Share of WSCL's gradient at the neck, median over the last half of training; None without WSCL."""
    steps = [event.get("contrast_share") for event in read_events(result.folder) if event["event"] == "step"]
    known = [float(share) for share in steps[len(steps) // 2 :] if isinstance(share, int | float)]
    return statistics.median(known) if known else None


def work(queue: Queue, out: Path, facts: Mapping[str, Any], *, most: int | None, progress: Progress = silent) -> None:
    """Finish the open runs, at most ``most``; the JSON file is written after each."""
    pending = queue.open()
    write_json(out, {**facts, "rows": queue.results(), "open": len(pending)})
    for number, (row, seed, run) in enumerate(pending[:most], start=1):
        print(f"{number} of {len(pending)}: {row.study}, {row.name}, seed {seed}", flush=True)
        grid.finish_run(run, queue.folder, progress=progress)
        write_json(out, {**facts, "rows": queue.results(), "open": len(pending) - number})


def describe(queue: Queue) -> str:
    """The open runs in order, and minutes by tier, estimated from the training of finished runs."""
    pending, done = queue.open(), [row["figures"]["ms a step"] for row in queue.results()]
    steps = [value for own in done for value in own.values()]
    lines = [f"tier {row.tier}: {row.study}, {row.name}, seed {seed}" for row, seed, _ in pending]
    guess = f"{2 * statistics.mean(steps) / 60_000 * queue.base.plan.iterations:.1f}" if steps else "unknown"
    return "\n".join([*lines, f"{len(pending)} runs left; minutes per run, with evaluation: about {guess}"])


def make_queue(
    source: study_data.StudySource,
    studies: Sequence[str],
    folder: Path,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    recipe: str | None = None,
    overrides: Sequence[str] = (),
    progress: Progress = silent,
) -> Queue:
    """The queue of some studies on a dataset; its runs are in the folder that `compare` and `reproduce` use."""
    bare = Experiment(name="studies", title="", shows="")
    base = reproduction.base_config(bare, source, recipe, overrides)
    rows = rows_of(studies, base)
    own = [replace(row, settings=(*row.settings, *overrides)) for row in rows]
    data = {seed: study_data.open_data(source, seed, folder, progress=progress) for seed in seeds}
    return Queue(base, data, own, folder / reproduction.GRID_FOLDER)


def main(argv: list[str] | None = None, world: Scenes | None = None) -> None:
    """Run what is open, or list it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", default="discovery,wscl", help=f"of {', '.join(STUDIES)}")
    parser.add_argument("--on", type=Path, default=Path(study_data.SCENES), help="scenes, or a dataset with boxes")
    parser.add_argument("--photos", type=Path)
    parser.add_argument("--classes", help="comma-separated names, or a file with one per line")
    parser.add_argument("--split")
    parser.add_argument("--test-split")
    parser.add_argument("--recipe")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="a.b=c")
    parser.add_argument("--most", type=int, help="stop after so many runs")
    parser.add_argument("--list", action="store_true", help="print the queue")
    parser.add_argument("--work", type=Path, default=Path("runs/studies"))
    parser.add_argument("--out", type=Path, default=Path("runs/studies/studies.json"))
    given = parser.parse_args(argv)
    studies, seeds = given.studies.split(","), [int(seed) for seed in given.seeds.split(",")]
    if unknown := [study for study in studies if study not in STUDIES]:
        parser.error(f"--studies {unknown[0]}: unknown; there are {', '.join(STUDIES)}")
    names = class_names(given.classes) if given.classes else None
    listed = DataSource(path=given.on, photos=given.photos, split=given.split, classes=names)
    source = world or study_source(listed, None, given.test_split, None, None)
    progress = TerminalProgress()
    queue = make_queue(
        source, studies, given.work, seeds=seeds, recipe=given.recipe, overrides=given.overrides, progress=progress
    )
    if given.list:
        print(describe(queue))
        return
    on = next(iter(queue.data.values())).name
    facts = {"on": on, "seeds": seeds, "studies": studies, "base": list(changes(Config(), queue.base))}
    work(queue, given.out, facts, most=given.most, progress=progress)


if __name__ == "__main__":
    main()
