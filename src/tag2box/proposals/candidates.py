"""Candidate boxes of one photo, as every source of them gives them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float32
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Candidates:
    """Boxes that may hold an object, with a score each; zeros where the source does not rank its boxes."""

    boxes: Float32[Tensor, "P 4"]
    scores: Float32[Tensor, " P"]

    def __post_init__(self) -> None:
        if self.boxes.shape != (len(self.scores), 4) or self.scores.ndim != 1:
            raise ValueError(f"boxes {tuple(self.boxes.shape)} do not match scores {tuple(self.scores.shape)}")

    def __len__(self) -> int:
        return len(self.scores)

    @classmethod
    def unranked(cls, boxes: Float32[Tensor, "P 4"]) -> Candidates:
        """Boxes of a source that does not rank."""
        return cls(boxes, torch.zeros(len(boxes)))
