"""Files of proposals from other programs: JSON, .npz and pickle, and the choice of the format of a file."""

import math
import reprlib
import struct
import tokenize
import warnings
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, NoReturn

import numpy as np
from jaxtyping import UInt8

from tag2box import extend, io
from tag2box.errors import UserError, printable
from tag2box.proposals.base import FoundBoxes, ProposalMethod
from tag2box.proposals.importers import matlab, validate
from tag2box.safe_pickle import read_pickle

_TABLE = ("ids", "counts", "boxes", "scores")
_METHODS = {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}  # those of NumPy; others unpack without a limit
_DAMAGED = (
    *(OSError, ValueError, EOFError, LookupError, RuntimeError, ArithmeticError, MemoryError, TypeError, SyntaxError),
    *(struct.error, zipfile.BadZipFile, zlib.error, tokenize.TokenError),  # the last: a header of brackets
)
_PICKLE_IDS = ("indexes", "ids", "image_ids")
_PICKLE_CONTENT = "a dictionary with boxes, and indexes or ids"


# ---------------------------------------------------------------- JSON


def open_coco_proposals(path: Path) -> validate.ProposalFile:
    """Open ``[{"image_id": 9, "bbox": [x, y, w, h], "score": 0.5}, ...]``; scores for all boxes, or for none.

    The list may be the ``annotations`` of a COCO file, as ``tag2box detect`` writes, whose ``images`` have file names.
    """
    content = io.read_json(path, "boxes by image")
    found, names = (content, {}) if isinstance(content, list) else _coco_tables(path, content)
    grouped: dict[str, list[object]] = {name: [] for name in names.values()}
    scores: dict[str, list[object]] = defaultdict(list)
    for row, entry in enumerate(found):
        where = f"{path}: [{row}]"
        if not isinstance(entry, dict) or "image_id" not in entry or not _is_box(entry.get("bbox")):
            raise UserError(f"{where}: expected image_id and bbox of four numbers, got {reprlib.repr(entry)}")
        name = validate.parse_id(f"{where}.image_id", entry["image_id"])
        name = names.get(name, name)
        grouped.setdefault(name, []).append(entry["bbox"])
        if "score" in entry:
            scores[name].append(entry["score"])
    _all_or_none(path, len(found), sum(map(len, scores.values())))
    ids = tuple(grouped)

    def read(place: int) -> validate.RawBoxes:
        name = ids[place]
        return validate.parse_boxes(f"{path}: image {name}", grouped[name], scores[name] if scores else None)

    return validate.ProposalFile(ids, read)


def _coco_tables(path: Path, content: object) -> tuple[list[object], dict[str, str]]:
    """The annotations of a COCO file, and the file name of each image by its id."""
    table = content if isinstance(content, dict) else {}
    rows, images = table.get("annotations"), table.get("images")
    if not isinstance(rows, list) or not isinstance(images, list):
        raise UserError(
            f"{path}: expected a list of boxes with image_id and bbox, or a COCO file with images and annotations, "
            f"got a {type(content).__name__}"
        )
    names = {}
    for row, image in enumerate(images):
        where = f"{path}: images[{row}]"
        if not isinstance(image, dict) or "id" not in image or not isinstance(image.get("file_name"), str):
            raise UserError(f"{where}: expected id and file_name, got {reprlib.repr(image)}")
        names[validate.parse_id(f"{where}.id", image["id"])] = validate.parse_id(where, image["file_name"])
    return rows, names


def open_boxes_by_image(path: Path) -> validate.ProposalFile:
    """Open ``{"000009": [[x1, y1, x2, y2], ...], ...}``, or five numbers per box with the score last."""
    found = io.read_json(path, "boxes by image")
    if not isinstance(found, dict):
        raise UserError(f"{path}: expected an object of boxes by image, got a {type(found).__name__}")
    ids = tuple(validate.parse_id(f"{path}", name) for name in found)
    tables = tuple(found.values())
    return validate.ProposalFile(ids, lambda place: _rows(f"{path}: image {ids[place]}", tables[place]))


def _rows(where: str, table: Any) -> validate.RawBoxes:
    if not isinstance(table, list):
        raise UserError(f"{where}: expected a list of boxes, got {reprlib.repr(table)}")
    lengths = {len(row) if isinstance(row, list) else 0 for row in table}
    if not lengths <= {4} and not lengths <= {5}:
        raise UserError(f"{where}: expected four numbers per box, or five with the score, the same for all its boxes")
    return validate.parse_boxes(where, table, None)


def _is_box(value: object) -> bool:
    return isinstance(value, list) and len(value) == 4


def _all_or_none(path: Path, boxes: int, scores: int) -> None:
    if scores not in {0, boxes}:
        raise UserError(f"{path}: {scores} of {boxes} boxes have a score; give it to all or to none")


# ---------------------------------------------------------------- .npz


def open_npz(path: Path) -> validate.ProposalFile:
    """Open an .npz file, which stays open: its arrays are decompressed one by one."""
    archive, most = _open(path)
    names = tuple(name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy"))
    if {"ids", "boxes"} <= set(names):
        return _table(path, {name: _array(path, archive, name) for name in _TABLE if name in names}, most)
    if not names:
        raise UserError(f"{path}: holds no arrays; expected ids, counts and boxes, or an array for each image")
    ids = tuple(validate.parse_id(f"{path}", name) for name in names)
    return validate.ProposalFile(
        ids, lambda place: validate.parse_boxes(f"{path}: {ids[place]}", _array(path, archive, names[place]), None)
    )


def _table(path: Path, found: dict[str, np.ndarray], most: int) -> validate.ProposalFile:
    if "counts" not in found:
        raise UserError(f"{path}: no array counts beside ids and boxes; it says how many boxes each image has")
    if max(found["ids"].size, found["counts"].size) > most:
        raise UserError(f"{path}: ids: more than {most:,} images in so small a file; it is damaged, save it again")
    ids = tuple(validate.parse_id(f"{path}: ids", value) for value in found["ids"].reshape(-1))
    counts, boxes, scores = found["counts"].reshape(-1), np.atleast_1d(found["boxes"]), found.get("scores")
    if counts.dtype.kind not in "iu" or (len(counts) and counts.min() < 0):
        raise UserError(f"{path}: counts: expected whole numbers from 0, got {counts.dtype}; correct the file")
    validate.check_lengths(f"{path}", ("ids", "counts"), (len(ids), len(counts)))
    validate.check_lengths(f"{path}", ("boxes", "by its counts"), (len(boxes), sum(map(int, counts))))
    if scores is not None:
        validate.check_lengths(f"{path}", ("boxes", "scores"), (len(boxes), scores.size))
    ends = np.cumsum(counts, dtype=np.int64)

    def read(place: int) -> validate.RawBoxes:
        part = slice(int(ends[place]) - int(counts[place]), int(ends[place]))
        return validate.parse_boxes(
            f"{path}: image {ids[place]}", boxes[part], None if scores is None else scores.reshape(-1)[part]
        )

    return validate.ProposalFile(ids, read)


def _open(path: Path) -> tuple[zipfile.ZipFile, int]:
    """The archive, and the most images that one of its size may have.

    The sizes that an archive declares are binding, because no more than that is unpacked of any array.
    """
    file = io.open_file(path, "an .npz file")
    try:
        archive, size = zipfile.ZipFile(file), path.stat().st_size
        if sum(info.file_size for info in archive.infolist()) > validate.unpacked_limit(size):
            raise ValueError("unpacks to far more than any boxes")
        return archive, validate.image_limit(size)
    except _DAMAGED as error:
        why = printable(str(error), 100)
        raise UserError(f"{path}: not readable as .npz ({why}); save it again with numpy.savez") from None


def _array(path: Path, archive: zipfile.ZipFile, name: str) -> np.ndarray:
    """One array; its header is checked before anything else is decompressed."""
    try:
        info = archive.getinfo(f"{name}.npy")
        if info.compress_type not in _METHODS:
            raise ValueError(f"compression method {info.compress_type}")
        with warnings.catch_warnings():  # Python's parser warns of odd literals in a header
            warnings.simplefilter("ignore")
            with archive.open(info) as file:
                _check_header(file, info.file_size)
            with archive.open(info) as file:
                found = np.asarray(np.lib.format.read_array(file, allow_pickle=False))
        if found.dtype.kind == "U":
            found.tolist()  # raises if text is not valid Unicode
        return found
    except _DAMAGED as error:
        reason = printable(f"{error}" or type(error).__name__, 100)
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
        raise ValueError(f"its header declares {shape} {dtype} in {size} bytes")


# ---------------------------------------------------------------- pickle


def open_pickle(path: Path) -> validate.ProposalFile:
    """Open a pickled dictionary: ``boxes`` and ``scores``, a table per image, and ``indexes`` or ``ids``."""
    found = read_pickle(path, _PICKLE_CONTENT)
    if not isinstance(found, dict):
        raise UserError(f"{path}: a {type(found).__name__}; expected {_PICKLE_CONTENT}")
    named = {key.decode("latin-1") if isinstance(key, bytes) else key: value for key, value in found.items()}
    ids = tuple(validate.parse_id(f"{path}: ids", value) for value in _images(path, named, _PICKLE_IDS))
    boxes = _images(path, named, ("boxes",))
    validate.check_lengths(f"{path}", ("tables of boxes", "ids"), (len(boxes), len(ids)))
    scores = _images(path, named, ("scores",)) if named.get("scores") is not None else None
    if scores is not None:
        validate.check_lengths(f"{path}", ("tables of boxes", "tables of scores"), (len(boxes), len(scores)))

    def read(place: int) -> validate.RawBoxes:
        return validate.parse_boxes(
            f"{path}: image {ids[place]}", boxes[place], None if scores is None else scores[place]
        )

    return validate.ProposalFile(ids, read)


def _images(path: Path, found: dict[object, object], names: tuple[str, ...]) -> Sequence[object]:
    """The list under the first of some names that is there."""
    value = next((found[name] for name in names if name in found), None)
    if value is None:
        there = ", ".join(reprlib.repr(key) for key in list(found)[:8]) or "nothing"
        raise UserError(f"{path}: no {' or '.join(names)} in it (there is: {there}); expected {_PICKLE_CONTENT}")
    if isinstance(value, np.ndarray):
        flat = value.reshape(-1) if value.dtype.hasobject or names == _PICKLE_IDS else value
        return list(flat) if flat.ndim else []
    if not isinstance(value, list | tuple):
        raise UserError(
            f"{path}: {names[0]}: a {type(value).__name__} where a list was expected; expected {_PICKLE_CONTENT}"
        )
    return value


# ---------------------------------------------------------------- formats

_EXCLUSIVE = validate.BoxConvention(boxes_are="xyxy", first_pixel=0, last_pixel="excluded")
_INCLUSIVE = validate.BoxConvention(boxes_are="xyxy", first_pixel=0, last_pixel="included")
_WIDTHS = validate.BoxConvention(boxes_are="xywh", first_pixel=0, last_pixel="excluded")
PICKLE_PROPOSALS = validate.ProposalFormat(open=open_pickle, convention=_INCLUSIVE)
NPZ_PROPOSALS = validate.ProposalFormat(open=open_npz, convention=_EXCLUSIVE)
COCO_PROPOSALS = validate.ProposalFormat(open=open_coco_proposals, convention=_WIDTHS)
JSON_PROPOSALS = validate.ProposalFormat(open=open_boxes_by_image, convention=_EXCLUSIVE)


def _recognize_json(path: Path) -> validate.ProposalFormat:
    with path.open("rb") as file:
        return COCO_PROPOSALS if file.read(64).lstrip().startswith(b"[") else JSON_PROPOSALS


_BY_SUFFIX: dict[str, Callable[[Path], validate.ProposalFormat]] = {
    ".mat": matlab.recognize_mat,
    ".pkl": lambda path: PICKLE_PROPOSALS,
    ".pickle": lambda path: PICKLE_PROPOSALS,
    ".npz": lambda path: NPZ_PROPOSALS,
    ".json": _recognize_json,
}


def proposal_format(path: Path, name: str | None) -> tuple[str, validate.ProposalFormat]:
    """Name and format of a file: the format named, or the one recognized by suffix and content."""
    if not path.exists():
        raise UserError(f"{path}: no such file or folder; expected proposals ({', '.join(_BY_SUFFIX)})")
    if name is not None:
        return name, _named_format(name)
    recognize = _BY_SUFFIX.get(".mat" if path.is_dir() else path.suffix.lower())
    if recognize is None:
        names = ", ".join(extend.PROPOSAL_FILE_FORMATS)
        raise UserError(f"{path}: format not known by its suffix; name it with --format ({names})")
    found = recognize(path)
    known = extend.PROPOSAL_FILE_FORMATS
    return next(name for name in known if _named_format(name) is found), found


def _named_format(name: str) -> validate.ProposalFormat:
    try:
        found = extend.find_part("proposal file format", name)
    except UserError as error:
        raise UserError(f"--format {name}: {error}") from None
    if not isinstance(found, validate.ProposalFormat):
        raise UserError(f"--format {name}: expected a tag2box.proposals.importers.validate.ProposalFormat")
    return found


# ---------------------------------------------------------------- the method of imported stores


@dataclass(frozen=True, kw_only=True)
class Imported(ProposalMethod):
    """Proposals imported into a store beforehand; there is no search."""

    kind: Literal["imported"] = "imported"
    method: Literal["mcg", "cob"] = "mcg"
    """Method that the boxes come from."""
    # without a search, these are not settings
    short_side: int | None = field(default=None, init=False)
    max_boxes: int | None = field(default=None, init=False)
    min_side: int = field(default=0, init=False)

    def ready(self) -> NoReturn:
        """Raise: without a store there is no way to make these proposals."""
        name = self.method.upper()
        raise UserError(
            f'proposals.kind = "imported": {name} boxes are not made here; get them from their authors, '
            "`tag2box proposals import FOLDER DATA --format mcg --out STORE`, then name them with --proposals STORE"
        )

    def search(self, bgr: UInt8[np.ndarray, "h w 3"], min_side: float) -> FoundBoxes:
        """Raise: there is no search."""
        self.ready()

    def source(self) -> dict[str, object]:
        """A source that no store has, so that an imported store is never taken for one made by a search."""
        return {"kind": self.kind, "method": self.method}
