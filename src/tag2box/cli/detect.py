"""``tag2box detect``: photos in, boxes out; in this process, under torchrun, or in a pool of processes."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from tag2box import errors, extend, io, run_detect, runs
from tag2box.annotations import Detections
from tag2box.cli import inputs, label_trust, options, row_jobs
from tag2box.formats import detection_log, export as exports, voc_boxes
from tag2box.parallel.pool import Pool
from tag2box.progress import Progress, TerminalProgress, silent
from tag2box.training.dist import SINGLE_PROCESS, DistContext, init_distributed

OnFound = Callable[[str, Detections], None]
"""Receives the id and the detections of a photo."""


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
    trained = run_detect.with_inference(runs.open_run(run), overrides)
    known = None if trust is None else label_trust.read_trust(trust, run_detect.detector_identity(trained))
    given = inputs.find_inputs(places, split, every, skipped)
    if given.videos and pool is not None:
        raise errors.UserError(f"{given.videos[0]}: frames are read on this machine; leave out --on ray for videos")
    _check_outputs(outputs, given, trained.classes)
    frames = inputs.with_frames(given, skipped=skipped, dist=dist, progress=progress)
    with detection_log.unfinished_folder(out, is_main=dist.is_main) as work, frames as found_photos:
        found = run_detect.detect_photos(
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
    if row_jobs.are_rows_wanted(photos, out, export):
        how = partial(row_jobs.detect_rows, proposals=proposals, min_score=min_score, trust=trust, overrides=override)
        compute = partial(how, run, photos, pool=options.pool_of(on, address, chunk=1))
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
