"""Does training wait for its batches? Images/s of the loader and of the training step, on a VOC folder.

    python benchmarks/loader.py --data VOC2007 --split train --out docs/results/loader.json

Two batch sources for the od-wscl recipe on lite0, at the paper's six scales and batch size 8, with random
proposals: pixels (the trunk runs in every step) and cached RoI maps (read from disk). Per source and number of workers:

    loader    images/s of the loader alone
    step      images/s of the training step alone, with batches in memory
    waiting   share of training time spent waiting for a batch
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Float32
from torch import Tensor

from tag2box.annotations import BoxSource, Photo, TaggedPhotos
from tag2box.cli.training_data import build_regularizer
from tag2box.formats.datasets import class_names, read_tagged
from tag2box.formats.listing import DataSource
from tag2box.io import write_json
from tag2box.models.rng import StepRng
from tag2box.progress import TerminalProgress
from tag2box.recipes import Config, od_wscl
from tag2box.runs import build_detector, machine, versions
from tag2box.training.batches import BatchSource, FeatureBatches, ImageBatches
from tag2box.training.feature_cache import FeatureCache, RoiMaps
from tag2box.training.step import Step
from tag2box.types import Batch


@dataclass(frozen=True)
class RandomBoxes(BoxSource):
    """A fixed number of random boxes per photo; their content does not affect the time."""

    photos: dict[str, Photo]
    count: int

    def boxes(self, photo_id: str, /) -> Float32[Tensor, "P 4"]:
        """The same boxes at every call."""
        photo = self.photos[photo_id]
        generator = torch.Generator().manual_seed(photo.width * 10_007 + photo.height)
        side = torch.tensor([photo.width, photo.height], dtype=torch.float32)
        extent = side * (0.1 + 0.8 * torch.rand(self.count, 2, generator=generator))
        corner = (side - extent) * torch.rand(self.count, 2, generator=generator)
        return torch.cat([corner, corner + extent], dim=1)

    def scores(self, photo_id: str, /) -> Float32[Tensor, " P"]:
        """The same score for all."""
        return torch.ones(self.count)


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    source: str
    workers: int
    loader: float
    step: float
    waiting: float


class Trainer:
    """The training step with its optimizer, without event log and checkpoints."""

    def __init__(self, config: Config, photos: TaggedPhotos) -> None:
        self.detector = build_detector(config, len(photos.classes), pretrained=True)
        regularizer = build_regularizer(config, self.detector)
        self._step = Step(self.detector, config.criterion, regularizer, config.augment)
        self._optimizer = config.plan.optimizer.build(self.detector)
        self.detector.train()

    def __call__(self, batch: Batch) -> None:
        """Forward, backward, update."""
        self._step(batch, StepRng(0, 0))
        self._optimizer.step()


def loader_speed(source: BatchSource, batch: int, iterations: int) -> float:
    """Images/s of the loader alone, without its start."""
    with source.batches(range(iterations + 1)) as batches:
        next(batches)
        began = time.perf_counter()
        for _ in batches:
            pass
    return batch * iterations / (time.perf_counter() - began)


def step_speed(trainer: Trainer, source: BatchSource, batch: int, iterations: int) -> float:
    """Images/s of the step alone, on batches in memory."""
    trainer(source.batch(0))
    spent = 0.0
    for iteration in range(1, iterations + 1):
        ready = source.batch(iteration)
        began = time.perf_counter()
        trainer(ready)
        spent += time.perf_counter() - began
    return batch * iterations / spent


def waiting_share(trainer: Trainer, source: BatchSource, iterations: int) -> float:
    """Share of training time spent waiting for a batch, without the first."""
    waited, began = 0.0, 0.0
    with source.batches(range(iterations + 1)) as batches:
        for iteration in range(iterations + 1):
            requested = time.perf_counter()
            batch = next(batches)
            if iteration == 0:
                began = time.perf_counter()
            else:
                waited += time.perf_counter() - requested
            trainer(batch)
    return waited / (time.perf_counter() - began)


def measure(name: str, trainer: Trainer, source: ImageBatches | FeatureBatches, args: argparse.Namespace) -> list[Row]:
    """All rows of one batch source."""
    demand = step_speed(trainer, source, source.loader.batch_size, args.iterations)
    rows = []
    for workers in args.workers:
        with_workers = replace(source, loader=replace(source.loader, workers=workers))
        speed = loader_speed(with_workers, source.loader.batch_size, args.load_iterations)
        rows.append(Row(name, workers, speed, demand, waiting_share(trainer, with_workers, args.iterations)))
        print(markdown(rows[-1:], head=len(rows) == 1 and name == "pixels"), flush=True)
    return rows


def markdown(rows: Sequence[Row], *, head: bool = True) -> str:
    """The table."""
    lines = ["| source | workers | loader, images/s | step, images/s | waiting |", "|---|---|---|---|---|"] * head
    for r in rows:
        lines.append(f"| {r.source} | {r.workers} | {r.loader:.2f} | {r.step:.2f} | {100 * r.waiting:.1f} % |")
    return "\n".join(lines)


def read_few(args: argparse.Namespace) -> TaggedPhotos:
    """The first photos of the dataset."""
    classes = class_names(str(args.classes)) if args.classes else None
    found = read_tagged(DataSource(path=args.data, split=args.split, classes=classes))
    few = slice(args.photos)
    unsure = None if found.unsure is None else found.unsure[few]
    return TaggedPhotos(found.classes, found.photos[few], found.tags[few], unsure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="VOC folder, or any other dataset")
    parser.add_argument("--split", default=None, help="image list, such as train")
    parser.add_argument("--classes", default=None, help="names, or a text file of them")
    parser.add_argument("--photos", type=int, default=64, help="number of photos, from the first")
    parser.add_argument("--boxes", type=int, default=640, help="proposals per photo")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--iterations", type=int, default=6, help="training steps per figure")
    parser.add_argument("--load-iterations", type=int, default=20, help="batches per figure of the loader alone")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--map-scales", type=int, nargs="+", default=[480, 688], help="scales of the cached RoI maps")
    parser.add_argument("--out", type=Path, default=Path("docs/results/loader.json"))
    args = parser.parse_args()

    photos = read_few(args)
    store = RandomBoxes({photo.id: photo for photo in photos.photos}, args.boxes)
    config = od_wscl()
    loader = replace(config.loader, batch_size=args.batch)
    trainer = Trainer(config, photos)
    backbone = trainer.detector.backbone
    pixels = ImageBatches(photos, store, loader, 0, backbone.preprocess.neutral())
    rows = measure("pixels", trainer, pixels, args)
    with tempfile.TemporaryDirectory() as folder:
        cached = FeatureCache(RoiMaps(backbone, photos.photos, store), Path(folder))
        few = replace(loader, resize=replace(loader.resize, scales=tuple(args.map_scales), flip=0.0))
        cached.build(few.resize.views(), TerminalProgress())
        rows += measure("cached RoI maps", trainer, FeatureBatches(photos, store, few, 0, cached), args)
        cached.close()
    figures = [asdict(row) for row in rows]
    settings = {"photos": len(photos), "boxes": args.boxes, "batch": args.batch, "map_scales": args.map_scales}
    write_json(args.out, {"settings": settings, "machine": machine(), "versions": versions(), "rows": figures})


if __name__ == "__main__":
    main()
