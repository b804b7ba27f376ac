"""Bottom-up evidence of proposals: computed once for photos and their proposals, kept on disk, mapped."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path

import cv2
import numpy as np
import torch
from jaxtyping import Float32
from numpy import ndarray
from torch import Tensor

from tag2box.annotations import BoxSource, Photo
from tag2box.data.images import read_photo
from tag2box.errors import UserError
from tag2box.io import replacing
from tag2box.ops.superpixels import Superpixels, straddling
from tag2box.progress import Progress, silent
from tag2box.proposals.pool import LocalPool
from tag2box.proposals.store import MappedRows, write_header
from tag2box.training.feature_cache import photos_digest

_BYTES = 4  # of a value


@dataclass(frozen=True, slots=True)
class SuperpixelCache:
    """How well every proposal of some photos keeps to their superpixels, read from disk as it is asked for."""

    path: Path
    spans: Mapping[str, tuple[int, int]]  # rows of each photo, by id
    rows: MappedRows

    @classmethod
    def open(cls, path: Path, spans: Mapping[str, tuple[int, int]]) -> SuperpixelCache:
        """Map the file of photos that have these rows."""
        return cls(path, spans, MappedRows.open(path, (_total(spans),)))

    def __reduce__(self) -> tuple[Callable[..., SuperpixelCache], tuple[Path, Mapping[str, tuple[int, int]]]]:
        """Other processes map the file themselves."""
        return SuperpixelCache.open, (self.path, self.spans)

    def __call__(self, photo_id: str) -> Float32[Tensor, " P"]:
        """The evidence of a photo's proposals, in their order: 1 where one is made of whole superpixels."""
        return torch.from_numpy(self.rows.copy(*self.spans[photo_id]))


def build_superpixel_cache(
    photos: Sequence[Photo],
    store: BoxSource,
    superpixels: Superpixels,
    folder: Path,
    *,
    workers: int | None = None,
    progress: Progress = silent,
) -> SuperpixelCache:
    """The evidence of some photos' proposals: made where it is missing, with all cores, whole or not at all.

    The file is named by a digest of all that it depends on: settings, photos and proposals. A change of any gives
    another name, so nothing stale is read.
    """
    ends = accumulate((len(store.boxes(photo.id)) for photo in photos), initial=0)
    spans = dict(zip((photo.id for photo in photos), pairwise(ends), strict=True))
    path = folder / f"{_identity(photos, store, superpixels)[:24]}.npy"
    try:
        return SuperpixelCache.open(path, spans)
    except UserError:  # not there yet, or damaged
        _make(path, spans, _weighed(photos, store, superpixels, workers), progress)
    return SuperpixelCache.open(path, spans)


@dataclass(frozen=True, slots=True)
class _Order:
    """A photo to cut up, and the boxes to hold against it."""

    photo: Photo
    boxes: Float32[ndarray, "P 4"]

    @property
    def path(self) -> Path:
        return self.photo.path


@dataclass(frozen=True, slots=True)
class _Weighed:
    """The evidence of a photo's boxes, or the problem with it."""

    values: Float32[ndarray, " P"] | None = None
    problem: str = ""


def _weighed(
    photos: Sequence[Photo], store: BoxSource, superpixels: Superpixels, workers: int | None
) -> Generator[tuple[_Order, _Weighed], None, None]:
    orders = (_Order(photo, store.boxes(photo.id).numpy()) for photo in photos)
    return LocalPool(workers)(partial(_weigh, superpixels), orders, lost=_lost)


def _weigh(superpixels: Superpixels, order: _Order) -> _Weighed:
    size = (order.photo.width, order.photo.height)
    try:
        labels = superpixels(read_photo(order.photo.path, superpixels.working_size(size)), size)
    except UserError as error:
        return _Weighed(problem=str(error))
    height, width = labels.shape
    shown = order.boxes * np.array([width / size[0], height / size[1]] * 2, np.float32)
    return _Weighed(straddling(labels, shown))


def _lost(order: _Order, number: int) -> _Weighed:
    return _Weighed(problem=f"{order.path}: the process that cut it up was ended by signal {number}; mend or remove it")


def _make(
    path: Path,
    spans: Mapping[str, tuple[int, int]],
    weighed: Generator[tuple[_Order, _Weighed], None, None],
    progress: Progress,
) -> None:
    """Write every photo's values to their place, in whatever order they come."""
    with (
        closing(weighed) as results,
        replacing(path) as temporary,
        temporary.open("w+b") as file,
        progress("superpixels", len(spans)) as bar,
    ):
        write_header(file, (_total(spans),))
        start = file.tell()
        for order, found in results:
            if found.values is None:
                raise UserError(found.problem)
            file.seek(start + _BYTES * spans[order.photo.id][0])
            file.write(found.values.astype("<f4").tobytes())
            bar.advance()
        file.flush()
        os.fsync(file.fileno())  # a lost current leaves no file whose values never reached the disk


def _total(spans: Mapping[str, tuple[int, int]]) -> int:
    return max((last for _, last in spans.values()), default=0)


def _identity(photos: Sequence[Photo], store: BoxSource, superpixels: Superpixels) -> str:
    digest = hashlib.sha256(f"straddling {superpixels} OpenCV {cv2.__version__} {photos_digest(photos)}".encode())
    for photo in photos:
        digest.update(store.boxes(photo.id).numpy().tobytes())
    return digest.hexdigest()
