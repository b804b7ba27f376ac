"""``tag2box propose``: photos in, a store of proposals out."""

import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from tag2box import errors, extend, images, settings
from tag2box.cli import options
from tag2box.formats import datasets, listing
from tag2box.formats.listing import DataSource
from tag2box.parallel.pool import Pool
from tag2box.progress import Progress, TerminalProgress, silent
from tag2box.proposals import base, build
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

    def lines(self) -> tuple[str, ...]:
        """A summary for a terminal."""
        boxes, photos = sum(self.counts), len(self.counts)
        each = f", {boxes / photos:,.0f} per photo ({min(self.counts):,} to {max(self.counts):,})" if photos else ""
        kind = str(self.store.source["kind"]).replace("_", " ")
        return (
            f"{kind}: {_count(photos, 'photo', 'photos')}, {_count(boxes, 'box', 'boxes')}{each}, "
            f"in {self.seconds:,.0f} s",
            *((f"left out: {len(self.left_out)}, listed below",) if self.left_out else ()),
            f"store: {self.store.path}",
        )


def propose(
    source: DataSource,
    method: ProposalMethod,
    out: Path,
    *,
    workers: int | None = None,
    pool: Pool | None = None,
    progress: Progress = silent,
) -> ProposeResult:
    """Compute proposals for the photos of a dataset; unreadable photos are skipped and listed in the result.

    Resumable: the same call continues an interrupted one.

    Args:
        pool: where photos are processed, e.g. a ``RayPool``; default: ``workers`` processes of this machine.

    Example:
        tag2box.propose(tag2box.DataSource(path=Path("photos")), SelectiveSearch(short_side=200), Path("proposals"))
    """
    start = time.monotonic()
    faults: list[listing.Fault] = []
    try:
        photos = datasets.read_photos(source, faults.append)
    except KeyboardInterrupt:
        raise errors.Interrupted(
            f"{source.path}: interrupted while the dataset was read; rerun the same command to resume"
        ) from None
    if not photos:
        first = f" ({faults[0].line})" if faults else ""
        raise errors.UserError(f"{source.path}: no photo to search{first}; name a dataset or a folder of photos")
    store = build.build_proposals(
        photos, method, out, read=images.read_photo, workers=workers, pool=pool, skip_bad=True, progress=progress
    )
    spans = [store.spans[photo.id] for photo in photos if photo.id in store.spans]
    failed = [store.failed[photo.id] for photo in photos if photo.id in store.failed]
    left_out = (*(fault.line for fault in faults), *failed)
    return ProposeResult(store, tuple(last - first for first, last in spans), left_out, time.monotonic() - start)


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
    for name in values:
        if not hasattr(method, name):
            option = "--edge-model" if name == "model" else f"--{name}"
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
    data: options.DataArgument,
    out: Annotated[Path, typer.Option(help="Folder of the store to write, or to resume.")],
    photos: options.PhotosOption = None,
    split: options.SplitOption = None,
    classes: options.ClassesOption = None,
    data_format: options.DataFormatOption = None,
    method: Annotated[
        str, typer.Option(help=f"{', '.join(extend.PROPOSAL_METHODS)}, or `package.module:Name` of your own.")
    ] = "selective_search",
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
    source = options.data_source(data, photos, split, classes, data_format)
    given = {
        "mode": mode,
        "short_side": short_side,
        "max_boxes": max_boxes,
        "min_side": min_side,
        "model": edge_model.absolute() if edge_model else None,
    }
    built = build_method(method, given, override)
    pool = options.pool_of(on, address, workers=workers, chunk=_CHUNK)
    done = propose(source, built, out, workers=workers, pool=pool, progress=TerminalProgress())
    for line in done.lines():
        typer.echo(line)
    typer.echo(f"next: {next_command(source, classes, out)}")
    for line in done.left_out[:_SHOWN_LEFT_OUT]:
        typer.echo(f"left out: {line}", err=True)
    more = len(done.left_out) - _SHOWN_LEFT_OUT
    if more > 0:
        typer.echo(f"left out: {more} more; `tag2box data check` lists them all", err=True)
    if done.left_out:
        raise typer.Exit(1)
