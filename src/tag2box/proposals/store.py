"""The proposal store of a dataset: the candidate boxes of all photos in one memory-mapped file, and an index."""

from __future__ import annotations

import dataclasses
import itertools
import json
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import cv2
import numpy as np
import torch
from jaxtyping import Float, Float32, UInt8
from numpy import ndarray
from torch import Tensor

from tag2box.errors import UserError
from tag2box.files import read_json, replacing, write_json
from tag2box.types import Photo

_FORMAT = 1
_FEW = 16  # photos that are done before further processes would have started
_SLACK = 1.0  # pixels a box may reach over its photo: what rounding between resolutions does

ReadPhoto = Callable[[Path], UInt8[Tensor, "3 H W"]]
Progress = Callable[[int, int], None]
Source = Mapping[str, object]
"""Where boxes come from, as JSON: a ``kind``, and the settings that matter to the result."""


@runtime_checkable
class ProposalMethod(Protocol):
    """A way to propose boxes: a frozen dataclass, its settings, called with a photo."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def __call__(self, image: UInt8[Tensor, "3 H W"], /) -> Float32[Tensor, "P 4"]:
        """Boxes in pixels of the image."""
        ...


@dataclass(frozen=True, slots=True)
class ProposalStore:
    """Boxes of many photos by photo id, read from disk as they are asked for."""

    path: Path
    source: Source
    sizes: Mapping[str, tuple[int, int]]  # width and height of each photo, by id
    spans: Mapping[str, tuple[int, int]]  # rows of each photo
    rows: Float32[ndarray, "total 4"]

    @staticmethod
    def exists(path: Path) -> bool:
        """Whether a folder holds a store, be it whole or damaged."""
        return (path / "index.json").exists()

    @classmethod
    def open(cls, path: Path) -> ProposalStore:
        """Open the store in a folder."""
        index = read_json(path / "index.json", "the index of a proposal store")
        try:
            if index["format"] != _FORMAT:
                raise UserError(f"{path / 'index.json'}: format {index['format']}, expected {_FORMAT}; make it anew")
            ids, ends = index["ids"], list(itertools.accumulate(index["counts"], initial=0))
            sizes = {name: (int(w), int(h)) for name, (w, h) in zip(ids, index["sizes"], strict=True)}
            spans = dict(zip(ids, itertools.pairwise(ends), strict=True))
            source = dict(index["source"])
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{path / 'index.json'}: not an index of proposals ({error!r}); make it anew") from None
        return cls(path, source, sizes, spans, _map_rows(path / "boxes.npy", ends[-1]))

    def boxes(self, photo_id: str) -> Float32[Tensor, "P 4"]:
        """The boxes of one photo, in pixels of the photo as it is on disk; possibly none."""
        if photo_id not in self.spans:
            raise UserError(f"{self.path}: no proposals for photo {photo_id!r}; make the store for these photos")
        start, stop = self.spans[photo_id]
        return torch.from_numpy(np.array(self.rows[start:stop], np.float32))

    def check(self, photos: Iterable[Photo]) -> None:
        """Raise unless every photo is in the store with the size it has now."""
        for photo in photos:
            self.boxes(photo.id)
            if self.sizes[photo.id] != (photo.width, photo.height):
                stored = "x".join(map(str, self.sizes[photo.id]))
                now = f"{photo.width}x{photo.height}"
                raise UserError(f"{self.path}: made when photo {photo.id} was {stored}, it is {now}; make it anew")

    def __len__(self) -> int:
        return len(self.spans)


def write_store(path: Path, source: Source, photos: Sequence[Photo], boxes: Iterable[Float[Tensor, "_ 4"]]) -> None:
    """Write a store: the boxes of each photo, in the photos' order, taken one by one so that all need not fit memory.

    The index is removed first and written last: a store broken off half-way does not open.
    """
    repeated = len(photos) - len({photo.id for photo in photos})
    if repeated:
        raise UserError(f"{path}: {repeated} photos share an id with another; give the photos distinct names")
    (path / "index.json").unlink(missing_ok=True)
    counts = []
    with replacing(path / "boxes.npy") as temporary, temporary.open("w+b") as file:
        _write_header(file, 0)
        for photo, found in zip(photos, boxes, strict=True):
            rows = _checked(path, photo, found)
            file.write(rows.tobytes())
            counts.append(len(rows))
        file.seek(0)
        _write_header(file, sum(counts))
    index = {
        "format": _FORMAT,
        "source": dict(source),
        "ids": [photo.id for photo in photos],
        "counts": counts,
        "sizes": [[photo.width, photo.height] for photo in photos],
    }
    write_json(path / "index.json", index)


def make_proposals(
    photos: Sequence[Photo],
    method: ProposalMethod,
    out: Path,
    *,
    read: ReadPhoto,
    workers: int | None = None,
    on_progress: Progress | None = None,
) -> ProposalStore:
    """Propose boxes for all photos with a pool of processes, and store them; a store that is there is never replaced.

    Args:
        read: reads a photo; importable by name, as it crosses to other processes. So does ``method``.
        workers: processes; None takes one per core (for a few photos, this one). The result does not depend on it.
        on_progress: called with photos done and in all.
    """
    source = json.loads(json.dumps(dataclasses.asdict(method)))  # as it will be read: tuples become lists
    if _is_equal(out, source, photos):
        return ProposalStore.open(out)
    if ProposalStore.exists(out):
        ProposalStore.open(out)  # a damaged one says itself what is wrong
        raise UserError(f"{out}: holds proposals of other photos or settings; remove it or name another folder")
    workers = workers or min(os.cpu_count() or 1, 1 + len(photos) // _FEW)
    found = _propose_all(partial(_propose, method, read), photos, workers)
    write_store(out, source, photos, _counted(found, len(photos), on_progress))
    return ProposalStore.open(out)


def _propose(method: ProposalMethod, read: ReadPhoto, photo: Photo) -> Float32[ndarray, "P 4"]:
    """The work of one process on one photo. Arrays cross between processes more cheaply than tensors."""
    image = read(photo.path)
    size = (image.shape[2], image.shape[1])
    if size != (photo.width, photo.height):
        raise UserError(
            f"{photo.path}: {size[0]}x{size[1]} pixels, expected {photo.width}x{photo.height}; read it anew"
        )
    return method(image).numpy()


def _propose_all(
    propose: Callable[[Photo], Float32[ndarray, "P 4"]], photos: Sequence[Photo], workers: int
) -> Iterator[Float32[Tensor, "_ 4"]]:
    workers = min(workers, len(photos))
    if workers <= 1:
        yield from (torch.from_numpy(propose(photo)) for photo in photos)
        return
    # Spawned, for a fork of a process that has already used torch's or OpenCV's threads may hang.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker)
    try:
        yield from (torch.from_numpy(found) for found in pool.map(propose, photos, chunksize=4))
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    """One thread a process: the processes share the cores already."""
    cv2.setNumThreads(1)
    torch.set_num_threads(1)


def _counted(
    boxes: Iterable[Float32[Tensor, "_ 4"]], total: int, on_progress: Progress | None
) -> Iterator[Float32[Tensor, "_ 4"]]:
    for done, found in enumerate(boxes, start=1):
        yield found
        if on_progress:
            on_progress(done, total)


def _is_equal(path: Path, source: Source, photos: Sequence[Photo]) -> bool:
    """Whether a store of the same source and photos is there, and whole."""
    try:
        store = ProposalStore.open(path)
    except UserError:
        return False
    sizes = {photo.id: (photo.width, photo.height) for photo in photos}
    return store.source == source and list(store.sizes.items()) == list(sizes.items())


def _checked(path: Path, photo: Photo, boxes: Float[Tensor, "P 4"]) -> Float32[ndarray, "P 4"]:
    """Boxes fit to store: finite, not empty, and on the photo."""
    rows = np.ascontiguousarray(boxes.detach().cpu().numpy(), dtype=np.float32).reshape(-1, 4)
    is_box = np.isfinite(rows).all(1) & (rows[:, 2:] > rows[:, :2]).all(1)
    if not is_box.all():
        raise UserError(
            f"{path}: photo {photo.id}: {rows[~is_box][0].tolist()} is not a box; expected x1 < x2, y1 < y2"
        )
    edge = np.array([photo.width, photo.height], np.float32)
    is_inside = (rows[:, :2] >= -_SLACK).all(1) & (rows[:, 2:] <= edge + _SLACK).all(1)
    if not is_inside.all():
        over = rows[~is_inside][0].tolist()
        raise UserError(f"{path}: photo {photo.id} is {photo.width}x{photo.height}, its box {over} reaches beyond")
    return rows


def _write_header(file: Any, total: int) -> None:
    """An .npy header. NumPy pads it so that it keeps its length as the first axis grows: it can be rewritten."""
    np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (total, 4)})


def _map_rows(path: Path, total: int) -> Float32[ndarray, "total 4"]:
    try:
        rows = np.load(path, mmap_mode="r" if total else None, allow_pickle=False)  # nothing cannot be mapped
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{path}: not readable as boxes ({error}); make the proposals anew") from None
    if rows.shape != (total, 4) or rows.dtype != np.float32:
        raise UserError(f"{path}: {rows.dtype} {rows.shape}, its index says float32 ({total}, 4); make it anew")
    return np.asarray(rows)
