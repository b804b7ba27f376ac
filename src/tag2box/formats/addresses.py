"""Addresses of photos: files, folders, patterns, object storage, tar shards and Parquet lists; read with limits.

An address is an absolute path, ``s3://``, ``gs://`` or ``http(s)://``; a photo in a tar shard is ``tar://NAME::SHARD``,
as fsspec opens it. Names in buckets, shards and lists are those of strangers: they never become names of files, and one
that could lead elsewhere is a row with an error.
"""

import glob
import hashlib
import itertools
import os
import re
import tarfile
import tempfile
import time
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import fsspec

from tag2box import errors, images, io, storage
from tag2box.formats import listing

PACKAGES = {"s3": "tag2box[s3]", "gs": "gcsfs", "gcs": "gcsfs", "http": "aiohttp", "https": "aiohttp"}
"""Schemes of addresses, and what has to be installed for each."""
ADDRESS_COLUMNS = ("address", "url", "path", "image", "file_name")
"""Columns of a Parquet list that may name the photos; the first that it has is taken."""
MAX_BYTES = 1 << 29
"""The largest photo that is read."""
_TRIES, _PAUSE = 3, 0.5  # of a connection that fails; seconds
STORES = frozenset({"s3", "gs", "gcs"})
"""Object storage: one server for all photos, so if it is away, no photo is at fault; and it can be written to."""
_SETTINGS: dict[str, dict[str, Any]] = {
    "s3": {"config_kwargs": {"connect_timeout": 20, "read_timeout": 60}, "use_listings_cache": False}
}
_RANGE = re.compile(r"\{([0-9]{1,9})\.\.([0-9]{1,9})\}")  # of webdataset's names: shard-{000..123}.tar
_SUFFIX = re.compile(r"\.([A-Za-z0-9]+)(?:\?.*)?$")
T = TypeVar("T")


class StorageError(errors.UserError):
    """Storage that cannot be used at all: no photo is at fault, so the work stops and can be resumed."""


@dataclass(frozen=True, slots=True)
class Address:
    """A photo, or a shard of many."""

    text: str
    problem: str = ""  # why it is not read
    is_here: bool = False  # a file that this machine sees
    is_shard: bool = False


def scheme_of(place: str) -> str:
    """The scheme of an address; empty for a path."""
    head, found, _ = place.partition("://")
    return head.lower() if found else ""


def is_remote(place: str) -> bool:
    """Whether something is an address rather than a path."""
    return bool(scheme_of(place))


# ---------------------------------------------------------------- which photos


def list_addresses(places: Sequence[str]) -> Iterator[Address]:
    """The photos and shards of files, folders, patterns, addresses and Parquet lists, one by one."""
    for place in places:
        for each in _ranges(place):
            yield from _remote(each) if is_remote(each) else _local(each)


def _ranges(place: str) -> Iterator[str]:
    found = _RANGE.search(place)
    if found is None:
        yield place
        return
    first, last, width = int(found[1]), int(found[2]), len(found[1])
    for number in range(first, last + 1):
        yield from _ranges(f"{place[: found.start()]}{number:0{width}}{place[found.end() :]}")


def _suffix(name: str) -> str:
    found = _SUFFIX.search(name)
    return f".{found[1].lower()}" if found else ""


def _local(place: str) -> Iterator[Address]:
    path = Path(place).absolute()
    if path.is_dir():
        yield from _some(place, _walk(path))
    elif path.is_file() or not glob.has_magic(place):
        if not path.is_file():
            raise errors.UserError(f"{place}: no such photo, folder or pattern; check the name")
        yield from _file(path)
    else:
        matches = sorted(Path(name) for name in glob.glob(str(path), recursive=True))  # noqa: PTH207 - absolute
        found = (_walk(match) if match.is_dir() else _file(match) for match in matches)
        yield from _some(place, itertools.chain.from_iterable(found))


def _walk(folder: Path) -> Iterator[Address]:
    """The photos below a folder, in the order of names."""
    for parent, folders, files in os.walk(folder):
        folders.sort()
        for name in sorted(files):
            if _suffix(name) in images.SUFFIXES:
                yield Address(f"{parent}{os.sep}{name}", is_here=True)


def _file(path: Path) -> Iterator[Address]:
    if path.suffix.lower() == ".parquet":
        yield from _listed(str(path))
    else:
        yield Address(str(path), is_here=True, is_shard=path.suffix.lower() == ".tar")


def _remote(place: str) -> Iterator[Address]:
    bad = _refused(place)
    if bad:
        raise errors.UserError(errors.printable(f"{place}: {bad}"))
    scheme, kind = scheme_of(place), _suffix(place)
    if kind == ".parquet" and not glob.has_magic(place):
        yield from _listed(place)
    elif kind == ".tar" and not glob.has_magic(place):
        yield Address(place, is_shard=True)
    elif scheme in {"http", "https"} or (kind in images.SUFFIXES and not glob.has_magic(place)):
        yield Address(place)
    else:
        yield from _some(place, _keys(place, scheme))


def _keys(place: str, scheme: str) -> Iterator[Address]:
    """The photos below a prefix, or the keys that match a pattern."""
    with reaching(place):
        system = filesystem(place)
        root = system._strip_protocol(place)
        is_pattern = glob.has_magic(root)
        if not is_pattern:
            system.ls(root)  # raises if there is nothing
        folders = (("", (), system.glob(root)),) if is_pattern else system.walk(root)
        for folder, _, names in folders:
            for name in sorted(names):
                key = f"{folder}/{name}" if folder else name
                text, kind = f"{scheme}://{key}", _suffix(key)
                if is_pattern and kind == ".parquet":
                    yield from _listed(text)
                elif kind in images.SUFFIXES or (is_pattern and kind == ".tar"):
                    yield Address(text, _refused(text), is_shard=kind == ".tar")


def _some(place: str, found: Iterator[Address]) -> Iterator[Address]:
    """The photos of a folder or pattern; raises if there are none."""
    first = next(found, None)
    if first is None:
        expected = ", ".join(sorted(images.SUFFIXES))
        raise errors.UserError(f"{place}: no photos here; expected {expected} files, tar shards or a Parquet list")
    yield first
    yield from found


def _listed(place: str) -> Iterator[Address]:
    """The photos that a Parquet file names: addresses, or paths below the folder of the file."""
    parquet, arrow = need_arrow()
    with reaching(place), opened(place) as file:
        try:
            table = parquet.ParquetFile(file)
            fields = {field.name: field.type for field in table.schema_arrow}
            column = next((name for name in ADDRESS_COLUMNS if name in fields), None)
            is_text = column is not None and (
                arrow.types.is_string(fields[column]) or arrow.types.is_large_string(fields[column])
            )
            if not is_text:
                has = errors.printable(", ".join(fields) or "none")
                raise errors.UserError(
                    f"{place}: columns {has}; expected addresses as text in one named {ADDRESS_COLUMNS[0]}"
                )
            number = 0
            for batch in table.iter_batches(batch_size=4096, columns=[column]):
                for text in batch.column(0).to_pylist():
                    yield _named(place, text, number)
                    number += 1
        except (arrow.ArrowInvalid, arrow.ArrowNotImplementedError) as error:
            reason = errors.printable(str(error).splitlines()[0], 200)
            raise errors.UserError(f"{place}: not readable as Parquet ({reason}); write it again") from None


def _named(place: str, text: str | None, number: int) -> Address:
    if not text:
        return Address(f"{place}#{number}", "no address in this row")
    if is_remote(text):
        return Address(text, _refused(text), is_shard=_suffix(text) == ".tar")
    bad = bad_name(text)
    if is_remote(place):
        return Address(f"{place.rpartition('/')[0]}/{text}", bad, is_shard=_suffix(text) == ".tar")
    below = None if bad else listing.path_below(Path(place).parent, text)
    if below is None:
        return Address(text, bad or "outside the folder of the list; expected a path below it, or an address")
    path = Path(place).parent / below
    return Address(str(path), is_here=listing.is_regular_file(path), is_shard=path.suffix.lower() == ".tar")


def bad_name(name: str) -> str:
    """Why a name of a stranger is not used; empty if it is harmless."""
    if any(unicodedata.category(letter) in {"Cc", "Cs"} for letter in name):
        return "control characters in its name; rename it"
    parts = PurePosixPath(name.replace("\\", "/"))
    if parts.is_absolute() or ".." in parts.parts or not parts.parts:
        return "its name leads out of its folder; rename it"
    return ""


def _refused(place: str) -> str:
    """Why an address is not read; empty if it may be."""
    scheme, rest = scheme_of(place), place.partition("://")[2]
    if scheme not in PACKAGES or "::" in rest:
        return f"not an address that is read; expected {', '.join(f'{name}://' for name in PACKAGES)}"
    return bad_name(rest)


# ---------------------------------------------------------------- their content


@dataclass(frozen=True, slots=True)
class FetchedPhoto:
    """A photo as a file on this machine, and what its content is known by."""

    address: str
    path: Path
    stamp: storage.FileStamp  # the time is that of the file for a local photo, else 0


@contextmanager
def fetched(address: Address, content: bytes | None = None) -> Iterator[FetchedPhoto]:
    """A photo for the length of a block; what is not a local file becomes a temporary one, of a name of ours.

    Args:
        content: its bytes, if they are known already.
    """
    if address.problem:
        raise errors.UserError(f"{address.text}: {address.problem}")
    if content is None and not is_remote(address.text):
        path = Path(address.text)
        if address.is_here and not path.exists():
            remedy = "photos must lie under the same path on all nodes: share the folder, or copy it there"
            raise StorageError(f"cannot read {path}, which was there; {remedy}")
        stamp = storage.FileStamp.of(path)
        _check_bytes(address.text, stamp.size)
        yield FetchedPhoto(address.text, path, stamp)
        return
    read = _download(address.text) if content is None else content
    _check_bytes(address.text, len(read))
    with tempfile.TemporaryDirectory(prefix="tag2box-") as folder:
        path = Path(folder) / "photo"
        with storage.writing(path):
            path.write_bytes(read)
        stamp = storage.FileStamp(len(read), 0, hashlib.sha256(read).hexdigest())
        yield FetchedPhoto(address.text, path, stamp)


def _check_bytes(address: str, size: int) -> None:
    if size > MAX_BYTES:
        raise errors.UserError(f"{address}: more than {MAX_BYTES >> 20} MB, no photo; save a smaller copy of it")


def _download(address: str) -> bytes:
    def read() -> bytes:
        with reaching(address), filesystem(address).open(address, "rb", block_size=1 << 20) as file:
            return bytes(file.read(MAX_BYTES + 1))

    return tried(read)


def tried(work: Callable[[], T]) -> T:
    """The result of some work with storage, repeated if storage cannot be reached."""
    for attempt in range(1, _TRIES):
        try:
            return work()
        except StorageError:
            time.sleep(_PAUSE * attempt)
    return work()


def shard_photos(shard: str) -> Iterator[tuple[Address, bytes]]:
    """The photos of a tar shard in its order, with their content; of two with the same name, the first."""
    seen: set[str] = set()
    with reaching(shard), opened(shard) as file:
        try:
            with tarfile.open(fileobj=file, mode="r|") as tar:
                for member in tar:
                    if not member.isfile() or _suffix(member.name) not in images.SUFFIXES or member.name in seen:
                        continue
                    seen.add(member.name)
                    problem = bad_name(member.name)
                    if member.size > MAX_BYTES:
                        problem = f"more than {MAX_BYTES >> 20} MB, no photo"
                    stream = None if problem else tar.extractfile(member)
                    name = member.name.encode(errors="replace").decode()
                    yield Address(f"tar://{name}::{shard}", problem), b"" if stream is None else stream.read()
        except (tarfile.TarError, EOFError) as error:
            problem = f"not readable as a tar file after {len(seen)} photos ({errors.printable(str(error), 200)})"
            yield Address(shard, problem), b""


# ---------------------------------------------------------------- storage


@contextmanager
def opened(place: str) -> Iterator[Any]:
    """A file of any address, for reading."""
    with filesystem(place).open(place, "rb") if is_remote(place) else io.open_file(Path(place), "a file") as file:
        yield file


def filesystem(place: str) -> Any:
    """The file system of an address, which fsspec keeps."""
    scheme = scheme_of(place)
    return fsspec.filesystem(scheme, **_SETTINGS.get(scheme, {}))


@contextmanager
def reaching(place: str) -> Iterator[None]:
    """Turn what goes wrong with storage into a ``UserError``; a ``StorageError`` if no single file is at fault."""
    scheme = scheme_of(place)
    try:
        yield
    except (errors.UserError, GeneratorExit):
        raise
    except ImportError:
        package = PACKAGES.get(scheme, "pyarrow")
        raise StorageError(
            f"{place}: needs a missing package; pip install '{package}' here and on every node"
        ) from None
    except FileNotFoundError:
        raise errors.UserError(f"{place}: no such file, folder or bucket; check the address") from None
    except PermissionError:
        raise errors.UserError(f"{place}: access denied; check the credentials and the rights of the account") from None
    except Exception as error:  # of many client libraries
        kind, said = type(error).__name__, (str(error).splitlines() or [""])[0]
        if "Credential" in kind:
            remedy = f"set those of {scheme} in the environment, or log in"
            raise StorageError(f"{place}: no credentials; {remedy}") from None
        is_away = scheme in STORES and not isinstance(error, ValueError)
        made = StorageError if is_away else errors.UserError
        raise made(f"{place}: cannot be read ({kind}: {errors.printable(said, 200)}); check the address") from None


def need_arrow() -> tuple[Any, Any]:
    """``pyarrow.parquet`` and ``pyarrow``; raises if they are not installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise errors.UserError("Parquet: pyarrow is not installed; pip install 'tag2box[ray]'") from None
    return pyarrow.parquet, pyarrow
