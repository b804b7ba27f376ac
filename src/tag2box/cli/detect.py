"""``tag2box detect``: photos in, boxes out; in this process, under torchrun, or in a pool of processes."""

import hashlib
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer

from tag2box import annotations, errors, extend, io, run_inputs, runs, settings
from tag2box.annotations import Detections, Photo
from tag2box.cli import inputs, label_trust, options
from tag2box.formats import detection_log, export as exports, voc_boxes
from tag2box.inference import predict
from tag2box.parallel.pool import Pool
from tag2box.progress import Progress, TerminalProgress, silent
from tag2box.training.dist import SINGLE_PROCESS, DistContext, init_distributed
from tag2box.training.feature_cache import weights_digest

OnFound = Callable[[str, Detections], None]
"""Receives the id and the detections of a photo."""
_EXCHANGED = 64  # photos whose detections are sent to the other ranks at once


def detect(
    run: inputs.AnyPath,
    photos: inputs.AnyPath | Sequence[inputs.AnyPath],
    out: Path | None = None,
    *,
    export: str = "coco",
    split: str | None = None,
    every: str = inputs.EVERY,
    proposals: Path | None = None,
    draw: Path | None = None,
    voc: Path | None = None,
    min_score: float | None = None,
    trust: Path | None = None,
    overrides: Sequence[str] = (),
    skipped: list[str] | None = None,
    on_found: OnFound | None = None,
    pool: Pool | None = None,
    dist: DistContext = SINGLE_PROCESS,
    progress: Progress = silent,
) -> dict[str, Detections]:
    """Detect objects in photos (files, folders, patterns) and videos; keeps scores of at least ``min_score``.

    With ``out``, the same call resumes after an interruption: finished photos are kept beside it until it is written.

    Args:
        out: file or folder to write.
        export: format of ``out``: a name in ``extend.EXPORT_FORMATS``, or ``package.module:Name``.
        split: if ``photos`` is a dataset, the split of it.
        every: of a video, each how many frames (``30``) or seconds (``2s``) one is looked at; ids are VIDEO#NUMBER.
        proposals: proposal store of the photos; built with the method of the training photos if it does not exist.
        draw: folder for pictures with the boxes drawn.
        voc: folder for the result files of VOC's evaluation server, which ranks by score: with boxes of all scores.
        trust: file of ``tag2box trust``: scores become probabilities; default ``min_score``: each class's threshold.
        overrides: of ``inference``, as ``--set`` takes them: other scales, horizontal flips, another NMS.
        skipped: if given, photos that cannot be read are left out, and a line about each is added to it.
        on_found: called with the id and the detections of each photo, which are then not returned, and need no memory.
        pool: where photos are processed, e.g. a ``RayPool``; default: this process. Boxes are the same.
        dist: ranks that share the photos; all return all detections, rank 0 writes.

    Example:
        boxes = tag2box.detect("runs/mine", ["photo.jpg"])["photo"].boxes
    """
    options.check_score(0.3 if min_score is None else min_score)
    run, places = Path(run), inputs.as_paths(photos)
    if not places:
        raise errors.UserError("no photos given; name files or folders after the run")
    if pool is not None and dist.world_size > 1:
        raise errors.UserError("--on ray: Ray has processes of its own; start the command without torchrun")
    outputs = _outputs(out, export, voc, split)
    for place, is_folder in [*((place, form.is_folder) for form, place in outputs), *([(draw, True)] if draw else [])]:
        io.check_writable(place, is_folder=is_folder)
    trained = with_inference(runs.open_run(run), overrides)
    known = None if trust is None else label_trust.read_trust(trust, detector_identity(trained))
    given = inputs.find_inputs(places, split, every, skipped)
    if given.videos and pool is not None:
        raise errors.UserError(f"{given.videos[0]}: frames are read on this machine; leave out --on ray for videos")
    _check_outputs(outputs, given, trained.classes)
    frames = inputs.with_frames(given, skipped=skipped, dist=dist, progress=progress)
    with detection_log.unfinished_folder(out, is_main=dist.is_main) as work, frames as found_photos:
        found = detect_photos(
            trained, found_photos, proposals=proposals, work=work, skipped=skipped, pool=pool, dist=dist,
            progress=progress,
        )  # fmt: skip
        if skipped and not found:
            shutil.rmtree(work or "", ignore_errors=True)
            raise errors.UserError(f"no photo can be read, {len(skipped)} were skipped; the first: {skipped[0]}")
        found, kept = label_trust.selected(found, trained.classes, known, min_score)
        if dist.is_main:
            done = [photo for photo in found_photos if photo.id in found]
            for form, place in outputs:
                exports.export_detections(form, place, done, trained.classes, found if form.all_scores else kept)
            if draw is not None:
                from tag2box.reporting.gallery import write_drawn  # imports everything that pages need

                write_drawn(done, kept, trained.classes, draw, skipped)
        return _handed_over(kept, on_found)


def _handed_over(found: Mapping[str, Detections], on_found: OnFound | None) -> dict[str, Detections]:
    if on_found is None:
        return dict(found)
    for name, own in found.items():
        on_found(name, own)
    return {}


def _outputs(
    out: Path | None, export: str, voc: Path | None, split: str | None
) -> list[tuple[exports.ExportFormat, Path]]:
    """The formats of the files to write, each with its place."""
    form = exports.export_format(export)
    results = voc_boxes.VocResultsExport("test" if split is None else Path(split).stem)
    return [(made, place) for made, place in ((form, out), (results, voc)) if place is not None]


def _check_outputs(
    outputs: Sequence[tuple[exports.ExportFormat, Path]], given: inputs.Inputs, classes: Sequence[str]
) -> None:
    for form, place in outputs:
        exports.check_export(form, place, given.photos, classes)
        if given.videos and isinstance(form, exports.LabelExport):
            form.placing = "copy"  # frames are temporary files


def with_inference(trained: runs.AnyRun, overrides: Sequence[str]) -> runs.AnyRun:
    """The run with other settings of inference, precision or engine."""
    names = ("inference.", "compute.precision", "compute.engine", "precision")
    other = next((o for o in overrides if not o.strip().startswith(names)), None)
    if other is not None:
        raise errors.UserError(
            f"--set {other}: only inference settings of a trained run can change; expected inference.NAME=VALUE, "
            "compute.precision=VALUE or compute.engine=VALUE"
        )
    return run_inputs.with_overrides(trained, overrides) if overrides else trained


def detect_photos(
    trained: runs.AnyRun,
    photos: Sequence[Photo],
    *,
    proposals: Path | None = None,
    work: Path | None = None,
    skipped: list[str] | None = None,
    pool: Pool | None = None,
    dist: DistContext = SINGLE_PROCESS,
    progress: Progress = silent,
    select: predict.Select | None = None,
    selection: Mapping[str, object] | None = None,
    any_store: bool = False,
) -> Mapping[str, Detections]:
    """All detections of a run in some photos, whose proposals are made with the method of the training photos.

    Args:
        work: folder that keeps proposals and finished photos, from which the next call resumes; the detections are then
            read from it on access, so it must stay as long as they are used.
        skipped: if given, photos that cannot be read are left out, and a line about each is added to it.
        select: reduces the detections of a photo to those that are wanted.
        selection: what ``select`` depends on: finished photos of another one are not used.
        any_store: add photos to ``proposals`` whatever photos it has.
    """
    with tempfile.TemporaryDirectory() as own:
        log = detection_log.DetectionLog(work or Path(own), dist.rank)
        folder = proposals or (work or Path(dist.all_gather_object(own)[0])) / "proposals"
        try:
            with dist.main_process_first():
                if work is not None and dist.is_main:
                    log.open(detector_identity(trained) | dict(selection or {}))
                is_skipping = skipped is not None
                how = {"skip_bad": is_skipping, "any_store": any_store or proposals is None}
                store = run_inputs.boxes_of(trained, photos, folder, progress, pool=pool, **how)
        except errors.Interrupted:
            if proposals is not None or work is not None:
                raise
            advice = "`tag2box propose` writes proposals that are kept"
            raise errors.Interrupted(f"stopped, nothing saved; {advice}") from None
        failed = store.failed if is_skipping else {}
        wanted = [photo for photo in photos if photo.id not in failed]
        done = set(dist.all_gather_object(list(log.finished(wanted, store)) if dist.is_main else [])[0])
        rest = [photo for photo in wanted if photo.id not in done]
        bad = [failed[photo.id] for photo in photos if photo.id in failed] if dist.is_main else []

        def on_photo(photo: Photo, result: Detections | errors.UserError) -> None:
            if isinstance(result, Detections):
                log.add(photo, store, result)
            elif is_skipping:
                bad.append(str(result))
            else:
                raise result

        try:
            _detect(trained, rest, store, on_photo, select, pool=pool, dist=dist, progress=progress)
            log.close()
            _exchange(log.stored, wanted, on_photo, dist)
        finally:
            log.close()
        if skipped is not None:
            skipped += [line for share in dist.all_gather_object(bad) for line in share]
        found = log.stored.of(photos)
        return dict(found) if work is None else found


def _exchange(
    mine: Mapping[str, Detections], photos: Sequence[Photo], on_photo: predict.OnPhoto, dist: DistContext
) -> None:
    """Send the detections of each rank to the others, some photos at a time."""
    if dist.world_size == 1:
        return
    by_id, names = {photo.id: photo for photo in photos}, list(mine)
    known = set(names)
    for first in range(0, max(dist.all_gather_object(len(names))), _EXCHANGED):
        part = {name: mine[name] for name in names[first : first + _EXCHANGED]}
        for share in dist.all_gather_object(part):
            for name, own in share.items():
                if name not in known:
                    known.add(name)
                    on_photo(by_id[name], own)


def _detect(
    trained: runs.AnyRun,
    photos: Sequence[Photo],
    store: annotations.BoxSource,
    on_photo: predict.OnPhoto,
    select: predict.Select | None,
    *,
    pool: Pool | None,
    dist: DistContext,
    progress: Progress,
) -> None:
    if isinstance(trained, runs.StudentRun):
        trained.detect(photos, on_photo, select, pool=pool, dist=dist, progress=progress)
    elif pool is not None:
        detect_in_pool(pool, trained, photos, store, progress=progress, on_photo=on_photo, select=select)
    else:
        trained.detect(photos, store, progress=progress, dist=dist, on_photo=on_photo, select=select)


def detector_identity(trained: runs.AnyRun) -> dict[str, object]:
    """What detections depend on, apart from the photo and its proposals."""
    weights = weights_digest("detector", [trained.detector])
    config = hashlib.sha256(settings.dump(trained.config).encode()).hexdigest()
    return {"format": 1, "weights": weights, "settings": config, **runs.versions()}


# ---------------------------------------------------------------- in a pool of processes


def detect_task(trained: runs.TrainedRun) -> predict.DetectTask:
    """The work of other processes: the detector of a run, with as many threads as here."""
    return predict.DetectTask(
        partial(runs.build_detector, trained.config, len(trained.classes), pretrained=False),
        {name: value.numpy() for name, value in trained.detector.state_dict().items()},
        trained.config.inference,
        trained.config.criterion.rescore,
        trained.config.adaptation.keep_boxes,
        torch.get_num_threads(),
    )


def detect_in_pool(
    pool: Pool,
    trained: runs.TrainedRun,
    photos: Sequence[Photo],
    store: annotations.BoxSource,
    *,
    progress: Progress = silent,
    on_photo: predict.OnPhoto | None = None,
    select: predict.Select | None = None,
) -> dict[str, Detections]:
    """Detections by photo id, in the order of the photos, computed by a pool; ``run_detector`` has the callbacks."""
    work = detect_task(trained)
    tasks = (
        predict.PhotoTask(photo, store.boxes(photo.id).numpy(), store.scores(photo.id).numpy()) for photo in photos
    )
    results = pool(work, tasks, lost=predict.lost_photo, threads=work.threads)
    found: dict[str, Detections] = {}
    with progress("detecting", len(photos)) as bar, closing(results) as finished:
        for task, result in finished:
            outcome = result.outcome()
            if isinstance(outcome, Detections):
                outcome = outcome if select is None else select(task.photo, outcome)
            if on_photo is not None:
                on_photo(task.photo, outcome)
            elif isinstance(outcome, Detections):
                found[task.photo.id] = outcome
            else:
                raise outcome
            bar.advance()
    return {photo.id: found[photo.id] for photo in photos if photo.id in found}


# ---------------------------------------------------------------- the command


def detect_command(
    run: Annotated[Path, typer.Argument(help="A trained run.")],
    photos: Annotated[
        list[str],  # as paths, 50,000 would take typer some seconds
        typer.Argument(
            help="Photos, folders, patterns, videos; - reads a list on standard input; with --split, a dataset; with "
            "--format parquet also s3://, gs://, http(s)://, tar shards and Parquet lists of addresses."
        ),
    ],
    out: Annotated[
        str | None,
        typer.Option(help="File, folder or address to write, as the format needs. Default: detections.json, or rows."),
    ] = None,
    split: options.SplitOption = None,
    every: inputs.EveryOption = inputs.EVERY,
    proposals: Annotated[
        Path | None, typer.Option(help="Proposal store of these photos; default: made for this call only.")
    ] = None,
    draw: Annotated[Path | None, typer.Option(help="Folder for pictures with the boxes drawn.")] = None,
    voc: Annotated[
        Path | None,
        typer.Option(help="Folder for comp4_det_SPLIT_CLASS.txt, the files of VOC's evaluation server; all scores."),
    ] = None,
    export: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="NAME",
            help=f"Format of OUT: {', '.join(extend.EXPORT_FORMATS)}, parquet, or `package.module:Name` of your own.",
        ),
    ] = "coco",
    min_score: Annotated[
        float | None, typer.Option(help="Drop detections below; default: 0.3, with --trust each class's threshold.")
    ] = None,
    trust: label_trust.TrustOption = None,
    override: Annotated[
        list[str],
        typer.Option(
            "--set", metavar="inference.a=b", help="Override an inference setting, e.g. inference.mirror=true"
        ),
    ] = [],  # noqa: B006
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Skip photos that cannot be read, name them, and exit with code 1.")
    ] = False,
    on: options.OnOption = "here",
    address: options.AddressOption = None,
) -> None:
    """Detect objects in photos with a trained run.

    Resumable: rerun the same command. Under torchrun, the processes share the photos.

    Example: `tag2box detect runs/mine holiday/ --out boxes.json --draw drawn`; of a video, one frame per 2 s:
    `tag2box detect runs/mine clip.mp4 --every 2s`; of object storage, on a cluster:
    `tag2box detect runs/mine s3://bucket/photos/ --format parquet --out s3://bucket/found --on ray`
    """
    from tag2box.cli import row_jobs  # imports this module

    if row_jobs.are_rows_wanted(photos, out, export):
        how = partial(row_jobs.detect_rows, proposals=proposals, min_score=min_score, trust=trust, overrides=override)
        compute = partial(how, run, photos, pool=options.pool_of(on, address, chunk=1, gpus=1))
        row_jobs.rows_command(compute, out, {"--split": split, "--draw": draw, "--voc": voc})
        return
    place = Path(out or ("detections" if exports.export_format(export).is_folder else "detections.json"))
    skipped: list[str] | None = [] if skip_bad else None
    counts: list[int] = []
    with init_distributed() as dist:
        detect(
            run,
            dist.all_gather_object(inputs.with_listed(inputs.as_paths(photos)) if dist.is_main else [])[0],
            place,
            export=export,
            split=split,
            every=every,
            proposals=proposals,
            draw=draw,
            voc=voc,
            min_score=min_score,
            trust=trust,
            overrides=override,
            skipped=skipped,
            on_found=lambda _, own: counts.append(len(own)),
            pool=options.pool_of(on, address, chunk=1),
            dist=dist,
            progress=TerminalProgress() if dist.is_main else silent,
        )
        if dist.is_main:
            hint = "" if any(counts) else "; no score is high enough, try a lower --min-score"
            options.say(f"{sum(counts)} boxes in {len(counts)} photos: {place}{hint}")
            for what, written in (("pictures", draw), ("files for VOC's evaluation server", voc)):
                if written is not None:
                    options.say(f"{what}: {written}")
            for line in skipped or ():
                options.say(f"skipped: {line}", err=True)
    if skipped:
        raise typer.Exit(1)
