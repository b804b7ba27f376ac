"""Multiple-instance self-training: many seeds for each class, wherever scores are high (MIST, Ren et al. 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor

from tag2box.ops.boxes import iou
from tag2box.ops.refine import assign
from tag2box.types import LabelerInput, Labeling, PseudoBoxes, Requirements


def far_from_better(
    boxes: Float[Tensor, "P 4"], scores: Float[Tensor, " P"], *, share: float = 0.15, apart: float = 0.2
) -> Int[Tensor, " s"]:
    """Seeds of one class in one image, best first: of the best share, those that hardly overlap any better one.

    Stricter than NMS: a box that is no seed itself still keeps worse ones out. The best of all is always a seed.
    """
    ranked = scores.argsort(descending=True, stable=True)[: max(int(share * len(scores)), 1)]
    is_near = iou(boxes[ranked], boxes[ranked]) >= apart
    return ranked[~is_near.tril(diagonal=-1).any(dim=1)]


@dataclass(frozen=True, kw_only=True)
class Mist:
    """Of each present class's best proposals, those that hardly overlap a better one are its seeds."""

    kind: Literal["mist"] = "mist"
    share: Annotated[float, Field(gt=0, le=1)] = 0.15
    """p: the share of an image's proposals that may be seeds of a class."""
    apart: Annotated[float, Field(gt=0, le=1)] = 0.2
    """A seed overlaps every better proposal of that share by less than this IoU."""
    foreground_iou: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """A proposal joins its nearest seed from this IoU on; others are background."""

    @property
    def requirements(self) -> Requirements:
        """Ranks and overlaps are enough."""
        return Requirements()

    def __call__(self, inputs: LabelerInput) -> Labeling:
        """Seeds and labels of every stage."""
        num_classes, pseudo_boxes = inputs.tags.shape[1], [self.find(inputs, probs) for probs in inputs.probs]
        labels = (assign(inputs.proposals, s, num_classes, self.foreground_iou, or_equal=True) for s in pseudo_boxes)
        return Labeling(tuple(labels))

    def find(self, inputs: LabelerInput, probs: Float[Tensor, "R C"]) -> PseudoBoxes:
        """The seeds one teacher gives, image after image, class after class."""
        picks = [torch.zeros(0, 2, dtype=torch.long, device=probs.device)]
        for span, tags in zip(inputs.proposals.spans(), inputs.tags, strict=True):
            inside = slice(span.start, span.stop)
            for c in tags.nonzero().flatten().tolist():
                boxes, scores = inputs.proposals.boxes[inside], probs[inside, c]
                rows = far_from_better(boxes, scores, share=self.share, apart=self.apart) + span.start
                picks.append(torch.stack([rows, torch.full_like(rows, c)], dim=1))
        rows, cls = torch.cat(picks).unbind(dim=1)
        return PseudoBoxes(rows, cls, probs[rows, cls])
