"""Studies as one queue of runs, most telling rows first: discovery's rules, WSCL, all systems, levers, labelers.

    python benchmarks/wscl_study.py --studies discovery,wscl --seeds 0,1,2 --work runs/studies --out studies.json
    python benchmarks/wscl_study.py --studies systems --on VOC2007 --work runs/studies --out systems.json
    python benchmarks/wscl_study.py --studies levers,labelers --on fruit --recipe photos --seeds 0 --out fruit.json
    python benchmarks/wscl_study.py --list          # the queue, with the minutes that are left
    python benchmarks/wscl_study.py --most 5        # the next five runs, then stop

discovery: OICR+, and object discovery by each of the three rules, without and with WSCL. wscl: OICR+ without WSCL at
four learning rates of SGD; omega (share, batch, pair) x optimizer (SGD, Adam) x lambda over three decades x what is
trained beside the heads (head convolution, tail, whole lite0), each beside a row without WSCL; and each omega, and
none, on the labels of discovery. Rows of a lower tier come first, for all seeds. systems: the fourteen systems of
`tag2box compare`. levers: the recipe ``photos`` with each of its parts left out, and each alone. labelers: OICR+,
discovery, WSCL, both and MIST's labels, all else that of the recipe; the first four also with heads.neck=512.

Tier 4 of wscl is not run unless --tiers has it: omega "pair" at other lambdas than the paper's or with a trained tail
or whole network, and the other lambdas with a trained tail or whole network. The rest takes one question at a time.

Runs are those of `compare` and `reproduce` and are shared with them if ``--work`` is their ``--out``; what is
interrupted resumes, what is there is not trained again. The JSON file is written after every run; ``--intervals`` adds
95 % intervals of mAP50 and CorLoc over photos, and paired differences from the first row of the study, at the end.

Choices are made without the test photos, on a part of the training photos; then the chosen rows are run on all:

    python benchmarks/wscl_study.py --studies wscl --on voc07-mini --split fit --test-split val --out choices.json
    python benchmarks/wscl_study.py --studies wscl --on voc07-mini --split train --test-split test --sgd-lr 0.1

One chooses by CorLoc of the photos of ``fit`` and mAP50 of ``val``, which no row is trained on; mAP50 of ``test`` is
for the report. The learning rate of SGD is chosen so, too: its sweep ("none, SGD, lr X") comes first, and --sgd-lr
gives the chosen one to all other rows of SGD.

On the scenes a run of the head convolution is 150 iterations of 0.4 to 0.8 seconds (MIST and CASD 1.2; one thread,
quiet machine, docs/compare.md), and its evaluation about as long: 2 to 4 minutes. `--list` estimates the rest from the
runs that are done.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from tag2box.data.scenes import Scenes
from tag2box.errors import UserError
from tag2box.experiments import grid, reproduction, study_data, summary
from tag2box.experiments.commands import study_source
from tag2box.experiments.experiment import (
    CORLOC,
    LABELS,
    MAP,
    MAP_11,
    Experiment,
    StudyColumn,
    StudyResults,
    StudyVariant,
)
from tag2box.formats.datasets import class_names
from tag2box.formats.listing import DataSource
from tag2box.io import read_json, write_json
from tag2box.progress import Progress, TerminalProgress, silent
from tag2box.recipes import Config
from tag2box.systems import SYSTEMS, changes
from tag2box.training.events import read_events

STUDIES = ("discovery", "wscl", "systems", "levers", "labelers")
RULES = ("paper", "exclusive", "published")
OMEGAS = ("share", "batch", "pair")
LAMBDAS = (0.03, 0.3, 3.0, 0.003)  # the paper's first
SGD_LR = 0.01
"""Learning rate of SGD in the paper, for batches of 8 photos."""
SGD_LRS = (0.01, 0.03, 0.1, 0.3)
PARTS = {
    "head": (),
    "tail": ("backbone.train_tail=true",),
    "whole": ("backbone.train_tail=true", "backbone.train_trunk=true"),
}
OICR_PLUS = ("criterion.labeler.kind=oicr", "criterion.contrast.enabled=false")
TRIVIAL = tuple(
    StudyColumn(f"{figure}, {row}", (split, "baselines", row, *path))
    for figure, split, path in (("mAP50", "test", ("voc12", "mAP")), ("CorLoc", "train", ("corloc", "mean")))
    for row in ("centred box, same class scores", "component of the class map")
)
COLUMNS = (
    MAP,
    MAP_11,
    StudyColumn("COCO AP", ("test", "coco", "AP")),
    CORLOC,
    *LABELS,
    *TRIVIAL,
    StudyColumn("ms a step", ("cost", "step_seconds"), 1000.0),
)
LEVERS = {
    "adaptation": ("adaptation.epochs=0",),
    "context": ("heads.context.on=none",),
    "area": ("criterion.prior.area=0", "inference.prior.area=0"),
    "class maps": ("criterion.prior.evidence=0", "inference.prior.evidence=0"),
    "straddling": ("criterion.prior.straddling=0", "inference.prior.straddling=0"),
    "box voting": ("inference.predict.vote_iou=1",),
    "partial regression": ("inference.regression=1",),
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
DEFAULT_TIERS = (0, 1, 2, 3)


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


def optimizers(sgd_lr: float = SGD_LR) -> dict[str, tuple[str, ...]]:
    """The settings of each optimizer."""
    return {
        "SGD": ("plan.optimizer.kind=sgd", f"plan.optimizer.lr={sgd_lr}"),
        "Adam": ("plan.optimizer.kind=adam",),
    }


def wscl_rows(sgd_lr: float = SGD_LR) -> Iterator[StudyRow]:
    """WSCL on OICR+ labels: all combinations, and a row without WSCL for each optimizer and trained part.

    Before them, without WSCL, the learning rates of SGD; after them WSCL on discovery's labels.
    """
    for lr in SGD_LRS:
        yield StudyRow("wscl", f"none, SGD, lr {lr:g}", (*OICR_PLUS, *optimizers(lr)["SGD"]))
    for (optimizer, one), (part, two) in product(optimizers(sgd_lr).items(), PARTS.items()):
        tier = list(PARTS).index(part) and 1 + list(PARTS).index(part)
        yield StudyRow("wscl", f"none, {optimizer}, {part}", (*OICR_PLUS, *one, *two), tier)
    grid_of = product(optimizers(sgd_lr).items(), PARTS.items(), OMEGAS, LAMBDAS)
    for (optimizer, one), (part, two), omega, weight in grid_of:
        name, own = f"omega {omega}, lambda {weight:g}, {optimizer}, {part}", _contrast(omega, weight)
        yield StudyRow("wscl", name, ("criterion.labeler.kind=oicr", *own, *one, *two), _tier(omega, weight, part))
    for optimizer, one in optimizers(sgd_lr).items():
        for omega in ("none", *OMEGAS):
            own = ("criterion.contrast.enabled=false",) if omega == "none" else _contrast(omega, LAMBDAS[0])
            yield StudyRow("wscl", f"discovery, omega {omega}, {optimizer}, head", (*DISCOVERY, *own, *one), 1)


def _contrast(omega: str, weight: float) -> tuple[str, ...]:
    named = (f"criterion.contrast.omega={omega}", f"criterion.contrast.weight={weight}")
    return ("criterion.contrast.enabled=true", *named)


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


def rows_of(
    studies: Sequence[str], base: Config, *, sgd_lr: float = SGD_LR, tiers: Sequence[int] = DEFAULT_TIERS
) -> list[StudyRow]:
    """The rows of some studies and tiers, those of a lower tier first."""
    rows = {
        "discovery": discovery_rows(),
        "wscl": wscl_rows(sgd_lr),
        "systems": system_rows(base),
        "levers": lever_rows(),
        "labelers": labeler_rows(),
    }
    wanted = [row for study in studies for row in rows[study] if row.tier in tiers]
    return sorted(wanted, key=lambda row: row.tier)


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
        """The runs that are not finished; of rows with the same settings the first."""
        first = {run.name: (row, seed, run) for row, seed, run in reversed(self.runs())}
        pending = [one for one in self.runs() if first[one[2].name][:2] == one[:2]]
        return [one for one in pending if not grid.is_finished(one[2], self.folder)]

    def finished(self) -> dict[tuple[str, str], dict[int, grid.RunResult]]:
        """The finished runs by study, row and seed, in the order of the rows."""
        found: dict[tuple[str, str], dict[int, grid.RunResult]] = {(row.study, row.name): {} for row in self.rows}
        for row, seed, run in self.runs():
            if grid.is_finished(run, self.folder):
                found[row.study, row.name][seed] = grid.read_result(self.folder / run.name)
        return {row: own for row, own in found.items() if own}

    def results(self) -> list[dict[str, Any]]:
        """Figures of the finished rows by seed, in per cent."""
        found = self.finished()
        return [self._row(row, found[row.study, row.name]) for row in self.rows if (row.study, row.name) in found]

    def intervals(self) -> list[dict[str, Any]]:
        """mAP50 and CorLoc of the finished rows with intervals over photos, as fractions.

        Each is compared with the first row of its study by the seeds that both have.
        """
        found, out = self.finished(), []
        for (study, name), own in found.items():
            first = next(row for row in found if row[0] == study)
            seeds = sorted(own.keys() & found[first].keys())
            both = {label: {seed: found[study, label][seed] for seed in seeds} for label in (first[1], name)}
            data = {seed: self.data[seed] for seed in seeds}
            results = StudyResults(Experiment(name=study, title="", shows="", against=first[1]), data, both, {})
            drawn = summary.intervals_json(results, summary.resampled_rows(results)) if seeds else {}
            figures = {figure: rows[name] for figure, rows in drawn.items() if isinstance(rows, dict) and name in rows}
            out.append({"study": study, "row": name, "against": first[1], "seeds": seeds, **figures})
        return out

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
    """Finish the open runs, at most ``most``; the JSON file is written after each. One that diverges is noted there."""
    pending, failed = queue.open(), []
    write_json(out, {**facts, "rows": queue.results(), "open": len(pending), "failed": []})
    for number, (row, seed, run) in enumerate(pending[:most], start=1):
        print(f"{number} of {len(pending)}: {row.study}, {row.name}, seed {seed}", flush=True)
        try:
            grid.finish_run(run, queue.folder, progress=progress)
        except UserError as error:
            print(error, flush=True)
            failed.append({"study": row.study, "row": row.name, "seed": seed, "error": str(error)})
        left = len(pending) - number
        write_json(out, {**facts, "rows": queue.results(), "open": left, "failed": failed})


def describe(queue: Queue) -> str:
    """The open runs in order, and minutes by tier, estimated from the training of finished runs."""
    pending, done = queue.open(), [row["figures"]["ms a step"] for row in queue.results()]
    steps = [value for own in done for value in own.values()]
    lines = [f"tier {row.tier}: {row.study}, {row.name}, seed {seed}" for row, seed, _ in pending]
    guess = f"{2 * statistics.mean(steps) / 60_000 * queue.base.plan.iterations:.1f}" if steps else "unknown"
    return "\n".join([*lines, f"{len(pending)} runs left; minutes per run, with evaluation: about {guess}"])


def make_queue(
    source: study_data.StudySource,
    choose: Callable[[Config], Sequence[StudyRow]],
    folder: Path,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    recipe: str | None = None,
    overrides: Sequence[str] = (),
    progress: Progress = silent,
) -> Queue:
    """The queue of some rows on a dataset; its runs are in the folder that `compare` and `reproduce` use."""
    bare = Experiment(name="studies", title="", shows="")
    base = reproduction.base_config(bare, source, recipe, overrides)
    own = [replace(row, settings=(*row.settings, *overrides)) for row in choose(base)]
    data = {seed: study_data.open_data(source, seed, folder, progress=progress) for seed in seeds}
    return Queue(base, data, own, folder / reproduction.GRID_FOLDER)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", default="discovery,wscl", help=f"of {', '.join(STUDIES)}")
    parser.add_argument("--on", type=Path, default=Path(study_data.SCENES), help="scenes, or a dataset with boxes")
    parser.add_argument("--photos", type=Path)
    parser.add_argument("--classes", help="comma-separated names, or a file with one per line")
    parser.add_argument("--split")
    parser.add_argument("--test-split")
    parser.add_argument("--recipe")
    parser.add_argument("--row", action="append", default=[], dest="rows", help="only this row; may be repeated")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="a.b=c")
    parser.add_argument("--sgd-lr", type=float, default=SGD_LR, help="learning rate of SGD in the rows of wscl")
    parser.add_argument(
        "--tiers", default=",".join(map(str, DEFAULT_TIERS)), help="tiers to run; 4 has the rest of wscl"
    )
    parser.add_argument("--most", type=int, help="stop after so many runs")
    parser.add_argument("--list", action="store_true", help="print the queue")
    parser.add_argument("--intervals", action="store_true", help="add intervals over photos at the end")
    parser.add_argument("--work", type=Path, default=Path("runs/studies"))
    parser.add_argument("--out", type=Path, default=Path("runs/studies/studies.json"))
    return parser


def main(argv: list[str] | None = None, world: Scenes | None = None) -> None:
    """Run what is open, or list it."""
    parser = _parser()
    given = parser.parse_args(argv)
    studies, seeds = given.studies.split(","), [int(seed) for seed in given.seeds.split(",")]
    if unknown := [study for study in studies if study not in STUDIES]:
        parser.error(f"--studies {unknown[0]}: unknown; there are {', '.join(STUDIES)}")
    names = class_names(given.classes) if given.classes else None
    listed = DataSource(path=given.on, photos=given.photos, split=given.split, classes=names)
    source = world or study_source(listed, None, given.test_split, None, None)
    progress = TerminalProgress()
    tiers = [int(tier) for tier in given.tiers.split(",")]
    every = partial(rows_of, studies, sgd_lr=given.sgd_lr, tiers=tiers)

    def choose(base: Config) -> list[StudyRow]:
        names = [row.name for row in every(base)]
        if unknown := [name for name in given.rows if name not in names]:
            parser.error(f"--row {unknown[0]}: unknown; there are {', '.join(names)}")
        return [row for row in every(base) if not given.rows or row.name in given.rows]

    queue = make_queue(
        source, choose, given.work, seeds=seeds, recipe=given.recipe, overrides=given.overrides, progress=progress
    )
    if given.list:
        print(describe(queue))
        return
    on = next(iter(queue.data.values())).name
    facts = {"on": on, "seeds": seeds, "studies": studies, "sgd_lr": given.sgd_lr, "tiers": tiers}
    facts["base"] = list(changes(Config(), queue.base))
    work(queue, given.out, facts, most=given.most, progress=progress)
    if given.intervals:
        write_json(given.out, {**read_json(given.out, "a study"), "intervals": queue.intervals()})


if __name__ == "__main__":
    main()
