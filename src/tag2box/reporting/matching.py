"""Which detections of a photo are right, which wrong, and which objects are missed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tag2box.maths.boxes import areas, intersections, iou
from tag2box.types import Detections, Objects


@dataclass(frozen=True, slots=True)
class Matching:
    """The verdict on one photo. A detection that is neither right nor ignored is wrong."""

    right: Bool[Tensor, " B"]  # detections
    ignored: Bool[Tensor, " B"]  # detections of difficult objects or inside crowds
    missed: Bool[Tensor, " G"]  # objects

    @property
    def wrong(self) -> Bool[Tensor, " B"]:
        """Detections of nothing, of a part, of a group, or of an object already found."""
        return ~(self.right | self.ignored)


def match(found: Detections, objects: Objects, *, min_iou: float = 0.5) -> Matching:
    """Judge detections, best score first: right where IoU >= ``min_iou`` with an unmatched object of the same class.

    Of several such objects the one with the largest IoU is taken. Difficult objects and crowds neither reward nor
    punish: a detection that only meets one of those is ignored, and they are never missed.
    """
    counts = ~(objects.difficult | objects.crowd)  # (G,)
    same = found.labels[:, None] == objects.labels[None, :]  # (B, G)
    overlap = iou(found.boxes, objects.boxes) * same
    free = counts.clone()
    right = torch.zeros(len(found), dtype=torch.bool)
    for row in torch.argsort(found.scores, descending=True, stable=True).tolist():
        candidates = torch.where(free, overlap[row], torch.zeros_like(overlap[row]))
        if len(candidates) and float(candidates.max()) >= min_iou:
            right[row] = True
            free[int(candidates.argmax())] = False
    excused = torch.where(objects.crowd, _share_inside(found.boxes, objects.boxes) * same, overlap)
    ignored = ((excused >= min_iou) & ~counts).any(dim=1) & ~right
    return Matching(right, ignored, free)


def _share_inside(boxes: Float[Tensor, "B 4"], regions: Float[Tensor, "G 4"]) -> Float[Tensor, "B G"]:
    """The share of each box's area that lies inside each region: how COCO compares with crowds."""
    return intersections(boxes, regions) / areas(boxes).clamp(min=1e-6)[:, None]
