"""Photos and what is annotated on them: tags for training, true objects for evaluation, detections, and proposals.

``TaggedPhotos`` is all that training receives of a dataset, and has no field that could hold a box. ``Truth`` and
``Objects`` are for evaluation only. Boxes that a person has reviewed may teach, too, but through a type of their own,
``ReviewedBoxes``, which only ``tag2box train --boxes`` makes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float, Float32, Int

from tag2box.errors import UserError

if TYPE_CHECKING:  # loaded where tensors are made: the review page, which makes none, starts without it
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Photo:
    """A photo on disk. ``width`` and ``height`` are those after EXIF rotation."""

    id: str
    path: Path
    width: int
    height: int
    file: str = field(default="", compare=False)  # its name in files that are written; default: id and suffix


@dataclass(frozen=True, slots=True)
class TaggedPhotos:
    """A training set: photos and image-level tags, no boxes."""

    classes: tuple[str, ...]
    photos: tuple[Photo, ...]
    tags: Bool[Tensor, "N C"]
    unsure: Bool[Tensor, "N C"] | None = None  # neither present nor absent, e.g. classes of difficult objects only
    counts: Int[Tensor, "N C"] | None = None  # annotated number of objects per class; -1 if not counted

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
        """The subset of the photos selected by a mask."""
        import torch

        rows = torch.tensor(wanted, dtype=torch.bool)
        photos = tuple(photo for photo, is_wanted in zip(self.photos, wanted, strict=True) if is_wanted)
        unsure, counts = (None if x is None else x[rows] for x in (self.unsure, self.counts))
        return TaggedPhotos(self.classes, photos, self.tags[rows], unsure, counts)


@dataclass(frozen=True, slots=True)
class Detections:
    """Detected boxes of one photo: xyxy pixels, scores and class indices."""

    boxes: Float[Tensor, "B 4"]
    scores: Float[Tensor, " B"]
    labels: Int[Tensor, " B"]

    def __post_init__(self) -> None:
        n = len(self.boxes)
        if self.boxes.shape != (n, 4) or self.scores.shape != (n,) or self.labels.shape != (n,):
            shapes = [tuple(x.shape) for x in (self.boxes, self.scores, self.labels)]
            raise ValueError(f"shapes of boxes, scores and labels disagree: {shapes}")

    def to(self, device: torch.device) -> Detections:
        """A copy on a device."""
        return Detections(self.boxes.to(device), self.scores.to(device), self.labels.to(device))

    @classmethod
    def empty(cls) -> Detections:
        """No detections."""
        import torch

        return cls(torch.zeros(0, 4), torch.zeros(0), torch.zeros(0, dtype=torch.long))

    def to_supervision(self, classes: Sequence[str] | None = None) -> Any:
        """``supervision.Detections``, with class names if they are given; ``pip install tag2box[supervision]``."""
        try:
            import supervision
        except ImportError:
            raise UserError("supervision is not installed; run `pip install tag2box[supervision]`") from None
        names = None if classes is None else np.array([classes[label] for label in self.labels.tolist()], dtype=str)
        return supervision.Detections(
            xyxy=self.boxes.numpy(),
            confidence=self.scores.numpy(),
            class_id=self.labels.numpy(),
            data={} if names is None else {"class_name": names},
        )

    def __len__(self) -> int:
        return len(self.boxes)

    def __getitem__(self, index: Tensor) -> Detections:
        """The rows of a mask or an index tensor."""
        return Detections(self.boxes[index], self.scores[index], self.labels[index])


@dataclass(frozen=True, slots=True)
class Objects:
    """True objects of one photo, for evaluation and figures only."""

    boxes: Float[Tensor, "B 4"]
    labels: Int[Tensor, " B"]
    difficult: Bool[Tensor, " B"]  # VOC: neither a true nor a missed positive
    crowd: Bool[Tensor, " B"]  # COCO: a region of several objects

    def __len__(self) -> int:
        return len(self.boxes)

    @classmethod
    def of(cls, boxes: Sequence[Sequence[float]] | Tensor, labels: Sequence[int] | Tensor) -> Objects:
        """Objects of which none is difficult or a crowd."""
        import torch

        b = torch.as_tensor(boxes, dtype=torch.float32).reshape(-1, 4)
        none = torch.zeros(len(b), dtype=torch.bool)
        return cls(b, torch.as_tensor(labels, dtype=torch.long).reshape(-1), none, none)


@dataclass(frozen=True, slots=True)
class Truth:
    """Ground truth of an evaluation set. Training code never receives one."""

    classes: tuple[str, ...]
    ids: tuple[str, ...]  # photo ids, in order
    sizes: tuple[tuple[int, int], ...]  # (width, height)
    objects: tuple[Objects, ...]

    def __len__(self) -> int:
        return len(self.ids)

    def part(self, wanted: Sequence[bool]) -> Truth:
        """The subset of the photos selected by a mask."""
        sizes, objects = tuple(compress(self.sizes, wanted)), tuple(compress(self.objects, wanted))
        return Truth(self.classes, tuple(compress(self.ids, wanted)), sizes, objects)


@dataclass(frozen=True, slots=True)
class ReviewedObjects:
    """All objects of a photo whose review is finished: what is neither boxed nor in an ignore region is background."""

    boxes: Float32[Tensor, "B 4"]
    labels: Int[Tensor, " B"]
    ignore: Float32[Tensor, "I 4"]  # regions in which a detector is neither right nor wrong

    def __post_init__(self) -> None:
        if self.boxes.shape != (len(self.labels), 4) or self.ignore.shape != (len(self.ignore), 4):
            shapes = [tuple(x.shape) for x in (self.boxes, self.labels, self.ignore)]
            raise ValueError(f"shapes of boxes, labels and ignore regions disagree: {shapes}")


@dataclass(frozen=True, slots=True)
class ReviewedBoxes:
    """Reviewed photos of a training set, by id: they teach with their boxes, all others with their tags alone."""

    classes: tuple[str, ...]  # those of the training set, in its order
    photos: Mapping[str, ReviewedObjects] = field(default_factory=dict)
    file_sha256: str = ""  # of the file they were read from; empty if it was a folder

    def __len__(self) -> int:
        return len(self.photos)

    @property
    def count(self) -> int:
        """The number of boxes, without ignore regions."""
        return sum(len(own.boxes) for own in self.photos.values())

    def digest(self) -> str:
        """A digest of all boxes, with their photos and classes; it does not depend on the file they came from."""
        whole = hashlib.sha256(repr(self.classes).encode())
        for name in sorted(self.photos):
            own = self.photos[name]
            whole.update(f"{name!r} {own.labels.tolist()} {len(own.ignore)}".encode())
            for boxes in (own.boxes, own.ignore):
                whole.update(boxes.numpy().astype("<f4").tobytes())
        return whole.hexdigest()


@runtime_checkable
class BoxSource(Protocol):
    """Proposals by photo: a proposal store, or a substitute in tests."""

    def boxes(self, photo_id: str, /) -> Float32[Tensor, "P 4"]:
        """The proposals of a photo, in its own pixels; possibly none."""
        ...

    def scores(self, photo_id: str, /) -> Float32[Tensor, " P"]:
        """Objectness of each proposal; all zero if the proposal method gives none."""
        ...
