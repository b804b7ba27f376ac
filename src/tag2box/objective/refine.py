"""Refinement: who teaches the last of the K stages, and the losses of all on the labels they were given (eq. 3-4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from tag2box.maths.clusters import bag_loss
from tag2box.maths.refine import box_loss, refine_loss
from tag2box.maths.reweight import reweighted
from tag2box.types import Labeling, Proposals, PseudoLabels, StageScores


@dataclass(frozen=True, kw_only=True)
class Refine:
    """Refinement losses (eq. 3-4)."""

    first_stage: Annotated[float, Field(gt=0)] = 3.0
    """Stage 1 counts this much more than the others (not in the paper; its numbers come from it)."""
    box_divisor: Literal["proposals", "pseudo_boxes"] = "proposals"
    """What L_reg is divided by: all proposals (published numbers) or the pseudo boxes (the paper's text)."""
    over: Literal["proposals", "clusters"] = "proposals"
    """What L_cls is made of: proposals, or clusters by the mean probability of their members (PCL)."""
    reweight: bool = False
    """Weigh proposals in L_cls by how the student sees them already (OIM)."""
    hard_gain: Annotated[float, Field(ge=0)] = 0.2
    """alpha: with ``reweight``, foreground the student is unsure of counts this share more."""
    seed_cut: Annotated[float, Field(ge=0, le=1)] = 0.2
    """beta: with ``reweight``, a seed with foreground around it counts this share less."""
    last_teacher: Literal["previous", "mean"] = "previous"
    """Who teaches the last stage: the stage before it, or the mean of all stages before it (SLV)."""

    def cls_loss(self, scores: StageScores, labeling: Labeling, sizes: Sequence[int]) -> Float[Tensor, ""]:
        """L_cls over the stages; zero without any."""
        stages = zip(scores.refine, labeling.stages, strict=False)  # without stages the labels are for pictures only
        return self._over_stages([self._stage_loss(logits, labels, sizes) for logits, labels in stages])

    def _stage_loss(
        self, logits: Float[Tensor, "R c1"], labels: PseudoLabels, sizes: Sequence[int]
    ) -> Float[Tensor, ""]:
        if self.reweight:
            weight = reweighted(logits, labels, hard_gain=self.hard_gain, seed_cut=self.seed_cut)
            labels = replace(labels, weight=weight)
        return bag_loss(logits, labels, sizes) if self.over == "clusters" else refine_loss(logits, labels, sizes)

    def box_loss(self, scores: StageScores, labeling: Labeling, proposals: Proposals) -> Float[Tensor, ""]:
        """L_reg over the stages; zero without box regression."""
        stages = zip(scores.deltas, labeling.stages, strict=False)
        return self._over_stages([box_loss(d, proposals, labels, self.box_divisor) for d, labels in stages])

    def _over_stages(self, per_stage: list[Float[Tensor, ""]]) -> Float[Tensor, ""]:
        weighted = [self.first_stage * x if k == 0 else x for k, x in enumerate(per_stage)]
        return torch.stack(weighted).sum() if weighted else torch.zeros(())
