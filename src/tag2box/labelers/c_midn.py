"""Labels of coupled MIL heads: both top proposals, or the better one (C-MIDN, Gao et al. 2019)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from jaxtyping import Bool, Int
from pydantic import Field
from torch import Tensor

from tag2box.labelers.oicr import argmax_seeds
from tag2box.maths.coupled import class_mask, kept_of_two
from tag2box.maths.refine import assign
from tag2box.types import Labeling, Needs, Scene, Seeds


@dataclass(frozen=True, kw_only=True)
class CMidnLabeler:
    """Stage 1 learns from the top proposals of both MIL heads, later stages from the top of the stage before."""

    kind: Literal["c_midn"] = "c_midn"
    apart: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Both are objects where no more than this share of the smaller lies in the other."""
    mask: Annotated[float, Field(ge=0, le=1)] = 0.5
    """A place belongs to the class's mask where its likelihood is so high; its best place has 1."""
    cell: Annotated[float, Field(gt=0)] = 8.0
    """Side of the mask's cells in pixels of the resized photo."""
    foreground_iou: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """A proposal joins its nearest seed above this IoU; others are background."""

    @property
    def needs(self) -> Needs:
        """A second MIL head."""
        return Needs(mil_heads=2)

    def __call__(self, scene: Scene) -> Labeling:
        """Seeds and labels of every stage."""
        later = [argmax_seeds(scene, stage) for stage in range(1, len(scene.probs))]
        seeds, num_classes = [self.coupled(scene), *later], scene.tags.shape[1]
        return Labeling(tuple(assign(scene.proposals, s, num_classes, self.foreground_iou) for s in seeds))

    def coupled(self, scene: Scene) -> Seeds:
        """Seeds of stage 1; those of the first head alone where a MIL strategy has no second."""
        first = argmax_seeds(scene, 0)
        if scene.second is None:
            return first
        second = argmax_seeds(replace(scene, probs=(scene.second,)), 0)  # the same images and classes in the same order
        rows = torch.stack([first.rows, second.rows], dim=1)  # (pairs, 2)
        scores = torch.stack([first.score, second.score], dim=1)
        cls = first.cls[:, None].expand_as(rows)
        keep = [self.keep(scene, pair, c) for pair, c in zip(rows, first.cls.tolist(), strict=True)]
        is_kept = torch.stack(keep) if keep else rows > 0
        return Seeds(rows[is_kept], cls[is_kept], scores[is_kept])

    def keep(self, scene: Scene, pair: Int[Tensor, " 2"], c: int) -> Bool[Tensor, " 2"]:
        """Which of two top proposals of one class of one image are objects, by the mask that both heads vote for."""
        assert scene.second is not None
        span = next(span for span in scene.proposals.spans() if int(pair[0]) in span)
        inside = slice(span.start, span.stop)
        votes = scene.probs[0][inside, c] + scene.second[inside, c]
        mask = class_mask(scene.proposals.boxes[inside], votes, cell=self.cell, threshold=self.mask)
        return kept_of_two(scene.proposals.boxes[pair], mask, apart=self.apart, cell=self.cell)
