"""How good pseudo boxes are, where boxes exist for analysis. Never used for training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tag2box.metrics.overlap import same_class_iou
from tag2box.metrics.scores import share
from tag2box.types import Detections, Truth

PSEUDO_IOUS = (0.25, 0.5, 0.75)


@dataclass(frozen=True, slots=True)
class PseudoQuality:
    """Precision and recall of pseudo boxes at each IoU of ``ious``, and how many there are of each class."""

    ious: tuple[float, ...]
    precision: tuple[float | None, ...]
    recall: tuple[float | None, ...]
    counts: dict[str, int]


def pseudo_quality(
    truth: Truth, pseudo: Mapping[str, Detections], *, ious: tuple[float, ...] = PSEUDO_IOUS
) -> PseudoQuality:
    """Quality of one stage's pseudo boxes, over the images of ``truth`` that ``pseudo`` names.

    A pseudo box is right where it overlaps an object of its class that is no crowd; an object (neither difficult nor
    a crowd) is recalled where some pseudo box overlaps it. Overlap means IoU of at least the threshold.
    """
    levels = torch.tensor(ious, dtype=torch.float64)
    counts = torch.zeros(len(truth.classes), dtype=torch.long)
    right, recalled = torch.zeros(len(ious), dtype=torch.long), torch.zeros(len(ious), dtype=torch.long)
    objects_total = 0
    for image_id, objects in zip(truth.ids, truth.objects, strict=True):
        if image_id not in pseudo:
            continue
        boxes = pseudo[image_id]
        overlap = same_class_iou(boxes, objects).masked_fill(objects.crowd, -1.0)
        counted = ~(objects.difficult | objects.crowd)
        counts += torch.bincount(boxes.labels, minlength=len(truth.classes))
        objects_total += int(counted.sum())
        hits = overlap[..., None] >= levels  # (boxes, objects, levels)
        right += hits.any(dim=1).sum(dim=0)
        recalled += hits[:, counted].any(dim=0).sum(dim=0)
    boxes_total = int(counts.sum())
    return PseudoQuality(
        ious=ious,
        precision=tuple(share(n, boxes_total) for n in right.tolist()),
        recall=tuple(share(n, objects_total) for n in recalled.tolist()),
        counts=dict(zip(truth.classes, counts.tolist(), strict=True)),
    )
