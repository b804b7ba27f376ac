"""The proposal cache: numbers per proposal, and label maps of photos, computed once and memory-mapped from disk.

Superpixel straddling scores and superpixels (used by WSOD2), the evidence of class maps per class (used by priors), and
segmentations (used by C-MIDN).
"""

import hashlib
import math
import re
from collections.abc import Callable, Generator, Mapping, Sequence, Set
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path

import cv2
import numpy as np
import torch
from jaxtyping import Float32, Int, Int32

from tag2box import errors, images, io, storage
from tag2box.annotations import BoxSource, Photo, ReviewedBoxes
from tag2box.models.class_maps import ClassMaps
from tag2box.ops.superpixels import Superpixels, photo_straddling
from tag2box.parallel.pool import LocalPool
from tag2box.progress import Progress, silent
from tag2box.proposals.mapped_array import BLOCK, ArrayWriter, MappedArray, npy_header
from tag2box.training.class_evidence import ClassEvidence, PreselectedBoxes
from tag2box.training.feature_cache import photos_digest, weights_digest
from tag2box.training.reviewed import JoinedEvidence, ReviewedSource
from tag2box.types import LabelMap, PerProposalAndClass, ReviewedCodes

FILE = re.compile(r"[0-9a-f]{24}\.npy")
_BYTES = 4  # of a value
_REMEDY = "remove the file; it is built again"
_DIGESTS = "digests"
_MAPS = "maps"
_LONGEST_RUN = 1 << 24  # that float32 holds exactly


@dataclass(frozen=True, slots=True)
class ProposalCache:
    """Numbers of every proposal of some photos, read from disk on request."""

    path: Path
    spans: Mapping[str, tuple[int, int]]  # rows of each photo, by id
    width: tuple[int, ...]  # of a row: () for one number, (C,) for one per class
    rows: MappedArray

    @classmethod
    def open(cls, path: Path, spans: Mapping[str, tuple[int, int]], width: tuple[int, ...] = ()) -> "ProposalCache":
        """Map the file of photos with these rows; values are verified when they are first read."""
        rows = MappedArray.open(path, (_total(spans), *width), read_digests(path), _REMEDY)
        return cls(path, spans, width, rows)

    def __reduce__(self) -> tuple[Callable[..., "ProposalCache"], tuple[object, ...]]:
        """Pickled by path: other processes map the file themselves."""
        return ProposalCache.open, (self.path, self.spans, self.width)

    def __call__(self, photo_id: str) -> Float32[torch.Tensor, "P ..."]:
        """The rows of a photo's proposals, in order."""
        return torch.from_numpy(self.rows.copy(*self.spans[photo_id]))


def build_cache(
    path: Path,
    rows: Mapping[str, int],
    results: Callable[[Set[str]], Generator[tuple[str, Float32[np.ndarray, "P ..."]], None, None]],
    *,
    title: str,
    width: tuple[int, ...] = (),
    progress: Progress = silent,
) -> ProposalCache:
    """The cache at ``path``, built if it is missing or cut short.

    It is renamed into place when it is complete. A JSON file beside it has the digests of its blocks. What a killed
    build has finished is not computed again.

    Args:
        path: named by a digest of everything that the numbers depend on, so a stale file is never read.
        rows: number of proposals of each photo, by id.
        results: starts the work, and gives the numbers of each photo in any order, of the ids that it receives.
        title: of the progress bar.
    """
    spans = dict(zip(rows, pairwise(accumulate(rows.values(), initial=0)), strict=True))
    if not _is_complete(path):
        io.sweep(path.parent)
        header, row, names = npy_header((_total(spans), *width)), _BYTES * math.prod(width), list(spans)
        starts = list(accumulate((row * rows[name] for name in names), initial=len(header)))
        numbers = {name: index for index, name in enumerate(names)}
        with storage.writing(path), storage.unfinished_file(path, starts) as made:
            left = {name for name in names if numbers[name] not in made.digests}
            with closing(results(left)) as computed, progress(title, len(names), len(names) - len(left)) as bar:
                for photo_id, values in computed:
                    made.add(numbers[photo_id], values.astype("<f4").tobytes())
                    bar.advance()
            made.file.seek(0)
            made.file.write(header)
        with storage.writing(path):
            digests = storage.BlockDigests.of_file(path, BLOCK).to_json()
            storage.write_checked_json(path.with_suffix(".json"), {"format": 1, _DIGESTS: digests})
    return ProposalCache.open(path, spans, width)


def read_digests(path: Path) -> storage.BlockDigests:
    """The digests of a cache file, from the file beside it; that one has a digest of its own."""
    beside = path.with_suffix(".json")
    value = storage.read_checked_json(beside, "digests of numbers per proposal", _REMEDY)
    try:
        return storage.BlockDigests.from_json(path, value[_DIGESTS])
    except (KeyError, TypeError, ValueError) as error:
        raise errors.UserError(f"{beside}: no digests of numbers per proposal ({error!r}); {_REMEDY}") from None


def _is_complete(path: Path) -> bool:
    return path.exists() and path.with_suffix(".json").exists() and path.stat().st_size == read_digests(path).size


def _total(spans: Mapping[str, tuple[int, int]]) -> int:
    return max((last for _, last in spans.values()), default=0)


def cache_place(folder: Path, depends_on: str, photos: Sequence[Photo], store: BoxSource | None = None) -> Path:
    """The cache file, named by a digest of settings, photos and, for numbers per proposal, proposals."""
    digest = hashlib.sha256(f"{depends_on} {photos_digest(photos, folder)}".encode())
    if store is not None:
        for photo in photos:
            digest.update(store.boxes(photo.id).numpy().tobytes())
    return folder / f"{digest.hexdigest()[:24]}.npy"


def _row_counts(photos: Sequence[Photo], store: BoxSource) -> dict[str, int]:
    return {photo.id: len(store.boxes(photo.id)) for photo in photos}


# ---------------------------------------------------------------- label maps


@dataclass(frozen=True, slots=True)
class LabelMapCache:
    """Label maps of photos, run-length coded on disk: a row is the length of a run of equal labels, and the label."""

    path: Path
    maps: Mapping[str, tuple[int, int, int, int]]  # first and last row, height and width of each photo, by id
    rows: MappedArray

    @classmethod
    def open(cls, path: Path) -> "LabelMapCache":
        """Map a file; runs are verified when they are first read."""
        beside = path.with_suffix(".json")
        value = storage.read_checked_json(beside, "an index of label maps", _REMEDY)
        maps = {name: (first, last, height, width) for name, (first, last, height, width) in value[_MAPS].items()}
        total = max((last for _, last, _, _ in maps.values()), default=0)
        return cls(path, maps, MappedArray.open(path, (total, 2), read_digests(path), _REMEDY))

    def __reduce__(self) -> tuple[Callable[..., "LabelMapCache"], tuple[object, ...]]:
        """Pickled by path: other processes map the file themselves."""
        return LabelMapCache.open, (self.path,)

    def __call__(self, photo_id: str) -> LabelMap:
        """The label map of a photo."""
        first, last, height, width = self.maps[photo_id]
        lengths, labels = self.rows.copy(first, last).astype(np.int32).T
        return torch.from_numpy(np.repeat(labels, lengths).reshape(height, width))


def build_label_maps(
    path: Path,
    count: int,
    results: Callable[[], Generator[tuple[str, Int[np.ndarray, "h w"]], None, None]],
    *,
    title: str,
    progress: Progress = silent,
) -> LabelMapCache:
    """The label maps at ``path``, built if they are missing or cut short, as ``build_cache`` does.

    Args:
        count: of photos.
    """
    if not _is_complete(path):
        io.sweep(path.parent)
        maps: dict[str, tuple[int, int, int, int]] = {}
        with (
            storage.writing(path),
            closing(results()) as computed,
            io.replacing(path) as temporary,
            temporary.open("w+b") as file,
            progress(title, count) as bar,
        ):
            writer = ArrayWriter(file, (2,))
            for photo_id, labels in computed:
                first = writer.rows
                writer.add(torch.from_numpy(label_runs(labels)))
                maps[photo_id] = (first, writer.rows, *labels.shape)
                bar.advance()
            digests = writer.finish(path).to_json()
        with storage.writing(path):
            storage.write_checked_json(path.with_suffix(".json"), {"format": 1, _DIGESTS: digests, _MAPS: maps})
    return LabelMapCache.open(path)


def label_runs(labels: Int[np.ndarray, "h w"]) -> Float32[np.ndarray, "runs 2"]:
    """Lengths and labels of runs of equal labels, in reading order.

    >>> label_runs(np.array([[5, 5, 7], [7, 7, 5]])).tolist()
    [[2.0, 5.0], [3.0, 7.0], [1.0, 5.0]]
    """
    flat = labels.ravel()
    is_first = np.arange(len(flat)) % _LONGEST_RUN == 0
    is_first[1:] |= flat[1:] != flat[:-1]
    starts = np.flatnonzero(is_first)
    return np.stack([np.diff(starts, append=len(flat)), flat[starts]], axis=1).astype(np.float32)


# ---------------------------------------------------------------- class evidence


ComputeEvidence = Callable[
    [ClassEvidence, Sequence[Photo]], Generator[tuple[str, Float32[np.ndarray, "P C"]], None, None]
]
"""Gives the evidence for the proposals of some photos, in any order: in this process, or in a pool."""


def build_evidence_cache(
    evidence: ClassEvidence, folder: Path, *, compute: ComputeEvidence | None = None, progress: Progress = silent
) -> ProposalCache:
    """The evidence of class maps for the proposals of some photos, per class."""
    photos, store = evidence.photos, evidence.store

    def results(left: Set[str]) -> Generator[tuple[str, Float32[np.ndarray, "P C"]], None, None]:
        return (compute or _compute_evidence)(evidence, [photo for photo in photos if photo.id in left])

    path, width = _evidence_place(evidence, folder), (evidence.class_maps.num_classes,)
    return build_cache(path, _row_counts(photos, store), results, title="class maps", width=width, progress=progress)


def _compute_evidence(
    evidence: ClassEvidence, photos: Sequence[Photo]
) -> Generator[tuple[str, Float32[np.ndarray, "P C"]], None, None]:
    return ((photo.id, evidence(photo.id).numpy()) for photo in photos)


def has_evidence(evidence: ClassEvidence, folder: Path) -> bool:
    """Whether the evidence of photos is in the cache."""
    return _is_complete(_evidence_place(evidence, folder))


def _evidence_place(evidence: ClassEvidence, folder: Path) -> Path:
    maps, backbone = evidence.class_maps, evidence.class_maps.backbone
    digest = weights_digest(f"class evidence {maps.side} {backbone.trunk_key()}{backbone.runtime.key()}", [maps])
    return cache_place(folder, digest, evidence.photos, evidence.store)


@dataclass(frozen=True)
class SeenBoxes:
    """The proposals that training sees, their evidence from class maps, and the codes of reviewed photos, if any."""

    boxes: BoxSource
    evidence: PerProposalAndClass | None = None
    codes: ReviewedCodes | None = None


def seen_boxes(
    photos: Sequence[Photo],
    store: BoxSource,
    class_maps: ClassMaps | None,
    *,
    keep: int | None,
    folder: Path,
    compute: ComputeEvidence | None = None,
    progress: Progress = silent,
) -> SeenBoxes:
    """All proposals, or the ``keep`` of each photo with most evidence."""
    if class_maps is None:
        return SeenBoxes(store)
    evidence = build_evidence_cache(
        ClassEvidence(class_maps, photos, store), folder, compute=compute, progress=progress
    )
    if keep is None:
        return SeenBoxes(store, evidence)
    kept = PreselectedBoxes(store, photos, evidence, keep)
    return SeenBoxes(kept, kept.class_evidence)


def with_reviewed_boxes(
    seen: SeenBoxes,
    photos: Sequence[Photo],
    reviewed: ReviewedBoxes,
    class_maps: ClassMaps | None,
    *,
    copies: int,
    folder: Path,
) -> SeenBoxes:
    """The same with the boxes of reviewed photos after their proposals: none of these is dropped for its evidence."""
    source = ReviewedSource(seen.boxes, photos, reviewed, copies)
    if class_maps is None or seen.evidence is None:
        return SeenBoxes(source, seen.evidence, source.codes)
    boxed = tuple(photo for photo in photos if photo.id in reviewed.photos)
    added = build_evidence_cache(ClassEvidence(class_maps, boxed, source.added), folder)
    evidence = JoinedEvidence(seen.evidence, added, frozenset(photo.id for photo in boxed))
    return SeenBoxes(source, evidence, source.codes)


# ---------------------------------------------------------------- superpixels


def build_superpixel_cache(
    photos: Sequence[Photo],
    store: BoxSource,
    superpixels: Superpixels,
    folder: Path,
    *,
    workers: int | None = None,
    progress: Progress = silent,
) -> ProposalCache:
    """Straddling scores of proposals, computed on all cores: 1 for a box that consists of whole superpixels."""

    def results(left: Set[str]) -> Generator[tuple[str, Float32[np.ndarray, " P"]], None, None]:
        wanted = [photo for photo in photos if photo.id in left]
        with closing(_all_scores(wanted, store, superpixels, workers)) as scored:
            for job, found in scored:
                if found.values is None:
                    raise errors.UserError(found.problem)
                yield job.photo.id, found.values

    path = cache_place(folder, f"straddling {superpixels} OpenCV {cv2.__version__}", photos, store)
    return build_cache(path, _row_counts(photos, store), results, title="superpixels", progress=progress)


def build_superpixel_maps(
    photos: Sequence[Photo],
    superpixels: Superpixels,
    folder: Path,
    *,
    workers: int | None = None,
    progress: Progress = silent,
) -> LabelMapCache:
    """Superpixels of photos, computed on all cores."""

    def results() -> Generator[tuple[str, Int32[np.ndarray, "h w"]], None, None]:
        jobs = (_Job(photo, np.zeros((0, 4), np.float32)) for photo in photos)
        with closing(LocalPool(workers)(partial(_segment, superpixels), jobs, lost=_lost)) as segmented:
            for job, found in segmented:
                if found.values is None:
                    raise errors.UserError(found.problem)
                yield job.photo.id, found.values

    path = cache_place(folder, f"superpixels {superpixels} OpenCV {cv2.__version__}", photos)
    return build_label_maps(path, len(photos), results, title="superpixels", progress=progress)


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
    """The scores of a photo's boxes, or its superpixels, or an error."""

    values: np.ndarray | None = None
    problem: str = ""


def _all_scores(
    photos: Sequence[Photo], store: BoxSource, superpixels: Superpixels, workers: int | None
) -> Generator[tuple[_Job, _Scores], None, None]:
    jobs = (_Job(photo, store.boxes(photo.id).numpy()) for photo in photos)
    return LocalPool(workers)(partial(_score, superpixels), jobs, lost=_lost)


def _segment(superpixels: Superpixels, job: _Job) -> _Scores:
    size = (job.photo.width, job.photo.height)
    try:
        return _Scores(superpixels(images.read_photo(job.photo.path, superpixels.working_size(size)), size))
    except errors.UserError as error:
        return _Scores(problem=str(error))


def _score(superpixels: Superpixels, job: _Job) -> _Scores:
    found = _segment(superpixels, job)
    if found.values is None:
        return found
    return _Scores(photo_straddling(found.values, job.boxes, (job.photo.width, job.photo.height)))


def _lost(job: _Job, number: int) -> _Scores:
    return _Scores(
        problem=f"{job.path}: the process that segmented it was killed by signal {number}; repair or remove it"
    )
