"""Speed of proposal generation with one process and with two.

    python benchmarks/propose.py --data VOC2007 --split test --photos 200 --repeats 5 --out docs/results/propose.json

The two alternate on the same photos, so that other load on the machine affects both. Every run is a whole
``build_proposals`` call into an empty folder, including the start of its processes; the ratio of each pair is reported.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import cv2
import torch

from tag2box import extend
from tag2box.annotations import Photo
from tag2box.formats.datasets import read_photos
from tag2box.formats.listing import DataSource
from tag2box.images import read_photo
from tag2box.io import write_json
from tag2box.proposals.base import ProposalMethod, default_method
from tag2box.proposals.build import build_proposals


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--split")
    parser.add_argument("--photos", type=int, default=200, help="number of photos, evenly spaced over the dataset")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--workers", type=int, nargs=2, default=[1, 2])
    parser.add_argument("--method", choices=extend.PROPOSAL_METHODS, default="selective_search")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    cv2.setNumThreads(1)  # as in the workers: one core per process
    photos = evenly(read_photos(DataSource(path=args.data, split=args.split)), args.photos)
    few, many = args.workers
    pairs = []
    for number in range(args.repeats):
        order = (few, many) if number % 2 == 0 else (many, few)
        seconds = {workers: timed_run(photos, default_method(args.method), workers) for workers in order}
        pairs.append((seconds[few], seconds[many]))
        print(f"{seconds[few]:.2f} s with {few}, {seconds[many]:.2f} s with {many}: {ratio(pairs[-1]):.2f}", flush=True)
    figures = summary(pairs, len(photos), (few, many), args.method)
    print(figures)
    if args.out:
        write_json(args.out, figures)


def evenly(photos: Sequence[Photo], count: int) -> list[Photo]:
    """Photos evenly spaced over the dataset."""
    count = min(count, len(photos))
    return [photos[number * len(photos) // count] for number in range(count)]


def timed_run(photos: Sequence[Photo], method: ProposalMethod, workers: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        build_proposals(photos, method, Path(folder) / "store", read=read_photo, workers=workers)
        return time.perf_counter() - begin


def ratio(pair: tuple[float, float]) -> float:
    return pair[0] / pair[1]


def summary(pairs: list[tuple[float, float]], photos: int, workers: tuple[int, int], method: str) -> dict[str, object]:
    ratios = sorted(map(ratio, pairs))
    return {
        "method": method,
        "photos": photos,
        "repeats": len(pairs),
        "cores": os.cpu_count(),
        "workers": list(workers),
        "seconds_per_photo": [round(statistics.median(x) / photos, 3) for x in zip(*pairs, strict=True)],
        "speedup_median": round(statistics.median(ratios), 2),
        "speedup_smallest": round(ratios[0], 2),
        "speedup_largest": round(ratios[-1], 2),
    }


if __name__ == "__main__":
    main()
