"""Building a proposal store: photos are searched in parallel, and an interrupted build resumes.

Finished photos are kept as shards in the store's folder until all are done. Photos that are new, or whose size or
content has changed, are added to an existing store.
"""

import json
import re
import signal
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Float32, UInt8

from tag2box import io, storage
from tag2box.annotations import Photo
from tag2box.errors import Interrupted, UserError
from tag2box.parallel.pool import LocalPool, Pool
from tag2box.progress import Progress, silent
from tag2box.proposals import shards, store
from tag2box.proposals.base import Candidates, ProposalMethod, ProposalSource

SHARDS_FOLDER = "parts"
_MAX_REDUCTIONS = 16  # powers of two by which an image may be reduced while it is decoded
_TEMPORARY = re.compile(r"\.(boxes|scores|index).*|\..+\.([0-9a-f]{6}-)?[0-9]{1,10}-[0-9a-f]{8}")


class ReadPhoto(Protocol):
    """Decodes a photo, optionally reduced by a power of two to a size that is still at least the requested one."""

    def __call__(self, path: Path, at_least: tuple[int, int] | None = None) -> UInt8[torch.Tensor, "3 H W"]:
        """Upright RGB; ``at_least`` is (width, height)."""
        ...


def build_proposals(  # noqa: PLR0913 - what to search, with what, where
    photos: Sequence[Photo],
    method: ProposalMethod,
    out: Path,
    *,
    read: ReadPhoto,
    workers: int | None = None,
    pool: Pool | None = None,
    skip_bad: bool = False,
    any_store: bool = True,
    progress: Progress = silent,
) -> store.ProposalStore:
    """Build the proposal store of some photos, or complete an existing one.

    The same call resumes after an interruption. A store made with other settings is refused. Of several processes that
    build the same store, one works and the others wait.

    Args:
        read: decodes a photo; importable by name, because it is pickled for other processes, as ``method`` is.
        workers: number of processes; None starts up to one per core. The store does not depend on it, nor on ``pool``.
        pool: another executor, such as a Ray cluster.
        skip_bad: record photos that cannot be searched as failed, instead of raising at the first.
        any_store: add the photos even to a store that has none of them, and so was made for another dataset.
    """
    _check_distinct(photos)
    _check_folder(out)
    source = json.loads(json.dumps(method.source()))  # as it is read back: tuples become lists
    stored = _open_store(out, source)
    if stored is not None and all(map(stored.holds, photos)):
        with suppress(UserError, OSError):  # the folder may be read-only, or locked by a writer
            _clean_up(out, source)
        return stored
    method.ready()
    waiting = partial(progress, "proposals: another process makes them; waiting", 1)
    with storage.writing(out), io.wait_for_lock(out / io.LOCK, waiting):
        stored = _open_store(out, source)
        build = _Build(out, source, tuple(photos), stored, shards.Shards.open(out / SHARDS_FOLDER, source))
        if not any_store:
            build.check_related()
        _remove_temporary(out, stored)
        with build.flushed_on_interrupt():
            build.search(partial(search_photo, method, read), pool or LocalPool(workers), skip_bad, progress)
            build.finish()
    return store.ProposalStore.open(out)


# ---------------------------------------------------------------- one photo


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Boxes and scores of a photo, or the problem with it. Arrays, because tensors are costly to send to processes."""

    boxes: Float32[np.ndarray, "P 4"] | None
    scores: Float32[np.ndarray, " P"] | None
    problem: str = ""
    stamp: storage.FileStamp | None = None  # of the file that was searched

    def candidates(self) -> Candidates | None:
        """Boxes and scores as tensors; None if there was a problem."""
        if self.boxes is None or self.scores is None:
            return None
        # Copies, because arrays from other processes may be read-only.
        return Candidates(torch.from_numpy(self.boxes.copy()), torch.from_numpy(self.scores.copy()))


def search_photo(method: ProposalMethod, read: ReadPhoto, photo: Photo) -> SearchResult:
    """Propose boxes for a photo; every error becomes a one-line problem."""
    size = (photo.width, photo.height)
    stamp = store.StoreEntry.of(photo).stamp  # before the photo is read: one that changes meanwhile is searched again
    try:
        working = method.working_size(size)
        image = read(photo.path, None if working == size else working)
        _check_size(photo, (image.shape[2], image.shape[1]))
        found = method.propose(photo.id, image, size)
        store.check_candidates(f"{photo.path}: photo {photo.id}", size, found)
    except UserError as error:
        return SearchResult(None, None, str(error))
    except Exception as error:
        # Including errors of decoders, OpenCV and allocators: one bad photo must not stop the others.
        reason = (str(error).splitlines() or [""])[0]
        problem = f"{photo.path}: not searched ({type(error).__name__}: {reason}); repair or remove it"
        return SearchResult(None, None, problem)
    return SearchResult(found.boxes.numpy(), found.scores.numpy(), stamp=stamp)


def crashed_search(photo: Photo, number: int) -> SearchResult:
    """Result of a photo whose process died, given the number of the signal (0 if unknown)."""
    name = next((known.name for known in signal.Signals if known.value == number), f"signal {number}")
    ended = f"was ended by {name}" if number else "died on every attempt"
    is_memory = name == "SIGKILL" or not number
    hint = "perhaps out of memory; a smaller short_side needs less" if is_memory else "repair or remove it"
    return SearchResult(None, None, f"{photo.path}: the process that searched it {ended}; {hint}")


def _check_size(photo: Photo, size: tuple[int, int]) -> None:
    """Raise unless an image has the size of the photo, or that size reduced by a power of two."""
    whole = (photo.width, photo.height)
    for factor in (1 << power for power in range(_MAX_REDUCTIONS)):
        if all(abs(side * factor - full) < factor for side, full in zip(size, whole, strict=True)):
            return
    raise UserError(
        f"{photo.path}: {size[0]}x{size[1]} pixels, expected {photo.width}x{photo.height}; read the dataset again"
    )


# ---------------------------------------------------------------- all photos


_Holder = store.ProposalStore | shards.Shards


@dataclass(slots=True)
class _Build:
    """State of a build in a locked folder."""

    out: Path
    source: ProposalSource
    photos: tuple[Photo, ...]
    stored: store.ProposalStore | None
    shards: shards.Shards
    failed: dict[str, str] = field(default_factory=dict)
    done: dict[str, tuple[store.StoreEntry, _Holder]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Find the photos that were searched before, and are unchanged."""
        holders: list[_Holder] = [self.shards] if self.stored is None else [self.stored, self.shards]
        for holder in holders:
            for photo in self.photos:
                entry = holder.entry(photo.id)
                current = None if entry is None else entry.updated(photo)
                if current is not None:
                    self.done[photo.id] = (current, holder)

    def check_related(self) -> None:
        """Raise if there are proposals of other photos only."""
        others = self.stored.failed if self.stored else {}
        if self.done or any(photo.id in others for photo in self.photos):
            return
        count = len(self.shards.entries) + (len(self.stored) if self.stored else 0)
        if count:
            raise UserError(
                f"{self.out}: holds proposals of {count:,} other photos and of none of these {len(self.photos):,}; "
                f"name another store, or add the photos with `tag2box propose DATA --out {self.out}`"
            )

    @contextmanager
    def flushed_on_interrupt(self) -> Iterator[None]:
        """Save finished photos if Ctrl-C ends the block."""
        try:
            yield
        except KeyboardInterrupt:
            self.shards.flush()
            raise Interrupted(
                f"{self.out}: {len(self.done)} of {len(self.photos)} photos are done; rerun the same command to resume"
            ) from None

    def search(self, search: Callable[[Photo], SearchResult], pool: Pool, skip_bad: bool, progress: Progress) -> None:
        """Search the photos that are neither in the store nor in the shards, and add them to the shards."""
        missing = [photo for photo in self.photos if photo.id not in self.done]
        if not missing:
            return
        with (
            progress("proposals", len(self.photos), len(self.photos) - len(missing)) as bar,
            closing(pool(search, missing, lost=crashed_search)) as results,
        ):
            for photo, result in results:
                self._add(photo, result, skip_bad=skip_bad)
                bar.advance()

    def _add(self, photo: Photo, result: SearchResult, *, skip_bad: bool) -> None:
        candidates = result.candidates()
        if candidates is not None:
            entry = store.StoreEntry(photo.id, photo.width, photo.height, result.stamp)
            self.done[photo.id] = (entry, self.shards)
            self.shards.add(entry, candidates)
        elif skip_bad:
            self.failed[photo.id] = result.problem
        else:
            raise UserError(result.problem)

    def finish(self) -> None:
        """Merge the existing store and the shards into a new store."""
        named = {photo.id for photo in self.photos}
        before = dict(self.stored.failed) if self.stored else {}
        failed = {name: why for name, why in before.items() if name not in named}
        failed |= {photo.id: self.failed[photo.id] for photo in self.photos if photo.id in self.failed}
        if self.stored is None or self.shards.entries or failed != before:
            store.write_entries(self.out, self.source, self._found(named), failed=failed)
        self.shards.remove()

    def _found(self, named: Set[str]) -> Iterator[tuple[store.StoreEntry, Candidates]]:
        """Entries and boxes of the photos in order, then those of the photos that only the existing store has."""
        for photo in self.photos:
            if photo.id in self.done:
                entry, holder = self.done[photo.id]
                yield entry, holder.candidates(photo.id)
        if self.stored is not None:
            for name in self.stored.sizes:
                kept = self.stored.entry(name) if name not in named else None
                if kept is not None:
                    yield kept, self.stored.candidates(name)


# ---------------------------------------------------------------- the folder


def _open_store(out: Path, source: ProposalSource) -> store.ProposalStore | None:
    """The existing store, if any; raises a UserError if it was made from another source."""
    if not store.ProposalStore.exists(out):
        return None
    stored = store.ProposalStore.open(out)
    if stored.source != source:
        difference = shards.source_difference(stored.source, source)
        raise UserError(f"{out}: {difference}; remove it, or name another folder")
    return stored


def _check_distinct(photos: Sequence[Photo]) -> None:
    repeated = len(photos) - len({photo.id for photo in photos})
    if repeated:
        raise UserError(f"{repeated} photos share an id with another; give the photos distinct names")


def _check_folder(out: Path) -> None:
    """Raise if a folder contains files other than a store's, so that users' files are never mixed with proposals."""
    for path in out.iterdir() if out.is_dir() else ():
        is_plain = path.name in {SHARDS_FOLDER, io.LOCK, store.INDEX}
        if not (is_plain or store.is_array(path) or _TEMPORARY.fullmatch(path.name)):
            raise UserError(f"{out}: holds {path.name}, which is no part of a proposal store; name a folder of its own")


def _clean_up(out: Path, source: ProposalSource) -> None:
    """Remove what a build left behind that was killed after its store was complete."""
    names = {path.name for path in out.iterdir()}
    if names & {SHARDS_FOLDER, io.LOCK} or any(map(_TEMPORARY.fullmatch, names)):
        with store.store_lock(out):
            _remove_temporary(out, _open_store(out, source))
            shards.Shards.open(out / SHARDS_FOLDER, source).remove()


def _remove_temporary(out: Path, stored: store.ProposalStore | None) -> None:
    """Remove the incomplete files of a killed process."""
    for path in list(out.iterdir()):
        if _TEMPORARY.fullmatch(path.name):
            path.unlink()
    if stored is not None:
        store.remove_old_arrays(out, stored.generation)
