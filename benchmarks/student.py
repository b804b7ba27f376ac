"""What a student makes of a teacher's labels, and what each treatment of their noise adds.

    tag2box label runs/teacher VOC --split train --out labels
    python benchmarks/student.py labels --data VOC --split train --test-split test --work runs/student-rows \
        --out docs/results/student.json
    python benchmarks/student.py VOC --data VOC --split train --rows "true boxes" --iterations 300 --seeds 0 \
        --work runs/student-hold-out

Rows, each on the one before unless it says otherwise: one box per tag; all labels of the rule, doubtful boxes being
background; weights by score; ignore regions; per-class thresholds and open tags; two rounds of half the iterations; and
true boxes, the ceiling. Further rows, named by ``--rows``, are the default with one change each: fainter boxes as
ignore regions, if the label set has them (``tag2box label --set rule.doubtful=0.05 --set rule.floor=0.01``), thresholds
per photo on all boxes of a tag (WeakSAM's), a tenth of the labels of a batch dropped by their loss, pasted boxes, no
mosaics, a second round of full length, which alone has more iterations, and FCOS's assignment of cells. A row and seed
is a run folder and a JSON file in ``--work``: what is interrupted resumes, what is there is not computed again. Without
``--test-split``, every fourth training photo is held out and tested on: for decisions that must not see test photos.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tag2box import runs, storage
from tag2box.annotations import Detections, Truth
from tag2box.cli.student import resume_student, train_student
from tag2box.formats.datasets import read_photos, read_tagged, read_truth
from tag2box.formats.export import read_labelled
from tag2box.formats.listing import DataSource, refuse
from tag2box.io import write_json
from tag2box.labels.label_set import LabelSet, is_label_set
from tag2box.labels.labelled import LabelBox, LabelledPhoto, from_truth
from tag2box.labels.rule import LabelRule
from tag2box.metrics.evaluation import evaluate_with_baselines
from tag2box.metrics.voc_ap import corloc
from tag2box.progress import TerminalProgress
from tag2box.student.student_data import Noise
from tag2box.student.student_training import StudentConfig
from tag2box.student.targets import Rounds
from tag2box.training.events import read_events

METRICS = ("voc07", "voc12", "corloc", "coco", "challenges")
HELD_OUT = 4
"""Of so many training photos, one is tested on."""
DEFAULT = Noise(doubtful=LabelRule().doubtful)
"""The default; of a label set that has fainter boxes, only those are doubtful that the default label rule keeps."""
TRUSTING = replace(DEFAULT, weights="none", threshold=0.0, ignore=False, open_tags=False)
WEIGHTED = replace(TRUSTING, weights="class")
IGNORING = replace(WEIGHTED, ignore=True)


@dataclass(frozen=True)
class Row:
    """Labels, and how a student treats them."""

    noise: Noise
    labels: Callable[[Data], LabelSet] = lambda data: data.labels
    rounds: int = 1
    shared: bool = True  # whether the rounds share the iterations of one
    overrides: tuple[str, ...] = ()

    def iterations(self, whole: int) -> int:
        """The iterations of a round."""
        return max(1, whole // self.rounds) if self.shared else whole


@dataclass(frozen=True)
class Data:
    """The labels of a teacher, the true boxes of the same photos, and the test photos."""

    labels: LabelSet
    train: DataSource
    test: DataSource
    tested: frozenset[str] | None = None  # of the test photos; None: all

    @classmethod
    def held_out(cls, labels: LabelSet, source: DataSource) -> Data:
        """Every fourth photo is tested on, the others are trained on."""
        photos = labels.content.photos
        rest = tuple(photo for place, photo in enumerate(photos) if place % HELD_OUT)
        kept = replace(labels, content=replace(labels.content, photos=rest))
        return cls(kept, source, source, frozenset(photo.id for photo in photos[::HELD_OUT]))

    def test_truth(self) -> Truth:
        """The true boxes of the test photos."""
        truth = read_truth(self.test)
        return truth if self.tested is None else truth.part([name in self.tested for name in truth.ids])

    def train_truth(self) -> Truth:
        """The true boxes of the photos that are trained on."""
        truth, names = read_truth(self.train), {photo.id for photo in self.labels.content.photos}
        return truth.part([name in names for name in truth.ids])

    def best_boxes(self) -> LabelSet:
        """One box per tag."""
        photos = tuple(_best_of_each_tag(photo) for photo in self.labels.content.photos)
        return replace(self.labels, content=replace(self.labels.content, photos=photos))

    def all_boxes(self) -> LabelSet:
        """All boxes of tags as labels, for a threshold of the student's."""
        photos = tuple(replace(photo, boxes=_without_doubt(photo)) for photo in self.labels.content.photos)
        return replace(self.labels, content=replace(self.labels.content, photos=photos))

    def true_boxes(self) -> LabelSet:
        """The true boxes of the same photos; difficult ones are ignore regions."""
        content = self.labels.content
        whole = from_truth(read_truth(self.train), read_tagged(self.train), content.root)
        known = {photo.file: photo for photo in whole.photos}
        photos = tuple(
            replace(known[photo.file], id=photo.id, stamp=storage.FileStamp.of(content.path(photo)))
            for photo in content.photos
        )
        return replace(self.labels, content=replace(whole, classes=content.classes, photos=photos))


def _best_of_each_tag(photo: LabelledPhoto) -> LabelledPhoto:
    best = {box.name: box for box in sorted(photo.labels, key=lambda own: own.score or 0.0)}
    return replace(photo, boxes=tuple(best.values()))


def _without_doubt(photo: LabelledPhoto) -> tuple[LabelBox, ...]:
    return tuple(replace(box, is_doubtful=box.is_doubtful and box.why != "doubtful") for box in photo.boxes)


LADDER = {
    "one box per tag": Row(TRUSTING, Data.best_boxes),
    "label rule": Row(TRUSTING),
    "weights": Row(WEIGHTED),
    "ignore regions": Row(IGNORING),
    "thresholds, open tags": Row(DEFAULT),
    "second round": Row(DEFAULT, rounds=2),
    "true boxes": Row(DEFAULT, Data.true_boxes),
}
ROWS = LADDER | {
    "faint boxes ignored": Row(Noise()),
    "thresholds per photo": Row(replace(DEFAULT, threshold_of="photo"), Data.all_boxes),
    "worst dropped": Row(replace(DEFAULT, drop=0.1)),
    "pasted boxes": Row(DEFAULT, overrides=("augmentation.copy_paste=0.5",)),
    "no mosaics": Row(DEFAULT, overrides=("augmentation.mosaic=0",)),
    "two full rounds": Row(DEFAULT, rounds=2, shared=False),
    "centre cells": Row(DEFAULT, overrides=("plan.assignment=centre",)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("labels", type=Path, help="label set of the teacher; for true boxes alone, the dataset itself")
    parser.add_argument("--data", type=Path, required=True, help="dataset with the true boxes of its photos")
    parser.add_argument("--split", default="train")
    parser.add_argument("--test-split")
    parser.add_argument("--classes", type=Path, help="file of class names, if LABELS is no label set")
    parser.add_argument("--rows", default=",".join(LADDER), help="comma-separated, of: " + ", ".join(ROWS))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--iterations", type=int, default=StudentConfig().plan.iterations)
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="a.b=c")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    classes = tuple(args.classes.read_text().split()) if args.classes else None
    labels = read_labels(args.labels, args.split, classes)
    train, test = (
        DataSource(path=args.data, split=split, classes=labels.classes)
        for split in (args.split, args.test_split or args.split)
    )
    data = Data(labels, train, test) if args.test_split else Data.held_out(labels, train)
    names = [name for name in ROWS if name in args.rows]
    seeds = [int(seed) for seed in args.seeds.split(",")]
    cells = measure(data, names, seeds, args.work, args.iterations, args.overrides)
    page = {"iterations": args.iterations, "photos": len(labels.content), "machine": runs.machine(), "cells": cells}
    print(json.dumps(page, indent=1))
    if args.out:
        write_json(args.out, page)


def read_labels(place: Path, split: str, classes: tuple[str, ...] | None) -> LabelSet:
    """A label set, or the boxes of another dataset as one."""
    if is_label_set(place):
        return LabelSet.open(place)
    return LabelSet(read_labelled(DataSource(path=place, split=split, classes=classes), refuse))


def measure(
    data: Data, names: Sequence[str], seeds: Sequence[int], work: Path, iterations: int, overrides: Sequence[str] = ()
) -> list[dict[str, object]]:
    """The figures of each row and seed; those that are in ``work`` are read."""
    cells = []
    for seed in seeds:
        for name in names:
            place = f"{storage.safe_file_name(name.replace(' ', '-'))}-{iterations}-{seed}"
            file = work / f"{place}.json"
            if not file.exists():
                figures = _cell(data, ROWS[name], seed, work / place, iterations, overrides)
                write_json(file, {"row": name, "seed": seed, **figures})
            cells.append(json.loads(file.read_text()))
    return cells


def _cell(
    data: Data, row: Row, seed: int, folder: Path, iterations: int, overrides: Sequence[str]
) -> dict[str, object]:
    labels = folder / "labels"
    if not is_label_set(labels):
        row.labels(data).write(labels)
    how = [*row.overrides, *overrides, f"plan.seed={seed}", f"plan.iterations={row.iterations(iterations)}"]
    config = StudentConfig(noise=row.noise, rounds=Rounds(count=row.rounds, agreement=1.0))
    if runs.has_run(folder / "run"):
        resume_student(folder / "run", progress=TerminalProgress())
    else:
        train_student(labels, folder / "run", config=config, overrides=how, progress=TerminalProgress())
    end = list(read_events(folder / "run"))[-1]
    found = {
        **evaluated(folder / "run", data.test, data.test_truth()),
        "relabelled": relabelled_corloc(folder / "run", data.train, data.train_truth()),
    }
    return {**found, **_costs(end)}


def _costs(end: dict[str, object]) -> dict[str, object]:
    seconds, iteration = end["seconds"], end["iteration"]
    assert isinstance(seconds, float) and isinstance(iteration, int)
    return {"iterations": iteration, "seconds": round(seconds), "peak_memory_mb": end["peak_memory_mb"]}


def evaluated(run: Path, test: DataSource, truth: Truth) -> dict[str, object]:
    """All metrics on the test photos, also of the trivial baselines, and photos per second of processor time."""
    start = time.process_time()
    found = _detected(run, test, truth)
    seconds = time.process_time() - start
    result = evaluate_with_baselines(truth, found, METRICS).to_json()
    return {**result, "photos_per_cpu_second": round(len(truth) / seconds, 1)}


def relabelled_corloc(run: Path, train: DataSource, truth: Truth) -> float | None:
    """CorLoc of the student's own best boxes on the photos it was trained on."""
    return corloc(truth, _detected(run, train, truth)).mean


def _detected(run: Path, source: DataSource, truth: Truth) -> dict[str, Detections]:
    trained = runs.open_run(run)
    assert isinstance(trained, runs.StudentRun)
    photos = {photo.id: photo for photo in read_photos(source)}
    return trained.detect([photos[name] for name in truth.ids])


if __name__ == "__main__":
    main()
