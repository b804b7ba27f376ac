"""Rows: a folder of Parquet parts, on disk or in object storage, with one row per photo; resumed, and read as COCO.

    OUT/part-*.parquet      rows: address, width, height, ..., boxes, scores; what other programs read
    OUT/_about.json         what the rows were computed with
    OUT/_plan/*.parquet     the photos in units; a photo is planned once, in one unit
    OUT/_attempts/          units that are being computed

The name of a part is a digest of its unit: a unit that is computed twice replaces its part, and no row is there twice.
A unit is finished if its part is there: the same call computes the units without.
"""

import hashlib
import io as streams
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tag2box import errors
from tag2box.annotations import Detections, Photo
from tag2box.formats import addresses, row_parts
from tag2box.formats.addresses import Address
from tag2box.formats.row_parts import GroupResult, StorageFolder, Unit, UnitGroup, read_part
from tag2box.parallel.pool import Pool
from tag2box.progress import Progress, silent

_ABOUT = "_about.json"
_SIZES = ((256, 4), (4096, 16))  # photos planned so far, photos of a unit: few photos are spread over processes, too
_SINGLE_UNITS, _GROUP = 512, 16  # the first units are tasks of their own, later ones are grouped
_PLANNED = 256  # units of a file of the plan
_CHECKED = 4096  # addresses that are looked up at once


class SeenAddresses:
    """Digests of addresses: 16 bytes each, in a few sorted arrays."""

    def __init__(self) -> None:
        self._runs: list[np.ndarray] = []

    def new(self, texts: Sequence[str]) -> list[bool]:
        """Whether each text is new, and the first of its kind; all are known afterwards."""
        digests = [hashlib.blake2b(t.encode(errors="surrogatepass"), digest_size=16).digest() for t in texts]
        keys = np.array(digests, dtype="S16")
        is_new = np.zeros(len(keys), dtype=bool)
        is_new[np.unique(keys, return_index=True)[1]] = True
        for run in self._runs:
            places = np.minimum(np.searchsorted(run, keys), len(run) - 1)
            is_new &= run[places] != keys
        if is_new.any():
            self._runs.append(np.sort(keys[is_new]))
        while len(self._runs) > 1 and len(self._runs[-2]) <= 2 * len(self._runs[-1]):
            last = self._runs.pop()
            self._runs[-1] = np.sort(np.concatenate([self._runs[-1], last]), kind="stable")
        return list(map(bool, is_new))


# ---------------------------------------------------------------- all rows


@dataclass(slots=True)
class RowFolder:
    """A folder of rows: what it is about, and which tasks are finished."""

    folder: StorageFolder
    about: Mapping[str, Any]
    finished: dict[UnitGroup, None] = field(default_factory=dict)
    missing: dict[UnitGroup, None] = field(default_factory=dict)
    _seen: SeenAddresses = field(default_factory=SeenAddresses)
    _plans: int = 0
    _planned: int = 0  # photos

    @classmethod
    def open(cls, place: str, about: Mapping[str, object] | None = None) -> "RowFolder":
        """Open a folder of rows.

        Args:
            about: what new rows are computed with; raises if those there were computed with something else, or if
                there are other files. Default: what is there is read.
        """
        folder = StorageFolder(place)
        if folder.exists(_ABOUT):
            known = json.loads(folder.read(_ABOUT))
            wanted = known if about is None else json.loads(json.dumps(about))
            if known != wanted:
                key = next(key for key in [*wanted, *known] if known.get(key) != wanted.get(key))
                raise errors.UserError(f"{place}: holds rows of another {key}; name another folder, or remove it")
        elif about is None:
            raise errors.UserError(f"{place}: no rows here ({_ABOUT} is missing); name a folder of `--format parquet`")
        elif folder.names():
            raise errors.UserError(f"{place}: holds other files than rows; name a folder of its own")
        else:
            known = json.loads(json.dumps(about))
            folder.write(_ABOUT, json.dumps(known, indent=1).encode())
        opened = cls(folder, known)
        opened._read_plan()
        return opened

    def _read_plan(self) -> None:
        there = set(self.folder.names())
        for name in self.folder.names(row_parts.PLAN):
            self._plans = max(self._plans, 1 + int(name.partition(".")[0]))
            for number, units in enumerate(row_parts.read_plan(self.folder, name)):
                self._add(name, number, units, there)

    def _add(self, plan: str, number: int, units: Sequence[Unit], there: set[str]) -> None:
        texts = [photo.text for unit in units for photo in unit.photos]
        self._seen.new(texts)
        self._planned += len(texts)
        groups = self.finished if all(unit.part in there for unit in units) else self.missing
        groups[UnitGroup(plan, number, len(texts))] = None

    def plan(self, photos: Iterable[Address]) -> None:
        """Plan the photos that are not planned yet; they are read one by one."""
        units = self._units(self._new(iter(photos)))
        while part := list(islice(units, _PLANNED)):
            self._write_plan(part)

    def _new(self, photos: Iterator[Address]) -> Iterator[Address]:
        while part := list(islice(photos, _CHECKED)):
            is_new = self._seen.new([photo.text for photo in part])
            yield from (photo for photo, new in zip(part, is_new, strict=True) if new)

    def _units(self, photos: Iterator[Address]) -> Iterator[Unit]:
        about = json.dumps(self.about, sort_keys=True)
        pending: list[Address] = []
        for photo in photos:
            self._planned += 1
            if photo.is_shard:
                yield Unit.of([photo], about)
                continue
            pending.append(photo)
            if len(pending) >= next((size for most, size in _SIZES if self._planned <= most), row_parts.LARGEST_UNIT):
                yield Unit.of(pending, about)
                pending = []
        if pending:
            yield Unit.of(pending, about)

    def _write_plan(self, units: Sequence[Unit]) -> None:
        parquet, arrow = addresses.need_arrow()
        text, flag = arrow.string(), arrow.bool_()
        photo = arrow.struct([("text", text), ("problem", text), ("is_here", flag), ("is_shard", flag)])
        schema = arrow.schema([("unit", text), ("photos", arrow.list_(photo))])
        name, content, left = f"{self._plans:08}.parquet", streams.BytesIO(), iter(units)
        with parquet.ParquetWriter(content, schema) as writer:
            for number in range(len(units)):
                size = 1 if len(self.finished) + len(self.missing) < _SINGLE_UNITS else _GROUP
                group = list(islice(left, size))
                if not group:
                    break
                rows = [{"unit": unit.id, "photos": [_fields(one) for one in unit.photos]} for unit in group]
                writer.write_table(arrow.Table.from_pylist(rows, schema=schema), row_group_size=len(rows))
                self.missing[UnitGroup(name, number, sum(len(unit.photos) for unit in group))] = None
        self.folder.write(f"{row_parts.PLAN}/{name}", content.getvalue())
        self._plans += 1

    def compute(
        self, work: row_parts.RowWork, pool: Pool, *, threads: int = 1, progress: Progress = silent
    ) -> GroupResult:
        """Compute the rows that are missing; returns how many there were, and how many have an error."""
        todo, rows, bad = sum(group.photos for group in self.missing), 0, 0
        task = row_parts.RowTask(self.folder, self.about, work)
        results = pool(task, list(self.missing), lost=_lost, threads=threads)
        done = sum(group.photos for group in self.finished)
        with progress("rows", done + todo, done) as bar, closing(results):
            for group, result in results:
                rows, bad = rows + result.rows, bad + result.bad
                if result.problem:
                    raise errors.UserError(f"{result.problem}; then rerun the same command to resume")
                del self.missing[group]
                self.finished[group] = None
                for _ in range(group.photos):
                    bar.advance()
        for name in self.folder.names(row_parts.ATTEMPTS):
            self.folder.remove(f"{row_parts.ATTEMPTS}/{name}")
        return GroupResult(rows, bad)

    def rows(self, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
        """All rows of finished tasks in the order of the plan, read part by part."""
        for part in self.parts():
            yield from read_part(self.folder, part, columns)

    def parts(self) -> Iterator[str]:
        """The names of the parts of finished tasks, in the order of the plan."""
        shards: dict[str, list[str]] = {}
        for name in self.folder.names():
            owner, _, number = name.removeprefix("part-").removesuffix(".parquet").partition("-")
            if number:
                shards.setdefault(owner, []).append(name)
        for group in sorted(self.finished, key=lambda one: (one.plan, one.number)):
            for unit in group.units(self.folder):
                yield from [*shards.get(unit.id, []), unit.part]


def _fields(photo: Address) -> dict[str, object]:
    return {"text": photo.text, "problem": photo.problem, "is_here": photo.is_here, "is_shard": photo.is_shard}


def _lost(group: UnitGroup, number: int) -> GroupResult:
    return GroupResult(problem=f"{group.plan}: the process that worked on task {group.number} died at every attempt")


# ---------------------------------------------------------------- as detections


@dataclass(frozen=True, slots=True, eq=False)
class RowDetections(Mapping[str, Detections]):
    """Detections by address, read from parts on access; in memory is only where each is."""

    folder: StorageFolder
    places: Mapping[str, tuple[str, int]]

    def __getitem__(self, address: str) -> Detections:
        part, number = self.places[address]
        return detections_of(_recent(self.folder, part)[number])

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


@lru_cache(maxsize=2)  # rows are read in the order of their parts
def _recent(folder: StorageFolder, part: str) -> list[dict[str, Any]]:
    return read_part(folder, part)


def detections_of(row: Mapping[str, Any]) -> Detections:
    """The detections of a row."""
    boxes, scores = (torch.tensor(row[key], dtype=torch.float32) for key in ("boxes", "scores"))
    return Detections(boxes.reshape(-1, 4), scores, torch.tensor(row["labels"], dtype=torch.long))


def is_rows(place: str) -> bool:
    """Whether there is a folder of rows."""
    if addresses.is_remote(place) and addresses.scheme_of(place) not in addresses.STORES:
        return False
    return StorageFolder(place).exists(_ABOUT)


def read_rows(place: str, bad: Callable[[str], None]) -> tuple[list[Photo], tuple[str, ...], RowDetections]:
    """Photos, classes and detections of a folder of rows, for an export; ``bad`` receives the errors of other rows."""
    opened = RowFolder.open(place)
    if "classes" not in opened.about:
        raise errors.UserError(f"{place}: rows of {opened.about.get('kind')}; expected those of `tag2box detect`")
    if opened.missing:
        left = sum(group.photos for group in opened.missing)
        raise errors.UserError(f"{place}: {left:,} photos are not finished; rerun the command that writes it")
    photos, places = [], {}
    for part in opened.parts():
        known = read_part(opened.folder, part, ["address", "status", "error", "width", "height"])
        for number, row in enumerate(known):
            if row["status"] != "ok":
                bad(row["error"])
                continue
            address = row["address"]
            photos.append(Photo(address, Path(address), row["width"], row["height"], file=address))
            places[address] = (part, number)
    return photos, tuple(opened.about["classes"]), RowDetections(opened.folder, places)
