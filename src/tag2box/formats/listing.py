"""How many objects of a class a photo shows, by somebody's word: a weak label that some systems can use (C-WSL)."""

from __future__ import annotations

import difflib
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Literal

import torch

from tag2box.annotations import Photo, TaggedPhotos
from tag2box.data.images import distinct_names, photo_size
from tag2box.errors import UserError

ObjectCounts = tuple[tuple[str, int], ...]
"""Class and number, for each class that somebody counted."""

COLUMN = "counts"
_FORM = re.compile(r"(.+):\s*(\S+)\s*")
_NUMBER = re.compile(r"0*[1-9][0-9]{0,5}", re.ASCII)


def parse_counts(text: str) -> ObjectCounts:
    """The counts of a table's cell, like ``dog:2;car:1``; ValueError where it is none."""
    parts = (part.strip() for part in re.split(r"[;|]", text))
    return tuple(_count(part) for part in parts if part)


def _count(part: str) -> tuple[str, int]:
    found = _FORM.fullmatch(part)
    if found is None:
        raise ValueError(f"column {COLUMN!r}: expected class:number, like dog:2;car:1, got {part[:40]!r}")
    name, number = found[1].strip(), found[2]
    if _NUMBER.fullmatch(number) is None:
        raise ValueError(
            f"column {COLUMN!r}: expected a whole number of 1 or more after {name!r}, got {number[:40]!r}; "
            "leave out what nobody counted"
        )
    return name, int(number)


def of_tags(counts: ObjectCounts, tags: Sequence[str], where: str, complain: OnFault) -> ObjectCounts:
    """The counts of a photo's tags, each once; a complaint of any other."""
    kept: dict[str, int] = {}
    for name, number in counts:
        if name not in tags:
            problem = f"{name!r} is counted and not tagged; tag it, or remove its count"
        elif kept.get(name, number) != number:
            problem = f"{name!r} is counted twice, as {kept[name]} and {number}; keep one"
        else:
            kept[name] = number
            continue
        complain(Fault("bad row", Path(where).name, f"{where}: {COLUMN}: {problem}"))
    return tuple(kept.items())


Kind = Literal[
    "missing photo",
    "empty photo",
    "unreadable photo",
    "missing annotation",
    "unreadable annotation",
    "bad row",
    "bad box",
    "listed twice",
    "outside the folder",
    "unknown class",
]

_LONGEST = 600
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing wrong: its kind, the photo, row or class it is about, and the whole line for the user."""

    kind: Kind
    subject: str
    line: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "subject", printable(self.subject))
        object.__setattr__(self, "line", printable(self.line))


OnFault = Callable[[Fault], None]
"""Told of every fault. A reader whose complaint is answered leaves that photo, row or object out and goes on."""


def refuse(fault: Fault) -> None:
    """The strict answer: the first fault ends the reading."""
    raise UserError(fault.line)


def printable(text: str) -> str:
    """Text from strangers' files on one short line, without control characters that could write on a terminal."""
    line = _CONTROL.sub(" ", text).encode(errors="replace").decode()  # half a surrogate pair cannot be printed
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST // 2]} ... {line[-_LONGEST // 2 :]}"


_LOOKED_AT = 50  # photos tried in a folder before it is thought to be another one


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """Where a dataset is, and which part of it is wanted."""

    path: Path
    """CSV of tags, COCO JSON, VOC folder, tree of class folders, or a folder of photos."""
    photos: Path | None = None
    """Folder that photo names are relative to; default: the folder of the file, or what the format prescribes."""
    split: str | None = None
    """Image list: a name in ImageSets/Main of a VOC folder, or any text file of ids, one a line."""
    classes: tuple[str, ...] | None = None
    """Class names in order; others are left out. Default: all the dataset has."""


@dataclass(frozen=True, slots=True)
class TagRow:
    """A photo's name and its tags, and where that was said."""

    image: str
    tags: tuple[str, ...]
    where: str  # "file:line", for messages
    unsure: tuple[str, ...] = ()  # classes that are neither there nor absent
    counts: ObjectCounts = ()  # objects of tagged classes, where somebody counted


@dataclass(frozen=True, slots=True)
class PhotoEntry:
    """A photo a dataset names: its id, its file below the photos folder, its tags, and where that was said."""

    id: str
    file: str
    tags: tuple[str, ...]
    unsure: tuple[str, ...]
    where: str
    counts: ObjectCounts = ()


@dataclass(frozen=True, slots=True)
class Listing:
    """All photos a dataset names, before any of them is looked for."""

    folder: Path
    classes: tuple[str, ...]
    entries: tuple[PhotoEntry, ...]


# ---------------------------------------------------------------- from rows to a listing


def list_rows(
    rows: Sequence[TagRow], folder: Path, classes: Sequence[str] | None, complain: OnFault = refuse
) -> Listing:
    """Check rows of any origin against each other and the classes; without ``classes``, those seen, sorted."""
    seen = {tag for row in rows for tag in (*row.tags, *row.unsure)}
    names = tuple(sorted(seen)) if classes is None else unique(classes, "classes")
    known = frozenset(names)
    kept = _each_once(rows, folder, complain)
    ids = distinct_names([PurePosixPath(file) for file in kept])
    entries = []
    for name, (file, row) in zip(ids, kept.items(), strict=True):
        for tag in (*row.tags, *row.unsure):
            if tag not in known:
                line = f"{row.where}: unknown class {tag!r}; expected one of {some(names)}"
                complain(Fault("unknown class", tag, line))
        tags = tuple(tag for tag in row.tags if tag in known)
        unsure = tuple(tag for tag in row.unsure if tag in known and tag not in tags)
        counts = tuple(pair for pair in of_tags(row.counts, row.tags, row.where, complain) if pair[0] in known)
        entries.append(PhotoEntry(name, file, tags, unsure, row.where, counts))
    return Listing(folder, names, tuple(entries))


def _each_once(rows: Sequence[TagRow], folder: Path, complain: OnFault) -> dict[str, TagRow]:
    """The rows by their files; a row without a name, of a file elsewhere, or of a file that had one is left out."""
    kept: dict[str, TagRow] = {}
    for row in rows:
        file = below(folder, row.image) if row.image else None
        if not row.image:
            complain(Fault("bad row", Path(row.where).name, f"{row.where}: field image is empty; expected a file name"))
        elif file is None:
            complain(Fault("outside the folder", row.image, f"{row.where}: {outside(row.image, folder)}"))
        elif file in kept:
            first = kept[file].where
            line = f"{row.where}: {row.image} was already listed at {first}; keep one row per photo"
            complain(Fault("listed twice", row.image, line))
        else:
            kept[file] = row
    return kept


def below(folder: Path, name: str) -> str | None:
    """The relative path of a file below a folder, or None where the name leads out of it.

    Links are not followed: a folder of links to photos elsewhere is fine, a name with too many ``..`` is not.
    """
    root = os.path.normpath(folder.absolute())
    whole = os.path.normpath(os.path.join(root, name.replace("\\", "/")))  # noqa: PTH118 - a lexical matter
    inside = os.path.join(root, "")  # noqa: PTH118
    return Path(whole[len(inside) :]).as_posix() if whole.startswith(inside) else None


def outside(name: str, folder: Path) -> str:
    """The second half of the line about a name that leads out of a folder."""
    return f"{name} is outside the photos folder {folder}; expected a file in it, or name another with --photos"


# ---------------------------------------------------------------- from a listing to photos


def find_listed(listing: Listing, complain: OnFault = refuse) -> tuple[tuple[Photo, ...], tuple[PhotoEntry, ...]]:
    """The photos that are there and can be read, and their entries, in order."""
    photos, entries = [], []
    for entry in listing.entries:
        photo = _find(listing.folder, entry, complain)
        if photo is not None:
            photos.append(photo)
            entries.append(entry)
    return tuple(photos), tuple(entries)


def _find(folder: Path, entry: PhotoEntry, complain: OnFault) -> Photo | None:
    path = folder / entry.file
    if not is_regular_file(path):
        complain(missing_photo(folder, entry))
        return None
    try:
        return Photo(entry.id, path, *photo_size(path))
    except UserError as error:
        complain(Fault("unreadable photo" if path.stat().st_size else "empty photo", entry.file, str(error)))
        return None


def missing_photo(folder: Path, entry: PhotoEntry) -> Fault:
    """A photo that is named and not there."""
    line = f"{entry.where}: no photo {entry.file} in {folder}; check the name or the photos folder"
    return Fault("missing photo", entry.file, line)


def tagged(listing: Listing, complain: OnFault = refuse) -> TaggedPhotos:
    """A listing as training sees it."""
    photos, entries = find_listed(listing, complain)
    column = {name: i for i, name in enumerate(listing.classes)}
    tags = torch.zeros(len(photos), len(column), dtype=torch.bool)
    unsure = torch.zeros_like(tags)
    counts = torch.full(tags.shape, -1)
    for i, entry in enumerate(entries):
        tags[i, [column[tag] for tag in entry.tags]] = True
        unsure[i, [column[tag] for tag in entry.unsure]] = True
        for name, number in entry.counts:
            counts[i, column[name]] = number
    is_unsure, is_counted = bool(unsure.any()), bool((counts > 0).any())
    return TaggedPhotos(listing.classes, photos, tags, unsure if is_unsure else None, counts if is_counted else None)


def tag_photos(
    rows: Sequence[TagRow], photos: Path, classes: Sequence[str] | None, complain: OnFault = refuse
) -> TaggedPhotos:
    """Check rows of any origin against the photos folder and the classes, and make a dataset of them."""
    return tagged(list_rows(rows, photos, classes, complain), complain)


# ---------------------------------------------------------------- where photos are


def photos_folder(given: Path | None, places: Sequence[Path], names: Iterable[str], where: Path) -> Path:
    """The folder given, else the first of some places that holds one of the first photos named."""
    if given is not None:
        if not given.is_dir():
            raise UserError(f"{given}: no such folder; expected the photos of {where}")
        return given
    tried = list(islice(names, _LOOKED_AT))
    for place in places:
        if not tried or any(
            is_regular_file(place / file) for name in tried if (file := below(place, name)) is not None
        ):
            return place
    looked = f"{', '.join(map(str, places[:-1]))} and {places[-1]}" if len(places) > 1 else str(places[0])
    raise UserError(printable(f"{where}: no photo {tried[0]} in {looked}; name the photos folder with --photos"))


def is_regular_file(path: Path) -> bool:
    """Whether a file is there; a name no file can have (too long, with a NUL) is not."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


# ---------------------------------------------------------------- classes


def unique(names: Sequence[str], where: str) -> tuple[str, ...]:
    """Class names, each of them once."""
    if len(set(names)) != len(names):
        twice = Counter(names).most_common(1)[0][0]
        raise UserError(f"{where}: {twice!r} is listed twice; name every class once")
    return tuple(names)


def chosen(known: Sequence[str], wanted: Sequence[str] | None, where: str) -> tuple[str, ...]:
    """The wanted classes, each of which must be among the known; all where none are named."""
    if wanted is None:
        return tuple(known)
    for name in wanted:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {some(known)}"
            raise UserError(printable(f"{where}: no class {name!r}; {hint}"))
    return unique(wanted, f"{where}: classes")


def some(names: Sequence[str], most: int = 20) -> str:
    """Names in a message, the first of many."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "") or "none"
