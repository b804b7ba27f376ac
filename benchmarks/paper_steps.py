"""The paper's recipes at full size: two training steps of each on generated photos, and the cost of a whole run.

    python benchmarks/paper_steps.py                     # hours; resumable, rerun the same command
    python benchmarks/paper_steps.py --photos 1          # batch size 1 instead of 8
    python benchmarks/paper_steps.py --only voc07-ss-vgg16
    python benchmarks/paper_steps.py --small             # tiny sizes; writes nothing to docs/

Weights are random and photos are generated; the rest is the recipe's: batch size, 2,000 proposals per photo, optimizer,
criterion; memory is ``exact``. The first step is at the recipe's smallest scale (short side of 480 pixels), the second
at its largest (1,200). The cost of a whole run is interpolated linearly in pixels, at the mean padded size of its
batches of 8. Recipes that differ only in the source of proposals, the number of photos or the length do the same work
per step, which is measured once for all of them. Each measurement runs in a fresh process; its peak is Linux's
high-water mark, which includes weights, gradients, momentum, pixels and libraries.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from criterion import HEIGHT, WIDTH, proposals_around, some_boxes
from measuring import Row, if_it_fits, in_words, machine, set_threads, status_mb
from tag2box.annotations import Photo, TaggedPhotos
from tag2box.cli.training_data import build_regularizer
from tag2box.images import Resize, view_size
from tag2box.io import read_json, write_json
from tag2box.models.backbone import Backbone
from tag2box.models.detector import Detector
from tag2box.models.resnet_ws import ResNetWs, ResNetWsBackbone
from tag2box.models.rng import StepRng
from tag2box.models.vgg16 import Vgg16, Vgg16Backbone
from tag2box.paper_runs import PAPER_DATASETS, PAPER_RUNS
from tag2box.proposals.base import Candidates
from tag2box.proposals.store import ProposalStore, write_store
from tag2box.recipes import RECIPES, Config
from tag2box.training.batches import ImageBatches, Loader
from tag2box.training.optim import set_lr
from tag2box.training.step import Step
from vgg_world import TRAINED, VIEWS

DOCS = Path(__file__).parents[1] / "docs" / "results" / "paper-steps.json"
STEPS = 2
PHOTO = {"voc": (375, 500), "coco": (480, 640)}  # most frequent height and width
UPRIGHT = 4  # every fourth photo is in portrait format


@dataclass(frozen=True)
class Sizes:
    """Size of a step."""

    batch: int = 8
    proposals: int = 2000
    small: bool = False


FULL, SMALL = Sizes(), Sizes(batch=2, proposals=24, small=True)


def family(name: str) -> str:
    """Group of recipes whose steps do the same work: a backbone on VOC, or on COCO."""
    run = PAPER_RUNS[name]
    return f"{run.dataset[:-2]}-{run.backbone}"


def sized(config: Config, sizes: Sizes) -> Config:
    """The recipe at these sizes; a trial uses tiny photos."""
    resize = Resize(scales=(64, 80), long_max=120) if sizes.small else config.loader.resize
    return replace(config, loader=replace(config.loader, batch_size=sizes.batch, resize=resize, workers=0))


def at_scale(loader: Loader, iteration: int) -> Loader:
    """Loader of one step: the first at the smallest scale, the second at the largest."""
    scale = (min, max)[iteration](loader.resize.scales)
    return replace(loader, resize=replace(loader.resize, scales=(scale,)))


def photo_size(name: str, number: int) -> tuple[int, int]:
    """Height and width of a generated photo."""
    wide = PHOTO[PAPER_RUNS[name].dataset[:-2]]
    return wide[::-1] if number % UPRIGHT == UPRIGHT - 1 else wide


def mean_padded_pixels(name: str, loader: Loader, batches: int = 1000) -> float:
    """Mean padded size of a batch: scales are drawn per photo, the largest sides count."""
    areas = []
    for first in range(0, batches * loader.batch_size, loader.batch_size):
        numbers = np.random.default_rng(first).permutation(UPRIGHT * loader.batch_size)[: loader.batch_size]
        sizes = [view_size(loader.resize.view(0, first, int(n)), photo_size(name, n)) for n in numbers]
        areas.append(max(h for h, _ in sizes) * max(w for _, w in sizes))
    return sum(areas) / len(areas)


def seconds_per_photo(row: Row, pixels: float) -> float:
    """Time per photo of a size, on the line through both steps."""
    (small, large), (fast, slow) = (h * w for h, w in row["padded"]), row["seconds"]
    return float((fast + (slow - fast) * (pixels - small) / (large - small)) / row["batch"])


# ---------------------------------------------------------------- data


def make_photos(name: str, sizes: Sizes, folder: Path) -> tuple[TaggedPhotos, ProposalStore]:
    """Generated photos on disk with tags and proposals, as many as the steps use."""
    count = STEPS * sizes.batch
    photos = [_photo(folder, i, photo_size(name, i)) for i in range(count)]
    classes = PAPER_DATASETS[PAPER_RUNS[name].dataset].classes
    tags = torch.stack([_tags(classes, i) for i in range(count)])
    write_store(
        folder / "proposals", {"kind": "generated"}, photos, [_boxes(p, i, sizes) for i, p in enumerate(photos)]
    )
    tagged = TaggedPhotos(tuple(f"class{c}" for c in range(classes)), tuple(photos), tags)
    return tagged, ProposalStore.open(folder / "proposals")


def _photo(folder: Path, number: int, size: tuple[int, int]) -> Photo:
    height, width = size
    coarse = 255 * torch.rand(1, 3, height // 25, width // 25, generator=torch.Generator().manual_seed(number))
    pixels = functional.interpolate(coarse, (height, width), mode="bilinear")[0].permute(1, 2, 0).byte()
    path = folder / f"photo{number}.jpg"
    Image.fromarray(pixels.numpy()).save(path, quality=90)
    return Photo(path.stem, path, width, height)


def _tags(classes: int, number: int) -> Tensor:
    present = torch.randperm(classes, generator=torch.Generator().manual_seed(number))[: 1 + number % 3]
    return torch.zeros(classes, dtype=torch.bool).index_fill(0, present, True)


def _boxes(photo: Photo, number: int, sizes: Sizes) -> Candidates:
    g = torch.Generator().manual_seed(1000 + number)
    boxes = proposals_around(some_boxes(4, g), sizes.proposals, g)
    side = torch.tensor([photo.width, photo.height], dtype=torch.float32).repeat(2)
    scaled = boxes * side / torch.tensor([WIDTH, HEIGHT]).repeat(2)
    return Candidates.unranked(torch.minimum(scaled.clamp(min=0), side))


# ---------------------------------------------------------------- network and steps


def make_backbone(settings: object, sizes: Sizes) -> Backbone:
    """The recipe's backbone with random weights; with few channels in a trial."""
    if isinstance(settings, ResNetWs):
        return ResNetWsBackbone(settings, width=8, neck=(16, 16)) if sizes.small else settings.build(pretrained=False)
    assert isinstance(settings, Vgg16)
    backbone = Vgg16Backbone(settings, vector_size=16) if sizes.small else settings.build(pretrained=False)
    for layer in backbone.features:
        if isinstance(layer, nn.Conv2d):  # torch's default init vanishes over 13 layers
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    return backbone


@dataclass(frozen=True)
class Measured:
    """Figures of two iterations."""

    seconds: list[float]
    losses: list[float]
    padded: list[list[int]]  # height and width of each batch


def iterate(config: Config, detector: Detector, photos: TaggedPhotos, store: ProposalStore) -> Measured:
    """Two iterations of the training loop, without the time to read photos."""
    neutral = detector.backbone.preprocess.neutral()
    step = Step(detector, config.criterion, build_regularizer(config, detector), config.augment, "exact")
    plan, optimizer = config.plan, config.plan.optimizer.build(detector)
    done = Measured([], [], [])
    for iteration in range(STEPS):
        source = ImageBatches(photos, store, at_scale(config.loader, iteration), plan.seed, neutral)
        batch = source.batch(iteration)
        assert batch.images is not None
        begin = time.perf_counter()
        set_lr(optimizer, plan.optimizer.lr * plan.schedule.factor(iteration, plan.iterations))
        outcome = step(batch, StepRng(plan.seed, iteration))
        optimizer.step()
        done.seconds.append(round(time.perf_counter() - begin, 2))
        done.losses.append(round(outcome.total.item(), 4))
        done.padded.append(list(batch.images.shape[-2:]))
    assert all(map(math.isfinite, done.losses)), "a loss is not a number"
    return done


def case(name: str, sizes: Sizes, threads: int) -> Row:
    """Two iterations of a recipe, in a fresh process."""
    set_threads(threads)
    config = sized(RECIPES[name](), sizes)
    torch.manual_seed(config.plan.seed)
    classes = PAPER_DATASETS[PAPER_RUNS[name].dataset].classes
    detector = Detector(make_backbone(config.backbone, sizes), classes, config.heads).train()
    with tempfile.TemporaryDirectory() as folder:
        done = iterate(config, detector, *make_photos(name, sizes, Path(folder)))
    return {
        "family": family(name),
        "batch": sizes.batch,
        "proposals": sizes.proposals,
        "parameters": sum(p.numel() for p in detector.parameters()),
        **vars(done),
        "peak_mb": round(status_mb("VmHWM"), 1),
        "fits": True,
    }


def expected_seconds(name: str, sizes: Sizes, gflops: float) -> float:
    """Estimated time of both steps from their FLOPs, at two thirds of the machine's GEMM speed."""
    side = 80 if sizes.small else 1400
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        backbone = make_backbone(RECIPES[name]().backbone, sizes)
        backbone.trunk(torch.empty(1, 3, side, side))
    trunk = counter.get_total_flops()
    linear = sum(layer.weight.numel() for layer in backbone.modules() if isinstance(layer, nn.Linear))
    neck = (2 + VIEWS) * 2 * sizes.proposals * linear
    work = 2 * (trunk + neck) + 2 * (TRAINED * trunk + neck)
    return float(STEPS * sizes.batch * work / (0.66e9 * gflops))


# ---------------------------------------------------------------- all recipes


def whole_runs(rows: Sequence[Row]) -> list[Row]:
    """Estimated days of a full run of every recipe, from the steps of its family with the largest batch."""
    found = {row["family"]: row for row in sorted(rows, key=itemgetter("batch")) if row["fits"]}
    runs = []
    for name in PAPER_RUNS:
        config, row = RECIPES[name](), found.get(family(name))
        days = None
        if row is not None:
            photo = seconds_per_photo(row, mean_padded_pixels(name, config.loader))
            days = round(config.plan.iterations * config.loader.batch_size * photo / 86_400, 1)
        runs.append({"recipe": name, "family": family(name), "iterations": config.plan.iterations, "days": days})
    return runs


def earlier_rows(out: Path, sizes: Sizes, threads: int) -> list[Row]:
    """Steps of earlier calls with the same numbers of proposals and threads."""
    known: Any = read_json(out, "steps of the paper's recipes") if out.exists() else {}
    same = known.get("proposals") == sizes.proposals and known.get("machine", {}).get("threads") == threads
    return [row for row in known.get("steps", []) if row["fits"]] if same else []


def run(wanted: Sequence[str], sizes: Sizes, threads: int, out: Path) -> None:
    """Measure each family of the wanted recipes once; write the file after each."""
    facts, rows = machine(), earlier_rows(out, sizes, threads)
    first = {family(name): name for name in reversed(wanted)}
    done = {row["family"] for row in rows if row["batch"] == sizes.batch}
    todo = {key: name for key, name in reversed(first.items()) if key not in done}
    guess = {key: expected_seconds(name, sizes, facts["gemm_gflops"]) for key, name in todo.items()}
    for turn, (key, name) in enumerate(todo.items()):
        left = sum(list(guess.values())[turn:])
        print(f"[{turn + 1}/{len(todo)}] {key}: about {in_words(guess[key])}; remaining: {in_words(left)}", flush=True)
        row = if_it_fits(case, name, sizes, threads) or {"family": key, "batch": sizes.batch, "fits": False}
        rows.append(row)
        result = f"{row['seconds']} s, {row['peak_mb']:,.0f} MB" if row["fits"] else "out of memory"
        print(f"{key}: {result}", flush=True)
        write_json(out, {"machine": facts, "proposals": sizes.proposals, "steps": rows, "runs": whole_runs(rows)})


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=list(PAPER_RUNS), metavar="RECIPE", help="may be repeated")
    parser.add_argument("--photos", type=int, help="batch size; default: 8")
    parser.add_argument("--threads", type=int, default=0, help="0: torch's default")
    parser.add_argument("--small", action="store_true", help="tiny sizes, a smoke test")
    parser.add_argument("--out", type=Path, help="default: docs/results/paper-steps.json")
    args = parser.parse_args(argv)
    sizes = SMALL if args.small else FULL
    sizes = replace(sizes, batch=args.photos or sizes.batch)
    out = args.out or (Path("runs/paper-steps-small.json") if args.small else DOCS)
    run(args.only or list(PAPER_RUNS), sizes, set_threads(args.threads), out)


if __name__ == "__main__":
    main()
