"""Files written beside their place and renamed into it: a reader sees the old content or the new, never half."""

from __future__ import annotations

import errno
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from tag2box.errors import Busy, UserError
from tag2box.formats.listing import printable


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; rename it into place if the block succeeds, else remove it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: object) -> None:
    """Write JSON whole or not at all. NaN has no place in JSON: use None."""
    write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def read_json(path: Path, what: str) -> Any:
    """Read a JSON file a user named; ``what`` says in the error what it should have been."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; expected {what}") from None
    except (OSError, ValueError) as error:  # not text, not JSON, or a number of thousands of digits
        raise UserError(f"{path}: not readable as JSON ({error}); expected {what}") from None
    except RecursionError:
        why = "brackets within brackets without end"
        raise UserError(f"{path}: not readable as JSON ({why}); expected {what}") from None


def read_text(path: Path, what: str) -> str:
    """The text of a file a user named, without a byte order mark; ``what`` says in the error what was expected."""
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
    """Stripped lines that are not blank, by their numbers from 1."""
    lines = read_text(path, what).splitlines()
    return {number: line.strip() for number, line in enumerate(lines, start=1) if line.strip()}


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
def wait_for_lock(path: Path, waiting: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
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
