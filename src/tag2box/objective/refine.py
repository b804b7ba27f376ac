"""Refinement: losses of the K stages on the labels they were given (eq. 3-4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from tag2box.maths.refine import box_loss, refine_loss
from tag2box.types import Labeling, Proposals, StageScores


@dataclass(frozen=True, kw_only=True)
class Refine:
    """Refinement losses (eq. 3-4)."""

    first_stage: Annotated[float, Field(gt=0)] = 3.0
    """Stage 1 counts this much more than the others (not in the paper; its numbers come from it)."""
    box_divisor: Literal["proposals", "pseudo_boxes"] = "proposals"
    """What L_reg is divided by: all proposals (published numbers) or the pseudo boxes (the paper's text)."""

    def cls_loss(self, scores: StageScores, labeling: Labeling, sizes: Sequence[int]) -> Float[Tensor, ""]:
        """L_cls over the stages."""
        stages = zip(scores.refine, labeling.stages, strict=True)
        return self._over_stages([refine_loss(logits, labels, sizes) for logits, labels in stages])

    def box_loss(self, scores: StageScores, labeling: Labeling, proposals: Proposals) -> Float[Tensor, ""]:
        """L_reg over the stages; zero without box regression."""
        stages = zip(scores.deltas, labeling.stages, strict=False)
        return self._over_stages([box_loss(d, proposals, labels, self.box_divisor) for d, labels in stages])

    def _over_stages(self, per_stage: list[Float[Tensor, ""]]) -> Float[Tensor, ""]:
        weighted = [self.first_stage * x if k == 0 else x for k, x in enumerate(per_stage)]
        return torch.stack(weighted).sum() if weighted else torch.zeros(())
