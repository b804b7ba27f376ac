"""Photos of a dataset looked at one by one: are they there, can they be read, are two of them the same?"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tag2box.data.faults import Fault
from tag2box.data.listing import Entry, Listing, is_file, missing_photo
from tag2box.data.photos import photo_size, read_photo
from tag2box.errors import UserError

_SMALLEST = 32  # pixels
_LONGEST = 5  # times as long as wide
_LARGEST = 100_000_000  # pixels
_TAIL = 4096  # bytes; tails differ where contents do, nearly always
_AHEAD = 512  # photos handed to the threads at a time: memory stays flat


@dataclass(frozen=True, slots=True)
class Look:
    """What a photo on disk turned out to be."""

    entry: Entry
    bytes: int = 0
    size: tuple[int, int] | None = None  # None: it cannot be used
    fault: Fault | None = None


def look_at_all(listing: Listing) -> Iterator[Look]:
    """Decode every photo, reduced, several at a time; in order."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for start in range(0, len(listing.entries), _AHEAD):
            yield from pool.map(partial(look, listing.folder), listing.entries[start : start + _AHEAD])


def look(folder: Path, entry: Entry) -> Look:
    """Decode one photo: a header may be whole while the rest is cut short."""
    path = folder / entry.file
    if not is_file(path):
        return Look(entry, fault=missing_photo(folder, entry))
    length = path.stat().st_size
    try:
        size = photo_size(path)
        read_photo(path, at_least=(1, 1))
    except UserError as error:
        kind = Fault("unreadable photo" if length else "empty photo", entry.file, str(error))
        return Look(entry, length, fault=kind)
    return Look(entry, length, size)


def odd_size(size: tuple[int, int]) -> str | None:
    """The kind of finding a photo's size is, if any."""
    short, long = sorted(size)
    if short < _SMALLEST:
        return "very small photo"
    if long > _LONGEST * short:
        return "very long photo"
    return "very large photo" if short * long > _LARGEST else None


def same_content(folder: Path, looks: Iterable[Look]) -> Iterator[tuple[Look, ...]]:
    """Groups of photos that are the same to the byte. Files are read only where sizes agree, whole where ends do."""
    by_length = _groups([tuple(looks)], lambda look: look.bytes)
    by_tail = _groups(by_length, lambda look: _digest(folder / look.entry.file, _TAIL))
    yield from _groups(by_tail, lambda look: _digest(folder / look.entry.file))


def _groups(groups: Iterable[Sequence[Look]], key: Callable[[Look], Hashable]) -> Iterator[tuple[Look, ...]]:
    """Groups cut up by a key; those of one are dropped."""
    for group in groups:
        parts: defaultdict[Hashable, list[Look]] = defaultdict(list)
        for look in group:
            parts[key(look)].append(look)
        yield from (tuple(part) for part in parts.values() if len(part) > 1)


def _digest(path: Path, tail: int | None = None) -> bytes:
    """Hash of a file, or of its last bytes."""
    with path.open("rb") as file:
        if tail is None:
            return hashlib.file_digest(file, "blake2b").digest()
        file.seek(max(0, path.stat().st_size - tail))
        return hashlib.blake2b(file.read(tail)).digest()
