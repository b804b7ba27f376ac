"""Training data: photos and tags, never boxes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Bool, Int
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
