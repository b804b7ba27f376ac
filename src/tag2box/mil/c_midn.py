"""Coupled MIL heads (C-MIDN, Gao et al. 2019): the second must find the class where the first did not look."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Bool, Float
from pydantic import Field
from torch import Tensor

from tag2box.errors import UserError
from tag2box.maths.coupled import class_mask, coverage, is_removed
from tag2box.maths.mil import mil_scores
from tag2box.mil.result import MilResult, TagLoss
from tag2box.types import Facts, Needs, StageScores


@dataclass(frozen=True, kw_only=True)
class CMidn(TagLoss):
    """Two heads learn the tags; the second is not shown what overlaps the first one's top box of a tagged class."""

    kind: Literal["c_midn"] = "c_midn"
    removed_iou: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Proposals that overlap the first head's top box by more are taken from the second head."""
    covered: Annotated[float, Field(ge=0)] = 0.8
    """But for those that hold so much of the class's mask; above 1 there are none."""
    mask: Annotated[float, Field(ge=0, le=1)] = 0.5
    """A place belongs to the class's mask where its likelihood is so high; its best place has 1."""
    cell: Annotated[float, Field(gt=0)] = 8.0
    """Side of the mask's cells in pixels of the resized photo."""

    @property
    def needs(self) -> Needs:
        """A second MIL head."""
        return Needs(mil_heads=2)

    def __call__(self, scores: StageScores, facts: Facts, progress: float) -> MilResult:
        """X of both heads, and the sum of their losses."""
        if len(scores.mil_more) != 2:
            raise UserError("heads.mil_heads: objective.mil.kind c_midn reads two MIL heads; --set heads.mil_heads=2")
        sizes, (cls, det) = facts.proposals.sizes, scores.mil_more
        first = mil_scores(scores.mil_cls, scores.mil_det, sizes)
        second = mil_scores(cls, det.masked_fill(self.removed(first.detach(), facts), -torch.inf), sizes)
        return MilResult(first, self.tag_loss(first, facts) + self.tag_loss(second, facts), second)

    def removed(self, first: Float[Tensor, "R c"], facts: Facts) -> Bool[Tensor, "R c"]:
        """What the second head does not see, by class."""
        removed = torch.zeros_like(first, dtype=torch.bool)
        for span, tags in zip(facts.proposals.spans(), facts.tags, strict=True):
            inside = slice(span.start, span.stop)
            boxes = facts.proposals.boxes[inside]
            for c in tags.nonzero().flatten().tolist() if len(span) else []:
                scores = first[inside, c]
                mask = class_mask(boxes, scores, cell=self.cell, threshold=self.mask)
                covered = coverage(mask, boxes, self.cell)
                removed[inside, c] = is_removed(
                    boxes, int(scores.argmax()), covered, iou_threshold=self.removed_iou, enough=self.covered
                )
        return removed
