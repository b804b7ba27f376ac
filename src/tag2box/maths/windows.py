"""Windows of a photo, judged by a classifier of windows (WSRPN, 2018)."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from tag2box.maths.nms import nms


def best_windows(
    boxes: Float[Tensor, "P 4"], worth: Float[Tensor, " P"], *, most: int, nms_iou: float
) -> Int[Tensor, " kept"]:
    """The best windows, best first, no two of them overlapping by more than ``nms_iou``."""
    return nms(boxes, worth, nms_iou)[:most]
