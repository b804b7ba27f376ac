"""Multiple-instance self-training: many seeds for each class, wherever scores are high (MIST, Ren et al. 2020)."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from tag2box.maths.boxes import iou


def far_from_better(
    boxes: Float[Tensor, "P 4"], scores: Float[Tensor, " P"], *, share: float = 0.15, apart: float = 0.2
) -> Int[Tensor, " s"]:
    """Seeds of one class in one image, best first: of the best share, those that hardly overlap any better one.

    Stricter than NMS: a box that is no seed itself still keeps worse ones out. The best of all is always a seed.
    """
    ranked = scores.argsort(descending=True, stable=True)[: max(int(share * len(scores)), 1)]
    is_near = iou(boxes[ranked], boxes[ranked]) >= apart
    return ranked[~is_near.tril(diagonal=-1).any(dim=1)]
