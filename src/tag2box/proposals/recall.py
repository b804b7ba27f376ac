"""How much of the truth a set of candidate boxes could ever find."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tag2box.maths.boxes import iou
from tag2box.types import Truth


@dataclass(frozen=True, slots=True)
class Recall:
    """Recall of true objects at some overlaps, and the mean overlap of each object's best box."""

    thresholds: tuple[float, ...]
    recall: tuple[float, ...]  # at each threshold; nan without any object
    mean_best_overlap: float
    objects: int
    boxes_per_image: float


def recall(
    boxes: Sequence[Float[Tensor, "_ 4"]], truth: Truth, thresholds: Sequence[float] = (0.5, 0.7, 0.9)
) -> Recall:
    """Recall of the plain (neither difficult nor crowd) objects of a truth by the boxes of each image, in its order."""
    best = [torch.zeros(0)]
    for candidates, objects in zip(boxes, truth.objects, strict=True):
        plain = objects.boxes[~(objects.difficult | objects.crowd)]
        overlap = iou(plain, candidates.to(plain.dtype))  # (G, P)
        best.append(overlap.amax(1) if len(candidates) else torch.zeros(len(plain)))
    overlaps = torch.cat(best)
    shares = tuple(float((overlaps >= t).float().mean()) for t in thresholds)  # the mean of nothing is nan
    per_image = sum(len(b) for b in boxes) / max(len(boxes), 1)
    return Recall(tuple(thresholds), shares, float(overlaps.mean()), len(overlaps), per_image)
