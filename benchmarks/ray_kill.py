"""Proposals on a cluster of two Ray nodes, one of them killed half way: the store equals that of a local run.

    python benchmarks/ray_kill.py --data VOC2007 --split test --photos 40 --out docs/results/ray.json
    python benchmarks/ray_kill.py --photos 100000 --out docs/results/ray-many.json

Three runs of ``tag2box propose``, each in its own process: local, on two nodes with one CPU each, and on two such nodes
of which the second (raylet and workers) gets ``kill -9`` when half of the photos are done.

Without ``--data``, photos are generated, and tiny, and their proposals are given: what is tested is the number of
tasks. The second run is left out.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from tag2box.formats.datasets import read_photos
from tag2box.formats.listing import DataSource
from tag2box.io import write_json
from tag2box.proposals.base import FoundBoxes, ProposalMethod
from tag2box.proposals.store import ProposalStore

COMMAND = (sys.executable, "-c", "from tag2box.cli import main; main()")
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "OMP_NUM_THREADS": "1"}
STORE = 100 * 2**20


@dataclass(frozen=True)
class Nodes:
    """Two nodes on this machine: the head, on which the command runs, and one that can be killed."""

    address: str
    second: int  # process id of its raylet

    def workers(self) -> list[int]:
        """Worker processes of the second node."""
        return descendants(self.second)

    def kill(self) -> int:
        """Send SIGKILL to all processes of the second node, like a power cut; return their number."""
        doomed = [self.second, *self.workers()]
        for process in doomed:
            os.kill(process, signal.SIGKILL)
        return len(doomed)


@contextmanager
def two_nodes() -> Iterator[Nodes]:
    """A cluster of two nodes with one CPU each, for the length of a with block."""
    os.environ.update(QUIET)
    from ray.cluster_utils import Cluster

    cluster: Any = Cluster()
    try:
        cluster.add_node(num_cpus=1, object_store_memory=STORE, include_dashboard=False)
        second = cluster.add_node(num_cpus=1, object_store_memory=STORE, include_dashboard=False)
        cluster.wait_for_nodes(timeout=60)
        yield Nodes(cluster.address, second.all_processes["raylet"][0].process.pid)
    finally:
        cluster.shutdown()


def descendants(process: int) -> list[int]:
    """Child processes of a process, recursively."""
    try:
        tasks = [(task / "children").read_text() for task in Path(f"/proc/{process}/task").iterdir()]
    except OSError:
        return []
    own = [int(word) for text in tasks for word in text.split()]
    return [*own, *(deeper for child in own for deeper in descendants(child))]


@dataclass(frozen=True, kw_only=True)
class Halves(ProposalMethod):
    """The left and the right half of every photo."""

    kind: str = "ray_kill:Halves"
    min_side: int = 1

    def search(self, bgr: UInt8[np.ndarray, "h w 3"], min_side: float) -> FoundBoxes:
        height, width = bgr.shape[:2]
        half = width / 2
        return FoundBoxes(np.array([[0, 0, half, height], [half, 0, width, height]]), np.array([1.0, 0.5]))


def generate(folder: Path, count: int) -> None:
    """Write tiny photos, each of another colour."""
    folder.mkdir()
    for number in range(count):
        colour = number % 256, number // 256 % 256, number // 65536
        Image.new("RGB", (8, 6), colour).save(folder / f"{number:07}.png")


def photos_done(out: Path, counted: dict[Path, int] | None = None) -> int:
    """Number of photos on disk in an unfinished store; ``counted`` remembers those of each shard."""
    known: dict[Path, int] = {} if counted is None else counted
    for part in out.glob("parts/0*.npz"):
        if part not in known:
            with np.load(part, allow_pickle=False) as content:
                known[part] = len(content["counts"])
    return sum(known.values())


def timed(argv: Sequence[str], watch: Callable[[], bool] = lambda: False) -> float:
    """Seconds of a command; ``watch`` is polled until it returns True."""
    begin = time.perf_counter()
    running = subprocess.Popen([*COMMAND, *argv], env={**os.environ, **QUIET}, stdout=subprocess.DEVNULL)
    while running.poll() is None and not watch():
        time.sleep(0.2)
    if running.wait() != 0:
        raise SystemExit(f"tag2box ended with {running.returncode}")
    return time.perf_counter() - begin


def content(path: Path) -> dict[str, bytes]:
    return {f"{file.relative_to(path)}": file.read_bytes() for file in path.rglob("*") if file.is_file()}


def measure(argv: Sequence[str], photos: int, folder: Path, *, is_short: bool) -> dict[str, object]:
    """Duration of the runs, and whether their stores are equal; ``is_short`` leaves out the second."""
    local, undisturbed, disturbed = (folder / name for name in ("local", "undisturbed", "disturbed"))
    seconds = {"local, 2 processes": timed([*argv, "--workers", "2", "--out", f"{local}"])}
    if not is_short:
        with two_nodes() as nodes:
            on = ["--on", "ray", "--address", nodes.address]
            seconds["ray, 2 nodes"] = timed([*argv, *on, "--out", f"{undisturbed}"])
    killed: list[int] = []
    counted: dict[Path, int] = {}
    with two_nodes() as nodes:

        def kill_half_way() -> bool:
            done = photos_done(disturbed, counted)
            if done * 2 >= photos:
                killed.extend([done, nodes.kill()])
            return bool(killed)

        on = ["--on", "ray", "--address", nodes.address]
        seconds["ray, 2 nodes, one killed"] = timed([*argv, *on, "--out", f"{disturbed}"], kill_half_way)
    wanted = content(local)
    return {
        "photos": photos,
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
        "photos_on_disk_when_killed": killed[0],
        "processes_killed": killed[1],
        "store_bytes": sum(map(len, wanted.values())),
        "equal_to_the_local_store": {
            **({} if is_short else {"ray, 2 nodes": content(undisturbed) == wanted}),
            "ray, 2 nodes, one killed": content(disturbed) == wanted,
        },
        "photos_in_the_store": len(ProposalStore.open(disturbed)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="default: generated photos")
    parser.add_argument("--split")
    parser.add_argument("--photos", type=int, default=40, help="number of photos, from the first")
    parser.add_argument("--folder", type=Path, default=None, help="parent of the temporary folder")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        if args.data is None:
            generate(Path(folder) / "photos", args.photos)
            os.environ["PYTHONPATH"] = f"{Path(__file__).resolve().parent}"
            argv, count = (
                ["propose", f"{folder}/photos", "--method", "ray_kill:Halves", "--short-side", "0"],
                args.photos,
            )
        else:
            photos = read_photos(DataSource(path=args.data, split=args.split))[: args.photos]
            split, count = Path(folder) / "split.txt", len(photos)
            split.write_text("".join(f"{photo.id}\n" for photo in photos))
            argv = ["propose", f"{args.data}", "--split", f"{split}"]
        figures = measure(argv, count, Path(folder), is_short=args.data is None)
    packages = {name: version(name) for name in ("ray", "tag2box", "torch", "opencv-contrib-python-headless")}
    load = [round(value, 1) for value in os.getloadavg()]  # above the number of cores: the machine was busy
    figures |= {
        "cores": os.cpu_count(),
        "load_average": load,
        "python": platform.python_version(),
        "versions": packages,
    }
    print(figures)
    if args.out:
        write_json(args.out, figures)


if __name__ == "__main__":
    main()
