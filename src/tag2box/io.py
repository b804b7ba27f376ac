"""Files: atomic writes, checked reads of text and JSON, and lock files between processes.

A file is written under a temporary name beside its destination and then renamed, so readers see either the old content
or the new. Errors in files that users provide are UserErrors that name the file and what was expected of it.
"""

import errno
import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from tag2box.errors import Busy, UserError, printable

# ---------------------------------------------------------------- writing


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; rename it to ``path`` if the block succeeds, else remove it.

    The content is on disk before the rename, and the rename before the block ends: a power cut leaves the old file or
    the new one. The file has the permissions of the user's umask.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk. Folders cannot be flushed on Windows."""
    if os.name == "nt" and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def apply_umask(path: Path) -> None:
    """Give a file that another library created the permissions of the user's umask."""
    probe = path.with_name(f".{path.name}.{os.getpid()}")
    probe.touch()
    path.chmod(probe.stat().st_mode)
    probe.unlink()


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: object) -> None:
    """Write a JSON file atomically. JSON has no NaN: use None."""
    write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


# ---------------------------------------------------------------- reading


def read_text(path: Path, what: str) -> str:
    """Read a UTF-8 text file without its byte order mark; ``what`` names the expected content in errors."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; expected {what}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not readable as UTF-8 text ({printable(str(error))}); expected {what}") from None
    if "\0" in text:
        raise UserError(f"{path}: holds NUL bytes, so it is no text; expected {what}")
    return text


def read_lines(path: Path, what: str) -> dict[int, str]:
    """The stripped lines of a text file that are not blank, by line number from 1."""
    lines = read_text(path, what).splitlines()
    return {number: line.strip() for number, line in enumerate(lines, start=1) if line.strip()}


def read_json(path: Path, what: str) -> Any:
    """Read a JSON file; ``what`` names the expected content in errors."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; expected {what}") from None
    except (OSError, ValueError) as error:  # not text, not JSON, or a number of thousands of digits
        raise UserError(f"{path}: not readable as JSON ({error}); expected {what}") from None
    except RecursionError:
        why = "brackets nested too deeply"
        raise UserError(f"{path}: not readable as JSON ({why}); expected {what}") from None


# ---------------------------------------------------------------- locks

LOCK = ".lock"
"""Usual name of a lock file."""
LOCK_POLL_SECONDS = 0.5
_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


@contextmanager
def locked(path: Path, work: str) -> Iterator[None]:
    """Hold a lock file for the duration of the block; the operating system releases it if the process dies.

    Raises ``Busy`` if another process holds it; ``work`` describes what that process does, as in "writes proposals".
    """
    handle = _acquire(path)
    if handle is None:
        raise Busy(f"{path.parent}: another process {work} here; wait until it is done")
    with _released(path, handle):
        yield


@contextmanager
def wait_for_lock(path: Path, waiting: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Hold a lock file as soon as no other process does; the wait, if any, happens inside ``waiting()``."""
    handle = _acquire(path)
    if handle is None:
        with waiting():
            while handle is None:
                time.sleep(LOCK_POLL_SECONDS)
                handle = _acquire(path)
    with _released(path, handle):
        yield


def is_locked(path: Path) -> bool:
    """Whether a process holds a lock file now."""
    if not path.exists():
        return False
    handle = _acquire(path)
    if handle is None:
        return True
    with _released(path, handle):
        return False


@contextmanager
def _released(path: Path, handle: int) -> Iterator[None]:
    """Remove and release an acquired lock file at the end of the block."""
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)


def _acquire(path: Path) -> int | None:
    """The handle of the locked file; None if another process holds it."""
    folder = path.parent
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: is a file; expected a folder, name another")
    folder.mkdir(parents=True, exist_ok=True)
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _flock(handle)
        except BlockingIOError:
            os.close(handle)
            return None
        if _is_current(handle, path):
            return handle
        os.close(handle)


def _is_current(handle: int, path: Path) -> bool:
    """Whether the locked file still has its name: a file removed by its last holder excludes no other process."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _flock(handle: int) -> None:
    """Raise ``BlockingIOError`` if another process holds the lock. Without OS support nothing is excluded."""
    if sys.platform == "win32":
        return
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
