"""What is wrong with a dataset, all of it at once: photos, tags, classes and boxes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

from tag2box.data.check_photos import Look, look_at_all, odd_size, same_content
from tag2box.data.datasets import everything, format_of, has_boxes, list_dataset, list_photos, read_truth
from tag2box.data.findings import Finding, Tally
from tag2box.data.folders import photo_files
from tag2box.data.listing import DataSource, Listing
from tag2box.types import Objects

_FEW = 5  # photos of a class
_SLACK = 1.0  # pixels a box may reach out: rounding, and counting from 0 or 1, are no mistakes


class Step(Protocol):
    """Told of every photo done."""

    def advance(self) -> None:
        """One more."""
        ...


class Watch(Protocol):
    """Opens a progress bar, such as those of ``engine.progress``."""

    def __call__(self, title: str, total: int) -> AbstractContextManager[Step]:
        """The bar, for the length of a with block."""
        ...


class _Nobody:
    def advance(self) -> None:
        """Nobody watches."""


@contextmanager
def unwatched(title: str, total: int) -> Iterator[Step]:
    """No progress bar."""
    yield _Nobody()


@dataclass(frozen=True, slots=True)
class Survey:
    """A dataset in short, and what is wrong with it."""

    what: str
    photos: int  # named, whether they are there or not
    classes: tuple[str, ...]
    findings: tuple[Finding, ...]


def check(source: DataSource) -> tuple[Finding, ...]:
    """What is wrong with a dataset, the gravest first. Of a VOC folder without a split, all images are looked at."""
    return survey(source).findings


def survey(source: DataSource, watch: Watch = unwatched) -> Survey:
    """Look at everything a dataset names; what cannot be read at all is a ``UserError``, as everywhere."""
    source = everything(source)
    form, tally = format_of(source), Tally()
    listing = (list_dataset if form.has_tags else list_photos)(source, tally.complain)
    with watch("checking photos", len(listing.entries)) as bar:
        looks = tuple(_each(listing, tally, bar))
    _repeated(listing, looks, tally)
    if form.has_tags:
        _tags(listing, tally)
    else:
        tally.add("photos without tags only", str(source.path))
    if source.split is None or form.names_splits:
        _unnamed(listing, tally)
    if has_boxes(source):
        _boxes(source, {look.entry.id: look.size for look in looks if look.size is not None}, tally)
    return Survey(form.what, len(listing.entries), listing.classes, tally.findings())


# ---------------------------------------------------------------- photos


def _each(listing: Listing, tally: Tally, bar: Step) -> Iterator[Look]:
    """Look at every photo and tell what is wrong with it alone."""
    for look in look_at_all(listing):
        kind = odd_size(look.size) if look.size is not None else None
        if look.fault is not None:
            tally.complain(look.fault)
        elif kind is not None and look.size is not None:
            tally.add(kind, f"{look.entry.file} ({look.size[0]}x{look.size[1]})")
        bar.advance()
        yield look


def _repeated(listing: Listing, looks: Iterable[Look], tally: Tally) -> None:
    for group in same_content(listing.folder, (look for look in looks if look.size is not None)):
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
