"""Spatial likelihood voting: all good boxes of a class vote, and what they agree on is the object (SLV, 2020)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from tag2box.labelers.oicr import argmax_seeds
from tag2box.maths.boxes import iou
from tag2box.maths.refine import assign, first_argmax
from tag2box.maths.voting import voted_boxes
from tag2box.types import Labeling, Needs, PseudoLabels, Scene, Seeds


@dataclass(frozen=True, kw_only=True)
class Slv:
    """The last stage learns from voted boxes, more and more; those before it from their top proposals.

    Made for one stage more (``heads.stages = 4``) and ``objective.refine.last_teacher = "mean"``.
    """

    kind: Literal["slv"] = "slv"
    min_score: Annotated[float, Field(ge=0, lt=1)] = 0.001
    """Proposals above this score vote; where there is none, the best votes alone."""
    threshold: Annotated[float, Field(gt=0, le=1)] = 0.5
    """What has this share of the most votes of its class belongs to an object; the paper takes 0.2 for people."""
    cell: Annotated[float, Field(gt=0)] = 4.0
    """Side of the cells that votes are counted in, in pixels of the resized photo."""
    ramp: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The share of the training over which the last stage's weight grows from 0 to 1."""
    weights: Literal["even", "score"] = "even"
    """Whether all proposals of the last stage count alike, or by their seed's score as in the stages before."""
    foreground_iou: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """A proposal joins its nearest seed above this IoU (in the last stage: from it on); others are background."""

    @property
    def needs(self) -> Needs:
        """Boxes and their scores vote."""
        return Needs()

    def __call__(self, scene: Scene) -> Labeling:
        """Seeds and labels of every stage."""
        num_classes, last = scene.tags.shape[1], len(scene.probs) - 1
        tops = [argmax_seeds(scene, stage) for stage in range(last)]
        stages = [assign(scene.proposals, seeds, num_classes, self.foreground_iou) for seeds in tops]
        return Labeling((*stages, self._voted(scene, self.find(scene, scene.probs[last]))))

    def find(self, scene: Scene, probs: Float[Tensor, "R C"]) -> Seeds:
        """Voted boxes, image after image, class after class; each is scored as the proposal nearest to it."""
        none = torch.zeros(0, dtype=torch.long, device=probs.device)
        found = [(none, none, scene.proposals.boxes[:0])]
        for span, tags in zip(scene.proposals.spans(), scene.tags, strict=True):
            inside = slice(span.start, span.stop)
            boxes = scene.proposals.boxes[inside]
            for c in tags.nonzero().flatten().tolist() if len(span) else ():
                voted = self._vote(boxes, probs[inside, c])
                rows = first_argmax(iou(voted, boxes)) + span.start
                found.append((rows, torch.full_like(rows, c), voted))
        rows, cls, placed = (torch.cat(part) for part in zip(*found, strict=True))
        return Seeds(rows, cls, probs[rows, cls], placed)

    def _vote(self, boxes: Float[Tensor, "P 4"], scores: Float[Tensor, " P"]) -> Float[Tensor, "n 4"]:
        voters = (scores > self.min_score).nonzero().flatten()
        if len(voters):
            return voted_boxes(boxes[voters], scores[voters], threshold=self.threshold, cell=self.cell)
        alone = boxes[scores.argmax()][None]
        return voted_boxes(alone, torch.ones_like(scores[:1]), threshold=self.threshold, cell=self.cell)

    def _voted(self, scene: Scene, seeds: Seeds) -> PseudoLabels:
        labels = assign(scene.proposals, seeds, scene.tags.shape[1], self.foreground_iou, or_equal=True)
        weight = (labels.owner >= 0).to(labels.weight.dtype) if self.weights == "even" else labels.weight
        return replace(labels, weight=weight * min(scene.progress / self.ramp, 1.0))
