"""``tag2box demo``: generated scenes, methods trained from their tags alone, one report."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tag2box import settings
from tag2box.commands.assess import METRICS, Exam, assess
from tag2box.commands.report import report
from tag2box.commands.runs import CONFIG, read_config, with_paths
from tag2box.commands.train import resume, train
from tag2box.data.scenes import Scenes
from tag2box.errors import UserError
from tag2box.formats.coco_boxes import read_coco_truth
from tag2box.formats.csv_tags import read_tags
from tag2box.io import read_json, write_json
from tag2box.progress import Progress, silent
from tag2box.recipes import Config, Data, scenes, table_3a
from tag2box.training.checkpoint import read_state

SUMMARY = "summary.json"
TABLE_3A = {
    "oicr-plus": (False, False),
    "od": (True, False),
    "wscl": (False, True),
    "od-wscl": (True, True),
}
"""Method -> (discovery, contrast): the four rows of the paper's table 3a."""


def demo(
    out: Path,
    *,
    seed: int = 0,
    world: Scenes | None = None,
    overrides: Sequence[str] = (),
    keep_maps: bool = False,
    progress: Progress = silent,
) -> dict[str, object]:
    """Write scenes, train OICR+ and OD-WSCL, assess both, write ``report.html`` and ``summary.json``; gives the latter.

    What is already there is kept: a second call continues an interrupted one.
    """
    if any(override.partition("=")[0].strip() == "plan.seed" for override in overrides):
        raise UserError("--set plan.seed: the demo's seed is set with --seed, for scenes and training alike")
    studio = open_studio(out, world or Scenes(seed=seed), overrides, progress=progress)
    folders = {method: out / method for method in ("oicr-plus", "od-wscl")}
    metrics = {m: studio.measure(folder, m, seed, progress=progress) for m, folder in folders.items()}
    report(
        list(folders.values()),
        out / "report.html",
        title="Boxes from tags alone: generated scenes",
        test_photos=studio.data / "test" / "photos",
        test_truth=studio.data / "test" / "truth.json",
        train_truth=studio.data / "train" / "truth.json",
        test_proposals=studio.test.proposals,
        commands=[f"tag2box demo --out {out} --seed {seed}" + "".join(f" --set {o}" for o in overrides)],
        progress=progress,
    )
    seconds = {method: read_state(folder).seconds for method, folder in folders.items()}
    summary: dict[str, object] = {"seed": seed, "training_seconds": seconds, "methods": metrics}
    write_json(out / SUMMARY, summary)
    if not keep_maps:
        shutil.rmtree(out / "maps", ignore_errors=True)
    return summary


@dataclass(frozen=True)
class Studio:
    """A folder of scenes with all that is needed to train methods on them and to measure what they learnt."""

    data: Path
    config: Config
    train: Exam
    test: Exam

    def measure(self, folder: Path, method: str, seed: int, *, progress: Progress) -> object:
        """The metrics of one row of table 3a, trained into ``folder`` unless that was done before."""
        discovery, contrast = TABLE_3A[method]
        config = table_3a(self.config, discovery=discovery, contrast=contrast)
        _finish(replace(config, plan=replace(config.plan, seed=seed)), folder, progress)
        if not (folder / METRICS).exists():
            assess(folder, test=self.test, train=self.train, progress=progress)
        return read_json(folder / METRICS, "the metrics of a run")


def open_studio(out: Path, world: Scenes, overrides: Sequence[str] = (), *, progress: Progress = silent) -> Studio:
    """Write the scenes, where they are not there yet, and set up the settings to train on them."""
    data = out / "scenes"
    with progress("scenes", world.train + world.test) as bar:
        world.write(data, on_progress=lambda *_: bar.advance())
    learn = data / "train"
    source = Data(
        photos=learn / "photos", tags=learn / "tags.csv", classes=world.classes, proposals=learn / "proposals"
    )
    config = settings.load(Config, [], overrides, base=replace(scenes(), data=source, feature_cache=out / "maps"))
    return Studio(data, config, _exam(learn), _exam(data / "test"))


def _finish(config: Config, folder: Path, progress: Progress) -> None:
    """Train, or go on training; settings other than those a run was started with are refused."""
    if not (folder / CONFIG).exists():
        train(config, folder, progress=progress)
        return
    if read_config(folder) != with_paths(config, folder):
        raise UserError(f"{folder}: holds a run with other settings; choose another --out, or remove it")
    resume(folder, progress=progress)


def _exam(folder: Path) -> Exam:
    truth = read_coco_truth(folder / "truth.json")
    photos = read_tags(folder / "tags.csv", folder / "photos", truth.classes).photos
    return Exam(photos, truth, folder / "proposals")
