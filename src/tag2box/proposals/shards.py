"""Unfinished proposals on disk: shards with the candidates of finished photos, until a store replaces them."""

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
from tag2box.proposals.base import Candidates, ProposalSource
from tag2box.proposals.store import StoreEntry

_SOURCE_FILE = "source.json"
_MAX_PHOTOS = 16  # per shard
_MAX_SECONDS = 5.0  # of work per shard: the most that a killed process loses
_DAMAGED = (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile)


@dataclass(slots=True)
class Shards:
    """Candidates of finished photos: the most recent ones in memory, the others on disk."""

    folder: Path
    source: ProposalSource
    files: dict[str, Path] = field(default_factory=dict)  # shard of each photo on disk
    sizes: dict[str, tuple[int, int]] = field(default_factory=dict)  # width and height of all finished photos, by id
    pending: dict[str, Candidates] = field(default_factory=dict)  # in memory
    flushed: float = field(default_factory=time.monotonic)

    @classmethod
    def open(cls, folder: Path, source: ProposalSource) -> "Shards":
        """The shards of an earlier, interrupted call; raises a UserError if it had other settings."""
        shards = cls(folder, source)
        if not (folder / _SOURCE_FILE).exists():
            shutil.rmtree(folder, ignore_errors=True)
            return shards
        begun = read_json(folder / _SOURCE_FILE, "the settings of unfinished proposals")
        if begun != source:
            raise UserError(
                f"{folder.parent}: unfinished, and {source_difference(begun, source)}; remove it to start again"
            )
        for stray in folder.glob(".*"):
            stray.unlink()
        for file in sorted(folder.glob("*.npz")):
            shards._index(file)
        return shards

    def _index(self, file: Path) -> None:
        try:
            entries = _read(file)[0]
        except _DAMAGED:
            file.unlink()  # its photos will be searched again
            return
        self.files |= dict.fromkeys((entry.id for entry in entries), file)
        self.sizes |= {entry.id: entry.size for entry in entries}

    def add(self, entry: StoreEntry, candidates: Candidates) -> None:
        """Add the candidates of a photo."""
        self.sizes[entry.id] = entry.size
        self.pending[entry.id] = candidates
        if len(self.pending) >= _MAX_PHOTOS or time.monotonic() - self.flushed > _MAX_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write the pending candidates to disk."""
        self.flushed = time.monotonic()
        if not self.pending:
            return
        last = max((int(path.stem) for path in self.files.values()), default=0)
        path = self.folder / f"{last + 1:06}.npz"
        entries = [StoreEntry(name, *self.sizes[name]) for name in self.pending]
        with _deferred_interrupt():
            if not (self.folder / _SOURCE_FILE).exists():
                write_json(self.folder / _SOURCE_FILE, dict(self.source))
            with replacing(path) as temporary:
                _write(temporary, entries, list(self.pending.values()))
            self.files |= dict.fromkeys(self.pending, path)
            self.pending.clear()

    def candidates(self, photo_id: str) -> Candidates:
        """The candidates of a finished photo."""
        if photo_id in self.pending:
            return self.pending[photo_id]
        return _load(self.files[photo_id])[photo_id]

    def remove(self) -> None:
        """Delete all shards, once a store contains them."""
        # The settings first: shards without them are deleted by ``open``, so an interruption here does no harm.
        (self.folder / _SOURCE_FILE).unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        _load.cache_clear()


def source_difference(there: object, wanted: ProposalSource) -> str:
    """The first setting in which two sources differ, for an error message."""
    if not isinstance(there, dict):
        return "its settings are unreadable"
    key = next(key for key in [*wanted, *there] if there.get(key) != wanted.get(key))
    return f"made with {key} {json.dumps(there.get(key))}, not {json.dumps(wanted.get(key))}"


@contextmanager
def _deferred_interrupt() -> Iterator[None]:
    """Defer Ctrl-C to the end of the block, because it would leave an archive that cannot be closed."""
    pressed: list[int] = []
    try:
        before = signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    except ValueError:  # not the main thread, which alone receives Ctrl-C
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
    """Read a whole shard, which also verifies its checksums."""
    with np.load(path, allow_pickle=False) as shard:
        entries = [StoreEntry(*row) for row in json.loads(shard["photos"].tobytes())]
        ends = shard["counts"].cumsum()[:-1]
        boxes, scores = np.split(shard["boxes"], ends), np.split(shard["scores"], ends)
    pairs = zip(boxes, scores, strict=True)
    return entries, [Candidates(torch.from_numpy(b.copy()), torch.from_numpy(s.copy())) for b, s in pairs]


@lru_cache(maxsize=32)  # photos are read back in almost the order in which they were written
def _load(path: Path) -> dict[str, Candidates]:
    entries, found = _read(path)
    return {entry.id: candidates for entry, candidates in zip(entries, found, strict=True)}
