"""Dataset check: decode every photo, compare tags, classes and boxes, and report findings with severity and advice."""

import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from tag2box import annotations, errors, images
from tag2box.formats import datasets, folders
from tag2box.formats.listing import (
    DataSource,
    Fault,
    Listing,
    PhotoEntry,
    is_regular_file,
    missing_photo,
    spelled_alike,
)
from tag2box.progress import Bar, Progress, silent
from tag2box.proposals import base, suitability

_MIN_PHOTOS = 16
_NO_NEGATIVES = "boxes may show what always surrounds the objects: add photos of the same kind without any object"
Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
"""error: a command would refuse the dataset, or train on wrong labels; note: nothing needs to be done."""

FIRST = 4
"""Number of different names kept per kind of finding."""

_SMALLEST = 32  # pixels
_LONGEST = 5  # times as long as wide
_LARGEST = 100_000_000  # pixels
_TAIL = 4096  # bytes; if contents differ, the tails nearly always do
_AHEAD = 512  # photos submitted to the threads at a time, to bound memory
_FEW = 5  # photos of a class
_SLACK = 1.0  # pixels by which a box may leave the photo: rounding, and counting from 0 or 1, are no errors

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
    "same photo twice": ("warning", "keep one; across train and test, scores are inflated"),
    "very small photo": ("warning", "remove it: no object is found in so few pixels"),
    "very long photo": ("warning", "crop it: resizing loses its content"),
    "very large photo": ("warning", "scale it down: decoding takes memory and time"),
    "size differs from the photo's": ("warning", "boxes belong to another size or rotation (EXIF)"),
    "box outside the photo": ("warning", "correct it: it is evaluated as it is"),
    "box without area": ("warning", "correct it: it can never be found"),
    "class without a photo": ("warning", "check its spelling, or leave it out"),
    "class with few photos": ("warning", "add photos: fewer than 5 teach little"),
    "class in every photo": ("warning", "add photos without it: nothing separates it from its background"),
    "classes always together": ("warning", "cannot be distinguished: add photos of one alone"),
    "one class in every photo": ("warning", _NO_NEGATIVES),
    "classes spelled alike": ("warning", "one class or two? Spell one class in one way"),
    "class name with a comma": ("warning", "separate tags with ; or |"),
    "few proposals": ("warning", "propose and train with another method, or other settings"),
    "proposals as large as the photo": ("warning", "propose and train with another method"),
    "small objects without proposals": ("warning", "lower min_side of the proposals"),
    "photos enlarged for the search": ("warning", "lower short_side of the proposals"),
    "photos much reduced for the search": ("warning", "raise short_side of the proposals if objects are small"),
    "photo without tags": ("note", "right if it shows none of the classes"),
    "photo no row names": ("note", "not used"),
    "photos without tags only": ("note", "a plain folder can be detected in, not trained from"),
}
"""Every kind of finding, with its severity and advice."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One kind of problem: how often it occurs, where first, and what to do."""

    kind: str
    severity: Severity
    count: int
    names: tuple[str, ...]  # the first few
    lines: tuple[str, ...]  # error lines of a strict reader, if it would have raised any
    advice: str

    def __str__(self) -> str:
        more = f" and {self.count - len(self.names)} more" if self.count > len(self.names) else ""
        return f"{self.kind}: {', '.join(self.names)}{more}; {self.advice}"


class Tally:
    """Counts of faults and findings by kind, in bounded memory: the first few names per kind are kept."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._names: dict[str, list[str]] = {}
        self._lines: dict[str, list[str]] = {}
        self._seen: set[int] = set()

    def on_fault(self, fault: Fault) -> None:
        """Count a fault, once even if several readers report it."""
        digest = hash(fault.line)
        if digest not in self._seen:
            self._seen.add(digest)
            self.add(fault.kind, fault.subject, fault.line)

    def add(self, kind: str, name: str, line: str = "") -> None:
        """Count one more."""
        self._counts[kind] = self._counts.get(kind, 0) + 1
        names = self._names.setdefault(kind, [])
        lines = self._lines.setdefault(kind, [])
        if len(names) < FIRST and errors.printable(name) not in names:
            names.append(errors.printable(name))
            lines.extend([errors.printable(line)] if line else [])

    def findings(self) -> tuple[Finding, ...]:
        """All findings, errors first, in the order of ``ADVICE``."""
        found = []
        for kind, (severity, advice) in ADVICE.items():
            if kind in self._counts:
                names, lines = tuple(self._names[kind]), tuple(self._lines[kind])
                found.append(Finding(kind, severity, self._counts[kind], names, lines, advice))
        return tuple(sorted(found, key=lambda finding: SEVERITIES.index(finding.severity)))


# ---------------------------------------------------------------- photo files


@dataclass(frozen=True, slots=True)
class PhotoCheck:
    """The result of decoding a listed photo."""

    entry: PhotoEntry
    bytes: int = 0
    size: tuple[int, int] | None = None  # None: unusable
    fault: Fault | None = None


def check_photos(listing: Listing) -> Iterator[PhotoCheck]:
    """Decode every photo at reduced size, in threads; results are in order."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for start in range(0, len(listing.entries), _AHEAD):
            yield from pool.map(partial(check_photo, listing.folder), listing.entries[start : start + _AHEAD])


def check_photo(folder: Path, entry: PhotoEntry) -> PhotoCheck:
    """Decode one photo: a truncated file may have a valid header."""
    path = folder / entry.file
    if not is_regular_file(path):
        return PhotoCheck(entry, fault=missing_photo(folder, entry))
    length = path.stat().st_size
    try:
        size = images.photo_size(path)
        images.read_photo(path, at_least=(1, 1))
    except errors.UserError as error:
        kind = Fault("unreadable photo" if length else "empty photo", entry.file, str(error))
        return PhotoCheck(entry, length, fault=kind)
    return PhotoCheck(entry, length, size)


def odd_size(size: tuple[int, int]) -> str | None:
    """The kind of finding of an unusual photo size, if any."""
    short, long = sorted(size)
    if short < _SMALLEST:
        return "very small photo"
    if long > _LONGEST * short:
        return "very long photo"
    return "very large photo" if short * long > _LARGEST else None


def same_content(folder: Path, checks: Iterable[PhotoCheck]) -> Iterator[tuple[PhotoCheck, ...]]:
    """Groups of identical files. Files are read only if their sizes agree, and in full only if their ends do."""
    by_length = _groups([tuple(checks)], lambda check: check.bytes)
    by_tail = _groups(by_length, lambda check: _digest(folder / check.entry.file, _TAIL))
    yield from _groups(by_tail, lambda check: _digest(folder / check.entry.file))


def _groups(
    groups: Iterable[Sequence[PhotoCheck]], key: Callable[[PhotoCheck], Hashable]
) -> Iterator[tuple[PhotoCheck, ...]]:
    """Groups divided by a key; groups of one are dropped."""
    for group in groups:
        parts: defaultdict[Hashable, list[PhotoCheck]] = defaultdict(list)
        for check in group:
            parts[key(check)].append(check)
        yield from (tuple(part) for part in parts.values() if len(part) > 1)


def _digest(path: Path, tail: int | None = None) -> bytes:
    """Hash of a file, or of its last bytes."""
    with path.open("rb") as file:
        if tail is None:
            return hashlib.file_digest(file, "blake2b").digest()
        file.seek(max(0, path.stat().st_size - tail))
        return hashlib.blake2b(file.read(tail)).digest()


# ---------------------------------------------------------------- whole datasets


@dataclass(frozen=True, slots=True)
class Survey:
    """Summary of a dataset, and its findings."""

    what: str
    photos: int  # listed, whether they exist or not
    classes: tuple[str, ...]
    findings: tuple[Finding, ...]


def check_dataset(source: DataSource) -> tuple[Finding, ...]:
    """The findings of a dataset, errors first. Without a split, all photos of a VOC or YOLO folder are checked."""
    return survey(source).findings


def survey(source: DataSource, progress: Progress = silent) -> Survey:
    """Check everything that a dataset names; a dataset that cannot be read at all raises a ``UserError``."""
    source = datasets.everything(source)
    form, tally = datasets.dataset_format(source), Tally()
    listing = (datasets.list_dataset if form.has_tags else datasets.list_photos)(source, tally.on_fault)
    with progress("checking photos", len(listing.entries)) as bar:
        checks = tuple(_check_each(listing, tally, bar))
    _repeated(listing, checks, tally)
    _proposals(listing, checks, tally)
    if form.has_tags:
        _tags(listing, tally)
        if lacks_negatives([len(entry.tags) for entry in listing.entries], len(listing.classes)):
            tally.add("one class in every photo", f"{len(listing.entries)} photos")
    else:
        tally.add("photos without tags only", str(source.path))
    if source.split is None or form.names_splits:
        _unnamed(listing, tally)
    if datasets.has_boxes(source):
        _boxes(source, {check.entry.id: check.size for check in checks if check.size is not None}, tally)
    return Survey(form.what, len(listing.entries), listing.classes, tally.findings())


_OF_MANY = {"class with few photos", "class in every photo", "classes always together"}
_OF_NAMES = {"classes spelled alike", "class name with a comma"}


def quick_findings(photos: annotations.TaggedPhotos) -> tuple[Finding, ...]:
    """The warnings and errors that need no photo to be decoded: of tags, and of identical files.

    Training gives them before it starts. Names of classes are not among them: ``read_tagged`` warns of these. Of fewer
    than 16 photos, nothing is said that depends on their number.
    """
    tally, names = Tally(), photos.classes
    entries, checks = [], []
    for photo, tags in zip(photos.photos, photos.tags.tolist(), strict=True):
        present = tuple(name for name, is_there in zip(names, tags, strict=True) if is_there)
        entries.append(PhotoEntry(photo.id, str(photo.path), present, (), ""))
        if photo.path.is_file():  # one that has gone is reported where it is needed
            checks.append(PhotoCheck(entries[-1], photo.path.stat().st_size, (photo.width, photo.height)))
    listing = Listing(Path(), names, tuple(entries))
    _tags(listing, tally)
    _repeated(listing, checks, tally)
    left_out = _OF_NAMES | (_OF_MANY if len(photos) < _MIN_PHOTOS else set())
    found = [finding for finding in tally.findings() if finding.severity != "note"]
    return tuple(finding for finding in found if finding.kind not in left_out)


# ---------------------------------------------------------------- photos


def _check_each(listing: Listing, tally: Tally, bar: Bar) -> Iterator[PhotoCheck]:
    """Decode every photo and report findings that concern it alone."""
    for check in check_photos(listing):
        kind = odd_size(check.size) if check.size is not None else None
        if check.fault is not None:
            tally.on_fault(check.fault)
        elif kind is not None and check.size is not None:
            tally.add(kind, f"{check.entry.file} ({check.size[0]}x{check.size[1]})")
        bar.advance()
        yield check


def _repeated(listing: Listing, checks: Iterable[PhotoCheck], tally: Tally) -> None:
    for group in same_content(listing.folder, (check for check in checks if check.size is not None)):
        is_same = len({(frozenset(check.entry.tags), frozenset(check.entry.unsure)) for check in group}) == 1
        kind = "same photo twice" if is_same else "same photo, other tags"
        tally.add(kind, " = ".join(check.entry.file for check in group[:3]) + (" = ..." if len(group) > 3 else ""))


def _proposals(listing: Listing, checks: Iterable[PhotoCheck], tally: Tally) -> None:
    """Search a few photos with the default method: signs that proposals cannot fit the objects."""
    photos = [
        annotations.Photo(check.entry.id, listing.folder / check.entry.file, *check.size)
        for check in checks
        if check.size is not None
    ]
    for concern in suitability.sample_concerns(photos, base.default_method(base.DEFAULT_KIND), images.read_photo):
        tally.add(concern.kind, concern.line, str(concern))


def _unnamed(listing: Listing, tally: Tally) -> None:
    named = {entry.file for entry in listing.entries}
    for file in folders.photo_files(listing.folder):
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


def lacks_negatives(tags_per_photo: Sequence[int], num_classes: int) -> bool:
    """Whether every photo shows exactly one of several classes: tags then cannot tell objects from surroundings.

    What all photos share, such as the head around every tumour, is never seen without an object, so a detector may box
    it, or whatever differs between the classes. Of few photos nothing is said.
    """
    return num_classes > 1 and len(tags_per_photo) >= _MIN_PHOTOS and all(count == 1 for count in tags_per_photo)


def no_negatives_line(count: int) -> str:
    """The finding of ``lacks_negatives`` in words."""
    return f"each of the {count} photos shows exactly one class, and none shows no object; {_NO_NEGATIVES}"


def _alike(rows: Mapping[str, Sequence[int]], tally: Tally) -> None:
    """Classes with the same photos, and classes with nearly the same name."""
    together: defaultdict[tuple[int, ...], list[str]] = defaultdict(list)
    for name, found in rows.items():
        if found:
            together[tuple(found)].append(name)
    for names in together.values():
        if len(names) > 1:
            tally.add("classes always together", " = ".join(names))
    for names in spelled_alike(rows):
        tally.add("classes spelled alike", " = ".join(names))


# ---------------------------------------------------------------- boxes


def _boxes(source: DataSource, sizes: Mapping[str, tuple[int, int]], tally: Tally) -> None:
    """Compare boxes with the upright sizes of the photos on disk."""
    truth = datasets.read_truth(source, tally.on_fault)
    for name, annotated, objects in zip(truth.ids, truth.sizes, truth.objects, strict=True):
        size = sizes.get(name, annotated)
        if size != annotated:
            line = f"{name} ({annotated[0]}x{annotated[1]}, photo {size[0]}x{size[1]})"
            tally.add("size differs from the photo's", line)
        _boxes_of(name, size, objects, tally)


def _boxes_of(name: str, size: tuple[int, int], objects: annotations.Objects, tally: Tally) -> None:
    for x1, y1, x2, y2 in objects.boxes.tolist():
        corners = f"{name} ({x1:g} {y1:g} {x2:g} {y2:g})"
        if x2 <= x1 or y2 <= y1:
            tally.add("box without area", corners)
        if min(x1, y1) < -_SLACK or x2 > size[0] + _SLACK or y2 > size[1] + _SLACK:
            tally.add("box outside the photo", corners)
