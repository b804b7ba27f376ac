"""Are the labels of ``tag2box label``, which knows the tags, better than those of ``tag2box detect``, which does not?

    python benchmarks/label_rule.py VOC2007 --runs runs/seed0 runs/seed1 runs/seed2 --split train --test-split test \
        --work runs/label-rule --out docs/results/label-rule.json

Rows, for each run and split, against the true boxes:

    detect                   all boxes of at least a fixed score, whatever the tags
    detect, tagged classes   the same without the boxes of classes that are no tag of the photo
    label                    the label rule with its defaults; likewise ``label, auto`` and ``label, snap``

The score of both ``detect`` rows is chosen on the photos of ``--split``, those that the runs were trained on, each for
itself: of all scores that occur, the one with the best F1 against the true boxes. It cannot be chosen from tags alone,
so this is the best case of ``detect``; ``label`` sees no box. With ``--test-split`` both are also judged on
photos that neither training nor this choice has seen, with the tags of these photos.

Boxes match objects of their class one to one at an IoU of at least 0.5, best scores first, each with its nearest free
object. Precision, recall and F1 are over the boxes and objects of all photos; difficult objects and crowds, and boxes
that match nothing else, do not count. ``empty tags`` is the share of tags of a photo without any box of their class.
Resumable: rerun the same command; detections and label sets stay in WORK.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from tag2box import io, runs
from tag2box.annotations import Detections, Objects, Truth
from tag2box.cli.detect import detect
from tag2box.cli.label import label
from tag2box.formats import datasets, detection_files
from tag2box.formats.listing import DataSource
from tag2box.labels.label_set import LabelSet, is_label_set
from tag2box.metrics.voc_ap import same_class_iou
from tag2box.progress import Progress, TerminalProgress

MATCH_IOU = 0.5
VARIANTS = ("fixed", "auto", "snap")
Judgement = Literal["right", "wrong", "ignored"]


@dataclass(frozen=True)
class JudgedBox:
    """A box and whether it matches an object."""

    score: float
    judgement: Judgement
    is_tagged: bool  # its class is a tag of the photo: an object of it is there


@dataclass(frozen=True)
class Place:
    """A run, a split, and the folder that keeps their detections and labels."""

    run: Path
    source: DataSource
    work: Path
    progress: Progress

    def detections(self, truth: Truth) -> Mapping[str, Detections]:
        """All detections of the run, whatever their score."""
        file = self.work / "detections.json"
        if not file.exists():
            io.make_folder(self.work)
            detect(
                self.run, self.source.path, file, split=self.source.split, min_score=0.0,
                proposals=self.work / "proposals", progress=self.progress,
            )  # fmt: skip
        return detection_files.read_detections(file, truth)

    def labels(self, variant: str) -> Mapping[str, Detections]:
        """The labels of the label rule."""
        folder = self.work / f"labels-{variant}"
        if not is_label_set(folder):
            label(
                self.run, self.source, folder, rule="auto" if variant == "auto" else "fixed", snap=variant == "snap",
                proposals=self.work / "proposals", progress=self.progress,
            )  # fmt: skip
        return LabelSet.open(folder).content.detections()


# ---------------------------------------------------------------- figures


def judged(found: Mapping[str, Detections], truth: Truth) -> list[JudgedBox]:
    """Every box of all photos; in each photo best scores first, so that a part above a score is judged as alone."""
    boxes = []
    for name, objects in zip(truth.ids, truth.objects, strict=True):
        boxes += _judged_photo(found.get(name, Detections.empty()), objects)
    return boxes


def _judged_photo(found: Detections, objects: Objects) -> list[JudgedBox]:
    ignored = (objects.difficult | objects.crowd).tolist()
    tags, free = set(objects.labels.tolist()), {at for at, skip in enumerate(ignored) if not skip}
    overlaps, labels, boxes = same_class_iou(found, objects).tolist(), found.labels.tolist(), []
    for row in sorted(range(len(found)), key=lambda at: -float(found.scores[at])):
        near = [at for at, overlap in enumerate(overlaps[row]) if overlap >= MATCH_IOU]
        best = max((at for at in near if at in free), key=lambda at: overlaps[row][at], default=None)
        free.discard(-1 if best is None else best)
        is_ignored = best is None and any(ignored[at] for at in near)
        judgement: Judgement = "right" if best is not None else "ignored" if is_ignored else "wrong"
        boxes.append(JudgedBox(float(found.scores[row]), judgement, labels[row] in tags))
    return boxes


def best_score(boxes: Sequence[JudgedBox], objects: int) -> float:
    """The score with the best F1 among those that occur, the highest if several are equal; 1 without boxes."""
    best, chosen, right, counted = -1.0, 1.0, 0, 0
    ranked = sorted(boxes, key=lambda box: -box.score)
    for score, group in itertools.groupby(ranked, key=lambda box: box.score):
        own = [box.judgement for box in group]
        right, counted = right + own.count("right"), counted + len(own) - own.count("ignored")
        f1 = 2 * right / (counted + objects) if counted + objects else 0.0
        if f1 > best:
            best, chosen = f1, score
    return chosen


def figures(found: Mapping[str, Detections], truth: Truth) -> dict[str, float | int | None]:
    """Precision, recall, F1 and the share of tags without any box."""
    rows, objects = [box.judgement for box in judged(found, truth)], count_objects(truth)
    right, counted = rows.count("right"), len(rows) - rows.count("ignored")
    pairs = [
        (name, tag) for name, own in zip(truth.ids, truth.objects, strict=True) for tag in set(own.labels.tolist())
    ]
    boxed = {(name, tag) for name, own in found.items() for tag in own.labels.tolist()}
    return {
        "precision": right / counted if counted else None,
        "recall": right / objects if objects else None,
        "F1": 2 * right / (counted + objects) if counted + objects else None,
        "empty tags": sum(pair not in boxed for pair in pairs) / len(pairs) if pairs else None,
        "boxes": len(rows),
    }


def count_objects(truth: Truth) -> int:
    """The objects that count: neither difficult nor crowds."""
    return sum(int((~(own.difficult | own.crowd)).sum()) for own in truth.objects)


def above(found: Mapping[str, Detections], score: float, truth: Truth, *, tagged_only: bool) -> dict[str, Detections]:
    """The boxes of at least a score, of all classes or of those of the photo's tags."""
    kept = {}
    for name, objects in zip(truth.ids, truth.objects, strict=True):
        own = found.get(name, Detections.empty())
        wanted = own.scores >= score
        if tagged_only:
            wanted &= torch.isin(own.labels, objects.labels)
        kept[name] = own[wanted.nonzero().flatten()]
    return kept


# ---------------------------------------------------------------- the table


def measure(
    run: Path, sources: Mapping[str, DataSource], work: Path, variants: Sequence[str], progress: Progress
) -> list[dict[str, object]]:
    """The rows of a run; the first split is the one on which scores are chosen."""
    rows: list[dict[str, object]] = []
    scores: dict[bool, float] = {}
    for split, source in sources.items():
        place, truth = Place(run, source, work / split, progress), datasets.read_truth(source)
        found = place.detections(truth)
        for tagged_only in (False, True):
            if tagged_only not in scores:
                boxes = [box for box in judged(found, truth) if box.is_tagged or not tagged_only]
                scores[tagged_only] = best_score(boxes, count_objects(truth))
            own = figures(above(found, scores[tagged_only], truth, tagged_only=tagged_only), truth)
            name = "detect, tagged classes" if tagged_only else "detect"
            rows.append({"row": name, "split": split, "score": scores[tagged_only], **own})
        for variant in variants:
            name = "label" if variant == "fixed" else f"label, {variant}"
            rows.append({"row": name, "split": split, **figures(place.labels(variant), truth)})
    return [{"run": run.name, **row} for row in rows]


def markdown(rows: Sequence[Mapping[str, object]]) -> str:
    """Means over the runs, in per cent, with the range if there are several."""
    columns = ("precision", "recall", "F1", "empty tags")
    lines = ["| split | row | " + " | ".join(columns) + " |", "|---|---|" + "---:|" * len(columns)]
    for split, name in dict.fromkeys((str(row["split"]), str(row["row"])) for row in rows):
        own = [row for row in rows if (row["split"], row["row"]) == (split, name)]
        lines.append(f"| {split} | {name} | " + " | ".join(_spread([row[c] for row in own]) for c in columns) + " |")
    return "\n".join(lines)


def _spread(values: Sequence[object]) -> str:
    known = [100 * value for value in values if isinstance(value, int | float)]
    if not known:
        return "-"
    mean = f"{sum(known) / len(known):.1f}"
    return mean if len(known) == 1 else f"{mean} ({min(known):.1f} to {max(known):.1f})"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="VOC folder, or another dataset with boxes and named splits")
    parser.add_argument("--runs", type=Path, nargs="+", required=True, help="runs that were trained on the split")
    parser.add_argument("--split", default="train", help="training photos, on which the score of detect is chosen")
    parser.add_argument("--test-split", help="photos on which both are judged, too")
    parser.add_argument("--variants", nargs="*", default=["fixed", "auto"], choices=VARIANTS)
    parser.add_argument("--work", type=Path, default=Path("runs/label-rule"))
    parser.add_argument("--out", type=Path, help="JSON to write")
    args = parser.parse_args(argv)
    splits = [args.split, *([args.test_split] if args.test_split else [])]
    found: list[dict[str, object]] = []
    for number, run in enumerate(args.runs):
        classes = runs.open_run(run).classes
        sources = {split: DataSource(path=args.data, split=split, classes=classes) for split in splits}
        work = args.work / f"{number}-{run.name}"
        rows = measure(run, sources, work, args.variants, TerminalProgress())
        found += rows
        page = {"data": args.data.name, "splits": splits, "versions": runs.versions(), "rows": found}
        if args.out:
            io.write_json(args.out, page)
    print(markdown(found))


if __name__ == "__main__":
    main()
