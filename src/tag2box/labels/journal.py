"""The journal of a label set: every action of its reviewers, one line each, in ``reviews.jsonl`` beside the labels.

Lines are JSON objects that begin with ``sum``, a checksum of the rest of the line. The first names the label set by the
digest of its labels.json; the others have ``photo``, ``revision``, ``action``, ``boxes`` (number: left, top, right,
bottom, class, decision), ``key``, ``reviewer``, ``time`` and ``sampled``. A line is appended with one write and is on
disk before ``Journal.append`` returns. What a kill cuts short is the end of the last line, which no reviewer was told
is stored: it is dropped. Any other damage is refused.

Several processes may append: each holds a lock on the file while it reads what others wrote, compares the revision of
the photo with the one that its reviewer saw, and writes.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tag2box import io, storage
from tag2box.errors import UserError, printable
from tag2box.labels.label_set import LabelSet
from tag2box.labels.reviews import Action, PhotoReview, Reviews, act, check_action, finished

JOURNAL_FILE = "reviews.jsonl"
JOURNAL_FORMAT = 1
_START, _DIGITS = b'{"sum":"', 16
_BODY = len(_START) + _DIGITS + 2
_LONGEST_LINE = 1 << 24
_BLOCK = 1 << 20
_UNTOUCHED = PhotoReview()


class Outdated(UserError):
    """An action that is based on a revision which another reviewer has changed since."""


@dataclass(frozen=True, slots=True)
class Finish:
    """When a photo was marked as done, and by which reviewer."""

    photo: str
    reviewer: str
    time: float


@dataclass
class History:
    """What a journal says: the state of every photo that was touched."""

    labels: LabelSet
    place: Path
    seed: int = 0  # of the random sample
    photos: dict[str, PhotoReview] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)  # the photo of each line, in order
    finishes: list[Finish] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)  # of all actions: one that is sent twice is stored once
    offset: int = 0  # bytes that were replayed
    lines: int = 0
    dropped: int = 0  # bytes of a line that was cut short, at the end

    def __post_init__(self) -> None:
        self.known = {photo.id: photo for photo in self.labels.content.photos}

    def state(self, photo: str) -> PhotoReview:
        """The state of a photo; the empty one if no reviewer touched it."""
        return self.photos.get(photo, _UNTOUCHED)

    def reviews(self) -> Reviews:
        """The finished photos, in the order of the label set."""
        done = {
            photo.id: finished(photo, state)
            for photo in self.labels.content.photos
            if (state := self.photos.get(photo.id)) is not None and state.now.is_done
        }
        return Reviews(self.labels.digest, done)

    def replay(self, handle: int) -> None:
        """Read the lines that were appended since; the caller holds the lock."""
        size = os.fstat(handle).st_size
        if size < self.offset:
            raise UserError(f"{self.place}: was cut short or replaced during the review; restart the review")
        if size > io.TEXT_LIMIT:
            raise UserError(f"{self.place}: larger than {io.TEXT_LIMIT >> 20:,} MB; expected a journal of reviews")
        rest = b""
        position = self.offset
        while block := storage.read_at(handle, _BLOCK, position):
            position += len(block)
            *whole, rest = (rest + block).split(b"\n")
            for line in whole:
                self._read(line)
                self.offset += len(line) + 1
            if len(rest) > _LONGEST_LINE:
                raise self._damaged("is longer than any line of a journal")
        self.dropped = len(rest)

    def _read(self, line: bytes) -> None:
        value = _checked(line)
        if value is None:
            raise self._damaged("is damaged, its checksum is wrong")
        try:
            if self.lines:
                self._add(value)
            else:
                self._begin(value)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise self._damaged(printable(f"is not understood ({type(error).__name__}: {error})", 200)) from None
        self.lines += 1

    def _begin(self, value: dict[str, Any]) -> None:
        if value.get("journal") != JOURNAL_FORMAT:
            raise UserError(f"{self.place}: expected a journal of format {JOURNAL_FORMAT}; update tag2box")
        if value["labels"] != self.labels.digest:
            raise UserError(
                f"{self.place}: reviews of another label set, labels.json has changed since; "
                "move this file elsewhere to begin a new review, or restore labels.json"
            )
        self.seed = int(value["seed"])

    def _add(self, value: dict[str, Any]) -> None:
        name, revision = value["photo"], value["revision"]
        if name not in self.known:
            raise ValueError(f"photo {str(name)[:100]!r} is not in the label set")
        before = self.state(name)
        if revision != before.revision + 1:
            raise ValueError(f"revision {revision} of photo {name[:100]!r} follows {before.revision}")
        reviewer, action = sys.intern(str(value["reviewer"])), Action.from_json(value)
        try:
            after = act(before, action, reviewer, is_sampled=bool(value["sampled"]))
            check_action(action, self.known[name], before, self.labels.classes)
        except UserError as error:
            raise ValueError(str(error)) from None
        self.keys.add(str(value["key"]))
        self.photos[name] = after
        self.changed.append(self.known[name].id)
        if action.kind == "done":
            self.finishes.append(Finish(self.known[name].id, reviewer, float(value["time"])))

    def _damaged(self, what: str) -> UserError:
        return UserError(
            f"{self.place}: line {self.lines + 1} {what}; restore the file from a copy, "
            "or remove this line and all that follow it"
        )


# ---------------------------------------------------------------- writing


class Journal:
    """The journal of a label set, open for appending; safe to use from several threads and processes.

    Example:
        with Journal(Path("labels"), labels) as journal:
            journal.append("photo-1", Action("done"), based_on=0, key="1", reviewer="Ada")
    """

    def __init__(self, folder: Path, labels: LabelSet, *, seed: int = 0) -> None:
        self.place = folder / JOURNAL_FILE
        self.history = History(labels, self.place, seed)
        self.notes: list[str] = []  # what was repaired
        self._mutex = threading.Lock()
        with storage.writing(self.place, "correct the permissions of the label set, or free some space"):
            self._handle = os.open(self.place, os.O_RDWR | os.O_APPEND | os.O_CREAT | io.BINARY, 0o666)
        try:
            with self._held():
                self._repair()
                if not self.history.lines:
                    self._write({"journal": JOURNAL_FORMAT, "labels": labels.digest, "seed": seed})
                    io.sync(folder)
        except BaseException:
            os.close(self._handle)
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; everything is on disk already."""
        with self._mutex:
            os.close(self._handle)
            self._handle = -1

    def refresh(self) -> None:
        """Read what other processes have appended."""
        with self._held():
            pass

    def append(
        self, photo: str, action: Action, *, based_on: int, key: str, reviewer: str = "", is_sampled: bool = False
    ) -> PhotoReview:
        """Store an action and return the state of the photo after it.

        Args:
            based_on: revision of the photo that the reviewer saw; ``Outdated`` is raised if it is no longer the last.
            key: a name of this action: if it is stored already, because an answer was lost, nothing is appended.
        """
        with self._held():
            self._repair()
            before = self.history.state(photo)
            if key in self.history.keys:
                return before
            if based_on != before.revision:
                who = f"{before.reviewer} has" if before.reviewer else "another reviewer has"
                raise Outdated(f"{who} changed this photo since you saw it; it is shown again as it is now")
            check_action(action, self.history.known[photo], before, self.history.labels.classes)
            act(before, action)  # raises if it is impossible
            self._write(
                {"photo": photo, "revision": before.revision + 1, **action.to_json(), "key": key, "reviewer": reviewer,
                 "time": round(time.time(), 3), "sampled": is_sampled}
            )  # fmt: skip
            return self.history.state(photo)

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        """Exclude other threads and processes; what these have appended is read first."""
        with self._mutex:
            io.lock(self._handle, wait=True)
            try:
                self._check_place()
                self.history.replay(self._handle)
                yield
            finally:
                io.unlock(self._handle)

    def _check_place(self) -> None:
        try:
            is_same = os.path.samestat(os.fstat(self._handle), self.place.stat())
        except FileNotFoundError:
            is_same = False
        if not is_same:
            raise UserError(f"{self.place}: was removed or replaced during the review; restart the review")

    def _repair(self) -> None:
        """Remove a line that was cut short: a writer died before it could tell any reviewer that it is stored."""
        if self.history.dropped:
            self.notes.append(cut_note(self.place, self.history.dropped))
            os.ftruncate(self._handle, self.history.offset)
            self.history.dropped = 0

    def _write(self, value: dict[str, object]) -> None:
        line = journal_line(value)
        with storage.writing(self.place, "nothing was stored; free some space or repair the disk, then try again"):
            try:
                if os.write(self._handle, line) != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(self._handle)
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._handle, self.history.offset)
                raise
        self.history.replay(self._handle)


# ---------------------------------------------------------------- reading


def read_reviews(folder: Path, labels: LabelSet | None = None) -> Reviews:
    """The finished reviews of a label set; none if it has no journal.

    Args:
        folder: the label set.
        labels: its content, if it was read already.

    Example:
        reviews = tag2box.read_reviews(Path("labels"))
        print(len(reviews), sum(verdict.is_right for verdict in reviews.verdicts(sampled_only=True)))
    """
    return read_history(folder, labels or LabelSet.open(folder)).reviews()


def read_history(folder: Path, labels: LabelSet) -> History:
    """All that the journal of a label set says; a line that was cut short is left out with a warning."""
    place = folder / JOURNAL_FILE
    history = History(labels, place)
    if not place.exists():
        return history
    with io.open_file(place, "a journal of reviews") as file:
        io.lock(file.fileno(), shared=True, wait=True)
        try:
            history.replay(file.fileno())
        finally:
            io.unlock(file.fileno())
    if history.dropped:
        warnings.warn(cut_note(place, history.dropped), stacklevel=2)
    return history


def cut_note(place: Path, dropped: int) -> str:
    """A line about an action that was cut short."""
    return f"{place}: the last line was cut short ({dropped} bytes) by a kill or a power cut; it is left out"


def journal_line(value: dict[str, object]) -> bytes:
    """A line of a journal: the object, with a checksum of its text as first field."""
    body = json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    return _START + _sum(body).encode() + b'",' + body[1:] + b"\n"


def _checked(line: bytes) -> dict[str, Any] | None:
    """The object of a line; None if the line is damaged."""
    body = b"{" + line[_BODY:]
    if line[:_BODY] != _START + _sum(body).encode() + b'",':
        return None
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _sum(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()[:_DIGITS]
