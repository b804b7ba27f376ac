"""OICR, online instance classifier refinement (Tang et al., 2017): one pseudo box per tag, the top-scoring proposal."""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Float, Int
from pydantic import Field

from tag2box.ops import assign
from tag2box.types import LabelerInput, Labeling, PseudoBoxes, Requirements


@dataclass(frozen=True, kw_only=True)
class Oicr:
    """The top-scoring proposal of each present class is its only pseudo box.

    Peng Tang, Xinggang Wang, Xiang Bai and Wenyu Liu: Multiple Instance Detection Network with Online Instance
    Classifier Refinement, CVPR 2017. https://arxiv.org/abs/1704.00138

    Example:
        >>> from tag2box.recipes import Config
        >>> from tag2box.training.criterion import Criterion
        >>> config = Config(criterion=Criterion(labeler=Oicr(foreground_iou=0.6)))
        >>> config.criterion.labeler
        Oicr(kind='oicr', foreground_iou=0.6)
    """

    kind: Literal["oicr"] = "oicr"
    foreground_iou: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """A proposal takes the class of its nearest pseudo box above this IoU; others are background."""

    @property
    def requirements(self) -> Requirements:
        """None beyond scores."""
        return Requirements()

    def __call__(self, inputs: LabelerInput) -> Labeling:
        """Pseudo boxes and pseudo labels of every stage."""
        num_classes = inputs.tags.shape[1]
        pseudo_boxes = [argmax_pseudo_boxes(inputs, stage) for stage in range(len(inputs.probs))]
        return Labeling(tuple(assign(inputs.proposals, s, num_classes, self.foreground_iou) for s in pseudo_boxes))


def argmax_pseudo_boxes(inputs: LabelerInput, stage: int) -> PseudoBoxes:
    """Top proposal of each present class of each image, by the teacher of one stage (eq. 2 of OD-WSCL)."""
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


def top_rows(probs: Float[torch.Tensor, "P C"], present: Int[torch.Tensor, " c"]) -> Int[torch.Tensor, " c"]:
    """Best proposal of each present class of one image (eq. 2 of OD-WSCL), classes in order.

    The top proposal of one class cannot be the top of a later one; with fewer proposals than classes the later classes
    share proposals.

    >>> top_rows(torch.tensor([[0.9, 0.8], [0.1, 0.3]]), torch.tensor([0, 1]))
    tensor([0, 1])
    """
    left = probs[:, present]
    ids = torch.arange(len(probs), device=probs.device)
    tops: list[torch.Tensor] = []
    for scores in left.unbind(dim=1):
        top = torch.where(scores == scores.max(), ids, len(ids)).min()
        top = top.clamp(max=len(ids) - 1)  # NaN equals nothing: any row will do, the loss will be NaN
        tops.append(top)
        left[top] = -1.0  # below every probability
    return torch.stack(tops) if tops else present.new_zeros(0)
