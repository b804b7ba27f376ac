"""What every reader gives: image ids, and the rows of each image, read when they are asked for."""

from __future__ import annotations

import re
import reprlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
from jaxtyping import Float64
from numpy import ndarray

from tag2box.annotations import Photo
from tag2box.errors import UserError

_LARGEST = float(np.finfo(np.float32).max)  # stores are in single precision
_WIDEST = 5  # numbers of a row: a box and its score


@dataclass(frozen=True, slots=True)
class ImageRows:
    """The boxes of one image as the file writes them, and their scores where it has any."""

    boxes: Float64[ndarray, "P 4"]
    scores: Float64[ndarray, " P"] | None

    def __len__(self) -> int:
        return len(self.boxes)


@dataclass(frozen=True, slots=True)
class ProposalListing:
    """A file or folder of proposals."""

    ids: tuple[str, ...]
    read: Callable[[int], ImageRows]  # of the image at this place in ids


def rows_of(where: str, boxes: object, scores: object | None) -> ImageRows:
    """Rows checked: four finite numbers a box, or five with the score last, and as many scores as boxes."""
    table = _numbers(where, "boxes", boxes)
    if table.size == 0:
        table = table.reshape(0, 4)
    if table.ndim != 2 or table.shape[1] not in ({4} if scores is not None else {4, 5}):
        raise UserError(
            f"{where}: boxes of shape {table.shape}, expected four numbers a box; check the file or --format"
        )
    if scores is None:
        column = table[:, 4] if table.shape[1] == 5 else None
        return ImageRows(table[:, :4], column)
    column = _numbers(where, "scores", scores).reshape(-1)
    if len(column) != len(table):
        raise UserError(f"{where}: {len(table)} boxes but {len(column)} scores; the file is damaged")
    return ImageRows(table, column)


def _numbers(where: str, what: str, value: object) -> Float64[ndarray, ...]:
    try:
        if not _is_table(value):
            raise TypeError("not a table")
        table = np.asarray(np.asarray(value), np.float64)
    except (ValueError, TypeError, OverflowError) as error:
        raise UserError(f"{where}: {what} are not numbers ({_short(error)}); expected a table of them") from None
    is_bad = ~(np.abs(table) <= _LARGEST)
    if is_bad.any():
        row = int(np.argwhere(is_bad)[0][0]) if table.ndim else 0
        raise UserError(f"{where}: {what}: row {row} has a number that is not finite; the file is damaged")
    return table


def _is_table(value: object) -> bool:
    """Numbers, or rows of a few. Checked before numpy looks: lists that share lists, 60 deep, would fill the memory."""
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "iuf" or (value.dtype.hasobject and all(map(_is_number, value.flat)))
    return isinstance(value, list | tuple) and all(_is_number(row) or _is_row(row) for row in value)


def _is_row(row: object) -> bool:
    if isinstance(row, np.ndarray):
        return row.ndim == 1 and len(row) <= _WIDEST and _is_table(row)
    return isinstance(row, list | tuple) and len(row) <= _WIDEST and all(map(_is_number, row))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def id_of(where: str, value: object) -> str:
    """An image id as text: from text, a whole number, or a one-element array of either."""
    while isinstance(value, np.ndarray) and value.size == 1 and value.ndim:
        value = value.reshape(-1)[0]
    if isinstance(value, np.generic | np.ndarray) and not value.shape:
        value = value.item()
    if isinstance(value, bytes):
        value = value.decode("latin-1")
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63:
        return str(value)
    if isinstance(value, str) and value.strip() and value.strip().isprintable():
        return value.strip()
    got = reprlib.repr(value)
    raise UserError(f"{where}: {type(value).__name__} {got} where an image id was expected; use text or whole numbers")


def same_length(where: str, names: tuple[str, str], counts: tuple[int, int]) -> None:
    """Refuse lists that should go side by side but do not."""
    if counts[0] != counts[1]:
        raise UserError(f"{where}: {counts[0]} {names[0]} but {counts[1]} {names[1]}; the file is damaged")


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:80]


_SUFFIX = re.compile(r"\.(jpe?g|png|webp|bmp|tiff?|gif|mat)$", re.IGNORECASE)
_LAST_NUMBER = re.compile(r"[0-9]+$")
_DIGITS = 18  # of a number; what is longer is a name
_DEEP = 4  # folders of a name that are looked at


@dataclass(frozen=True, slots=True)
class IdMatching:
    """For each photo the place of its image in the file, or None; and what is left over on both sides."""

    places: tuple[int | None, ...]
    unused: tuple[str, ...]  # ids in the file that no photo has
    missing: tuple[str, ...]  # photos that the file does not have

    @property
    def matched(self) -> int:
        """Photos that have an image in the file."""
        return len(self.places) - len(self.missing)


def match_ids(file: Path, ids: Sequence[str], photos: Sequence[Photo]) -> IdMatching:
    """Match images to photos: by id or file name, then by name without folder and suffix, then by number.

    What one way has matched, later ways leave alone. Numbers match where one side is nothing but a number: image 9 is
    photo 000009 or COCO_train2014_000000000009, and 2008000008 is 2008_000008, but cat_9 is not dog_9. Where an image
    could be two photos, or two images one photo, the file is refused.
    """
    _refuse_repeats(file, ids)
    taken: dict[int, int] = {}  # photo -> place in the file
    for names_of_photo, names_of_image in _WAYS:
        index = _index(names_of_photo, photos, taken)
        done = set(taken.values())
        found = ((place, _lookup(file, ids[place], names_of_image(ids[place]), (index, photos)))
                 for place in range(len(ids)) if place not in done)  # fmt: skip
        _take(file, ids, photos, taken, found)
    used = set(taken.values())
    return IdMatching(
        places=tuple(taken.get(number) for number in range(len(photos))),
        unused=tuple(name for place, name in enumerate(ids) if place not in used),
        missing=tuple(photo.id for number, photo in enumerate(photos) if number not in taken),
    )


def _refuse_repeats(file: Path, ids: Sequence[str]) -> None:
    seen: set[str] = set()
    for name in ids:
        if name in seen:
            raise UserError(f"{file}: image {name} is in it twice; every image must be there once")
        seen.add(name)


def _index(
    names: Callable[[Photo], Iterable[str]], photos: Sequence[Photo], taken: Mapping[int, int]
) -> dict[str, list[int]]:
    index: defaultdict[str, list[int]] = defaultdict(list)
    for number, photo in enumerate(photos):
        if number not in taken:
            for name in dict.fromkeys(names(photo)):
                index[name].append(number)
    return dict(index)


def _lookup(
    file: Path, image: str, names: Iterable[str], known: tuple[Mapping[str, list[int]], Sequence[Photo]]
) -> int | None:
    """The photo that the first known of some names means."""
    index, photos = known
    found = next((index[name] for name in names if name in index), [])
    if len(found) > 1:
        some = ", ".join(photos[number].id for number in found[:3])
        raise UserError(f"{file}: image {image} could be {len(found)} photos ({some}); give it the photo's id")
    return found[0] if found else None


def _take(
    file: Path,
    ids: Sequence[str],
    photos: Sequence[Photo],
    taken: dict[int, int],
    found: Iterable[tuple[int, int | None]],
) -> None:
    for place, number in found:
        if number is None:
            continue
        if number in taken:
            both = f"{ids[taken[number]]} and {ids[place]}"
            raise UserError(f"{file}: images {both} both mean photo {photos[number].id}; leave one of them out")
        taken[number] = place


# ---------------------------------------------------------------- the names of photos and images, way after way


def _plain(name: str) -> str:
    return _SUFFIX.sub("", name.replace("\\", "/"))


def _tails(name: str) -> list[str]:
    """A name without suffix, with ever fewer of its folders: a/b/1.jpg is a/b/1, b/1, 1."""
    parts = [part for part in PurePosixPath(_plain(name)).parts if part not in {"/", "..", "."}]
    return ["/".join(parts[start:]) for start in range(max(0, len(parts) - _DEEP), len(parts))]


def _stem(name: str) -> str:
    return _plain(name).rsplit("/", 1)[-1]


def _number(digits: str) -> tuple[str, ...]:
    return (f"{int(digits)}",) if 0 < len(digits) <= _DIGITS and digits.isascii() and digits.isdecimal() else ()


def _only(name: str) -> tuple[str, ...]:
    """The number a name is, if it is nothing else."""
    return _number(_stem(name))


def _joined(name: str) -> tuple[str, ...]:
    """The number a name is once its groups of digits are joined: 2008_000008 is 2008000008."""
    return _number(_stem(name).replace("_", "").replace("-", ""))


def _last(name: str) -> tuple[str, ...]:
    """The number a name ends with."""
    return tuple(number for found in _LAST_NUMBER.findall(_stem(name)) for number in _number(found))


def _of_photo(names: Callable[[str], Iterable[str]]) -> Callable[[Photo], Iterable[str]]:
    return lambda photo: (name for source in (photo.id, photo.path.name) for name in names(source))


_WAYS: tuple[tuple[Callable[[Photo], Iterable[str]], Callable[[str], Iterable[str]]], ...] = (
    (lambda photo: (photo.id, photo.path.name), lambda image: (image,)),
    (lambda photo: (*_tails(photo.id), *_tails(photo.path.as_posix())), _tails),
    (_of_photo(_joined), _only),
    (_of_photo(_only), _joined),
    (_of_photo(_last), _only),
    (_of_photo(_only), _last),
)
"""Pairs of what a photo may be called and what an image says, the surest first."""
