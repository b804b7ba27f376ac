"""``tag2box proposals import``: other people's proposals into a store."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tag2box.annotations import Photo
from tag2box.errors import UserError
from tag2box.formats.datasets import read_photos
from tag2box.formats.listing import DataSource
from tag2box.progress import Bar, Progress, silent
from tag2box.proposals.base import Candidates
from tag2box.proposals.importers.match_ids import IdMatching, ImageRows, ProposalListing, match_ids
from tag2box.proposals.importers.proposal_files import PROPOSAL_FORMATS, proposal_format
from tag2box.proposals.importers.validate import Convention, FitCounts, Keep, Said, fit_boxes, judge, notes
from tag2box.proposals.store import write_store

_FEW = 3  # names that a message shows
NOTHING_SAID = Said()
KEEP_ALL = Keep()
_NOTHING = ImageRows(np.zeros((0, 4)), None)


@dataclass(frozen=True, slots=True)
class Imported:
    """What an import found and wrote."""

    format: str
    convention: Convention
    matching: IdMatching
    counts: FitCounts

    def lines(self) -> tuple[str, ...]:
        """The report, a line each."""
        unused, missing = self.matching.unused, self.matching.missing
        left_over = (
            *((f"{len(unused):,} images of the file are not in the dataset ({first_few(unused)})",) if unused else ()),
            *((f"{len(missing):,} photos have no boxes ({first_few(missing)})",) if missing else ()),
        )
        each = self.counts.kept / max(1, len(self.matching.places))
        return (
            f"read as {self.format}: {self.convention}",
            f"{self.matching.matched:,} photos matched, {self.counts.kept:,} boxes, {each:,.0f} a photo",
            *left_over,
            *notes(self.counts, self.convention),
        )


def import_proposals(
    file: Path,
    source: DataSource,
    out: Path,
    *,
    form: str | None = None,
    said: Said = NOTHING_SAID,
    keep: Keep = KEEP_ALL,
    allow_missing: bool = False,
    progress: Progress = silent,
) -> Imported:
    """Bring the proposals of a file or folder into a new store, matched to the photos of a dataset.

    Args:
        form: a name in ``FORMATS``; None recognises it.
        said: the convention of the boxes, where it is not the format's usual one.
        allow_missing: photos that the file does not have get no boxes, instead of an error.
    """
    _check_free(out)
    name = proposal_format(file, form)
    convention = said.over(PROPOSAL_FORMATS[name].usual)
    listing = PROPOSAL_FORMATS[name].read(file)
    photos = read_photos(source)
    matching = match_ids(file, listing.ids, photos)
    _check_missing(file, listing.ids, matching, allow_missing=allow_missing)
    stream = _Stream(file, listing, convention, keep)
    with _beside(out) as folder, progress("importing proposals", len(photos)) as bar:
        write_store(folder, _origin(file, name, convention, keep), photos, stream.run(photos, matching, bar))
        judge(file, stream.counts, convention, is_all=True)
    return Imported(name, convention, matching, stream.counts)


class _Stream:
    """The boxes of photo after photo, and what became of them so far."""

    def __init__(self, file: Path, listing: ProposalListing, convention: Convention, keep: Keep) -> None:
        self._file, self._listing, self._convention, self._keep = file, listing, convention, keep
        self._is_ranked: bool | None = None
        self.counts = FitCounts.none()

    def run(self, photos: Sequence[Photo], matching: IdMatching, bar: Bar) -> Iterator[Candidates]:
        """The candidates of each photo, in the photos' order; refused early where it is plain that they do not fit."""
        for photo, place in zip(photos, matching.places, strict=True):
            rows = _NOTHING if place is None else self._listing.read(place)
            self._check_ranked(photo, rows)
            fitted = fit_boxes(rows, photo, self._convention, self._keep)
            self.counts += fitted.counts
            judge(self._file, self.counts, self._convention, is_all=False)
            yield fitted.candidates
            bar.advance()

    def _check_ranked(self, photo: Photo, rows: ImageRows) -> None:
        if not len(rows):
            return
        is_ranked = rows.scores is not None
        if self._is_ranked not in {None, is_ranked}:
            what = "has scores, others have none" if is_ranked else "has no scores, others have"
            raise UserError(f"{self._file}: the image of photo {photo.id} {what}; give scores to all or to none")
        self._is_ranked = is_ranked


def first_few(names: Sequence[str]) -> str:
    """The first names of many."""
    return ", ".join(names[:_FEW]) + (", ..." if len(names) > _FEW else "")


def _check_free(out: Path) -> None:
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise UserError(f"{out}: is there already and is never replaced; remove it or name another folder")


def _check_missing(file: Path, ids: Sequence[str], matching: IdMatching, *, allow_missing: bool) -> None:
    missing = matching.missing
    if missing and not matching.matched:
        raise UserError(
            f"{file}: none of its {len(ids):,} images ({first_few(ids)}) is one of the {len(missing):,} photos "
            f"({first_few(missing)}); name the dataset these proposals were made for"
        )
    if missing and not allow_missing:
        raise UserError(
            f"{file}: no proposals for {len(missing):,} of {len(matching.places):,} photos ({first_few(missing)}); "
            "--allow-missing leaves them without boxes"
        )


def _origin(file: Path, name: str, convention: Convention, keep: Keep) -> dict[str, object]:
    """What the store records of where its boxes are from."""
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
def _beside(out: Path) -> Iterator[Path]:
    """A folder to write, which becomes ``out`` if the block succeeds, and leaves nothing behind if not."""
    near = next(parent for parent in out.absolute().parents if parent.is_dir())
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=near) as name:
        folder = Path(name) / "store"
        yield folder
        out.parent.mkdir(parents=True, exist_ok=True)
        folder.rename(out)
