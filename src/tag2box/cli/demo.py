"""``tag2box demo``: generated scenes, two methods trained from their tags alone, one report."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from tag2box import errors, io, recipes, runs, settings
from tag2box.cli import evaluate, options, report, train
from tag2box.data.scenes import Scenes
from tag2box.formats import coco_boxes, csv_tags
from tag2box.progress import Progress, TerminalProgress, silent
from tag2box.recipes import Config, Data
from tag2box.training.checkpoint import read_state

SUMMARY_FILE = "summary.json"
SMALL = Scenes(train=60, test=20, classes=("car", "fish", "flower", "mushroom"), most_classes=2)
SMALL_SETTINGS = ("plan.iterations=50", "proposals.max_boxes=120")
"""Scenes and settings of ``demo --small``: the same steps in less time; its figures are worth little."""
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
    small: bool = False,
    world: Scenes | None = None,
    overrides: Sequence[str] = (),
    keep_maps: bool = False,
    progress: Progress = silent,
) -> dict[str, object]:
    """Generate scenes, train and evaluate OICR+ and OD-WSCL, write a report; returns the content of ``summary.json``.

    Resumable: finished parts are kept, and a second call continues an interrupted one.
    """
    if any(override.partition("=")[0].strip() == "plan.seed" for override in overrides):
        raise errors.UserError("--set plan.seed: the demo's seed is set with --seed, for scenes and training alike")
    io.check_writable(out / SUMMARY_FILE)
    world = world or replace(SMALL if small else Scenes(), seed=seed)
    workspace = open_scenes(out, world, [*(SMALL_SETTINGS if small else ()), *overrides], progress=progress)
    folders = {method: out / method for method in ("oicr-plus", "od-wscl")}
    metrics = {m: workspace.measure(folder, m, seed, progress=progress) for m, folder in folders.items()}
    flags = " --small" * small + "".join(f" --set {override}" for override in overrides)
    report.report(
        list(folders.values()),
        out / "report.html",
        title="Boxes from tags alone: generated scenes",
        test_photos=workspace.data / "test" / "photos",
        test_truth=workspace.data / "test" / "truth.json",
        train_truth=workspace.data / "train" / "truth.json",
        test_proposals=workspace.test.proposals,
        commands=[f"tag2box demo --out {out} --seed {seed}{flags}"],
        progress=progress,
    )
    seconds = {method: read_state(folder).seconds for method, folder in folders.items()}
    summary: dict[str, object] = {"seed": seed, "training_seconds": seconds, "methods": metrics}
    io.write_json(out / SUMMARY_FILE, summary)
    if not keep_maps:
        shutil.rmtree(out / "maps", ignore_errors=True)
    return summary


@dataclass(frozen=True)
class SceneWorkspace:
    """A folder of generated scenes, with the settings to train on them and the sets to evaluate on."""

    data: Path
    config: Config
    train: evaluate.EvalSet
    test: evaluate.EvalSet

    def measure(self, folder: Path, method: str, seed: int, *, progress: Progress) -> object:
        """The metrics of a row of table 3a, trained and evaluated into ``folder`` unless that is done."""
        discovery, contrast = TABLE_3A[method]
        config = recipes.table_3a(self.config, discovery=discovery, contrast=contrast)
        _train(replace(config, plan=replace(config.plan, seed=seed)), folder, progress)
        evaluate.measure_run(folder, test=self.test, train=self.train, progress=progress)
        return io.read_json(folder / evaluate.METRICS_FILE, "the metrics of a run")


def open_scenes(
    out: Path, world: Scenes, overrides: Sequence[str] = (), *, progress: Progress = silent
) -> SceneWorkspace:
    """Write the scenes unless they exist, and set up the settings to train on them."""
    data = out / "scenes"
    with progress("scenes", world.train + world.test) as bar:
        world.write(data, on_progress=lambda *_: bar.advance())
    folder = data / "train"
    source = Data(
        photos=folder / "photos", tags=folder / "tags.csv", classes=world.classes, proposals=folder / "proposals"
    )
    config = settings.load(
        Config, [], overrides, base=replace(recipes.scenes(), data=source, feature_cache=out / "maps")
    )
    return SceneWorkspace(data, config, _eval_set(folder), _eval_set(data / "test"))


def _train(config: Config, folder: Path, progress: Progress) -> None:
    """Train or resume a run; a run with other settings is refused."""
    if not (folder / runs.CONFIG_FILE).exists():
        train.train(config, folder, progress=progress)
        return
    if runs.read_config(folder) != runs.with_paths(config, folder):
        raise errors.UserError(f"{folder}: holds a run with other settings; choose another --out, or remove it")
    train.resume(folder, progress=progress)


def _eval_set(folder: Path) -> evaluate.EvalSet:
    truth = coco_boxes.read_coco_truth(folder / "truth.json")
    photos = csv_tags.read_tags(folder / "tags.csv", folder / "photos", truth.classes).photos
    return evaluate.EvalSet(photos, truth, folder / "proposals")


def demo_command(
    out: Annotated[Path, typer.Option(help="Folder to write.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(min=0, help="Seed of scenes and training.")] = 0,
    small: Annotated[
        bool, typer.Option("--small", help="60 scenes of 4 classes and 50 iterations: all steps, in under 3 minutes.")
    ] = False,
    keep_maps: Annotated[bool, typer.Option(help="Keep the feature cache (about half a gigabyte).")] = False,
    override: options.SetOption = [],  # noqa: B006
) -> None:
    """Generate scenes, train OICR+ and OD-WSCL from their tags, evaluate both, and write an HTML report.

    Resumable: rerun the same command.

    Example: `tag2box demo --out runs/demo`
    """
    demo(out, seed=seed, small=small, overrides=override, keep_maps=keep_maps, progress=TerminalProgress())
    options.say(f"report: {out / 'report.html'}")
    options.say(f"summary: {out / SUMMARY_FILE}")
