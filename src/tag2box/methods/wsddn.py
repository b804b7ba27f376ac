"""WSDDN, weakly supervised deep detection networks (Bilen and Vedaldi, 2016): MIL head and spatial regularizer."""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor

from tag2box.methods.protocols import MilResult, TagLoss
from tag2box.ops import iou, mil_scores
from tag2box.types import BatchMeta, Requirements, StageScores


def top_and_neighbours(
    boxes: Float[Tensor, "P 4"], scores: Float[Tensor, " P"], *, count: int, iou_threshold: float
) -> Int[Tensor, " m"]:
    """The best box of a photo, then those of the ``count`` next best with an IoU above the threshold to it."""
    ranked = scores.argsort(descending=True, stable=True)[: count + 1]
    near = (iou(boxes[ranked], boxes[ranked[:1]]) > iou_threshold).any(dim=1)
    near[:1] = True
    return ranked[near]


def feature_spread(
    vectors: Float[Tensor, "m F"], best: Float[Tensor, "m F"], scores: Float[Tensor, " m"]
) -> Float[Tensor, ""]:
    """Sum over neighbours r of 1/2 || p_r (v_r - v_best) ||^2; the scores p are constants."""
    return 0.5 * (scores.detach()[:, None] * (vectors - best)).pow(2).sum()


@dataclass(frozen=True, kw_only=True)
class Wsddn(TagLoss):
    """MIL head of two softmaxes, over classes and over proposals; an image's score is the sum over its proposals.

    Hakan Bilen and Andrea Vedaldi: Weakly Supervised Deep Detection Networks, CVPR 2016.
    https://arxiv.org/abs/1511.02853

    Example:
        >>> from tag2box.recipes import Config
        >>> from tag2box.training.criterion import Criterion
        >>> config = Config(criterion=Criterion(mil=Wsddn(weight=4.0)))
        >>> config.criterion.mil.weight
        4.0
    """

    kind: Literal["wsddn"] = "wsddn"

    @property
    def requirements(self) -> Requirements:
        """None beyond tags and logits."""
        return Requirements()

    def __call__(self, scores: StageScores, meta: BatchMeta, fraction: float) -> MilResult:
        """Proposal scores X, and their loss."""
        mil = mil_scores(scores.mil_cls, scores.mil_det, meta.proposals.sizes)
        return MilResult(mil, self.tag_loss(mil, meta))


@dataclass(frozen=True, kw_only=True)
class Spatial:
    """Spatial regularizer: pulls feature vectors of high-scoring boxes that overlap the best one to its vector.

    Hakan Bilen and Andrea Vedaldi: Weakly Supervised Deep Detection Networks, CVPR 2016.
    https://arxiv.org/abs/1511.02853

    Example:
        >>> from tag2box.recipes import Config
        >>> from tag2box.training.criterion import Criterion
        >>> config = Config(criterion=Criterion(spatial=Spatial(weight=1e-4)))
        >>> config.criterion.requirements.vectors
        True
    """

    weight: Annotated[float, Field(ge=0)] = 0.0
    """Factor of the term; 0 turns it off. WSDDN's authors use 1e-4."""
    iou: Annotated[float, Field(ge=0, lt=1)] = 0.6
    """Minimum IoU of a neighbour with the best box of its class."""
    neighbours: Annotated[int, Field(ge=1)] = 9
    """Number of next best boxes that are considered."""

    @property
    def requirements(self) -> Requirements:
        """Feature vectors, if it is on."""
        return Requirements(vectors=self.weight > 0)

    def __call__(
        self, scores: Float[Tensor, "R c"], vectors: Float[Tensor, "R F"], meta: BatchMeta
    ) -> Float[Tensor, ""]:
        """The unweighted term: summed over the tags of a photo, then the mean over photos."""
        rows, best, cls = self.pairs(scores.detach(), meta)
        return feature_spread(vectors[rows], vectors[best], scores[rows, cls]) / max(len(meta.tags), 1)

    def pairs(
        self, scores: Float[Tensor, "R c"], meta: BatchMeta
    ) -> tuple[Int[Tensor, " m"], Int[Tensor, " m"], Int[Tensor, " m"]]:
        """Rows of neighbours, of the best box of each, and their class."""
        found = [meta.tags.new_zeros(0, 3, dtype=torch.long)]
        for span, tags in zip(meta.proposals.spans(), meta.tags, strict=True):
            inside = slice(span.start, span.stop)
            boxes = meta.proposals.boxes[inside]
            for c in tags.nonzero().flatten().tolist():
                rows = span.start + top_and_neighbours(
                    boxes, scores[inside, c], count=self.neighbours, iou_threshold=self.iou
                )
                near, best = rows[1:], rows[:1].expand(max(len(rows) - 1, 0))
                found.append(torch.stack([near, best, torch.full_like(near, c)], dim=1))
        near, best, cls = torch.cat(found).unbind(dim=1)
        return near, best, cls
