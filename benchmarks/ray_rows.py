"""Rows of very many photos on two Ray nodes, of which one is killed: every photo a row once, driver memory flat.

    python benchmarks/ray_rows.py --out docs/results/ray-rows.json

The nodes are processes of this machine with one CPU each; the second is ended with `kill -9` once half the parts are
written. The work is the header of a tiny photo, so measured is what tasks, parts and the plan cost.

Resumable: with --folder, a second call computes the rows that are missing.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

import measuring
from ray_kill import generate, two_nodes
from tag2box.formats import rows
from tag2box.formats.addresses import FetchedPhoto, list_addresses
from tag2box.images import photo_size
from tag2box.io import write_json
from tag2box.parallel.ray_data import RayPool
from tag2box.progress import Bar

ABOUT = {"format": 1, "kind": "headers"}
SAMPLES = 10


class Header:
    """Width and height of a photo, and a box around it."""

    def __call__(self, photo: FetchedPhoto) -> dict[str, object]:
        width, height = photo_size(photo.path)
        return {"width": width, "height": height, "boxes": [[0.0, 0.0, width, height]], "scores": [1.0]}


class Memory:
    """A progress that samples the resident memory of this process after each tenth."""

    def __init__(self) -> None:
        self.samples: dict[int, float] = {}
        self._done = self._total = 0

    @contextmanager
    def __call__(self, title: str, total: int, done: int = 0) -> Iterator[Bar]:
        self._done, self._total = done, total
        yield self

    def advance(self, note: str = "") -> None:
        self._done += 1
        step = self._done * SAMPLES // max(self._total, 1)
        if step not in self.samples:
            self.samples[step] = round(resident_mb(), 1)
            print(f"{self._done} of {self._total}, {self.samples[step]} MB", flush=True)


def resident_mb() -> float:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6


def kill_half_way(out: Path, units: int, nodes: Any, killed: list[int], stop: threading.Event) -> None:
    """Kill the second node once half the parts are there."""
    while not stop.wait(0.2):
        parts = sum(1 for entry in os.scandir(out) if entry.name.startswith("part-"))
        if 2 * parts >= units:
            killed.extend([parts, nodes.kill()])
            return


def measure(folder: Path, count: int, photos_per_task: int | None) -> dict[str, object]:
    """Compute the rows of so many photos, and check them."""
    photos, out = folder / "photos", folder / "rows"
    if not photos.exists():
        generate(photos, count)
    if photos_per_task is not None:
        rows._SIZES, rows._SINGLE_UNITS = ((count, photos_per_task),), count  # type: ignore[assignment]
    begin = time.perf_counter()
    opened = rows.RowFolder.open(str(out), ABOUT)
    before = sum(group.photos for group in opened.finished)
    opened.plan(list_addresses([str(photos)]))
    planned = time.perf_counter() - begin
    units = sum(len(group.units(opened.folder)) for group in opened.missing)
    killed: list[int] = []
    memory, stop, tasks = Memory(), threading.Event(), len(opened.missing)
    with two_nodes() as nodes:
        begin = time.perf_counter()
        watch = threading.Thread(target=kill_half_way, args=(out, units, nodes, killed, stop))
        watch.start()
        try:
            done = opened.compute(Header(), RayPool(nodes.address, chunk=1), progress=memory)
        finally:
            stop.set()
            watch.join()
        seconds = time.perf_counter() - begin
    names = [row["address"] for row in opened.rows(["address", "status"]) if row["status"] == "ok"]
    return {
        "photos": count,
        "finished_by_an_earlier_call": before,
        "tasks": tasks,
        "parts": units,
        "parts_when_killed": killed[0] if killed else None,
        "processes_killed": killed[1] if killed else None,
        "rows_computed": done.rows,
        "rows": len(names),
        "different_photos": len(set(names)),
        "is_every_photo_there_once": sorted(names) == sorted(one.text for one in list_addresses([str(photos)])),
        "planning_seconds": round(planned, 1),
        "seconds": round(seconds, 1),
        "driver_mb_by_tenths": memory.samples,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", type=int, default=100_000)
    parser.add_argument("--per-task", type=int, default=None, help="photos of each task; default: as `detect` has them")
    parser.add_argument("--folder", type=Path, default=None, help="kept for a second call; default: a temporary one")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with nullcontext(args.folder) if args.folder else tempfile.TemporaryDirectory() as folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        figures = measure(Path(folder), args.photos, args.per_task)
    figures |= {
        "simulated": "two nodes are processes of one machine, one CPU each; the second is killed with SIGKILL",
        "cpu": measuring.cpu_name(),
        "cores": os.cpu_count(),
        "load_average": [round(value, 1) for value in os.getloadavg()],
        "versions": {name: version(name) for name in ("ray", "pyarrow", "tag2box")},
    }
    print(figures)
    if args.out:
        write_json(args.out, figures)


if __name__ == "__main__":
    main()
