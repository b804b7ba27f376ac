"""Training data: photos and tags, never boxes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Photo:
    """One photo on disk, by name. ``width`` and ``height`` are those after EXIF rotation."""

    id: str
    path: Path
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class TaggedPhotos:
    """What training may see of a dataset: photos and image-level tags. It has no room for boxes."""

    classes: tuple[str, ...]
    photos: tuple[Photo, ...]
    tags: Bool[Tensor, "N C"]
    unsure: Bool[Tensor, "N C"] | None = None  # neither there nor absent, as classes seen in difficult objects only
    counts: Int[Tensor, "N C"] | None = None  # objects of each class by somebody's word; -1 where nobody counted

    def __post_init__(self) -> None:
        if self.counts is not None and self.counts.shape != self.tags.shape:
            raise ValueError("counts must have the shape of tags")
        if self.unsure is not None and (self.unsure.shape != self.tags.shape or bool((self.unsure & self.tags).any())):
            raise ValueError("unsure must have the shape of tags, and no tag may be unsure")
        if self.tags.shape != (len(self.photos), len(self.classes)):
            raise ValueError(
                f"tags {tuple(self.tags.shape)} do not match {len(self.photos)} photos x {len(self.classes)} classes"
            )

    def __len__(self) -> int:
        return len(self.photos)

    def part(self, wanted: Sequence[bool]) -> TaggedPhotos:
        """The wanted photos."""
        rows = torch.tensor(wanted, dtype=torch.bool)
        photos = tuple(photo for photo, is_wanted in zip(self.photos, wanted, strict=True) if is_wanted)
        unsure, counts = (None if x is None else x[rows] for x in (self.unsure, self.counts))
        return TaggedPhotos(self.classes, photos, self.tags[rows], unsure, counts)


@dataclass(frozen=True, slots=True)
class Detections:
    """Detected boxes of one image, checked on construction."""

    boxes: Float[Tensor, "B 4"]
    scores: Float[Tensor, " B"]
    labels: Int[Tensor, " B"]

    def __post_init__(self) -> None:
        n = len(self.boxes)
        if self.boxes.shape != (n, 4) or self.scores.shape != (n,) or self.labels.shape != (n,):
            shapes = [tuple(x.shape) for x in (self.boxes, self.scores, self.labels)]
            raise ValueError(f"shapes of boxes, scores and labels disagree: {shapes}")

    def to(self, device: torch.device) -> Detections:
        """The same on a device."""
        return Detections(self.boxes.to(device), self.scores.to(device), self.labels.to(device))

    @classmethod
    def empty(cls) -> Detections:
        """Nothing detected."""
        return cls(torch.zeros(0, 4), torch.zeros(0), torch.zeros(0, dtype=torch.long))

    def __len__(self) -> int:
        return len(self.boxes)

    def __getitem__(self, index: Tensor) -> Detections:
        """Keep the rows of a mask or an index tensor."""
        return Detections(self.boxes[index], self.scores[index], self.labels[index])


@dataclass(frozen=True, slots=True)
class Objects:
    """True objects of one image: for evaluation and pictures only."""

    boxes: Float[Tensor, "B 4"]
    labels: Int[Tensor, " B"]
    difficult: Bool[Tensor, " B"]  # VOC: neither rewards nor punishes
    crowd: Bool[Tensor, " B"]  # COCO: a region, not an object

    def __len__(self) -> int:
        return len(self.boxes)

    @classmethod
    def of(cls, boxes: Sequence[Sequence[float]] | Tensor, labels: Sequence[int] | Tensor) -> Objects:
        """Plain objects, none of them difficult or a crowd."""
        b = torch.as_tensor(boxes, dtype=torch.float32).reshape(-1, 4)
        none = torch.zeros(len(b), dtype=torch.bool)
        return cls(b, torch.as_tensor(labels, dtype=torch.long).reshape(-1), none, none)


@dataclass(frozen=True, slots=True)
class Truth:
    """Ground truth of an evaluation set. Training code never receives one."""

    classes: tuple[str, ...]
    ids: tuple[str, ...]  # image ids, in order
    sizes: tuple[tuple[int, int], ...]  # (width, height)
    objects: tuple[Objects, ...]

    def __len__(self) -> int:
        return len(self.ids)


@runtime_checkable
class BoxSource(Protocol):
    """What holds the proposals of photos: a proposal store, or a stand-in."""

    def boxes(self, photo_id: str, /) -> Float32[Tensor, "P 4"]:
        """The boxes of a photo, in its own pixels; possibly none."""
        ...

    def scores(self, photo_id: str, /) -> Float32[Tensor, " P"]:
        """What the method that proposed them thinks of each; all zero where it does not say."""
        ...
