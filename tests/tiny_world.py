"""Whole runs in a second: generated scenes for lite0 through the real commands, or tiny photos for the tiny network.

world = make_world(base)                       # scenes on disk, settings under which lite0 trains in a second
config = small_config(tmp_path)                # tiny photos and tags on disk; use it with small_network(monkeypatch)
"""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tag2box import settings, storage
from tag2box.cli import main
from tag2box.cli.train import train
from tag2box.data.scenes import Scenes
from tag2box.formats.csv_tags import read_tags, write_tags
from tag2box.images import read_photo
from tag2box.progress import Progress
from tag2box.proposals.build import build_proposals
from tag2box.recipes import Config, scenes
from tag2box.training.events import read_events
from tiny import tiny_detector, tiny_photos

SCENES = Scenes(train=8, test=4, width=96, height=96, classes=("balloon", "car", "clock"), smallest=24, largest=48)
TINY = (
    "proposals.short_side=96", "proposals.max_boxes=16", "backbone.pool_size=4", "loader.batch_size=2",
    "loader.resize.scales=[96]", "inference.scales=[96]", "plan.iterations=4", "plan.log_every=1",
    "plan.checkpoint_every=2", "plan.gallery=2",
    "segmentation.side=64", "segmentation.map_epochs=1", "segmentation.epochs=1",
)  # fmt: skip


@dataclass(frozen=True)
class World:
    """Scenes on disk, and what every run on them shares."""

    folder: Path

    @property
    def photos(self) -> Path:
        return self.folder / "scenes" / "train" / "photos"

    @property
    def tags(self) -> Path:
        return self.folder / "scenes" / "train" / "tags.csv"

    @property
    def test(self) -> Path:
        return self.folder / "scenes" / "test"

    @property
    def shared(self) -> tuple[str, ...]:
        """Settings that keep proposals and maps in one place for all runs."""
        return (*TINY, f"data.proposals={self.folder / 'proposals'}", f"feature_cache={self.folder / 'maps'}")

    def config(self, *overrides: str) -> Config:
        paths = (f"data.photos={self.photos}", f"data.tags={self.tags}")
        return settings.load(Config, [], [*paths, *self.shared, *overrides], base=scenes())

    def argv(self, out: Path, *overrides: str) -> list[str]:
        """``tag2box train`` as a user types it."""
        flags = [word for o in (*self.shared, *overrides) for word in ("--set", o)]
        return ["train", "--recipe", "scenes", "--photos", f"{self.photos}", "--tags", f"{self.tags}", "--out",
                f"{out}", *flags]  # fmt: skip

    def trained(self, name: str, *overrides: str) -> Path:
        """A run under this name, trained once."""
        out = self.folder / "runs" / name
        if not out.exists():
            train(self.config(*overrides), out)
        return out


@functools.cache
def make_world(base: Path) -> World:
    """One world per pytest session: pass ``tmp_path_factory.getbasetemp()``."""
    world = World(base / "world")
    SCENES.write(world.folder / "scenes")
    photos = read_tags(world.tags, world.photos).photos
    build_proposals(photos, world.config().proposals, world.folder / "proposals", read=read_photo, workers=1)
    return world


def one_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Propose boxes in this process: two more that import torch would cost more than the whole test."""
    monkeypatch.setattr(os, "cpu_count", lambda: 1)


# ---------------------------------------------------------------- the tiny network behind the real commands


def small_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the commands build the tiny network instead of lite0: a run then takes a tenth of a second."""

    def build(config: Config, num_classes: int, *, pretrained: bool) -> torch.nn.Module:
        side = config.adaptation.side if config.adaptation.epochs else 0
        cells = config.adaptation.part == "cells"
        return tiny_detector(num_classes, heads=config.heads, seed=config.plan.seed, maps_side=side, cells=cells)

    monkeypatch.setattr("tag2box.runs.build_detector", build)
    one_worker(monkeypatch)


def small_data(folder: Path, count: int = 4) -> None:
    """Tiny photos and their tags under ``folder``."""
    tagged = tiny_photos(folder, count)
    names = [[c for c, on in zip(tagged.classes, row, strict=True) if on] for row in tagged.tags.tolist()]
    write_tags(folder / "tags.csv", [(p.path.name, tags) for p, tags in zip(tagged.photos, names, strict=True)])


def small_config(folder: Path, *overrides: str) -> Config:
    """A short run of the paper's method on tiny photos."""
    given = (
        f"data.photos={folder / 'photos'}", f"data.tags={folder / 'tags.csv'}", "heads.embed_dim=6",
        "proposals.min_side=6", "proposals.max_boxes=12", "loader.batch_size=2", "loader.resize.scales=[48]",
        "inference.scales=[48]", "plan.iterations=6", "plan.log_every=1", "plan.checkpoint_every=2", "plan.gallery=2",
        "plan.schedule.warmup=2",
    )  # fmt: skip
    return settings.load(Config, [], [*given, *overrides])


def ctrl_c() -> None:
    """What a terminal does."""
    signal.raise_signal(signal.SIGINT)


def stopping_at(iteration: int, how: Callable[[], None] = ctrl_c) -> Progress:
    """A progress whose training bar does something after an iteration."""

    class Bar:
        done = 0

        def advance(self, note: str = "") -> None:
            self.done += 1
            if self.done == iteration:
                how()

    @contextmanager
    def progress(title: str, total: int, done: int = 0) -> Iterator[Bar]:
        bar = Bar()
        bar.done = done if title == "training" else -(10**6)
        yield bar

    return progress


# ---------------------------------------------------------------- what a run left behind


def weights(run: Path) -> dict[str, Tensor]:
    """The tensors of a run's last checkpoint."""
    state = json.loads((run / "state.json").read_text())
    return load_file(run / state["folder"] / "model.safetensors")


def sign_again(run: Path) -> None:
    """Make a checkpoint of which a test has replaced files look as if it had been written like that."""
    state = json.loads((run / "state.json").read_text())
    state["manifest"] = storage.write_manifest(run / state["folder"])
    storage.write_checked_json(run / "state.json", {k: v for k, v in state.items() if k != "sha256"})


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Whether weights are equal to the bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def story(run: Path) -> list[dict[str, object]]:
    """The events of a run without times and machine."""
    noise = {"time", "seconds", "peak_memory_mb", "machine", "versions"}
    return [{k: v for k, v in event.items() if k not in noise} for event in read_events(run)]


def tree(*folders: Path) -> dict[str, tuple[int, int]]:
    """Size and time of every file below some folders; what caches remember of photos depends on the clock."""
    files = [f for folder in folders for f in folder.rglob("*") if f.is_file() and f.suffix != ".digests"]
    return {str(file): (file.stat().st_size, file.stat().st_mtime_ns) for file in files}


# ---------------------------------------------------------------- the command line


@dataclass(frozen=True)
class Finished:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def complaints(self) -> list[str]:
        """Lines on standard error other than the progress lines of a terminal-less run."""
        progress = re.compile(r".+ \(\d+ to do\)|.+: \d+/\d+ \(\d+%\), .+")
        return [line for line in self.err.splitlines() if not progress.fullmatch(line)]


def call(argv: Sequence[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Finished:
    """The ``tag2box`` command in this process."""
    monkeypatch.setattr(sys, "argv", ["tag2box", *argv])
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main()
    said = capsys.readouterr()
    return Finished(int(stop.value.code or 0), said.out, said.err)


COMMAND = (sys.executable, "-c", "from tag2box.cli import main; main()")


def environment() -> dict[str, str]:
    """As many threads as here: results are equal to the bit only then."""
    return {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads()), "COLUMNS": "200"}


def process(argv: Sequence[str], cwd: Path) -> Finished:
    """The ``tag2box`` command in a process of its own."""
    done = subprocess.run(
        [*COMMAND, *argv], cwd=cwd, env=environment(), capture_output=True, text=True, timeout=400, check=False
    )
    return Finished(done.returncode, done.stdout, done.stderr)
