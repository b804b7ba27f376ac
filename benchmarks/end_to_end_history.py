"""`propose`, `train` and `detect` on a dataset, by an earlier version and by this one, alternating: seconds and mAP50.

    python benchmarks/end_to_end_history.py DATA --out docs/results/end-to-end-history.json
    python benchmarks/end_to_end_history.py DATA --photos 6 --seeds 0 --set plan.iterations=4    # a trial
    python benchmarks/end_to_end_history.py DATA --new compute.precision=bf16 --new compute.engine=openvino

The earlier version (600c397) is taken from git history and run from a temporary folder. Its recipe ``photos`` is the
one that is called ``photos-frozen`` today; ``--recipe-new`` names another one of this version. Both train on the split
``train`` and detect on ``test``; this version evaluates both. Resumable: a command that is in the file is not run
again. What the commands write stays in a folder beside the file until a seed of a version is evaluated.
"""

from __future__ import annotations

import argparse
import io
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench_parts import provenance
from kernels_against_history import COMMIT
from measuring import machine, spread_of
from tag2box.formats.datasets import read_photos
from tag2box.formats.listing import DataSource
from tag2box.io import read_json, write_json

ROOT = Path(__file__).resolve().parents[1]
OLD, NEW = COMMIT, "today"
OLD_RECIPE, NEW_RECIPE = "photos", "photos-frozen"
STAGES = ("propose", "train", "detect")


def earlier_sources(folder: Path) -> Path:
    """The package of the earlier commit, extracted from git history."""
    found = subprocess.run(["git", "-C", str(ROOT), "archive", COMMIT, "src"], capture_output=True, check=False)
    if found.returncode:
        sys.exit(f"commit {COMMIT} is not in the git history of this checkout: nothing to compare with")
    with tarfile.open(fileobj=io.BytesIO(found.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder / "src"


def timed(sources: Path, words: Sequence[str], threads: int) -> dict[str, float]:
    """CPU and wall seconds of a command of one version, worker processes included."""
    environment = {**os.environ, "PYTHONPATH": str(sources), "OMP_NUM_THREADS": str(threads)}
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "tag2box", *words], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"tag2box {' '.join(words)}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"cpu": round(cpu, 2), "wall": round(time.monotonic() - begin, 2)}


def commands(
    way: str, args: argparse.Namespace, folder: Path, splits: dict[str, str], seed: int
) -> dict[str, list[str]]:
    """The three commands of a version."""
    chosen = [*args.set, f"plan.seed={seed}", *(args.new if way == NEW else [])]
    flags = [word for setting in chosen for word in ("--set", setting)]
    store, run, data = folder / "proposals", folder / "run", str(args.data)
    recipe = OLD_RECIPE if way == OLD else args.recipe_new
    train = [data, "--split", splits["train"], "--proposals", str(store), "--recipe", recipe, "--out", str(run)]
    found = ["--split", splits["test"], "--min-score", "0", "--out", str(folder / "found.json")]
    return {
        "propose": ["propose", data, "--split", splits["train"], "--out", str(store)],
        "train": ["train", *train, *flags],
        "detect": ["detect", str(run), data, *found],
    }


def evaluated(args: argparse.Namespace, folder: Path, split: str) -> float:
    """mAP50 (VOC 2007's 11 points) in per cent, by this version."""
    out = folder / "metrics.json"
    truth = ["--truth", str(args.data), "--split", split, "--detections", str(folder / "found.json")]
    timed(ROOT / "src", ["evaluate", *truth, "--metrics", "voc07", "--json", str(out)], args.threads)
    found = read_json(out, "metrics")["voc07"]["mAP"]
    if found is None:
        sys.exit("mAP50 is undefined: no object in these test photos; take more --photos")
    return float(100 * found)


def splits_of(args: argparse.Namespace, folder: Path) -> dict[str, str]:
    """The names of both splits, or files with the first ids of each."""
    if args.photos is None:
        return {"train": "train", "test": "test"}
    found = {}
    for split in ("train", "test"):
        ids = [photo.id for photo in read_photos(DataSource(path=args.data, split=split))][: args.photos]
        (folder / f"{split}.txt").write_text("\n".join(ids) + "\n", encoding="utf-8")
        found[split] = str(folder / f"{split}.txt")
    return found


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How many times as fast today is, by stage and in all, over the seeds that both versions have; mAP50 of each."""
    by_way = {way: {run["seed"]: run for run in runs if run["way"] == way} for way in (OLD, NEW)}
    seeds = sorted(by_way[OLD].keys() & by_way[NEW].keys())
    if not seeds:
        return {}
    found: dict[str, Any] = {"seeds": seeds}
    for clock in ("cpu", "wall"):
        ratios: dict[str, list[float]] = {stage: [] for stage in (*STAGES, "all")}
        for seed in seeds:
            old, new = (by_way[way][seed]["seconds"] for way in (OLD, NEW))
            for stage in STAGES:
                ratios[stage].append(old[stage][clock] / max(new[stage][clock], 1e-3))
            whole = [sum(one[stage][clock] for stage in STAGES) for one in (old, new)]
            ratios["all"].append(whole[0] / max(whole[1], 1e-3))
        found[f"times_as_fast_{clock}"] = {stage: spread_of(values) for stage, values in ratios.items()}
    for way in (OLD, NEW):
        values = [by_way[way][seed]["map50"] for seed in seeds]
        deviation = statistics.stdev(values) if len(values) > 1 else None
        found[f"map50_{way}"] = {"mean": statistics.mean(values), "deviation": deviation, "values": values}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="a VOC folder with the splits train and test")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--photos", type=int, help="only the first so many of each split")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of both versions")
    parser.add_argument("--new", action="append", default=[], metavar="KEY=VALUE", help="a setting of this version")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/end-to-end-history.json"))
    parser.add_argument("--recipe-new", default=NEW_RECIPE, help="recipe of this version")
    args = parser.parse_args()
    args.data = args.data.absolute()
    settings = {"set": args.set, "new": args.new, "photos": args.photos, "threads": args.threads}
    settings |= {} if args.recipe_new == NEW_RECIPE else {"recipe_new": args.recipe_new}
    stored = read_json(args.out, "figures") if args.out.exists() else {}
    found: dict[str, Any] = stored if stored.get("settings") == settings else {"settings": settings, "runs": []}
    work = args.out.absolute().with_suffix(".work")
    if found is not stored and work.exists():
        shutil.rmtree(work)  # of other settings
    with tempfile.TemporaryDirectory() as name:
        sources = {OLD: earlier_sources(Path(name) / "old"), NEW: ROOT / "src"}
        splits = splits_of(args, Path(name))
        for seed in args.seeds:
            for way in (OLD, NEW):
                measure(way, seed, args, found, sources=sources[way], splits=splits, folder=work / f"{way}-{seed}")
    print(summary(finished(found["runs"])))


def finished(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The runs of which all commands are measured, and the result."""
    return [run for run in runs if run.get("map50") is not None]


def measure(
    way: str,
    seed: int,
    args: argparse.Namespace,
    found: dict[str, Any],
    *,
    sources: Path,
    splits: dict[str, str],
    folder: Path,
) -> None:
    """Run the commands of a version that are not in ``found`` yet, and write the file after each."""
    run = next((run for run in found["runs"] if (run["way"], run["seed"]) == (way, seed)), None)
    if run is None:
        run = {"way": way, "seed": seed, "seconds": {}, "map50": None}
        found["runs"].append(run)
    if run["map50"] is not None:
        return
    if not folder.exists():
        run["seconds"] = {}  # what the commands wrote is gone
    folder.mkdir(parents=True, exist_ok=True)

    def store() -> None:
        found.update(**provenance(__file__), machine=machine(), earlier=COMMIT)
        found["summary"] = summary(finished(found["runs"]))
        write_json(args.out, found)

    written = {"propose": "proposals", "train": "run", "detect": "*found.json*"}
    for stage, words in commands(way, args, folder, splits, seed).items():
        if stage not in run["seconds"]:
            for left in folder.glob(written[stage]):  # of a command that was killed: its time would be too short
                shutil.rmtree(left) if left.is_dir() else left.unlink()
            run["seconds"][stage] = timed(sources, words, args.threads)
            store()
    run["map50"] = evaluated(args, folder, splits["test"])
    store()
    shutil.rmtree(folder)
    print(run, flush=True)


if __name__ == "__main__":
    main()
