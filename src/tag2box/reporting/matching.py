"""Detections of one photo matched to its objects: right, wrong, ignored; objects that are missed."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tag2box.annotations import Detections, Objects
from tag2box.ops.boxes import areas, greedy_match, intersections, iou


@dataclass(frozen=True, slots=True)
class BoxMatching:
    """Matched detections of one photo. A detection that is neither right nor ignored is wrong."""

    right: Bool[Tensor, " B"]  # detections
    ignored: Bool[Tensor, " B"]  # detections of difficult objects or inside crowds
    finders: Int[Tensor, " G"]  # row of the detection that finds each object; -1: none, or the object does not count
    missed: Bool[Tensor, " G"]  # objects

    @property
    def wrong(self) -> Bool[Tensor, " B"]:
        """Detections of nothing, of a part, of a group, or of an object already found."""
        return ~(self.right | self.ignored)


def match_boxes(found: Detections, objects: Objects, *, min_iou: float = 0.5) -> BoxMatching:
    """Match detections, best score first: right if IoU >= ``min_iou`` with an unmatched object of the same class.

    Of several such objects the one with the largest IoU is matched. Difficult objects and crowds do not count: a
    detection that only overlaps one of those is ignored, and they are never missed. Detections of lower scores change
    nothing for those of higher ones.
    """
    counts = ~(objects.difficult | objects.crowd)  # (G,)
    same = found.labels[:, None] == objects.labels[None, :]  # (B, G)
    overlap = iou(found.boxes, objects.boxes) * same
    order = torch.argsort(found.scores, descending=True, stable=True)
    matched = torch.full_like(found.labels, -1)
    matched[order] = greedy_match(torch.where(counts & same, overlap, -1.0)[order], min_iou)
    right, finders = matched >= 0, torch.full_like(objects.labels, -1)
    finders[matched[right]] = right.nonzero().flatten()
    excused = torch.where(objects.crowd, _share_inside(found.boxes, objects.boxes) * same, overlap)
    ignored = ((excused >= min_iou) & ~counts).any(dim=1) & ~right
    return BoxMatching(right, ignored, finders, counts & (finders < 0))


def _share_inside(boxes: Float[Tensor, "B 4"], regions: Float[Tensor, "G 4"]) -> Float[Tensor, "B G"]:
    """Share of each box's area inside each region: COCO's overlap with crowds."""
    return intersections(boxes, regions) / areas(boxes).clamp(min=1e-6)[:, None]
