"""Detections of an unfinished ``tag2box detect`` or ``label``: on disk, not in memory; resumed from."""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch

from tag2box import errors, io, storage
from tag2box.annotations import BoxSource, Detections, Photo

_IDENTITY_FILE = "work.json"
_FLUSH_PHOTOS = 16
_FLUSH_SECONDS = 5.0  # of work: the most that a killed process loses
_GONE = storage.FileStamp(-1, -1, "")  # of a photo that was removed meanwhile: no file has this stamp


@dataclass(frozen=True, slots=True, eq=False)
class StoredDetections(Mapping[str, Detections]):
    """Detections by photo id that are read from a log on access: in memory is only where each is."""

    places: dict[str, tuple[Path, int]] = field(default_factory=dict)  # file and first byte of the row of each photo

    def __getitem__(self, photo_id: str) -> Detections:
        path, start = self.places[photo_id]
        with path.open("rb") as file:
            file.seek(start)
            row = _parse_row(file.readline())
        if row is None:
            raise errors.UserError(f"{path}: damaged while it was in use; repair the disk, then run the command again")
        boxes, scores = (torch.tensor(row[key], dtype=torch.float32) for key in ("boxes", "scores"))
        return Detections(boxes.reshape(-1, 4), scores, torch.tensor(row["labels"], dtype=torch.long))

    def of(self, photos: Sequence[Photo]) -> "StoredDetections":
        """Those of some photos, in their order."""
        return StoredDetections({photo.id: self.places[photo.id] for photo in photos if photo.id in self.places})

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


@dataclass(slots=True)
class DetectionLog:
    """Detections of finished photos on disk, from which a killed or interrupted ``detect`` resumes.

    A folder with a file per rank. A line is the digest of its content, and JSON: the photo, its ``FileStamp``, the
    digest of its proposals, and its detections. What follows a damaged line is ignored, and detected again.
    """

    folder: Path
    rank: int = 0
    stored: StoredDetections = field(default_factory=StoredDetections)
    """What is finished, or was added since."""
    _file: BinaryIO | None = None
    _pending: int = 0
    _flushed: float = field(default_factory=time.monotonic)

    def open(self, identity: Mapping[str, object]) -> None:
        """Keep what is there if it has the same identity: weights, settings and versions; else remove it."""
        path, wanted = self.folder / _IDENTITY_FILE, json.loads(json.dumps(identity))
        try:
            if storage.read_checked_json(path, "unfinished detections", "remove it") == wanted:
                return
        except errors.UserError:
            pass  # none there, or damaged
        for stale in self.folder.iterdir() if self.folder.is_dir() else ():
            if stale.name != io.LOCK:
                shutil.rmtree(stale) if stale.is_dir() else stale.unlink()
        storage.write_checked_json(path, wanted)

    def finished(self, photos: Sequence[Photo], store: BoxSource) -> StoredDetections:
        """The detections of the photos that are finished, and have neither changed nor got other proposals."""
        rows = (row for path in sorted(self.folder.glob("*.jsonl")) for row in _read_rows(path))
        known = {row.photo: row for row in rows}
        self.stored.places.clear()
        for photo in photos:
            row = known.get(photo.id)
            if row is None or row.proposals != _proposals_digest(store, photo):
                continue
            if storage.FileStamp.of(photo.path, row.stamp).sha256 == row.stamp.sha256:  # raises if the photo has gone
                self.stored.places[photo.id] = row.place
        return self.stored

    def add(self, photo: Photo, store: BoxSource, found: Detections) -> None:
        """Append the detections of a photo."""
        try:
            stamp = storage.FileStamp.of(photo.path)
        except errors.UserError:
            stamp = _GONE  # so a second call cannot use them
        row = {
            "photo": photo.id,
            "stamp": stamp.to_json(),
            "proposals": _proposals_digest(store, photo),
            "boxes": found.boxes.tolist(),
            "scores": found.scores.tolist(),
            "labels": found.labels.tolist(),
        }
        text = json.dumps(row).encode()
        path = self.folder / f"{self.rank}.jsonl"
        with storage.writing(self.folder):
            if self._file is None:
                self._file = path.open("ab")
                io.sync(self.folder)
            self.stored.places[photo.id] = (path, self._file.tell())
            self._file.write(hashlib.sha256(text).hexdigest().encode() + b" " + text + b"\n")
        self._pending += 1
        if self._pending >= _FLUSH_PHOTOS or time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write to disk what was added."""
        if self._file is not None:
            with storage.writing(self.folder):
                self._file.flush()
                os.fsync(self._file.fileno())
        self._pending, self._flushed = 0, time.monotonic()

    def close(self) -> None:
        """Write to disk what was added, and close the file."""
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None


@dataclass(frozen=True, slots=True)
class _Row:
    """A row of a log without its detections."""

    photo: str
    stamp: storage.FileStamp
    proposals: str
    place: tuple[Path, int]


def _read_rows(path: Path) -> list[_Row]:
    """The rows of a log; what follows the first damaged line, or an incomplete last one, is cut off."""
    rows, good = [], 0
    with path.open("rb") as file:
        for line in file:
            row = _parse_row(line)
            if row is None:
                break
            stamp = storage.FileStamp.from_json(row["stamp"])
            rows.append(_Row(row["photo"], stamp, row["proposals"], (path, good)))
            good += len(line)
    if good < path.stat().st_size:
        os.truncate(path, good)
    return rows


def _parse_row(line: bytes) -> dict[str, Any] | None:
    """A line of a log; None if it is damaged or incomplete."""
    digest, _, text = line.rstrip(b"\n").partition(b" ")
    is_whole = line.endswith(b"\n") and hashlib.sha256(text).hexdigest().encode() == digest
    return dict(json.loads(text)) if is_whole else None


def _proposals_digest(store: BoxSource, photo: Photo) -> str:
    digest = hashlib.sha256(store.boxes(photo.id).numpy().tobytes())
    digest.update(store.scores(photo.id).numpy().tobytes())
    return digest.hexdigest()


@contextmanager
def unfinished_folder(out: Path | None, *, is_main: bool) -> Iterator[Path | None]:
    """The folder beside ``out`` of what is finished: removed at the end, kept if the work is interrupted or fails.

    Rank 0 locks it; the other ranks (``is_main`` is False) use it while rank 0 does.
    """
    if out is None:
        yield None
        return
    whole = out.absolute()
    folder = whole.parent / f".{whole.name}.unfinished"
    if not is_main:
        yield folder
        return
    with io.locked(folder / io.LOCK, f"detects, and will write {whole.name}"):
        try:
            yield folder
        except BaseException as error:
            if not any(path.suffix in {".jsonl", ".npz", ".npy"} for path in folder.rglob("*")):
                shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, KeyboardInterrupt):
                kept = f"finished photos are kept in {folder.name}" if folder.exists() else "no photo is finished yet"
                raise errors.Interrupted(f"{out}: stopped; {kept}; rerun the same command to resume") from None
            raise
        shutil.rmtree(folder, ignore_errors=True)
