"""Unfinished proposals on disk: shards with the candidates of finished photos, until a store replaces them."""

import json
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from io import BytesIO
from pathlib import Path

import numpy as np
import torch

from tag2box import io, storage
from tag2box.errors import UserError, printable
from tag2box.proposals.base import Candidates, ProposalSource, unrecorded_settings
from tag2box.proposals.store import StoreEntry

_SOURCE_FILE = "source.json"
_MAX_PHOTOS = 16  # of the first shards
_SHARE, _LARGEST_SHARD = 64, 256  # later, a shard has a 64th of the finished photos, up to 256: fewer files to sync
_MAX_SECONDS = 5.0  # of work per shard: the most that a killed process loses


@dataclass(slots=True)
class Shards:
    """Candidates of finished photos: the most recent ones in memory, the others on disk."""

    folder: Path
    source: ProposalSource
    files: dict[str, Path] = field(default_factory=dict)  # shard of each photo on disk
    entries: dict[str, StoreEntry] = field(default_factory=dict)  # all finished photos, by id
    pending: dict[str, Candidates] = field(default_factory=dict)  # in memory
    last: int = 0  # number of the last shard: with millions of photos, ``files`` is too long to be searched for it
    flushed: float = field(default_factory=time.monotonic)

    @classmethod
    def open(cls, folder: Path, source: ProposalSource) -> "Shards":
        """The shards of an earlier, interrupted call; raises a UserError if it had other settings."""
        shards = cls(folder, source)
        if not (folder / _SOURCE_FILE).exists():
            shutil.rmtree(folder, ignore_errors=True)
            return shards
        begun = storage.read_checked_json(
            folder / _SOURCE_FILE, "the settings of unfinished proposals", f"remove {folder}"
        )
        begun = begun["source"] if "format" in begun else begun
        if begun != source:
            raise UserError(
                f"{folder.parent}: unfinished, and {source_difference(begun, source)}; remove it to start again"
            )
        io.sweep(folder)
        for file in sorted(folder.glob("*.npz")):
            shards._index(file)
            shards.last = max(shards.last, int(file.stem))
        return shards

    def _index(self, file: Path) -> None:
        try:
            entries = [entry for entry, _ in _read(file)]
        except Exception:  # NumPy and zipfile raise many kinds for a damaged file
            file.unlink()  # its photos will be searched again
            return
        self.files |= dict.fromkeys((entry.id for entry in entries), file)
        self.entries |= {entry.id: entry for entry in entries}

    def entry(self, photo_id: str) -> StoreEntry | None:
        """A finished photo."""
        return self.entries.get(photo_id)

    def add(self, entry: StoreEntry, candidates: Candidates) -> None:
        """Add the candidates of a photo."""
        self.entries[entry.id] = entry
        self.pending[entry.id] = candidates
        most = max(_MAX_PHOTOS, min(len(self.entries) // _SHARE, _LARGEST_SHARD))
        if len(self.pending) >= most or time.monotonic() - self.flushed > _MAX_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write the pending candidates to disk."""
        self.flushed = time.monotonic()
        if not self.pending:
            return
        path = self.folder / f"{self.last + 1:06}.npz"
        entries = [self.entries[name] for name in self.pending]
        with _deferred_interrupt():
            if not (self.folder / _SOURCE_FILE).exists():
                storage.write_checked_json(self.folder / _SOURCE_FILE, {"format": 1, "source": dict(self.source)})
            with io.replacing(path) as temporary:
                _write(temporary, entries, list(self.pending.values()))
            self.files |= dict.fromkeys(self.pending, path)
            self.last += 1
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
    if there.get("kind") == wanted.get("kind"):
        there, wanted = (dict(unrecorded_settings(wanted)) | dict(source) for source in (there, wanted))
    key = next(key for key in [*wanted, *there] if there.get(key) != wanted.get(key))
    return printable(f"made with {key} {json.dumps(there.get(key))}, not {json.dumps(wanted.get(key))}")


@contextmanager
def _deferred_interrupt() -> Iterator[None]:
    """Defer Ctrl-C and SIGTERM to the end of the block, because they would leave an archive that cannot be closed."""
    received: list[int] = []
    try:
        before = {
            number: signal.signal(number, lambda number, _: received.append(number))
            for number in (signal.SIGINT, signal.SIGTERM)
        }
    except ValueError:  # not the main thread, which alone receives signals
        yield
        return
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if received:
        signal.raise_signal(received[0])


def _write(path: Path, entries: list[StoreEntry], found: list[Candidates]) -> None:
    rows = [[entry.id, *entry.size, entry.stamp.to_json() if entry.stamp else None] for entry in entries]
    content = BytesIO()
    np.savez(
        content,
        photos=np.frombuffer(json.dumps(rows).encode(), np.uint8),
        counts=np.array([len(candidates) for candidates in found]),
        boxes=np.concatenate([candidates.boxes.numpy() for candidates in found]),
        scores=np.concatenate([candidates.scores.numpy() for candidates in found]),
    )
    path.write_bytes(content.getbuffer())


def _read(path: Path) -> list[tuple[StoreEntry, Candidates]]:
    """Read a whole shard, which also verifies its checksums; rows written before version 0.2 have no stamp."""
    with np.load(path, allow_pickle=False) as shard:
        rows = json.loads(shard["photos"].tobytes())
        ends = shard["counts"].cumsum()[:-1]
        boxes, scores = np.split(shard["boxes"], ends), np.split(shard["scores"], ends)
    pairs = zip(boxes, scores, strict=True)
    found = [Candidates(torch.from_numpy(b.copy()), torch.from_numpy(s.copy())) for b, s in pairs]
    return list(zip((_entry(*row) for row in rows), found, strict=True))


def _entry(photo_id: str, width: int, height: int, stamp: object = None) -> StoreEntry:
    return StoreEntry(photo_id, width, height, storage.FileStamp.from_json(stamp) if stamp else None)


@lru_cache(maxsize=32)  # photos are read back in almost the order in which they were written
def _load(path: Path) -> dict[str, Candidates]:
    return {entry.id: candidates for entry, candidates in _read(path)}
