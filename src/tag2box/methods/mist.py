"""MIST, multiple instance self-training (Ren et al., 2020): many pseudo boxes per class, wherever scores are high."""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Float, Int
from pydantic import Field

from tag2box.ops import assign, iou
from tag2box.types import LabelerInput, Labeling, PseudoBoxes, Requirements


def far_from_better(
    boxes: Float[torch.Tensor, "P 4"], scores: Float[torch.Tensor, " P"], *, share: float = 0.15, apart: float = 0.2
) -> Int[torch.Tensor, " s"]:
    """Pseudo boxes of one class in one image, best first: of the best share, those that hardly overlap a better one.

    Stricter than NMS: a box that is suppressed itself still suppresses worse ones. The best of all always survives.

    >>> boxes = torch.tensor([[0.0, 0.0, 4.0, 4.0], [1.0, 0.0, 5.0, 4.0], [8.0, 0.0, 12.0, 4.0]])
    >>> far_from_better(boxes, torch.tensor([0.9, 0.8, 0.7]), share=1.0)
    tensor([0, 2])
    """
    ranked = scores.argsort(descending=True, stable=True)[: max(int(share * len(scores)), 1)]
    is_near = iou(boxes[ranked], boxes[ranked]) >= apart
    return ranked[~is_near.tril(diagonal=-1).any(dim=1)]


@dataclass(frozen=True, kw_only=True)
class Mist:
    """Of the best proposals of each present class, those that hardly overlap a better one are its pseudo boxes.

    Zhongzheng Ren, Zhiding Yu, Xiaodong Yang, Ming-Yu Liu, Yong Jae Lee, Alexander G. Schwing and Jan Kautz:
    Instance-aware, Context-focused, and Memory-efficient Weakly Supervised Object Detection, CVPR 2020.
    https://arxiv.org/abs/2004.04725

    Example:
        >>> from tag2box.recipes import Config
        >>> from tag2box.training.criterion import Criterion
        >>> config = Config(criterion=Criterion(labeler=Mist(share=0.1)))
        >>> config.criterion.labeler.apart
        0.2
    """

    kind: Literal["mist"] = "mist"
    share: Annotated[float, Field(gt=0, le=1)] = 0.15
    """p: fraction of an image's proposals that may become pseudo boxes of a class."""
    apart: Annotated[float, Field(gt=0, le=1)] = 0.2
    """A pseudo box overlaps every better proposal of that fraction by less than this IoU."""
    foreground_iou: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """A proposal takes the class of its nearest pseudo box from this IoU on; others are background."""

    @property
    def requirements(self) -> Requirements:
        """None beyond scores and boxes."""
        return Requirements()

    def __call__(self, inputs: LabelerInput) -> Labeling:
        """Pseudo boxes and pseudo labels of every stage."""
        num_classes, pseudo_boxes = inputs.tags.shape[1], [self.find(inputs, probs) for probs in inputs.probs]
        labels = (assign(inputs.proposals, s, num_classes, self.foreground_iou, or_equal=True) for s in pseudo_boxes)
        return Labeling(tuple(labels))

    def find(self, inputs: LabelerInput, probs: Float[torch.Tensor, "R C"]) -> PseudoBoxes:
        """Pseudo boxes from one teacher's scores, image after image, class after class."""
        picks = [torch.zeros(0, 2, dtype=torch.long, device=probs.device)]
        for span, tags in zip(inputs.proposals.spans(), inputs.tags, strict=True):
            inside = slice(span.start, span.stop)
            for c in tags.nonzero().flatten().tolist():
                boxes, scores = inputs.proposals.boxes[inside], probs[inside, c]
                rows = far_from_better(boxes, scores, share=self.share, apart=self.apart) + span.start
                picks.append(torch.stack([rows, torch.full_like(rows, c)], dim=1))
        rows, cls = torch.cat(picks).unbind(dim=1)
        return PseudoBoxes(rows, cls, probs[rows, cls])
