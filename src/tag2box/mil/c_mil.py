"""Continuation MIL (C-MIL, Wan et al. 2019): bags of merged boxes that fall apart while training goes on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor

from tag2box.maths.mil import mil_scores
from tag2box.maths.subsets import continuation, greedy_subsets, shared_out, subset_means
from tag2box.mil.result import MilResult, TagLoss
from tag2box.types import Facts, Needs, Proposals, StageScores


@dataclass(frozen=True, kw_only=True)
class CMil(TagLoss):
    """Overlapping boxes are judged as one: first all of a photo, in the end each by itself, as WSDDN does."""

    kind: Literal["c_mil"] = "c_mil"
    steepness: Annotated[float, Field(gt=0)] = 2000.0
    """How early lambda rises: ln(1 + steepness t) / ln(1 + steepness) at the share t of training; 100 an epoch."""
    top: Annotated[int, Field(ge=1)] | None = None
    """Only so many of a photo's best boxes are merged; all where it is not set. A reimplementation takes 200."""
    window: Annotated[int, Field(ge=1)] | None = None
    """Boxes of a subset are of so many neighbouring ranks; any where it is not set. A reimplementation takes 40."""
    share: Literal["best", "all"] = "best"
    """Who gets the score of a subset: its best box all of it, or all boxes the same part."""

    @property
    def needs(self) -> Needs:
        """Nothing else."""
        return Needs()

    def __call__(self, scores: StageScores, facts: Facts, progress: float) -> MilResult:
        """Scores of subsets, as scores of their boxes, and their loss."""
        own = mil_scores(scores.mil_cls, scores.mil_det, facts.proposals.sizes).detach()
        subsets, counts = self.merge(own[:, : facts.tags.shape[1]], facts.proposals, progress)
        cls, det = subset_means(scores.mil_cls, subsets), subset_means(scores.mil_det, subsets)
        mil = shared_out(mil_scores(cls, det, counts), subsets, own, self.share)
        return MilResult(mil, self.tag_loss(mil, facts))

    def merge(
        self, own: Float[Tensor, "R C"], proposals: Proposals, progress: float
    ) -> tuple[Int[Tensor, " R"], list[int]]:
        """The subset of each proposal of the batch, and the number of subsets of each photo."""
        threshold = continuation(progress, self.steepness)
        subsets = [torch.zeros(0, dtype=torch.long, device=own.device)]
        counts: list[int] = []
        for boxes, x in zip(proposals.split(proposals.boxes), proposals.split(own), strict=True):
            ids = greedy_subsets(boxes, x.sum(dim=1), threshold, top=self.top, window=self.window)
            subsets.append(ids + sum(counts))
            counts.append(int(ids.max()) + 1 if len(ids) else 0)
        return torch.cat(subsets), counts
