"""Storage of everything that is kept: a SHA-256 of every file, verified when the file is read.

``io.replacing`` writes a file so that a power cut leaves the old content or the new one. Here is how damage is found:

- a folder of files (a checkpoint) has a ``manifest.json`` with the size and digest of each: ``write_manifest``,
  ``verify_file``;
- a large file that is read in parts (proposals, features) has a digest per block: ``BlockDigests``. Blocks are verified
  when they are first read, all of them by ``tag2box doctor``;
- such a file is written part by part, in any order, by ``unfinished_file``, which keeps what a killed process wrote;
- a small JSON file (the state of a run, an index) includes its own digest: ``write_checked_json``;
- files of users (photos) are identified by ``FileStamp``: their content is hashed again only if size or time changed.
  Where a mistake would stay unnoticed, as in the names of caches, ``content_digests`` is more careful.

``distinct_file_names`` turns names of classes, photos and runs into names of files.
"""

import hashlib
import json
import os
import re
import struct
import threading
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Self

from tag2box import io
from tag2box.errors import UserError, printable

MANIFEST = "manifest.json"
BLOCK = 1 << 20
"""Bytes of a block of a large file."""
_DIGEST_KEY = "sha256"
_PART = struct.Struct("<q32s")  # a row of a journal: number of a part, digest
_SEEKING = threading.Lock()


def file_digest(path: Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal."""
    with reading(path, "a file"), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def seek_and_read(handle: int, count: int, start: int) -> bytes:
    """``os.pread`` for Windows, which has none: one thread at a time moves the position of the file."""
    with _SEEKING:
        os.lseek(handle, start, os.SEEK_SET)
        return os.read(handle, count)


read_at: Callable[[int, int, int], bytes] = getattr(os, "pread", seek_and_read)
"""Reads bytes of an open file from a position on: (handle, count, start)."""


@contextmanager
def reading(path: Path, what: str) -> Iterator[None]:
    """Turn an ``OSError`` of the block into a ``UserError`` that names the file and what was expected."""
    try:
        yield
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; expected {what}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error}); expected {what}") from None


@contextmanager
def writing(
    path: Path, remedy: str = "free some space or repair the disk, then run the same command again"
) -> Iterator[None]:
    """Turn an ``OSError`` of the block, such as a full disk, into a ``UserError``: the file, the cause, a remedy."""
    try:
        yield
    except OSError as error:
        cause = printable(error.strerror or str(error))
        raise UserError(f"{error.filename or path}: cannot be written ({cause}); {remedy}") from None


# ---------------------------------------------------------------- folders


def write_manifest(folder: Path, more: Mapping[str, object] | None = None) -> str:
    """Write the sizes and digests of all files of a folder into its manifest; returns the manifest's own digest.

    Args:
        more: further fields of the manifest, which may include another ``format``.
    """
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != MANIFEST)
    entries = {path.name: {"bytes": path.stat().st_size, _DIGEST_KEY: file_digest(path)} for path in files}
    write_checked_json(folder / MANIFEST, {"format": 1, **(more or {}), "files": entries})
    return file_digest(folder / MANIFEST)


def verify_file(path: Path, remedy: str) -> None:
    """Raise unless a file has the size and digest that the manifest of its folder names.

    Folders written before version 0.2 have no manifest: their files are not verified.
    """
    manifest = path.parent / MANIFEST
    if not manifest.exists():
        return
    known = read_checked_json(manifest, "the manifest of a folder of tag2box", remedy).get("files")
    entry = known.get(path.name) if isinstance(known, dict) else None
    if not isinstance(entry, dict):
        raise UserError(f"{path}: {MANIFEST} does not name it; {remedy}")
    with reading(path, "a file that the manifest names"):
        size = path.stat().st_size
    if size != entry.get("bytes") or file_digest(path) != entry.get(_DIGEST_KEY):
        raise UserError(f"{path}: damaged, its SHA-256 is not that in {MANIFEST}; {remedy}")


def verify_folder(folder: Path, remedy: str) -> None:
    """Raise unless all files that the manifest of a folder names are there and intact."""
    known = read_checked_json(folder / MANIFEST, "the manifest of a folder of tag2box", remedy).get("files")
    if not isinstance(known, dict):
        raise UserError(f"{folder / MANIFEST}: names no files; {remedy}")
    for name in known:
        verify_file(folder / name, remedy)


# ---------------------------------------------------------------- small JSON files


def write_checked_json(path: Path, value: Mapping[str, object]) -> None:
    """Write a JSON object that includes the digest of its own content."""
    io.write_json(path, {**value, _DIGEST_KEY: _json_digest(value)})


def read_checked_json(path: Path, what: str, remedy: str, *, since: int = 1) -> dict[str, Any]:
    """Read a JSON object of ``write_checked_json`` and verify it; the digest itself is left out.

    Args:
        what: the expected content, for error messages.
        remedy: what the user should do about a damaged file.
        since: the first ``format`` of this file that has a digest; an older one, or one without the key, needs none.
    """
    value = io.read_json(path, what)
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected {what}; {remedy}")
    digest, version = value.pop(_DIGEST_KEY, None), value.get("format", 0)
    is_older = digest is None and type(version) is int and version < since
    if not is_older and digest != _json_digest(value):
        raise UserError(f"{path}: damaged, its SHA-256 is not that of its content; {remedy}")
    return value


def _json_digest(value: Mapping[str, object]) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=True)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


# ---------------------------------------------------------------- large files, by blocks


@dataclass(frozen=True, slots=True)
class BlockDigests:
    """Digests of the blocks of a file, of which each is verified once, when it is first read."""

    path: Path
    size: int
    digests: tuple[str, ...]
    block: int = BLOCK
    verified: set[int] = field(default_factory=set, compare=False)

    @classmethod
    def of_file(cls, path: Path, block: int = BLOCK) -> Self:
        """The digests of a file as it is now."""
        digests = []
        with path.open("rb") as file:
            while part := file.read(block):
                digests.append(hashlib.sha256(part).hexdigest())
        return cls(path, path.stat().st_size, tuple(digests), block)

    @classmethod
    def from_json(cls, path: Path, value: Any) -> Self:
        """The digests of ``path`` as they were stored; raises ``ValueError`` or the like if these are none."""
        digests = cls(path, int(value["bytes"]), tuple(map(str, value["blocks"])), int(value["block"]))
        if digests.block < 1 or len(digests.digests) != -(-digests.size // digests.block):
            raise ValueError("wrong number of block digests")
        return digests

    def to_json(self) -> dict[str, object]:
        """Size, block size and digests."""
        return {"bytes": self.size, "block": self.block, "blocks": list(self.digests)}

    def verify(self, read: Callable[[int, int], bytes | memoryview], first: int, last: int, remedy: str) -> None:
        """Verify the blocks that hold bytes ``first`` to ``last`` (exclusive) unless they were before.

        Args:
            read: returns the bytes from an offset (inclusive) to another (exclusive).
            remedy: what the user should do about a damaged file.
        """
        for index in range(first // self.block, -(-last // self.block)):
            if index in self.verified:
                continue
            part = read(index * self.block, min((index + 1) * self.block, self.size))
            if index >= len(self.digests) or hashlib.sha256(part).hexdigest() != self.digests[index]:
                raise UserError(f"{self.path}: damaged in bytes {index * self.block} and following; {remedy}")
            self.verified.add(index)

    def verify_all(self, remedy: str) -> None:
        """Verify the whole file: its size and every block."""
        with reading(self.path, "a file of tag2box"), self.path.open("rb") as file:
            if os.fstat(file.fileno()).st_size != self.size:
                raise UserError(f"{self.path}: cut short or overlong; {remedy}")

            def read(start: int, stop: int) -> bytes:
                file.seek(start)
                return file.read(stop - start)

            self.verified.clear()
            self.verify(read, 0, self.size, remedy)


@dataclass(slots=True)
class UnfinishedFile:
    """A large file whose parts, of known sizes, are written in any order; ``unfinished_file`` opens one."""

    file: BinaryIO
    journal: BinaryIO
    starts: Sequence[int]
    """First byte of each part; the last is the size of the file."""
    digests: dict[int, bytes] = field(default_factory=dict)
    """SHA-256 of the parts that are finished."""

    def __post_init__(self) -> None:
        """Find the parts that are finished: those that have the digests of the journal."""
        known = self.journal.read()
        for index, digest in _PART.iter_unpack(known[: len(known) // _PART.size * _PART.size]):
            if 0 <= index < len(self.starts) - 1:
                self.file.seek(self.starts[index])
                if hashlib.sha256(self.file.read(self.starts[index + 1] - self.starts[index])).digest() == digest:
                    self.digests[index] = digest
        self.journal.truncate(self.journal.seek(0))
        self.journal.writelines(_PART.pack(*row) for row in self.digests.items())
        self.file.truncate(self.starts[-1])

    def add(self, index: int, part: bytes) -> None:
        """Write a part."""
        if len(part) != self.starts[index + 1] - self.starts[index]:
            raise ValueError(f"part {index} has {len(part)} bytes, expected those from {self.starts[index]} on")
        self.file.seek(self.starts[index])
        self.file.write(part)
        self.file.flush()
        self.digests[index] = hashlib.sha256(part).digest()
        self.journal.write(_PART.pack(index, self.digests[index]))
        self.journal.flush()


@contextmanager
def unfinished_file(path: Path, starts: Sequence[int]) -> Iterator[UnfinishedFile]:
    """Yield the file that will be ``path``, with the parts of earlier attempts; they stay if the block fails.

    The caller has a lock, and writes what is before the first part.
    """
    io.make_folder(path.parent)
    values, journal = (path.with_name(f".{path.name}.{kind}") for kind in ("unfinished", "journal"))
    values.touch()
    journal.touch()
    with values.open("r+b") as file, journal.open("r+b") as log:
        yield UnfinishedFile(file, log, starts)
    io.sync(values)
    journal.unlink()
    io.sync(path.parent)
    values.replace(path)
    io.sync(path.parent)


# ---------------------------------------------------------------- files of users


@dataclass(frozen=True, slots=True)
class FileStamp:
    """Size, modification time and content digest of a file, as git's index knows them."""

    size: int
    mtime_ns: int
    sha256: str

    @classmethod
    def of(cls, path: Path, known: "FileStamp | None" = None) -> "FileStamp":
        """The stamp of a file; its content is read unless size and time are those of ``known``."""
        with reading(path, "a photo; restore it, or read the dataset again"):
            stat = path.stat()
        if known is not None and (known.size, known.mtime_ns) == (stat.st_size, stat.st_mtime_ns):
            return known
        return cls(stat.st_size, stat.st_mtime_ns, file_digest(path))

    @classmethod
    def from_json(cls, value: Any) -> "FileStamp":
        """A stamp from its JSON form: a list of the three."""
        size, mtime_ns, sha256 = value
        if not (type(size) is int and type(mtime_ns) is int and isinstance(sha256, str)):
            raise ValueError(f"{printable(repr(value))} is not a file stamp")
        return cls(size, mtime_ns, sha256)

    def to_json(self) -> list[object]:
        """The JSON form."""
        return [self.size, self.mtime_ns, self.sha256]


_SETTLED = 2 * 10**9  # nanoseconds: a file that changed just now may change again within the same tick of its clock


def content_digests(paths: Sequence[Path], memory: Path | None = None) -> list[str]:
    """The SHA-256 of each of some files, of which those are read that ``memory`` does not know.

    ``memory`` is a file with the digests of the last call. A file is read again if anything that the file system says
    of it differs: size, time, inode, and the time when the inode changed. No program can set the latter, so a file
    replaced by another of equal size and time is noticed, too.
    """
    known = _read_memory(memory) if memory is not None else {}
    digests, found, now = [], dict(known), time.time_ns()
    for path in paths:
        stat = _stat(path)
        key, seen = str(path.absolute()), _seen(stat)
        *before, digest = known.get(key, [""])
        if before != seen:
            digest = file_digest(path)
            found.pop(key, None)
            if now - stat.st_ctime_ns > _SETTLED:
                found[key] = [*seen, digest]
        digests.append(str(digest))
    if memory is not None and found != known:
        with suppress(OSError, UserError):  # a cache that cannot be written is still of use
            write_checked_json(memory, {"format": 1, "files": found})
    return digests


def has_digests(paths: Sequence[Path], memory: Path) -> bool:
    """Whether ``memory`` knows all files as they are, so that ``content_digests`` reads none and writes nothing."""
    known = _read_memory(memory)
    return all(known.get(str(path.absolute()), [])[:-1] == _seen(_stat(path)) for path in paths)


def _seen(stat: os.stat_result) -> list[object]:
    return [stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise UserError(f"{path}: no such photo ({error.strerror}); restore it, or read the dataset again") from None


def _read_memory(path: Path) -> dict[str, list[object]]:
    try:
        files = read_checked_json(path, "digests of photos", "remove it")["files"]
        return {str(name): list(row) for name, row in files.items() if row}
    except (UserError, KeyError, TypeError, AttributeError):
        return {}  # none yet, or damaged: all files are read again


# ---------------------------------------------------------------- names of files

_RESERVED = r"(?:con|prn|aux|nul|com[0-9]|lpt[0-9])(?:\.|$)"  # devices on Windows
_HIDDEN = r"\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff"
_UNSAFE = re.compile(rf'[{_HIDDEN}%/\\:*?"<>|]|^\.|[. ]$|^(?={_RESERVED}).', re.IGNORECASE)
_LONGEST_NAME = 180  # bytes; file systems take 255, with suffix and the marks of a temporary file


def safe_file_name(name: str) -> str:
    """A file name for any text, such as a class, a photo id or a run: different texts give different names.

    Separators and other characters that a file system may not accept are percent-encoded (``a/b`` becomes ``a%2Fb``),
    so no name can lead to another folder. The end of a very long name is replaced by a hash.
    """
    safe = _UNSAFE.sub(lambda c: "".join(f"%{b:02X}" for b in c[0].encode(errors="surrogatepass")), name) or "%"
    raw = safe.encode()
    if len(raw) <= _LONGEST_NAME:
        return safe
    return f"{raw[: _LONGEST_NAME - 20].decode(errors='ignore')}%{_name_digest(name)}"


def distinct_file_names(names: Iterable[str]) -> dict[str, str]:
    """A file name for each of some texts; different ones even where the file system ignores case or accents' encoding.

    Of texts that differ in nothing else, the first keeps its ``safe_file_name``, the others get ``marked_file_name``.
    """
    used: set[str] = set()
    files: dict[str, str] = {}
    for name in dict.fromkeys(names):
        plain = safe_file_name(name)
        folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKD", plain).upper().casefold())
        files[name] = marked_file_name(name) if folded in used else plain
        used.add(folded)
    return files


def marked_file_name(name: str) -> str:
    """``safe_file_name`` with a hash at its end, which no ``safe_file_name`` has."""
    return f"{safe_file_name(name)}%~{_name_digest(name)}"


def _name_digest(name: str) -> str:
    return hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=8).hexdigest()
