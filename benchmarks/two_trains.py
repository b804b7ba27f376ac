"""Start two `tag2box train` with different seeds on one run folder at the same time: one must train, one be refused.

    python benchmarks/two_trains.py --trials 20 --out runs/two-trains.json

A trial is good if exactly one command succeeds, the other ends with exit code 2 and one line, and the run folder holds
settings, events and weights of the first alone: those of a run that had the folder to itself.

    python benchmarks/two_trains.py --side-by-side --trials 3 --out docs/results/side-by-side.json

measures instead what two trainings in two folders cost each other: both at once against one after the other, with
OpenMP's threads waiting passively (as the program sets it) and actively, alternating.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors.torch import load_file

from measuring import machine
from tag2box.data.scenes import Scenes
from tag2box.io import write_json
from tag2box.runs import read_config
from tag2box.training.checkpoint import MODEL, read_state
from tag2box.training.events import read_events

SEEDS = (0, 1)
REFUSALS = ("another process trains here", "already holds a run")
SCENES = Scenes(train=4, test=0, width=96, height=96, classes=("balloon", "car", "clock"), smallest=24, largest=48)
SETTINGS = (
    "proposals.short_side=96", "proposals.max_boxes=12", "backbone.pool_size=4", "loader.batch_size=2",
    "loader.resize.scales=[96]", "plan.iterations=3", "plan.checkpoint_every=1", "plan.gallery=0",
)  # fmt: skip


LONGER = ("plan.iterations=40", "plan.checkpoint_every=40", "proposals.max_boxes=200")  # settings of a timed run
ACTIVE = {"OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": "infinite", "KMP_BLOCKTIME": "infinite"}
DEFAULT = {"OMP_WAIT_POLICY": "", "GOMP_SPINCOUNT": "", "KMP_BLOCKTIME": ""}  # empty: as if it were not set


def start(
    world: Path, out: Path, seed: int, more: Sequence[str] = (), waiting: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """`tag2box train` on the scenes of ``world``."""
    flags = [word for setting in (*SETTINGS, *more, f"plan.seed={seed}") for word in ("--set", setting)]
    data = [f"{world / 'train' / 'tags.csv'}", "--photos", f"{world / 'train' / 'photos'}"]
    argv = [sys.executable, "-m", "tag2box", "train", *data, "--recipe", "scenes", "--out", f"{out}", *flags]
    environment = {**os.environ, **(waiting or {})}
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def result_of(run: Path) -> dict[str, object]:
    """What a run folder holds: seeds in its settings and events, its files, a number for its weights."""
    seeds = [event["seed"] for event in read_events(run) if event["event"] == "start"]
    state = read_state(run)
    weights = load_file(run / state.folder / MODEL)
    return {
        "seeds": [read_config(run).plan.seed, *seeds],
        "weights": sum(float(value.double().abs().sum()) for value in weights.values()),
        "files": sorted(path.name for path in run.iterdir()),
    }


def trial(world: Path, out: Path, alone: dict[int, dict[str, object]] | None = None) -> dict[str, object]:
    """Two commands at once; ``alone`` may have the results of runs that had their folder to themselves, by seed."""
    running = {seed: start(world, out, seed) for seed in SEEDS}
    said = {seed: process.communicate()[1] for seed, process in running.items()}
    codes = {seed: process.returncode for seed, process in running.items()}
    winners = [seed for seed, code in codes.items() if code == 0]
    if len(winners) != 1:
        return {"good": False, "codes": codes, "said": said}
    (loser,) = set(SEEDS) - set(winners)
    last = said[loser].strip().splitlines()[-1] if said[loser].strip() else ""
    is_refused = codes[loser] == 2 and any(words in last for words in REFUSALS)
    found = result_of(out)
    is_same = found["seeds"] == [winners[0]] * 2 if alone is None else found == alone[winners[0]]
    return {"good": is_refused and is_same, "winner": winners[0], "refused": last}


def run_alone(world: Path, folder: Path) -> dict[int, dict[str, object]]:
    """Results of runs that nothing disturbs, by seed."""
    for seed in SEEDS:
        process = start(world, folder / f"alone{seed}", seed)
        _, err = process.communicate()
        assert process.returncode == 0, err
    return {seed: result_of(folder / f"alone{seed}") for seed in SEEDS}


def timed(world: Path, folder: Path, waiting: Mapping[str, str], *, at_once: bool) -> dict[str, float]:
    """Wall and CPU seconds of two trainings, at once or one after the other."""
    before, cpu = time.perf_counter(), children_seconds()
    running: list[subprocess.Popen[str]] = []
    for seed in SEEDS:
        running.append(start(world, folder / f"run{seed}", seed, LONGER, waiting))
        if not at_once:
            running[-1].communicate()
    for process in running:
        if at_once:
            process.communicate()
        assert process.returncode == 0, "a training failed"
    return {"wall": time.perf_counter() - before, "cpu": children_seconds() - cpu}


def children_seconds() -> float:
    """CPU seconds of the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def side_by_side(trials: int) -> dict[str, object]:
    """Seconds of both orders under each policy, and the median cost of both at once relative to one after the other."""
    policies = {"passive": {}, "default": DEFAULT, "active": ACTIVE}
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as name:
        SCENES.write(Path(name) / "world")
        for number in range(trials):
            for policy, waiting in policies.items():
                for at_once in (False, True):
                    folder = Path(name) / f"{number}-{policy}-{at_once}"
                    seconds = timed(Path(name) / "world", folder, waiting, at_once=at_once)
                    rows.append({"policy": policy, "at_once": at_once, **seconds})
                    print(rows[-1], file=sys.stderr, flush=True)
    ratios = {
        f"{policy} {clock}": statistics.median(
            both[clock] / alone[clock]  # type: ignore[operator]
            for alone, both in zip(rows[::2], rows[1::2], strict=True)
            if both["policy"] == policy
        )
        for policy in policies
        for clock in ("wall", "cpu")
    }
    return {"machine": machine(), "ratios": ratios, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--side-by-side", action="store_true", help="measure what two trainings cost each other")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.side_by_side:
        measured = side_by_side(args.trials)
        print(json.dumps(measured["ratios"]))
        if args.out is not None:
            write_json(args.out, measured)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        SCENES.write(folder / "world")
        alone = run_alone(folder / "world", folder)
        trials = []
        for number in range(args.trials):
            trials.append(trial(folder / "world", folder / f"run{number}", alone))
            print(trials[-1], file=sys.stderr, flush=True)
    result = {"trials": len(trials), "good": sum(bool(one["good"]) for one in trials), "details": trials}
    print(json.dumps({"trials": result["trials"], "good": result["good"]}))
    if args.out is not None:
        write_json(args.out, result)


if __name__ == "__main__":
    main()
