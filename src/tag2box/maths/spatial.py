"""WSDDN's spatial regulariser: what overlaps the best box should look like it (Bilen and Vedaldi 2016)."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from tag2box.maths.boxes import iou


def top_and_neighbours(
    boxes: Float[Tensor, "P 4"], scores: Float[Tensor, " P"], *, count: int, iou_threshold: float
) -> Int[Tensor, " m"]:
    """The best box of a photo, then those of the ``count`` next best that overlap it by more than the threshold."""
    ranked = scores.argsort(descending=True, stable=True)[: count + 1]
    near = (iou(boxes[ranked], boxes[ranked[:1]]) > iou_threshold).any(dim=1)
    near[:1] = True
    return ranked[near]


def feature_spread(
    vectors: Float[Tensor, "m F"], best: Float[Tensor, "m F"], scores: Float[Tensor, " m"]
) -> Float[Tensor, ""]:
    """Sum over neighbours r of 1/2 || p_r (v_r - v_best) ||^2; the scores p are taken as constants."""
    return 0.5 * (scores.detach()[:, None] * (vectors - best)).pow(2).sum()
