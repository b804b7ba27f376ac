"""The overlaps every metric starts from."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from tag2box.maths.boxes import iou
from tag2box.types import Detections, Objects

OTHER_CLASS = -1.0
"""Stands where detection and object are of different classes: below every overlap, even none."""


def same_class_iou(detections: Detections, objects: Objects) -> Float[Tensor, "B G"]:
    """IoU of every detection with every object of its own class, ``OTHER_CLASS`` elsewhere; in double precision."""
    overlap = iou(detections.boxes.double(), objects.boxes.double())
    same = detections.labels[:, None] == objects.labels[None, :]
    return torch.where(same, overlap, overlap.new_tensor(OTHER_CLASS))
