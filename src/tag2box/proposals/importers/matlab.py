"""Proposals in MATLAB files, as published for selective search, MCG, COB and edge boxes; and the reader of such files.

The reader supports numbers, text and cell arrays of versions 5 to 7.2. It follows the published file format and is kept
small on purpose: a reader for all of MATLAB (structs, objects, nested cells) can be made to crash or to exhaust memory
by a file of a few bytes; this one cannot.
"""

import itertools
import math
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tag2box import io
from tag2box.errors import UserError
from tag2box.proposals.importers import validate

_HEADER = 128
_MATRIX, _COMPRESSED = 14, 15
_CELL, _CHAR, _NUMBERS = 1, 4, range(6, 16)
_TYPES = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
_TEXTS = {1: "latin-1", 2: "latin-1", 4: "utf-16", 16: "utf-8", 17: "utf-16", 18: "utf-32"}
_MAX_FILE = 8 << 30  # bytes
_MAX_ID = 64  # bytes of an id, on average


class _Damaged(Exception):
    """The problem with a file."""


class _Element(NamedTuple):
    """One data element: its type, its bytes, and the offset of the next one."""

    kind: int
    body: memoryview
    end: int


@dataclass(frozen=True, slots=True)
class _MatFile:
    """What the variables of a file share: its path, its byte order, and how many images it may have."""

    path: Path
    order: str  # "<" or ">"
    most: int


@dataclass(frozen=True, slots=True)
class MatMatrix:
    """A variable or a cell; its class and shape are parsed, its content is decoded on demand."""

    file: _MatFile
    name: str
    kind: int
    shape: tuple[int, ...]
    body: memoryview

    @property
    def is_cells(self) -> bool:
        """Whether it is a cell array."""
        return self.kind == _CELL

    def cells(self) -> tuple["MatMatrix", ...]:
        """The elements of a cell array, in MATLAB's order."""
        count = self._count()
        try:
            parts = itertools.islice(_elements(self.body, self.file.order), count + 1)
            found = tuple(_matrix(self.file, part.body) for part in parts if part.kind == _MATRIX)
        except _Damaged as reason:
            raise self._error(reason) from None
        if len(found) != count:
            raise self._error(f"{len(found)} cells or more, its shape says {count}")
        return found

    def numbers(self) -> np.ndarray:
        """The content of a matrix of numbers."""
        if math.prod(self.shape) == 0:
            return np.zeros(self.shape)
        if self.kind not in _NUMBERS:
            raise UserError(f"{self.file.path}: {self.name or 'a cell'}: expected numbers; check the file or --format")
        try:
            part = next(_elements(self.body, self.file.order))
            flat = np.frombuffer(part.body, self.file.order + _TYPES[part.kind])
            return flat.reshape(self.shape, order="F")
        except (_Damaged, StopIteration, KeyError, ValueError) as error:
            raise self._error(error) from None

    def texts(self) -> tuple[str, ...]:
        """Texts of cells or of rows of characters; numbers are written out."""
        if self.is_cells:
            return tuple(cell._only_text() for cell in self.cells())
        if self.kind != _CHAR:
            self._count()
            return tuple(f"{number:.15g}" for number in self.numbers().ravel(order="F"))
        try:
            part = next(_elements(self.body, self.file.order))
            if len(part.body) > _MAX_ID * self.file.most or self.shape[0] > self.file.most:
                raise _Damaged("more text than ids of images")
            wide = {"<": "-le", ">": "-be"}[self.file.order] if _TEXTS[part.kind] in {"utf-16", "utf-32"} else ""
            text = bytes(part.body).decode(_TEXTS[part.kind] + wide)
            if self.shape == (1, len(text)):
                return (text.strip(),)
            letters = np.array(list(text), object)
            return tuple("".join(row).strip() for row in letters.reshape(self.shape, order="F"))
        except (_Damaged, StopIteration, KeyError, ValueError) as error:
            raise self._error(error) from None

    def _only_text(self) -> str:
        found = () if self.is_cells else self.texts()  # deeply nested cells would overflow the stack
        if len(found) != 1:
            raise self._error("expected one text")
        return found[0]

    def _count(self) -> int:
        """The number of elements, one for each image."""
        count = math.prod(self.shape)
        if count > self.file.most:
            raise self._error(f"{count:,} images in so small a file")
        return count

    def _error(self, reason: object) -> UserError:
        return UserError(f"{self.file.path}: {self.name or 'a cell'}: damaged ({reason}); download the file again")


def read_mat(path: Path) -> dict[str, MatMatrix]:
    """The variables of a MATLAB file, by name."""
    data = io.read_bytes(path, "a MATLAB file", _MAX_FILE)
    try:
        return {matrix.name: matrix for matrix in _variables(path, data)}
    except _Damaged as error:
        raise UserError(f"{path}: not readable as a MATLAB file ({error}); download it again") from None


def _variables(path: Path, data: bytearray) -> Iterator[MatMatrix]:
    if data[:19] == b"MATLAB 7.3 MAT-file" or data[:4] == b"\x89HDF":
        raise UserError(
            f"{path}: saved as MATLAB 7.3 (HDF5), which is not read here; in MATLAB: x = load(file); "
            "save(file, '-struct', 'x', '-v7')"
        )
    order = {b"IM": "<", b"MI": ">"}.get(bytes(data[126:128]))
    if order is None:
        raise _Damaged("its header is not that of version 5 to 7.2")
    file = _MatFile(path, order, validate.image_limit(len(data)))
    room = validate.unpacked_limit(len(data))
    for outer in _elements(memoryview(data)[_HEADER:], order):
        part: _Element | None = outer
        if outer.kind == _COMPRESSED:
            content = _inflate(outer.body, room)
            room -= len(content)
            part = next(_elements(memoryview(content), order), None)  # the format has one variable in each
        if part is not None and part.kind == _MATRIX:
            yield _matrix(file, part.body)


def _inflate(body: memoryview, room: int) -> bytes:
    """Decompress at most ``room`` bytes."""
    unpacker = zlib.decompressobj()
    try:
        content = unpacker.decompress(body, room + 1)
    except zlib.error as error:
        raise _Damaged(str(error)) from None
    if not unpacker.eof or len(content) > room:
        raise _Damaged("a compressed variable is cut off, or far larger than any boxes")
    return content


def _elements(data: memoryview, order: str) -> Iterator[_Element]:
    """Consecutive data elements."""
    at = 0
    while at < len(data):
        if len(data) - at < 8:
            raise _Damaged("ends too early")
        kind, count = struct.unpack_from(order + "II", data, at)
        start, end = at + 8, at + 8 + count + (0 if kind == _COMPRESSED else -count % 8)
        if kind >> 16:  # up to four bytes are stored in the tag itself
            kind, count, start, end = kind & 0xFFFF, kind >> 16, at + 4, at + 8
        if start + count > min(end, len(data)):
            raise _Damaged("ends too early")
        yield _Element(kind, data[start : start + count], end)
        at = end


def _matrix(file: _MatFile, body: memoryview) -> MatMatrix:
    if not len(body):
        return MatMatrix(file, "", _NUMBERS[0], (0, 0), body)
    parts = _elements(body, file.order)
    try:
        flags, sides, name = next(parts), next(parts), next(parts)
        kind = struct.unpack_from(file.order + "I", flags.body)[0] & 0xFF
        shape = struct.unpack(f"{file.order}{len(sides.body) // 4}i", sides.body)
    except (StopIteration, struct.error):
        raise _Damaged("a variable without class, shape and name") from None
    if not 2 <= len(shape) <= 32 or min(shape) < 0:
        raise _Damaged(f"a variable of shape {shape[:8]}")
    return MatMatrix(file, bytes(name.body[:_MAX_ID]).decode("ascii", "replace"), kind, shape, body[name.end :])


# ---------------------------------------------------------------- proposals

_IDS = ("images", "ids", "image_ids")


@dataclass(frozen=True, slots=True)
class MatProposals:
    """Opens proposals in .mat files, given the names of the variables with boxes and scores."""

    boxes: tuple[str, ...]
    scores: tuple[str, ...]

    def __call__(self, path: Path) -> validate.ProposalFile:
        """Open a file of many images, or a folder with one file per image, which are read one by one."""
        if path.is_dir():
            files = _mat_files(path)
            return validate.ProposalFile(tuple(file.stem for file in files), lambda place: self._image(files[place]))
        found = read_mat(path)
        boxes = _required(path, found, self.boxes)
        if not boxes.is_cells:
            return validate.ProposalFile((path.stem,), lambda place: self._image(path))
        return self._cells(path, boxes, found)

    def _image(self, path: Path) -> validate.RawBoxes:
        found = read_mat(path)
        scores = _one_of(found, self.scores)
        boxes = _required(path, found, self.boxes).numbers()
        return validate.parse_boxes(f"{path}", boxes, None if scores is None else scores.numbers())

    def _cells(self, path: Path, boxes: MatMatrix, found: dict[str, MatMatrix]) -> validate.ProposalFile:
        ids = tuple(validate.parse_id(f"{path}: images", text) for text in _required(path, found, _IDS).texts())
        cells, scores = boxes.cells(), _one_of(found, self.scores)
        validate.check_lengths(f"{path}", ("cells of boxes", "images"), (len(cells), len(ids)))
        columns = None if scores is None else scores.cells()
        if columns is not None:
            validate.check_lengths(f"{path}", ("cells of boxes", "cells of scores"), (len(cells), len(columns)))

        def read(place: int) -> validate.RawBoxes:
            column = None if columns is None else columns[place].numbers()
            return validate.parse_boxes(f"{path}: image {ids[place]}", cells[place].numbers(), column)

        return validate.ProposalFile(ids, read)


_CORNERS = validate.BoxConvention(boxes_are="yxyx", first_pixel=1, last_pixel="included")
_WIDTHS = validate.BoxConvention(boxes_are="xywh", first_pixel=1, last_pixel="included")
SELECTIVE_SEARCH_MAT = validate.ProposalFormat(
    open=MatProposals(boxes=("boxes",), scores=("boxScores", "scores")), convention=_CORNERS
)
MCG_MAT = validate.ProposalFormat(
    open=MatProposals(boxes=("boxes", "bboxes"), scores=("scores", "bboxes_scores")), convention=_CORNERS
)
EDGE_BOXES_MAT = validate.ProposalFormat(
    open=MatProposals(boxes=("bbs", "boxes"), scores=("boxScores", "scores")), convention=_WIDTHS
)


def _mat_files(folder: Path) -> tuple[Path, ...]:
    """The MATLAB files of a folder, sorted by name."""
    files = tuple(sorted(folder.glob("*.mat")))
    if not files:
        raise UserError(f"{folder}: no .mat files in this folder; name the file, or the folder that has them")
    return files


def recognize_mat(path: Path) -> validate.ProposalFormat:
    """The format of a MATLAB file or of a folder of them, by the names and kinds of its variables."""
    sample = _mat_files(path)[0] if path.is_dir() else path
    found = read_mat(sample)
    if "bbs" in found:
        return EDGE_BOXES_MAT
    boxes = _required(sample, found, ("boxes", "bboxes"))
    return SELECTIVE_SEARCH_MAT if boxes.is_cells else MCG_MAT


def _one_of(found: dict[str, MatMatrix], names: tuple[str, ...]) -> MatMatrix | None:
    return next((found[name] for name in names if name in found), None)


def _required(path: Path, found: dict[str, MatMatrix], names: tuple[str, ...]) -> MatMatrix:
    matrix = _one_of(found, names)
    if matrix is None:
        there = ", ".join(ascii(name)[1:-1][:40] for name in sorted(found)[:8]) or "none"
        raise UserError(f"{path}: no variable {' or '.join(names)} (there is: {there}); check the file or --format")
    return matrix
