"""``tag2box report``: one self-contained HTML page about one or more runs; ``track``: their figures to trackers."""

import shlex
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from tag2box import annotations, errors, io, recipes, run_detect, run_inputs, runs as run_folders
from tag2box.cli import evaluate, inputs, options, student, training_data
from tag2box.formats import datasets, detection_files
from tag2box.identity import AnyConfig, RunIdentity
from tag2box.progress import Progress, TerminalProgress, silent
from tag2box.proposals.recall import measure_recall
from tag2box.reporting import gallery, records, report_page
from tag2box.training import checkpoint, events, trackers


def report(
    runs: Sequence[Path],
    out: Path,
    *,
    title: str = "tag2box report",
    test_photos: Path | None = None,
    test_truth: Path | None = None,
    train_truth: Path | None = None,
    split: str = "test",
    train_split: str = "train",
    test_proposals: Path | None = None,
    photos: Path | None = None,
    commands: Sequence[str] = (),
    progress: Progress = silent,
) -> None:
    """Write a page about one or more runs, the baseline first; runs without metrics are evaluated if truth is given.

    Args:
        test_photos: folder of the photos of ``test_truth``, if they are not in the usual place of its format.
        train_truth: ground truth of the training photos, for CorLoc and pictures; training never reads it.
        split: image list of a VOC folder given as ``test_truth``; ``train_split`` likewise.
        test_proposals: proposal store of the test photos; default: beside ``out``.
        photos: folder of photos without ground truth: the detections of the runs on some of them are shown.
        commands: shown on the page, to reproduce it; default: those that train the runs again.
    """
    if not runs:
        raise errors.UserError("no runs given; name at least one run folder")
    if test_photos is not None and test_truth is None:
        raise errors.UserError("--test-photos is the folder of the photos of --test-truth; give that too")
    if train_truth is not None and test_truth is None:
        raise errors.UserError("--train-truth needs --test-truth as well: a run is evaluated on both at once")
    for place in (out, *(run / evaluate.METRICS_FILE for run in runs if test_truth is not None)):
        io.check_writable(place)
    config = run_folders.read_any_config(runs[0])
    for run in runs:
        _check(run)
    own = _own_photos(photos)
    training = _photos(runs[0], config, progress)
    test_set = train_set = None
    if test_truth is not None:
        source = evaluate.truth_source(test_truth, photos=test_photos, split=split, classes=training.classes)
        test_set = evaluate.eval_set(source, test_proposals or out.parent / "test-proposals")
    if train_truth is not None:
        truth = datasets.read_truth(evaluate.truth_source(train_truth, split=train_split, classes=training.classes))
        ordered = evaluate.truth_in_order(truth, training.photos, train_truth)
        train_set = evaluate.EvalSet(training.photos, ordered, _train_proposals(config, out))
    for run in runs:
        if test_set is not None:
            evaluate.measure_run(run, test=test_set, train=train_set, progress=progress)
    named = {"train": train_set, "test": test_set}
    inputs = records.ReportInputs(
        title=title,
        runs=[
            replace(_record(run, test_set, train_set), own_detections=_detections(run, own, progress)) for run in runs
        ],
        commands=commands or training_commands(runs),
        own_photos={photo.id: photo.path for photo in own},
        train_photos={photo.id: photo.path for photo in training.photos},
        test_photos={photo.id: photo.path for photo in test_set.photos} if test_set else {},
        train_truth=train_set.truth if train_set else None,
        test_truth=test_set.truth if test_set else None,
        proposal_recall=_recalls(named, config, progress),
    )
    report_page.write_report(inputs, out)


def training_commands(runs: Sequence[Path]) -> list[str]:
    """The command lines that train runs again, from the settings that they recorded."""
    lines = []
    for run in runs:
        config = run_folders.read_any_config(run)
        words = ["train"] if isinstance(config, recipes.Config) else ["student", f"{config.labels}"]
        lines.append(["tag2box", *words, "--config", f"{run / run_folders.CONFIG_FILE}", "--out", f"{run}-again"])
    return [shlex.join(words) for words in lines]


def _own_photos(folder: Path | None) -> tuple[annotations.Photo, ...]:
    """Photos of a folder, evenly spaced: as many as a page shows."""
    if folder is None:
        return ()
    found = inputs.find_photos([folder], [])
    if not found:
        raise errors.UserError(f"{folder}: no photo can be read; name a folder of photos with --photos")
    return gallery.evenly_spaced(found, gallery.OWN_PHOTOS)


def _detections(
    run: Path, photos: Sequence[annotations.Photo], progress: Progress
) -> Mapping[str, annotations.Detections] | None:
    if not photos:
        return None
    return run_detect.detect_photos(run_folders.open_run(run), photos, skipped=[], progress=progress)


def _check(run: Path) -> None:
    """Refuse a run whose files do not belong together; say what training warned of."""
    if (run / run_folders.CONFIG_FILE).exists() and checkpoint.has_checkpoint(run):
        run_folders.check_run(run, run_folders.read_any_config(run))
    log = events.read_events(run) if (run / events.EVENTS_FILE).exists() else ()
    for event in log:
        if event["event"] == "warning":
            warnings.warn(f"{run}: iteration {event.get('iteration')}: {event.get('problem')}", stacklevel=2)


def _photos(run: Path, config: AnyConfig, progress: Progress) -> annotations.TaggedPhotos:
    """The photos of a run, if their classes are still those that it was trained with; proposals are made if missing."""
    identity = RunIdentity.read(run)
    if isinstance(config, recipes.Config):
        photos, place = training_data.read_training(config), config.data.tags
    else:
        labels = student.read_labels(config)
        photos, place = labels.content.tagged(), config.labels
    if identity is not None:
        identity.check_classes(photos.classes, place)
    return training_data.with_proposals(config, photos, progress)[0] if isinstance(config, recipes.Config) else photos


def _record(run: Path, test: evaluate.EvalSet | None, train: evaluate.EvalSet | None) -> records.RunRecord:
    """A run, with the detections that were stored when it was evaluated."""
    found = _stored(run / evaluate.DETECTIONS_FILE, test)
    tops = _stored(run / evaluate.TOP_BOXES_FILE, train)
    return replace(records.read_run(run, test_detections=found), train_top_boxes=tops)


def _stored(path: Path, data: evaluate.EvalSet | None) -> Mapping[str, annotations.Detections] | None:
    return None if data is None or not path.exists() else detection_files.read_detections(path, data.truth)


def _train_proposals(config: AnyConfig, out: Path) -> Path:
    """The proposal store of the training photos; a student has none, other runs of the page may need one."""
    own = config.data.proposals if isinstance(config, recipes.Config) else out.parent / "train-proposals"
    return run_folders.required(own)


def _recalls(
    named: Mapping[str, evaluate.EvalSet | None], config: AnyConfig, progress: Progress
) -> dict[str, records.ProposalRecall]:
    """The recall of proposals on training and test photos; none if the first run is a student."""
    if not isinstance(config, recipes.Config):
        return {}
    return {name: _recall(data, config, progress) for name, data in named.items() if data is not None}


def _recall(data: evaluate.EvalSet, config: recipes.Config, progress: Progress) -> records.ProposalRecall:
    store = run_inputs.proposals_of(data.photos, config, data.proposals, progress)
    got = measure_recall([store.boxes(name) for name in data.truth.ids], data.truth)
    return records.ProposalRecall(
        {str(t): r for t, r in zip(got.thresholds, got.recall, strict=True)},
        got.mean_best_overlap,
        got.boxes_per_image,
    )


def report_command(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, the baseline first.")],
    out: Annotated[Path, typer.Option(help="HTML file to write.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="Headline of the page.")] = "tag2box report",
    test_photos: Annotated[
        Path | None, typer.Option(help="Folder of the photos of --test-truth, if its format does not name it.")
    ] = None,
    test_truth: Annotated[
        Path | None, typer.Option(help="Ground truth of test photos: COCO JSON or VOC folder.")
    ] = None,
    train_truth: Annotated[Path | None, typer.Option(help="Ground truth of the training photos, for CorLoc.")] = None,
    split: Annotated[str, typer.Option(help="Image list of a VOC folder given as test truth.")] = "test",
    train_split: Annotated[str, typer.Option(help="Image list of a VOC folder given as training truth.")] = "train",
    photos: Annotated[
        Path | None, typer.Option(help="Folder of your own photos, without ground truth: detections are shown.")
    ] = None,
) -> None:
    """Write a self-contained HTML report on one or more runs.

    Example: `tag2box report runs/demo/oicr-plus runs/demo/od-wscl --out report.html --test-photos test/photos
    --test-truth test/truth.json`
    """
    io.check_writable(out)  # before any run is read
    report(
        runs,
        out,
        title=title,
        test_photos=test_photos,
        test_truth=test_truth,
        train_truth=train_truth,
        split=split,
        train_split=train_split,
        photos=photos,
        commands=[*training_commands(runs), shlex.join(["tag2box", *sys.argv[1:]])],
        progress=TerminalProgress(),
    )
    options.say(f"report: {out}")


# ---------------------------------------------------------------- trackers


def track(run: Path, to: str, *, where: str | None = None) -> trackers.Feed:
    """Pass the losses, pseudo labels and metrics of a run to a tracker: tensorboard, mlflow, wandb or your own.

    Nothing is passed on twice. ``where`` is a folder, or the address of an MLflow server.
    """
    if not (run / events.EVENTS_FILE).exists():
        raise errors.UserError(f"{run}: no {events.EVENTS_FILE} here; expected the folder of a run")
    return trackers.feed(run, to, where, run / evaluate.METRICS_FILE)


def track_command(
    run: Annotated[Path, typer.Argument(help="Run folder, also of a student.")],
    to: Annotated[str, typer.Option(help="tensorboard, mlflow, wandb, or package.module:Name of your own.")],
    where: Annotated[str | None, typer.Option(help="Folder, or address of an MLflow server.")] = None,
) -> None:
    """Pass the losses, pseudo labels and metrics of a run to TensorBoard, MLflow or Weights & Biases.

    Nothing is passed on twice. Example: `tag2box track runs/mine --to tensorboard`.
    During training: `tag2box train ... --track tensorboard`.
    """
    passed = track(run, to, where=where)
    options.say(f"{passed.count} events passed on to {to}: {passed.tracker.place if passed.tracker else ''}")
