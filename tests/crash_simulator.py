"""A crash simulator: what a power cut may leave of a storage action, and whether the product's reader opens it.

    recording = record(folder, lambda done: (io.write_json(folder / "a.json", 1), done()))
    report = check(recording, read, versions=[None, 1])
    assert not report.broken

The model is that of ALICE (Pillai et al., OSDI 2014) and CrashMonkey (Mohan et al., OSDI 2018), at a small scale.

Recording. The folder is scanned before and after every call that changes files (``os.open``, ``rename``, ``unlink``,
``mkdir``, ..., ``open`` for writing) and at every ``fsync``; the difference between two scans is what happened, so
libraries that write without Python (safetensors) are seen, too. The log has four kinds of operations: names that
changed (a creation, a removal, or a rename, which is one operation), the content of a file that changed, an ``fsync``
of a file or a folder, and ``done``: the writer has reported success.

Replay. The power is cut after each operation of the log. What POSIX guarantees then, and nothing more:

- The content of a file is that of its last fsync, or any later one, or empty, cut short, zeros of the right length, or
  its first half new and the rest old.
- A change of names is there if its folder was fsynced since. Every other change may be there or not, each independently
  of all others: file systems reorder them. A rename is atomic: both names change, or none.
- An fsync of a file does not keep its name, and an fsync of a folder does not keep the content of its files.

This is harsher than ext4 or XFS, which order changes of names by their log. All combinations are built if there are
few, else the extreme ones and a sample from a fixed seed. Equal states are opened once, and at most 48 after each
operation.

Each state must open as the last version that was reported as written or, if the power was cut during the next write, as
that one. Anything else (an error, a mixture, an older version) is broken.
"""

from __future__ import annotations

import builtins
import hashlib
import io
import itertools
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

CHANGING = ("replace", "rename", "unlink", "remove", "mkdir", "rmdir", "link", "symlink", "truncate", "ftruncate")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
ALL_SUBSETS = 5  # changes of names of which all subsets are tried; of more, a sample
ALL_CONTENTS = 40  # combinations of contents that are all tried
SAMPLE = 24
MOST = 48  # states after one operation
NEXT_WRITES = 4  # one of so many states is written to again
MEMORY = Path("/dev/shm")  # where states are built, if it exists: a disk takes longer to remove them than to open them
NO_PROCESS = 1 << 23  # above the largest process id: after a power cut, no owner of a temporary file is alive


@dataclass(frozen=True)
class Names:
    """Names that change at once: (folder, name, file or None). Files and folders are inode numbers."""

    changes: tuple[tuple[int, str, int | None], ...]

    @property
    def folders(self) -> set[int]:
        """Folders whose fsync keeps the change: that of the new name or, if there is none, of the removed one."""
        new = {folder for folder, _, file in self.changes if file is not None}
        return new or {folder for folder, _, _ in self.changes}


@dataclass(frozen=True)
class Content:
    """The whole new content of a file."""

    file: int
    content: bytes


@dataclass(frozen=True)
class Sync:
    """An fsync of a file or a folder."""

    file: int


@dataclass(frozen=True)
class Done:
    """The writer reported success."""


Operation = Names | Content | Sync | Done
Folders = dict[int, dict[str, int]]  # the names in each folder


@dataclass
class Recording:
    """The folder before the action, and the operations of the action."""

    root: int
    folders: Folders
    contents: dict[int, bytes]
    log: list[Operation] = field(default_factory=list)
    is_folder: set[int] = field(default_factory=set)

    def without(self, *positions: int) -> Recording:
        """The same action without the operations at some positions, such as an fsync that was forgotten."""
        return replace(self, log=[operation for i, operation in enumerate(self.log) if i not in positions])

    @property
    def syncs(self) -> list[int]:
        """Positions of the fsyncs."""
        return [i for i, operation in enumerate(self.log) if isinstance(operation, Sync)]


# ---------------------------------------------------------------- recording


def record(root: Path, action: Callable[[Callable[[], None]], object]) -> Recording:
    """Run an action on files below ``root``; it calls its argument each time a write has succeeded."""
    recorder = _Recorder(root)
    try:
        with recorder.patched():
            action(recorder.done)
            recorder.observe()
    finally:
        recorder.close()
    return recorder.recording


class _Recorder:
    def __init__(self, root: Path) -> None:
        self._root, self._open, self._busy = root, os.open, False
        self._handles: dict[int, int] = {}  # kept open, so that no inode number is used twice
        self._folders, self._contents = self._scan()
        start = {folder: dict(names) for folder, names in self._folders.items()}
        self.recording = Recording(root.stat().st_ino, start, dict(self._contents), is_folder=set(start))

    def close(self) -> None:
        for handle in self._handles.values():
            os.close(handle)

    def done(self) -> None:
        self.observe()
        self.recording.log.append(Done())

    @contextmanager
    def patched(self) -> Iterator[None]:
        with ExitStack() as stack:
            for name in CHANGING:
                stack.enter_context(patch.object(os, name, self._observed(getattr(os, name))))
            stack.enter_context(patch.object(os, "open", self._observed(os.open, _opens_for_writing)))
            for name in ("fsync", "fdatasync"):
                stack.enter_context(patch.object(os, name, self._sync))
            opening = self._observed(io.open, _opens_text_for_writing)
            stack.enter_context(patch.object(io, "open", opening))
            stack.enter_context(patch.object(builtins, "open", opening))
            yield

    def _observed(
        self, function: Callable[..., Any], changes: Callable[..., bool] = lambda *_, **__: True
    ) -> Callable[..., Any]:
        def observed(*args: Any, **kwargs: Any) -> Any:
            if self._busy or not changes(*args, **kwargs):
                return function(*args, **kwargs)
            self.observe()
            try:
                return function(*args, **kwargs)
            finally:
                self.observe()

        return observed

    def _sync(self, handle: Any) -> None:
        self.observe()
        file = os.fstat(handle if isinstance(handle, int) else handle.fileno()).st_ino
        if file in self._contents or file in self._folders:
            self.recording.log.append(Sync(file))

    def observe(self) -> None:
        """Append the difference to the last scan to the log."""
        self._busy = True
        try:
            folders, contents = self._scan()
        finally:
            self._busy = False
        self.recording.log += _changed_names(self._folders, folders)
        for file, content in contents.items():
            if content != self._contents.get(file, b""):
                self.recording.log.append(Content(file, content))
        self._folders, self._contents = folders, self._contents | contents
        self.recording.is_folder.update(folders)

    def _scan(self) -> tuple[Folders, dict[int, bytes]]:
        folders: Folders = {}
        contents: dict[int, bytes] = {}
        waiting = [self._root]
        while waiting:
            folder = waiting.pop()
            names = folders.setdefault(folder.stat().st_ino, {})
            for path in sorted(folder.iterdir()):
                inode = names[path.name] = path.lstat().st_ino
                if inode not in self._handles:
                    self._handles[inode] = self._open(path, os.O_RDONLY)
                if path.is_dir():
                    waiting.append(path)
                else:
                    contents[inode] = path.read_bytes()
        return folders, contents


def _opens_for_writing(path: object, flags: int, *_: object, **__: object) -> bool:
    return bool(flags & WRITING)


def _opens_text_for_writing(file: object, mode: str = "r", *_: object, **__: object) -> bool:
    return not set(mode).isdisjoint("wax+")


def _changed_names(before: Folders, after: Folders) -> list[Operation]:
    """One operation per file whose names changed: a rename changes two of them."""
    was = {(folder, name): file for folder, names in before.items() for name, file in names.items()}
    now = {(folder, name): file for folder, names in after.items() for name, file in names.items()}
    changed = [place for place in was | now if was.get(place) != now.get(place)]
    operations: dict[int, list[tuple[int, str, int | None]]] = {}
    for place in changed:  # what appears, by its file
        if place in now:
            operations.setdefault(now[place], []).append((*place, now[place]))
    for place in changed:  # what disappears: part of a rename if the file appears elsewhere
        if place not in now:
            operations.setdefault(was[place], []).append((*place, None))
    return [Names(tuple(changes)) for changes in operations.values()]


# ---------------------------------------------------------------- replay

Tree = dict[str, "bytes | Tree"]  # a folder as names with contents


@dataclass(frozen=True)
class Report:
    """How many states were opened, and what is wrong with some of them."""

    states: int
    broken: tuple[str, ...]


def check(
    recording: Recording,
    read: Callable[[Path], object],
    versions: Sequence[object],
    *,
    then: Callable[[Path], object] | None = None,
    stop_at_first: bool = False,
) -> Report:
    """Open every state that a power cut may leave.

    Args:
        read: what the product reads in a folder: equal to the version that was written there.
        versions: what ``read`` returns before the action, after its first ``done``, after the second, ...
        then: the next write after a restart; it must end with the last version, whatever was left. Tried on a sample.
        stop_at_first: do not look for more after the first broken state.
    """
    opened: set[tuple[str, int]] = set()
    broken: list[str] = []
    for position in range(len(recording.log) + 1):
        written = sum(isinstance(operation, Done) for operation in recording.log[:position])
        for tree in _new_states(recording, position, written, opened):
            problem = _problem(tree, read, versions[written : written + 2])
            if then is not None and not problem and int(_fingerprint(tree), 16) % NEXT_WRITES == 0:
                problem = _problem_of_next(tree, read, versions[-1], then)
            if problem:
                after = recording.log[position - 1] if position else "nothing"
                broken.append(f"power cut after {str(after)[:80]} ({position}): {problem}; files: {_listing(tree)}")
            if problem and stop_at_first:
                return Report(len(opened), tuple(broken))
    return Report(len(opened), tuple(broken))


def _new_states(recording: Recording, position: int, written: int, opened: set[tuple[str, int]]) -> Iterator[Tree]:
    """The states after an operation that were not opened before, up to MOST; the extreme ones come first."""
    count = 0
    for tree in crash_states(recording, position):
        key = (_fingerprint(tree), written)
        if key not in opened:
            opened.add(key)
            yield tree
            count += 1
        if count == MOST:
            return


def _problem(tree: Tree, read: Callable[[Path], object], allowed: Sequence[object]) -> str:
    with _on_disk(tree) as folder:
        try:
            found = read(folder)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "" if found in allowed else f"opens as {str(found)[:80]}"


def _problem_of_next(
    tree: Tree, read: Callable[[Path], object], expected: object, then: Callable[[Path], object]
) -> str:
    with _on_disk(tree) as folder:
        try:
            then(folder)
            found = read(folder)
        except Exception as error:
            return f"{type(error).__name__} in the next write: {error}"
        left = [path.name for path in folder.rglob("*") if f"-{NO_PROCESS}-" in path.name]
        if left:
            return f"the next write leaves {left[0]}"
        return "" if found == expected else f"opens as {str(found)[:80]} after the next write"


@contextmanager
def _on_disk(tree: Tree) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(dir=MEMORY if MEMORY.is_dir() else None))
    try:
        write_tree(tree, folder)
        yield folder
    finally:
        shutil.rmtree(folder)


def crash_states(recording: Recording, position: int) -> Iterator[Tree]:
    """Every state that a power cut may leave after the first operations of the log; many are equal."""
    log = recording.log[:position]
    pending = _pending_names(log)
    contents = _possible_contents(recording, log)
    for lost in _subsets(pending, position):
        folders = _folders_without(recording, log, lost)
        files = sorted({file for file in _reachable(folders, recording.root) if file in contents})
        for chosen in _combinations([contents[file] for file in files], position):
            yield _tree(folders, recording.root, dict(zip(files, chosen, strict=True)))


def _pending_names(log: Sequence[Operation]) -> list[int]:
    """Positions of the changes of names that may be lost: not all their folders were fsynced since."""
    pending: dict[int, set[int]] = {}
    for position, operation in enumerate(log):
        if isinstance(operation, Names):
            pending[position] = set(operation.folders)
        elif isinstance(operation, Sync):
            for folders in pending.values():
                folders.discard(operation.file)
    return [position for position, folders in pending.items() if folders]


def _possible_contents(recording: Recording, log: Sequence[Operation]) -> dict[int, list[bytes]]:
    """What each file may hold."""
    safe, later = dict(recording.contents), dict[int, list[bytes]]()
    for operation in log:
        if isinstance(operation, Content):
            later.setdefault(operation.file, []).append(operation.content)
        elif isinstance(operation, Sync) and operation.file in later:
            safe[operation.file] = later.pop(operation.file)[-1]
        elif isinstance(operation, Names):
            for _, _, file in operation.changes:
                if file is not None and file not in recording.is_folder:
                    safe.setdefault(file, b"")
    return {file: _torn(old, later.get(file, [])) for file, old in safe.items()}


def _torn(old: bytes, later: Sequence[bytes]) -> list[bytes]:
    if not later:
        return [old]
    last = later[-1]
    half = len(last) // 2
    found = [last, old, b"", last[:half], last[:-1], bytes(len(last)), last[:half] + old[half:], *later[:-1]]
    if last.startswith(old):  # appended: what was there is not written again
        found = [last, old, last[: (len(old) + len(last)) // 2], last[:-1], old + bytes(len(last) - len(old)), *later]
    return list(dict.fromkeys(found))


def _subsets(pending: Sequence[int], seed: int) -> Iterator[frozenset[int]]:
    """Sets of changes to lose: all, or the extreme ones and a sample."""
    if len(pending) <= ALL_SUBSETS:
        for count in range(len(pending) + 1):
            yield from map(frozenset, itertools.combinations(pending, count))
        return
    everything, rng = frozenset(pending), random.Random(seed)
    yield frozenset()
    yield everything
    for i, position in enumerate(pending):
        yield from (frozenset({position}), everything - {position}, frozenset(pending[i:]), frozenset(pending[:i]))
    for _ in range(SAMPLE):
        yield frozenset(position for position in pending if rng.random() < 0.5)


def _combinations(choices: Sequence[Sequence[bytes]], seed: int) -> Iterator[tuple[bytes, ...]]:
    """One content per file: all combinations, or the extreme ones and a sample."""
    total = 1
    for some in choices:
        total *= len(some)
    if total <= ALL_CONTENTS:
        yield from itertools.product(*choices)
        return
    rng = random.Random(seed)
    newest = [some[0] for some in choices]
    for i, some in enumerate(choices):
        yield from ((*newest[:i], content, *newest[i + 1 :]) for content in some)
    for _ in range(SAMPLE):
        yield tuple(rng.choice(some) for some in choices)


def _folders_without(recording: Recording, log: Sequence[Operation], lost: frozenset[int]) -> Folders:
    folders = {folder: dict(names) for folder, names in recording.folders.items()}
    for position, operation in enumerate(log):
        if not isinstance(operation, Names) or position in lost:
            continue
        for folder, name, file in operation.changes:
            names = folders.setdefault(folder, {})
            if file is None:
                names.pop(name, None)
            else:
                names[name] = file
    return folders


def _reachable(folders: Folders, root: int) -> Iterator[int]:
    for file in folders.get(root, {}).values():
        yield file
        yield from _reachable(folders, file)


def _tree(folders: Folders, root: int, contents: dict[int, bytes]) -> Tree:
    return {
        name.replace(f"-{os.getpid()}-", f"-{NO_PROCESS}-"): contents[file]
        if file in contents
        else _tree(folders, file, contents)
        for name, file in folders.get(root, {}).items()
    }


def write_tree(tree: Tree, folder: Path) -> None:
    """Write a state to a folder."""
    folder.mkdir(exist_ok=True)
    for name, content in tree.items():
        if isinstance(content, bytes):
            (folder / name).write_bytes(content)
        else:
            write_tree(content, folder / name)


def _fingerprint(tree: Tree) -> str:
    parts = [
        f"{name!r}:{hashlib.sha256(content).hexdigest() if isinstance(content, bytes) else _fingerprint(content)}"
        for name, content in sorted(tree.items())
    ]
    return hashlib.sha256("\n".join(["folder", *parts]).encode()).hexdigest()


def _listing(tree: Tree) -> str:
    parts = (
        f"{name} ({len(content)} bytes)" if isinstance(content, bytes) else f"{name}/[{_listing(content)}]"
        for name, content in sorted(tree.items())
    )
    return ", ".join(parts)
