"""Rows of numbers in an .npy file, mapped into memory and copied out a few at a time."""

from __future__ import annotations

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
from numpy import ndarray
from torch import Tensor

from tag2box.annotations import Photo
from tag2box.errors import UserError
from tag2box.io import LOCK, locked, read_json, replacing, write_text
from tag2box.proposals.base import Candidates, PhotoSource

# The kernel maps 64 kB around every page that is touched, so as much must be let go again.
_AROUND = max(64 * 1024, mmap.ALLOCATIONGRANULARITY)
_LET_GO: int | None = getattr(mmap, "MADV_DONTNEED", None)  # Windows has none, and trims by itself


@dataclass(frozen=True, slots=True)
class MappedRows:
    """A float32 .npy file on disk. Reading from it does not make the process grow: read pages are let go at once."""

    values: Float32[ndarray, "total ..."]  # a view of the mapping
    mapping: mmap.mmap
    start: int  # bytes of the header

    @classmethod
    def open(cls, path: Path, shape: tuple[int, ...]) -> MappedRows:
        """Map a file that must hold float32 numbers of this shape."""
        try:
            with path.open("rb") as file:
                found, dtype, start = _read_header(file)
                mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError, EOFError) as error:
            raise UserError(f"{path}: not readable as proposals ({error}); make them anew") from None
        if found != shape or dtype != np.dtype("<f4"):
            raise UserError(f"{path}: {dtype} {found}, its index says float32 {shape}; make the proposals anew")
        count = int(np.prod(shape))
        if len(mapping) != start + 4 * count:
            raise UserError(f"{path}: cut short or overlong ({len(mapping)} bytes); make the proposals anew")
        values = np.frombuffer(mapping, np.dtype("<f4"), count, start).reshape(shape)
        return cls(values, mapping, start)

    def copy(self, first: int, last: int) -> Float32[ndarray, "n ..."]:
        """Rows ``first`` to ``last`` (excluded), as the reader's own."""
        rows = np.array(self.values[first:last], np.float32)
        if _LET_GO is not None and rows.size:
            width = self.values.strides[0]
            begin = (self.start + first * width) // _AROUND * _AROUND
            end = -(-(self.start + last * width) // _AROUND) * _AROUND
            self.mapping.madvise(_LET_GO, begin, min(end, len(self.mapping)) - begin)
        return rows


def write_header(file: BinaryIO, shape: Sequence[int]) -> None:
    """An .npy header. NumPy pads it so that it keeps its length as the first axis grows: it can be rewritten."""
    header = {"descr": "<f4", "fortran_order": False, "shape": tuple(shape)}
    np.lib.format.write_array_header_1_0(file, header)


def _read_header(file: BinaryIO) -> tuple[tuple[int, ...], np.dtype, int]:
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError("of an unknown version")
    shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(file)
    if is_fortran:
        raise ValueError("in column order")
    return shape, dtype, file.tell()


STORE_FORMAT = 2
INDEX = "index.json"
_SLACK = 1.0  # pixels a box may reach over its photo: what rounding between resolutions does
ROWS = re.compile(r"(boxes|scores)(-\d+)?\.npy")
_AGAIN = "remove the folder and make the proposals anew"


@dataclass(frozen=True, slots=True)
class StoreEntry:
    """A photo as a store knows it."""

    id: str
    width: int
    height: int

    @property
    def size(self) -> tuple[int, int]:
        """Width and height."""
        return self.width, self.height


@dataclass(frozen=True, slots=True)
class ProposalStore:
    """Boxes of many photos by photo id, read from disk as they are asked for."""

    path: Path
    source: PhotoSource
    ranked: bool  # whether scores say anything
    sizes: Mapping[str, tuple[int, int]]  # width and height of each photo, by id
    spans: Mapping[str, tuple[int, int]]  # rows of each photo
    failed: Mapping[str, str]  # photos that could not be searched, and why
    generation: int
    box_rows: MappedRows
    score_rows: MappedRows

    @staticmethod
    def exists(path: Path) -> bool:
        """Whether a folder holds a store, be it whole or damaged."""
        return (path / INDEX).exists()

    @classmethod
    def open(cls, path: Path) -> ProposalStore:
        """Open the store in a folder."""
        file = path / INDEX
        index = read_json(file, "the index of a proposal store")
        try:
            if index["format"] != STORE_FORMAT:
                raise UserError(f"{file}: a store of format {index['format']}, expected {STORE_FORMAT}; {_AGAIN}")
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
                box_rows=MappedRows.open(path / file_name("boxes", index["generation"]), (ends[-1], 4)),
                score_rows=MappedRows.open(path / file_name("scores", index["generation"]), (ends[-1],)),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"{file}: not an index of proposals ({error!r}); {_AGAIN}") from None
        if len(store.sizes) != len(ids):
            raise UserError(f"{file}: names a photo twice; {_AGAIN}")
        return store

    def __reduce__(self) -> tuple[Callable[[Path], ProposalStore], tuple[Path]]:
        """Other processes map the files themselves."""
        return ProposalStore.open, (self.path,)

    def boxes(self, photo_id: str) -> Float32[Tensor, "P 4"]:
        """The boxes of one photo, in pixels of the photo as it is on disk; possibly none."""
        return torch.from_numpy(self.box_rows.copy(*self._span(photo_id)))

    def scores(self, photo_id: str) -> Float32[Tensor, " P"]:
        """Their scores, higher is better; all zero where the store is not ranked."""
        return torch.from_numpy(self.score_rows.copy(*self._span(photo_id)))

    def candidates(self, photo_id: str) -> Candidates:
        """Boxes and scores of one photo."""
        return Candidates(self.boxes(photo_id), self.scores(photo_id))

    def check(self, photos: Iterable[Photo]) -> None:
        """Raise unless every photo is in the store with the size it has now."""
        for photo in photos:
            self._span(photo.id)
            if self.sizes[photo.id] != (photo.width, photo.height):
                stored = "x".join(map(str, self.sizes[photo.id]))
                now = f"{photo.width}x{photo.height}"
                raise UserError(
                    f"{self.path}: made when photo {photo.id} was {stored}, it is {now}; make the proposals anew"
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


def file_name(what: str, generation: int) -> str:
    """The name of the boxes or scores of the first store in a folder, or of one that replaced others."""
    return f"{what}.npy" if generation == 1 else f"{what}-{generation}.npy"


def writing(path: Path) -> AbstractContextManager[None]:
    """Hold a folder against other writers of proposals."""
    return locked(path / LOCK, "writes proposals")


def write_store(path: Path, source: PhotoSource, photos: Sequence[Photo], candidates: Iterable[Candidates]) -> None:
    """Write a store: the candidates of each photo, in the photos' order.

    They are taken one by one, so that all need not fit memory. A store that is there is replaced when the new one is
    whole.
    """
    entries = [StoreEntry(photo.id, photo.width, photo.height) for photo in photos]
    with writing(path):
        write_entries(path, source, entries, candidates)


def write_entries(
    path: Path,
    source: PhotoSource,
    entries: Sequence[StoreEntry],
    candidates: Iterable[Candidates],
    *,
    failed: Mapping[str, str] | None = None,
) -> None:
    """Write a store into a folder that the caller has locked."""
    repeated = len(entries) - len({entry.id for entry in entries})
    if repeated:
        raise UserError(f"{path}: {repeated} photos share an id with another; give the photos distinct names")
    generation = 1 + _generation(path)
    boxes, scores = (path / file_name(what, generation) for what in ("boxes", "scores"))
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
    remove_older(path, generation)


def remove_older(path: Path, generation: int) -> None:
    """Remove the files of stores that another has replaced, and of such as were never finished."""
    current = {file_name(what, generation) for what in ("boxes", "scores")}
    for file in path.glob("*.npy"):
        if ROWS.fullmatch(file.name) and file.name not in current:
            file.unlink()


def _write_rows(
    path: Path, found: Iterable[tuple[StoreEntry, Candidates]], boxes: BinaryIO, scores: BinaryIO
) -> tuple[list[int], bool]:
    """Write the numbers; gives how many each photo has, and whether any score says something."""
    counts, is_ranked = [], False
    write_header(boxes, (0, 4))
    write_header(scores, (0,))
    for entry, candidates in found:
        check_candidates(f"{path}: photo {entry.id}", entry.size, candidates)
        boxes.write(candidates.boxes.contiguous().numpy().astype("<f4").tobytes())
        scores.write(candidates.scores.contiguous().numpy().astype("<f4").tobytes())
        counts.append(len(candidates))
        is_ranked = is_ranked or bool(candidates.scores.any())
    for stream, shape in ((boxes, (sum(counts), 4)), (scores, (sum(counts),))):
        stream.seek(0)
        write_header(stream, shape)
        stream.flush()
        os.fsync(stream.fileno())  # not only a killed process but a lost current leaves no index without its rows
    return counts, is_ranked


def check_candidates(where: str, size: tuple[int, int], candidates: Candidates) -> None:
    """Raise unless boxes are fit to store: finite, not empty, and on their photo; and scores are numbers."""
    rows = candidates.boxes
    is_box = rows.isfinite().all(1) & (rows[:, 2:] > rows[:, :2]).all(1)
    if not is_box.all():
        raise UserError(f"{where}: {rows[~is_box][0].tolist()} is not a box; expected x1 < x2, y1 < y2")
    is_inside = (rows[:, :2] >= -_SLACK).all(1) & (rows[:, 2:] <= rows.new_tensor(size) + _SLACK).all(1)
    if not is_inside.all():
        over = rows[~is_inside][0].tolist()
        raise UserError(f"{where} is {size[0]}x{size[1]}, its box {over} reaches beyond")
    if not candidates.scores.isfinite().all():
        raise UserError(f"{where}: a score is not a number; expected one for each box")


def _generation(path: Path) -> int:
    """Of the store that is there, even one that does not open; 0 where there is none."""
    try:
        return _natural(read_json(path / INDEX, "an index")["generation"])
    except (UserError, KeyError, TypeError, ValueError):
        return 0


def _natural(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value
