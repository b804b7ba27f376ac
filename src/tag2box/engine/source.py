"""Where training batches come from. A batch is a function of its iteration's number, so a resumed run sees the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol

import numpy as np
import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from tag2box.data.batch import BoxSource, batch_slots, collate, load_sample
from tag2box.data.transforms import Resize, View, place
from tag2box.engine.maps import RoiMaps
from tag2box.types import Batch, Proposals, TaggedPhotos


@dataclass(frozen=True, kw_only=True)
class Feed:
    """How training is fed."""

    batch: Annotated[int, Field(ge=1)] = 8
    """Photos in a batch. S_c spans the batch, so this is part of the method."""
    resize: Resize = Resize()
    max_proposals: Annotated[int, Field(ge=1)] | None = None
    """At most so many proposals of a photo take part in an iteration, drawn anew each time."""


class Source(Protocol):
    """What the loop draws from."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names."""
        ...

    def batch(self, iteration: int) -> Batch:
        """The batch of an iteration."""
        ...

    def still(self, count: int) -> Batch:
        """The same few photos, unmirrored at the middle scale with all their proposals: for looking at."""
        ...

    def photo_boxes(self, photo_id: str) -> Float[Tensor, "P 4"]:
        """All proposals of a photo, in its own pixels."""
        ...


@dataclass(frozen=True)
class PhotoSource:
    """Batches of pixels, for networks whose trunk learns."""

    photos: TaggedPhotos
    store: BoxSource
    feed: Feed
    seed: int

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names."""
        return self.photos.classes

    def batch(self, iteration: int) -> Batch:
        """Photos of the iteration, each in a view of its own."""
        samples = []
        for slot in batch_slots(len(self.photos), self.feed.batch, self.seed, iteration):
            draw = (self.seed, slot.epoch, slot.index)
            view = self.feed.resize.view(*draw)
            most = self.feed.max_proposals
            samples.append(load_sample(self.photos, self.store, slot.index, view, max_proposals=most, seed=draw))
        return collate(samples)

    def still(self, count: int) -> Batch:
        """A few photos to look at."""
        view = still_view(self.feed.resize)
        return collate([load_sample(self.photos, self.store, i, view) for i in spread(self.photos, count)])

    def photo_boxes(self, photo_id: str) -> Float[Tensor, "P 4"]:
        """All proposals of a photo, in its own pixels."""
        return self.store.boxes(photo_id)


@dataclass(frozen=True)
class MapSource:
    """Batches of kept RoI maps, for networks whose maps are frozen: no photo is read, no trunk is run."""

    photos: TaggedPhotos
    store: BoxSource
    feed: Feed
    seed: int
    maps: RoiMaps

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names."""
        return self.photos.classes

    def batch(self, iteration: int) -> Batch:
        """Maps of the iteration's photos, each in a view of its own."""
        looks = []
        for slot in batch_slots(len(self.photos), self.feed.batch, self.seed, iteration):
            draw = (self.seed, slot.epoch, slot.index)
            looks.append(self._look(slot.index, self.feed.resize.view(*draw), draw, self.feed.max_proposals))
        return self._packed(looks)

    def still(self, count: int) -> Batch:
        """A few photos to look at."""
        view = still_view(self.feed.resize)
        return self._packed([self._look(i, view, (0,), None) for i in spread(self.photos, count)])

    def photo_boxes(self, photo_id: str) -> Float[Tensor, "P 4"]:
        """All proposals of a photo, in its own pixels."""
        return self.store.boxes(photo_id)

    def _look(self, index: int, view: View, draw: Sequence[int], most: int | None) -> _Look:
        photo = self.photos.photos[index]
        boxes = place(view, self.store.boxes(photo.id), (photo.height, photo.width))
        maps = self.maps.maps(index, view)
        if most is not None and len(boxes) > most:
            rows = np.sort(np.random.default_rng(list(draw)).choice(len(boxes), most, replace=False))
            boxes, maps = boxes[rows], maps[rows]
        return _Look(index, boxes, maps)

    def _packed(self, looks: Sequence[_Look]) -> Batch:
        return Batch(
            ids=tuple(self.photos.photos[look.index].id for look in looks),
            tags=self.photos.tags[[look.index for look in looks]],
            proposals=Proposals(torch.cat([look.boxes for look in looks]), tuple(len(look.boxes) for look in looks)),
            maps=torch.cat([look.maps for look in looks]),
        )


@dataclass(frozen=True, slots=True)
class _Look:
    index: int
    boxes: Float[Tensor, "P 4"]
    maps: Float[Tensor, "P ch h w"]


def still_view(resize: Resize) -> View:
    """The middle scale, not mirrored."""
    scales = sorted(resize.scales)
    return View(scales[len(scales) // 2], flip=False, long_max=resize.long_max)


def spread(photos: TaggedPhotos, count: int) -> list[int]:
    """``count`` photos at even distances through the dataset: a rule, not a choice."""
    count = min(count, len(photos))
    return [i * len(photos) // count for i in range(count)]
