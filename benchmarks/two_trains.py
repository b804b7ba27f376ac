"""Start two `tag2box train` with different seeds on one run folder at the same time: one must train, one be refused.

    python benchmarks/two_trains.py --trials 20 --out runs/two-trains.json

A trial is good if exactly one command succeeds, the other ends with exit code 2 and one line, and the run folder holds
settings, events and weights of the first alone: those of a run that had the folder to itself.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from safetensors.torch import load_file

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


def start(world: Path, out: Path, seed: int) -> subprocess.Popen[str]:
    """`tag2box train` on the scenes of ``world``."""
    flags = [word for setting in (*SETTINGS, f"plan.seed={seed}") for word in ("--set", setting)]
    data = [f"{world / 'train' / 'tags.csv'}", "--photos", f"{world / 'train' / 'photos'}"]
    argv = [sys.executable, "-m", "tag2box", "train", *data, "--recipe", "scenes", "--out", f"{out}", *flags]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
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
