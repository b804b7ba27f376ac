"""One at a time: work that two processes must not do in the same place at once."""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from tag2box.errors import Busy, UserError

LOCK = ".lock"
_WITHOUT = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
PAUSE = 0.5  # seconds between two looks at a lock that another holds


@contextmanager
def locked(path: Path, work: str) -> Iterator[None]:
    """Hold a lock file for the length of a block; the system lets go of it when the process ends, however it ends.

    Raises ``Busy`` where another process holds it; ``work`` is what it does, as "writes proposals".
    """
    handle = _hold(path)
    if handle is None:
        raise Busy(f"{path.parent}: another process {work} here; wait until it is done")
    with _held(path, handle):
        yield


@contextmanager
def in_turn(path: Path, waiting: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Hold a lock file as soon as no other process does; the time until then is spent within ``waiting()``."""
    handle = _hold(path)
    if handle is None:
        with waiting():
            while handle is None:
                time.sleep(PAUSE)
                handle = _hold(path)
    with _held(path, handle):
        yield


def is_locked(path: Path) -> bool:
    """Whether a process holds a lock file now."""
    if not path.exists():
        return False
    handle = _hold(path)
    if handle is None:
        return True
    with _held(path, handle):
        return False


@contextmanager
def _held(path: Path, handle: int) -> Iterator[None]:
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)


def _hold(path: Path) -> int | None:
    folder = path.parent
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: is a file; expected a folder, name another")
    folder.mkdir(parents=True, exist_ok=True)
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _lock(handle)
        except BlockingIOError:
            os.close(handle)
            return None
        if _is_named(handle, path):
            return handle
        os.close(handle)


def _is_named(handle: int, path: Path) -> bool:
    """Whether the locked file is still there: one that its last holder removed keeps nobody out."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _lock(handle: int) -> None:
    """Raises ``BlockingIOError`` where another holds it. Systems and disks without such locks keep nobody out."""
    if sys.platform == "win32":
        return
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _WITHOUT:
            raise
