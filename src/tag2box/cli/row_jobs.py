"""``detect`` and ``propose`` into rows: photos of any storage in, Parquet parts out; rows in the formats of tools."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import typer

from tag2box import errors, images, io, run_detect, runs, storage
from tag2box.annotations import Photo
from tag2box.cli import label_trust, options
from tag2box.formats import addresses, export as exports, row_parts, rows
from tag2box.inference.predict import PhotoTask
from tag2box.labels.trust import Trust
from tag2box.parallel.pool import LocalPool, Pool
from tag2box.progress import Progress, TerminalProgress, silent
from tag2box.proposals import build
from tag2box.proposals.base import ProposalMethod
from tag2box.proposals.store import INDEX, ProposalStore

ROW_FORMAT = "parquet"
"""The ``--format`` of rows."""


# ---------------------------------------------------------------- the work on a photo


@dataclass(frozen=True)
class ProposeRow:
    """The proposals of a photo."""

    method: ProposalMethod

    def __call__(self, photo: addresses.FetchedPhoto) -> dict[str, object]:
        """Columns of a row."""
        opened = _photo(photo)
        found = build.search_photo(self.method, images.read_photo, opened)
        if found.boxes is None or found.scores is None:
            raise errors.UserError(found.problem)
        return {**_size(opened), "boxes": found.boxes.tolist(), "scores": found.scores.tolist()}


@dataclass(frozen=True)
class DetectRow:
    """The detections of a photo: its proposals are those of a store, or searched here; a student needs none."""

    find: run_detect.DetectTask
    classes: tuple[str, ...]
    method: ProposalMethod | None = None
    store: ProposalStore | None = None
    trust: Trust | None = None
    min_score: float | None = None

    @property
    def is_gpu_used(self) -> bool:
        """Whether it runs on a GPU, if the process has one."""
        return self.find.is_gpu_used

    def __call__(self, photo: addresses.FetchedPhoto) -> dict[str, object]:
        """Columns of a row."""
        opened = _photo(photo)
        found = self.find(self._task(opened, photo)).outcome()
        if isinstance(found, errors.UserError):
            raise found
        _, selected = label_trust.selected({opened.id: found}, self.classes, self.trust, self.min_score)
        kept = selected[opened.id]
        labels = kept.labels.tolist()
        return {
            **_size(opened),
            "boxes": kept.boxes.tolist(),
            "scores": kept.scores.tolist(),
            "labels": labels,
            "names": [self.classes[label] for label in labels],
        }

    def _task(self, opened: Photo, photo: addresses.FetchedPhoto) -> PhotoTask:
        if self.store is not None:
            name = _stored_id(self.store, photo)
            return PhotoTask(opened, self.store.boxes(name).numpy(), self.store.scores(name).numpy())
        if self.method is None:
            return PhotoTask(opened, *(each.numpy() for each in _nothing()))
        found = build.search_photo(self.method, images.read_photo, opened)
        if found.boxes is None or found.scores is None:
            raise errors.UserError(found.problem)
        return PhotoTask(opened, found.boxes, found.scores)


def _nothing() -> tuple[Any, Any]:
    none = runs.NoProposals()
    return none.boxes(""), none.scores("")


def _photo(photo: addresses.FetchedPhoto) -> Photo:
    return Photo(photo.address, photo.path, *images.photo_size(photo.path))


def _size(photo: Photo) -> dict[str, object]:
    return {"width": photo.width, "height": photo.height}


def _stored_id(store: ProposalStore, photo: addresses.FetchedPhoto) -> str:
    """The id of a photo in a store: part of its name, with the same content."""
    path = PurePosixPath(photo.address.partition("::")[0].partition("://")[2] or photo.address).with_suffix("")
    for length in range(1, len(path.parts) + 1):
        name = PurePosixPath(*path.parts[-length:]).as_posix()
        entry = store.entry(name)
        if entry is not None and (entry.stamp is None or entry.stamp.sha256 == photo.stamp.sha256):
            return name
    raise errors.UserError(f"{photo.address}: no proposals for this photo in {store.path}; make the store for it")


# ---------------------------------------------------------------- all photos


def detect_rows(
    run: Path,
    photos: Sequence[str],
    out: str,
    *,
    proposals: Path | None = None,
    min_score: float | None = None,
    trust: Path | None = None,
    overrides: Sequence[str] = (),
    pool: Pool | None = None,
    progress: Progress = silent,
) -> row_parts.GroupResult:
    """Detect objects in photos of any storage and write Parquet parts, a row per photo; returns what was computed.

    Photos that cannot be read are rows with an error. The same call resumes: it computes the rows that are missing.

    Args:
        photos: folders, patterns, addresses (s3, gs, http), tar shards, Parquet lists of addresses.
        out: folder, or address of object storage.
        proposals: proposal store of the photos; default: searched for each photo, with the method of the run.
        pool: where photos are processed, e.g. a ``RayPool``, whose nodes all see ``out``; default: this process.

    Example:
        detect_rows(Path("runs/mine"), ["s3://bucket/photos/"], "s3://bucket/found", pool=RayPool())
    """
    options.check_score(0.3 if min_score is None else min_score)
    trained = run_detect.with_inference(runs.open_run(run), overrides)
    identity = run_detect.detector_identity(trained)
    about = {
        "format": 1,
        "kind": "detections",
        "classes": list(trained.classes),
        "detector": identity,
        "min_score": min_score,
        "trust": None if trust is None else storage.file_digest(trust),
        "proposals": None if proposals is None else storage.file_digest(proposals / INDEX),
    }
    threads, store = torch.get_num_threads(), None if proposals is None else ProposalStore.open(proposals.absolute())
    known = None if trust is None else label_trust.read_trust(trust, identity)
    work = DetectRow(run_detect.detect_task(trained), trained.classes, trust=known, min_score=min_score)
    if isinstance(trained, runs.TrainedRun):
        work = replace(work, method=trained.config.proposals, store=store)
    if work.store is None and work.method is not None:
        work.method.ready()
    return _compute(photos, out, about, work, pool or LocalPool(1), threads, progress)


def propose_rows(
    photos: Sequence[str], method: ProposalMethod, out: str, *, pool: Pool | None = None, progress: Progress = silent
) -> row_parts.GroupResult:
    """Compute proposals of photos of any storage and write Parquet parts, a row per photo; as ``detect_rows``."""
    method.ready()
    about = {"format": 1, "kind": "proposals", "source": method.source()}
    return _compute(photos, out, about, ProposeRow(method), pool or LocalPool(), 1, progress)


def _compute(
    photos: Sequence[str],
    out: str,
    about: Mapping[str, object],
    work: row_parts.RowWork,
    pool: Pool,
    threads: int,
    progress: Progress,
) -> row_parts.GroupResult:
    listed = addresses.list_addresses(photos)
    first = next(listed, None)  # before anything is written
    if first is None:
        raise errors.UserError("no photos given; name folders, patterns, addresses, tar shards or a Parquet list")
    place = out if addresses.is_remote(out) else str(Path(out).absolute())
    with _locked(place):
        try:
            folder = rows.RowFolder.open(place, about)
            folder.plan(chain([first], listed))
            return folder.compute(work, pool, threads=threads, progress=progress)
        except KeyboardInterrupt:
            raise errors.Interrupted(
                f"{out}: stopped; finished parts are kept; rerun the same command to resume"
            ) from None


@contextmanager
def _locked(place: str) -> Iterator[None]:
    """Keep other commands away from a folder; in object storage there are no locks."""
    if not addresses.is_remote(place):
        io.check_writable(Path(place), is_folder=True)
        io.sweep(Path(place)) if Path(place).is_dir() else None
    is_here = not addresses.is_remote(place)
    with io.locked(Path(place) / io.LOCK, "writes rows") if is_here else nullcontext():
        yield


# ---------------------------------------------------------------- the commands


def are_rows_wanted(photos: Sequence[str], out: str | None, form: str) -> bool:
    """Whether a command writes rows; raises if photos or output are addresses, and another format is wanted."""
    remote = next((place for place in (*photos, *([] if out is None else [out])) if addresses.is_remote(place)), None)
    shard = next((place for place in photos if place.lower().endswith((".tar", ".parquet"))), None)
    if form != ROW_FORMAT and (remote or shard):
        raise errors.UserError(
            f"{remote or shard}: photos in storage, shards and lists become rows; add --format {ROW_FORMAT}, and turn "
            "them into other formats with `tag2box convert`"
        )
    return form == ROW_FORMAT


def rows_command(compute: Callable[..., row_parts.GroupResult], out: str | None, unused: Mapping[str, object]) -> None:
    """Run a command that writes rows, and report."""
    for name, value in unused.items():
        if value:
            raise errors.UserError(f"{name}: has no effect with --format {ROW_FORMAT}; leave it out")
    place = out or "rows"
    done = compute(place, progress=TerminalProgress())
    options.say(f"{done.rows:,} rows computed, {done.bad:,} of them with an error: {place}")
    if done.bad:
        options.say("see the column error of rows whose status is not ok", err=True)
        raise typer.Exit(1)


def convert_rows(source: str, out: Path, form: str) -> None:
    """Write the detections of rows in the format of another tool: a COCO file, for one."""
    bad: list[str] = []
    photos, classes, found = rows.read_rows(source, bad.append)
    made = exports.export_format(form)
    if made.is_folder:
        raise errors.UserError(f"--to {form}: has photos beside the boxes, rows have addresses; take coco or csv")
    exports.export_detections(made, out, photos, classes, found)
    note = f"; {len(bad)} rows with an error are left out" if bad else ""
    options.say(f"{len(found)} photos: {out}{note}")
