"""Which figures that need no true box say how good a run is: rank correlation with CorLoc over the runs of studies.

    python benchmarks/quality_signs.py runs/studies-fruit runs/studies-tile --out docs/results/quality-signs.json

A folder is the ``--work`` of `wscl_study.py`, or the ``--out`` of `tag2box compare`: finished runs on one dataset. Of
each run, from the best boxes of the tags of its training photos:

score: their mean score, mean over classes. agreement: their mean IoU with those of every other run of the folder. Both
are compared with CorLoc by Spearman's rank correlation, within each folder; over all folders the ranks within a folder
are taken, so that easy and hard datasets do not make a sign look better than it is. ``chosen`` has the CorLoc of the
run with the best sign, beside the mean and the best of all runs: what is gained by choosing with it.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from merged_labels import rank_correlation, ranks
from tag2box.cli.evaluate import METRICS_FILE, TOP_BOXES_FILE
from tag2box.experiments.reproduction import GRID_FOLDER
from tag2box.io import read_json, write_json
from tag2box.ops.boxes import iou

SIGNS = ("score", "agreement")
Tag = tuple[str, str]
"""A photo and one of its tags."""


@dataclass(frozen=True)
class MeasuredRun:
    """CorLoc of a run, and the best box of every tag of its training photos: corners and score."""

    name: str
    corloc: float
    boxes: Mapping[Tag, tuple[float, float, float, float]]
    scores: Mapping[Tag, float]


def read_runs(folder: Path) -> list[MeasuredRun]:
    """The finished runs of a study."""
    found = sorted(path.parent for path in (folder / GRID_FOLDER).glob(f"*/{TOP_BOXES_FILE}"))
    return [read_run(path) for path in found if (path / METRICS_FILE).exists()]


def read_run(folder: Path) -> MeasuredRun:
    """One run."""
    rows = read_json(folder / TOP_BOXES_FILE, "best boxes")
    corners, scores = {}, {}
    for row in rows:
        tag, (left, top, width, height) = (row["file_name"], row["category_name"]), row["bbox"]
        corners[tag], scores[tag] = (left, top, left + width, top + height), row["score"]
    corloc = read_json(folder / METRICS_FILE, "metrics")["train"]["corloc"]["mean"]
    return MeasuredRun(folder.name, corloc, corners, scores)


def mean_score(run: MeasuredRun) -> float:
    """Mean score of the best boxes of a class, mean over classes."""
    names = {name for _, name in run.scores}
    return fmean(fmean(score for (_, own), score in run.scores.items() if own == name) for name in names)


def agreement(run: MeasuredRun, others: Sequence[MeasuredRun]) -> float:
    """Mean IoU of the best boxes of a run with those of the others, over runs and tags that both have."""
    found = []
    for other in others:
        tags = sorted(run.boxes.keys() & other.boxes.keys())
        pairs = [torch.tensor([own.boxes[tag] for tag in tags]).reshape(-1, 4) for own in (run, other)]
        found += [float(iou(one[None], two[None])) for one, two in zip(*pairs, strict=True)]
    return fmean(found) if found else 0.0


def signs_of(runs: Sequence[MeasuredRun]) -> list[dict[str, Any]]:
    """Signs and CorLoc of the runs of one folder."""
    return [
        {
            "run": run.name,
            "corloc": run.corloc,
            "score": mean_score(run),
            "agreement": agreement(run, [other for other in runs if other is not run]),
        }
        for run in runs
    ]


def summary(folders: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Correlation of each sign with CorLoc, within folders and over all, and what choosing by it gives."""
    known = {name: rows for name, rows in folders.items() if len(rows) > 1}
    found: dict[str, Any] = {"runs": sum(map(len, known.values())), "folders": dict(folders)}
    for sign in SIGNS:
        pairs = {name: [(row[sign], row["corloc"]) for row in rows] for name, rows in known.items()}
        pooled = [pair for own in pairs.values() for pair in zip(*map(shares, zip(*own, strict=True)), strict=True)]
        found[sign] = {
            "within": {name: rank_correlation(own) for name, own in pairs.items()},
            "all": rank_correlation(pooled),
            "chosen": {name: chosen(own) for name, own in pairs.items()},
        }
    return found


def shares(values: Sequence[float]) -> list[float]:
    """Ranks as shares of their number.

    >>> shares([0.3, 0.1])
    [1.0, 0.5]
    """
    return [rank / len(values) for rank in ranks(values)]


def chosen(pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
    """CorLoc of the run with the highest sign, and of all."""
    corlocs = [right for _, right in pairs]
    return {"chosen": max(pairs)[1], "mean": fmean(corlocs), "best": max(corlocs)}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    page = summary({folder.name: signs_of(read_runs(folder)) for folder in args.folders})
    print({sign: (page[sign]["all"], page[sign]["within"]) for sign in SIGNS}, f"{page['runs']} runs")
    write_json(args.out, page)


if __name__ == "__main__":
    main()
