"""Recall, number and time of proposals on the training photos of datasets with boxes.

    python benchmarks/proposal_recall.py magnetic-tile brain-mri plant-disease fruit voc07-mini --split train \
        --photos 100 --out docs/results/proposal-recall.json

Photos with objects, evenly spaced. Objects are grouped by their shorter side, in pixels of the photo. Seconds are
processor time of one thread for the search alone, without decoding. Results of other datasets in the file are kept.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import cv2
import numpy as np
import torch

from bench_parts import provenance
from tag2box.annotations import Photo
from tag2box.formats.datasets import read_photos, read_truth
from tag2box.formats.listing import DataSource
from tag2box.images import read_photo
from tag2box.io import read_json, write_json
from tag2box.ops.boxes import iou
from tag2box.proposals.base import ProposalMethod, default_method
from tag2box.proposals.combined import Combined
from tag2box.proposals.recall import THRESHOLDS, counts_in_recall
from tag2box.proposals.selective_search import SelectiveSearch

METHODS: Mapping[str, ProposalMethod] = {
    "selective_search": default_method("selective_search"),
    **{f"selective_search, thinned at {t}": SelectiveSearch(short_side=200, thinning=t) for t in (0.9, 0.8, 0.7)},
    "combined": Combined(),
}
BUDGETS = (500, 1000)
"""Numbers of boxes at which the combined method is measured too: its first boxes are what ``max_boxes`` keeps."""
SIDES = (0, 20, 40, 80, 10**9)
"""Limits of the groups of objects: shorter side in pixels."""


@dataclass
class Measured:
    """What one method gave so far: per object its best IoU and shorter side; per photo boxes and seconds."""

    best: list[float] = field(default_factory=list)
    sides: list[float] = field(default_factory=list)
    boxes: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def add(self, boxes: torch.Tensor, wanted: torch.Tensor, seconds: float) -> None:
        """Add a photo."""
        self.best += iou(wanted, boxes).amax(1).tolist() if len(boxes) else [0.0] * len(wanted)
        self.sides += (wanted[:, 2:] - wanted[:, :2]).amin(1).tolist()
        self.boxes.append(len(boxes))
        self.seconds.append(seconds)

    def row(self) -> dict[str, object]:
        """The figures as JSON; recall in per cent."""
        best, sides = np.array(self.best), np.array(self.sides)
        groups = {}
        for low, high in pairwise(SIDES):
            own = best[(sides >= low) & (sides < high)]
            if len(own):
                groups[f"{low}+"] = {"objects": len(own), "recall_50": _percent(own >= THRESHOLDS[0])}
        return {
            **{f"recall_{round(100 * t)}": _percent(best >= t) for t in THRESHOLDS},
            "boxes_per_photo": round(float(np.mean(self.boxes)), 1),
            "most_boxes": max(self.boxes),
            "median_boxes": float(np.median(self.boxes)),
            "cpu_seconds_per_photo": round(float(np.mean(self.seconds)), 3),
            "by_shorter_side": groups,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="+")
    parser.add_argument("--split", default="train")
    parser.add_argument("--photos", type=int, default=100)
    parser.add_argument("--methods", default="", help="only those whose names begin so")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    cv2.setNumThreads(1)
    figures = read_json(args.out, "figures") if args.out and args.out.exists() else {}
    for path in args.data:
        measured = measure_dataset(path, args.split, args.photos, args.methods)
        figures[path.name] = {**provenance(__file__), **measured}  # datasets in the file may be of other commands
        print(path.name, figures[path.name], flush=True)
        if args.out:
            write_json(args.out, figures)


def measure_dataset(path: Path, split: str | None, count: int, methods: str = "") -> dict[str, object]:
    """All methods whose names begin with ``methods`` on some photos of a dataset."""
    pairs = photos_with_objects(path, split, count)
    found: dict[str, Measured] = {}
    for photo, wanted in pairs:
        for name, method in METHODS.items():
            if not name.startswith(methods):
                continue
            boxes, seconds = timed_search(method, photo)
            found.setdefault(name, Measured()).add(boxes, wanted, seconds)
            for budget in BUDGETS if name == "combined" else ():
                found.setdefault(f"{name}, {budget} boxes", Measured()).add(boxes[:budget], wanted, seconds)
    objects = sum(len(wanted) for _, wanted in pairs)
    rows = {name: measured.row() for name, measured in found.items()}
    return {"split": split, "photos": len(pairs), "objects": objects, "methods": rows}


def photos_with_objects(path: Path, split: str | None, count: int) -> Sequence[tuple[Photo, torch.Tensor]]:
    """Photos evenly spaced over those with objects that count, and the boxes of these objects."""
    source = DataSource(path=path, split=split)
    photos = {photo.id: photo for photo in read_photos(source)}
    truth = read_truth(source)
    wanted = [(photos[i], own.boxes[counts_in_recall(own)]) for i, own in zip(truth.ids, truth.objects, strict=True)]
    wanted = [(photo, boxes.float()) for photo, boxes in wanted if len(boxes)]
    rows = np.unique(np.linspace(0, len(wanted) - 1, min(count, len(wanted))).round().astype(int))
    return [wanted[row] for row in rows.tolist()]


def timed_search(method: ProposalMethod, photo: Photo) -> tuple[torch.Tensor, float]:
    """Boxes of a photo, and the processor time of the search."""
    image = read_photo(photo.path)
    begin = time.process_time()
    boxes = method(image, (photo.width, photo.height)).boxes
    return boxes, time.process_time() - begin


def _percent(hits: np.ndarray) -> float:
    return round(100 * float(hits.mean()), 1)


if __name__ == "__main__":
    main()
