"""Pure functions on tensors: boxes and NMS, RoI pooling, MIL and refinement losses, superpixels."""

from tag2box.ops.boxes import (
    areas,
    class_nms,
    clip,
    containment,
    decode,
    encode,
    greedy_match,
    intersections,
    iou,
    nms,
    row_iou,
    vote,
)
from tag2box.ops.losses import assign, box_loss, first_argmax, image_scores, mil_loss, mil_scores, refine_loss

__all__ = [
    "areas", "assign", "box_loss", "class_nms", "clip", "containment", "decode", "encode", "first_argmax",
    "greedy_match", "image_scores", "intersections", "iou", "mil_loss", "mil_scores", "nms", "refine_loss", "row_iou",
    "vote",
]  # fmt: skip
