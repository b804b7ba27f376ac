"""From photos on disk to a training batch: which photos, in which order, and how they are put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor

from tag2box.data.clues import NO_CLUES, ClueSource
from tag2box.data.look import see
from tag2box.data.transforms import View, place
from tag2box.types import Batch, Clues, Proposals, TaggedPhotos

Colour = tuple[float, float, float]
BLACK: Colour = (0.0, 0.0, 0.0)


@runtime_checkable
class BoxSource(Protocol):
    """What holds the proposals of photos: a proposal store, or a stand-in."""

    def boxes(self, photo_id: str, /) -> Float32[Tensor, "P 4"]:
        """The boxes of a photo, in its own pixels; possibly none."""
        ...

    def scores(self, photo_id: str, /) -> Float32[Tensor, " P"]:
        """What the method that proposed them thinks of each; all zero where it does not say."""
        ...


@dataclass(frozen=True, slots=True)
class Sample:
    """One photo as training sees it. Its boxes are proposals: there is no room for true ones."""

    id: str
    image: Float[Tensor, "3 H W"]  # RGB, 0 to 255: the backbone normalises
    tags: Bool[Tensor, " C"]
    boxes: Float[Tensor, "P 4"]  # proposals, in pixels of ``image``
    unsure: Bool[Tensor, " C"] | None = None  # tags that are neither true nor false
    clues: Clues = Clues()


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
        for epoch in {place // n for place in places}
    }
    return tuple(Slot(place // n, orders[place // n][place % n]) for place in places)


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
    clues: ClueSource = NO_CLUES,
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
        image=see(photo, view),
        tags=photos.tags[index],
        boxes=place(view, boxes[rows], (photo.height, photo.width)),
        unsure=None if photos.unsure is None else photos.unsure[index],
        clues=clues.of(index, photo.id, rows),
    )


def collate(samples: Sequence[Sample], pad: Colour = BLACK, *, size: tuple[int, int] | None = None) -> Batch:
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
        clues=Clues.joined([sample.clues for sample in samples]),
    )
