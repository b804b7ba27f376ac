"""What do reviewed boxes add to tags? A simulated reviewer, with the true boxes as oracle, on a VOC folder.

    python benchmarks/oracle_reviewer.py VOC2007 --train train --test test --out runs/oracle
    python benchmarks/oracle_reviewer.py VOC2007 --seeds 0 1 2 --shares 5 10 20 --orders random queue

Per seed: a run is trained from tags, and labels its own training photos. The reviewer then gives the true boxes of a
share of these photos, drawn at random or from the queue of the review (doubtful labels first), and a second run starts
from the first, with boxes and tags. Rows:

    tags             the first run
    tags, longer     the second run without any box: what longer training alone adds
    random 10 %      the second run, with the boxes of 10 % of the photos; likewise queue
    all boxes        the second run, with the boxes of all photos

All are evaluated on the test photos (mAP50 of VOC 2012), beside the best trivial baseline. CorLoc is that of the
training photos that were not reviewed, so each row has it on other photos; a queue that takes the hard ones leaves the
easy ones. It is therefore printed with two figures of the same photos: that of "tags, longer", and that of a perfect
choice among the proposals, above which no run can come unless its regression moves boxes. If the latter is 0, no
proposal has an IoU of 0.5 with an object, and so has no run, whatever it learned: with few or small photos look there
first. Resumable: rerun the same command; a finished row is a JSON file in OUT/seedN/rows. Proposals and features are
shared by all rows. OUT/oracle.json has all figures.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench_parts import provenance
from tag2box import io, recipes, runs, settings
from tag2box.annotations import Photo
from tag2box.cli import evaluate, train
from tag2box.cli.label import label
from tag2box.formats import coco_boxes, datasets, listing
from tag2box.labels.label_set import LabelSet, is_label_set
from tag2box.labels.labelled import LabelledPhoto
from tag2box.metrics import voc_ap
from tag2box.progress import Progress, TerminalProgress, silent
from tag2box.training import checkpoint

QUEUE = "tag2box.labels.review_order"
ORDERS = ("random", "queue")
CORLOC_COLUMNS = ("CorLoc of the others", "CorLoc of tags, longer", "CorLoc of a perfect choice")


@dataclass(frozen=True)
class Row:
    """A row of the table: which photos are reviewed, and whether there is a second run at all."""

    name: str
    order: str = "random"
    share: float = 0.0
    is_first: bool = False

    @property
    def slug(self) -> str:
        """Its name as a file name."""
        return self.name.replace(" %", "").replace(",", "").replace(" ", "-")


@dataclass(frozen=True)
class Oracle:
    """The dataset with its truth, and the settings that all runs share."""

    config: recipes.Config
    test: evaluate.EvalSet
    train: evaluate.EvalSet
    out: Path
    progress: Progress = silent
    with_corloc: bool = True

    def home(self, seed: int) -> Path:
        """The folder of a seed."""
        return self.out / f"seed{seed}"

    def labels(self, seed: int) -> LabelSet:
        """The labels that the first run gives to its training photos."""
        folder = self.home(seed) / "labels"
        if not is_label_set(folder):
            label(
                self.first(seed),
                self.config.data.source(),
                folder,
                proposals=self.train.proposals,
                progress=self.progress,
            )
        return LabelSet.open(folder)

    def first(self, seed: int) -> Path:
        """The run that is trained from tags alone."""
        folder = self.home(seed) / "tags"
        self._train(replace(self.config, plan=replace(self.config.plan, seed=seed)), folder)
        return folder

    def second(self, seed: int, row: Row, reviewed: Sequence[str]) -> Path:
        """The run that starts from the first one, with the true boxes of some photos."""
        folder = self.home(seed) / row.slug
        data = self.config.data
        if reviewed:
            file = self.home(seed) / "reviewed" / f"{row.slug}.json"
            io.make_folder(file.parent)
            self._write_boxes(file, set(reviewed))
            data = replace(data, boxes=file)
        plan = replace(self.config.plan, seed=seed)
        self._train(replace(self.config, data=data, plan=plan, warm_start=self.first(seed)), folder)
        return folder

    def _train(self, config: recipes.Config, folder: Path) -> None:
        if not runs.has_run(folder):
            train.train(config, folder, progress=self.progress)
            return
        if runs.read_config(folder) != runs.with_paths(config, folder):
            raise SystemExit(f"{folder}: holds a run with other settings; choose another --out, or remove it")
        is_begun = checkpoint.has_checkpoint(folder)
        if not is_begun or checkpoint.read_state(folder).iteration < config.plan.iterations:
            train.resume(folder, progress=self.progress)

    def _write_boxes(self, file: Path, reviewed: set[str]) -> None:
        """What the reviewer saves: all objects of the photos, difficult ones as ignore regions."""
        names = {photo.id: photo.path.name for photo in self.train.photos}
        truth = self.train.truth.part([name in reviewed for name in self.train.truth.ids])
        coco_boxes.write_coco_truth(file, truth, names)

    def chosen(self, seed: int, row: Row) -> list[str]:
        """The photos that are reviewed, in their order."""
        count = round(row.share * len(self.train.photos))
        return review_order(self.labels(seed), row.order, seed)[:count] if count else []

    def figures(self, seed: int, row: Row) -> dict[str, Any]:
        """A row of the table; measured once, then read."""
        cell = self.home(seed) / "rows" / f"{row.slug}.json"
        if cell.exists():
            found: dict[str, Any] = io.read_json(cell, "a row of the table")
            return found
        began = time.monotonic()
        reviewed = self.chosen(seed, row)
        run = self.first(seed) if row.is_first else self.second(seed, row, reviewed)
        left = self.not_reviewed(set(reviewed)) if self.with_corloc else None
        evaluate.measure_run(run, test=self.test, train=left, progress=self.progress)
        figures = {
            **self._figures(run, row, reviewed),
            "CorLoc of tags, longer": self._corloc_of_tags(seed, left) if reviewed else None,
            "seed": seed,
            "seconds": round(time.monotonic() - began, 1),
        }
        io.make_folder(cell.parent)
        io.write_json(cell, figures)
        return figures

    def _figures(self, run: Path, row: Row, reviewed: Sequence[str]) -> dict[str, Any]:
        metrics = io.read_json(run / evaluate.METRICS_FILE, "the metrics of a run")
        test, known = metrics["test"], set(reviewed)
        objects = [
            own for name, own in zip(self.train.truth.ids, self.train.truth.objects, strict=True) if name in known
        ]
        trivial = {name: figures["voc12"]["mAP"] for name, figures in test["baselines"].items()}
        return {
            "row": row.name,
            "photos": len(reviewed),
            "boxes": sum(int((~(own.difficult | own.crowd)).sum()) for own in objects),
            "mAP50": test["voc12"]["mAP"],
            "mAP50, 11 points": test["voc07"]["mAP"],
            "per_class": test["voc12"]["per_class"],
            "trivial": trivial,
            "CorLoc of the others": metrics["train"]["corloc"]["mean"] if "train" in metrics else None,
            "CorLoc of a perfect choice": metrics["train"]["extents"]["oracle_corloc"] if "train" in metrics else None,
        }

    def _corloc_of_tags(self, seed: int, left: evaluate.EvalSet | None) -> float | None:
        """CorLoc of the second run without boxes, on the photos that a row left without review."""
        if left is None:
            return None
        run = self.second(seed, Row("tags, longer"), ())
        found, _ = evaluate.detect_with_extents(runs.open_run(run), left, self.progress)
        return voc_ap.corloc(left.truth, found).mean

    def not_reviewed(self, reviewed: set[str]) -> evaluate.EvalSet | None:
        """The training photos without review; None if all were reviewed."""
        wanted = [photo.id not in reviewed for photo in self.train.photos]
        if not any(wanted):
            return None
        photos = tuple(photo for photo, is_wanted in zip(self.train.photos, wanted, strict=True) if is_wanted)
        return evaluate.EvalSet(photos, self.train.truth.part(wanted), self.train.proposals)


# ---------------------------------------------------------------- the order of review


def review_order(labels: LabelSet, order: str, seed: int) -> list[str]:
    """The photos of a label set in the order in which they are reviewed."""
    photos = labels.content.photos
    ids = [photo.id for photo in photos]
    if order == "random":
        return [ids[i] for i in np.random.default_rng([seed, len(ids)]).permutation(len(ids))]
    if importlib.util.find_spec(QUEUE) is not None:
        queue = importlib.import_module(QUEUE)
        return [ids[i] for i in queue.review_order([queue.doubt_of(photo) for photo in photos], ids, "queue", seed)]
    return [photo.id for photo in sorted(photos, key=lambda photo: -doubt(photo))]


def doubt(photo: LabelledPhoto) -> float:
    """How doubtful the labels of a photo are: nested alternatives, close scores, ignore regions and bare tags."""
    nested = sum(box.alternative is not None for box in photo.labels)
    close = sum(1 - min(1.0, box.margin / box.score) for box in photo.labels if box.score and box.margin is not None)
    return nested + close + 0.5 * len(photo.doubtful) + len(photo.unboxed_tags)


# ---------------------------------------------------------------- the table


def rows_of(shares: Sequence[float], orders: Sequence[str]) -> tuple[Row, ...]:
    """The rows of the table; shares in per cent."""
    some = [Row(f"{order} {share:g} %", order, share / 100) for order in orders for share in shares]
    return Row("tags", is_first=True), Row("tags, longer"), *some, Row("all boxes", share=1.0)


def markdown(found: Sequence[dict[str, Any]]) -> str:
    """The table: means over the seeds, with the range if there are several."""
    heads = ("photos", "boxes", "mAP50", "best trivial", *CORLOC_COLUMNS)
    lines = ["| | " + " | ".join(heads) + " |", "|---|" + "---:|" * len(heads)]
    for name in dict.fromkeys(str(row["row"]) for row in found):
        own = [row for row in found if row["row"] == name]
        cells = [
            _spread([row["photos"] for row in own], 0, 1),
            _spread([row["boxes"] for row in own], 0, 1),
            _spread([row["mAP50"] for row in own], 1, 100),
            _spread([max(row["trivial"].values()) for row in own if row["trivial"]], 1, 100),
            *(_spread([row.get(column) for row in own], 1, 100) for column in CORLOC_COLUMNS),
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _spread(values: Sequence[float | None], digits: int, scale: float) -> str:
    known = [scale * value for value in values if value is not None]
    if not known:
        return "-"
    mean = f"{sum(known) / len(known):.{digits}f}"
    return mean if len(set(known)) == 1 else f"{mean} ({min(known):.{digits}f} to {max(known):.{digits}f})"


def open_oracle(args: argparse.Namespace, progress: Progress) -> Oracle:
    """The dataset and the settings that the options name."""
    classes = datasets.class_names(args.classes) if args.classes else None
    sources = [listing.DataSource(path=args.data, split=split, classes=classes) for split in (args.train, args.test)]
    places = [args.out / f"{split}-proposals" for split in ("train", "test")]
    sets = [evaluate.eval_set(source, place) for source, place in zip(sources, places, strict=True)]
    data = recipes.Data(tags=args.data, split=args.train, classes=sets[0].truth.classes, proposals=places[0])
    base = replace(recipes.RECIPES[args.recipe](), data=data, feature_cache=args.out / "maps")
    config = settings.load(recipes.Config, [], args.overrides, base=base)
    _check_apart(*(one.photos for one in sets))
    return Oracle(config, sets[1], sets[0], args.out, progress, not args.no_corloc)


def _check_apart(train_photos: Sequence[Photo], test_photos: Sequence[Photo]) -> None:
    both = {photo.id for photo in train_photos} & {photo.id for photo in test_photos}
    if both:
        raise SystemExit(f"{len(both)} photos are in both splits, such as {min(both)}; name others")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="VOC folder, with boxes")
    parser.add_argument("--train", default="train", help="split of the training photos")
    parser.add_argument("--test", default="test", help="split of the test photos")
    parser.add_argument("--classes", help="class names with commas, or a text file of them")
    parser.add_argument("--recipe", default="photos", choices=list(recipes.RECIPES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--shares", type=float, nargs="*", default=[5, 10, 20], help="of reviewed photos, in per cent")
    parser.add_argument("--orders", nargs="*", default=list(ORDERS), choices=ORDERS)
    parser.add_argument("--no-corloc", action="store_true", help="test photos alone: half of the time")
    parser.add_argument("--out", type=Path, default=Path("runs/oracle"))
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="a.b=c")
    args = parser.parse_args(argv)
    oracle, how = open_oracle(args, TerminalProgress()), provenance(__file__, argv)
    found = []
    for seed in args.seeds:
        for row in rows_of(args.shares, args.orders):
            found.append(oracle.figures(seed, row))
            about = {**how, "data": args.data.name, "recipe": args.recipe, "set": args.overrides}
            io.write_json(args.out / "oracle.json", {**about, "versions": runs.versions(), "rows": found})
    print(markdown(found))


if __name__ == "__main__":
    main()
