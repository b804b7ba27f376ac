"""COCO annotation files: rows of images, categories and annotations, checked one by one.

The JSON is decoded row by row, so that of COCO's 860,000 outlines only the requested fields stay in memory. The type of
an annotation is given by the caller: ``coco_tags`` reads categories alone, ``coco_boxes`` reads boxes.
"""

import json
import re
import reprlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Generic, TypeVar

from pydantic import Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from tag2box import io
from tag2box.errors import UserError, printable
from tag2box.formats.listing import Fault, OnFault, refuse
from tag2box.images import distinct_names

_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()


def each_row(path: Path, what: str, take: Mapping[str, Callable[[object], None]]) -> frozenset[str]:
    """Call ``take[name]`` with every row of the lists it names; returns the names of the lists that the file has."""
    try:
        text = io.read_bytes(path, what, io.JSON_LIMIT, is_text=True).decode("utf-8-sig")
        if not text.startswith("{", _skip(text, 0)):
            got = type(_DECODER.decode(text)).__name__
            raise UserError(f"{path}: expected an object with {_listed(take)}, got a {got}")
        return frozenset(_members(path, text, take))
    except RecursionError:
        raise UserError(f"{path}: not readable as JSON (nested too deep); expected {what}") from None
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise UserError(f"{path}: not readable as JSON ({printable(str(error))}); expected {what}") from None


def _listed(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def _members(path: Path, text: str, take: Mapping[str, Callable[[object], None]]) -> Iterator[str]:
    """Decode the members of the top-level object; yields the names of the lists that were taken."""
    at = _after_space(text, 0, "{")
    while text[at : at + 1] != "}":
        if text[at : at + 1] != '"':
            raise json.JSONDecodeError("Expecting property name enclosed in double quotes", text, at)
        name, at = _DECODER.raw_decode(text, at)
        at = _after_space(text, at, ":")
        if name not in take:
            _, at = _DECODER.raw_decode(text, at)
        elif text[at : at + 1] == "[":
            at = _rows(text, at, take[name])
            yield name
        else:
            value, _ = _DECODER.raw_decode(text, at)
            raise UserError(printable(f"{path}: {name}: expected a list, got {value!r:.40}; correct the file"))
        at = _next(text, at, "}")
    if _SPACE.fullmatch(text, at + 1) is None:
        raise json.JSONDecodeError("Extra data", text, at + 1)


def _rows(text: str, at: int, take: Callable[[object], None]) -> int:
    """Take the rows of the list that begins at ``at``; returns the position after it."""
    at = _after_space(text, at, "[")
    while text[at : at + 1] != "]":
        row, at = _DECODER.raw_decode(text, at)
        take(row)
        at = _next(text, at, "]")
    return at + 1


def _next(text: str, at: int, end: str) -> int:
    """The position of the item after a comma, or of the closing bracket."""
    at = _skip(text, at)
    if text[at : at + 1] == end:
        return at
    at = _after_space(text, at, ",")
    if text[at : at + 1] == end:
        raise json.JSONDecodeError("Illegal trailing comma", text, at)
    return at


def _after_space(text: str, at: int, mark: str) -> int:
    """The position of the first character after a mark and the white space around it."""
    at = _skip(text, at)
    if not text.startswith(mark, at):
        raise json.JSONDecodeError(f"Expecting {mark!r}", text, at)
    return _skip(text, at + len(mark))


def _skip(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


# ---------------------------------------------------------------- checked files


T = TypeVar("T")

CocoSide = Annotated[int, Field(gt=0, le=1_000_000)]
CocoCount = Annotated[int, Field(ge=1, le=1_000_000, strict=True)]


@dataclass(frozen=True, slots=True)
class BadRow:
    """An invalid row: the place in it, and what was expected there."""

    place: str
    problem: str


@dataclass(frozen=True, slots=True)
class CocoImage:
    """A row of ``images``. Sizes are needed for boxes only; the lists are image-level tags, ``counts`` of them."""

    id: int
    file_name: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    width: CocoSide | None = None
    height: CocoSide | None = None
    category_ids: tuple[int | str, ...] = ()
    categories: tuple[int | str, ...] = ()
    tags: tuple[int | str, ...] = ()
    counts: Mapping[str, CocoCount] | None = None


@dataclass(frozen=True, slots=True)
class CocoCategory:
    """A row of ``categories``."""

    id: int
    name: Annotated[str, Field(min_length=1, max_length=1000)]


@dataclass(frozen=True, slots=True)
class CocoRow(Generic[T]):
    """A valid row, and its number in its list."""

    number: int
    value: T


@dataclass(frozen=True, slots=True)
class CocoFile(Generic[T]):
    """A checked file: images in the order of their ids, annotations in the file's order."""

    path: Path
    images: dict[int, CocoRow[CocoImage]]
    names: dict[int, str]  # image id -> photo id
    categories: dict[int, str]  # in the order of their ids
    annotations: list[CocoRow[T]] | None  # None: the file has no such list


_IMAGE, _CATEGORY = TypeAdapter(CocoImage), TypeAdapter(CocoCategory)


def parse_coco(path: Path, annotation: TypeAdapter[T] | None, on_fault: OnFault) -> CocoFile[T]:
    """Read a COCO file; an invalid row is a fault and is skipped. ``annotation=None`` skips all annotations.

    The photo id of an image is the stem of its file name, as elsewhere; if two share a stem, the path without suffix,
    or the whole path if only the suffix differs; without a file name, the number of the image.
    """
    pictures: list[CocoImage | BadRow] = []
    kinds: list[CocoCategory | BadRow] = []
    annotations: list[T | BadRow] = []
    take: dict[str, Callable[[object], None]] = {
        "images": _taker(_IMAGE, pictures),
        "categories": _taker(_CATEGORY, kinds),
    }
    if annotation is not None:
        take["annotations"] = _taker(annotation, annotations)
    there = each_row(path, "a COCO annotation file", take)
    for field in ("images", "categories"):
        if field not in there:
            raise UserError(f"{path}: {field}: field required; correct the file")
    categories = _categories(path, [row.value for row in _good(path, "categories", kinds, refuse)])
    rows = sorted(_good(path, "images", pictures, on_fault), key=lambda row: row.value.id)
    images = _images(path, rows, on_fault)
    names = distinct_names([PurePosixPath(_file(row.value)) for row in images.values()])
    good = _good(path, "annotations", annotations, on_fault) if "annotations" in there else None
    return CocoFile(path, images, dict(zip(images, names, strict=True)), categories, good)


def refers(content: CocoFile[T], row: int, image_id: int, category_id: int, on_fault: OnFault) -> bool:
    """Whether the image and the category of an annotation exist; a fault if not."""
    where = f"{content.path}: annotations[{row}]"
    if image_id not in content.images:
        line = f"{where}.image_id: no image has id {image_id}; add the image"
        on_fault(Fault("bad row", f"annotations[{row}]", line))
        return False
    if category_id not in content.categories:
        line = f"{where}.category_id: no category has id {category_id}; add the category"
        on_fault(Fault("unknown class", str(category_id), line))
        return False
    return True


def _taker(adapter: TypeAdapter[T], rows: list[T | BadRow]) -> Callable[[object], None]:
    """A function that validates a row and appends it to ``rows``, or its first error."""

    def take(row: object) -> None:
        try:
            rows.append(adapter.validate_python(row))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
            rows.append(BadRow(place, _expected(first)))

    return take


def _expected(error: ErrorDetails) -> str:
    if error["type"] == "missing":
        return "field required"
    message = "expected an object" if error["type"] == "dataclass_type" else error["msg"]
    return f"{message[0].lower()}{message[1:]}, got {reprlib.repr(error['input'])}"


def _good(path: Path, field: str, rows: Sequence[T | BadRow], on_fault: OnFault) -> list[CocoRow[T]]:
    good = []
    for number, row in enumerate(rows):
        if isinstance(row, BadRow):
            line = f"{path}: {field}[{number}]{row.place}: {row.problem}; correct the file"
            on_fault(Fault("bad box" if row.place.startswith(".bbox") else "bad row", f"{field}[{number}]", line))
        else:
            good.append(CocoRow(number, row))
    return good


def _categories(path: Path, categories: Sequence[CocoCategory]) -> dict[int, str]:
    by_id: dict[int, str] = {}
    for category in sorted(categories, key=lambda category: category.id):
        if category.id in by_id:
            raise UserError(f"{path}: categories: id {category.id} is used twice; every id must be different")
        by_id[category.id] = category.name
    for name, count in Counter(by_id.values()).items():
        if count > 1:
            raise UserError(
                printable(f"{path}: categories: name {name!r} is used {count} times; give each category its own name")
            )
    return by_id


def _images(path: Path, rows: Sequence[CocoRow[CocoImage]], on_fault: OnFault) -> dict[int, CocoRow[CocoImage]]:
    """Images by id; of several with the same id or file name, the first."""
    images: dict[int, CocoRow[CocoImage]] = {}
    files = Counter(PurePosixPath(_file(row.value)).as_posix() for row in rows)
    taken: set[str] = set()
    for row in rows:
        file = PurePosixPath(_file(row.value)).as_posix()
        if not PurePosixPath(file).name:
            line = f"{path}: images[{row.number}].file_name: expected a file's name, got {file!r}; correct the file"
            on_fault(Fault("bad row", f"images[{row.number}]", line))
        elif row.value.id in images:
            line = f"{path}: images: id {row.value.id} is used twice; every id must be different"
            on_fault(Fault("listed twice", file, line))
        elif file in taken:
            line = f"{path}: images: file_name {file!r} is used {files[file]} times; every image needs its own"
            on_fault(Fault("listed twice", file, line))
        else:
            images[row.value.id] = row
            taken.add(file)
    return images


def _file(image: CocoImage) -> str:
    return (image.file_name or str(image.id)).replace("\\", "/")
