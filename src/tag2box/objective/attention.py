"""CASD as a part of the objective: looks at a photo, and layers, are drawn to where any of them looks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from tag2box.maths.attention import attention, disagreement, upright
from tag2box.types import Facts, Needs, PseudoLabels


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Consistency of attention over looks (``feed.looks``) and over layers, on proposals taken for objects."""

    input_weight: Annotated[float, Field(ge=0)] = 0.0
    """Factor of the term over looks; 0 leaves it out. CASD's authors take 0.1."""
    layer_weight: Annotated[float, Field(ge=0)] = 0.0
    """Factor of the term over layers; 0 leaves it out. CASD's authors take 0.1."""
    ramp: Annotated[float, Field(ge=0, le=1)] = 0.45
    """Share of the training over which both factors rise from 0; the authors' code means 45k of 100k iterations."""

    @property
    def is_on(self) -> bool:
        """Whether any term counts."""
        return self.input_weight > 0 or self.layer_weight > 0

    @property
    def needs(self) -> Needs:
        """Responses where it is on, several looks for the term over looks, several layers for that over layers."""
        return Needs(
            responses=self.is_on, looks=2 if self.input_weight > 0 else 1, layers=2 if self.layer_weight > 0 else 1
        )

    def strength(self, progress: float) -> float:
        """How far both factors have risen."""
        return min(1.0, progress / self.ramp) if self.ramp > 0 else 1.0

    def __call__(self, responses: Float[Tensor, "R L s s"], labels: PseudoLabels, facts: Facts) -> Float[Tensor, ""]:
        """Both terms by their factors, before the ramp: mean over the foreground of a photo, then over photos."""
        terms = [responses.new_zeros(())]
        is_object = (labels.cls < facts.tags.shape[1]) & (labels.weight > 0)
        for looks, span in facts.seen_together():
            shape = (len(looks), -1, *responses.shape[1:])
            own = responses[span.start : span.stop].view(shape)
            chosen = is_object[span.start : span.stop].view(len(looks), -1)[0]
            mirrored = None if facts.mirrored is None else facts.mirrored[looks.start : looks.stop]
            maps = upright(attention(own[:, chosen]), mirrored)  # (v, m, L, s, s)
            terms.append(self.input_weight * disagreement(maps[:, :, -1]))
            terms.append(self.layer_weight * disagreement(maps.flatten(0, 1).transpose(0, 1)))
        return torch.stack(terms).sum() / max(len(facts.tags) // facts.looks, 1)
