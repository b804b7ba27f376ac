"""Exemplars: proposals believed to show a class, sampled over the whole batch (eq. 5-8)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor

from tag2box.labelers.oicr import argmax_seeds
from tag2box.maths.discovery import neighbours
from tag2box.types import Exemplars, Scene, ViewMaker


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """IoU sampling (eq. 5): which proposals stand for their class before anything is discovered."""

    iou: bool = True
    """Also take the neighbours of the top proposals; off, the top proposals alone."""
    iou_threshold: Annotated[float, Field(gt=0, le=1)] = 0.5
    """tau_IoU: how much a neighbour overlaps."""

    def __call__(self, scene: Scene, views: ViewMaker) -> Exemplars:
        """S (eq. 5-8): sampled proposals and their augmented copies over the whole batch, class known by the tag."""
        rows, cls = self._rows(scene)
        copies = views(rows)
        repeats = 1 + copies.embed.shape[0]
        own = torch.cat([scene.embed[rows][None], copies.embed]).flatten(0, 1)  # (repeats * m, D)
        probs = [
            torch.cat([p[rows, cls][None], v[:, torch.arange(len(rows)), cls]]).flatten()
            for p, v in zip(scene.probs, copies.probs, strict=True)
        ]
        return Exemplars(
            own,
            cls.repeat(repeats),
            instance_difficulty(scene, rows, cls).repeat(repeats),
            rows.repeat(repeats),
            tuple(probs),
        )

    def _rows(self, scene: Scene) -> tuple[Int[Tensor, " m"], Int[Tensor, " m"]]:
        tops = [argmax_seeds(scene, stage) for stage in range(len(scene.probs))]
        image_of_top = scene.proposals.image_ids()[tops[0].rows]
        spans = scene.proposals.spans()
        rows, classes = [tops[0].rows.new_zeros(0)], [tops[0].rows.new_zeros(0)]
        for i, c in enumerate(tops[0].cls.tolist()):  # every stage has the same (image, class) pairs in the same order
            span = spans[int(image_of_top[i])]
            top_of_stages = torch.stack([t.rows[i] for t in tops])
            near = top_of_stages.unique()
            if self.iou:
                inside = scene.proposals.boxes[span.start : span.stop]
                near = neighbours(inside, top_of_stages - span.start, self.iou_threshold) + span.start
            rows.append(near)
            classes.append(torch.full_like(near, c))
        return torch.cat(rows), torch.cat(classes)


def instance_difficulty(scene: Scene, rows: Int[Tensor, " m"], cls: Int[Tensor, " m"]) -> Float[Tensor, " m"]:
    """omega (eq. 12): a proposal's MIL score over the sum of its image's, for the class it stands for."""
    mil = scene.probs[0]
    sums = torch.stack([x.sum(dim=0) for x in scene.proposals.split(mil)])  # (N, C)
    return mil[rows, cls] / sums[scene.proposals.image_ids()[rows], cls].clamp(min=torch.finfo(mil.dtype).tiny)


def no_exemplars(embed: Float[Tensor, "R D"]) -> Exemplars:
    """The empty set S."""
    none = torch.zeros(0, dtype=torch.long, device=embed.device)
    return Exemplars(embed[:0], none, embed.new_zeros(0), none)
