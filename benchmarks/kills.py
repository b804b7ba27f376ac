"""Kill commands with SIGKILL at random moments, run them again, and compare the result with an undisturbed one.

    python benchmarks/kills.py                       # 20 kills of each command: about an hour on two cores
    python benchmarks/kills.py --kills 2 --only propose --out trial.json

Generated scenes and the real lite0 network. A command is started, killed with its whole process group (of two training
processes, sometimes only one is killed), and started again as the manual says, one to three times; then it may end. Its
result (weights, proposals, detections, metrics) must equal the undisturbed one to the byte, and no temporary file may
be left. Resumable: kills that are in the result file already are not repeated.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tag2box.data.scenes import Scenes
from tag2box.io import write_json
from tag2box.proposals.store import ProposalStore

TAG2BOX = (sys.executable, "-m", "tag2box")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tag2box")
SCENES = Scenes(train=16, test=8, width=96, height=96, classes=("balloon", "car", "clock"), smallest=24, largest=48)
SETTINGS = (
    "proposals.short_side=96", "proposals.max_boxes=24", "backbone.pool_size=4", "loader.batch_size=4",
    "loader.resize.scales=[96]", "inference.scales=[96]", "plan.log_every=1", "plan.checkpoint_every=3",
    "plan.gallery=2",
)  # fmt: skip
TAIL = ("backbone.train_tail=true",)  # photos are read in every step, and the step is the exact one
DEADLINE = 600  # seconds that any command may take
RESULT = "docs/results/kills.json"


@dataclass(frozen=True)
class Job:
    """A command: how it is started in a new folder, how it is resumed, and what its result is."""

    name: str
    start: Callable[[Path, Path], list[str]]  # world, folder
    digests: Callable[[Path], dict[str, str]]
    resume: Callable[[Path, Path], list[str]] | None = None  # default: the same command
    needs: str | None = None  # a command whose undisturbed result it reads


def flags(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def train(program: Sequence[str], iterations: int, *more: str) -> Callable[[Path, Path], list[str]]:
    def start(world: Path, folder: Path) -> list[str]:
        data = [f"{world / 'train' / 'tags.csv'}", "--photos", f"{world / 'train' / 'photos'}", "--recipe", "scenes"]
        wanted = flags(*SETTINGS, f"plan.iterations={iterations}", *more)
        return [*program, "train", *data, "--out", f"{folder / 'run'}", *wanted]

    return start


def resume_training(world: Path, folder: Path) -> list[str]:
    """``--resume`` as soon as there is a run; before that, the first command again."""
    if not (folder / "run" / "config.toml").exists():
        return JOBS["train"].start(world, folder)
    return [*TAG2BOX, "train", "--out", f"{folder / 'run'}", "--resume"]


def propose(world: Path, folder: Path) -> list[str]:
    photos = f"{world / 'train' / 'photos'}"
    return [*TAG2BOX, "propose", photos, "--out", f"{folder / 'store'}", "--short-side", "0", "--max-boxes", "500"]


def detect(world: Path, folder: Path) -> list[str]:
    run = world.parent / "undisturbed" / "train" / "run"
    out = ["--out", f"{folder / 'found.json'}", "--draw", f"{folder / 'drawn'}", "--proposals", f"{folder / 'store'}"]
    return [*TAG2BOX, "detect", f"{run}", f"{world / 'train' / 'photos'}", *out, "--min-score", "0"]


def label(world: Path, folder: Path) -> list[str]:
    run, tags = world.parent / "undisturbed" / "train" / "run", f"{world / 'train' / 'tags.csv'}"
    return [
        *TAG2BOX,
        "label",
        f"{run}",
        tags,
        "--photos",
        f"{world / 'train' / 'photos'}",
        "--out",
        f"{folder / 'labels'}",
    ]


def compare(world: Path, folder: Path) -> list[str]:
    data = [
        "--on", f"{world / 'train' / 'truth.json'}", "--photos", f"{world / 'train' / 'photos'}",
        "--test", f"{world / 'test' / 'truth.json'}", "--test-photos", f"{world / 'test' / 'photos'}",
    ]  # fmt: skip
    wanted = ["--systems", "oicr,od-wscl", "--seeds", "0", "--recipe", "scenes", *flags(*SETTINGS, "plan.iterations=6")]
    return [*TAG2BOX, "compare", *data, "--out", f"{folder / 'study'}", *wanted]


def get_weights(_: Path, folder: Path) -> list[str]:
    return [*TAG2BOX, "weights", "get", "lite0"]


# ---------------------------------------------------------------- results


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def run_digests(folder: Path, run: str = "run") -> dict[str, str]:
    """Weights and optimizer state of the last checkpoint, the proposals, and the events without times."""
    state = json.loads((folder / run / "state.json").read_text(encoding="utf-8"))
    tensors = sorted((folder / run / state["folder"]).glob("*.safetensors"))
    found = {file.name: digest(file.read_bytes()) for file in tensors}
    steps = {}  # of iterations that were repeated after a kill, the last
    for line in (folder / run / "events.jsonl").read_text(encoding="utf-8").splitlines():
        event = json.loads(line)
        if event["event"] == "step":
            steps[event["iteration"]] = event["losses"]
    return {**found, "losses": digest(json.dumps(sorted(steps.items())).encode()), "iteration": f"{state['iteration']}"}


def store_digests(folder: Path) -> dict[str, str]:
    store = ProposalStore.open(folder / "store")
    boxes = b"".join(store.boxes(name).numpy().tobytes() + store.scores(name).numpy().tobytes() for name in store.spans)
    return {"photos": digest(json.dumps(list(store.spans)).encode()), "boxes": digest(boxes)}


def detect_digests(folder: Path) -> dict[str, str]:
    files = [folder / "found.json", *sorted((folder / "drawn").iterdir())]
    return {file.name: digest(file.read_bytes()) for file in files}


def label_digests(folder: Path) -> dict[str, str]:
    return {"labels.json": digest((folder / "labels" / "labels.json").read_bytes())}


def study_digests(folder: Path) -> dict[str, str]:
    files = sorted((folder / "study").rglob("metrics.json")) + sorted((folder / "study").rglob("detections.json"))
    return {f"{file.relative_to(folder)}": digest(file.read_bytes()) for file in files}


def weights_digests(folder: Path) -> dict[str, str]:
    return {file.name: digest(file.read_bytes()) for file in sorted((folder / "home").rglob("*.safetensors"))}


JOBS = {
    job.name: job
    for job in (
        Job("train", train(TAG2BOX, 200, "plan.checkpoint_every=5"), run_digests, resume_training),
        Job("train, 2 processes", train(TORCHRUN, 40, *TAIL), run_digests),
        Job("propose", propose, store_digests),
        Job("detect", detect, detect_digests, needs="train"),
        Job("label", label, label_digests, needs="train"),
        Job("compare", compare, study_digests),
        Job("weights get", get_weights, weights_digests),
    )
}


# ---------------------------------------------------------------- kills


def begin(argv: Sequence[str], folder: Path) -> subprocess.Popen[bytes]:
    """Start a command in a process group of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TAG2BOX_HOME": f"{folder / 'home'}"}
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(argv, env=environment, stdout=log, stderr=log, start_new_session=True)


def finish(argv: Sequence[str], folder: Path) -> float:
    """Run a command to its end; its seconds."""
    began = time.monotonic()
    if begin(argv, folder).wait(timeout=DEADLINE) != 0:
        last = (folder / "log").read_text(encoding="utf-8", errors="replace").splitlines()[-3:]
        raise SystemExit(f"{' '.join(argv)}: failed: {' / '.join(last)}")
    return time.monotonic() - began


def kill_after(running: subprocess.Popen[bytes], seconds: float, rng: random.Random) -> bool:
    """Kill a command after some seconds; False if it had ended before."""
    try:
        running.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        ranks = _ranks(running.pid)
        if ranks and rng.random() < 0.5:
            os.kill(rng.choice(ranks), signal.SIGKILL)  # torchrun ends the other one
            running.wait(timeout=DEADLINE)
        else:
            os.killpg(running.pid, signal.SIGKILL)
            for rank in ranks:  # in sessions of their own
                _kill(rank)
            running.wait()
        return True
    return False


def _ranks(pid: int) -> list[int]:
    """The training processes of torchrun."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
        return [int(child) for child in children if b"tag2box\0train" in Path(f"/proc/{child}/cmdline").read_bytes()]
    except OSError:
        return []


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def disturbed_run(job: Job, world: Path, folder: Path, seconds: float, rng: random.Random) -> list[float]:
    """Start a command, kill it one to three times, let it end; the moments of the kills."""
    moments: list[float] = []
    for _ in range(rng.randint(1, 3)):
        argv = (job.start if not moments or job.resume is None else job.resume)(world, folder)
        moment = rng.uniform(0.2 * seconds, seconds)  # most of the first seconds is spent on importing torch
        if not kill_after(begin(argv, folder), moment, rng):
            return moments
        moments.append(round(moment, 2))
    finish((job.resume or job.start)(world, folder), folder)
    return moments


def leftovers(folder: Path) -> list[str]:
    """Hidden files: temporary ones and locks."""
    return [f"{path.relative_to(folder)}" for path in folder.rglob(".*")]


def run_job(job: Job, world: Path, base: Path, wanted: int, found: dict[str, Any], save: Callable[[], None]) -> None:
    """Add kills of one command to its results until there are enough."""
    folder = base / "undisturbed" / job.name
    seconds = finish(job.start(world, folder), folder)
    expected = job.digests(folder)
    found.setdefault("kills", [])
    found.setdefault("runs", [])
    while len(found["kills"]) < wanted:
        number = len(found["runs"])
        out = base / f"{job.name}-{number}"
        moments = disturbed_run(job, world, out, seconds, random.Random(f"{job.name} {number}"))
        got = job.digests(out)
        found["kills"] += moments
        found["runs"].append({"kills": moments, "equal": got == expected, "left": leftovers(out)})
        found["seconds_undisturbed"] = round(seconds, 1)
        save()
        print(
            f"{job.name}: killed at {moments} of {seconds:.0f} s: {'equal' if got == expected else 'DIFFERS'}",
            flush=True,
        )
        if got == expected:
            shutil.rmtree(out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="of each command")
    parser.add_argument("--only", action="append", choices=JOBS, default=[], help="this command; repeatable")
    parser.add_argument("--out", type=Path, default=Path(RESULT))
    parser.add_argument("--folder", type=Path, help="where runs are kept; default: a temporary folder")
    args = parser.parse_args()
    results: dict[str, Any] = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {}
    base = args.folder or Path(tempfile.mkdtemp(prefix="tag2box-kills-"))
    world = base / "world"
    SCENES.write(world)
    chosen = [job for name, job in JOBS.items() if not args.only or name in args.only]
    for job in chosen:
        found = results.setdefault(job.name, {})
        if len(found.get("kills", [])) >= args.kills:
            continue
        if job.needs and not (base / "undisturbed" / job.needs).exists():
            finish(JOBS[job.needs].start(world, base / "undisturbed" / job.needs), base / "undisturbed" / job.needs)
        run_job(job, world, base, args.kills, found, lambda: write_json(args.out, results))
    bad = [name for name, found in results.items() for run in found.get("runs", []) if not run["equal"] or run["left"]]
    print(f"different or with leftovers: {', '.join(bad) or 'none'}")
    if not args.folder and not bad:
        shutil.rmtree(base)
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
