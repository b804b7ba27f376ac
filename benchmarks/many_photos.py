"""Listing, proposal store and detections of very many photos: time and memory against their number.

    python benchmarks/many_photos.py --out docs/results/many-photos.json

Three parts, each in a fresh process per size, with boxes that are given instead of searched or detected: measured is
the time of listing, storing and writing. Time is processor time, which other programs on the machine change least.

names    `detect RUN *.jpg`: so many names on the command line, tiny photos on disk, their headers read
store    a listing of so many rows and the store of their proposals: shards, merge, index, opening; headers are
         generated, and photos are not opened
found    detections logged as `detect` does, read again as it does when it resumes, and written as a COCO file

Resumable: sizes that the file of --out has are not measured again. An exponent is the slope of log time over log
number: 1 is linear, 2 quadratic.
"""

from __future__ import annotations

import argparse
import io as bytes_io
import json
import os
import tempfile
import time
from collections.abc import Callable, Generator, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import measuring
from bench_growth import exponent
from bench_plots import Panel, side_by_side
from tag2box.annotations import Detections, Photo
from tag2box.cli.inputs import find_inputs
from tag2box.formats import export, listing
from tag2box.formats.detection_log import DetectionLog
from tag2box.images import read_photo
from tag2box.io import write_json, write_text
from tag2box.proposals.build import SearchResult, build_proposals
from tag2box.proposals.selective_search import SelectiveSearch
from tag2box.reporting.charts import Line

SIDES = (48, 32)
BOXES = torch.tensor([[0.0, 0, 24, 16], [8, 8, 40, 30]])
FOUND = 20  # detections per photo
SIZES = {"names": (10_000, 30_000, 100_000), "store": (10_000, 100_000, 1_000_000), "found": (10_000, 30_000, 100_000)}
SMALL = (100, 300)


def at_once(
    work: object, files: Iterable[Photo], *, lost: object, threads: int = 1
) -> Generator[tuple[Photo, SearchResult], None, None]:
    """A pool that finds the same two boxes in every photo, without looking."""
    scores = np.ones(len(BOXES), np.float32)
    yield from ((file, SearchResult(BOXES.numpy(), scores)) for file in files)


# ---------------------------------------------------------------- the parts


def names(folder: Path, count: int) -> Callable[[], object]:
    """Headers of photos that are named one by one."""
    content = bytes_io.BytesIO()
    Image.new("RGB", SIDES, (200, 10, 20)).save(content, "JPEG")
    places = [folder / f"{number:07}.jpg" for number in range(count)]
    for place in places:
        place.write_bytes(content.getbuffer())
    return lambda: find_inputs(places)


def store(folder: Path, count: int) -> Callable[[], object]:
    """Listing and store of photos whose headers are generated."""

    def work() -> None:
        rows = [listing.TagRow(f"{number % 1000}/{number:07}.jpg", (), "generated") for number in range(count)]
        listed = listing.list_rows(rows, folder, ())
        photos = [Photo(entry.id, folder / entry.file, *SIDES) for entry in listed.entries]
        method = SelectiveSearch()  # named in the store; the pool does not call it
        made = build_proposals(photos, method, folder / "store", read=read_photo, pool=at_once)  # type: ignore[arg-type]
        assert len(made) == count

    return work


class Proposals:
    """No proposals of any photo."""

    def boxes(self, photo_id: str, /) -> torch.Tensor:
        return torch.zeros(0, 4)

    def scores(self, photo_id: str, /) -> torch.Tensor:
        return torch.zeros(0)


def found(folder: Path, count: int) -> Callable[[], object]:
    """Detections: logged, found again, exported. All photos are one file, which exists."""
    one = folder / "one.jpg"
    one.write_bytes(b"content")
    photos = [Photo(f"{number:07}", one, *SIDES, file=f"{number:07}.jpg") for number in range(count)]
    boxes = BOXES.repeat(FOUND // len(BOXES), 1)
    own = Detections(boxes, torch.linspace(0.1, 1, FOUND), torch.arange(FOUND) % 3)

    def work() -> None:
        log = DetectionLog(folder / "log")
        log.open({"weights": "none"})
        for photo in photos:
            log.add(photo, Proposals(), own)
        log.close()
        again = DetectionLog(folder / "log").finished(photos, Proposals())
        assert len(again) == count
        export.export_detections("coco", folder / "boxes.json", photos, ("a", "b", "c"), again)

    return work


PARTS = {"names": names, "store": store, "found": found}


def one_size(part: str, count: int, parent: Path | None) -> dict[str, Any]:
    """Processor time, wall time and peak memory of a part at one size."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        work = PARTS[part](Path(folder), count)
        begin, busy = time.perf_counter(), time.process_time()
        peak = measuring.peak_mb(work)
        cpu, wall = time.process_time() - busy, time.perf_counter() - begin
    row = {"photos": count, "cpu": round(cpu, 2), "wall": round(wall, 1), "peak_mb": peak}
    return row | {"microseconds_per_photo": round(1e6 * cpu / count, 1), "load": round(os.getloadavg()[0], 1)}


def plot(parts: dict[str, list[dict[str, Any]]]) -> str:
    """Time and memory of all parts."""
    panels = []
    for value, title in (("cpu", "processor seconds"), ("peak_mb", "peak MB")):
        for part, points in parts.items():
            line = Line(part, f"run-{list(parts).index(part)}", tuple((p["photos"], p[value]) for p in points))
            panels.append(Panel(f"{part}: {title}", "photos", (line,)))
    return side_by_side(panels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="tiny sizes, a smoke test")
    parser.add_argument("--folder", type=Path, default=None, help="parent of temporary folders")
    parser.add_argument("--out", type=Path, default=Path("docs/results/many-photos.json"))
    parser.add_argument("--plot", type=Path, default=None, help="SVG file to write")
    args = parser.parse_args()
    before = json.loads(args.out.read_text())["parts"] if args.out.exists() else {}
    rows: dict[str, list[dict[str, Any]]] = {part: before.get(part, []) for part in PARTS}
    plan = [(part, size) for part in ("store", "names", "found") for size in (SMALL if args.small else SIZES[part])]
    for part, size in plan:
        if not any(point["photos"] == size for point in rows[part]):
            rows[part].append(measuring.in_fresh_process(partial(one_size, part, size, args.folder)))
            print(part, rows[part][-1], flush=True)
            write(rows, args.out, args.plot)
    write(rows, args.out, args.plot)


def write(rows: dict[str, list[dict[str, Any]]], out: Path, drawing: Path | None) -> None:
    """Write what is measured so far, with the exponents, and its plot."""
    done = {name: points for name, points in rows.items() if len(points) > 1}
    exponents = {
        name: {
            kind: exponent([point["photos"] for point in points], [point[key] for point in points])
            for kind, key in (("time", "cpu"), ("memory", "peak_mb"))
        }
        for name, points in done.items()
    }
    facts = {"cpu": measuring.cpu_name(), "cores": os.cpu_count(), "torch": torch.__version__}
    write_json(out, {"machine": facts, "parts": rows, "exponents": exponents})
    if drawing is not None and done:
        write_text(drawing, plot(done))


if __name__ == "__main__":
    main()
