"""Listings: the photos, tags and object counts that a dataset names, checked before any photo is opened.

Every reader of tags returns a ``Listing``; ``to_tagged_photos`` turns it into a training set. Readers report what is
wrong as a ``Fault`` to a callback. Nothing in this module can hold a box.
"""

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

from tag2box import annotations, errors, images, io

FaultKind = Literal[
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

ObjectCounts = tuple[tuple[str, int], ...]
"""Class and number of objects, for each class that was counted: a weak label that some methods use (C-WSL)."""

COUNTS_COLUMN = "counts"
_COUNT = re.compile(r"(.+):\s*(\S+)\s*")
_COMPARED = 100  # letters of a name that is compared with others: the time grows with their square
_NUMBER = re.compile(r"0*[1-9][0-9]{0,5}", re.ASCII)
_PROBED = 50  # photos looked for in a folder before it is taken for another one
MAX_CLASSES = 5000
"""Most classes that can be trained: each has outputs for every proposal."""
_MAX_TAGS = 1 << 31  # photos times classes: a byte each


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """Where a dataset is, and which part of it is wanted."""

    path: Path
    """CSV of tags, COCO JSON, VOC folder, YOLO folder or data.yaml, tree of class folders, or a folder of photos."""
    photos: Path | None = None
    """Folder that photo names are relative to; default: the folder of the file, or what the format prescribes."""
    split: str | None = None
    """Image list: a name in ImageSets/Main of a VOC folder, a split of a YOLO dataset, or a text file of ids."""
    classes: tuple[str, ...] | None = None
    """Class names in order; others are left out. Default: all the dataset has."""
    format: str | None = None
    """Dataset format: a built-in name, or ``package.module:Name``. Default: the first that recognises the path."""


# ---------------------------------------------------------------- faults


@dataclass(frozen=True, slots=True)
class Fault:
    """An error in a dataset: its kind, the photo, row or class it is about, and the whole line for the user."""

    kind: FaultKind
    subject: str
    line: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "subject", errors.printable(self.subject))
        object.__setattr__(self, "line", errors.printable(self.line))


OnFault = Callable[[Fault], None]
"""Error callback; if it returns instead of raising, the reader skips the photo, row or object."""


def refuse(fault: Fault) -> None:
    """Strict error callback: raises the first fault as a ``UserError``."""
    raise errors.UserError(fault.line)


# ---------------------------------------------------------------- listings


@dataclass(frozen=True, slots=True)
class TagRow:
    """A row of a dataset: a photo's file name and its tags."""

    image: str
    tags: tuple[str, ...]
    where: str  # "file:line", for messages
    unsure: tuple[str, ...] = ()  # classes that are neither present nor absent
    counts: ObjectCounts = ()  # objects of tagged classes, as far as they were counted


@dataclass(frozen=True, slots=True)
class PhotoEntry:
    """A listed photo: its id, its file relative to the photos folder, its tags, and the place that names it."""

    id: str
    file: str
    tags: tuple[str, ...]
    unsure: tuple[str, ...]
    where: str
    counts: ObjectCounts = ()


@dataclass(frozen=True, slots=True)
class Listing:
    """All photos that a dataset names, whether they exist or not."""

    folder: Path
    classes: tuple[str, ...]
    entries: tuple[PhotoEntry, ...]


def list_rows(
    rows: Sequence[TagRow], folder: Path, classes: Sequence[str] | None, on_fault: OnFault = refuse
) -> Listing:
    """Check rows of any origin against each other and the classes; default classes: the tags seen, sorted."""
    seen = {tag for row in rows for tag in (*row.tags, *row.unsure)}
    names = tuple(sorted(seen)) if classes is None else unique_classes(classes, "classes")
    known = frozenset(names)
    kept = _each_once(rows, folder, on_fault)
    ids = images.distinct_names([PurePosixPath(file) for file in kept])
    entries = []
    for name, (file, row) in zip(ids, kept.items(), strict=True):
        for tag in (*row.tags, *row.unsure):
            if tag not in known:
                line = f"{row.where}: unknown class {tag!r}; expected one of {shortlist(names)}"
                on_fault(Fault("unknown class", tag, line))
        tags = tuple(tag for tag in row.tags if tag in known)
        sure = frozenset(tags)
        unsure = tuple(tag for tag in row.unsure if tag in known and tag not in sure)
        counts = counts_of_tags(row.counts, row.tags, row.where, on_fault)
        entries.append(
            PhotoEntry(name, file, tags, unsure, row.where, tuple(pair for pair in counts if pair[0] in known))
        )
    return Listing(folder, names, tuple(entries))


def _each_once(rows: Sequence[TagRow], folder: Path, on_fault: OnFault) -> dict[str, TagRow]:
    """The rows by file; drops rows without a name, of a file elsewhere, or of a file that already has a row."""
    kept: dict[str, TagRow] = {}
    for row in rows:
        file = path_below(folder, row.image) if row.image else None
        if not row.image:
            on_fault(Fault("bad row", Path(row.where).name, f"{row.where}: field image is empty; expected a file name"))
        elif file is None:
            on_fault(Fault("outside the folder", row.image, f"{row.where}: {outside_message(row.image, folder)}"))
        elif file in kept:
            first = kept[file].where
            line = f"{row.where}: {row.image} was already listed at {first}; keep one row per photo"
            on_fault(Fault("listed twice", row.image, line))
        else:
            kept[file] = row
    return kept


def find_listed(
    listing: Listing, on_fault: OnFault = refuse
) -> tuple[tuple[annotations.Photo, ...], tuple[PhotoEntry, ...]]:
    """The photos that exist and have a readable header, with their entries, in order."""
    photos, entries = [], []
    for entry in listing.entries:
        photo = _find(listing.folder, entry, on_fault)
        if photo is not None:
            photos.append(photo)
            entries.append(entry)
    return tuple(photos), tuple(entries)


def _find(folder: Path, entry: PhotoEntry, on_fault: OnFault) -> annotations.Photo | None:
    path = folder / entry.file
    if not is_regular_file(path):
        on_fault(missing_photo(folder, entry))
        return None
    try:
        return annotations.Photo(entry.id, path, *images.photo_size(path))
    except errors.UserError as error:
        on_fault(Fault("unreadable photo" if path.stat().st_size else "empty photo", entry.file, str(error)))
        return None


def missing_photo(folder: Path, entry: PhotoEntry) -> Fault:
    """The fault of a listed photo that does not exist."""
    line = f"{entry.where}: no photo {entry.file} in {folder}; check the name or the photos folder"
    return Fault("missing photo", entry.file, line)


def to_tagged_photos(listing: Listing, on_fault: OnFault = refuse) -> annotations.TaggedPhotos:
    """The training set of a listing."""
    _check_size(listing)
    photos, entries = find_listed(listing, on_fault)
    column = {name: i for i, name in enumerate(listing.classes)}
    tags = torch.zeros(len(photos), len(column), dtype=torch.bool)
    unsure = torch.zeros_like(tags) if any(entry.unsure for entry in entries) else None
    counts = torch.full(tags.shape, -1) if any(entry.counts for entry in entries) else None
    for i, entry in enumerate(entries):
        tags[i, [column[tag] for tag in entry.tags]] = True
        if unsure is not None:
            unsure[i, [column[tag] for tag in entry.unsure]] = True
        if counts is not None:
            for name, number in entry.counts:
                counts[i, column[name]] = number
    return annotations.TaggedPhotos(listing.classes, photos, tags, unsure, counts)


def _check_size(listing: Listing) -> None:
    """Raise if a training set would not fit into memory, before its photos are opened."""
    photos, classes = len(listing.entries), len(listing.classes)
    if classes > MAX_CLASSES:
        first = shortlist(listing.classes, 3)
        raise errors.UserError(
            f"{listing.folder}: {classes:,} classes ({first}), at most {MAX_CLASSES:,} can be trained; "
            "choose some with --classes, or check that tags are not separated by another character"
        )
    if photos * classes > _MAX_TAGS:
        raise errors.UserError(
            f"{listing.folder}: {photos:,} photos times {classes:,} classes do not fit into memory; "
            "choose fewer classes with --classes, or fewer photos with --split"
        )
    for name in listing.classes:
        if not name.encode(errors="ignore").decode() == name:
            raise errors.UserError(f"{listing.folder}: class {name!r}: not valid Unicode; rename it")


def wanted_ids(source: DataSource, ids: Iterable[str], on_fault: OnFault = refuse) -> set[str]:
    """The ids that the text file ``source.split`` lists: by id, by file name, or by file name without suffix."""
    path = Path(source.split or "")
    known = set(ids)
    wanted: set[str] = set()
    for number, line in io.read_lines(path, "a text file of image ids, one per line").items():
        name = PurePosixPath(line.replace("\\", "/"))
        spellings = (line, name.with_suffix("").as_posix(), name.stem) if name.name else (line,)
        found = next((spelling for spelling in spellings if spelling in known), None)
        if found is None:
            what = f"{path}: line {number}: no photo {line} in {source.path}; remove the line or check the name"
            on_fault(Fault("missing photo", line, what))
        else:
            wanted.add(found)
    return wanted


# ---------------------------------------------------------------- object counts


def parse_counts(text: str) -> ObjectCounts:
    """The counts in a table cell such as ``dog:2;car:1``; raises ValueError if it is malformed."""
    parts = (part.strip() for part in re.split(r"[;|]", text))
    return tuple(_count(part) for part in parts if part)


def _count(part: str) -> tuple[str, int]:
    found = _COUNT.fullmatch(part)
    if found is None:
        raise ValueError(f"column {COUNTS_COLUMN!r}: expected class:number, like dog:2;car:1, got {part[:40]!r}")
    name, number = found[1].strip(), found[2]
    if _NUMBER.fullmatch(number) is None:
        raise ValueError(
            f"column {COUNTS_COLUMN!r}: expected a whole number of 1 or more after {name!r}, got {number[:40]!r}; "
            "leave out classes that were not counted"
        )
    return name, int(number)


def counts_of_tags(counts: ObjectCounts, tags: Sequence[str], where: str, on_fault: OnFault) -> ObjectCounts:
    """The counts of a photo's tags, each once; any other count is a fault."""
    kept: dict[str, int] = {}
    tagged = frozenset(tags)
    for name, number in counts:
        if name not in tagged:
            problem = f"{name!r} is counted and not tagged; tag it, or remove its count"
        elif kept.get(name, number) != number:
            problem = f"{name!r} is counted twice, as {kept[name]} and {number}; keep one"
        else:
            kept[name] = number
            continue
        on_fault(Fault("bad row", Path(where).name, f"{where}: {COUNTS_COLUMN}: {problem}"))
    return tuple(kept.items())


# ---------------------------------------------------------------- files and folders


def photos_folder(given: Path | None, places: Sequence[Path], names: Iterable[str], where: Path) -> Path:
    """The given folder, else the first of some places that contains one of the first photos named."""
    if given is not None:
        if not given.is_dir():
            raise errors.UserError(f"{given}: no such folder; expected the photos of {where}")
        return given
    tried = list(islice(names, _PROBED))
    for place in places:
        if not tried or any(
            is_regular_file(place / file) for name in tried if (file := path_below(place, name)) is not None
        ):
            return place
    looked = f"{', '.join(map(str, places[:-1]))} and {places[-1]}" if len(places) > 1 else str(places[0])
    raise errors.UserError(
        errors.printable(f"{where}: no photo {tried[0]} in {looked}; name the photos folder with --photos")
    )


def path_below(folder: Path, name: str) -> str | None:
    """The path of a file relative to a folder, or None if the name leads out of it.

    Links are not followed: a folder of links to photos elsewhere is fine, a name with too many ``..`` is not.
    """
    root = os.path.normpath(folder.absolute())
    whole = os.path.normpath(os.path.join(root, name.replace("\\", "/")))  # noqa: PTH118 - lexical, links unresolved
    inside = os.path.join(root, "")  # noqa: PTH118
    return Path(whole[len(inside) :]).as_posix() if whole.startswith(inside) else None


def outside_message(name: str, folder: Path) -> str:
    """The second half of the error about a name that leads out of a folder."""
    return f"{name} is outside the photos folder {folder}; expected a file in it, or name another with --photos"


def is_regular_file(path: Path) -> bool:
    """Whether a file exists; False for names that no file can have (too long, with a NUL)."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def exists(path: Path) -> bool:
    """Whether there is a file or folder; False for names that none can have."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


# ---------------------------------------------------------------- class names


def unique_classes(names: Sequence[str], where: str) -> tuple[str, ...]:
    """Class names, checked for duplicates."""
    if len(set(names)) != len(names):
        twice = Counter(names).most_common(1)[0][0]
        raise errors.UserError(f"{where}: {twice!r} is listed twice; name every class once")
    return tuple(names)


def select_classes(known: Sequence[str], wanted: Sequence[str] | None, where: str) -> tuple[str, ...]:
    """The wanted classes, each of which must be known; all known ones if none are named."""
    if wanted is None:
        return tuple(known)
    names = frozenset(known)
    for name in wanted:
        if name not in names:
            near = difflib.get_close_matches(name[:_COMPARED], [each for each in known if len(each) <= _COMPARED], n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {shortlist(known)}"
            raise errors.UserError(errors.printable(f"{where}: no class {name!r}; {hint}"))
    return unique_classes(wanted, f"{where}: classes")


def spelled_alike(names: Iterable[str]) -> list[list[str]]:
    """Groups of class names that differ in case, spaces or punctuation only: likely one class."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault("".join(letter for letter in name.casefold() if letter.isalnum()), []).append(name)
    return [group for letters, group in groups.items() if letters and len(group) > 1]


def shortlist(names: Sequence[str], most: int = 20) -> str:
    """The first names of a list and the number of the rest, for messages."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "") or "none"
