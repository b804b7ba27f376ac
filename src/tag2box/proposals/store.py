"""Proposal store: a folder with the boxes and scores of many photos in memory-mapped .npy files, and a JSON index.

The index has a digest of itself, of every block of the arrays, and of every photo. Blocks are verified when they are
first read. Boxes belong to the content of a photo: a photo replaced by another of the same name gets none of them.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32, Int64

from tag2box import io, storage
from tag2box.annotations import Photo
from tag2box.errors import UserError, printable
from tag2box.proposals import mapped_array
from tag2box.proposals.base import Candidates, ProposalSource
from tag2box.proposals.mapped_array import MappedArray

STORE_FORMAT = 3
INDEX = "index.json"
_ARRAY_FILE = re.compile(r"(boxes|scores)(-\d+)?\.npy")
CHECKED_WHEN_OPENED = 2_000_000
"""A store of at most so many boxes is verified when it is opened; a larger one, photo by photo when they are read."""
_OLDER_FORMAT = 2  # without digests
_CHUNK = 1 << 16  # rows that are checked at once
_TOLERANCE = 1.0  # pixels a box may exceed its photo: rounding between resolutions
_LARGEST = 1 << 62
_REMEDY = "remove the folder and make the proposals again"


# ---------------------------------------------------------------- photos


@dataclass(frozen=True, slots=True)
class StoreEntry:
    """Id, size and content of a photo in a store; the content is unknown in stores of format 2."""

    id: str
    width: int
    height: int
    stamp: storage.FileStamp | None = None

    @property
    def size(self) -> tuple[int, int]:
        """Width and height."""
        return self.width, self.height

    @classmethod
    def of(cls, photo: Photo) -> "StoreEntry":
        """The entry of a photo as it is now; without a stamp if its file cannot be read."""
        return cls(photo.id, photo.width, photo.height, _stamp(photo.path, None))

    def updated(self, photo: Photo) -> "StoreEntry | None":
        """The entry with the present time of the photo's file; None if the photo has changed.

        A file that cannot be read is taken to be unchanged: it is reported when the photo is decoded.
        """
        if self.size != (photo.width, photo.height):
            return None
        now = None if self.stamp is None else _stamp(photo.path, self.stamp)
        if self.stamp is None or now is None:
            return self
        return replace(self, stamp=now) if now.sha256 == self.stamp.sha256 else None


_RECENT: dict[Path, storage.FileStamp] = {}  # of photos whose time differs from that in a store: each is read once


def _stamp(path: Path, known: storage.FileStamp | None) -> storage.FileStamp | None:
    try:
        now = storage.FileStamp.of(path, _RECENT.get(path, known))
    except UserError:
        return None
    if known is not None and now is not known:
        _RECENT[path] = now
    return now


def _parse_stamp(text: str) -> storage.FileStamp:
    """A stamp as the index has it: one text is read faster than three values."""
    size, mtime_ns, sha256 = text.split(" ")
    return storage.FileStamp(int(size), int(mtime_ns), sha256)


# ---------------------------------------------------------------- reading


@dataclass(frozen=True, slots=True)
class ProposalStore:
    """Boxes of many photos by photo id, read from disk on access."""

    path: Path
    source: ProposalSource
    ranked: bool  # whether any score differs from zero
    sizes: Mapping[str, tuple[int, int]]  # width and height of each photo, by id
    spans: Mapping[str, tuple[int, int]]  # first and last (exclusive) row of each photo
    stamps: Mapping[str, str]  # size, time and digest of each photo's file; empty if unknown
    failed: Mapping[str, str]  # photos that could not be searched, and why
    generation: int
    box_rows: MappedArray
    score_rows: MappedArray
    _checked: set[str] = field(default_factory=set, compare=False)  # photos whose boxes were checked

    @staticmethod
    def exists(path: Path) -> bool:
        """Whether a folder contains a store, intact or damaged."""
        return (path / INDEX).exists()

    @classmethod
    def open(cls, path: Path, check_all: bool = True) -> "ProposalStore":
        """Open the store in a folder.

        Args:
            check_all: verify all boxes now, unless there are more than ``CHECKED_WHEN_OPENED``.
        """
        file = path / INDEX
        index = storage.read_checked_json(file, "the index of a proposal store", _REMEDY, since=STORE_FORMAT)
        try:
            if index["format"] not in {_OLDER_FORMAT, STORE_FORMAT}:
                found = printable(str(index["format"]))
                raise UserError(f"{file}: a store of format {found}, expected {STORE_FORMAT}; {_REMEDY}")
            ids, ends = index["ids"], list(itertools.accumulate(_naturals(index["counts"]), initial=0))
            sizes = zip(_naturals(index["widths"]), _naturals(index["heights"]), strict=True)
            is_older = index["format"] == _OLDER_FORMAT
            boxes, scores = (_open_array(path, index, what, (ends[-1], *w)) for what, w in _WIDTHS.items())
            store = cls(
                path=path,
                source=dict(index["source"]),
                ranked=bool(index["ranked"]),
                sizes=dict(zip(ids, sizes, strict=True)),
                spans=dict(zip(ids, itertools.pairwise(ends), strict=True)),
                stamps={} if is_older else dict(zip(ids, index["stamps"], strict=True)),
                failed={str(name): str(reason) for name, reason in index["failed"].items()},
                generation=_natural(index["generation"]),
                box_rows=boxes,
                score_rows=scores,
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"{file}: not an index of proposals ({printable(repr(error))}); {_REMEDY}") from None
        if len(store.sizes) != len(ids):
            raise UserError(f"{file}: names a photo twice; {_REMEDY}")
        if check_all and ends[-1] <= CHECKED_WHEN_OPENED:
            store._check_boxes()
        return store

    def __reduce__(self) -> tuple[Callable[..., "ProposalStore"], tuple[Path, bool]]:
        """Pickle the path only; other processes map the files themselves, and check photos as they read them."""
        return ProposalStore.open, (self.path, False)

    def boxes(self, photo_id: str) -> Float32[torch.Tensor, "P 4"]:
        """The boxes of one photo, in pixels of the photo as it is on disk; possibly none."""
        rows = self.box_rows.copy(*self._span(photo_id))
        if photo_id not in self._checked:
            if not _are_boxes(rows, np.array([self.sizes[photo_id]])):
                self._refuse([photo_id])
            self._checked.add(photo_id)
        return torch.from_numpy(rows)

    def scores(self, photo_id: str) -> Float32[torch.Tensor, " P"]:
        """Their scores, higher is better; all zero if the store is not ranked."""
        rows = self.score_rows.copy(*self._span(photo_id))
        if not np.isfinite(rows).all():
            self._refuse([photo_id])
        return torch.from_numpy(rows)

    def candidates(self, photo_id: str) -> Candidates:
        """Boxes and scores of one photo."""
        return Candidates(self.boxes(photo_id), self.scores(photo_id))

    def entry(self, photo_id: str) -> StoreEntry | None:
        """What the index says about a photo, if it names it."""
        if photo_id not in self.sizes:
            return None
        stamp = self.stamps.get(photo_id)
        try:
            known = _parse_stamp(stamp) if stamp else None
        except (AttributeError, ValueError):
            what = printable(repr(stamp))
            raise UserError(f"{self.path / INDEX}: {what} is no stamp of photo {photo_id!r}; {_REMEDY}") from None
        return StoreEntry(photo_id, *self.sizes[photo_id], known)

    def holds(self, photo: Photo) -> bool:
        """Whether a photo is in the store with its current size and content."""
        entry = self.entry(photo.id)
        return entry is not None and entry.updated(photo) is not None

    def check(self, photos: Iterable[Photo]) -> None:
        """Raise unless every photo is in the store with its current size and content.

        The content is read if the time of the file has changed. In stores of format 2 it is unknown.
        """
        for photo in photos:
            self._span(photo.id)
            if self.sizes[photo.id] != (photo.width, photo.height):
                stored = "x".join(map(str, self.sizes[photo.id]))
                now = f"{photo.width}x{photo.height}"
                raise UserError(
                    f"{self.path}: made when photo {photo.id} was {stored}, it is {now}; make the proposals again"
                )
            if not self.holds(photo):
                raise UserError(
                    f"{self.path}: made for another photo {photo.id} than {photo.path}; make the proposals again"
                )

    def verify_all(self) -> bool:
        """Verify everything: all blocks of the arrays, and all boxes; False if there are no digests, only boxes."""
        digests = [rows.digests for rows in (self.box_rows, self.score_rows) if rows.digests is not None]
        for known in digests:
            known.verify_all(_REMEDY)
        self._check_boxes()
        return bool(digests)

    def __len__(self) -> int:
        return len(self.spans)

    def _span(self, photo_id: str) -> tuple[int, int]:
        if photo_id in self.spans:
            return self.spans[photo_id]
        if photo_id in self.failed:
            why = self.failed[photo_id]
            raise UserError(f"{self.path}: photo {photo_id!r} could not be searched: {why}; then propose again")
        raise UserError(f"{self.path}: no proposals for photo {photo_id!r}; make the store for these photos")

    def _check_boxes(self) -> None:
        for names in self._chunks():
            spans = [self.spans[name] for name in names]
            sizes = np.repeat(np.array([self.sizes[name] for name in names]), [b - a for a, b in spans], axis=0)
            first, last = spans[0][0], spans[-1][1]
            scores = self.score_rows.copy(first, last)
            if not (_are_boxes(self.box_rows.copy(first, last), sizes) and np.isfinite(scores).all()):
                self._refuse(names)
        self._checked.update(self.spans)

    def _chunks(self) -> Iterator[list[str]]:
        """The photos in order, in groups that are read at once."""
        names: list[str] = []
        rows = 0
        for name, (first, last) in self.spans.items():
            names.append(name)
            rows += last - first
            if rows >= _CHUNK:
                yield names
                names, rows = [], 0
        if names:
            yield names

    def _refuse(self, names: Iterable[str]) -> None:
        """Raise for the first box that is none."""
        for name in names:
            span = self._span(name)
            boxes, scores = (torch.from_numpy(rows.copy(*span)) for rows in (self.box_rows, self.score_rows))
            try:
                check_candidates(f"{self.path}: photo {name}", self.sizes[name], Candidates(boxes, scores))
            except UserError as error:
                raise UserError(f"{error}; {_REMEDY}") from None


_WIDTHS: dict[str, tuple[int, ...]] = {"boxes": (4,), "scores": ()}  # of a row of each array


def _open_array(path: Path, index: Mapping[str, Any], what: str, shape: tuple[int, ...]) -> MappedArray:
    file = path / _array_name(what, _natural(index["generation"]))
    is_older = index["format"] == _OLDER_FORMAT
    digests = None if is_older else storage.BlockDigests.from_json(file, index["arrays"][what])
    return MappedArray.open(file, shape, digests, _REMEDY)


# ---------------------------------------------------------------- writing


def is_array(path: Path) -> bool:
    """Whether a file has the name of the boxes or scores of a store."""
    return _ARRAY_FILE.fullmatch(path.name) is not None


def store_lock(path: Path) -> AbstractContextManager[None]:
    """Lock a folder against other writers of proposals; raises ``Busy`` if it is locked."""
    return io.locked(path / io.LOCK, "writes proposals")


def write_store(path: Path, source: ProposalSource, photos: Sequence[Photo], candidates: Iterable[Candidates]) -> None:
    """Write a store: the candidates of each photo, in the order of the photos.

    Candidates are consumed one by one, so they need not fit in memory. An existing store is replaced once the new one
    is complete.
    """
    repeated = len(photos) - len({photo.id for photo in photos})
    if repeated:
        raise UserError(f"{path}: {repeated} photos share an id with another; give the photos distinct names")
    with storage.writing(path), store_lock(path):
        found = ((StoreEntry.of(photo), own) for photo, own in zip(photos, candidates, strict=True))
        write_entries(path, source, found)


def write_entries(
    path: Path,
    source: ProposalSource,
    found: Iterable[tuple[StoreEntry, Candidates]],
    *,
    failed: Mapping[str, str] | None = None,
) -> None:
    """Write a store into a folder locked by the caller; no two entries may have the same id."""
    generation = 1 + _generation(path)
    boxes, scores = (path / _array_name(what, generation) for what in _WIDTHS)
    entries, counts, is_ranked = [], [], False
    with (
        io.replacing(boxes) as box_file,
        io.replacing(scores) as score_file,
        box_file.open("wb") as box_stream,
        score_file.open("wb") as score_stream,
    ):
        box_rows = mapped_array.ArrayWriter(box_stream, _WIDTHS["boxes"])
        score_rows = mapped_array.ArrayWriter(score_stream, _WIDTHS["scores"])
        for entry, candidates in found:
            check_candidates(f"{path}: photo {entry.id}", entry.size, candidates)
            box_rows.add(candidates.boxes)
            score_rows.add(candidates.scores)
            entries.append(entry)
            counts.append(len(candidates))
            is_ranked = is_ranked or bool(candidates.scores.any())
        arrays = {"boxes": box_rows.finish(boxes).to_json(), "scores": score_rows.finish(scores).to_json()}
    index = {
        "format": STORE_FORMAT,
        "source": dict(source),
        "ranked": is_ranked,
        "generation": generation,
        "failed": dict(failed or {}),
        "ids": [entry.id for entry in entries],
        "counts": counts,
        "widths": [entry.width for entry in entries],
        "heights": [entry.height for entry in entries],
        "stamps": [" ".join(map(str, entry.stamp.to_json())) if entry.stamp else "" for entry in entries],
        "arrays": arrays,
    }
    storage.write_checked_json(path / INDEX, index)
    remove_old_arrays(path, generation)


def remove_old_arrays(path: Path, generation: int) -> None:
    """Remove the arrays of replaced and of unfinished stores."""
    current = {_array_name(what, generation) for what in _WIDTHS}
    for file in path.glob("*.npy"):
        if is_array(file) and file.name not in current:
            file.unlink()


# ---------------------------------------------------------------- checks


def check_candidates(where: str, size: tuple[int, int], candidates: Candidates) -> None:
    """Raise unless boxes are finite, non-empty and inside their photo, and scores are finite."""
    rows = candidates.boxes
    is_box = rows.isfinite().all(1) & (rows[:, 2:] > rows[:, :2]).all(1)
    if not is_box.all():
        raise UserError(f"{where}: {rows[~is_box][0].tolist()} is not a box; expected x1 < x2, y1 < y2")
    is_inside = (rows[:, :2] >= -_TOLERANCE).all(1) & (rows[:, 2:] <= rows.new_tensor(size) + _TOLERANCE).all(1)
    if not is_inside.all():
        over = rows[~is_inside][0].tolist()
        raise UserError(f"{where} is {size[0]}x{size[1]}, its box {over} reaches beyond")
    if not candidates.scores.isfinite().all():
        raise UserError(f"{where}: a score is not a number; expected one for each box")


def _are_boxes(rows: Float32[np.ndarray, "n 4"], sizes: Int64[np.ndarray, "n 2"]) -> bool:
    """Whether ``check_candidates`` accepts all boxes: every comparison with NaN is false."""
    low, high = rows[:, :2], rows[:, 2:]
    return bool((low >= -_TOLERANCE).all() and (high > low).all() and (high <= (sizes + _TOLERANCE)).all())


def _array_name(what: str, generation: int) -> str:
    """File name of the boxes or scores: plain for the first store of a folder, numbered for its replacements."""
    return f"{what}.npy" if generation == 1 else f"{what}-{generation}.npy"


def _generation(path: Path) -> int:
    """Generation of the existing store, even of a damaged one; 0 if there is none."""
    try:
        return _natural(io.read_json(path / INDEX, "an index")["generation"])
    except (UserError, KeyError, TypeError, ValueError):
        return 0


def _natural(value: object) -> int:
    return _naturals([value])[0]


def _naturals(values: Any) -> list[int]:
    """A list, if it has counts only; checked without a loop, because there may be hundreds of thousands."""
    if not set(map(type, values)) <= {int} or not 0 <= min(values, default=0) <= max(values, default=0) < _LARGEST:
        raise ValueError(f"{printable(repr(values))} has values that are no counts")
    return list(values)
