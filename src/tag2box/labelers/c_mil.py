"""Labels of continuation MIL: sure ones near and far from the top proposal, none between (C-MIL, Wan et al. 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from tag2box.labelers.oicr import argmax_seeds
from tag2box.maths.refine import assign
from tag2box.maths.subsets import continuation, without_doubt
from tag2box.types import Labeling, Needs, PseudoLabels, Scene


@dataclass(frozen=True, kw_only=True)
class CMilLabeler:
    """Argmax seeds whose neighbourhoods grow with training; in the end they are OICR's."""

    kind: Literal["c_mil"] = "c_mil"
    steepness: Annotated[float, Field(gt=0)] = 2000.0
    """How early lambda rises: ln(1 + steepness t) / ln(1 + steepness) at the share t of training; 100 an epoch."""

    @property
    def needs(self) -> Needs:
        """It looks at scores alone."""
        return Needs()

    def __call__(self, scene: Scene) -> Labeling:
        """Seeds and labels of every stage."""
        return Labeling(tuple(self.labels(scene, stage) for stage in range(len(scene.probs))))

    def labels(self, scene: Scene, stage: int) -> PseudoLabels:
        """Of one stage: positive from an IoU of 1 - lambda / 2 on, negative below lambda / 2."""
        num_classes, half = scene.tags.shape[1], continuation(scene.progress, self.steepness) / 2
        labels = assign(scene.proposals, argmax_seeds(scene, stage), num_classes)
        return without_doubt(labels, scene.proposals, num_classes, positive_iou=1 - half, negative_iou=half)
