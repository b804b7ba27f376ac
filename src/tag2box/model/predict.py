"""Inference: mean of the stages, mean over test-time passes, class-wise NMS (spec/method.md, section 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from tag2box.maths.boxes import areas, clip, decode
from tag2box.maths.mil import mil_scores
from tag2box.maths.nms import class_nms
from tag2box.types import Detections, StageScores


@dataclass(frozen=True, kw_only=True)
class Predict:
    """From averaged scores and boxes to detections."""

    nms_iou: Annotated[float, Field(gt=0, le=1)] = 0.4
    score_threshold: Annotated[float, Field(ge=0, le=1)] = 0.0
    max_detections: Annotated[int, Field(ge=1)] = 100
    """Kept per image, over all classes."""

    def __call__(self, scored: Scored, width: int, height: int) -> Detections:
        """Detections of one image from the merged pass over it; a box that fell off the image is none."""
        boxes = clip(scored.boxes.reshape(-1, 4), width, height)
        is_kept = (scored.probs.flatten() > self.score_threshold) & (areas(boxes) > 0)
        labels = torch.arange(scored.probs.shape[1], device=boxes.device).repeat(len(scored.probs))[is_kept]
        boxes, scores = boxes[is_kept], scored.probs.flatten()[is_kept]
        kept = class_nms(boxes, scores, labels, self.nms_iou)[: self.max_detections]
        return Detections(boxes[kept], scores[kept], labels[kept])


@dataclass(frozen=True, slots=True)
class Scored:
    """Class scores and class-wise boxes of the P proposals of one image, in its own pixels."""

    probs: Float[Tensor, "P C"]
    boxes: Float[Tensor, "P c4"]
    worth: Float[Tensor, " P"]  # what the MIL head thinks of each, over all classes


def scored(scores: StageScores, boxes: Float[Tensor, "P 4"], num_classes: int) -> Scored:
    """One pass: the mean of the K softmaxes, and the proposals moved by the mean of the K deltas.

    Without stages, the scores are X of the MIL head.
    """
    stages = [logits.softmax(dim=1)[:, :num_classes] for logits in scores.refine]
    mil = mil_scores(scores.mil_cls, scores.mil_det, (len(boxes),))[:, :num_classes]
    probs, worth = torch.stack(stages).mean(dim=0) if stages else mil, mil.sum(dim=1)
    if not scores.deltas:
        return Scored(probs, boxes.repeat(1, num_classes), worth)
    return Scored(probs, decode(torch.stack(scores.deltas).mean(dim=0), boxes), worth)


def merge(passes: Sequence[Scored]) -> Scored:
    """Test-time augmentation: scores and boxes of one proposal averaged over all passes."""
    return Scored(
        torch.stack([p.probs for p in passes]).mean(dim=0),
        torch.stack([p.boxes for p in passes]).mean(dim=0),
        torch.stack([p.worth for p in passes]).mean(dim=0),
    )


def unflip(passed: Scored, width: float) -> Scored:
    """A pass over the mirror image, its boxes put back the right way round."""
    boxes = passed.boxes.reshape(*passed.probs.shape, 4)
    mirrored = torch.stack([width - boxes[..., 2], boxes[..., 1], width - boxes[..., 0], boxes[..., 3]], dim=2)
    return replace(passed, boxes=mirrored.reshape(passed.boxes.shape))


def rescale(passed: Scored, across: float, down: float) -> Scored:
    """A pass over a resized image, its boxes brought back to the photo's pixels."""
    factors = passed.boxes.new_tensor([across, down, across, down]).repeat(passed.boxes.shape[1] // 4)
    return replace(passed, boxes=passed.boxes * factors)
