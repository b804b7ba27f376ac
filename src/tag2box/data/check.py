"""What a check of a dataset finds: kinds of trouble, how grave each is, and what to do about it."""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

from tag2box.annotations import Objects
from tag2box.data.images import photo_size, read_photo
from tag2box.errors import UserError
from tag2box.formats.datasets import dataset_format, everything, has_boxes, list_dataset, list_photos, read_truth
from tag2box.formats.folders import photo_files
from tag2box.formats.listing import DataSource, Fault, Listing, PhotoEntry, is_regular_file, missing_photo, printable

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
"""An error: a command would refuse the dataset, or learn what is wrong. A note: nothing need be done."""

FIRST = 4
"""So many different names of each kind are kept, however often it occurs."""

ADVICE: dict[str, tuple[Severity, str]] = {
    "missing photo": ("error", "put the file there, or remove its row"),
    "empty photo": ("error", "replace or remove it"),
    "unreadable photo": ("error", "replace or remove it"),
    "missing annotation": ("error", "add the XML file, or take the id off the list"),
    "unreadable annotation": ("error", "correct the XML file"),
    "bad row": ("error", "correct it"),
    "bad box": ("error", "correct it, or evaluation refuses the file"),
    "listed twice": ("error", "keep one"),
    "outside the folder": ("error", "move the photo in, or name its folder with --photos"),
    "unknown class": ("error", "correct the spelling, or add the class"),
    "no tags at all": ("error", "tag some photos: nothing can be learned"),
    "same photo, other tags": ("error", "keep one, with the right tags"),
    "same photo twice": ("warning", "keep one; across train and test, figures flatter"),
    "very small photo": ("warning", "take it out: no object is found in so few pixels"),
    "very long photo": ("warning", "crop it: resized, it loses its content"),
    "very large photo": ("warning", "scale it down: decoding takes memory and time"),
    "size differs from the photo's": ("warning", "boxes belong to another size or rotation (EXIF)"),
    "box outside the photo": ("warning", "correct it: it is compared as it stands"),
    "box without area": ("warning", "correct it: it can never be found"),
    "class without a photo": ("warning", "check its spelling, or leave it out"),
    "class with few photos": ("warning", "add photos: fewer than 5 teach little"),
    "class in every photo": ("warning", "add photos without it: nothing tells it from its surroundings"),
    "classes always together": ("warning", "cannot be told apart: add photos of one alone"),
    "classes spelled alike": ("warning", "one class or two? Spell one class in one way"),
    "class name with a comma": ("warning", "separate tags with ; or |"),
    "photo without tags": ("note", "right where it shows none of the classes"),
    "photo no row names": ("note", "not used"),
    "photos without tags only": ("note", "a plain folder can be detected in, not trained from"),
}
"""Every kind of finding."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One kind of trouble: how often, where first, and what to do."""

    kind: str
    severity: Severity
    count: int
    names: tuple[str, ...]  # the first few
    lines: tuple[str, ...]  # what a strict reader would have said of them, if it would have said anything
    advice: str


class Tally:
    """Counts faults and findings by kind in bounded memory: of each kind, the first few names are kept."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._names: dict[str, list[str]] = {}
        self._lines: dict[str, list[str]] = {}
        self._told: set[int] = set()

    def complain(self, fault: Fault) -> None:
        """Count a reader's fault, once, though several readings meet it."""
        digest = hash(fault.line)
        if digest not in self._told:
            self._told.add(digest)
            self.add(fault.kind, fault.subject, fault.line)

    def add(self, kind: str, name: str, line: str = "") -> None:
        """Count one more."""
        self._counts[kind] = self._counts.get(kind, 0) + 1
        names = self._names.setdefault(kind, [])
        lines = self._lines.setdefault(kind, [])
        if len(names) < FIRST and printable(name) not in names:
            names.append(printable(name))
            lines.extend([printable(line)] if line else [])

    def findings(self) -> tuple[Finding, ...]:
        """All kinds met, the gravest first, in the order of ``ADVICE``."""
        found = []
        for kind, (severity, advice) in ADVICE.items():
            if kind in self._counts:
                names, lines = tuple(self._names[kind]), tuple(self._lines[kind])
                found.append(Finding(kind, severity, self._counts[kind], names, lines, advice))
        return tuple(sorted(found, key=lambda finding: SEVERITIES.index(finding.severity)))


_SMALLEST = 32  # pixels
_LONGEST = 5  # times as long as wide
_LARGEST = 100_000_000  # pixels
_TAIL = 4096  # bytes; tails differ where contents do, nearly always
_AHEAD = 512  # photos handed to the threads at a time: memory stays flat


@dataclass(frozen=True, slots=True)
class PhotoCheck:
    """What a photo on disk turned out to be."""

    entry: PhotoEntry
    bytes: int = 0
    size: tuple[int, int] | None = None  # None: it cannot be used
    fault: Fault | None = None


def check_photos(listing: Listing) -> Iterator[PhotoCheck]:
    """Decode every photo, reduced, several at a time; in order."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for start in range(0, len(listing.entries), _AHEAD):
            yield from pool.map(partial(check_photo, listing.folder), listing.entries[start : start + _AHEAD])


def check_photo(folder: Path, entry: PhotoEntry) -> PhotoCheck:
    """Decode one photo: a header may be whole while the rest is cut short."""
    path = folder / entry.file
    if not is_regular_file(path):
        return PhotoCheck(entry, fault=missing_photo(folder, entry))
    length = path.stat().st_size
    try:
        size = photo_size(path)
        read_photo(path, at_least=(1, 1))
    except UserError as error:
        kind = Fault("unreadable photo" if length else "empty photo", entry.file, str(error))
        return PhotoCheck(entry, length, fault=kind)
    return PhotoCheck(entry, length, size)


def odd_size(size: tuple[int, int]) -> str | None:
    """The kind of finding a photo's size is, if any."""
    short, long = sorted(size)
    if short < _SMALLEST:
        return "very small photo"
    if long > _LONGEST * short:
        return "very long photo"
    return "very large photo" if short * long > _LARGEST else None


def same_content(folder: Path, views_per_image: Iterable[PhotoCheck]) -> Iterator[tuple[PhotoCheck, ...]]:
    """Groups of photos that are the same to the byte. Files are read only where sizes agree, whole where ends do."""
    by_length = _groups([tuple(views_per_image)], lambda check_photo: check_photo.bytes)
    by_tail = _groups(by_length, lambda check_photo: _digest(folder / check_photo.entry.file, _TAIL))
    yield from _groups(by_tail, lambda check_photo: _digest(folder / check_photo.entry.file))


def _groups(
    groups: Iterable[Sequence[PhotoCheck]], key: Callable[[PhotoCheck], Hashable]
) -> Iterator[tuple[PhotoCheck, ...]]:
    """Groups cut up by a key; those of one are dropped."""
    for group in groups:
        parts: defaultdict[Hashable, list[PhotoCheck]] = defaultdict(list)
        for check_photo in group:
            parts[key(check_photo)].append(check_photo)
        yield from (tuple(part) for part in parts.values() if len(part) > 1)


def _digest(path: Path, tail: int | None = None) -> bytes:
    """Hash of a file, or of its last bytes."""
    with path.open("rb") as file:
        if tail is None:
            return hashlib.file_digest(file, "blake2b").digest()
        file.seek(max(0, path.stat().st_size - tail))
        return hashlib.blake2b(file.read(tail)).digest()


_FEW = 5  # photos of a class
_SLACK = 1.0  # pixels a box may reach out: rounding, and counting from 0 or 1, are no mistakes


class CheckStep(Protocol):
    """Told of every photo done."""

    def advance(self) -> None:
        """One more."""
        ...


class CheckProgress(Protocol):
    """Opens a progress bar, such as those of ``engine.progress``."""

    def __call__(self, title: str, total: int) -> AbstractContextManager[CheckStep]:
        """The bar, for the length of a with block."""
        ...


class _Nobody:
    def advance(self) -> None:
        """Nobody watches."""


@contextmanager
def silent_check(title: str, total: int) -> Iterator[CheckStep]:
    """No progress bar."""
    yield _Nobody()


@dataclass(frozen=True, slots=True)
class Survey:
    """A dataset in short, and what is wrong with it."""

    what: str
    photos: int  # named, whether they are there or not
    classes: tuple[str, ...]
    findings: tuple[Finding, ...]


def check_dataset(source: DataSource) -> tuple[Finding, ...]:
    """What is wrong with a dataset, the gravest first. Of a VOC folder without a split, all images are looked at."""
    return survey(source).findings


def survey(source: DataSource, watch: CheckProgress = silent_check) -> Survey:
    """Look at everything a dataset names; what cannot be read at all is a ``UserError``, as everywhere."""
    source = everything(source)
    form, tally = dataset_format(source), Tally()
    listing = (list_dataset if form.has_tags else list_photos)(source, tally.complain)
    with watch("checking photos", len(listing.entries)) as bar:
        views_per_image = tuple(_each(listing, tally, bar))
    _repeated(listing, views_per_image, tally)
    if form.has_tags:
        _tags(listing, tally)
    else:
        tally.add("photos without tags only", str(source.path))
    if source.split is None or form.names_splits:
        _unnamed(listing, tally)
    if has_boxes(source):
        _boxes(source, {look.entry.id: look.size for look in views_per_image if look.size is not None}, tally)
    return Survey(form.what, len(listing.entries), listing.classes, tally.findings())


# ---------------------------------------------------------------- photos


def _each(listing: Listing, tally: Tally, bar: CheckStep) -> Iterator[PhotoCheck]:
    """Look at every photo and tell what is wrong with it alone."""
    for look in check_photos(listing):
        kind = odd_size(look.size) if look.size is not None else None
        if look.fault is not None:
            tally.complain(look.fault)
        elif kind is not None and look.size is not None:
            tally.add(kind, f"{look.entry.file} ({look.size[0]}x{look.size[1]})")
        bar.advance()
        yield look


def _repeated(listing: Listing, views_per_image: Iterable[PhotoCheck], tally: Tally) -> None:
    for group in same_content(listing.folder, (look for look in views_per_image if look.size is not None)):
        is_same = len({(frozenset(look.entry.tags), frozenset(look.entry.unsure)) for look in group}) == 1
        kind = "same photo twice" if is_same else "same photo, other tags"
        tally.add(kind, " = ".join(look.entry.file for look in group[:3]) + (" = ..." if len(group) > 3 else ""))


def _unnamed(listing: Listing, tally: Tally) -> None:
    named = {entry.file for entry in listing.entries}
    for file in photo_files(listing.folder):
        if file.as_posix() not in named:
            tally.add("photo no row names", file.as_posix())


# ---------------------------------------------------------------- tags and classes


def _tags(listing: Listing, tally: Tally) -> None:
    rows: dict[str, list[int]] = {name: [] for name in listing.classes}
    for row, entry in enumerate(listing.entries):
        for tag in entry.tags:
            rows[tag].append(row)
        if not entry.tags:
            tally.add("photo without tags", entry.file)
    if not any(rows.values()):
        tally.add("no tags at all", str(listing.folder))
        return
    for name, found in rows.items():
        if not found:
            tally.add("class without a photo", name)
        elif len(found) < _FEW:
            tally.add("class with few photos", f"{name} ({len(found)})")
        if len(found) == len(listing.entries):
            tally.add("class in every photo", name)
        if "," in name:
            tally.add("class name with a comma", name)
    _alike(rows, tally)


def _alike(rows: Mapping[str, Sequence[int]], tally: Tally) -> None:
    """Classes with the same photos, and classes with nearly the same name."""
    together: defaultdict[tuple[int, ...], list[str]] = defaultdict(list)
    spelled: defaultdict[str, list[str]] = defaultdict(list)
    for name, found in rows.items():
        if found:
            together[tuple(found)].append(name)
        spelled["".join(letter for letter in name.casefold() if letter.isalnum())].append(name)
    for kind, groups in (("classes always together", together), ("classes spelled alike", spelled)):
        for names in groups.values():
            if len(names) > 1:
                tally.add(kind, " = ".join(names))


# ---------------------------------------------------------------- boxes


def _boxes(source: DataSource, sizes: Mapping[str, tuple[int, int]], tally: Tally) -> None:
    """Boxes against the photos as they are on disk, upright."""
    truth = read_truth(source, tally.complain)
    for name, said, objects in zip(truth.ids, truth.sizes, truth.objects, strict=True):
        size = sizes.get(name, said)
        if size != said:
            line = f"{name} ({said[0]}x{said[1]}, photo {size[0]}x{size[1]})"
            tally.add("size differs from the photo's", line)
        _boxes_of(name, size, objects, tally)


def _boxes_of(name: str, size: tuple[int, int], objects: Objects, tally: Tally) -> None:
    for x1, y1, x2, y2 in objects.boxes.tolist():
        corners = f"{name} ({x1:g} {y1:g} {x2:g} {y2:g})"
        if x2 <= x1 or y2 <= y1:
            tally.add("box without area", corners)
        if min(x1, y1) < -_SLACK or x2 > size[0] + _SLACK or y2 > size[1] + _SLACK:
            tally.add("box outside the photo", corners)
