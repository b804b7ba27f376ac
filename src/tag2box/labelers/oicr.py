"""Argmax labelling: the top proposal of each present class is the only pseudo ground truth (Tang et al., 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field

from tag2box.maths.discovery import top_rows
from tag2box.maths.refine import assign
from tag2box.types import Labeling, Needs, Scene, Seeds


@dataclass(frozen=True, kw_only=True)
class Oicr:
    """The top-scoring proposal per present class seeds a cluster."""

    kind: Literal["oicr"] = "oicr"
    foreground_iou: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """A proposal joins its nearest seed above this IoU; others are background."""

    @property
    def needs(self) -> Needs:
        """Argmax looks at scores alone."""
        return Needs()

    def __call__(self, scene: Scene) -> Labeling:
        """Seeds and labels of every stage."""
        num_classes = scene.tags.shape[1]
        seeds = [argmax_seeds(scene, stage) for stage in range(len(scene.probs))]
        return Labeling(tuple(assign(scene.proposals, s, num_classes, self.foreground_iou) for s in seeds))


def argmax_seeds(scene: Scene, stage: int) -> Seeds:
    """The top proposal of each present class of each image, by one stage's teacher (eq. 2)."""
    probs = scene.probs[stage]
    rows, classes = [scene.tags.new_zeros(0, dtype=torch.long)], [scene.tags.new_zeros(0, dtype=torch.long)]
    for span, tags in zip(scene.proposals.spans(), scene.tags, strict=True):
        present = tags.nonzero().flatten()
        if len(span) == 0 or len(present) == 0:
            continue
        rows.append(top_rows(probs[span.start : span.stop], present) + span.start)
        classes.append(present)
    row, cls = torch.cat(rows), torch.cat(classes)
    return Seeds(row, cls, probs[row, cls])
