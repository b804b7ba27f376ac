"""The search of one photo: whatever is wrong with it becomes a line about it."""

from __future__ import annotations

import errno
import json
import re
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from jaxtyping import Float32, UInt8
from numpy import ndarray
from torch import Tensor

from tag2box.annotations import Photo
from tag2box.errors import Interrupted, UserError
from tag2box.io import LOCK, wait_for_lock
from tag2box.proposals.base import Candidates, PhotoSource, ProposalMethod
from tag2box.proposals.pool import LocalPool, Pool
from tag2box.proposals.shards import Shards, difference
from tag2box.proposals.store import (
    INDEX,
    ROWS,
    ProposalStore,
    StoreEntry,
    check_candidates,
    remove_older,
    write_entries,
    writing,
)

_REDUCTIONS = 16  # powers of two by which a photo may come reduced


class ReadPhoto(Protocol):
    """Reads a photo, or a copy of it reduced by a power of two that is still as large as asked for."""

    def __call__(self, path: Path, at_least: tuple[int, int] | None = None) -> UInt8[Tensor, "3 H W"]:
        """Upright RGB; ``at_least`` is (width, height)."""
        ...


@dataclass(frozen=True, slots=True)
class Searched:
    """Boxes and scores of a photo, or the problem with it. Arrays: tensors cross between processes less cheaply."""

    boxes: Float32[ndarray, "P 4"] | None
    scores: Float32[ndarray, " P"] | None
    problem: str = ""

    def candidates(self) -> Candidates | None:
        """What was found; None where there was a problem."""
        if self.boxes is None or self.scores is None:
            return None
        # Copies: what comes from another process may be memory that is not to be written.
        return Candidates(torch.from_numpy(self.boxes.copy()), torch.from_numpy(self.scores.copy()))


def search_photo(method: ProposalMethod, read: ReadPhoto, photo: Photo) -> Searched:
    """Propose boxes for a photo."""
    size = (photo.width, photo.height)
    try:
        wanted = method.working_size(size)
        image = read(photo.path, None if wanted == size else wanted)
        _check_size(photo, (image.shape[2], image.shape[1]))
        found = method(image, size)
        check_candidates(f"{photo.path}: photo {photo.id}", size, found)
    except UserError as error:
        return Searched(None, None, str(error))
    except Exception as error:
        # Also what a decoder, OpenCV or an allocator may say of a strange photo: the others must not suffer for it.
        reason = (str(error).splitlines() or [""])[0]
        return Searched(None, None, f"{photo.path}: not searched ({type(error).__name__}: {reason}); mend or remove it")
    return Searched(found.boxes.numpy(), found.scores.numpy())


def crashed(photo: Photo, number: int) -> Searched:
    """A photo whose process did not survive it; the number of the signal is 0 where nobody saw it."""
    name = next((known.name for known in signal.Signals if known.value == number), f"signal {number}")
    ended = f"was ended by {name}" if number else "died, each time it was tried"
    is_memory = name == "SIGKILL" or not number
    hint = "perhaps out of memory; a smaller short_side needs less" if is_memory else "mend or remove it"
    return Searched(None, None, f"{photo.path}: the process that searched it {ended}; {hint}")


def _check_size(photo: Photo, size: tuple[int, int]) -> None:
    """Raise unless an image is the photo, or the photo reduced by a power of two."""
    whole = (photo.width, photo.height)
    for factor in (1 << power for power in range(_REDUCTIONS)):
        if all(abs(side * factor - full) < factor for side, full in zip(size, whole, strict=True)):
            return
    raise UserError(
        f"{photo.path}: {size[0]}x{size[1]} pixels, expected {photo.width}x{photo.height}; read the dataset anew"
    )


SHARDS_FOLDER = "parts"
_TEMPORARY = re.compile(r"\.(boxes|scores|index).*")
_FULL = {errno.ENOSPC, errno.EDQUOT}


class PoolBar(Protocol):
    """Told of every photo done."""

    def advance(self, note: str = "") -> None:
        """One more."""
        ...


class BuildProgress(Protocol):
    """Opens a bar for ``total`` photos of which ``done`` are done already; the engine's ``Progress`` is one."""

    def __call__(self, title: str, total: int, done: int = 0) -> AbstractContextManager[PoolBar]:
        """The bar, for the length of a with block."""
        ...


class _Unseen:
    def advance(self, note: str = "") -> None:
        """Nobody watches."""


@contextmanager
def silent_build(title: str, total: int, done: int = 0) -> Iterator[PoolBar]:
    """No bar."""
    yield _Unseen()


def build_proposals(
    photos: Sequence[Photo],
    method: ProposalMethod,
    out: Path,
    *,
    read: ReadPhoto,
    workers: int | None = None,
    pool: Pool | None = None,
    skip_bad: bool = False,
    progress: BuildProgress = silent_build,
) -> ProposalStore:
    """The store of some photos' proposals: what is missing of it is made, what is there is kept.

    Broken off at any moment, the same call goes on. Photos that are new or changed their size since are added to a
    store that is there; one of other settings is refused. Of several processes, one writes, and the others wait.

    Args:
        read: reads a photo; importable by name, as it crosses to other processes. So does ``method``.
        workers: processes; None takes one per core (for a few photos, this one). The result does not depend on it.
        pool: where else photos are searched, as a Ray cluster. Nor does it on that.
        skip_bad: leave out photos that cannot be searched, and record why, instead of raising at the first.
    """
    _check_distinct(photos)
    _check_folder(out)
    source = json.loads(json.dumps(method.source()))  # as it will be read: tuples become lists
    store = _stored(out, source)
    if store is not None and not _missing(photos, store.sizes):
        with suppress(UserError, OSError):  # a mere reader: another may be writing, or the folder be read-only
            _tidy(out, source)
        return store
    method.ready()
    with _spaced(out), wait_for_lock(out / LOCK, lambda: progress("proposals: another process makes them; waiting", 1)):
        work = _Work(out, source, tuple(photos), _stored(out, source), Shards.open(out / SHARDS_FOLDER, source))
        _sweep(out, work.store)
        with work.interruptible():
            search = partial(search_photo, method, read)
            work.search(search, pool or LocalPool(workers), skip_bad=skip_bad, progress=progress)
            work.finish()
    return ProposalStore.open(out)


@dataclass(slots=True)
class _Work:
    """What is to do in a locked folder, and what is done."""

    out: Path
    source: PhotoSource
    photos: tuple[Photo, ...]
    store: ProposalStore | None
    parts: Shards
    failed: dict[str, str] = field(default_factory=dict)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Keep what is done when Ctrl-C ends the block."""
        try:
            yield
        except KeyboardInterrupt:
            self.parts.flush()
            done = len(self.photos) - len(self._missing())
            raise Interrupted(
                f"{self.out}: {done} of {len(self.photos)} photos are done; the same command goes on"
            ) from None

    def search(
        self, search: Callable[[Photo], Searched], pool: Pool, *, skip_bad: bool, progress: BuildProgress
    ) -> None:
        """Search the photos that neither the store nor the parts have; the parts then have them."""
        missing = self._missing()
        if not missing:
            return
        with (
            progress("proposals", len(self.photos), len(self.photos) - len(missing)) as bar,
            closing(pool(search, missing, lost=crashed)) as results,
        ):
            for photo, searched in results:
                self._take(photo, searched, skip_bad=skip_bad)
                bar.advance()

    def _take(self, photo: Photo, searched: Searched, *, skip_bad: bool) -> None:
        candidates = searched.candidates()
        if candidates is not None:
            self.parts.add(_entry(photo), candidates)
        elif skip_bad:
            self.failed[photo.id] = searched.problem
        else:
            raise UserError(searched.problem)

    def finish(self) -> None:
        """Turn the parts into a store, together with what was in the one before."""
        named = {photo.id for photo in self.photos}
        before = dict(self.store.failed) if self.store else {}
        failed = {name: why for name, why in before.items() if name not in named}
        failed |= {photo.id: self.failed[photo.id] for photo in self.photos if photo.id in self.failed}
        if self.store is None or self.parts.sizes or failed != before:
            entries = [_entry(photo) for photo in self.photos if photo.id not in failed]
            entries += [StoreEntry(name, *size) for name, size in self._kept().items() if name not in named]
            write_entries(self.out, self.source, entries, map(self._candidates, entries), failed=failed)
        self.parts.remove()

    def _candidates(self, entry: StoreEntry) -> Candidates:
        if self.store is None or self.parts.sizes.get(entry.id) == entry.size:
            return self.parts.candidates(entry.id)
        return self.store.candidates(entry.id)

    def _missing(self) -> list[Photo]:
        return _missing(self.photos, {**self._kept(), **self.parts.sizes})

    def _kept(self) -> Mapping[str, tuple[int, int]]:
        return self.store.sizes if self.store else {}


def _entry(photo: Photo) -> StoreEntry:
    return StoreEntry(photo.id, photo.width, photo.height)


def _missing(photos: Sequence[Photo], sizes: Mapping[str, tuple[int, int]]) -> list[Photo]:
    """The photos that are new, or have another size now."""
    return [photo for photo in photos if sizes.get(photo.id) != (photo.width, photo.height)]


def _stored(out: Path, source: PhotoSource) -> ProposalStore | None:
    """The store that is there; one of another source is refused."""
    if not ProposalStore.exists(out):
        return None
    store = ProposalStore.open(out)
    if store.source != source:
        raise UserError(f"{out}: {difference(store.source, source)}; remove it, or name another folder")
    return store


# ---------------------------------------------------------------- the folder


def _check_distinct(photos: Sequence[Photo]) -> None:
    repeated = len(photos) - len({photo.id for photo in photos})
    if repeated:
        raise UserError(f"{repeated} photos share an id with another; give the photos distinct names")


def _check_folder(out: Path) -> None:
    """Raise if a folder holds anything but proposals, so that nothing of a user's is mixed up with them."""
    for path in out.iterdir() if out.is_dir() else ():
        if not (
            path.name in {SHARDS_FOLDER, LOCK, INDEX} or ROWS.fullmatch(path.name) or _TEMPORARY.fullmatch(path.name)
        ):
            raise UserError(f"{out}: holds {path.name}, which is no part of a proposal store; name a folder of its own")


def _tidy(out: Path, source: PhotoSource) -> None:
    """Sweep up after work that was killed when its store was ready already."""
    names = {path.name for path in out.iterdir()}
    if names & {SHARDS_FOLDER, LOCK} or any(map(_TEMPORARY.fullmatch, names)):
        with writing(out):
            _sweep(out, _stored(out, source))
            Shards.open(out / SHARDS_FOLDER, source).remove()


def _sweep(out: Path, store: ProposalStore | None) -> None:
    """Remove what a killed process was writing."""
    for path in list(out.iterdir()):
        if _TEMPORARY.fullmatch(path.name):
            path.unlink()
    if store is not None:
        remove_older(out, store.generation)


@contextmanager
def _spaced(out: Path) -> Iterator[None]:
    """Say in a line that the disk is full."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise UserError(f"{out}: no space left on the disk; free some, and the same command goes on") from None
