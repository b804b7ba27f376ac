"""Proposal clusters: centres of the graph of high-scoring proposals (PCL, Tang et al. 2018)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor

from tag2box.maths.clusters import cluster_centres
from tag2box.maths.refine import assign
from tag2box.types import Labeling, Needs, PseudoLabels, Scene, Seeds


@dataclass(frozen=True, kw_only=True)
class Pcl:
    """The most connected of a class's high-scoring proposals are the centres of its clusters."""

    kind: Literal["pcl"] = "pcl"
    groups: Annotated[int, Field(ge=2)] = 3
    """Scores of a class fall into so many k-means groups; centres come from the highest."""
    graph_iou: Annotated[float, Field(ge=0, lt=1)] = 0.4
    """Two proposals are neighbours above this IoU."""
    leave: Annotated[int, Field(ge=0)] = 5
    """No further centre is looked for once no more than this many proposals are left."""
    max_centres: Annotated[int, Field(ge=1)] = 5
    """At most so many centres for each tag."""
    foreground_iou: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """A proposal joins its nearest centre from this IoU on; others are background."""
    ignore_below: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """A proposal that overlaps no centre so much is left out of the loss."""

    @property
    def needs(self) -> Needs:
        """Clusters are made of scores and boxes alone."""
        return Needs()

    def __call__(self, scene: Scene) -> Labeling:
        """Centres and labels of every stage."""
        return Labeling(tuple(self._labels(scene, self.find(scene, probs)) for probs in scene.probs))

    def find(self, scene: Scene, probs: Float[Tensor, "R C"]) -> Seeds:
        """The centres one teacher gives, image after image, class after class; none serves two classes."""
        none = torch.zeros(0, dtype=torch.long, device=probs.device)
        found = [(none, none, probs.new_zeros(0))]
        for span, tags in zip(scene.proposals.spans(), scene.tags, strict=True):
            is_free = torch.ones(len(span), dtype=torch.bool, device=probs.device)
            for c in tags.nonzero().flatten().tolist() if len(span) else ():
                if not is_free.any():  # more tags than proposals: they share
                    is_free = ~is_free
                pool = is_free.nonzero().flatten()
                rows, score = self._centres(scene.proposals.boxes[pool + span.start], probs[pool + span.start, c])
                is_free[pool[rows]] = False
                found.append((pool[rows] + span.start, torch.full_like(rows, c), score))
        rows, cls, score = (torch.cat(part) for part in zip(*found, strict=True))
        return Seeds(rows, cls, score)

    def _centres(
        self, boxes: Float[Tensor, "P 4"], scores: Float[Tensor, " P"]
    ) -> tuple[Int[Tensor, " s"], Float[Tensor, " s"]]:
        return cluster_centres(
            boxes, scores, groups=self.groups, graph_iou=self.graph_iou, leave=self.leave, most=self.max_centres
        )

    def _labels(self, scene: Scene, seeds: Seeds) -> PseudoLabels:
        return assign(
            scene.proposals,
            seeds,
            scene.tags.shape[1],
            self.foreground_iou,
            or_equal=True,
            ignore_below=self.ignore_below,
        )
