"""``tag2box demo``: generated scenes, two methods trained from tags alone, one report."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tag2box import settings
from tag2box.commands.assess import METRICS, Exam, assess
from tag2box.commands.report import report
from tag2box.commands.runs import CONFIG, with_paths
from tag2box.commands.train import resume, train
from tag2box.data.coco import read_coco_truth
from tag2box.data.scenes import Scenes
from tag2box.data.tags import read_tags
from tag2box.engine.progress import Progress, silent
from tag2box.errors import UserError
from tag2box.files import read_json, write_json
from tag2box.recipes import Config, Data, scenes, table_3a

SUMMARY = "summary.json"
BOTH = ("oicr-plus", "od-wscl")
TABLE_3A = {
    "oicr-plus": (False, False),
    "od": (True, False),
    "wscl": (False, True),
    "od-wscl": (True, True),
}
"""Run name -> (discovery, contrast): the four rows of the paper's table 3a."""


def demo(
    out: Path,
    *,
    seed: int = 0,
    methods: Sequence[str] = BOTH,
    world: Scenes | None = None,
    overrides: Sequence[str] = (),
    keep_maps: bool = False,
    progress: Progress = silent,
) -> dict[str, object]:
    """Write scenes, train each method, assess it, and write ``report.html`` and ``summary.json``; returns the summary.

    What is already there is kept: a second call continues an interrupted one.
    """
    began = time.monotonic()
    data = out / "scenes"
    world = world or Scenes(seed=seed)
    with progress("scenes", world.train + world.test) as bar:
        world.write(data, on_progress=lambda *_: bar.advance())
    base = settings.load(Config, [], overrides, base=_config(data, out, world, seed))
    exams = {split: _exam(data, split) for split in ("train", "test")}
    for method in methods:
        _run(method, base, out, progress=progress)
        if not (out / method / METRICS).exists():
            assess(out / method, test=exams["test"], train=exams["train"], progress=progress)
    summary = {method: read_json(out / method / METRICS, "the metrics of a run") for method in methods}
    write_json(out / SUMMARY, {"seed": seed, "seconds": time.monotonic() - began, "methods": summary})
    report(
        [out / method for method in methods],
        out / "report.html",
        title="Boxes from tags alone: generated scenes",
        test_photos=data / "test" / "photos",
        test_truth=data / "test" / "truth.json",
        train_truth=data / "train" / "truth.json",
        commands=_commands(out, seed, overrides),
        progress=progress,
    )
    if not keep_maps:
        shutil.rmtree(out / "maps", ignore_errors=True)
    return {"seed": seed, "methods": summary}


def _config(data: Path, out: Path, world: Scenes, seed: int) -> Config:
    base = scenes()
    train_data = data / "train"
    return replace(
        base,
        data=Data(
            photos=train_data / "photos",
            tags=train_data / "tags.csv",
            classes=world.classes,
            proposals=train_data / "proposals",
        ),
        maps=out / "maps",
        plan=replace(base.plan, seed=seed),
    )


def _run(method: str, base: Config, out: Path, *, progress: Progress) -> None:
    """Train a method, or go on with it; settings other than those it was started with are refused."""
    discovery, contrast = TABLE_3A[method]
    config, folder = table_3a(base, discovery=discovery, contrast=contrast), out / method
    if not (folder / CONFIG).exists():
        train(config, folder, progress=progress)
        return
    if (folder / CONFIG).read_text(encoding="utf-8") != settings.dump(with_paths(config, folder)):
        raise UserError(f"{folder}: holds a run with other settings; choose another --out, or remove it")
    resume(folder, progress=progress)


def _exam(data: Path, split: str) -> Exam:
    truth = read_coco_truth(data / split / "truth.json")
    photos = read_tags(data / split / "tags.csv", data / split / "photos", truth.classes).photos
    return Exam(photos, truth, data / split / "proposals")


def _commands(out: Path, seed: int, overrides: Sequence[str]) -> list[str]:
    extra = "".join(f" --set {o}" for o in overrides)
    return [f"tag2box demo --out {out} --seed {seed}{extra}"]
