"""The spatial regulariser of WSDDN as a part of the objective: any MIL strategy can have it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor

from tag2box.maths.spatial import feature_spread, top_and_neighbours
from tag2box.types import Facts, Needs


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
    def needs(self) -> Needs:
        """Feature vectors, where it is on."""
        return Needs(vectors=self.weight > 0)

    def __call__(self, scores: Float[Tensor, "R c"], vectors: Float[Tensor, "R F"], facts: Facts) -> Float[Tensor, ""]:
        """The unweighted term: summed over the tags of a photo, then the mean over photos."""
        rows, best, cls = self.pairs(scores.detach(), facts)
        return feature_spread(vectors[rows], vectors[best], scores[rows, cls]) / max(len(facts.tags), 1)

    def pairs(
        self, scores: Float[Tensor, "R c"], facts: Facts
    ) -> tuple[Int[Tensor, " m"], Int[Tensor, " m"], Int[Tensor, " m"]]:
        """Neighbours, the best box each belongs to, and the class."""
        found = [facts.tags.new_zeros(0, 3, dtype=torch.long)]
        for span, tags in zip(facts.proposals.spans(), facts.tags, strict=True):
            inside = slice(span.start, span.stop)
            boxes = facts.proposals.boxes[inside]
            for c in tags.nonzero().flatten().tolist():
                rows = span.start + top_and_neighbours(
                    boxes, scores[inside, c], count=self.neighbours, iou_threshold=self.iou
                )
                near, best = rows[1:], rows[:1].expand(max(len(rows) - 1, 0))
                found.append(torch.stack([near, best, torch.full_like(near, c)], dim=1))
        near, best, cls = torch.cat(found).unbind(dim=1)
        return near, best, cls
