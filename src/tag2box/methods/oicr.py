"""Argmax labelling: the top proposal of each present class is the only pseudo ground truth (Tang et al., 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor

from tag2box.ops.refine import assign
from tag2box.types import LabelerInput, Labeling, PseudoBoxes, Requirements


@dataclass(frozen=True, kw_only=True)
class Oicr:
    """The top-scoring proposal per present class seeds a cluster."""

    kind: Literal["oicr"] = "oicr"
    foreground_iou: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """A proposal joins its nearest seed above this IoU; others are background."""

    @property
    def requirements(self) -> Requirements:
        """Argmax looks at scores alone."""
        return Requirements()

    def __call__(self, inputs: LabelerInput) -> Labeling:
        """Seeds and labels of every stage."""
        num_classes = inputs.tags.shape[1]
        pseudo_boxes = [argmax_pseudo_boxes(inputs, stage) for stage in range(len(inputs.probs))]
        return Labeling(tuple(assign(inputs.proposals, s, num_classes, self.foreground_iou) for s in pseudo_boxes))


def argmax_pseudo_boxes(inputs: LabelerInput, stage: int) -> PseudoBoxes:
    """The top proposal of each present class of each image, by one stage's teacher (eq. 2)."""
    probs = inputs.probs[stage]
    rows, classes = [inputs.tags.new_zeros(0, dtype=torch.long)], [inputs.tags.new_zeros(0, dtype=torch.long)]
    for span, tags in zip(inputs.proposals.spans(), inputs.tags, strict=True):
        present = tags.nonzero().flatten()
        if len(span) == 0 or len(present) == 0:
            continue
        rows.append(top_rows(probs[span.start : span.stop], present) + span.start)
        classes.append(present)
    row, cls = torch.cat(rows), torch.cat(classes)
    return PseudoBoxes(row, cls, probs[row, cls])


def top_rows(probs: Float[Tensor, "P C"], present: Int[Tensor, " c"]) -> Int[Tensor, " c"]:
    """The best proposal of each present class of one image (eq. 2), classes in order.

    A proposal that is the top of one class cannot be the top of a later one; with fewer proposals than classes the
    later classes share what there is.
    """
    left = probs[:, present]
    ids = torch.arange(len(probs), device=probs.device)
    tops: list[Tensor] = []
    for scores in left.unbind(dim=1):
        top = torch.where(scores == scores.max(), ids, len(ids)).min()
        top = top.clamp(max=len(ids) - 1)  # nan equals nothing: any row will do, and the loss will tell
        tops.append(top)
        left[top] = -1.0  # below every probability
    return torch.stack(tops) if tops else present.new_zeros(0)
