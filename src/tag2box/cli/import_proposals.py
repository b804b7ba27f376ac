"""``tag2box proposals import``: proposals of other tools into a store."""

import hashlib
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import typer

from tag2box import annotations, errors, extend, io
from tag2box.cli import options
from tag2box.formats import datasets, listing
from tag2box.progress import Bar, Progress, TerminalProgress, silent
from tag2box.proposals import base, store
from tag2box.proposals.importers import match_ids, proposal_files, validate

_FEW = 3  # names that a message lists
_NO_BOXES = validate.RawBoxes(np.zeros((0, 4)), None)


@dataclass(frozen=True, slots=True)
class ImportResult:
    """Statistics of an import."""

    format: str
    convention: validate.BoxConvention
    matching: match_ids.IdMatch
    counts: validate.ImportCounts

    def lines(self) -> tuple[str, ...]:
        """A summary for a terminal."""
        unused, missing = self.matching.unused, self.matching.missing
        left_over = (
            *((f"{len(unused):,} images of the file are not in the dataset ({_first(unused)})",) if unused else ()),
            *((f"{len(missing):,} photos have no boxes ({_first(missing)})",) if missing else ()),
        )
        each = self.counts.kept / max(1, len(self.matching.places))
        return (
            f"read as {self.format}: {self.convention}",
            f"{self.matching.matched:,} photos matched, {self.counts.kept:,} boxes, {each:,.0f} per photo",
            *left_over,
            *validate.import_notes(self.counts, self.convention),
        )


def import_proposals(
    file: Path,
    source: listing.DataSource,
    out: Path,
    *,
    form: str | None = None,
    convention: validate.ConventionOverride | None = None,
    keep: validate.BoxFilter | None = None,
    allow_missing: bool = False,
    progress: Progress = silent,
) -> ImportResult:
    """Import the proposals of a file or folder into a new store, matched to the photos of a dataset.

    Args:
        form: name of the file format; default: recognised from suffix and content.
        convention: the box convention, if it is not the usual one of the format.
        keep: which boxes to keep; default: all.
        allow_missing: photos that the file lacks get no boxes, instead of an error.
    """
    _check_free(out)
    name, chosen = proposal_files.proposal_format(file, form)
    used, keep = (convention or validate.ConventionOverride()).over(chosen.convention), keep or validate.BoxFilter()
    found = chosen.open(file)
    photos = datasets.read_photos(source)
    matching = match_ids.match_ids(file, found.ids, photos)
    _check_missing(file, found.ids, matching, allow_missing=allow_missing)
    reader = _Reader(file, found, used, keep)
    with _atomic_folder(out) as folder, progress("importing proposals", len(photos)) as bar:
        store.write_store(folder, _source(file, name, used, keep), photos, reader.read(photos, matching, bar))
        validate.check_fit(file, reader.counts, used, is_all=True)
    return ImportResult(name, used, matching, reader.counts)


class _Reader:
    """Reads and validates boxes photo by photo, with running counts."""

    def __init__(
        self,
        file: Path,
        found: validate.ProposalFile,
        convention: validate.BoxConvention,
        keep: validate.BoxFilter,
    ) -> None:
        self._file, self._found, self._convention, self._keep = file, found, convention, keep
        self._is_ranked: bool | None = None
        self.counts = validate.ImportCounts.none()

    def read(
        self, photos: Sequence[annotations.Photo], matching: match_ids.IdMatch, bar: Bar
    ) -> Iterator[base.Candidates]:
        """The candidates of each photo in order; raises as soon as it is clear that boxes do not fit the photos."""
        for photo, place in zip(photos, matching.places, strict=True):
            rows = _NO_BOXES if place is None else self._found.read(place)
            self._check_ranked(photo, rows)
            fitted = validate.fit_boxes(rows, photo, self._convention, self._keep)
            self.counts += fitted.counts
            validate.check_fit(self._file, self.counts, self._convention, is_all=False)
            yield fitted.candidates
            bar.advance()

    def _check_ranked(self, photo: annotations.Photo, rows: validate.RawBoxes) -> None:
        if not len(rows):
            return
        is_ranked = rows.scores is not None
        if self._is_ranked not in {None, is_ranked}:
            what = "has scores, others have none" if is_ranked else "has no scores, others have"
            raise errors.UserError(f"{self._file}: the image of photo {photo.id} {what}; give scores to all or to none")
        self._is_ranked = is_ranked


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:_FEW]) + (", ..." if len(names) > _FEW else "")


def _check_free(out: Path) -> None:
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise errors.UserError(f"{out}: exists already and is never replaced; remove it or name another folder")
    io.check_writable(out, is_folder=True)


def _check_missing(file: Path, ids: Sequence[str], matching: match_ids.IdMatch, *, allow_missing: bool) -> None:
    missing = matching.missing
    if missing and not matching.matched:
        raise errors.UserError(
            f"{file}: none of its {len(ids):,} images ({_first(ids)}) is one of the {len(missing):,} photos "
            f"({_first(missing)}); name the dataset these proposals were made for"
        )
    if missing and not allow_missing:
        raise errors.UserError(
            f"{file}: no proposals for {len(missing):,} of {len(matching.places):,} photos ({_first(missing)}); "
            "--allow-missing leaves them without boxes"
        )


def _source(file: Path, name: str, convention: validate.BoxConvention, keep: validate.BoxFilter) -> dict[str, object]:
    """The provenance that the store records."""
    return {
        "kind": "imported",
        "format": name,
        "file": file.resolve().name,
        "sha256": _digest(file),
        **convention.as_source(),
        "min_side": keep.min_side,
        "max_boxes": keep.max_boxes,
    }


def _digest(file: Path) -> str:
    """SHA-256 of a file; of a folder, of the names and sizes of its files."""
    if file.is_dir():
        listed = "".join(f"{entry.name}\t{entry.stat().st_size}\n" for entry in sorted(file.iterdir()))
        return hashlib.sha256(listed.encode("utf-8", "surrogateescape")).hexdigest()
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def _atomic_folder(out: Path) -> Iterator[Path]:
    """A temporary folder that becomes ``out`` if the block succeeds, and is removed if not."""
    near = next(parent for parent in out.absolute().parents if parent.is_dir())
    io.sweep(near)
    folder = io.temporary_path(near / out.name)
    try:
        yield folder
        io.make_folder(out.parent)
        folder.rename(out)
        io.sync(out.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def import_command(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Proposals: .mat, .pkl, .npz or .json, or a folder of .mat files.")
    ],
    data: options.DataArgument,
    out: Annotated[Path, typer.Option(help="Folder of the store to write; must be new.")],
    photos: options.PhotosOption = None,
    split: options.SplitOption = None,
    classes: options.ClassesOption = None,
    data_format: options.DataFormatOption = None,
    form: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="NAME",
            help=f"{', '.join(extend.PROPOSAL_FILE_FORMATS)}; default: recognised from suffix and content.",
        ),
    ] = None,
    boxes_are: Annotated[
        Literal["xyxy", "yxyx", "xywh"] | None,
        typer.Option(
            help="Order of a box's numbers; default: yxyx for selective-search and mcg, xywh for edge-boxes and coco, "
            "else xyxy."
        ),
    ] = None,
    first_pixel: Annotated[
        Literal["0", "1"] | None, typer.Option(help="Index of the first pixel; default: 1 for .mat, else 0.")
    ] = None,
    last_pixel: Annotated[
        Literal["included", "excluded"] | None,
        typer.Option(help="Whether x2 and y2 belong to the box; default: included for .mat and .pkl, else excluded."),
    ] = None,
    min_side: Annotated[float, typer.Option(min=0, help="Drop boxes with a shorter side, in pixels.")] = 0.0,
    max_boxes: Annotated[
        int | None, typer.Option(min=1, help="Maximum boxes per photo, highest scores first; default: all.")
    ] = None,
    allow_missing: Annotated[
        bool, typer.Option("--allow-missing", help="Photos that FILE lacks get no boxes.")
    ] = False,
) -> None:
    """Import proposals of other tools: match their ids to photos, check boxes against photo sizes.

    Example: `tag2box proposals import voc.mat VOC2007 --split trainval --out proposals`
    """
    imported = import_proposals(
        file,
        options.data_source(data, photos, split, classes, data_format),
        out,
        form=form,
        convention=validate.ConventionOverride(
            boxes_are=boxes_are,
            first_pixel=None if first_pixel is None else (1 if first_pixel == "1" else 0),
            last_pixel=last_pixel,
        ),
        keep=validate.BoxFilter(min_side=min_side, max_boxes=max_boxes),
        allow_missing=allow_missing,
        progress=TerminalProgress(),
    )
    for line in imported.lines():
        options.say(line)
    options.say(f"store: {out}")
