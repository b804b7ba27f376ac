"""A JSON object of long lists, read row by row: of COCO's 860,000 outlines, only what is asked for stays in memory."""

from __future__ import annotations

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

from tag2box.data.images import distinct_names
from tag2box.errors import UserError
from tag2box.formats.listing import Fault, OnFault, printable, refuse

_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()


def each_row(path: Path, what: str, take: Mapping[str, Callable[[object], None]]) -> frozenset[str]:
    """Hand every row of some lists to its taker, as it is met; the names of the lists that were there."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
        if not text.startswith("{", _skip(text, 0)):
            got = type(_DECODER.decode(text)).__name__
            raise UserError(f"{path}: expected an object with {_listed(take)}, got a {got}")
        return frozenset(_members(path, text, take))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; expected {what}") from None
    except RecursionError:
        raise UserError(f"{path}: not readable as JSON (nested too deep); expected {what}") from None
    except (OSError, ValueError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise UserError(f"{path}: not readable as JSON ({printable(str(error))}); expected {what}") from None


def _listed(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def _members(path: Path, text: str, take: Mapping[str, Callable[[object], None]]) -> Iterator[str]:
    """Walk the object's members; the names of those that are taken."""
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
    """Take the rows of the list that begins here; the place behind it."""
    at = _after_space(text, at, "[")
    while text[at : at + 1] != "]":
        row, at = _DECODER.raw_decode(text, at)
        take(row)
        at = _next(text, at, "]")
    return at + 1


def _next(text: str, at: int, end: str) -> int:
    """The place of what follows a comma, or of the closing bracket."""
    at = _skip(text, at)
    if text[at : at + 1] == end:
        return at
    at = _after_space(text, at, ",")
    if text[at : at + 1] == end:
        raise json.JSONDecodeError("Illegal trailing comma", text, at)
    return at


def _after_space(text: str, at: int, mark: str) -> int:
    """The place of the first letter behind a mark and the space around it."""
    at = _skip(text, at)
    if not text.startswith(mark, at):
        raise json.JSONDecodeError(f"Expecting {mark!r}", text, at)
    return _skip(text, at + len(mark))


def _skip(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


T = TypeVar("T")

CocoSide = Annotated[int, Field(gt=0, le=1_000_000)]
Number = Annotated[int, Field(ge=1, le=1_000_000, strict=True)]


@dataclass(frozen=True, slots=True)
class Bad:
    """A row that is not what it should be: the place in it, and what was expected there."""

    place: str
    problem: str


@dataclass(frozen=True, slots=True)
class Image:
    """A row of ``images``. Sizes are needed for boxes only; lists are tags of the whole image, counts are of these."""

    id: int
    file_name: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    width: CocoSide | None = None
    height: CocoSide | None = None
    category_ids: tuple[int | str, ...] = ()
    categories: tuple[int | str, ...] = ()
    tags: tuple[int | str, ...] = ()
    counts: Mapping[str, Number] | None = None


@dataclass(frozen=True, slots=True)
class Category:
    """A row of ``categories``."""

    id: int
    name: Annotated[str, Field(min_length=1, max_length=1000)]


@dataclass(frozen=True, slots=True)
class CocoRow(Generic[T]):
    """A good row, and its number in its list."""

    number: int
    value: T


@dataclass(frozen=True, slots=True)
class CocoFile(Generic[T]):
    """A checked file: images in the order of their ids, annotations in the file's order."""

    path: Path
    images: dict[int, CocoRow[Image]]
    names: dict[int, str]  # image id -> the name the photo is known by
    categories: dict[int, str]  # in the order of their ids
    annotations: list[CocoRow[T]] | None  # None: the file has no such list


_IMAGE, _CATEGORY = TypeAdapter(Image), TypeAdapter(Category)


def parse(path: Path, annotation: TypeAdapter[T] | None, complain: OnFault) -> CocoFile[T]:
    """Read a COCO file, leaving bad rows out after a complaint; without a kind of annotation, those are passed over.

    Images are known by the stems of their file names, as photos are elsewhere; where two share a stem, by their paths
    without suffix, or with it where that is what sets them apart; without file names, by their numbers.
    """
    pictures: list[Image | Bad] = []
    kinds: list[Category | Bad] = []
    annotations: list[T | Bad] = []
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
    rows = sorted(_good(path, "images", pictures, complain), key=lambda row: row.value.id)
    images = _images(path, rows, complain)
    names = distinct_names([PurePosixPath(_file(row.value)) for row in images.values()])
    good = _good(path, "annotations", annotations, complain) if "annotations" in there else None
    return CocoFile(path, images, dict(zip(images, names, strict=True)), categories, good)


def refers(content: CocoFile[T], row: int, image_id: int, category_id: int, complain: OnFault) -> bool:
    """Whether an annotation is of an image and a category that the file has; a complaint where not."""
    where = f"{content.path}: annotations[{row}]"
    if image_id not in content.images:
        line = f"{where}.image_id: no image has id {image_id}; add the image"
        complain(Fault("bad row", f"annotations[{row}]", line))
        return False
    if category_id not in content.categories:
        line = f"{where}.category_id: no category has id {category_id}; add the category"
        complain(Fault("unknown class", str(category_id), line))
        return False
    return True


def _taker(adapter: TypeAdapter[T], rows: list[T | Bad]) -> Callable[[object], None]:
    """Puts each row it is given among ``rows``, or the first thing wrong with it."""

    def take(row: object) -> None:
        try:
            rows.append(adapter.validate_python(row))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
            rows.append(Bad(place, _expected(first)))

    return take


def _expected(error: ErrorDetails) -> str:
    if error["type"] == "missing":
        return "field required"
    message = "expected an object" if error["type"] == "dataclass_type" else error["msg"]
    return f"{message[0].lower()}{message[1:]}, got {reprlib.repr(error['input'])}"


def _good(path: Path, field: str, rows: Sequence[T | Bad], complain: OnFault) -> list[CocoRow[T]]:
    good = []
    for number, row in enumerate(rows):
        if isinstance(row, Bad):
            line = f"{path}: {field}[{number}]{row.place}: {row.problem}; correct the file"
            complain(Fault("bad box" if row.place.startswith(".bbox") else "bad row", f"{field}[{number}]", line))
        else:
            good.append(CocoRow(number, row))
    return good


def _categories(path: Path, categories: Sequence[Category]) -> dict[int, str]:
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


def _images(path: Path, rows: Sequence[CocoRow[Image]], complain: OnFault) -> dict[int, CocoRow[Image]]:
    """Images by their ids; of several with one id or one file name, the first."""
    images: dict[int, CocoRow[Image]] = {}
    files = Counter(PurePosixPath(_file(row.value)).as_posix() for row in rows)
    taken: set[str] = set()
    for row in rows:
        file = PurePosixPath(_file(row.value)).as_posix()
        if not PurePosixPath(file).name:
            line = f"{path}: images[{row.number}].file_name: expected a file's name, got {file!r}; correct the file"
            complain(Fault("bad row", f"images[{row.number}]", line))
        elif row.value.id in images:
            line = f"{path}: images: id {row.value.id} is used twice; every id must be different"
            complain(Fault("listed twice", file, line))
        elif file in taken:
            line = f"{path}: images: file_name {file!r} is used {files[file]} times; every image needs its own"
            complain(Fault("listed twice", file, line))
        else:
            images[row.value.id] = row
            taken.add(file)
    return images


def _file(image: Image) -> str:
    return (image.file_name or str(image.id)).replace("\\", "/")
