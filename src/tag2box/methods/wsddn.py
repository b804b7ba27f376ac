"""WSDDN's spatial regulariser: what overlaps the best box should look like it (Bilen and Vedaldi 2016)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor

from tag2box.methods.base import MilResult, TagLoss
from tag2box.ops.boxes import iou
from tag2box.ops.mil import mil_scores
from tag2box.types import BatchMeta, Requirements, StageScores


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


@dataclass(frozen=True, kw_only=True)
class Wsddn(TagLoss):
    """The image's score for a class is the sum over its proposals."""

    kind: Literal["wsddn"] = "wsddn"

    @property
    def requirements(self) -> Requirements:
        """Nothing else."""
        return Requirements()

    def __call__(self, scores: StageScores, meta: BatchMeta, fraction: float) -> MilResult:
        """X, and its loss."""
        mil = mil_scores(scores.mil_cls, scores.mil_det, meta.proposals.sizes)
        return MilResult(mil, self.tag_loss(mil, meta))


@dataclass(frozen=True, kw_only=True)
class Spatial:
    """Feature vectors of good boxes that overlap the best one are drawn to its vector."""

    weight: Annotated[float, Field(ge=0)] = 0.0
    """Factor of the term; 0 leaves it out. WSDDN's authors take 1e-4."""
    iou: Annotated[float, Field(ge=0, lt=1)] = 0.6
    """How much a neighbour overlaps the best box of its class."""
    neighbours: Annotated[int, Field(ge=1)] = 9
    """So many of the next best boxes are asked."""

    @property
    def requirements(self) -> Requirements:
        """Feature vectors, where it is on."""
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
        """Neighbours, the best box each belongs to, and the class."""
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
