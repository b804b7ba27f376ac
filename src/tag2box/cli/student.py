"""``tag2box student``: a label set in, a run folder with a small detector that needs no proposals out."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from torch import nn

from tag2box import errors, run_detect, run_inputs, runs, settings
from tag2box.cli import options
from tag2box.identity import RunIdentity
from tag2box.labels.journal import read_reviews
from tag2box.labels.label_set import LabelSet
from tag2box.labels.reviews import apply_reviews
from tag2box.models.backbone import Backbone, innermost
from tag2box.progress import Progress, TerminalProgress, silent
from tag2box.student.network import StudentModule
from tag2box.student.student_training import StudentConfig, build_student, fit_student
from tag2box.training import checkpoint, events
from tag2box.training.dist import SINGLE_PROCESS, DistContext, init_distributed, is_torchrun
from tag2box.training.trackers import tracking


def train_student(
    labels: Path,
    out: Path,
    *,
    photos: Path | None = None,
    config: StudentConfig | None = None,
    overrides: Sequence[str] = (),
    progress: Progress = silent,
    dist: DistContext = SINGLE_PROCESS,
) -> None:
    """Train a student on a label set into a new run folder.

    Under torchrun, a run that was started with the same settings is resumed: torchrun restarts the same command.

    Args:
        labels: a label set, of ``tag2box label`` or reviewed.
        photos: root of the photos, if they were moved since.
        config: settings to start from.
        overrides: as ``--set`` takes them: ``plan.iterations=300``.

    Example:
        tag2box.train_student(Path("labels"), Path("runs/student"))
    """
    loaded = settings.load(StudentConfig, [], list(overrides), base=config or StudentConfig())
    settled = replace(
        run_inputs.settled_student(loaded, dist),
        labels=labels.absolute(),
        photos=photos.absolute() if photos else None,
        backbone=loaded.backbone.with_absolute_paths(),
    )
    with runs.claimed(out, is_main=dist.is_main):
        with dist.main_process_first():
            is_new = not (is_torchrun() and runs.has_run(out))
            if is_new and dist.is_main:
                runs.check_free(out)
            elif not is_new and runs.read_any_config(out) != settled:
                raise errors.UserError(
                    f"{out}: already holds a run with other settings; continue it with --resume, or choose another"
                )
            parts = _prepare(settled, out, is_new=is_new and dist.is_main)
        fit_student(settled, *parts, run=out, progress=progress, dist=dist)


def resume_student(
    out: Path,
    *,
    labels: Path | None = None,
    photos: Path | None = None,
    progress: Progress = silent,
    dist: DistContext = SINGLE_PROCESS,
) -> None:
    """Continue a student run from its last checkpoint, with the settings it was started with.

    Raises if settings, photos or labels are not those that the run was started with.

    Args:
        labels: where the label set is now, if it was moved since.
        photos: where the photos are now, if they were moved since.
    """
    config = runs.read_any_config(out)
    if not isinstance(config, StudentConfig):
        raise errors.UserError(f"{out}: no student run; continue it with `tag2box train --out {out} --resume`")
    config = replace(
        config,
        labels=labels.absolute() if labels else config.labels,
        photos=photos.absolute() if photos else config.photos,
    )
    with runs.claimed(out, is_main=dist.is_main):
        with dist.main_process_first():
            parts = _prepare(config, out, is_new=False)
        fit_student(config, *parts, run=out, progress=progress, dist=dist)


def _prepare(config: StudentConfig, out: Path, *, is_new: bool) -> tuple[LabelSet, tuple[nn.Module, nn.Module]]:
    """The labels and two networks of a run, which is started once these are there, so that a mistake leaves no run."""
    device = config.torch_device()
    recorded = None if is_new else RunIdentity.read(out)
    if recorded is not None:
        recorded.check_settings(config, out / runs.CONFIG_FILE)
        recorded = recorded.with_photos(out)
    labels = read_labels(config)
    if recorded is not None and config.labels is not None:
        recorded.check_classes(labels.classes, config.labels)
        recorded.check_labels(labels.content, config.labels)
    is_begun = checkpoint.has_checkpoint(out)
    network = build_student(config, len(labels.classes), pretrained=not is_begun)
    if config.start == "teacher" and not is_begun:
        _load_teacher(network, labels)
    assert isinstance(network, StudentModule)
    if recorded is not None and not is_begun:
        recorded.check_weights(network)
    if is_new:
        _start(config, out, labels, RunIdentity.of_student(config, labels.content, network))
    average = build_student(config, len(labels.classes), pretrained=False)
    return labels, (network.to(device), average.to(device))


def read_labels(config: StudentConfig) -> LabelSet:
    """The label set of a run, with the boxes of reviews where there are any; its photos are verified."""
    if config.labels is None:
        raise errors.UserError("labels: not set; name a label set after `tag2box student`")
    labels = LabelSet.open(config.labels, config.photos)
    labels.verify()
    labels = replace(labels, content=apply_reviews(labels, read_reviews(config.labels, labels)))
    if not any(photo.labels for photo in labels.content.photos):
        raise errors.UserError(f"{config.labels}: no photo has a label; at least one is needed to learn")
    return labels


def _load_teacher(network: nn.Module, labels: LabelSet) -> None:
    """Start from the backbone of the run that made the labels."""
    folder = labels.run.get("folder")
    if not isinstance(folder, str) or not runs.has_run(Path(folder)):
        raise errors.UserError(
            f"start = teacher: the label set names no run that is there ({folder}); restore it, or set start=imagenet"
        )
    trained = runs.open_run(Path(folder))
    if run_detect.detector_identity(trained)["weights"] != labels.run.get("weights"):
        raise errors.UserError(
            f"start = teacher: {folder} has other weights than when it made the labels; label again, or set "
            "start=imagenet"
        )
    teacher = trained.detector
    own = innermost(teacher.backbone) if isinstance(teacher.backbone, Backbone) else teacher.backbone
    assert isinstance(network, StudentModule) and isinstance(own, nn.Module)
    shapes, wanted = (
        {name: value.shape for name, value in module.state_dict().items()} for module in (own, network.backbone)
    )
    if shapes != wanted:
        raise errors.UserError(
            f"start = teacher: the backbone of {folder} is another one; set backbone as in its config.toml, or "
            "start=imagenet"
        )
    network.backbone.load_state_dict(own.state_dict())


def _start(config: StudentConfig, out: Path, labels: LabelSet, identity: RunIdentity) -> None:
    runs.start_run(config, out, identity)
    events.EventLog(out).write(
        "start",
        {
            "name": config.name,
            "classes": labels.classes,
            "train_photos": len(labels.content),
            "iterations": config.plan.iterations * config.rounds.count,
            "seed": config.plan.seed,
            "uses": str(labels.run.get("uses", "")),
            "machine": runs.machine(),
            "versions": runs.versions(),
        },
    )


# ---------------------------------------------------------------- the command


def student_command(
    out: Annotated[Path, typer.Option(help="Run folder to write.")],
    labels: Annotated[
        Path | None, typer.Argument(metavar="LABELS", help="A label set, of `tag2box label` or reviewed.")
    ] = None,
    photos: Annotated[Path | None, typer.Option(help="Root of the photos, if they were moved since.")] = None,
    config: Annotated[list[Path], typer.Option(help="TOML settings file; repeatable, later files win.")] = [],  # noqa: B006
    is_resumed: Annotated[
        bool, typer.Option("--resume", help="Continue the run in OUT with its own settings.")
    ] = False,
    track: options.TrackOption = [],  # noqa: B006
    override: options.SetOption = [],  # noqa: B006
) -> None:
    """Train a small detector without proposals on a label set, in minutes on a CPU.

    Resumable: `--resume` continues from the last checkpoint; with it, LABELS and --photos say where labels and photos
    are now, if they were moved. `detect`, `label` and `report` take the run as any other.

    Example: `tag2box student labels --out runs/student`
    """
    if is_resumed and (config or override):
        raise errors.UserError("--resume takes its settings from the run; leave out --config and --set")
    with init_distributed() as dist, tracking(out, track if dist.is_main else ()):
        progress = TerminalProgress() if dist.is_main else silent
        if is_resumed:
            resume_student(out, labels=labels, photos=photos, progress=progress, dist=dist)
        elif labels is None:
            raise errors.UserError("no label set given; name the folder that `tag2box label` wrote")
        else:
            base = settings.load(StudentConfig, config, override)
            train_student(labels, out, photos=photos, config=base, progress=progress, dist=dist)
        if dist.is_main:
            options.say(f"trained: {out}; try `tag2box detect {out} PHOTO --draw drawn`")
