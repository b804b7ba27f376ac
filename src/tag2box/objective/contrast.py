"""The weakly supervised contrastive loss over exemplars and what was discovered (eq. 11-12)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor

from tag2box.maths.contrast import wscl
from tag2box.objective.sampling import instance_difficulty
from tag2box.types import Exemplars, Labeling, Scene


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """The weakly supervised contrastive loss (eq. 11-12)."""

    enabled: bool = True
    weight: Annotated[float, Field(ge=0)] = 0.03
    """lambda; the paper takes 0.01 on COCO."""
    temperature: Annotated[float, Field(gt=0)] = 0.2
    """epsilon."""
    positives: Literal["outside", "inside"] = "outside"
    """Where the positives are averaged: outside the logarithm (the paper) or inside it (its published code)."""

    def __call__(self, exemplars: Exemplars) -> Float[Tensor, ""]:
        """The unweighted loss over S^U."""
        return wscl(
            exemplars.embed,
            exemplars.cls,
            exemplars.weight,
            temperature=self.temperature,
            positives=self.positives,
        )


def grown(scene: Scene, labeling: Labeling) -> Exemplars:
    """S^U: the sampled exemplars and, once each, the discovered proposals that were not among them."""
    s = scene.exemplars
    rows = torch.cat([s.rows, *(stage.seeds.rows for stage in labeling.stages)])
    cls = torch.cat([s.cls, *(stage.seeds.cls for stage in labeling.stages)])
    new = first_seen(rows, cls, scene.tags.shape[1])
    new = new[new >= len(s)]
    return Exemplars(
        torch.cat([s.embed, scene.embed[rows[new]]]),
        torch.cat([s.cls, cls[new]]),
        torch.cat([s.weight, instance_difficulty(scene, rows[new], cls[new])]),
        torch.cat([s.rows, rows[new]]),
    )


def first_seen(rows: Int[Tensor, " a"], cls: Int[Tensor, " a"], num_classes: int) -> Int[Tensor, " b"]:
    """Positions at which a (proposal, class) pair appears for the first time, in order."""
    keys = rows * num_classes + cls
    _, inverse = keys.unique(return_inverse=True)
    first = torch.full((int(inverse.max()) + 1 if len(keys) else 0,), len(keys), device=rows.device)
    first = first.scatter_reduce(0, inverse, torch.arange(len(keys), device=rows.device), reduce="amin")
    return first.sort().values
