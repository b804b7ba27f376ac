"""Parts of rows: what one task computes and writes, in any process; see ``rows``."""

import hashlib
import io as streams
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from tag2box import errors, io, storage
from tag2box.formats import addresses
from tag2box.formats.addresses import Address, FetchedPhoto, StorageError

PLAN, ATTEMPTS = "_plan", "_attempts"
"""Folders of the plan and of attempts, beside the parts."""
LARGEST_UNIT = 64
"""Photos of a unit, at most; and of a part of a shard."""
_CAREFUL_FROM = 2  # attempts at a unit that ended with its process: then the photo that ends it is looked for
_DEATHS = 2  # of a process at one photo, which then gets a row with an error


# ---------------------------------------------------------------- files


@dataclass(frozen=True, slots=True)
class StorageFolder:
    """A folder on this machine, or a prefix of object storage: small files that are written whole."""

    place: str

    def __post_init__(self) -> None:
        if addresses.is_remote(self.place) and addresses.scheme_of(self.place) not in addresses.STORES:
            raise errors.UserError(f"{self.place}: cannot be written to; expected a folder, s3:// or gs://")

    def file(self, name: str) -> str:
        """The address of a file."""
        return f"{self.place.rstrip('/')}/{name}"

    def write(self, name: str, content: bytes) -> None:
        """Write a file so that readers see all of it or nothing: beside its place, or as one object."""
        whole = self.file(name)
        if not addresses.is_remote(whole):
            path = Path(whole)
            with storage.writing(path):
                io.make_folder(path.parent)
                with io.replacing(path) as temporary:
                    temporary.write_bytes(content)
            return

        def put() -> None:
            with addresses.reaching(whole):
                addresses.filesystem(whole).pipe_file(whole, content)

        addresses.tried(put)

    def read(self, name: str) -> bytes:
        """A whole file."""
        with addresses.reaching(self.file(name)), addresses.opened(self.file(name)) as file:
            return bytes(file.read())

    def exists(self, name: str) -> bool:
        """Whether there is a file."""
        whole = self.file(name)
        with addresses.reaching(whole):
            return (
                bool(addresses.filesystem(whole).exists(whole)) if addresses.is_remote(whole) else Path(whole).exists()
            )

    def names(self, below: str = "") -> list[str]:
        """The names of the files, sorted; none if there is no folder."""
        whole = self.file(below).rstrip("/")
        if not addresses.is_remote(whole):
            return (
                sorted(one.name for one in os.scandir(whole) if one.is_file() and one.name[0] != ".")
                if Path(whole).is_dir()
                else []
            )
        with addresses.reaching(whole):
            try:
                found = addresses.filesystem(whole).ls(whole, detail=True, refresh=True)
            except FileNotFoundError:
                return []
            return sorted(one["name"].rpartition("/")[2] for one in found if one["type"] == "file")

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        whole = self.file(name)
        if not addresses.is_remote(whole):
            Path(whole).unlink(missing_ok=True)
        elif self.exists(name):
            with addresses.reaching(whole):
                addresses.filesystem(whole).rm_file(whole)


# ---------------------------------------------------------------- the plan


@dataclass(frozen=True, slots=True)
class Unit:
    """Photos that are computed together, or the shard that has them; named by a digest of their addresses."""

    id: str
    photos: tuple[Address, ...]

    @classmethod
    def of(cls, photos: Sequence[Address], about: str) -> "Unit":
        """The unit of some photos, for rows of an identity."""
        text = json.dumps([about, *(photo.text for photo in photos)])
        return cls(hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:32], tuple(photos))

    @property
    def is_shard(self) -> bool:
        """Whether it is a shard."""
        return self.photos[0].is_shard

    @property
    def part(self) -> str:
        """Its part; of a shard, which has several, the last."""
        return f"part-{self.id}.parquet"


@dataclass(frozen=True, slots=True)
class UnitGroup:
    """Units of one task: a row group of a file of the plan."""

    plan: str
    number: int
    photos: int  # shards count as one

    def units(self, folder: StorageFolder) -> list[Unit]:
        """Its units."""
        return read_plan(folder, self.plan)[self.number]


@lru_cache(maxsize=2)  # tasks are computed in the order of the plan
def read_plan(folder: StorageFolder, name: str) -> list[list[Unit]]:
    """The units of each group of a file of the plan."""
    parquet, _ = addresses.need_arrow()
    table = parquet.ParquetFile(streams.BytesIO(folder.read(f"{PLAN}/{name}")))
    return [
        [
            Unit(row["unit"], tuple(Address(*photo.values()) for photo in row["photos"]))  # in the order of its fields
            for row in table.read_row_group(number).to_pylist()
        ]
        for number in range(table.num_row_groups)
    ]


# ---------------------------------------------------------------- the work on one task


class RowWork(Protocol):
    """Computes the columns of a photo: width, height, boxes, scores; of detections, labels and names."""

    def __call__(self, photo: FetchedPhoto, /) -> Mapping[str, object]:
        """The columns; a ``UserError`` becomes a row with an error. Pickled for other processes."""
        ...


@dataclass(frozen=True, slots=True)
class GroupResult:
    """What became of a task."""

    rows: int = 0
    bad: int = 0  # of them, with an error
    problem: str = ""  # why it was given up


@dataclass(frozen=True, slots=True)
class RowTask:
    """Work on a task: computes and writes the parts that are missing; only counts are returned."""

    folder: StorageFolder
    about: Mapping[str, Any]
    work: RowWork

    @property
    def is_gpu_used(self) -> bool:
        """Whether the work runs on a GPU, if the process has one."""
        return bool(getattr(self.work, "is_gpu_used", False))

    def __call__(self, group: UnitGroup) -> GroupResult:
        """Compute the units of a group."""
        rows = bad = 0
        try:
            for unit in group.units(self.folder):
                for part in () if self.folder.exists(unit.part) else self._parts(unit):
                    rows, bad = rows + len(part), bad + sum(row["status"] != "ok" for row in part)
        except errors.UserError as error:
            return GroupResult(rows, bad, str(error))
        return GroupResult(rows, bad)

    def _parts(self, unit: Unit) -> Iterator[list[dict[str, Any]]]:
        """Compute and write the parts of a unit."""
        is_careful, marker = self._begin(unit.id), f"{ATTEMPTS}/{unit.id}"
        photos = enumerate(_shard_photos(unit.photos[0]) if unit.is_shard else ((one, None) for one in unit.photos))
        size = LARGEST_UNIT if unit.is_shard else len(unit.photos)
        coming = list(islice(photos, size))
        while True:
            now, coming = coming, list(islice(photos, size)) if unit.is_shard else []
            name = f"part-{unit.id}-{now[0][0]:08}.parquet" if coming else unit.part
            if not coming or not self.folder.exists(name):
                rows = [self._row(*photo, f"{marker}-{number}" if is_careful else "") for number, photo in now]
                self.folder.write(name, self._table(rows))
                yield rows
            if not coming:
                return

    def _begin(self, unit: str) -> bool:
        """Count an attempt at a unit; returns whether earlier ones ended with their process."""
        for attempt in range(_CAREFUL_FROM):
            name = f"{ATTEMPTS}/{unit}.{attempt}"
            if not self.folder.exists(name):
                self.folder.write(name, b"")
                return False
        return True

    def _row(self, address: Address, content: bytes | None, marker: str) -> dict[str, Any]:
        if not marker:
            return self._computed(address, content)
        deaths = next((n for n in range(_DEATHS) if not self.folder.exists(f"{marker}.{n}")), _DEATHS)
        if deaths == _DEATHS:
            return _bad_row(address.text, "the process that worked on it died at every attempt; perhaps out of memory")
        self.folder.write(f"{marker}.{deaths}", b"")
        row = self._computed(address, content)
        self.folder.remove(f"{marker}.{deaths}")
        return row

    def _computed(self, address: Address, content: bytes | None) -> dict[str, Any]:
        path = Path()
        try:
            with addresses.fetched(address, content) as photo:
                path, stamp = photo.path, photo.stamp
                known = {"bytes": stamp.size, "modified_ns": stamp.mtime_ns or None, "sha256": stamp.sha256}
                return {"address": address.text, "status": "ok", "error": "", **known, **self.work(photo)}
        except StorageError:
            raise
        except errors.UserError as error:
            return _bad_row(address.text, str(error).replace(str(path), address.text) if path.name else str(error))
        except Exception as error:  # of decoders, OpenCV, allocators: one photo must not stop the others
            reason = errors.printable((str(error).splitlines() or [""])[0], 200)
            return _bad_row(address.text, f"{address.text}: not computed ({type(error).__name__}: {reason})")

    def _table(self, rows: Sequence[Mapping[str, Any]]) -> bytes:
        parquet, arrow = addresses.need_arrow()
        content = streams.BytesIO()
        parquet.write_table(arrow.Table.from_pylist(list(rows), schema=row_schema(self.about)), content)
        return content.getvalue()


def _shard_photos(shard: Address) -> Iterator[tuple[Address, bytes]]:
    """The photos of a shard; one that cannot be read is a photo with a problem."""
    if shard.is_here and not Path(shard.text).exists():
        raise StorageError(f"cannot read {shard.text}, which was there; share the folder with all nodes")
    is_empty = True
    try:
        for photo in addresses.shard_photos(shard.text):
            is_empty = False
            yield photo
    except StorageError:
        raise
    except errors.UserError as error:
        yield Address(shard.text, str(error).removeprefix(f"{shard.text}: ")), b""
        return
    if is_empty:
        yield Address(shard.text, "no photo in this shard"), b""


def _bad_row(address: str, error: str) -> dict[str, Any]:
    return {"address": address, "status": "error", "error": errors.printable(error), "boxes": [], "scores": []}


def row_schema(about: Mapping[str, Any]) -> Any:
    """The columns of the rows that are about something."""
    _, arrow = addresses.need_arrow()
    number = arrow.float32()
    columns = {
        "address": arrow.string(),
        "status": arrow.string(),
        "error": arrow.string(),
        "width": arrow.int32(),
        "height": arrow.int32(),
        "bytes": arrow.int64(),
        "modified_ns": arrow.int64(),
        "sha256": arrow.string(),
        "boxes": arrow.list_(arrow.list_(number)),
        "scores": arrow.list_(number),
    }
    if "classes" in about:
        columns |= {"labels": arrow.list_(arrow.int32()), "names": arrow.list_(arrow.string())}
    return arrow.schema(list(columns.items()), metadata={"tag2box": json.dumps(about, sort_keys=True)})


def read_part(folder: StorageFolder, name: str, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """The rows of a part."""
    parquet, arrow = addresses.need_arrow()
    try:
        table = parquet.read_table(streams.BytesIO(folder.read(name)), columns=columns)
    except arrow.ArrowInvalid as error:
        reason = errors.printable(str(error).splitlines()[0], 200)
        raise errors.UserError(
            f"{folder.file(name)}: damaged ({reason}); remove it, then run the command again"
        ) from None
    return list(table.to_pylist())
