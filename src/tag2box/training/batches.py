"""The batch sampler: which photos form the batch of an iteration, in which views, and how they are collated.

A batch is a function of the iteration's number, so a resumed run gets the same batches. ``ImageBatches`` yields pixels,
``FeatureBatches`` features of a frozen network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Protocol, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field

from tag2box import images
from tag2box.annotations import BoxSource, TaggedPhotos
from tag2box.training.dist import SINGLE_PROCESS, DistContext
from tag2box.training.feature_cache import FeatureCache, RoiMaps, TrunkMaps
from tag2box.training.loader import count_workers, worker_batches
from tag2box.training.reviewed import JoinedMaps
from tag2box.types import NO_SIDE_INFO, Batch, Proposals, SideInfo, SideInfoLoader

T = TypeVar("T")
R = TypeVar("R")
PadColour = tuple[float, float, float]
BLACK: PadColour = (0.0, 0.0, 0.0)


@dataclass(frozen=True, kw_only=True)
class Loader:
    """Batch size, image views and worker processes."""

    batch_size: Annotated[int, Field(ge=1, le=65_536)] = 8
    """Photos per batch. The exemplars S_c span the batch, so this is part of the method."""
    resize: images.Resize = images.Resize()
    views_per_image: Annotated[int, Field(ge=1, le=1000)] = 1
    """Views of every photo in its batch, with the same proposals: scales and their flips. CASD compares 4."""
    max_proposals: Annotated[int, Field(ge=1)] | None = None
    """Proposals per photo and iteration, a random subset each time; default: all."""
    box_copies: Annotated[int, Field(ge=0, le=1000)] = 8
    """Jittered copies of every reviewed box (data.boxes) among the proposals of its photo, beside the box itself."""
    group_aspect: bool = False
    """Batch landscape photos with landscape ones and portrait with portrait: less padding, less mixing."""
    workers: Annotated[int, Field(ge=0, le=1000)] | None = None
    """Worker processes that decode photos; 0 decodes in the main process. With a feature cache, a thread (or 0: none).

    Default: half the cores, at most 4, if shared memory holds their batches. Batches do not depend on it.
    """

    def __post_init__(self) -> None:
        views = len(set(self.resize.views()))
        if self.views_per_image > views:
            raise ValueError(
                f"views_per_image is {self.views_per_image}, but resize has {views} view(s) of a photo; "
                "add resize.scales, or set resize.flip=0.5"
            )

    def views(self, draw: tuple[int, int, int]) -> tuple[images.View, ...]:
        """The views of a photo in one batch: a random one, its flip, then random scales, each followed by its flip."""
        first = self.resize.view(*draw)
        if self.views_per_image == 1:
            return (first,)
        possible, flips = self.resize.views(), (first.flip, not first.flip)
        scales = [short for short in dict.fromkeys(view.short for view in possible) if short != first.short]
        order = np.random.default_rng([*draw, self.views_per_image]).permutation(len(scales))
        ranked = [replace(first, short=s, flip=f) for s in (first.short, *(scales[i] for i in order)) for f in flips]
        return tuple(view for view in ranked if view in possible)[: self.views_per_image]


class BatchSource(Protocol):
    """What the training loop draws from."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names."""
        ...

    def batch(self, iteration: int) -> Batch:
        """The batch of an iteration."""
        ...

    def batches(self, iterations: range) -> AbstractContextManager[Iterator[Batch]]:
        """The batches of some iterations in order, prefetched if that helps, for the duration of a with block."""
        ...

    def preview_batch(self, count: int) -> Batch:
        """The same few photos, unflipped at the middle scale with all their proposals, for the report."""
        ...

    def photo_boxes(self, photo_id: str) -> Float[torch.Tensor, "P 4"]:
        """All proposals of a photo, in its own pixels."""
        ...


@dataclass(frozen=True, slots=True)
class SampledView:
    """A photo of a batch in one of its views."""

    index: int
    view: images.View
    draw: tuple[int, ...]  # seeds the random choices made for it


@dataclass(frozen=True)
class BatchSampler:
    """What all batch sources share: the photos and views of an iteration."""

    photos: TaggedPhotos
    store: BoxSource
    loader: Loader
    seed: int
    dist: DistContext = field(default=SINGLE_PROCESS, kw_only=True)
    side_info: SideInfoLoader = field(default=NO_SIDE_INFO, kw_only=True)

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names."""
        return self.photos.classes

    def photo_boxes(self, photo_id: str) -> Float[torch.Tensor, "P 4"]:
        """All proposals of a photo, in its own pixels."""
        return self.store.boxes(photo_id)

    def shard(self, iteration: int) -> tuple[SampledView, ...]:
        """This rank's photos of an iteration; the views of a photo stay together."""
        mine, views = self._shard, self.loader.views_per_image
        return self.sampled(iteration)[mine.start * views : mine.stop * views]

    def sampled(self, iteration: int) -> tuple[SampledView, ...]:
        """The photos of an iteration on all ranks, each in its views."""
        slots = batch_slots(len(self.photos.photos), self.loader.batch_size, self.seed, iteration, wide=self._wide)
        draws = [(slot.index, (self.seed, slot.epoch, slot.index)) for slot in slots]
        return tuple(SampledView(index, view, draw) for index, draw in draws for view in self.loader.views(draw))

    def with_views(self, batch: Batch, sampled: Sequence[SampledView]) -> Batch:
        """The batch with its grouping into views of the same photo."""
        if self.loader.views_per_image == 1:
            return batch
        flipped = torch.tensor([one.view.flip for one in sampled], dtype=torch.bool)
        return replace(batch, views_per_image=self.loader.views_per_image, flipped=flipped)

    def preview(self, count: int) -> list[SampledView]:
        """Evenly spaced photos, unflipped at the middle scale."""
        view = preview_view(self.loader.resize)
        return [SampledView(index, view, (0,)) for index in evenly_spaced_indices(len(self.photos), count)]

    @cached_property
    def _shard(self) -> range:
        return self.dist.shard(self.loader.batch_size)

    @cached_property
    def _wide(self) -> Bool[np.ndarray, " n"] | None:
        photos = self.photos.photos
        return np.array([photo.width >= photo.height for photo in photos]) if self.loader.group_aspect else None


@dataclass(frozen=True)
class FeatureBatches(BatchSampler):
    """Batches of features of a frozen network: RoI maps, or trunk maps without padding. No photo is decoded."""

    features: FeatureCache | JoinedMaps | RoiMaps | TrunkMaps

    @cached_property
    def has_roi_maps(self) -> bool:
        """Whether the features are RoI maps."""
        features = self.features.features if isinstance(self.features, FeatureCache) else self.features
        return isinstance(features, RoiMaps | JoinedMaps)

    def batch(self, iteration: int) -> Batch:
        """The features of the iteration's photos, each in its views."""
        sampled = self.shard(iteration)
        return self.with_views(self._collate(sampled, self.loader.max_proposals), sampled)

    def batches(self, iterations: range) -> AbstractContextManager[Iterator[Batch]]:
        """Prefetched by a thread: reading leaves the processor free, and features are too large to pass around."""
        return thread_batches(self.batch, iterations) if self.loader.workers != 0 else serial(self.batch, iterations)

    def preview_batch(self, count: int) -> Batch:
        """A few photos for the report."""
        return self._collate(self.preview(count), None)

    def _collate(self, sampled: Sequence[SampledView], most: int | None) -> Batch:
        if not sampled:
            return Batch.empty(len(self.classes))
        boxes, features, side_info, frames = [], [], [], []
        for one in sampled:
            photo = self.photos.photos[one.index]
            own = images.boxes_in_view(one.view, self.store.boxes(photo.id), (photo.height, photo.width))
            frames.append(images.view_size(one.view, (photo.height, photo.width))[::-1])
            rows = draw_rows(len(own), most, one.draw, self.side_info.kept(photo.id))
            kept = self.features.get(one.index, one.view)
            boxes.append(own[rows])
            features.append(kept[rows] if self.has_roi_maps else kept)
            if self.side_info is not NO_SIDE_INFO:
                side_info.append(self.side_info.of(one.index, photo.id, rows, flip=one.view.flip))
        index, unsure = [one.index for one in sampled], self.photos.unsure
        return Batch(
            ids=tuple(self.photos.photos[i].id for i in index),
            tags=self.photos.tags[index],
            proposals=Proposals(torch.cat(boxes), tuple(map(len, boxes)), tuple(frames)),
            maps=torch.cat(features) if self.has_roi_maps else None,
            trunks=None if self.has_roi_maps else tuple(features),
            unsure=None if unsure is None else unsure[index],
            side_info=SideInfo.joined(side_info) if side_info else SideInfo(),
        )


@dataclass(frozen=True)
class ImageBatches(BatchSampler):
    """Batches of pixels, for networks with a trainable trunk."""

    pad: PadColour = BLACK
    """Colour around photos smaller than their batch: the one that the preprocessing maps to zero."""

    def batch(self, iteration: int) -> Batch:
        """Photos of the iteration, each in its views, padded to the largest of all ranks."""
        sampled = self.shard(iteration)
        if not sampled:
            return Batch.empty(len(self.classes))
        samples = [self.sample(one, self.loader.max_proposals) for one in sampled]
        return self.with_views(collate(samples, self.pad, size=self._size(iteration)), sampled)

    def sample(self, one: SampledView, most: int | None) -> Sample:
        """Decode a photo in a view, with its tags and a random subset of its proposals."""
        photos, photo = self.photos, self.photos.photos[one.index]
        boxes = self.store.boxes(photo.id)
        rows = draw_rows(len(boxes), most, one.draw, self.side_info.kept(photo.id))
        return Sample(
            id=photo.id,
            image=images.load_view(photo, one.view),
            tags=photos.tags[one.index],
            boxes=images.boxes_in_view(one.view, boxes[rows], (photo.height, photo.width)),
            unsure=None if photos.unsure is None else photos.unsure[one.index],
            side_info=self.side_info.of(one.index, photo.id, rows, flip=one.view.flip),
        )

    def _size(self, iteration: int) -> tuple[int, int]:
        views = [(one.view, self.photos.photos[one.index]) for one in self.sampled(iteration)]
        sizes = [images.view_size(view, (photo.height, photo.width)) for view, photo in views]
        return max(height for height, _ in sizes), max(width for _, width in sizes)

    def batches(self, iterations: range) -> AbstractContextManager[Iterator[Batch]]:
        """Prefetched by worker processes."""
        count = count_workers(self.loader.workers, self.max_bytes(), ranks=self.dist.local_world_size)
        return worker_batches(self.batch, iterations, count) if count else serial(self.batch, iterations)

    def preview_batch(self, count: int) -> Batch:
        """A few photos for the report."""
        return collate([self.sample(one, None) for one in self.preview(count)], self.pad)

    def max_bytes(self) -> int:
        """An upper bound of the pixels of this rank's batch."""
        resize = self.loader.resize
        view = images.View(max(resize.scales), long_max=resize.long_max)
        sizes = {images.view_size(view, (photo.height, photo.width)) for photo in self.photos.photos}
        photos = self.loader.views_per_image * len(self._shard)
        return photos * 3 * 4 * max(h for h, _ in sizes) * max(w for _, w in sizes)


@dataclass(frozen=True, slots=True)
class Sample:
    """One photo as training sees it. Its boxes are proposals; reviewed ones are marked in its side info."""

    id: str
    image: Float[torch.Tensor, "3 H W"]  # RGB, 0 to 255: the backbone normalises
    tags: Bool[torch.Tensor, " C"]
    boxes: Float[torch.Tensor, "P 4"]  # proposals, in pixels of ``image``
    unsure: Bool[torch.Tensor, " C"] | None = None  # tags that are neither true nor false
    side_info: SideInfo = SideInfo()


def collate(samples: Sequence[Sample], pad: PadColour = BLACK, *, size: tuple[int, int] | None = None) -> Batch:
    """Samples as a batch: photos padded on the right and below to a common size, proposals packed.

    Args:
        size: (height, width) to pad to, at least that of the largest photo; default: that of the largest photo.
    """
    height, width = size or (
        max(sample.image.shape[1] for sample in samples),
        max(sample.image.shape[2] for sample in samples),
    )
    images = samples[0].image.new_tensor(pad).view(3, 1, 1).repeat(len(samples), 1, height, width)
    for padded, sample in zip(images, samples, strict=True):
        padded[:, : sample.image.shape[1], : sample.image.shape[2]] = sample.image
    unsure = [sample.unsure for sample in samples if sample.unsure is not None]
    boxes = [sample.boxes for sample in samples]
    frames = tuple((sample.image.shape[2], sample.image.shape[1]) for sample in samples)
    return Batch(
        ids=tuple(sample.id for sample in samples),
        tags=torch.stack([sample.tags for sample in samples]),
        proposals=Proposals(torch.cat(boxes), tuple(map(len, boxes)), frames),
        images=images,
        unsure=torch.stack(unsure) if unsure else None,
        side_info=SideInfo.joined([sample.side_info for sample in samples]),
    )


@dataclass(frozen=True, slots=True)
class Slot:
    """A position in the endless sequence of shuffled epochs: the photo, and its epoch."""

    epoch: int
    index: int


def batch_slots(
    n: int, batch: int, seed: int, iteration: int, *, wide: Bool[np.ndarray, " n"] | None = None
) -> tuple[Slot, ...]:
    """The photos of iteration ``iteration`` (from 0): a function of its number alone.

    Batches are always full: one may span two epochs, or several if there are fewer photos than the batch size.

    Args:
        wide: landscape photos; if given, landscape and portrait photos are batched apart as far as possible.
    """
    if n < 1:
        raise ValueError("no photos to draw a batch from")
    positions = range(iteration * batch, (iteration + 1) * batch)
    orders = {
        epoch: epoch_order(n, seed, epoch) if wide is None else grouped_order(wide, batch, seed, epoch)
        for epoch in {position // n for position in positions}
    }
    return tuple(Slot(position // n, orders[position // n][position % n]) for position in positions)


def epoch_order(n: int, seed: int, epoch: int) -> tuple[int, ...]:
    """The n photos in the order of one epoch."""
    return tuple(np.random.default_rng([seed, epoch]).permutation(n).tolist())


def grouped_order(wide: Bool[np.ndarray, " n"], batch: int, seed: int, epoch: int) -> tuple[int, ...]:
    """The photos in the order of one epoch, landscape photos batched together and portrait photos together.

    What is left over of both fills the batches that must mix: those that span two epochs, and at most one more.
    """
    n = len(wide)
    order = np.array(epoch_order(n, seed, epoch), dtype=np.int64)
    begun = -epoch * n % batch  # positions of the first batch that belong to the previous epoch
    kinds = (order[wide[order]], order[~wide[order]])
    batches = np.concatenate([kind[: len(kind) // batch * batch].reshape(-1, batch) for kind in kinds])
    mixed = np.random.default_rng([seed, epoch, n]).permutation(batches)
    whole = mixed[: max(0, n - begun) // batch].ravel()
    rest = order[~np.isin(order, whole)]
    return tuple(np.concatenate([rest[:begun], whole, rest[begun:]]).tolist())


def draw_rows(
    count: int, most: int | None, seed: Sequence[int], kept: Int[torch.Tensor, " k"] | None = None
) -> Int[torch.Tensor, " p"]:
    """A random subset of at most ``most`` of ``count`` rows (None: all), in order; ``kept`` ones are always in it."""
    if most is None or count <= most:
        return torch.arange(count)
    if kept is None or not len(kept):
        return torch.from_numpy(np.sort(np.random.default_rng(list(seed)).choice(count, most, replace=False)))
    others = np.setdiff1d(np.arange(count), kept.numpy())
    drawn = np.random.default_rng(list(seed)).choice(others, max(0, most - len(kept)), replace=False)
    return torch.from_numpy(np.sort(np.concatenate([kept.numpy(), drawn])))


def preview_view(resize: images.Resize) -> images.View:
    """The middle scale, unflipped."""
    scales = sorted(resize.scales)
    return images.View(scales[len(scales) // 2], flip=False, long_max=resize.long_max)


def evenly_spaced_indices(total: int, count: int) -> list[int]:
    """``count`` indices at even distances."""
    count = min(count, total)
    return [i * total // count for i in range(count)]


@contextmanager
def serial(make: Callable[[int], Batch], iterations: range) -> Iterator[Iterator[Batch]]:
    """Each batch when it is requested."""
    yield (make(iteration) for iteration in iterations)


@contextmanager
def thread_batches(make: Callable[[int], Batch], iterations: range) -> Iterator[Iterator[Batch]]:
    """One batch prefetched by a thread."""
    with ThreadPoolExecutor(1, thread_name_prefix="tag2box-batches") as pool:
        yield prefetch(pool, make, iterations)


def prefetch(pool: ThreadPoolExecutor, make: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
    """Results in order, the next one computed by ``pool`` meanwhile."""
    if not items:
        return
    coming = pool.submit(make, items[0])
    for item in items[1:]:
        result = coming.result()
        coming = pool.submit(make, item)
        yield result
    yield coming.result()
