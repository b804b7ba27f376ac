"""Files: atomic and durable writes, checked reads of text and JSON, and lock files between processes.

A file is written under a temporary name beside its destination and then renamed, so readers see either the old content
or the new. Errors in files that users provide are UserErrors that name the file and what was expected of it.
"""

import errno
import hashlib
import json
import os
import platform
import re
import secrets
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from tag2box.errors import Busy, UserError, printable

# ---------------------------------------------------------------- writing

_ABANDONED_SECONDS = 7 * 24 * 3600
_TEMPORARY = re.compile(r"\.(?:(?P<host>[0-9a-f]{6})-)?(?P<pid>[0-9]{1,10})-[0-9a-f]{8}$")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; rename it to ``path`` if the block succeeds, else remove it.

    The content is on disk before the rename, and the rename before the block ends: a power cut leaves the old file or
    the new one. The file has the permissions of the user's umask.
    """
    make_folder(path.parent)
    temporary = temporary_path(path)
    os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    except OSError as error:
        error.filename = error.filename or str(path)  # a full disk is reported without it
        raise
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder beside ``path``; if the block succeeds, rename it to ``path``, which must not exist.

    Every file in it, at any depth, is on disk before the rename, and has the permissions of the user's umask.
    """
    make_folder(path.parent)
    temporary = temporary_path(path)
    temporary.mkdir()
    try:
        yield temporary
        for file in [file for file in sorted(temporary.rglob("*")) if not file.is_symlink()]:
            if file.is_file():
                apply_umask(file)
            sync(file)
        sync(temporary)
        temporary.rename(path)
        sync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def make_folder(path: Path) -> None:
    """Create a folder and all above it that do not exist; their names are on disk before anything is written there."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync(folder.parent)


def temporary_path(path: Path) -> Path:
    """A new hidden name beside ``path`` that tells which process of which machine owns it; see ``sweep``."""
    return path.with_name(f".{path.name}.{_host()}-{os.getpid()}-{secrets.token_hex(4)}")


def sweep(folder: Path) -> list[Path]:
    """Remove what killed processes left in a folder, those of other machines after a week; returns what was removed."""
    removed = []
    for path in sorted(folder.glob(".*")) if folder.is_dir() else ():
        match = _TEMPORARY.search(path.name)
        if match is None or _may_be_alive(path, match["host"], int(match["pid"])):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
        removed.append(path)
    return removed


def _may_be_alive(path: Path, host: str | None, pid: int) -> bool:
    """Whether the owner of a temporary name may still write to it."""
    if host == _host():
        return pid == os.getpid() or _is_alive(pid)
    try:
        return time.time() - path.stat().st_mtime < _ABANDONED_SECONDS
    except FileNotFoundError:
        return True  # just renamed or removed by its owner


def _is_alive(pid: int) -> bool:
    if sys.platform == "win32":
        return True  # there, os.kill(pid, 0) would end the process
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _host() -> str:
    return hashlib.sha256(platform.node().encode()).hexdigest()[:6]


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk. Windows flushes no folder, and no file opened for reading."""
    if sys.platform == "win32" and path.is_dir():
        return
    handle = os.open(path, os.O_RDWR if sys.platform == "win32" else os.O_RDONLY)
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
    write_parts(path, [text])


def write_parts(path: Path, parts: Iterable[str]) -> None:
    """Write a text file atomically, part by part: it may be larger than memory. Bytes are the same on every system."""
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(parts)


def write_json(path: Path, value: object) -> None:
    """Write a JSON file atomically. JSON has no NaN: use None."""
    write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


# ---------------------------------------------------------------- places to write to


def check_writable(path: Path, *, is_folder: bool = False) -> None:
    """Raise a ``UserError`` unless a file, or files in a folder, can be written there; nothing is left behind.

    Commands call it for each output before they work.
    """
    whole, expected = path.absolute(), "a folder" if is_folder else "a file"
    try:
        if whole.exists() and not (whole.is_dir() if is_folder else whole.is_file()):
            what = "a folder" if whole.is_dir() else "a file" if whole.is_file() else "a device or a pipe"
            raise UserError(f"{path}: is {what}; expected {expected} to write, name another")
        places = (whole, *whole.parents) if is_folder else whole.parents
        folder = next(place for place in places if os.path.lexists(place))
        if not folder.is_dir():
            raise UserError(f"{path}: {folder.name} is no folder; name another place")
        longest = max(whole.relative_to(folder).parts, key=len, default="x")
        probe = temporary_path(folder / longest)
        try:
            probe.write_bytes(bytes(4096))  # a full disk takes empty files
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        why = printable(error.strerror or str(error))
        raise UserError(f"{path}: cannot be written ({why}); name another place, or correct this one") from None


# ---------------------------------------------------------------- reading

TEXT_LIMIT, JSON_LIMIT = 1 << 30, 4 << 30
"""Largest text and JSON file that is read, in bytes."""
BINARY = getattr(os, "O_BINARY", 0)
"""Flag of ``os.open`` on Windows, which else translates line ends."""
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


def open_file(path: Path, what: str) -> BinaryIO:
    """Open a file with ``what`` in it; devices and pipes, which may have no end, are refused."""
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | BINARY)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; expected {what}") from None
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL
        why = getattr(error, "strerror", None) or error
        raise UserError(f"{path}: not readable ({why}); expected {what}") from None
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(handle, "rb")
    os.close(handle)
    got = "a folder" if stat.S_ISDIR(mode) else "a device or a pipe, not a file"
    raise UserError(f"{path}: not readable ({got}); expected {what}")


def read_bytes(path: Path, what: str, limit: int, *, is_text: bool = False) -> bytearray:
    """The content of a file of at most ``limit`` bytes; text must not have NUL bytes."""
    content, why = bytearray(), ""
    with open_file(path, what) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            while max(size, len(content)) <= limit and not why and (block := file.read(1 << 20)):
                content += block
                if is_text and b"\0" in block and not content.startswith(_UTF16_MARKS):
                    why = "holds NUL bytes, so it is no text"
        except OSError as error:
            why = str(error.strerror)
    if max(size, len(content)) > limit:
        why = f"larger than {limit >> 20:,} MB"
    if why:
        raise UserError(f"{path}: not readable ({why}); expected {what}")
    return content


def read_text(path: Path, what: str, limit: int = TEXT_LIMIT) -> str:
    """Read a UTF-8 text file without its byte order mark; ``what`` names the expected content in errors."""
    content = read_bytes(path, what, limit, is_text=True)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        why = f"line {error.object[: error.start].count(10) + 1}, byte 0x{error.object[error.start]:02x}"
    advice = _encoding_hint(content) or f"expected {what}"
    raise UserError(f"{path}: not readable as UTF-8 text ({why}); {advice}")


def _encoding_hint(content: bytearray) -> str | None:
    """The likely encoding of text that is not UTF-8, and what to do about it."""
    if content.startswith(_UTF16_MARKS):
        return 'it seems to be UTF-16 ("Unicode Text" of Excel); save it as UTF-8'
    try:
        is_text = content.decode("cp1252").translate(dict.fromkeys((9, 10, 13, 0xA0, 0xAD))).isprintable()
    except UnicodeDecodeError:
        return None
    return 'it seems to be Windows-1252 ("CSV" of Excel); save it as UTF-8 ("CSV UTF-8" there)' if is_text else None


def read_lines(path: Path, what: str) -> dict[int, str]:
    """The stripped lines of a text file that are not blank, by line number from 1."""
    lines = read_text(path, what).splitlines()
    return {number: line.strip() for number, line in enumerate(lines, start=1) if line.strip()}


def read_json(path: Path, what: str) -> Any:
    """Read a JSON file; ``what`` names the expected content in errors."""
    try:
        return json.loads(read_bytes(path, what, JSON_LIMIT, is_text=True).decode("utf-8-sig"))
    except ValueError as error:  # not text, not JSON, or a number of thousands of digits
        why = printable(str(error))
    except RecursionError:
        why = "brackets nested too deeply"
    raise UserError(f"{path}: not readable as JSON ({why}); expected {what}")


# ---------------------------------------------------------------- locks

LOCK = ".lock"
"""Usual name of a lock file."""
LOCK_POLL_SECONDS = 0.5
_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
_LOCKED_BYTE = 0x7FFFFFFE  # of a file on Windows, where a lock also excludes reading: beyond the content


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
        with suppress(PermissionError):  # Windows removes no open file; one that stays excludes no process
            path.unlink(missing_ok=True)
        unlock(handle)
        os.close(handle)


def _acquire(path: Path) -> int | None:
    """The handle of the locked file; None if another process holds it."""
    folder = path.parent
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: is a file; expected a folder, name another")
    while True:
        try:
            make_folder(folder)
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:  # the last holder has just removed its empty folder
            continue
        try:
            lock(handle)
        except BlockingIOError:
            os.close(handle)
            return None
        if _is_current(handle, path):
            return handle
        os.close(handle)


def _is_current(handle: int, path: Path) -> bool:
    """Whether the locked file still has its name: a file removed by its last holder excludes no other process."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(handle), path.stat())
    return False


def lock(handle: int, *, shared: bool = False, wait: bool = False) -> None:
    """Lock an open file; ``BlockingIOError`` if another process holds it. Without OS support nothing is excluded."""
    try:
        if sys.platform == "win32":
            _lock_byte(handle, "LK_LOCK" if wait else "LK_NBLCK")
        else:
            import fcntl

            fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if isinstance(error, PermissionError):  # as Windows reports it
            raise BlockingIOError(errno.EAGAIN, "held by another process") from None
        if error.errno not in _UNSUPPORTED:
            raise


def unlock(handle: int) -> None:
    """Release the lock of an open file."""
    with suppress(OSError):
        if sys.platform == "win32":
            _lock_byte(handle, "LK_UNLCK")
        else:
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_UN)


def _lock_byte(handle: int, mode: str) -> None:
    """Lock or release one byte, as Windows does it: never shared, and a wait ends after ten seconds."""
    import msvcrt

    place = os.lseek(handle, 0, os.SEEK_CUR)
    try:
        os.lseek(handle, _LOCKED_BYTE, os.SEEK_SET)
        msvcrt.locking(handle, getattr(msvcrt, mode), 1)  # type: ignore[attr-defined]
    finally:
        os.lseek(handle, place, os.SEEK_SET)
