"""Proposals in JSON: a list as COCO results have it, or a plain object of boxes by image."""

from __future__ import annotations

import difflib
import math
import reprlib
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, NoReturn

import numpy as np
from jaxtyping import UInt8
from numpy import ndarray

from tag2box.errors import UserError
from tag2box.io import read_json
from tag2box.proposals.base import FoundBoxes, ProposalMethod
from tag2box.proposals.importers.match_ids import ImageRows, ProposalListing, id_of, rows_of, same_length
from tag2box.proposals.importers.matlab import (
    read_edge_boxes,
    read_mcg,
    read_selective_search,
    recognise_mat,
)
from tag2box.proposals.importers.validate import Convention
from tag2box.safe_pickle import read_pickle


def read_coco_proposals(path: Path) -> ProposalListing:
    """``[{"image_id": 9, "bbox": [x, y, w, h], "score": 0.5}, ...]``; all have a score, or none has."""
    found = read_json(path, "boxes by image")
    if not isinstance(found, list):
        raise UserError(f"{path}: expected a list of boxes with image_id and bbox, got a {type(found).__name__}")
    grouped: dict[str, list[object]] = defaultdict(list)
    scores: dict[str, list[object]] = defaultdict(list)
    for row, entry in enumerate(found):
        where = f"{path}: [{row}]"
        if not isinstance(entry, dict) or "image_id" not in entry or not _is_box(entry.get("bbox")):
            raise UserError(f"{where}: expected image_id and bbox of four numbers, got {reprlib.repr(entry)}")
        name = id_of(f"{where}.image_id", entry["image_id"])
        grouped[name].append(entry["bbox"])
        if "score" in entry:
            scores[name].append(entry["score"])
    _all_or_none(path, len(found), sum(map(len, scores.values())))
    ids = tuple(grouped)

    def read(place: int) -> ImageRows:
        name = ids[place]
        return rows_of(f"{path}: image {name}", grouped[name], scores[name] if scores else None)

    return ProposalListing(ids, read)


def read_boxes_by_image(path: Path) -> ProposalListing:
    """``{"000009": [[x1, y1, x2, y2], ...], ...}``, or five numbers a box with its score last."""
    found = read_json(path, "boxes by image")
    if not isinstance(found, dict):
        raise UserError(f"{path}: expected an object of boxes by image, got a {type(found).__name__}")
    ids = tuple(id_of(f"{path}", name) for name in found)
    tables = tuple(found.values())
    return ProposalListing(ids, lambda place: _rows(f"{path}: image {ids[place]}", tables[place]))


def recognise_json(path: Path) -> str:
    """The format of a JSON file, by how it begins."""
    with path.open("rb") as file:
        return "coco" if file.read(64).lstrip().startswith(b"[") else "json"


def _rows(where: str, table: Any) -> ImageRows:
    if not isinstance(table, list):
        raise UserError(f"{where}: expected a list of boxes, got {reprlib.repr(table)}")
    lengths = {len(row) if isinstance(row, list) else 0 for row in table}
    if not lengths <= {4} and not lengths <= {5}:
        raise UserError(f"{where}: expected four numbers a box, or five with the score, the same for all its boxes")
    return rows_of(where, table, None)


def _is_box(value: object) -> bool:
    return isinstance(value, list) and len(value) == 4


def _all_or_none(path: Path, boxes: int, scores: int) -> None:
    if scores not in {0, boxes}:
        raise UserError(f"{path}: {scores} of {boxes} boxes have a score; give it to all or to none")


_TABLE = ("ids", "counts", "boxes", "scores")
_TIMES, _ROOM = 100, 1 << 30  # bytes may grow so many times by unpacking; and a gigabyte, for scores that are all 0
_BROKEN = (OSError, ValueError, EOFError, KeyError, RuntimeError, NotImplementedError, zipfile.BadZipFile, zlib.error)


def read_npz(path: Path) -> ProposalListing:
    """The proposals in an .npz file, which stays open: its arrays are unpacked one by one."""
    archive = _open(path)
    names = tuple(name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy"))
    if {"ids", "boxes"} <= set(names):
        return _table(path, {name: _array(path, archive, name) for name in _TABLE if name in names})
    if not names:
        raise UserError(f"{path}: holds no arrays; expected ids, counts and boxes, or an array for each image")
    ids = tuple(id_of(f"{path}", name) for name in names)
    return ProposalListing(
        ids, lambda place: rows_of(f"{path}: {ids[place]}", _array(path, archive, names[place]), None)
    )


def _table(path: Path, found: dict[str, ndarray]) -> ProposalListing:
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

    def read(place: int) -> ImageRows:
        part = slice(int(ends[place]) - int(counts[place]), int(ends[place]))
        return rows_of(f"{path}: image {ids[place]}", boxes[part], None if scores is None else scores.reshape(-1)[part])

    return ProposalListing(ids, read)


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


PICKLE_IDS = ("indexes", "ids", "image_ids")
WHAT = "a dictionary with boxes, and indexes or ids"


def read_pkl(path: Path) -> ProposalListing:
    """``boxes`` and ``scores``, a table each image, and ``indexes`` or ``ids``; it is read whole."""
    found = read_pickle(path, WHAT)
    if not isinstance(found, dict):
        raise UserError(f"{path}: a {type(found).__name__}; expected {WHAT}")
    named = {key.decode("latin-1") if isinstance(key, bytes) else key: value for key, value in found.items()}
    ids = tuple(id_of(f"{path}: ids", value) for value in _images(path, named, PICKLE_IDS))
    boxes = _images(path, named, ("boxes",))
    same_length(f"{path}", ("tables of boxes", "ids"), (len(boxes), len(ids)))
    scores = _images(path, named, ("scores",)) if named.get("scores") is not None else None
    if scores is not None:
        same_length(f"{path}", ("tables of boxes", "tables of scores"), (len(boxes), len(scores)))

    def read(place: int) -> ImageRows:
        return rows_of(f"{path}: image {ids[place]}", boxes[place], None if scores is None else scores[place])

    return ProposalListing(ids, read)


def _images(path: Path, found: dict[object, object], names: tuple[str, ...]) -> Sequence[object]:
    """The list under one of some names."""
    value = next((found[name] for name in names if name in found), None)
    if value is None:
        there = ", ".join(reprlib.repr(key) for key in list(found)[:8]) or "nothing"
        raise UserError(f"{path}: no {' or '.join(names)} in it (there is: {there}); expected {WHAT}")
    if isinstance(value, np.ndarray):
        flat = value.reshape(-1) if value.dtype.hasobject or names == PICKLE_IDS else value
        return list(flat) if flat.ndim else []
    if not isinstance(value, list | tuple):
        raise UserError(f"{path}: {names[0]}: a {type(value).__name__} where a list was expected; expected {WHAT}")
    return value


_MATLAB = Convention(boxes_are="yxyx", first_pixel=1, last_pixel="included")
_OURS = Convention(boxes_are="xyxy", first_pixel=0, last_pixel="excluded")


@dataclass(frozen=True, slots=True)
class ProposalFormat:
    """A way in which proposals come, and what its boxes usually mean."""

    read: Callable[[Path], ProposalListing]
    usual: Convention


PROPOSAL_FORMATS: dict[str, ProposalFormat] = {
    "selective-search": ProposalFormat(read_selective_search, _MATLAB),
    "mcg": ProposalFormat(read_mcg, _MATLAB),
    "edge-boxes": ProposalFormat(read_edge_boxes, Convention(boxes_are="xywh", first_pixel=1, last_pixel="included")),
    "pkl": ProposalFormat(read_pkl, Convention(boxes_are="xyxy", first_pixel=0, last_pixel="included")),
    "npz": ProposalFormat(read_npz, _OURS),
    "coco": ProposalFormat(read_coco_proposals, Convention(boxes_are="xywh", first_pixel=0, last_pixel="excluded")),
    "json": ProposalFormat(read_boxes_by_image, _OURS),
}
_BY_SUFFIX: dict[str, Callable[[Path], str]] = {
    ".mat": recognise_mat,
    ".pkl": lambda path: "pkl",
    ".pickle": lambda path: "pkl",
    ".npz": lambda path: "npz",
    ".json": recognise_json,
}


def proposal_format(path: Path, name: str | None) -> str:
    """The name of a file's format: the one given, or what its suffix and content show."""
    if not path.exists():
        raise UserError(f"{path}: no such file or folder; expected proposals ({', '.join(_BY_SUFFIX)})")
    if name is not None:
        if name not in PROPOSAL_FORMATS:
            near = difflib.get_close_matches(name, PROPOSAL_FORMATS, 1, 0.0)[0]
            raise UserError(f"--format {name}: unknown; did you mean {near}? There are {', '.join(PROPOSAL_FORMATS)}")
        return name
    if path.is_dir():
        return recognise_mat(path)
    recognise = _BY_SUFFIX.get(path.suffix.lower())
    if recognise is None:
        raise UserError(
            f"{path}: format not known by its suffix; name it with --format ({', '.join(PROPOSAL_FORMATS)})"
        )
    return recognise(path)


@dataclass(frozen=True, kw_only=True)
class Imported(ProposalMethod):
    """Proposals that a store must bring along: none are searched for here."""

    kind: Literal["imported"] = "imported"
    method: Literal["mcg", "cob"] = "mcg"
    """Whose boxes are meant."""
    # how a search would run is not for us to set: these are no settings here
    short_side: int | None = field(default=None, init=False)
    max_boxes: int | None = field(default=None, init=False)
    min_side: int = field(default=0, init=False)

    def ready(self) -> NoReturn:
        """Raise: whoever asks has no store yet."""
        name = self.method.upper()
        raise UserError(
            f'proposals.kind = "imported": {name} boxes are not made here; get them from their authors, '
            "`tag2box proposals import FOLDER DATA --format mcg --out STORE`, then name them with --proposals STORE"
        )

    def search(self, bgr: UInt8[ndarray, "h w 3"], min_side: float) -> FoundBoxes:
        """There is nothing to search with."""
        self.ready()

    def source(self) -> dict[str, object]:
        """Nothing that a store could have been made with."""
        return {"kind": self.kind, "method": self.method}
