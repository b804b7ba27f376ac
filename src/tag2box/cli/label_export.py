"""``tag2box export`` and ``tag2box convert``: label sets, networks and datasets in the formats of other tools."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, cast

import typer

from tag2box import errors, extend, runs
from tag2box.cli import model_export, options
from tag2box.formats import export as exports, listing, rows
from tag2box.labels.journal import read_reviews
from tag2box.labels.label_set import LabelSet, is_label_set
from tag2box.labels.labelled import LabelledPhotos
from tag2box.labels.reviews import Reviews, apply_reviews
from tag2box.progress import Progress, TerminalProgress, silent
from tag2box.student.onnx_graph import ExportOutputs

SPLIT_HINT = "expected shares such as train=0.8,val=0.2"


def export(
    labels: Path | LabelSet,
    out: Path,
    *,
    export: str = "coco",
    photos: Path | None = None,
    splits: Mapping[str, float] | None = None,
    placing: exports.Placing = "link",
    only_reviewed: bool = False,
    progress: Progress = silent,
) -> LabelledPhotos:
    """Write a label set in the format of another tool; returns what was written.

    Photos that were reviewed (``tag2box review``) have the boxes of their review.

    Args:
        labels: the folder of a label set; or a label set, which is written without its reviews.
        out: file or folder to write; nothing may be there.
        export: a name in ``extend.EXPORT_FORMATS``, or ``package.module:Name``.
        photos: root of the photos, if they were moved since.
        splits: shares of splits, such as ``{"train": 0.8, "val": 0.2}``; default: those of the label set.
        placing: photos of a folder format are linked, copied, or left out.
        only_reviewed: leave out photos whose review is not finished.

    Example:
        tag2box.export(Path("labels"), Path("yolo"), export="yolo", splits={"train": 0.8, "val": 0.2})
    """
    opened = labels if isinstance(labels, LabelSet) else LabelSet.open(labels, photos)
    opened.verify(progress)
    reviews = Reviews(opened.digest) if isinstance(labels, LabelSet) else read_reviews(labels, opened)
    if only_reviewed and not len(reviews):
        where = "the label set" if isinstance(labels, LabelSet) else labels
        raise errors.UserError(f"{where}: no photo is reviewed; review some first (tag2box review), or export all")
    content = _split(apply_reviews(opened, reviews, only_reviewed=only_reviewed), splits)
    exports.export_labels(export, out, content, placing=placing)
    return content


def convert(
    source: Path | listing.DataSource,
    out: Path,
    *,
    export: str,
    splits: Mapping[str, float] | None = None,
    placing: exports.Placing = "link",
    skipped: list[str] | None = None,
) -> LabelledPhotos:
    """Convert a dataset of any format, with its tags and boxes, to another format; returns what was written.

    Args:
        source: a dataset, or a label set.
        out: file or folder to write; nothing may be there.
        export: a name in ``extend.EXPORT_FORMATS``, or ``package.module:Name``.
        splits: as of ``export``; default: those of the dataset.
        placing: photos of a folder format are linked, copied, or left out.
        skipped: if given, faulty photos and rows are left out, and a line about each is added to it.

    Example:
        tag2box.convert(Path("cvat/annotations.xml"), Path("yolo"), export="yolo")
    """
    found = source if isinstance(source, listing.DataSource) else listing.DataSource(path=source)
    on_fault = listing.refuse if skipped is None else (lambda fault: skipped.append(fault.line))
    content = _split(exports.read_labelled(found, on_fault), splits)
    exports.export_labels(export, out, content, placing=placing)
    return content


def _split(content: LabelledPhotos, splits: Mapping[str, float] | None) -> LabelledPhotos:
    return exports.with_splits(content, splits) if splits else content


def parse_splits(text: str | None) -> dict[str, float]:
    """The shares that --splits names: ``train=0.8,val=0.2``."""
    shares: dict[str, float] = {}
    for part in (text or "").split(",") if text else ():
        name, _, share = (word.strip() for word in part.partition("="))
        try:
            value = float(share)
        except ValueError:
            value = -1.0
        if not name or name in shares or not 0 <= value <= 1e6:
            raise errors.UserError(f"--splits {text}: {SPLIT_HINT}")
        shares[name] = value
    if text and not sum(shares.values()) > 0:
        raise errors.UserError(f"--splits {text}: {SPLIT_HINT}")
    return shares


# ---------------------------------------------------------------- the commands

_FormatHelp = f"{', '.join(extend.EXPORT_FORMATS)}, or `package.module:Name` of your own."
_SplitsOption = Annotated[
    str | None,
    typer.Option("--splits", metavar="SHARES", help="Divide the photos at random: train=0.8,val=0.2."),
]
_CopyOption = Annotated[
    exports.Placing,
    typer.Option("--copy", help="Photos in a folder format: link to them, copy them, or none."),
]


def export_command(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="A label set of `tag2box label`, or a run of `tag2box student`.")
    ],
    form: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="NAME",
            help=f"Of a label set: {_FormatHelp} Default: coco. Of a run: {', '.join(model_export.MODEL_SUFFIXES)}; "
            "default: onnx.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="File or folder to write; default: named after the format.")] = None,
    photos: options.PhotosOption = None,
    splits: _SplitsOption = None,
    copy: Annotated[
        exports.Placing | None,
        typer.Option("--copy", help="Photos in a folder format: link to them (default), copy them, or none."),
    ] = None,
    only_reviewed: Annotated[
        bool, typer.Option("--only-reviewed", help="Leave out photos whose review is not finished.")
    ] = False,
    size: Annotated[
        str | None,
        typer.Option(metavar="PIXELS", help="Input of a network: 384, or height x width as 384x640; default: its own."),
    ] = None,
    is_dynamic: Annotated[bool, typer.Option("--dynamic", help="Input of any size, and any number of photos.")] = False,
    outputs: Annotated[
        ExportOutputs | None,
        typer.Option(help="Boxes after NMS (default), boxes and scores of all cells, or those as YOLOv8 gives them."),
    ] = None,
    is_int8: Annotated[bool, typer.Option("--int8", help="Compute in eight bits; needs --calibrate.")] = False,
    calibrate: Annotated[
        list[Path], typer.Option(metavar="PHOTOS", help="Photos, or a folder, to find the ranges for --int8.")
    ] = [],  # noqa: B006
) -> None:
    """Write a label set in the format of another tool, or the network of a student run for other runtimes.

    Reviewed photos have the boxes of their review.

    Example: `tag2box export labels --format yolo --splits train=0.8,val=0.2 --out yolo`, or of a student
    `tag2box export runs/student --format onnx --out model.onnx`
    """
    if _is_model(source, form):
        _refuse(
            source, "a run", {"--photos": photos, "--splits": splits, "--copy": copy, "--only-reviewed": only_reviewed}
        )
        if is_int8 != bool(calibrate):
            raise errors.UserError("--int8 and --calibrate PHOTOS belong together; give both, or neither")
        _export_run(source, form or "onnx", out, model_export.parse_size(size), is_dynamic, outputs, calibrate)
        return
    chosen = {"--size": size, "--dynamic": is_dynamic, "--outputs": outputs, "--int8": is_int8}
    _refuse(source, "a label set", {**chosen, "--calibrate": calibrate})
    name = form or "coco"
    place = out or Path(name if exports.export_format(name).is_folder else f"{name}{_suffix(name)}")
    shares = parse_splits(splits)
    content = export(
        source,
        place,
        export=name,
        photos=photos,
        splits=shares,
        placing=copy or "link",
        only_reviewed=only_reviewed,
        progress=TerminalProgress(),
    )
    _say(content, place)


def _is_model(source: Path, form: str | None) -> bool:
    """Whether a network is meant: by what is there, and by the format where that is neither."""
    is_run, is_model_format = runs.has_run(source) and not is_label_set(source), form in model_export.MODEL_SUFFIXES
    if is_run and form is not None and not is_model_format:
        raise errors.UserError(
            f"{source}: a run, --format {form} is for label sets; expected {' or '.join(model_export.MODEL_SUFFIXES)}, "
            "or name a folder of `tag2box label`"
        )
    if is_model_format and is_label_set(source):
        raise errors.UserError(f"{source}: a label set, --format {form} is for runs of `tag2box student`; name one")
    return is_run or is_model_format


def _refuse(source: Path, what: str, given: Mapping[str, object]) -> None:
    """Raise if an option is given that does nothing here."""
    for name, value in given.items():
        if value:
            raise errors.UserError(f"{name}: has no effect, {source} is {what}; leave it out")


def _export_run(
    run: Path,
    form: str,
    out: Path | None,
    size: tuple[int, int] | None,
    is_dynamic: bool,
    outputs: ExportOutputs | None,
    calibrate: Sequence[Path],
) -> None:
    place = out or Path(f"model{model_export.MODEL_SUFFIXES[form]}")
    made = model_export.export_model(
        run,
        place,
        export=cast(model_export.ModelFormat, form),
        size=size,
        is_dynamic=is_dynamic,
        outputs=outputs,
        calibrate=calibrate,
        progress=TerminalProgress(),
    )
    scores, boxes = made.difference.scores, made.difference.boxes
    options.say(f"{place}: scores differ from torch by at most {scores:.1g}, boxes by {boxes:.1g} of the side")
    for other in made.files[1:]:
        options.say(f"beside it: {other.name}")


def convert_dataset_command(
    source: Annotated[
        str,
        typer.Argument(
            metavar="DATA",
            help="CSV of tags, COCO JSON, VOC or YOLO folder, tree of class folders, a label set, or the rows of "
            "`tag2box detect --format parquet`, also in object storage.",
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="File or folder to write.")],
    form: Annotated[str, typer.Option("--to", metavar="NAME", help=_FormatHelp)],
    photos: options.PhotosOption = None,
    split: options.SplitOption = None,
    classes: options.ClassesOption = None,
    data_format: options.DataFormatOption = None,
    splits: _SplitsOption = None,
    copy: _CopyOption = "link",
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Skip what is faulty, name it, and exit with code 1.")
    ] = False,
) -> None:
    """Convert tags and boxes of a dataset, or a label set, from any format to any other.

    Example: `tag2box convert cvat/annotations.xml yolo --to yolo`
    """
    if rows.is_rows(source):
        from tag2box.cli.row_jobs import convert_rows  # imports much

        convert_rows(source, out, form)
        return
    skipped: list[str] | None = [] if skip_bad else None
    data = options.data_source(Path(source), photos, split, classes, data_format)
    content = convert(data, out, export=form, splits=parse_splits(splits), placing=copy, skipped=skipped)
    _say(content, out)
    for line in skipped or ():
        options.say(f"skipped: {line}", err=True)
    if skipped:
        raise typer.Exit(1)


def _suffix(form: str) -> str:
    return ".csv" if form == "csv" else ".json"


def _say(content: LabelledPhotos, out: Path) -> None:
    boxes = sum(len(photo.labels) for photo in content.photos)
    doubtful = sum(len(photo.doubtful) for photo in content.photos)
    reviewed = sum(any(box.source == "review" for box in photo.boxes) for photo in content.photos)
    note = f" ({reviewed} with boxes of a review)" if reviewed else ""
    options.say(f"{boxes} boxes and {doubtful} ignore regions of {len(content)} photos{note}: {out}")
