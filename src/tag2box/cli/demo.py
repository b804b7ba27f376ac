"""``tag2box demo``: generated scenes, two methods trained from their tags alone, a student, one report."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from tag2box import errors, io, recipes, runs, settings
from tag2box.cli import evaluate, options, report, student, train
from tag2box.cli.label import label
from tag2box.data.scenes import Scenes
from tag2box.formats import coco_boxes, csv_tags
from tag2box.inference.predict import Inference, Predict
from tag2box.labels.label_set import is_label_set
from tag2box.progress import Progress, TerminalProgress, silent
from tag2box.recipes import Config, Data
from tag2box.student.student_data import Augmentation
from tag2box.student.student_training import StudentConfig, StudentPlan
from tag2box.training.checkpoint import read_state

SUMMARY_FILE = "summary.json"
SMALL = Scenes(train=60, test=20, classes=("car", "fish", "flower", "mushroom"), most_classes=2)
SMALL_SETTINGS = ("plan.iterations=50", "proposals.max_boxes=120", "student.plan.iterations=40")
"""Scenes and settings of ``demo --small``: the same steps in less time; its figures are worth little."""
TABLE_3A = {
    "oicr-plus": (False, False),
    "od": (True, False),
    "wscl": (False, True),
    "od-wscl": (True, True),
}
"""Method -> (discovery, contrast): the four rows of the paper's table 3a."""
STUDENT = "student"
"""Folder of the student, and the table of its settings in ``--set``."""


def scenes_student() -> StudentConfig:
    """A student for the generated scenes, in pictures of about their size and for a few minutes on two cores.

    Nothing here was chosen on the demo's test split.
    Its learning rate is the one that stalled on photos, not on scenes (docs/student.md).
    """
    return StudentConfig(
        name="student of OD-WSCL",
        augmentation=Augmentation(sides=(224, 256)),
        plan=StudentPlan(iterations=240, lr=1e-3, warmup=20, checkpoint_every=60, average=0.98),
        inference=Inference(scales=(256,), long_max=256, mirror=False, predict=Predict(nms_iou=0.5)),
    )


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
    """Generate scenes, train and evaluate OICR+, OD-WSCL and a student of the latter's labels, and write a report.

    Returns the content of ``summary.json``. Resumable: finished parts are kept, and a second call continues an
    interrupted one. Overrides that begin with ``student.`` are those of the student.
    """
    if any(override.partition("=")[0].strip().removeprefix(f"{STUDENT}.") == "plan.seed" for override in overrides):
        raise errors.UserError("--set plan.seed: the demo's seed is set with --seed, for scenes and training alike")
    io.check_writable(out / SUMMARY_FILE)
    world = world or replace(SMALL if small else Scenes(), seed=seed)
    wanted = [*(SMALL_SETTINGS if small else ()), *overrides]
    of_student = [override.removeprefix(f"{STUDENT}.") for override in wanted if _is_of_student(override)]
    own = [override for override in wanted if not _is_of_student(override)]
    workspace = open_scenes(out, world, own, progress=progress)
    student_config = _student_config(of_student, out, seed)  # before anything is trained
    folders = {method: out / method for method in ("oicr-plus", "od-wscl")}
    metrics = {m: workspace.measure(folder, m, seed, progress=progress) for m, folder in folders.items()}
    folders[STUDENT] = out / STUDENT
    metrics[STUDENT] = workspace.measure_student(student_config, out, progress=progress)
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

    def measure_student(self, config: StudentConfig, out: Path, *, progress: Progress) -> object:
        """The metrics of a student, trained on the labels of OD-WSCL and evaluated unless that is done."""
        labels, folder = runs.required(config.labels), out / STUDENT
        if not is_label_set(labels):
            source = self.config.data.source()
            label(out / "od-wscl", source, labels, proposals=self.train.proposals, progress=progress)
        if runs.has_run(folder):
            student.resume_student(folder, progress=progress)
        else:
            student.train_student(labels, folder, config=config, progress=progress)
        evaluate.measure_run(folder, test=self.test, train=self.train, progress=progress)
        return io.read_json(folder / evaluate.METRICS_FILE, "the metrics of a run")


def _student_config(overrides: Sequence[str], out: Path, seed: int) -> StudentConfig:
    """The settings of the demo's student; raises if there is one with others."""
    base = scenes_student()
    base = replace(base, labels=(out / "labels").absolute(), plan=replace(base.plan, seed=seed))
    config = settings.load(StudentConfig, [], list(overrides), base=base)
    if runs.has_run(out / STUDENT) and runs.read_any_config(out / STUDENT) != config:
        raise _other_settings(out / STUDENT)
    return config


def _is_of_student(override: str) -> bool:
    return override.strip().startswith(f"{STUDENT}.")


def _other_settings(folder: Path) -> errors.UserError:
    return errors.UserError(f"{folder}: holds a run with other settings; choose another --out, or remove it")


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
        raise _other_settings(folder)
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
    """Generate scenes, train OICR+ and OD-WSCL from their tags and a student on the latter's labels; write a page.

    Resumable: rerun the same command.

    Example: `tag2box demo --out runs/demo`
    """
    demo(out, seed=seed, small=small, overrides=override, keep_maps=keep_maps, progress=TerminalProgress())
    options.say(f"report: {out / 'report.html'}")
    options.say(f"summary: {out / SUMMARY_FILE}")
