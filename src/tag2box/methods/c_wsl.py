"""C-WSL, count-guided weakly supervised localization (Gao et al., 2018): as many pseudo boxes as counted objects."""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Float, Int
from pydantic import Field

from tag2box.ops import assign, containment
from tag2box.types import LabelerInput, Labeling, PseudoBoxes, Requirements


def counted_boxes(
    boxes: Float[torch.Tensor, "P 4"],
    scores: Float[torch.Tensor, " P"],
    count: int,
    *,
    overlap: float = 0.1,
    openers: int = 100,
) -> Int[torch.Tensor, " s"]:
    """Rows of up to ``count`` boxes with the largest sum of scores, best first, found greedily.

    Each of the best ``openers`` boxes starts a set, which others join in the order of their scores as long as no box of
    the set has ``overlap`` of its area, or more, inside another. The set with the largest sum wins; the first one on
    ties. Boxes of negative score never join: they are taken by another class.

    >>> boxes = torch.tensor([[0.0, 0.0, 9.0, 9.0], [0.0, 0.0, 4.0, 9.0], [5.0, 0.0, 9.0, 9.0]])
    >>> counted_boxes(boxes, torch.tensor([0.9, 0.8, 0.7]), count=2)
    tensor([1, 2])
    """
    ranked = scores.argsort(descending=True, stable=True)
    if count <= 1 or len(ranked) == 0:
        return ranked[:1]
    boxes, scores = boxes[ranked], scores[ranked]
    chosen = torch.arange(min(openers, len(ranked)), device=boxes.device)[:, None]  # (o, members)
    may_join = (scores >= 0).expand(len(chosen), -1)
    total = scores[: len(chosen)]
    for _ in range(count - 1):
        last = chosen[:, -1]
        may_join = (may_join & (containment(boxes[last], boxes) < overlap)).scatter(1, last[:, None], False)
        joins = may_join.any(dim=1)
        if not joins.any():
            break
        first = torch.where(joins, may_join.byte().argmax(dim=1), chosen[:, 0])  # no box fits: repeat the first one
        total = total + torch.where(joins, scores[first], 0)
        chosen = torch.cat([chosen, first[:, None]], dim=1)
    return ranked[chosen[total.argmax()].unique()]


@dataclass(frozen=True, kw_only=True)
class CWsl:
    """As many pseudo boxes per class as it has objects, none inside another; one if the count is unknown.

    Mingfei Gao, Ang Li, Ruichi Yu, Vlad I. Morariu and Larry S. Davis: C-WSL: Count-guided Weakly Supervised
    Localization, ECCV 2018. https://arxiv.org/abs/1711.05282

    Example:
        >>> from tag2box.recipes import Config
        >>> from tag2box.training.criterion import Criterion
        >>> config = Config(criterion=Criterion(labeler=CWsl(overlap=0.2)))
        >>> config.criterion.requirements.counts
        True
    """

    kind: Literal["c_wsl"] = "c_wsl"
    overlap: Annotated[float, Field(gt=0, le=1)] = 0.1
    """T: no pseudo box has this fraction of its area, or more, inside another of its class."""
    openers: Annotated[int, Field(ge=1)] = 100
    """Number of best proposals that are each tried as the first of a set; 1 is plain greedy selection."""
    foreground_iou: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """A proposal takes the class of its nearest pseudo box above this IoU; others are background."""

    @property
    def requirements(self) -> Requirements:
        """Object counts, if the dataset has any."""
        return Requirements(counts=True)

    def __call__(self, inputs: LabelerInput) -> Labeling:
        """Pseudo boxes and pseudo labels of every stage."""
        num_classes = inputs.tags.shape[1]
        pseudo_boxes = [self.find(inputs, probs) for probs in inputs.probs]
        return Labeling(tuple(assign(inputs.proposals, s, num_classes, self.foreground_iou) for s in pseudo_boxes))

    def find(self, inputs: LabelerInput, probs: Float[torch.Tensor, "R C"]) -> PseudoBoxes:
        """Pseudo boxes from one teacher's scores, image after image, class after class; none belongs to two classes."""
        counts = inputs.tags.long() if inputs.side_info.counts is None else inputs.side_info.counts
        left = probs.clone()
        picks = [torch.zeros(0, 2, dtype=torch.long, device=probs.device)]
        for image, span in enumerate(inputs.proposals.spans()):
            inside = slice(span.start, span.stop)
            for c in inputs.tags[image].nonzero().flatten().tolist():
                boxes, count = inputs.proposals.boxes[inside], int(counts[image, c])
                rows = counted_boxes(boxes, left[inside, c], count, overlap=self.overlap, openers=self.openers)
                left[rows + span.start] = -1.0  # below every probability
                picks.append(torch.stack([rows + span.start, torch.full_like(rows, c)], dim=1))
        rows, cls = torch.cat(picks).unbind(dim=1)
        return PseudoBoxes(rows, cls, probs[rows, cls])
