"""Detections read from files: COCO results, COCO files with scores, VOC result files and label sets.

``export`` writes them.
"""

import difflib
import math
import re
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Annotated

import torch
from pydantic import BaseModel, Field, FiniteFloat, ValidationError

from tag2box import errors, io, storage
from tag2box.annotations import Detections, Truth
from tag2box.labels.label_set import LabelSet, is_label_set
from tag2box.metrics.voc_ap import from_voc_pixels

_Length = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_MOST_DIGITS = 18  # of a photo's name that is taken for a number
_VOC_FILE = re.compile(r"comp\d+_det_(.+)\.txt")


class _Image(BaseModel):
    id: int | str
    file_name: str


class _Category(BaseModel):
    id: int
    name: str


class _Result(BaseModel):
    image_id: int | str
    category_id: int
    bbox: tuple[FiniteFloat, FiniteFloat, _Length, _Length]
    score: FiniteFloat
    file_name: str | None = None
    category_name: str | None = None


class _File(BaseModel):
    images: list[_Image] | None
    categories: list[_Category] | None
    annotations: list[_Result]


@dataclass(frozen=True, slots=True)
class _Found:
    """The detections of one photo while a file is read."""

    boxes: list[tuple[float, ...]] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)

    def add(self, box: tuple[float, ...], score: float, label: int) -> None:
        self.boxes.append(box)
        self.scores.append(score)
        self.labels.append(label)


def read_detections(
    path: Path,
    truth: Truth,
    *,
    images: Mapping[int, str] | None = None,
    categories: Mapping[int, str] | None = None,
) -> dict[str, Detections]:
    """Detections for every photo of ``truth``, in its order, from a file or folder.

    * A folder with ``labels.json`` is a label set: its labels, without the doubtful ones; a score that is missing is 1.
    * Another folder contains VOC result files, ``comp4_det_SPLIT_CLASS.txt`` or ``comp4_det_CLASS.txt``.
    * A JSON list is a COCO results file. ``images`` and ``categories`` (of ``coco_boxes.read_coco``) resolve its ids; a
      ``file_name`` or ``category_name`` in an entry takes precedence. Without them, an image id is the photo whose name
      is that number ("000012" for 12), and category k is the k-th class.
    * A JSON object is a COCO file with scores, as ``tag2box detect`` writes; it names its images and categories.

    Numbers are kept in double precision, so that different scores do not become ties.
    """
    found = {image_id: _Found() for image_id in truth.ids}
    if is_label_set(path):
        _read_labels(path, truth, found)
    elif path.is_dir():
        _read_voc(path, truth, found)
    else:
        named: dict[int | str, str] = {}
        named.update((images or {}).items())
        numbers = _Numbers(named, categories or {})
        _read_coco(path, truth, numbers, found)
    return {image_id: _to_detections(rows) for image_id, rows in found.items()}


def _to_detections(rows: _Found) -> Detections:
    return Detections(
        boxes=torch.tensor(rows.boxes, dtype=torch.float64).reshape(-1, 4),
        scores=torch.tensor(rows.scores, dtype=torch.float64),
        labels=torch.tensor(rows.labels, dtype=torch.long),
    )


# ---------------------------------------------------------------- COCO


@dataclass(frozen=True, slots=True)
class _Numbers:
    """The meaning of the ids of a COCO file."""

    images: Mapping[int | str, str]  # image id -> id in the truth, or a file name
    categories: Mapping[int, str]  # category id -> class name


def _read_coco(path: Path, truth: Truth, numbers: _Numbers, found: dict[str, _Found]) -> None:
    content = _parse(path, io.read_json(path, "a COCO results file, or a folder of VOC result files"))
    if content.images is not None and content.categories is not None:
        own = {image.id: image.file_name for image in content.images}
        numbers = _Numbers(own, {category.id: category.name for category in content.categories})
    names = _ImageNames(truth.ids)
    labels = {name: label for label, name in enumerate(truth.classes)}
    for row, entry in enumerate(content.annotations):
        where = f"{path}: entry {row}"
        class_name = _class_name(entry, truth, numbers, where)
        if class_name not in labels:
            raise errors.UserError(_unknown_class(where, class_name, truth))
        written = entry.file_name if entry.file_name is not None else numbers.images.get(entry.image_id, entry.image_id)
        image_id = names.find(written)
        if image_id is None:
            raise errors.UserError(
                f"{where}, image_id: image {written!r} is not in the truth; evaluate against its own truth"
            )
        x, y, width, height = entry.bbox
        found[image_id].add((x, y, x + width, y + height), entry.score, labels[class_name])


def _parse(path: Path, document: object) -> _File:
    """The validated file; a results list becomes one that names neither images nor categories."""
    if not isinstance(document, list | dict):
        raise errors.UserError(
            f"{path}: expected a list of COCO results, or an object with annotations, got {document!r:.40}"
        )
    try:
        if isinstance(document, list):
            return _File.model_validate({"images": None, "categories": None, "annotations": document})
        return _File.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = _place(first["loc"])
        got = "" if first["type"] == "missing" else f", got {reprlib.repr(first['input'])}"
        message = f"{where}: {first['msg'][0].lower()}{first['msg'][1:]}{got}"
        raise errors.UserError(f"{path}: {message}; expected COCO results") from None


def _place(loc: tuple[int | str, ...]) -> str:
    if loc[0] == "annotations" and len(loc) > 1:
        inner = "".join(f"[{part}]" if isinstance(part, int) else f", {part}" for part in loc[2:])
        return f"entry {loc[1]}{inner}"
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).lstrip(".")


def _class_name(entry: _Result, truth: Truth, numbers: _Numbers, where: str) -> str:
    if entry.category_name is not None:
        return entry.category_name
    if numbers.categories:
        if entry.category_id in numbers.categories:
            return numbers.categories[entry.category_id]
        known = ", ".join(str(number) for number in sorted(numbers.categories)[:12])
        raise errors.UserError(f"{where}, category_id: no category has id {entry.category_id}; the ids begin {known}")
    if 1 <= entry.category_id <= len(truth.classes):
        return truth.classes[entry.category_id - 1]
    raise errors.UserError(
        f"{where}, category_id: expected 1 to {len(truth.classes)}, got {entry.category_id}; name the categories"
    )


def _unknown_class(where: str, name: str, truth: Truth) -> str:
    near = difflib.get_close_matches(name, truth.classes, n=1, cutoff=0.0)
    hint = f"the nearest class of the truth is {near[0]!r}" if near else "the truth has no classes"
    return f"{where}: class {name!r} is not in the truth; {hint}"


class _ImageNames:
    """Finds a photo of the truth by its id, its file name, or the number that its id spells."""

    def __init__(self, ids: Iterable[str]) -> None:
        self.ids = set(ids)
        self.numbers: dict[int, str] = {}
        for image_id in self.ids:
            if image_id.isdecimal() and len(image_id) <= _MOST_DIGITS:
                # With both "12" and "012" in the set, 12 is ambiguous: then only the exact name matches.
                self.numbers[int(image_id)] = "" if int(image_id) in self.numbers else image_id

    def find(self, written: int | str) -> str | None:
        """The photo id that ``written`` refers to, or None."""
        if isinstance(written, int):
            candidates: tuple[str, ...] = (str(written), self.numbers.get(written, ""))
        elif written in self.ids:
            return written
        else:
            file = PurePosixPath(written.replace("\\", "/"))
            whole = file.as_posix()
            candidates = (whole, file.with_suffix("").as_posix(), file.stem) if file.name else (whole,)
        return next((name for name in candidates if name in self.ids), None)


# ---------------------------------------------------------------- label sets


def _read_labels(folder: Path, truth: Truth, found: dict[str, _Found]) -> None:
    names, labels = _ImageNames(truth.ids), {name: label for label, name in enumerate(truth.classes)}
    for photo in LabelSet.open(folder).content.photos:
        image_id = names.find(photo.id) or names.find(photo.file)
        if image_id is None:
            raise errors.UserError(
                f"{folder}: photo {photo.file!r} is not in the truth; evaluate against its own truth, with --split"
            )
        for box in photo.labels:
            if box.name not in labels:
                raise errors.UserError(_unknown_class(str(folder), box.name, truth))
            found[image_id].add(box.box, 1.0 if box.score is None else box.score, labels[box.name])


# ---------------------------------------------------------------- VOC


def _read_voc(folder: Path, truth: Truth, found: dict[str, _Found]) -> None:
    matches = [(path, _VOC_FILE.fullmatch(path.name)) for path in sorted(folder.iterdir())]
    files = [(path, match[1]) for path, match in matches if match]
    if not files:
        raise errors.UserError(f"{folder}: no comp4_det_CLASS.txt inside; expected a folder of VOC result files")
    seen: dict[int, Path] = {}
    for path, rest in files:
        label = _voc_label(path, rest, truth)
        if label in seen:
            raise errors.UserError(
                f"{path}: class {truth.classes[label]!r} is also in {seen[label].name}; keep one split in a folder"
            )
        seen[label] = path
        _read_voc_file(path, label, found)


def _voc_label(path: Path, rest: str, truth: Truth) -> int:
    """The class of a file: the name after ``det_``, with or without a leading split."""
    parts = rest.split("_")
    spellings = (str, storage.safe_file_name, storage.marked_file_name)
    labels = {spell(name): label for spell in reversed(spellings) for label, name in enumerate(truth.classes)}
    for start in range(len(parts)):
        name = "_".join(parts[start:])
        if name in labels:
            return labels[name]
    raise errors.UserError(_unknown_class(str(path), parts[-1], truth))


def _read_voc_file(path: Path, label: int, found: dict[str, _Found]) -> None:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise errors.UserError(f"{path}: not readable as VOC results ({error})") from None
    rows = [(number, *_voc_line(path, number, line)) for number, line in enumerate(lines, start=1) if line.strip()]
    corners = torch.tensor([numbers[1:] for _, _, numbers in rows], dtype=torch.float64).reshape(-1, 4)
    for (number, image_id, numbers), box in zip(rows, from_voc_pixels(corners).tolist(), strict=True):
        where = f"{path}: line {number}"
        if image_id not in found:
            raise errors.UserError(f"{where}: image {image_id!r} is not in the truth; evaluate against its own truth")
        if box[2] < box[0] or box[3] < box[1]:
            raise errors.UserError(f"{where}: box: expected xmin <= xmax and ymin <= ymax, got {numbers[1:]}")
        found[image_id].add(tuple(box), numbers[0], label)


def _voc_line(path: Path, number: int, line: str) -> tuple[str, tuple[float, ...]]:
    parts = line.strip().rsplit(maxsplit=5)
    try:
        numbers = tuple(float(text) for text in parts[1:])
    except ValueError:
        numbers = ()
    if len(numbers) != 5 or not all(math.isfinite(value) for value in numbers):
        raise errors.UserError(
            f"{path}: line {number}: expected 'image score xmin ymin xmax ymax', got {line.strip()[:80]!r}"
        )
    return parts[0], numbers
