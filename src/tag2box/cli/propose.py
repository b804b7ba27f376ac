"""``tag2box propose``: photos in, a store of proposals out."""

import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from tag2box import annotations, errors, extend, images, io, settings
from tag2box.cli import options
from tag2box.formats import datasets, listing
from tag2box.formats.listing import DataSource
from tag2box.parallel.pool import LocalPool, Pool
from tag2box.progress import Progress, TerminalProgress, silent
from tag2box.proposals import base, build, sam_boxes, suitability
from tag2box.proposals.base import ProposalMethod
from tag2box.proposals.store import ProposalStore

_SMALLEST_SIDE = 32  # pixels of a resized photo
_SHOWN_LEFT_OUT = 20
_CHUNK = 4  # photos per task on a cluster: a second or two of work


@dataclass(frozen=True, slots=True)
class ProposeResult:
    """The store, and statistics of a call."""

    store: ProposalStore
    counts: tuple[int, ...]  # boxes per photo, of the photos with proposals
    left_out: tuple[str, ...]  # a line per photo without proposals, and per dataset row that could not be parsed
    seconds: float
    concerns: tuple[suitability.Concern, ...] = ()  # why the proposals may miss objects

    def lines(self) -> tuple[str, ...]:
        """A summary for a terminal."""
        boxes, photos = sum(self.counts), len(self.counts)
        each = f", {boxes / photos:,.0f} per photo ({min(self.counts):,} to {max(self.counts):,})" if photos else ""
        kind = str(self.store.source["kind"]).replace("_", " ")
        uses = base.uses_of(self.store.source)
        kind += f" (uses {uses})" if uses else ""
        return (
            f"{kind}: {_count(photos, 'photo', 'photos')}, {_count(boxes, 'box', 'boxes')}{each}, "
            f"in {self.seconds:,.0f} s",
            *((f"left out: {len(self.left_out)}, listed below",) if self.left_out else ()),
            f"store: {self.store.path}",
        )


@dataclass(frozen=True, slots=True)
class SnapOptions:
    """Boxes to be snapped by MobileSAM, and the proposals to which the results are added."""

    boxes: Path  # a COCO file, or a list of COCO results
    proposals: Path | None = None  # a store; default: those of the method
    max_prompts: int = sam_boxes.Snapping.max_prompts  # boxes of a photo that are snapped, highest scores first


def propose(
    source: DataSource,
    method: ProposalMethod,
    out: Path,
    *,
    workers: int | None = None,
    pool: Pool | None = None,
    snap: SnapOptions | None = None,
    progress: Progress = silent,
) -> ProposeResult:
    """Compute proposals for the photos of a dataset; unreadable photos are skipped and listed in the result.

    Resumable: the same call continues an interrupted one.

    Args:
        pool: where photos are processed, e.g. a ``RayPool``; default: ``workers`` processes of this machine.
        snap: also add the boxes of MobileSAM's masks at some boxes; uses SA-1B masks.

    Example:
        tag2box.propose(tag2box.DataSource(path=Path("photos")), SelectiveSearch(short_side=200), Path("proposals"))
    """
    io.check_writable(out, is_folder=True)
    start = time.monotonic()
    faults: list[listing.Fault] = []
    photos = _photos(source, faults)
    if snap is not None:
        method = _snapped(snap, photos, method, out)
    store = build.build_proposals(
        photos, method, out, read=images.read_photo, workers=workers, pool=pool, skip_bad=True, progress=progress
    )
    spans = [store.spans[photo.id] for photo in photos if photo.id in store.spans]
    failed = [store.failed[photo.id] for photo in photos if photo.id in store.failed]
    left_out = (*(fault.line for fault in faults), *failed)
    counts = tuple(last - first for first, last in spans)
    return ProposeResult(store, counts, left_out, time.monotonic() - start, suitability.store_concerns(store, photos))


def _photos(source: DataSource, faults: list[listing.Fault]) -> tuple[annotations.Photo, ...]:
    try:
        photos = datasets.read_photos(source, faults.append)
    except KeyboardInterrupt:
        raise errors.Interrupted(
            f"{source.path}: interrupted while the dataset was read; rerun the same command to resume"
        ) from None
    if not photos:
        first = f" ({faults[0].line})" if faults else ""
        raise errors.UserError(f"{source.path}: no photo to search{first}; name a dataset or a folder of photos")
    return photos


def _snapped(
    snap: SnapOptions, photos: Sequence[annotations.Photo], method: ProposalMethod, out: Path
) -> sam_boxes.Snapped:
    """The method that adds snapped boxes to those of a store, or of ``method``."""
    prompts = sam_boxes.read_prompts(snap.boxes, photos)
    snapping = sam_boxes.Snapping(max_prompts=snap.max_prompts)
    if snap.proposals is None:
        return sam_boxes.Snapped(proposals=method, prompts=prompts, snapping=snapping, min_side=method.min_side)
    if snap.proposals.resolve() == out.resolve():
        raise errors.UserError(f"--out {out}: the store of --proposals, which stays as it is; name another folder")
    store = ProposalStore.open(snap.proposals)
    store.check(photo for photo in photos if photo.id not in store.failed)
    return sam_boxes.Snapped(proposals=store, prompts=prompts, snapping=snapping, min_side=method.min_side)


def build_method(kind: str, given: Mapping[str, object], overrides: Sequence[str] = ()) -> ProposalMethod:
    """A proposal method with its defaults for people's own photos, then ``given``, then ``key=value`` overrides.

    Args:
        kind: a name in ``extend.PROPOSAL_METHODS``, or ``package.module:Name``.
        given: settings by name; None is not given, and a short_side of 0 is full size.
    """
    try:
        method = base.default_method(kind)
    except errors.UserError as error:
        raise errors.UserError(f"--method {kind}: {error}") from None
    values = {name: value for name, value in given.items() if value is not None}
    known = {field.name for field in fields(method) if field.init}
    for name in values:
        if name not in known:
            option = "--edge-model" if name == "model" else f"--{name.replace('_', '-')}"
            raise errors.UserError(f"{option}: no setting of {kind}; leave it out, or choose another --method")
    short_side = values.get("short_side")
    if isinstance(short_side, int) and 0 < short_side < _SMALLEST_SIDE:
        raise errors.UserError(f"--short-side {short_side}: expected {_SMALLEST_SIDE} or more, or 0 for full size")
    if short_side == 0:
        values["short_side"] = None
    return settings.load(type(method), [], overrides, base=replace(method, **values))  # type: ignore[arg-type]


def next_command(source: DataSource, classes: str | None, out: Path) -> str:
    """The command to run next: train, or detect if the dataset has no tags."""
    if not datasets.dataset_format(source).has_tags:
        return f"tag2box detect RUN {shlex.quote(str(source.path))} --proposals {shlex.quote(str(out))} --draw drawn"
    given = {
        "--photos": source.photos,
        "--split": source.split,
        "--classes": classes,
        "--data-format": source.format,
    }
    words = [word for option, value in given.items() if value is not None for word in (option, str(value))]
    return shlex.join(["tag2box", "train", str(source.path), *words, "--proposals", str(out), "--out", "runs/mine"])


def _count(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"


def propose_command(
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA",
            help="A dataset of any format, or a folder of photos; with --format parquet also s3://, gs://, http(s)://, "
            "tar shards or a Parquet list of addresses.",
        ),
    ],
    out: Annotated[
        str, typer.Option(help="Folder of the store, or folder or address of the rows, to write or resume.")
    ],
    photos: options.PhotosOption = None,
    split: options.SplitOption = None,
    classes: options.ClassesOption = None,
    data_format: options.DataFormatOption = None,
    method: Annotated[
        str, typer.Option(help=f"{', '.join(extend.PROPOSAL_METHODS)}, or `package.module:Name` of your own.")
    ] = base.DEFAULT_KIND,
    mode: Annotated[Literal["fast", "quality"] | None, typer.Option(help="Of selective search; default: fast.")] = None,
    short_side: Annotated[
        int | None, typer.Option(min=0, help="Resize photos to this short side; 0: full size. Default: 200.")
    ] = None,
    max_boxes: Annotated[int | None, typer.Option(min=1, help="Maximum boxes per photo; default: 2000.")] = None,
    min_side: Annotated[
        int | None, typer.Option(min=0, help="Drop boxes with a shorter side, in pixels of the photo; default: 20.")
    ] = None,
    edge_model: Annotated[
        Path | None,
        typer.Option(help="Structured forest (.yml.gz) for edge_boxes; default: edges from the gradient."),
    ] = None,
    snap: Annotated[
        Path | None,
        typer.Option(
            metavar="BOXES",
            help="COCO boxes of these photos, such as the output of `tag2box detect`: also add the boxes of "
            "MobileSAM's masks there. Uses SA-1B masks.",
        ),
    ] = None,
    proposals: Annotated[
        Path | None,
        typer.Option(help="With --snap: a store to add to, which stays as it is; default: --method is searched."),
    ] = None,
    snap_top: Annotated[
        int, typer.Option(min=1, help="Boxes per photo that --snap takes, highest scores first.")
    ] = sam_boxes.Snapping.max_prompts,
    form: Annotated[
        Literal["store", "parquet"], typer.Option("--format", help="A store, which `train` reads, or Parquet rows.")
    ] = "store",
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; default: one per core.")] = None,
    override: Annotated[
        list[str], typer.Option("--set", metavar="key=value", help="Any other setting of the method; repeatable.")
    ] = [],  # noqa: B006
    on: options.OnOption = "here",
    address: options.AddressOption = None,
) -> None:
    """Compute proposals of photos, for training and detection.

    Resumable: rerun the same command.

    Example: `tag2box propose photos --out proposals`
    """
    from tag2box.cli import row_jobs  # imports much

    given = {
        "mode": mode,
        "short_side": short_side,
        "max_boxes": max_boxes,
        "min_side": min_side,
        "model": edge_model.absolute() if edge_model else None,
    }
    built = build_method(method, given, override)
    if proposals is not None and snap is None:
        raise errors.UserError("--proposals: only with --snap; name the store to be made with --out")
    if row_jobs.are_rows_wanted([data], out, form):
        pool = options.pool_of(on, address, workers=workers, chunk=1) or LocalPool(workers)
        unused = {"--photos": photos, "--split": split, "--classes": classes, "--snap": snap}
        row_jobs.rows_command(partial(row_jobs.propose_rows, [data], built, pool=pool), out, unused)
        return
    source = options.data_source(Path(data), photos, split, classes, data_format)
    snapping = None if snap is None else SnapOptions(snap, proposals, snap_top)
    place, shared = Path(out), options.pool_of(on, address, workers=workers, chunk=_CHUNK)
    done = propose(source, built, place, workers=workers, pool=shared, snap=snapping, progress=TerminalProgress())
    for line in done.lines():
        options.say(line)
    options.say(f"next: {next_command(source, classes, place)}")
    for concern in done.concerns:
        options.say(f"warning: {concern}", err=True)
    for line in done.left_out[:_SHOWN_LEFT_OUT]:
        options.say(f"left out: {line}", err=True)
    more = len(done.left_out) - _SHOWN_LEFT_OUT
    if more > 0:
        options.say(f"left out: {more} more; `tag2box data check` lists them all", err=True)
    if done.left_out:
        raise typer.Exit(1)
