"""Which signs that need no true box say how good a run is: rank correlation with CorLoc over the runs of studies.

    python benchmarks/quality_signs.py runs/studies-fruit runs/studies-tile --out docs/results/quality-signs.json

A folder is the ``--work`` of `wscl_study.py`, or the ``--out`` of `tag2box compare`: finished runs on one dataset. The
signs are those of `src/tag2box/labels/quality.py`, of the best boxes of the tags of the training photos: score,
stages and stability (from the galleries of the run's events), margin (if `tag2box label` recorded it), and agreement,
the mean IoU with the best boxes of every other run of the folder. A run that lacks a sign is left out for that sign.

Each is compared with CorLoc by Spearman's rank correlation: ``overall`` as they are; ``ranked`` after both are
turned into ranks within their folder, so that easy and hard datasets do not make a sign look better than it is;
``within`` each folder. Intervals (95 %) are percentiles over resamples of the runs of each folder. ``chosen`` has the
CorLoc of the run with the best sign, beside the mean and the best of all runs: what is gained by choosing with it.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from merged_labels import rank_correlation, ranks
from tag2box.cli.evaluate import METRICS_FILE, TOP_BOXES_FILE
from tag2box.experiments.reproduction import GRID_FOLDER
from tag2box.io import read_json, write_json
from tag2box.labels import quality
from tag2box.reporting.records import run_signs

SIGNS = ("score", "margin", "agreement", "stages", "stability")
RESAMPLES = 1000
Pairs = Sequence[tuple[float, float]]
"""Sign and CorLoc of some runs."""


@dataclass(frozen=True)
class MeasuredRun:
    """CorLoc of a run, its best boxes of the tags of its training photos, and the signs of its records."""

    name: str
    corloc: float
    best: quality.BestBoxes
    recorded: quality.QualitySigns
    margin: float | None = None


def read_runs(folder: Path) -> list[MeasuredRun]:
    """The finished runs of a study."""
    found = sorted(path.parent for path in (folder / GRID_FOLDER).glob(f"*/{TOP_BOXES_FILE}"))
    return [read_run(path) for path in found if (path / METRICS_FILE).exists()]


def read_run(folder: Path) -> MeasuredRun:
    """One run."""
    corners, scores = {}, {}
    for row in read_json(folder / TOP_BOXES_FILE, "best boxes"):
        tag, (left, top, width, height) = (row["file_name"], row["category_name"]), row["bbox"]
        corners[tag], scores[tag] = (left, top, left + width, top + height), row["score"]
    corloc = read_json(folder / METRICS_FILE, "metrics")["train"]["corloc"]["mean"]
    best, signs = quality.BestBoxes(corners, scores, {}), folder / quality.SIGNS_FILE
    margin = quality.read_signs(signs).margin if signs.exists() else None
    recorded = run_signs(folder, best, sorted({name for _, name in scores}))
    return MeasuredRun(folder.name, corloc, best, recorded, margin)


def signs_of(runs: Sequence[MeasuredRun]) -> list[dict[str, Any]]:
    """Signs and CorLoc of the runs of one folder; None for what a run has not."""
    return [
        {
            "run": run.name,
            "corloc": run.corloc,
            "score": quality.mean_score(run.best.scores),
            "margin": run.margin,
            "agreement": quality.seed_overlap(run.best.boxes, [other.best.boxes for other in runs if other is not run]),
            "stages": run.recorded.stages,
            "stability": run.recorded.stability,
        }
        for run in runs
    ]


# ---------------------------------------------------------------- correlation


def summary(
    folders: Mapping[str, Sequence[Mapping[str, Any]]], *, resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, Any]:
    """Correlation of each sign with CorLoc, and what choosing by it gives."""
    found: dict[str, Any] = {"runs": sum(map(len, folders.values())), "folders": dict(folders)}
    for sign in SIGNS:
        rows = {
            name: [(row[sign], row["corloc"]) for row in own if row[sign] is not None] for name, own in folders.items()
        }
        known = {name: own for name, own in rows.items() if len(own) > 1}
        found[sign] = {
            "runs": sum(map(len, known.values())),
            "overall": measured(list(known.values()), joined, resamples, seed),
            "ranked": measured(list(known.values()), ranked, resamples, seed),
            "within": {name: measured([own], joined, resamples, seed) for name, own in known.items()},
            "chosen": {name: chosen(own) for name, own in known.items()},
        }
    return found


def joined(groups: Sequence[Pairs]) -> list[tuple[float, float]]:
    """The pairs of all folders as they are."""
    return [pair for own in groups for pair in own]


def ranked(groups: Sequence[Pairs]) -> list[tuple[float, float]]:
    """The pairs of all folders, as ranks within their folder.

    >>> ranked([[(0.3, 0.5), (0.1, 0.7)]])
    [(1.0, 0.5), (0.5, 1.0)]
    """
    return [pair for own in groups for pair in zip(*map(shares, zip(*own, strict=True)), strict=True)]


def shares(values: Sequence[float]) -> list[float]:
    """Ranks as shares of their number.

    >>> shares([0.3, 0.1])
    [1.0, 0.5]
    """
    return [rank / len(values) for rank in ranks(values)]


def measured(
    groups: Sequence[Pairs], pool: Callable[[Sequence[Pairs]], Pairs], resamples: int, seed: int
) -> dict[str, float | None]:
    """The rank correlation of some folders, and the ends of its interval."""
    generator, drawn = random.Random(seed), []
    for _ in range(resamples if groups else 0):
        value = rank_correlation(list(pool([generator.choices(own, k=len(own)) for own in groups])))
        if value is not None and math.isfinite(value):  # not where all runs drawn are equal
            drawn.append(value)
    drawn.sort()
    low, high = (drawn[round(share * (len(drawn) - 1))] if drawn else None for share in (0.025, 0.975))
    return {"correlation": rank_correlation(list(pool(groups))) if groups else None, "low": low, "high": high}


def chosen(pairs: Pairs) -> dict[str, float]:
    """CorLoc of the run with the highest sign, and of all."""
    corlocs = [right for _, right in pairs]
    return {"chosen": max(pairs)[1], "mean": fmean(corlocs), "best": max(corlocs)}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resamples", type=int, default=RESAMPLES)
    args = parser.parse_args(argv)
    page = summary({folder.name: signs_of(read_runs(folder)) for folder in args.folders}, resamples=args.resamples)
    print({sign: page[sign]["ranked"] for sign in SIGNS}, f"{page['runs']} runs")
    write_json(args.out, page)


if __name__ == "__main__":
    main()
