"""What checked and durable checkpoints cost: training speed with them, and with digests, checks and fsync left out.

    python benchmarks/checkpoint_cost.py --blocks 3 --out runs/checkpoint-cost.json

On generated scenes with the recipe for people's own photos (lite0, cached features). Blocks of iterations, and
checkpoints, are done by both in turn, in one process, so that both see the same machine. ``slower_percent`` compares 50
iterations and a checkpoint of both; ``slower_percent_of_parts`` adds up the extra time of the parts (a checkpoint, and
50 checks of gradients), which other work on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
from torch.nn.utils import get_total_norm

from measuring import Row, machine, spread_of
from tag2box import io, settings, storage
from tag2box.cli.train import prepare_training
from tag2box.data.scenes import Scenes
from tag2box.recipes import Config, photos
from tag2box.training import checkpoint, loop

EVERY = 50  # iterations between two checkpoints, as in the recipe
VARIANTS = ("checked", "unchecked")


@contextmanager
def unchecked() -> Iterator[None]:
    """Leave out all that makes checkpoints durable and checked."""
    with ExitStack() as stack:
        for owner, name, result in (
            (io, "sync", None),
            (storage, "write_manifest", ""),
            (storage, "verify_folder", None),
            (checkpoint, "_check_finite", None),
            (loop, "get_total_norm", torch.zeros(())),
        ):
            stack.enter_context(patch.object(owner, name, lambda *_, result=result: result))
        yield


class Trainer:
    """A training loop that can be stopped between two blocks."""

    def __init__(self, folder: Path, overrides: list[str], scenes: Scenes) -> None:
        scenes.write(folder / "scenes")
        data = folder / "scenes" / "train"
        paths = [f"data.tags={data / 'tags.csv'}", f"data.photos={data / 'photos'}", "plan.iterations=100000"]
        self.config = settings.load(Config, [], [*paths, *overrides], base=photos())
        self.folder, self.iteration = folder, 0
        self.step, self.source = prepare_training(self.config, folder / "run")
        self.optimizers = loop.Optimizers(self.config.plan.optimizer.build(self.step.detector), None)

    def iterate(self, count: int = 1) -> None:
        """Some iterations."""
        plan, run = self.config.plan, self.folder / "run"
        for iteration in range(self.iteration, self.iteration + count):
            batch = self.source.batch(iteration)
            loop.train_batch(self.step, batch, self.optimizers, plan=plan, iteration=iteration, run=run)
        self.iteration += count

    def save(self, run: Path) -> None:
        """One checkpoint."""
        checkpoint.save(
            run,
            self.step.detector,
            self.optimizers.detector,
            iteration=self.iteration,
            classes=self.source.classes,
            seconds=0.0,
        )

    def check_gradients(self) -> None:
        """What every iteration checks."""
        grads = [p.grad for p in self.step.detector.parameters() if p.grad is not None]
        get_total_norm(grads).item()


def seconds_of(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure(trainer: Trainer, blocks: int, iterations: int) -> Row:
    """Seconds of iterations, checkpoints and checks, by variant."""
    steps: dict[str, list[float]] = {name: [] for name in VARIANTS}
    saves: dict[str, list[float]] = {name: [] for name in VARIANTS}
    checks: list[float] = []
    trainer.iterate()  # warm-up
    for number in range(blocks):
        for name in VARIANTS if number % 2 else VARIANTS[::-1]:
            with unchecked() if name == "unchecked" else ExitStack():
                steps[name].append(seconds_of(lambda: trainer.iterate(iterations)) / iterations)
                for _ in range(5):
                    trainer.iteration += 1
                    saves[name].append(seconds_of(lambda name=name: trainer.save(trainer.folder / name)))  # type: ignore[misc]
        checks += [seconds_of(trainer.check_gradients) for _ in range(20)]
    step, save = ({name: statistics.median(all_) for name, all_ in times.items()} for times in (steps, saves))
    block = {name: EVERY * step[name] + save[name] for name in VARIANTS}
    extra = save["checked"] - save["unchecked"] + EVERY * statistics.median(checks)
    return {
        "checkpoint_every": EVERY,
        "iterations_per_second": {name: round(EVERY / block[name], 4) for name in VARIANTS},
        "slower_percent": round(100 * (block["checked"] / block["unchecked"] - 1), 2),
        "slower_percent_of_parts": round(100 * extra / block["unchecked"], 2),
        "seconds_of_a_checkpoint": {name: spread_of(seconds) for name, seconds in saves.items()},
        "seconds_of_a_check_of_gradients": spread_of(checks),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=EVERY, help="of a block; fewer are extrapolated to 50")
    parser.add_argument("--small", action="store_true", help="tiny sizes, a smoke test")
    parser.add_argument("--folder", type=Path, help="where to write checkpoints; default: a temporary folder")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    tiny = ["proposals.short_side=96", "proposals.max_boxes=16", "backbone.pool_size=4", "loader.batch_size=2",
            "loader.resize.scales=[96]"]  # fmt: skip
    scenes = Scenes(train=4 if args.small else 24, test=0)
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        trainer = Trainer(Path(name), tiny if args.small else [], scenes)
        result = {"machine": machine(), **measure(trainer, args.blocks, args.iterations)}
        folder = trainer.folder / "checked" / checkpoint.read_state(trainer.folder / "checked").folder
        result["checkpoint_mb"] = round(sum(file.stat().st_size for file in folder.glob("*")) / 1e6, 1)
    print(json.dumps(result, indent=1))
    if args.out is not None:
        io.write_json(args.out, result)


if __name__ == "__main__":
    main()
