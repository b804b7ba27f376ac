"""Work in progress: the candidates of finished photos in small files, until all are there and become a store."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from tag2box.errors import UserError
from tag2box.io import read_json, replacing, write_json
from tag2box.proposals.base import Candidates, PhotoSource
from tag2box.proposals.store import StoreEntry

SOURCE = "source.json"
_PHOTOS = 16  # of a part: so many photos, or
_SECONDS = 5.0  # what was found in so much time; a kill costs no more than that
_BROKEN = (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile)


@dataclass(slots=True)
class Shards:
    """The finished photos of unfinished work. The last few are in memory, the others on disk."""

    folder: Path
    source: PhotoSource
    files: dict[str, Path] = field(default_factory=dict)  # the part each photo on disk is in
    sizes: dict[str, tuple[int, int]] = field(default_factory=dict)  # of all finished photos, by id
    fresh: dict[str, Candidates] = field(default_factory=dict)  # those in memory
    begun: float = field(default_factory=time.monotonic)  # when the first of them may have been

    @classmethod
    def open(cls, folder: Path, source: PhotoSource) -> Shards:
        """What earlier, broken off work left behind; work with other settings is refused."""
        parts = cls(folder, source)
        if not (folder / SOURCE).exists():
            shutil.rmtree(folder, ignore_errors=True)
            return parts
        begun = read_json(folder / SOURCE, "the settings of unfinished proposals")
        if begun != source:
            raise UserError(f"{folder.parent}: unfinished, and {difference(begun, source)}; remove it to begin anew")
        for stray in folder.glob(".*"):
            stray.unlink()
        for file in sorted(folder.glob("*.npz")):
            parts._find(file)
        return parts

    def _find(self, file: Path) -> None:
        try:
            entries = _read(file)[0]
        except _BROKEN:
            file.unlink()  # its photos are searched again
            return
        self.files |= dict.fromkeys((entry.id for entry in entries), file)
        self.sizes |= {entry.id: entry.size for entry in entries}

    def add(self, entry: StoreEntry, candidates: Candidates) -> None:
        """Keep the candidates of a photo."""
        self.sizes[entry.id] = entry.size
        self.fresh[entry.id] = candidates
        if len(self.fresh) >= _PHOTOS or time.monotonic() - self.begun > _SECONDS:
            self.flush()

    def flush(self) -> None:
        """Put what is in memory on disk."""
        self.begun = time.monotonic()
        if not self.fresh:
            return
        last = max((int(path.stem) for path in self.files.values()), default=0)
        path = self.folder / f"{last + 1:06}.npz"
        entries = [StoreEntry(name, *self.sizes[name]) for name in self.fresh]
        with _undisturbed():
            if not (self.folder / SOURCE).exists():
                write_json(self.folder / SOURCE, dict(self.source))
            with replacing(path) as temporary:
                _write(temporary, entries, list(self.fresh.values()))
            self.files |= dict.fromkeys(self.fresh, path)
            self.fresh.clear()

    def candidates(self, photo_id: str) -> Candidates:
        """The candidates of a finished photo."""
        if photo_id in self.fresh:
            return self.fresh[photo_id]
        return _load(self.files[photo_id])[photo_id]

    def remove(self) -> None:
        """Forget everything: it is in the store now."""
        # The settings first: what is without them is swept away, whenever this is broken off.
        (self.folder / SOURCE).unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        _load.cache_clear()


def difference(there: object, wanted: PhotoSource) -> str:
    """The first setting in which two sources differ, for a message."""
    if not isinstance(there, dict):
        return "its settings are unreadable"
    key = next(key for key in [*wanted, *there] if there.get(key) != wanted.get(key))
    return f"made with {key} {json.dumps(there.get(key))}, not {json.dumps(wanted.get(key))}"


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Let Ctrl-C wait for the end of the block: in the midst of an archive it leaves one that cannot be closed."""
    pressed: list[int] = []
    try:
        before = signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    except ValueError:  # not the main thread: Ctrl-C does not come here
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        signal.raise_signal(signal.SIGINT)


def _write(path: Path, entries: list[StoreEntry], found: list[Candidates]) -> None:
    names = json.dumps([[entry.id, entry.width, entry.height] for entry in entries]).encode()
    content = io.BytesIO()
    np.savez(
        content,
        photos=np.frombuffer(names, np.uint8),
        counts=np.array([len(candidates) for candidates in found]),
        boxes=np.concatenate([candidates.boxes.numpy() for candidates in found]),
        scores=np.concatenate([candidates.scores.numpy() for candidates in found]),
    )
    with path.open("wb") as file:
        file.write(content.getbuffer())
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path) -> tuple[list[StoreEntry], list[Candidates]]:
    """All of a part; its checksums are compared on the way."""
    with np.load(path, allow_pickle=False) as part:
        entries = [StoreEntry(*row) for row in json.loads(part["photos"].tobytes())]
        ends = part["counts"].cumsum()[:-1]
        boxes, scores = np.split(part["boxes"], ends), np.split(part["scores"], ends)
    pairs = zip(boxes, scores, strict=True)
    return entries, [Candidates(torch.from_numpy(b.copy()), torch.from_numpy(s.copy())) for b, s in pairs]


@lru_cache(maxsize=32)  # photos are finished nearly in the order in which they are asked for
def _load(path: Path) -> dict[str, Candidates]:
    entries, found = _read(path)
    return {entry.id: candidates for entry, candidates in zip(entries, found, strict=True)}
