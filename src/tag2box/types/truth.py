"""Detections and truth: for evaluation and pictures only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


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
