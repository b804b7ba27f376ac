"""Matching of a proposal file's image ids to the photos of a dataset."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tag2box.annotations import Photo
from tag2box.errors import UserError

_SUFFIX = re.compile(r"\.(jpe?g|png|webp|bmp|tiff?|gif|mat)$", re.IGNORECASE)
_LAST_NUMBER = re.compile(r"[0-9]+$")
_MAX_DIGITS = 18  # anything longer is a name, not a number
_MAX_DEPTH = 4  # path components compared


@dataclass(frozen=True, slots=True)
class IdMatch:
    """For each photo the index of its image in the file, or None; and the unmatched ids of both sides."""

    places: tuple[int | None, ...]
    unused: tuple[str, ...]  # ids in the file without a photo
    missing: tuple[str, ...]  # photos without an image in the file

    @property
    def matched(self) -> int:
        """Number of photos that have an image in the file."""
        return len(self.places) - len(self.missing)


def match_ids(file: Path, ids: Sequence[str], photos: Sequence[Photo]) -> IdMatch:
    """Match images to photos: by id or file name, then by name without folder and suffix, then by number.

    Later rules apply only to what earlier ones left unmatched. Numbers match if one side is nothing but a number: image
    9 is photo 000009 or COCO_train2014_000000000009, and 2008000008 is 2008_000008, but cat_9 is not dog_9. An image
    that could be two photos, or two images that could be one photo, raise a UserError.
    """
    _check_repeats(file, ids)
    taken: dict[int, int] = {}  # photo -> index in the file
    for names_of_photo, names_of_image in _RULES:
        index = _index(names_of_photo, photos, taken)
        done = set(taken.values())
        found = ((place, _lookup(file, ids[place], names_of_image(ids[place]), (index, photos)))
                 for place in range(len(ids)) if place not in done)  # fmt: skip
        _take(file, ids, photos, taken, found)
    used = set(taken.values())
    return IdMatch(
        places=tuple(taken.get(number) for number in range(len(photos))),
        unused=tuple(name for place, name in enumerate(ids) if place not in used),
        missing=tuple(photo.id for number, photo in enumerate(photos) if number not in taken),
    )


def _check_repeats(file: Path, ids: Sequence[str]) -> None:
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
    """The photo of the first name that is known."""
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


# ---------------------------------------------------------------- names of photos and images, rule by rule


def _plain(name: str) -> str:
    return _SUFFIX.sub("", name.replace("\\", "/"))


def _tails(name: str) -> list[str]:
    """A name without suffix, with fewer and fewer of its folders: a/b/1.jpg is a/b/1, b/1, 1."""
    parts = [part for part in PurePosixPath(_plain(name)).parts if part not in {"/", "..", "."}]
    return ["/".join(parts[start:]) for start in range(max(0, len(parts) - _MAX_DEPTH), len(parts))]


def _stem(name: str) -> str:
    return _plain(name).rsplit("/", 1)[-1]


def _number(digits: str) -> tuple[str, ...]:
    return (f"{int(digits)}",) if 0 < len(digits) <= _MAX_DIGITS and digits.isascii() and digits.isdecimal() else ()


def _only(name: str) -> tuple[str, ...]:
    """The number that a name consists of, if it does."""
    return _number(_stem(name))


def _joined(name: str) -> tuple[str, ...]:
    """The number of a name's joined groups of digits: 2008_000008 is 2008000008."""
    return _number(_stem(name).replace("_", "").replace("-", ""))


def _last(name: str) -> tuple[str, ...]:
    """The number at the end of a name."""
    return tuple(number for found in _LAST_NUMBER.findall(_stem(name)) for number in _number(found))


def _of_photo(names: Callable[[str], Iterable[str]]) -> Callable[[Photo], Iterable[str]]:
    return lambda photo: (name for source in (photo.id, photo.path.name) for name in names(source))


_RULES: tuple[tuple[Callable[[Photo], Iterable[str]], Callable[[str], Iterable[str]]], ...] = (
    (lambda photo: (photo.id, photo.path.name), lambda image: (image,)),
    (lambda photo: (*_tails(photo.id), *_tails(photo.path.as_posix())), _tails),
    (_of_photo(_joined), _only),
    (_of_photo(_only), _joined),
    (_of_photo(_last), _only),
    (_of_photo(_only), _last),
)
"""Pairs of functions that give the possible names of a photo and of an image id, the most reliable pair first."""
