"""Proposals in NumPy's .npz: one table for all images, or one array an image.

All in one: ``ids`` (N), ``counts`` (N), ``boxes`` (total, 4), image after image, and ``scores`` (total), which may be
left out. Else every array is the boxes of the image that it is named after: (P, 4), or (P, 5) with the score last.
"""

from __future__ import annotations

import math
import zipfile
import zlib
from pathlib import Path
from typing import IO

import numpy as np
from numpy import ndarray

from tag2box.errors import UserError
from tag2box.proposals.readers.listing import Listing, Rows, id_of, rows_of, same_length

_TABLE = ("ids", "counts", "boxes", "scores")
_TIMES, _ROOM = 100, 1 << 30  # bytes may grow so many times by unpacking; and a gigabyte, for scores that are all 0
_BROKEN = (OSError, ValueError, EOFError, KeyError, RuntimeError, NotImplementedError, zipfile.BadZipFile, zlib.error)


def npz(path: Path) -> Listing:
    """The proposals in an .npz file, which stays open: its arrays are unpacked one by one."""
    archive = _open(path)
    names = tuple(name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy"))
    if {"ids", "boxes"} <= set(names):
        return _table(path, {name: _array(path, archive, name) for name in _TABLE if name in names})
    if not names:
        raise UserError(f"{path}: holds no arrays; expected ids, counts and boxes, or an array for each image")
    ids = tuple(id_of(f"{path}", name) for name in names)
    return Listing(ids, lambda place: rows_of(f"{path}: {ids[place]}", _array(path, archive, names[place]), None))


def _table(path: Path, found: dict[str, ndarray]) -> Listing:
    if "counts" not in found:
        raise UserError(f"{path}: no array counts beside ids and boxes; it says how many boxes each image has")
    ids = tuple(id_of(f"{path}: ids", value) for value in found["ids"].reshape(-1))
    counts, boxes, scores = found["counts"].reshape(-1), np.atleast_1d(found["boxes"]), found.get("scores")
    if counts.dtype.kind not in "iu" or (len(counts) and counts.min() < 0):
        raise UserError(f"{path}: counts: expected whole numbers from 0, got {counts.dtype}; correct the file")
    same_length(f"{path}", ("ids", "counts"), (len(ids), len(counts)))
    same_length(f"{path}", ("boxes", "by its counts"), (len(boxes), sum(map(int, counts))))
    if scores is not None:
        same_length(f"{path}", ("boxes", "scores"), (len(boxes), scores.size))
    ends = np.cumsum(counts, dtype=np.int64)

    def read(place: int) -> Rows:
        part = slice(int(ends[place]) - int(counts[place]), int(ends[place]))
        return rows_of(f"{path}: image {ids[place]}", boxes[part], None if scores is None else scores.reshape(-1)[part])

    return Listing(ids, read)


def _open(path: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; expected an .npz file") from None
    except _BROKEN as error:
        raise UserError(f"{path}: not readable as .npz ({error}); save it anew with numpy.savez") from None


def _array(path: Path, archive: zipfile.ZipFile, name: str) -> ndarray:
    """One array, whose size is checked before anything is unpacked."""
    try:
        info = archive.getinfo(f"{name}.npy")
        if info.file_size > _TIMES * info.compress_size + _ROOM:
            raise ValueError("unpacks to far more than any boxes")
        with archive.open(info) as file:
            _check_header(file, info.file_size)
        with archive.open(info) as file:
            found = np.asarray(np.lib.format.read_array(file, allow_pickle=False))
        if found.dtype.kind == "U":
            found.tolist()  # text that is not Unicode shows itself here
        return found
    except _BROKEN as error:
        reason = " ".join(str(error).split())[:100]
        raise UserError(f"{path}: {name}: not readable ({reason}); expected plain numbers or text") from None


def _check_header(file: IO[bytes], size: int) -> None:
    version = np.lib.format.read_magic(file)
    if version not in {(1, 0), (2, 0)}:
        raise ValueError(f"version {version}")
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(file)
    if dtype.hasobject:
        raise ValueError("an array of Python objects")
    if math.prod(shape) * max(dtype.itemsize, 1) > size or max(shape, default=0) > size:
        raise ValueError(f"its header speaks of {shape} {dtype} in {size} bytes")
