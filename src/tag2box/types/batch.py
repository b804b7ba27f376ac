"""A batch of photos and their proposals, with pixels or without."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Proposals:
    """Candidate boxes of a batch, packed image after image."""

    boxes: Float[Tensor, "R 4"]
    sizes: tuple[int, ...]  # proposals per image; sums to R

    def __post_init__(self) -> None:
        if self.boxes.shape != (sum(self.sizes), 4):
            raise ValueError(f"boxes {tuple(self.boxes.shape)} do not match sizes {self.sizes}")

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """Cut any (R, ...) tensor back into images."""
        return torch.split(x, list(self.sizes))

    def spans(self) -> tuple[range, ...]:
        """The rows of each image."""
        ends = torch.tensor((0, *self.sizes)).cumsum(0).tolist()
        return tuple(range(a, b) for a, b in pairwise(ends))

    def image_ids(self) -> Int[Tensor, " R"]:
        """The image each row belongs to."""
        sizes = torch.tensor(self.sizes, dtype=torch.long, device=self.boxes.device)
        return torch.repeat_interleave(torch.arange(len(self.sizes), device=self.boxes.device), sizes)


@dataclass(frozen=True, slots=True)
class Clues:
    """What may be known of a batch beside its tags. None where nobody knows it, or nothing asks for it."""

    counts: Int[Tensor, "N C"] | None = None  # objects of each class; -1 where nobody counted
    evidence: Float[Tensor, " R"] | None = None  # how well a proposal keeps to its photo's superpixels, 0 to 1
    objectness: Float[Tensor, " R"] | None = None  # what the method that proposed it thinks of it, 0 to 1

    @classmethod
    def joined(cls, parts: Sequence[Clues]) -> Clues:
        """Clues of parts of a batch, one after the other; a clue that a part lacks is lost."""
        columns = [[getattr(part, clue.name) for part in parts] for clue in fields(cls)]
        return cls(*(torch.cat(x) if x and all(part is not None for part in x) else None for x in columns))

    def of(self, photos: slice, rows: slice | Int[Tensor, " r"]) -> Clues:
        """Those of some photos, and of their proposals."""
        counts = None if self.counts is None else self.counts[photos]
        return Clues(counts, *(None if x is None else x[rows] for x in (self.evidence, self.objectness)))

    def to(self, device: torch.device) -> Clues:
        """The same on a device."""
        return Clues(*(None if x is None else x.to(device) for x in (self.counts, self.evidence, self.objectness)))


@dataclass(frozen=True, slots=True)
class Batch:
    """One training batch: pixels (``images``), or what a frozen network made of them: ``trunks``, or RoI ``maps``."""

    ids: tuple[str, ...]
    tags: Bool[Tensor, "N C"]
    proposals: Proposals
    images: Float[Tensor, "N 3 H W"] | None = None
    maps: Float[Tensor, "R ch h w"] | None = None
    unsure: Bool[Tensor, "N C"] | None = None  # tags that are neither true nor false
    trunks: tuple[Float[Tensor, "c h w"], ...] | None = None  # a map a photo, each of its own size
    clues: Clues = Clues()
    looks: int = 1  # so many photos in a row are one photo seen in different views
    mirrored: Bool[Tensor, " N"] | None = None  # which are mirror images; None where looks are not compared

    def __post_init__(self) -> None:
        if sum(x is not None for x in (self.images, self.maps, self.trunks)) != 1:
            raise ValueError("a batch carries either images, trunks or maps")

    @classmethod
    def empty(cls, num_classes: int) -> Batch:
        """No photo at all: the share of a process when processes outnumber photos."""
        tags = torch.zeros(0, num_classes, dtype=torch.bool)
        return cls((), tags, Proposals(torch.zeros(0, 4), ()), trunks=())

    def photo(self, index: int) -> Batch:
        """One photo of it, in one look."""
        span, photo = self.proposals.spans()[index], slice(index, index + 1)
        rows = slice(span.start, span.stop)
        return Batch(
            ids=self.ids[photo],
            tags=self.tags[photo],
            proposals=Proposals(self.proposals.boxes[rows], self.proposals.sizes[photo]),
            images=None if self.images is None else self.images[photo],
            maps=None if self.maps is None else self.maps[rows],
            unsure=None if self.unsure is None else self.unsure[photo],
            trunks=None if self.trunks is None else self.trunks[photo],
            clues=self.clues.of(photo, rows),
        )

    def facts(self) -> Facts:
        """What the objective is told of it."""
        return Facts(self.proposals, self.tags, self.unsure, self.clues, self.looks, self.mirrored)

    def to(self, device: torch.device) -> Batch:
        """The same on a device."""
        return Batch(
            ids=self.ids,
            tags=self.tags.to(device),
            proposals=Proposals(self.proposals.boxes.to(device), self.proposals.sizes),
            images=None if self.images is None else self.images.to(device),
            maps=None if self.maps is None else self.maps.to(device),
            unsure=None if self.unsure is None else self.unsure.to(device),
            trunks=None if self.trunks is None else tuple(trunk.to(device) for trunk in self.trunks),
            clues=self.clues.to(device),
            looks=self.looks,
            mirrored=None if self.mirrored is None else self.mirrored.to(device),
        )


@dataclass(frozen=True, slots=True)
class Facts:
    """A batch without its pixels: proposals and tags, all that the objective is told beside the network's outputs."""

    proposals: Proposals
    tags: Bool[Tensor, "N C"]
    unsure: Bool[Tensor, "N C"] | None = None
    clues: Clues = Clues()
    looks: int = 1  # so many photos in a row are one photo, with the same proposals in the same order
    mirrored: Bool[Tensor, " N"] | None = None

    @classmethod
    def joined(cls, parts: Sequence[Facts]) -> Facts:
        """Parts of a batch, one after the other; looks of a photo may be in different parts."""
        unsure = [part.unsure for part in parts if part.unsure is not None]
        mirrored = [part.mirrored for part in parts if part.mirrored is not None]
        sizes = tuple(size for part in parts for size in part.proposals.sizes)
        return cls(
            Proposals(torch.cat([part.proposals.boxes for part in parts]), sizes),
            torch.cat([part.tags for part in parts]),
            torch.cat(unsure) if unsure else None,
            Clues.joined([part.clues for part in parts if part.proposals.sizes]),
            max((part.looks for part in parts), default=1),
            torch.cat(mirrored) if mirrored else None,
        )

    def seen_together(self) -> list[tuple[range, range]]:
        """Of each photo, the looks at it, and all their proposals."""
        spans = self.proposals.spans()
        firsts = range(0, len(spans), self.looks)
        return [(range(i, i + self.looks), range(spans[i].start, spans[i + self.looks - 1].stop)) for i in firsts]

    def to(self, device: torch.device) -> Facts:
        """The same on a device."""
        return Facts(
            Proposals(self.proposals.boxes.to(device), self.proposals.sizes),
            self.tags.to(device),
            None if self.unsure is None else self.unsure.to(device),
            self.clues.to(device),
            self.looks,
            None if self.mirrored is None else self.mirrored.to(device),
        )
