"""The proposal store at the size of COCO's training set: time to open, time of a random access, memory.

    python benchmarks/store.py --folder /some/disk --out docs/results/store.json

Generates a store (118,000 photos x 2,000 boxes: 4.7 GB) in a temporary folder inside FOLDER, measures it in processes
of their own, with its files in the system's cache and out of it, and removes it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch

from tag2box.annotations import Photo
from tag2box.io import write_json
from tag2box.proposals.base import Candidates
from tag2box.proposals.store import ProposalStore, write_store

WIDTH, HEIGHT = 640, 480


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", type=int, default=118_000)
    parser.add_argument("--boxes", type=int, default=2_000)
    parser.add_argument("--reads", type=int, default=20_000, help="photos read at random")
    parser.add_argument("--folder", type=Path, default=None, help="where there is room for it")
    parser.add_argument("--out", type=Path, default=Path("docs/results/store.json"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        store = Path(folder) / "store"
        begin = time.perf_counter()
        write_store(store, {"kind": "generated"}, photos(args.photos), candidates(args.photos, args.boxes))
        figures = {
            "photos": args.photos,
            "boxes_per_photo": args.boxes,
            "gigabytes": round(sum(file.stat().st_size for file in store.iterdir()) / 1e9, 2),
            "seconds_to_write": round(time.perf_counter() - begin, 1),
            "cached": apart(store, args.reads),
        }
        forget(store)
        figures["from_disk"] = apart(store, args.reads // 10)
    write_json(args.out, figures)
    print(markdown(figures))


def photos(count: int) -> list[Photo]:
    return [Photo(f"{number:012}", Path(f"{number:012}.jpg"), WIDTH, HEIGHT) for number in range(count)]


def candidates(count: int, boxes: int) -> Iterator[Candidates]:
    """Boxes of differing photos, drawn once and handed out from another row each time."""
    generator = torch.Generator().manual_seed(0)
    side = torch.tensor([WIDTH, HEIGHT])
    extent = side * (0.1 + 0.5 * torch.rand(2 * boxes, 2, generator=generator))
    corner = (side - extent) * torch.rand(2 * boxes, 2, generator=generator)
    drawn = torch.cat([corner, corner + extent], dim=1)
    scores = torch.rand(2 * boxes, generator=generator)
    for number in range(count):
        first = number % boxes
        yield Candidates(drawn[first : first + boxes], scores[first : first + boxes])


def forget(store: Path) -> None:
    """Take the files out of the system's cache."""
    for file in store.iterdir():
        handle = os.open(file, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def apart(store: Path, reads: int) -> dict[str, float]:
    """The measurement in a process that has done nothing else."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, store, reads).result()


def measure(path: Path, reads: int) -> dict[str, float]:
    torch.set_num_threads(1)
    before = resident()
    begin, busy = time.perf_counter(), time.process_time()
    store = ProposalStore.open(path)
    opened, busy = time.perf_counter() - begin, time.process_time() - busy
    index = resident()
    names = list(store.sizes)
    micros, grown = [], []
    for number in np.random.default_rng(0).integers(len(names), size=reads).tolist():
        begin = time.perf_counter()
        store.boxes(names[number])
        micros.append(1e6 * (time.perf_counter() - begin))
        if len(micros) % max(reads // 10, 1) == 0:
            grown.append(resident() - index)
    return {
        "reads": reads,
        "seconds_to_open": round(opened, 3),
        "seconds_to_open_on_the_processor": round(busy, 3),
        "microseconds_a_read_median": round(statistics.median(micros), 1),
        "microseconds_a_read_99_percent": round(float(np.percentile(micros, 99)), 1),
        "megabytes_of_the_index": round(index - before, 1),
        "megabytes_read": round(sum(len(store.boxes(n)) for n in names[:10]) / 10 * 16 * reads / 1e6, 1),
        "megabytes_grown_by_reading": round(max(grown, default=0.0), 1),
    }


def resident() -> float:
    """Megabytes of this process in memory, mapped files included."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmRSS:"))
    return int(line.split()[1]) / 1024


def markdown(figures: dict[str, object]) -> str:
    """The table of the docs."""
    columns = {"in the system's cache": figures["cached"], "from disk": figures["from_disk"]}
    lines = [
        f"{figures['photos']:,} photos x {figures['boxes_per_photo']:,} boxes, {figures['gigabytes']} GB",
        "",
        f"| | {' | '.join(columns)} |",
        "|---|---|---|",
    ]
    rows = zip(*(column.items() for column in columns.values()), strict=True)  # type: ignore[attr-defined]
    lines += [f"| {cells[0][0].replace('_', ' ')} | {' | '.join(f'{v:,}' for _, v in cells)} |" for cells in rows]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
