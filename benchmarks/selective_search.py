"""Selective search: tag2box's against OpenCV's, recall, boxes and time on the same photos in one run.

    python benchmarks/selective_search.py voc07-mini=100 magnetic-tile plant-disease fruit brain-mri --split train \
        --out docs/results/selective-search.json

Each dataset may name its number of photos; the others have ``--photos``. Photos with objects, evenly spaced, are
searched by both with the defaults of ``tag2box propose``; the two take turns in going first. Seconds are processor time
of one thread for the search alone, without decoding, after a warm-up; the ratio is taken photo by photo. ``changed``
counts the objects that only one of the two recalls at IoU 0.5. Results of other modes in the file are kept.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import torch

from measuring import machine
from proposal_recall import Measured, photos_with_objects, timed_search
from tag2box.io import read_json, write_json
from tag2box.proposals.base import default_method
from tag2box.proposals.recall import THRESHOLDS
from tag2box.proposals.selective_search import SelectiveSearch

ENGINES = ("tag2box", "opencv")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="+", help="FOLDER or FOLDER=PHOTOS")
    parser.add_argument("--split", default="train", help="empty: all photos")
    parser.add_argument("--photos", type=int, default=50)
    parser.add_argument("--mode", choices=("fast", "quality"), default="fast")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    cv2.setNumThreads(1)
    figures = read_json(args.out, "figures") if args.out and args.out.exists() else {}
    figures["machine"] = {**machine(), "simd": simd()}
    figures.setdefault(args.mode, {})
    best: dict[str, list[float]] = {engine: [] for engine in ENGINES}
    for name in args.data:
        path, _, photos = name.partition("=")
        row, found = compare(Path(path), args.split or None, int(photos or args.photos), args.mode)
        for engine in ENGINES:
            best[engine] += found[engine].best
        figures[args.mode][Path(path).name] = row
        print(Path(path).name, row, flush=True)
        figures[args.mode]["all"] = recalls(best)
        if args.out:
            write_json(args.out, figures)
    print(figures[args.mode]["all"])


def compare(path: Path, split: str | None, count: int, mode: str) -> tuple[dict[str, object], dict[str, Measured]]:
    """Both engines on some photos of a dataset."""
    base = default_method("selective_search")
    assert isinstance(base, SelectiveSearch)
    methods = {engine: replace(base, engine=engine, mode=mode) for engine in ENGINES}  # type: ignore[arg-type]
    found = {engine: Measured() for engine in ENGINES}
    pairs = photos_with_objects(path, split, count)
    for number, (photo, wanted) in enumerate(pairs):
        for engine in ENGINES if number % 2 else ENGINES[::-1]:
            if number == 0:
                timed_search(methods[engine], photo)
            boxes, seconds = timed_search(methods[engine], photo)
            found[engine].add(boxes, wanted, seconds)
    ratios = np.divide(found["opencv"].seconds, found["tag2box"].seconds)
    row: dict[str, object] = {"split": split, "photos": len(pairs), "short_side": base.short_side}
    row |= recalls({engine: measured.best for engine, measured in found.items()})
    for engine, measured in found.items():
        row[f"boxes_per_photo_{engine}"] = round(float(np.mean(measured.boxes)), 1)
        row[f"cpu_seconds_per_photo_{engine}"] = round(float(np.mean(measured.seconds)), 4)
    row["times_as_fast"] = {
        name: round(float(np.quantile(ratios, q)), 2) for name, q in (("least", 0), ("median", 0.5), ("most", 1))
    }
    return row, found


def recalls(best: dict[str, list[float]]) -> dict[str, object]:
    """Recall in per cent, from the IoU of each object's best box."""
    row: dict[str, object] = {"objects": len(best["opencv"])}
    for engine in ENGINES:
        shares = {f"{t:g}": round(100 * float((np.array(best[engine]) >= t).mean()), 1) for t in THRESHOLDS}
        row[f"recall_{engine}"] = shares
    hits = {engine: np.array(best[engine]) >= THRESHOLDS[0] for engine in ENGINES}
    one, other = hits["tag2box"], hits["opencv"]
    return row | {"changed": {"only_tag2box": int((one & ~other).sum()), "only_opencv": int((other & ~one).sum())}}


def simd() -> str:
    """The widest vector instructions of the processor that torch knows."""
    return torch.backends.cpu.get_cpu_capability()


if __name__ == "__main__":
    main()
