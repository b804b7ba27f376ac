"""The proposal store at the size of COCO's training set: time to open, time per random access, memory.

    python benchmarks/store.py --folder /some/disk --out docs/results/store.json

Writes a store (118,000 photos x 2,000 boxes: 4.7 GB) to a temporary folder inside FOLDER, measures it in fresh
processes with a warm and with a cold page cache, and removes it.
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
    parser.add_argument("--reads", type=int, default=20_000, help="number of photos read at random")
    parser.add_argument("--folder", type=Path, default=None, help="parent of the temporary folder")
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
            "cached": measure_fresh(store, args.reads),
        }
        drop_page_cache(store)
        figures["from_disk"] = measure_fresh(store, args.reads // 10)
    write_json(args.out, figures)
    print(markdown(figures))


def photos(count: int) -> list[Photo]:
    return [Photo(f"{number:012}", Path(f"{number:012}.jpg"), WIDTH, HEIGHT) for number in range(count)]


def candidates(count: int, boxes: int) -> Iterator[Candidates]:
    """Boxes drawn once; each photo gets a slice that begins at another row."""
    generator = torch.Generator().manual_seed(0)
    side = torch.tensor([WIDTH, HEIGHT])
    extent = side * (0.1 + 0.5 * torch.rand(2 * boxes, 2, generator=generator))
    corner = (side - extent) * torch.rand(2 * boxes, 2, generator=generator)
    drawn = torch.cat([corner, corner + extent], dim=1)
    scores = torch.rand(2 * boxes, generator=generator)
    for number in range(count):
        first = number % boxes
        yield Candidates(drawn[first : first + boxes], scores[first : first + boxes])


def drop_page_cache(store: Path) -> None:
    """Drop the store's files from the page cache."""
    for file in store.iterdir():
        handle = os.open(file, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def measure_fresh(store: Path, reads: int) -> dict[str, float]:
    """``measure`` in a fresh process."""
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
    chosen = [names[number] for number in np.random.default_rng(0).integers(len(names), size=reads).tolist()]
    first, growth = read_boxes(store, chosen, index)  # verifies the blocks
    again, more = read_boxes(store, chosen, index)
    return {
        "reads": reads,
        "seconds_to_open": round(opened, 3),
        "cpu_seconds_to_open": round(busy, 3),
        "microseconds_per_first_read_median": round(statistics.median(first), 1),
        "microseconds_per_read_median": round(statistics.median(again), 1),
        "microseconds_per_read_99_percent": round(float(np.percentile(again, 99)), 1),
        "megabytes_of_the_index": round(index - before, 1),
        "megabytes_read": round(sum(len(store.boxes(n)) for n in names[:10]) / 10 * 16 * reads / 1e6, 1),
        "megabytes_of_growth_by_reading": round(max(growth, more), 1),
    }


def read_boxes(store: ProposalStore, names: list[str], before: float) -> tuple[list[float], float]:
    """Microseconds per photo, and the largest growth of the process in megabytes."""
    micros, growth = [], 0.0
    for name in names:
        begin = time.perf_counter()
        store.boxes(name)
        micros.append(1e6 * (time.perf_counter() - begin))
        if len(micros) % max(len(names) // 10, 1) == 0:
            growth = max(growth, resident() - before)
    return micros, growth


def resident() -> float:
    """Resident megabytes of this process, including mapped files."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmRSS:"))
    return int(line.split()[1]) / 1024


def markdown(figures: dict[str, object]) -> str:
    """The table in the docs."""
    columns = {"warm page cache": figures["cached"], "cold page cache": figures["from_disk"]}
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
