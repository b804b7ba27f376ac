"""Kill one of two training processes with SIGKILL at random times, resume, and compare the weights.

    python benchmarks/kill_training.py --kills 10 --out docs/results/kill-training.json

On generated scenes with a trained lite0 tail (so that photos are read and the step is the exact one), torchrun runs two
processes on this machine. The time of the kill is uniform over the duration of an undisturbed run; the rank is random
too. A finished run is compared with the undisturbed one, bit by bit, and the next one starts.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from safetensors.torch import load_file

from tag2box.data.scenes import Scenes
from tag2box.io import write_json

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tag2box")
SCENES = Scenes(train=12, test=1, width=96, height=96, classes=("balloon", "car", "clock"), smallest=24, largest=48)
SETTINGS = (
    "backbone.train_tail=true", "proposals.short_side=96", "proposals.max_boxes=24", "backbone.pool_size=4",
    "loader.batch_size=4", "loader.resize.scales=[96]", "plan.log_every=1", "plan.checkpoint_every=3", "plan.gallery=2",
    "plan.iterations=60",
)  # fmt: skip


def command(world: Path, out: Path) -> list[str]:
    flags = [word for setting in SETTINGS for word in ("--set", setting)]
    data = [f"{world / 'train' / 'tags.csv'}", "--photos", f"{world / 'train' / 'photos'}"]
    return [*TORCHRUN, "train", *data, "--recipe", "scenes", "--out", f"{out}", *flags]


def start(argv: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def workers(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    except OSError:
        return []
    return [int(child) for child in children if b"tag2box" in Path(f"/proc/{child}/cmdline").read_bytes()]


def kill_after(running: subprocess.Popen[bytes], seconds: float, rng: random.Random) -> bool:
    """Kill a rank after some seconds; False if the command had ended before."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if running.poll() is not None:
            return False
        time.sleep(0.01)
    alive = workers(running.pid)
    if not alive:
        running.kill()
        running.wait()
        return True
    os.kill(rng.choice(alive), signal.SIGKILL)
    running.wait(timeout=120)
    return True


def same_weights(a: Path, b: Path) -> bool:
    models = [run / json.loads((run / "state.json").read_text())["folder"] / "model.safetensors" for run in (a, b)]
    left, right = (load_file(model) for model in models)
    return left.keys() == right.keys() and all((left[name] == right[name]).all() for name in left)


def reached(run: Path) -> int:
    state = run / "state.json"
    return json.loads(state.read_text())["iteration"] if state.exists() else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("docs/results/kill-training.json"))
    args = parser.parse_args()
    rng = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        SCENES.write(folder / "world")
        began = time.monotonic()
        assert start(command(folder / "world", folder / "undisturbed")).wait() == 0
        whole = time.monotonic() - began
        print(f"undisturbed: {whole:.0f} s", flush=True)
        moments: list[dict[str, float]] = []
        ended: list[bool] = []
        while len(moments) < args.kills or not ended or reached(folder / f"run{len(ended)}"):
            out = folder / f"run{len(ended)}"
            running = start(command(folder / "world", out))
            moment = rng.uniform(0, whole)
            if len(moments) < args.kills and kill_after(running, moment, rng):
                moments.append({"seconds": round(moment, 2), "saved_iteration": reached(out)})
                print(moments[-1], flush=True)
            elif running.wait() == 0:
                ended.append(same_weights(out, folder / "undisturbed"))
                print(f"ended: weights {'equal' if ended[-1] else 'DIFFER'}", flush=True)
            else:
                raise SystemExit(f"{out}: could not resume")
    write_json(args.out, {"seconds_undisturbed": round(whole, 1), "kills": moments, "runs_equal": ended})


if __name__ == "__main__":
    main()
