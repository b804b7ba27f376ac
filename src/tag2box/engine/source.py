"""Where training batches come from. A batch is a function of its iteration's number, so a resumed run sees the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Protocol

import numpy as np
import torch
from jaxtyping import Bool, Float
from pydantic import Field
from torch import Tensor

from tag2box.data.batch import BLACK, BoxSource, Colour, Sample, batch_slots, collate, draw_rows, load_sample
from tag2box.data.clues import NO_CLUES, ClueSource
from tag2box.data.transforms import Resize, View, place, seen_size
from tag2box.engine.loader import by_processes, by_thread, count_workers, in_turn
from tag2box.engine.maps import RoiMaps
from tag2box.engine.processes import ALONE, Processes
from tag2box.types import Batch, Clues, Proposals, TaggedPhotos


@dataclass(frozen=True, kw_only=True)
class Feed:
    """How training is fed."""

    batch: Annotated[int, Field(ge=1)] = 8
    """Photos in a batch. S_c spans the batch, so this is part of the method."""
    resize: Resize = Resize()
    looks: Annotated[int, Field(ge=1)] = 1
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
        if self.looks > views:
            raise ValueError(
                f"looks is {self.looks}, but resize knows {views} view(s) of a photo; "
                "add resize.scales, or set resize.flip=0.5"
            )

    def views(self, draw: tuple[int, int, int]) -> tuple[View, ...]:
        """The views that a photo is seen in at its turn: one at random, and other ones beside it."""
        first = self.resize.view(*draw)
        others = [view for view in self.resize.views() if view != first]
        order = np.random.default_rng([*draw, self.looks]).permutation(len(others))
        return (first, *(others[i] for i in order[: self.looks - 1]))


class Source(Protocol):
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

    def still(self, count: int) -> Batch:
        """The same few photos, unmirrored at the middle scale with all their proposals: for looking at."""
        ...

    def photo_boxes(self, photo_id: str) -> Float[Tensor, "P 4"]:
        """All proposals of a photo, in its own pixels."""
        ...


@dataclass(frozen=True)
class Fed:
    """What sources share: whose turn it is, and in which view."""

    photos: TaggedPhotos
    store: BoxSource
    feed: Feed
    seed: int
    processes: Processes = field(default=ALONE, kw_only=True)
    clues: ClueSource = field(default=NO_CLUES, kw_only=True)

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names."""
        return self.photos.classes

    def photo_boxes(self, photo_id: str) -> Float[Tensor, "P 4"]:
        """All proposals of a photo, in its own pixels."""
        return self.store.boxes(photo_id)

    def share(self, iteration: int) -> tuple[Turn, ...]:
        """This process's photos of an iteration; the looks at a photo stay together."""
        mine, looks = self.processes.share(self.feed.batch), self.feed.looks
        return self.turns(iteration)[mine.start * looks : mine.stop * looks]

    def turns(self, iteration: int) -> tuple[Turn, ...]:
        """The photos of an iteration, each with a view of its own, or several in a row."""
        slots = batch_slots(len(self.photos), self.feed.batch, self.seed, iteration, wide=self._wide)
        draws = [(slot.index, (self.seed, slot.epoch, slot.index)) for slot in slots]
        return tuple(Turn(index, view, draw) for index, draw in draws for view in self.feed.views(draw))

    def compared(self, batch: Batch, turns: Sequence[Turn]) -> Batch:
        """A batch that knows which of its photos are looks at the same one."""
        if self.feed.looks == 1:
            return batch
        mirrored = torch.tensor([turn.view.flip for turn in turns], dtype=torch.bool)
        return replace(batch, looks=self.feed.looks, mirrored=mirrored)

    def packed(
        self,
        seen: Sequence[Seen],
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
            clues=Clues.joined([one.clues for one in seen]),
        )

    @cached_property
    def _wide(self) -> Bool[np.ndarray, " n"] | None:
        photos = self.photos.photos
        return np.array([photo.width >= photo.height for photo in photos]) if self.feed.group_aspect else None


@dataclass(frozen=True)
class PhotoSource(Fed):
    """Batches of pixels, for networks whose trunk learns."""

    pad: Colour = BLACK
    """What surrounds photos smaller than their batch: the colour that the network takes for nothing."""

    def batch(self, iteration: int) -> Batch:
        """Photos of the iteration, each in a view of its own, padded to the largest of all processes' photos."""
        turns = self.share(iteration)
        samples = [self._sample(turn, self.feed.max_proposals) for turn in turns]
        if not samples:
            return Batch.empty(len(self.classes))
        return self.compared(collate(samples, self.pad, size=self._size(iteration)), turns)

    def _sample(self, turn: Turn, most: int | None) -> Sample:
        photos, index = self.photos, turn.index
        return load_sample(photos, self.store, index, turn.view, max_proposals=most, seed=turn.draw, clues=self.clues)

    def _size(self, iteration: int) -> tuple[int, int]:
        turns = [(turn.view, self.photos.photos[turn.index]) for turn in self.turns(iteration)]
        sizes = [seen_size(view, (photo.height, photo.width)) for view, photo in turns]
        return max(height for height, _ in sizes), max(width for _, width in sizes)

    def batches(self, iterations: range) -> AbstractContextManager[Iterator[Batch]]:
        """Made ahead by processes."""
        workers = count_workers(self.feed.workers, self.most_bytes(), processes=self.processes.here)
        return by_processes(self.batch, iterations, workers) if workers else in_turn(self.batch, iterations)

    def still(self, count: int) -> Batch:
        """A few photos to look at."""
        view = still_view(self.feed.resize)
        return collate([self._sample(Turn(i, view, (0,)), None) for i in spread(self.photos, count)], self.pad)

    def most_bytes(self) -> int:
        """What this process's pixels of the largest batch can take."""
        resize = self.feed.resize
        view = View(max(resize.scales), long_max=resize.long_max)
        sizes = {(photo.height, photo.width) for photo in self.photos.photos}
        seen = [seen_size(view, size) for size in sizes]
        photos = self.feed.looks * len(self.processes.share(self.feed.batch))
        return photos * 3 * 4 * max(h for h, _ in seen) * max(w for _, w in seen)


@dataclass(frozen=True)
class MapSource(Fed):
    """Batches of kept RoI maps, for networks whose maps are frozen: no photo is read, no trunk is run."""

    maps: RoiMaps

    def batch(self, iteration: int) -> Batch:
        """Maps of the iteration's photos, each in a view of its own."""
        most, turns = self.feed.max_proposals, self.share(iteration)
        return self.compared(self._packed([self._look(turn, most) for turn in turns]), turns)

    def batches(self, iterations: range) -> AbstractContextManager[Iterator[Batch]]:
        """Made ahead by a thread: reading leaves the processor free, and maps are too large to pass around."""
        ahead = self.feed.workers != 0
        return by_thread(self.batch, iterations) if ahead else in_turn(self.batch, iterations)

    def still(self, count: int) -> Batch:
        """A few photos to look at."""
        view = still_view(self.feed.resize)
        return self._packed([self._look(Turn(i, view, (0,)), None) for i in spread(self.photos, count)])

    def _look(self, turn: Turn, most: int | None) -> Seen:
        photo = self.photos.photos[turn.index]
        boxes = place(turn.view, self.store.boxes(photo.id), (photo.height, photo.width))
        maps = self.maps.maps(turn.index, turn.view)
        rows = draw_rows(len(boxes), most, turn.draw)
        return Seen(turn.index, boxes[rows], maps[rows], self.clues.of(turn.index, photo.id, rows))

    def _packed(self, seen: Sequence[Seen]) -> Batch:
        return self.packed(seen, maps=torch.cat([one.kept for one in seen])) if seen else Batch.empty(len(self.classes))


@dataclass(frozen=True, slots=True)
class Turn:
    """A photo's turn in a batch."""

    index: int
    view: View
    draw: tuple[int, ...]  # the numbers that decide what is drawn for it


@dataclass(frozen=True, slots=True)
class Seen:
    """A photo in a view: its number, its proposals, what a frozen network made of it, and what else is known."""

    index: int
    boxes: Float[Tensor, "P 4"]
    kept: Tensor
    clues: Clues


def still_view(resize: Resize) -> View:
    """The middle scale, not mirrored."""
    scales = sorted(resize.scales)
    return View(scales[len(scales) // 2], flip=False, long_max=resize.long_max)


def spread(photos: TaggedPhotos, count: int) -> list[int]:
    """``count`` photos at even distances through the dataset: a rule, not a choice."""
    count = min(count, len(photos))
    return [i * len(photos) // count for i in range(count)]
