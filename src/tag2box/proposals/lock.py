"""One writer at a time in a folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tag2box.errors import UserError

LOCK = ".lock"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder against other writers; the system lets go of it when the process ends, however it ends."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: is a file; expected a folder for the proposals, name another")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK
    handle = _hold(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)


def _hold(path: Path) -> int:
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _lock(handle)
        except OSError:
            os.close(handle)
            raise UserError(f"{path.parent}: another process writes proposals here; wait until it is done") from None
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
    if sys.platform != "win32":
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
