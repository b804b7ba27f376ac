"""From photos on disk to a training batch: which photos, in which order, and how they are put together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Protocol

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor

from tag2box.annotations import BoxSource, TaggedPhotos
from tag2box.data.images import load_view
from tag2box.data.side_info import NO_SIDE_INFO, SideInfoLoader
from tag2box.data.transforms import Resize, View, boxes_in_view, view_size
from tag2box.training.dist import SINGLE_PROCESS, DistContext
from tag2box.training.feature_cache import RoiMapSource, TrunkSource
from tag2box.training.loader import count_workers, serial_batches, thread_batches, worker_batches
from tag2box.types import Batch, Proposals, SideInfo

PadColour = tuple[float, float, float]
BLACK: PadColour = (0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Sample:
    """One photo as training sees it. Its boxes are proposals: there is no room for true ones."""

    id: str
    image: Float[Tensor, "3 H W"]  # RGB, 0 to 255: the backbone normalises
    tags: Bool[Tensor, " C"]
    boxes: Float[Tensor, "P 4"]  # proposals, in pixels of ``image``
    unsure: Bool[Tensor, " C"] | None = None  # tags that are neither true nor false
    side_info: SideInfo = SideInfo()


@dataclass(frozen=True, slots=True)
class Slot:
    """A place in the endless sequence of shuffled epochs: the photo, and the epoch it is met in."""

    epoch: int
    index: int


def epoch_order(n: int, seed: int, epoch: int) -> tuple[int, ...]:
    """The n photos in the order of one epoch."""
    return tuple(np.random.default_rng([seed, epoch]).permutation(n).tolist())


def grouped_order(wide: Bool[np.ndarray, " n"], batch: int, seed: int, epoch: int) -> tuple[int, ...]:
    """The photos in the order of one epoch, wide ones put into batches with wide ones and tall with tall.

    What is left over of both makes the batches that it must share: those that span two epochs, and at most one more.
    """
    n = len(wide)
    order = np.array(epoch_order(n, seed, epoch), dtype=np.int64)
    begun = -epoch * n % batch  # places in the batch that the epoch before has begun
    kinds = (order[wide[order]], order[~wide[order]])
    batches = np.concatenate([kind[: len(kind) // batch * batch].reshape(-1, batch) for kind in kinds])
    mixed = np.random.default_rng([seed, epoch, n]).permutation(batches)
    whole = mixed[: max(0, n - begun) // batch].ravel()
    rest = order[~np.isin(order, whole)]
    return tuple(np.concatenate([rest[:begun], whole, rest[begun:]]).tolist())


def batch_slots(
    n: int, batch: int, seed: int, iteration: int, *, wide: Bool[np.ndarray, " n"] | None = None
) -> tuple[Slot, ...]:
    """What iteration ``iteration`` (from 0) trains on: a function of its number, so that a resumed run goes on alike.

    Batches are always full: one may span two epochs, or several where photos are fewer than the batch.

    Args:
        wide: which photos are; given, wide and tall ones keep apart where they can.
    """
    if n < 1:
        raise ValueError("no photos to draw a batch from")
    places = range(iteration * batch, (iteration + 1) * batch)
    orders = {
        epoch: epoch_order(n, seed, epoch) if wide is None else grouped_order(wide, batch, seed, epoch)
        for epoch in {boxes_in_view // n for boxes_in_view in places}
    }
    return tuple(Slot(boxes_in_view // n, orders[boxes_in_view // n][boxes_in_view % n]) for boxes_in_view in places)


def draw_rows(count: int, most: int | None, seed: Sequence[int]) -> Int[Tensor, " p"]:
    """A random subset of at most ``most`` of ``count`` rows (None: all), in their order."""
    if most is None or count <= most:
        return torch.arange(count)
    return torch.from_numpy(np.sort(np.random.default_rng(list(seed)).choice(count, most, replace=False)))


def load_sample(
    photos: TaggedPhotos,
    source: BoxSource,
    index: int,
    view: View,
    *,
    max_proposals: int | None = None,
    seed: Sequence[int] = (0,),
    side_info: SideInfoLoader = NO_SIDE_INFO,
) -> Sample:
    """Read a photo, its tags and its proposals, and show them in a view.

    Args:
        max_proposals: of more proposals, a random subset is taken; for training only.
        seed: numbers that decide the subset, such as (seed, epoch, index).
        clues: where what else is asked for comes from.
    """
    photo = photos.photos[index]
    boxes = source.boxes(photo.id)
    rows = draw_rows(len(boxes), max_proposals, seed)
    return Sample(
        id=photo.id,
        image=load_view(photo, view),
        tags=photos.tags[index],
        boxes=boxes_in_view(view, boxes[rows], (photo.height, photo.width)),
        unsure=None if photos.unsure is None else photos.unsure[index],
        side_info=side_info.of(index, photo.id, rows),
    )


def collate(samples: Sequence[Sample], pad: PadColour = BLACK, *, size: tuple[int, int] | None = None) -> Batch:
    """Put samples together: photos padded with a colour on the right and below to a common size, proposals packed.

    Args:
        size: (height, width) to pad to, at least that of the largest photo; None: just that.
    """
    height, width = size or (
        max(sample.image.shape[1] for sample in samples),
        max(sample.image.shape[2] for sample in samples),
    )
    images = samples[0].image.new_tensor(pad).view(3, 1, 1).repeat(len(samples), 1, height, width)
    for padded, sample in zip(images, samples, strict=True):
        padded[:, : sample.image.shape[1], : sample.image.shape[2]] = sample.image
    unsure = [sample.unsure for sample in samples if sample.unsure is not None]
    return Batch(
        ids=tuple(sample.id for sample in samples),
        tags=torch.stack([sample.tags for sample in samples]),
        proposals=Proposals(
            torch.cat([sample.boxes for sample in samples]), tuple(len(sample.boxes) for sample in samples)
        ),
        images=images,
        unsure=torch.stack(unsure) if unsure else None,
        side_info=SideInfo.joined([sample.side_info for sample in samples]),
    )


@dataclass(frozen=True, kw_only=True)
class Loader:
    """How training is fed."""

    batch_size: Annotated[int, Field(ge=1)] = 8
    """Photos in a batch. S_c spans the batch, so this is part of the method."""
    resize: Resize = Resize()
    views_per_image: Annotated[int, Field(ge=1)] = 1
    """So many views of every photo share its batch, with the same proposals; CASD compares them, and takes 4."""
    max_proposals: Annotated[int, Field(ge=1)] | None = None
    """At most so many proposals of a photo take part in an iteration, drawn anew each time."""
    group_aspect: bool = False
    """Let wide photos share batches with wide ones and tall with tall: less padding, but fewer chance meetings."""
    workers: Annotated[int, Field(ge=0)] | None = None
    """Processes that read photos ahead of training; 0 reads in turn with it. Kept maps need but a thread, or none (0).

    By default half the cores, at most 4, where shared memory holds their batches. Batches do not depend on it.
    """

    def __post_init__(self) -> None:
        views = len(set(self.resize.views()))
        if self.views_per_image > views:
            raise ValueError(
                f"looks is {self.views_per_image}, but resize knows {views} view(s) of a photo; "
                "add resize.scales, or set resize.flip=0.5"
            )

    def views(self, draw: tuple[int, int, int]) -> tuple[View, ...]:
        """The views that a photo is seen in at its turn: one at random, and other ones beside it."""
        first = self.resize.view(*draw)
        others = [view for view in self.resize.views() if view != first]
        order = np.random.default_rng([*draw, self.views_per_image]).permutation(len(others))
        return (first, *(others[i] for i in order[: self.views_per_image - 1]))


class BatchSource(Protocol):
    """What the loop draws from."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names."""
        ...

    def batch(self, iteration: int) -> Batch:
        """The batch of an iteration."""
        ...

    def batches(self, iterations: range) -> AbstractContextManager[Iterator[Batch]]:
        """The batches of some iterations in order, made ahead where that helps, for the length of a with block."""
        ...

    def preview_batch(self, count: int) -> Batch:
        """The same few photos, unmirrored at the middle scale with all their proposals: for looking at."""
        ...

    def photo_boxes(self, photo_id: str) -> Float[Tensor, "P 4"]:
        """All proposals of a photo, in its own pixels."""
        ...


@dataclass(frozen=True)
class BatchSampler:
    """What sources share: whose turn it is, and in which view."""

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

    def photo_boxes(self, photo_id: str) -> Float[Tensor, "P 4"]:
        """All proposals of a photo, in its own pixels."""
        return self.store.boxes(photo_id)

    def share(self, iteration: int) -> tuple[SampledView, ...]:
        """This process's photos of an iteration; the looks at a photo stay together."""
        mine, views_per_image = self.dist.share(self.loader.batch_size), self.loader.views_per_image
        return self.turns(iteration)[mine.start * views_per_image : mine.stop * views_per_image]

    def turns(self, iteration: int) -> tuple[SampledView, ...]:
        """The photos of an iteration, each with a view of its own, or several in a row."""
        slots = batch_slots(len(self.photos), self.loader.batch_size, self.seed, iteration, wide=self._wide)
        draws = [(slot.index, (self.seed, slot.epoch, slot.index)) for slot in slots]
        return tuple(SampledView(index, view, draw) for index, draw in draws for view in self.loader.views(draw))

    def compared(self, batch: Batch, turns: Sequence[SampledView]) -> Batch:
        """A batch that knows which of its photos are looks at the same one."""
        if self.loader.views_per_image == 1:
            return batch
        flipped = torch.tensor([turn.view.flip for turn in turns], dtype=torch.bool)
        return replace(batch, views_per_image=self.loader.views_per_image, flipped=flipped)

    def packed(
        self,
        seen: Sequence[CachedSample],
        *,
        maps: Float[Tensor, "R ch h w"] | None = None,
        trunks: tuple[Float[Tensor, "c h w"], ...] | None = None,
    ) -> Batch:
        """A batch of photos that a frozen network has seen."""
        rows, unsure = [one.index for one in seen], self.photos.unsure
        return Batch(
            ids=tuple(self.photos.photos[row].id for row in rows),
            tags=self.photos.tags[rows],
            proposals=Proposals(torch.cat([one.boxes for one in seen]), tuple(len(one.boxes) for one in seen)),
            maps=maps,
            trunks=trunks,
            unsure=None if unsure is None else unsure[rows],
            side_info=SideInfo.joined([one.side_info for one in seen]),
        )

    @cached_property
    def _wide(self) -> Bool[np.ndarray, " n"] | None:
        photos = self.photos.photos
        return np.array([photo.width >= photo.height for photo in photos]) if self.loader.group_aspect else None


@dataclass(frozen=True)
class ImageBatches(BatchSampler):
    """Batches of pixels, for networks whose trunk learns."""

    pad: PadColour = BLACK
    """What surrounds photos smaller than their batch: the colour that the network takes for nothing."""

    def batch(self, iteration: int) -> Batch:
        """Photos of the iteration, each in a view of its own, padded to the largest of all processes' photos."""
        turns = self.share(iteration)
        samples = [self._sample(turn, self.loader.max_proposals) for turn in turns]
        if not samples:
            return Batch.empty(len(self.classes))
        return self.compared(collate(samples, self.pad, size=self._size(iteration)), turns)

    def _sample(self, turn: SampledView, most: int | None) -> Sample:
        photos, index = self.photos, turn.index
        return load_sample(
            photos, self.store, index, turn.view, max_proposals=most, seed=turn.draw, side_info=self.side_info
        )

    def _size(self, iteration: int) -> tuple[int, int]:
        turns = [(turn.view, self.photos.photos[turn.index]) for turn in self.turns(iteration)]
        sizes = [view_size(view, (photo.height, photo.width)) for view, photo in turns]
        return max(height for height, _ in sizes), max(width for _, width in sizes)

    def batches(self, iterations: range) -> AbstractContextManager[Iterator[Batch]]:
        """Made ahead by processes."""
        workers = count_workers(self.loader.workers, self.most_bytes(), dist=self.dist.here)
        return worker_batches(self.batch, iterations, workers) if workers else serial_batches(self.batch, iterations)

    def preview_batch(self, count: int) -> Batch:
        """A few photos to look at."""
        view = preview_view(self.loader.resize)
        return collate(
            [self._sample(SampledView(i, view, (0,)), None) for i in evenly_spaced_indices(self.photos, count)],
            self.pad,
        )

    def most_bytes(self) -> int:
        """What this process's pixels of the largest batch can take."""
        resize = self.loader.resize
        view = View(max(resize.scales), long_max=resize.long_max)
        sizes = {(photo.height, photo.width) for photo in self.photos.photos}
        seen = [view_size(view, size) for size in sizes]
        photos = self.loader.views_per_image * len(self.dist.share(self.loader.batch_size))
        return photos * 3 * 4 * max(h for h, _ in seen) * max(w for _, w in seen)


@dataclass(frozen=True)
class RoiMapBatches(BatchSampler):
    """Batches of kept RoI maps, for networks whose maps are frozen: no photo is read, no trunk is run."""

    maps: RoiMapSource

    def batch(self, iteration: int) -> Batch:
        """Maps of the iteration's photos, each in a view of its own."""
        most, turns = self.loader.max_proposals, self.share(iteration)
        return self.compared(self._packed([self._look(turn, most) for turn in turns]), turns)

    def batches(self, iterations: range) -> AbstractContextManager[Iterator[Batch]]:
        """Made ahead by a thread: reading leaves the processor free, and maps are too large to pass around."""
        ahead = self.loader.workers != 0
        return thread_batches(self.batch, iterations) if ahead else serial_batches(self.batch, iterations)

    def preview_batch(self, count: int) -> Batch:
        """A few photos to look at."""
        view = preview_view(self.loader.resize)
        return self._packed(
            [self._look(SampledView(i, view, (0,)), None) for i in evenly_spaced_indices(self.photos, count)]
        )

    def _look(self, turn: SampledView, most: int | None) -> CachedSample:
        photo = self.photos.photos[turn.index]
        boxes = boxes_in_view(turn.view, self.store.boxes(photo.id), (photo.height, photo.width))
        maps = self.maps.maps(turn.index, turn.view)
        rows = draw_rows(len(boxes), most, turn.draw)
        return CachedSample(turn.index, boxes[rows], maps[rows], self.side_info.of(turn.index, photo.id, rows))

    def _packed(self, seen: Sequence[CachedSample]) -> Batch:
        return self.packed(seen, maps=torch.cat([one.kept for one in seen])) if seen else Batch.empty(len(self.classes))


@dataclass(frozen=True, slots=True)
class SampledView:
    """A photo's turn in a batch."""

    index: int
    view: View
    draw: tuple[int, ...]  # the numbers that decide what is drawn for it


@dataclass(frozen=True, slots=True)
class CachedSample:
    """A photo in a view: its number, its proposals, what a frozen network made of it, and what else is known."""

    index: int
    boxes: Float[Tensor, "P 4"]
    kept: Tensor
    side_info: SideInfo


def preview_view(resize: Resize) -> View:
    """The middle scale, not mirrored."""
    scales = sorted(resize.scales)
    return View(scales[len(scales) // 2], flip=False, long_max=resize.long_max)


def evenly_spaced_indices(photos: TaggedPhotos, count: int) -> list[int]:
    """``count`` photos at even distances through the dataset: a rule, not a choice."""
    count = min(count, len(photos))
    return [i * len(photos) // count for i in range(count)]


@dataclass(frozen=True)
class TrunkBatches(BatchSampler):
    """Batches of one trunk map a photo, each of its own size: nothing is padded."""

    trunks: TrunkSource

    def batch(self, iteration: int) -> Batch:
        """Trunk maps of the iteration's photos, each in a view of its own."""
        most, turns = self.loader.max_proposals, self.share(iteration)
        return self.compared(self._packed([self._look(turn, most) for turn in turns]), turns)

    def batches(self, iterations: range) -> AbstractContextManager[Iterator[Batch]]:
        """Made ahead by a thread: maps are too large to pass between processes."""
        ahead = self.loader.workers != 0
        return thread_batches(self.batch, iterations) if ahead else serial_batches(self.batch, iterations)

    def preview_batch(self, count: int) -> Batch:
        """A few photos to look at."""
        view = preview_view(self.loader.resize)
        return self._packed(
            [self._look(SampledView(index, view, (0,)), None) for index in evenly_spaced_indices(self.photos, count)]
        )

    def _look(self, turn: SampledView, most: int | None) -> CachedSample:
        photo = self.photos.photos[turn.index]
        boxes = boxes_in_view(turn.view, self.store.boxes(photo.id), (photo.height, photo.width))
        rows = draw_rows(len(boxes), most, turn.draw)
        side_info = self.side_info.of(turn.index, photo.id, rows)
        return CachedSample(turn.index, boxes[rows], self.trunks.trunk(turn.index, turn.view), side_info)

    def _packed(self, seen: Sequence[CachedSample]) -> Batch:
        return self.packed(seen, trunks=tuple(one.kept for one in seen)) if seen else Batch.empty(len(self.classes))
