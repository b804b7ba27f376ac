"""Does `tag2box trust` say the truth? Simulated reviews of labels whose truth is known.

    python benchmarks/trust_coverage.py --out docs/results/trust-coverage.json
    python benchmarks/trust_coverage.py --labels labels --truth truth.json --photos 40 --reviews 50

Without a label set: intervals of 200 reviews for each of some precisions and sample sizes, once with independent
labels and once with labels that are right or wrong together in a photo; and the calibration error of scores that mean
something else than they say, before and after 100 reviewed labels. With a label set and its ground truth, an oracle
reviews random samples of the photos, and every class's interval is compared with its precision in the whole set.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from tag2box.formats.export import read_labelled
from tag2box.formats.listing import DataSource
from tag2box.io import write_json
from tag2box.labels.calibration import calibration_error, choose_calibration
from tag2box.labels.label_set import LabelSet
from tag2box.labels.reviews import Reviews, compared_reviews
from tag2box.labels.shares import Interval, binomial_interval, effective_trials
from tag2box.labels.trust_measure import measure_trust

PRECISIONS = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95)
SIZES = (10, 20, 50, 100)
REVIEWS = 200
PER_PHOTO = 3  # labels of a class in a photo, if they are correlated
TOGETHER = 0.3  # correlation of the labels of a photo
USE_FROM, REFUSE_BELOW = 0.7, 0.5
POPULATION, REVIEWED, SEEDS = 4000, 100, 50
DISTORTIONS = {"too low": 3.0, "too high": 1 / 3, "right": 1.0}  # score = probability ** power


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--labels", type=Path, help="a label set")
    parser.add_argument("--truth", type=Path, help="its ground truth, a dataset of any format")
    parser.add_argument("--split")
    parser.add_argument("--photos", type=int, default=40, help="photos of a review of --labels")
    parser.add_argument("--reviews", type=int, default=REVIEWS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.labels is not None:
        figures = on_labels(args.labels, DataSource(path=args.truth, split=args.split), args.photos, args.reviews)
    else:
        figures = simulated(args.reviews, SEEDS)
    print(figures)
    if args.out:
        write_json(args.out, figures)


def simulated(reviews: int, seeds: int) -> dict[str, object]:
    """Coverage and calibration on simulated labels."""
    return {
        "reviews_per_cell": reviews,
        "coverage": {
            "independent labels": coverage(reviews, per_photo=1),
            f"{PER_PHOTO} labels per photo, correlation {TOGETHER:g}": coverage(reviews, per_photo=PER_PHOTO),
        },
        "calibration": {name: calibrated(power, seeds) for name, power in DISTORTIONS.items()},
    }


# ---------------------------------------------------------------- intervals


def coverage(reviews: int, *, per_photo: int) -> dict[str, object]:
    """Share of intervals that hold the true precision, by precision and sample size; and of wrong verdicts."""
    generator = torch.Generator().manual_seed(per_photo)
    kinds = {"ours": _ours, "wilson, labels independent": _wilson}
    cells: dict[str, list[list[float]]] = {name: [] for name in kinds}
    wrong, widths = 0, []
    for precision in PRECISIONS:
        rows: dict[str, list[float]] = {name: [] for name in kinds}
        for size in SIZES:
            samples = [_photos(precision, size, per_photo, generator) for _ in range(reviews)]
            for name, interval in kinds.items():
                found = [interval(*sample) for sample in samples]
                rows[name].append(sum(own.low <= precision <= own.high for own in found) / reviews)
                if name == "ours":
                    wrong += sum(_is_wrong(own, precision) for own in found)
                    widths.append(sum(own.high - own.low for own in found) / reviews)
        for name in kinds:
            cells[name].append(rows[name])
    every = {name: [share for row in table for share in row] for name, table in cells.items()}
    return {
        "precisions": list(PRECISIONS),
        "sizes": list(SIZES),
        "cells": cells["ours"],
        "mean": _mean(every["ours"]),
        "worst_cell": min(every["ours"]),
        "mean_width": _mean(widths),
        "wrong_verdicts": wrong / (reviews * len(every["ours"])),
        "wilson_mean": _mean(every["wilson, labels independent"]),
        "wilson_worst_cell": min(every["wilson, labels independent"]),
    }


def _photos(precision: float, size: int, per_photo: int, generator: torch.Generator) -> tuple[list[int], list[int]]:
    """Right labels and labels of each photo; in a photo, each label copies a common one with probability sqrt(rho)."""
    right: list[int] = []
    total: list[int] = []
    while sum(total) < size:
        count = min(per_photo, size - sum(total))
        draws = torch.rand(count + 1, generator=generator) < precision
        copies = torch.rand(count, generator=generator) < (math.sqrt(TOGETHER) if per_photo > 1 else 0.0)
        right.append(int(torch.where(copies, draws[0], draws[1:]).sum()))
        total.append(count)
    return right, total


def _ours(right: Sequence[int], total: Sequence[int]) -> Interval:
    trials = effective_trials(right, total)
    return _interval(round(sum(right) / sum(total) * trials, 9), round(trials, 9))


_interval = cache(binomial_interval)


def _wilson(right: Sequence[int], total: Sequence[int]) -> Interval:
    count, share, z = sum(total), sum(right) / sum(total), 1.959964
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return Interval(middle - half, middle + half)


def _is_wrong(own: Interval, precision: float) -> bool:
    """Whether a verdict contradicts the truth."""
    return (own.low >= USE_FROM and precision < USE_FROM) or (own.high < REFUSE_BELOW and precision >= REFUSE_BELOW)


# ---------------------------------------------------------------- calibration


def calibrated(power: float, seeds: int) -> dict[str, object]:
    """Expected calibration error on labels that were not reviewed, before and after 100 reviewed labels."""
    errors: list[tuple[float, float]] = []
    kinds: dict[str, int] = {}
    for seed in range(seeds):
        scores, right = _population(power, seed)
        choice = choose_calibration(scores[:REVIEWED], right[:REVIEWED])
        kinds[choice.calibration.kind] = kinds.get(choice.calibration.kind, 0) + 1
        rest, truth = scores[REVIEWED:], right[REVIEWED:]
        errors.append((calibration_error(rest, truth), calibration_error(choice.calibration(rest), truth)))
    before, after = ([error[at] for error in errors] for at in (0, 1))
    return {
        "reviewed": REVIEWED,
        "seeds": seeds,
        "before": _mean(before),
        "after": _mean(after),
        "after_worst": max(after),
        "improved": sum(b > a for b, a in errors) / seeds,
        "kinds": kinds,
    }


def _population(power: float, seed: int) -> tuple[Tensor, Tensor]:
    """Labels that are right with a probability of which the score is a power."""
    generator = torch.Generator().manual_seed(seed)
    probs = torch.rand(POPULATION, generator=generator, dtype=torch.float64) * 0.9 + 0.05
    right = torch.rand(POPULATION, generator=generator, dtype=torch.float64) < probs
    return probs**power, right


# ---------------------------------------------------------------- a label set


def on_labels(folder: Path, truth: DataSource, photos: int, reviews: int) -> dict[str, object]:
    """Reviews of random photos of a label set by an oracle, against all of its photos."""
    labels = LabelSet.open(folder)
    whole = compared_reviews(labels.content, labels.digest, read_labelled(truth))
    every = measure_trust(labels, whole)
    known = {name: own.precision.share for name, own in every.classes.items() if own.precision.count}
    generator, names = torch.Generator().manual_seed(0), list(whole.photos)
    hits, wrong, errors = [], 0, []
    for _ in range(reviews):
        order = torch.randperm(len(names), generator=generator).tolist()
        part = Reviews(whole.labels_digest, {names[at]: whole.photos[names[at]] for at in order[:photos]})
        rest = [whole.photos[names[at]] for at in order[photos:]]
        found = measure_trust(labels, part)
        for name, share in known.items():
            own = found.classes[name].precision
            if own.count and share is not None:
                hits.append(own.interval.low <= share <= own.interval.high)
                wrong += found.classes[name].verdict != "review more" and _is_wrong(own.interval, share)
        scored = [v for photo in rest for v in photo.verdicts if v.box.score is not None]
        scores = torch.tensor([v.box.score for v in scored], dtype=torch.float64)
        right = torch.tensor([v.is_right for v in scored], dtype=torch.bool)
        probs = torch.tensor([found.of(v.box.name).calibration.one(v.box.score or 0.0) for v in scored])
        errors.append((calibration_error(scores, right), calibration_error(probs, right)))
    return {
        "photos": len(names),
        "reviewed": photos,
        "reviews": reviews,
        "precision": dict(sorted(_rounded(known).items())),
        "coverage": _mean(hits),
        "intervals": len(hits),
        "wrong_verdicts": wrong / max(len(hits), 1),
        "calibration_error": {"before": _mean([b for b, _ in errors]), "after": _mean([a for _, a in errors])},
    }


def _rounded(shares: Mapping[str, float | None]) -> dict[str, float]:
    return {name: round(share or 0.0, 3) for name, share in shares.items()}


def _mean(values: Sequence[float]) -> float:
    return round(sum(values) / max(len(values), 1), 4)


if __name__ == "__main__":
    main()
