"""The superpixel cache: straddling scores of proposals, computed once, memory-mapped from disk (used by WSOD2)."""

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

from tag2box import errors, images, io
from tag2box.annotations import BoxSource, Photo
from tag2box.ops.superpixels import Superpixels, straddling
from tag2box.parallel.pool import LocalPool
from tag2box.progress import Progress, silent
from tag2box.proposals.store import MappedArray, write_npy_header
from tag2box.training.feature_cache import photos_digest

_BYTES = 4  # of a value


@dataclass(frozen=True, slots=True)
class SuperpixelCache:
    """Superpixel straddling scores of every proposal of some photos, read from disk on request."""

    path: Path
    spans: Mapping[str, tuple[int, int]]  # rows of each photo, by id
    rows: MappedArray

    @classmethod
    def open(cls, path: Path, spans: Mapping[str, tuple[int, int]]) -> SuperpixelCache:
        """Map the file of photos with these rows."""
        return cls(path, spans, MappedArray.open(path, (_total(spans),)))

    def __reduce__(self) -> tuple[Callable[..., SuperpixelCache], tuple[Path, Mapping[str, tuple[int, int]]]]:
        """Pickled by path: other processes map the file themselves."""
        return SuperpixelCache.open, (self.path, self.spans)

    def __call__(self, photo_id: str) -> Float32[torch.Tensor, " P"]:
        """The scores of a photo's proposals, in job: 1 for a box that consists of whole superpixels."""
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
    """The cache of some photos' proposals, built on all cores if it is missing.

    The file is named by a digest of everything it depends on (settings, photos, proposals), so a stale file is never
    read, and it is renamed into place when it is complete.
    """
    ends = accumulate((len(store.boxes(photo.id)) for photo in photos), initial=0)
    spans = dict(zip((photo.id for photo in photos), pairwise(ends), strict=True))
    path = folder / f"{_identity(photos, store, superpixels)[:24]}.npy"
    try:
        return SuperpixelCache.open(path, spans)
    except errors.UserError:  # missing or damaged
        _build(path, spans, _all_scores(photos, store, superpixels, workers), progress)
    return SuperpixelCache.open(path, spans)


@dataclass(frozen=True, slots=True)
class _Job:
    """A photo to segment, and its boxes."""

    photo: Photo
    boxes: Float32[np.ndarray, "P 4"]

    @property
    def path(self) -> Path:
        return self.photo.path


@dataclass(frozen=True, slots=True)
class _Scores:
    """The scores of a photo's boxes, or an error."""

    values: Float32[np.ndarray, " P"] | None = None
    problem: str = ""


def _all_scores(
    photos: Sequence[Photo], store: BoxSource, superpixels: Superpixels, workers: int | None
) -> Generator[tuple[_Job, _Scores], None, None]:
    jobs = (_Job(photo, store.boxes(photo.id).numpy()) for photo in photos)
    return LocalPool(workers)(partial(_score, superpixels), jobs, lost=_lost)


def _score(superpixels: Superpixels, job: _Job) -> _Scores:
    size = (job.photo.width, job.photo.height)
    try:
        labels = superpixels(images.read_photo(job.photo.path, superpixels.working_size(size)), size)
    except errors.UserError as error:
        return _Scores(problem=str(error))
    height, width = labels.shape
    shown = job.boxes * np.array([width / size[0], height / size[1]] * 2, np.float32)
    return _Scores(straddling(labels, shown))


def _lost(job: _Job, number: int) -> _Scores:
    return _Scores(
        problem=f"{job.path}: the process that segmented it was killed by signal {number}; repair or remove it"
    )


def _build(
    path: Path,
    spans: Mapping[str, tuple[int, int]],
    weighed: Generator[tuple[_Job, _Scores], None, None],
    progress: Progress,
) -> None:
    """Write every photo's scores to their place, in any order."""
    with (
        closing(weighed) as results,
        io.replacing(path) as temporary,
        temporary.open("w+b") as file,
        progress("superpixels", len(spans)) as bar,
    ):
        write_npy_header(file, (_total(spans),))
        start = file.tell()
        for job, found in results:
            if found.values is None:
                raise errors.UserError(found.problem)
            file.seek(start + _BYTES * spans[job.photo.id][0])
            file.write(found.values.astype("<f4").tobytes())
            bar.advance()
        file.flush()
        os.fsync(file.fileno())  # after a power cut there is no file with missing values


def _total(spans: Mapping[str, tuple[int, int]]) -> int:
    return max((last for _, last in spans.values()), default=0)


def _identity(photos: Sequence[Photo], store: BoxSource, superpixels: Superpixels) -> str:
    digest = hashlib.sha256(f"straddling {superpixels} OpenCV {cv2.__version__} {photos_digest(photos)}".encode())
    for photo in photos:
        digest.update(store.boxes(photo.id).numpy().tobytes())
    return digest.hexdigest()
