"""Proposal store: a folder with the boxes and scores of many photos in memory-mapped .npy files, and a JSON index."""

import itertools
import json
import mmap
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from jaxtyping import Float32

from tag2box.annotations import Photo
from tag2box.errors import UserError
from tag2box.io import LOCK, locked, read_json, replacing, write_text
from tag2box.proposals.base import Candidates, ProposalSource

STORE_FORMAT = 2
INDEX = "index.json"
ARRAY_FILE = re.compile(r"(boxes|scores)(-\d+)?\.npy")
_TOLERANCE = 1.0  # pixels a box may exceed its photo: rounding between resolutions
_REMEDY = "remove the folder and make the proposals again"

# The kernel maps 64 kB around every page that is touched, so as much must be released again.
_READ_AROUND = max(64 * 1024, mmap.ALLOCATIONGRANULARITY)
_RELEASE: int | None = getattr(mmap, "MADV_DONTNEED", None)  # Windows has none, and trims by itself


@dataclass(frozen=True, slots=True)
class MappedArray:
    """Memory-mapped float32 .npy file. Pages are released after reading, so the resident memory does not grow."""

    values: Float32[np.ndarray, "total ..."]  # view of the mapping
    mapping: mmap.mmap
    start: int  # size of the header in bytes

    @classmethod
    def open(cls, path: Path, shape: tuple[int, ...]) -> "MappedArray":
        """Map a file that must contain a float32 array of this shape."""
        try:
            with path.open("rb") as file:
                found, dtype, start = _read_header(file)
                mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError, EOFError) as error:
            raise UserError(f"{path}: not readable as proposals ({error}); make them again") from None
        if found != shape or dtype != np.dtype("<f4"):
            raise UserError(f"{path}: {dtype} {found}, its index says float32 {shape}; make the proposals again")
        count = int(np.prod(shape))
        if len(mapping) != start + 4 * count:
            raise UserError(f"{path}: cut short or overlong ({len(mapping)} bytes); make the proposals again")
        values = np.frombuffer(mapping, np.dtype("<f4"), count, start).reshape(shape)
        return cls(values, mapping, start)

    def copy(self, first: int, last: int) -> Float32[np.ndarray, "n ..."]:
        """Copy rows ``first`` to ``last`` (exclusive)."""
        rows = np.array(self.values[first:last], np.float32)
        if _RELEASE is not None and rows.size:
            width = self.values.strides[0]
            begin = (self.start + first * width) // _READ_AROUND * _READ_AROUND
            end = -(-(self.start + last * width) // _READ_AROUND) * _READ_AROUND
            self.mapping.madvise(_RELEASE, begin, min(end, len(self.mapping)) - begin)
        return rows


def write_npy_header(file: BinaryIO, shape: Sequence[int]) -> None:
    """Write an .npy header. NumPy pads it to a constant length as the first axis grows, so it can be rewritten."""
    header = {"descr": "<f4", "fortran_order": False, "shape": tuple(shape)}
    np.lib.format.write_array_header_1_0(file, header)


def _read_header(file: BinaryIO) -> tuple[tuple[int, ...], np.dtype, int]:
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError("of an unknown version")
    shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(file)
    if is_fortran:
        raise ValueError("in column order")
    return shape, dtype, file.tell()


@dataclass(frozen=True, slots=True)
class StoreEntry:
    """Id and size of a photo in a store."""

    id: str
    width: int
    height: int

    @property
    def size(self) -> tuple[int, int]:
        """Width and height."""
        return self.width, self.height


@dataclass(frozen=True, slots=True)
class ProposalStore:
    """Boxes of many photos by photo id, read from disk on access."""

    path: Path
    source: ProposalSource
    ranked: bool  # whether any score differs from zero
    sizes: Mapping[str, tuple[int, int]]  # width and height of each photo, by id
    spans: Mapping[str, tuple[int, int]]  # first and last (exclusive) row of each photo
    failed: Mapping[str, str]  # photos that could not be searched, and why
    generation: int
    box_rows: MappedArray
    score_rows: MappedArray

    @staticmethod
    def exists(path: Path) -> bool:
        """Whether a folder contains a store, intact or damaged."""
        return (path / INDEX).exists()

    @classmethod
    def open(cls, path: Path) -> "ProposalStore":
        """Open the store in a folder."""
        file = path / INDEX
        index = read_json(file, "the index of a proposal store")
        try:
            if index["format"] != STORE_FORMAT:
                raise UserError(f"{file}: a store of format {index['format']}, expected {STORE_FORMAT}; {_REMEDY}")
            ids, ends = index["ids"], list(itertools.accumulate(map(_natural, index["counts"]), initial=0))
            sizes = zip(map(_natural, index["widths"]), map(_natural, index["heights"]), strict=True)
            store = cls(
                path=path,
                source=dict(index["source"]),
                ranked=bool(index["ranked"]),
                sizes=dict(zip(ids, sizes, strict=True)),
                spans=dict(zip(ids, itertools.pairwise(ends), strict=True)),
                failed={str(name): str(reason) for name, reason in index["failed"].items()},
                generation=_natural(index["generation"]),
                box_rows=MappedArray.open(path / _array_name("boxes", index["generation"]), (ends[-1], 4)),
                score_rows=MappedArray.open(path / _array_name("scores", index["generation"]), (ends[-1],)),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"{file}: not an index of proposals ({error!r}); {_REMEDY}") from None
        if len(store.sizes) != len(ids):
            raise UserError(f"{file}: names a photo twice; {_REMEDY}")
        return store

    def __reduce__(self) -> tuple[Callable[[Path], "ProposalStore"], tuple[Path]]:
        """Pickle the path only; other processes map the files themselves."""
        return ProposalStore.open, (self.path,)

    def boxes(self, photo_id: str) -> Float32[torch.Tensor, "P 4"]:
        """The boxes of one photo, in pixels of the photo as it is on disk; possibly none."""
        return torch.from_numpy(self.box_rows.copy(*self._span(photo_id)))

    def scores(self, photo_id: str) -> Float32[torch.Tensor, " P"]:
        """Their scores, higher is better; all zero if the store is not ranked."""
        return torch.from_numpy(self.score_rows.copy(*self._span(photo_id)))

    def candidates(self, photo_id: str) -> Candidates:
        """Boxes and scores of one photo."""
        return Candidates(self.boxes(photo_id), self.scores(photo_id))

    def check(self, photos: Iterable[Photo]) -> None:
        """Raise unless every photo is in the store with its current size."""
        for photo in photos:
            self._span(photo.id)
            if self.sizes[photo.id] != (photo.width, photo.height):
                stored = "x".join(map(str, self.sizes[photo.id]))
                now = f"{photo.width}x{photo.height}"
                raise UserError(
                    f"{self.path}: made when photo {photo.id} was {stored}, it is {now}; make the proposals again"
                )

    def __len__(self) -> int:
        return len(self.spans)

    def _span(self, photo_id: str) -> tuple[int, int]:
        if photo_id in self.spans:
            return self.spans[photo_id]
        if photo_id in self.failed:
            why = self.failed[photo_id]
            raise UserError(f"{self.path}: photo {photo_id!r} could not be searched: {why}; then propose again")
        raise UserError(f"{self.path}: no proposals for photo {photo_id!r}; make the store for these photos")


def store_lock(path: Path) -> AbstractContextManager[None]:
    """Lock a folder against other writers of proposals; raises ``Busy`` if it is locked."""
    return locked(path / LOCK, "writes proposals")


def write_store(path: Path, source: ProposalSource, photos: Sequence[Photo], candidates: Iterable[Candidates]) -> None:
    """Write a store: the candidates of each photo, in the order of the photos.

    Candidates are consumed one by one, so they need not fit in memory. An existing store is replaced once the new one
    is complete.
    """
    entries = [StoreEntry(photo.id, photo.width, photo.height) for photo in photos]
    with store_lock(path):
        write_entries(path, source, entries, candidates)


def write_entries(
    path: Path,
    source: ProposalSource,
    entries: Sequence[StoreEntry],
    candidates: Iterable[Candidates],
    *,
    failed: Mapping[str, str] | None = None,
) -> None:
    """Write a store into a folder locked by the caller."""
    repeated = len(entries) - len({entry.id for entry in entries})
    if repeated:
        raise UserError(f"{path}: {repeated} photos share an id with another; give the photos distinct names")
    generation = 1 + _generation(path)
    boxes, scores = (path / _array_name(what, generation) for what in ("boxes", "scores"))
    with (
        replacing(boxes) as box_file,
        replacing(scores) as score_file,
        box_file.open("w+b") as box_stream,
        score_file.open("w+b") as score_stream,
    ):
        counts, is_ranked = _write_rows(path, zip(entries, candidates, strict=True), box_stream, score_stream)
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
    }
    write_text(path / INDEX, json.dumps(index, allow_nan=False) + "\n")
    remove_old_arrays(path, generation)


def remove_old_arrays(path: Path, generation: int) -> None:
    """Remove the arrays of replaced and of unfinished stores."""
    current = {_array_name(what, generation) for what in ("boxes", "scores")}
    for file in path.glob("*.npy"):
        if ARRAY_FILE.fullmatch(file.name) and file.name not in current:
            file.unlink()


def _write_rows(
    path: Path, found: Iterable[tuple[StoreEntry, Candidates]], boxes: BinaryIO, scores: BinaryIO
) -> tuple[list[int], bool]:
    """Write boxes and scores; returns the number of boxes per photo, and whether any score differs from zero."""
    counts, is_ranked = [], False
    write_npy_header(boxes, (0, 4))
    write_npy_header(scores, (0,))
    for entry, candidates in found:
        check_candidates(f"{path}: photo {entry.id}", entry.size, candidates)
        boxes.write(candidates.boxes.contiguous().numpy().astype("<f4").tobytes())
        scores.write(candidates.scores.contiguous().numpy().astype("<f4").tobytes())
        counts.append(len(candidates))
        is_ranked = is_ranked or bool(candidates.scores.any())
    for stream, shape in ((boxes, (sum(counts), 4)), (scores, (sum(counts),))):
        stream.seek(0)
        write_npy_header(stream, shape)
        stream.flush()
        os.fsync(stream.fileno())  # so that even after a power failure no index exists without its arrays
    return counts, is_ranked


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


def _array_name(what: str, generation: int) -> str:
    """File name of the boxes or scores: plain for the first store of a folder, numbered for its replacements."""
    return f"{what}.npy" if generation == 1 else f"{what}-{generation}.npy"


def _generation(path: Path) -> int:
    """Generation of the existing store, even of a damaged one; 0 if there is none."""
    try:
        return _natural(read_json(path / INDEX, "an index")["generation"])
    except (UserError, KeyError, TypeError, ValueError):
        return 0


def _natural(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value
