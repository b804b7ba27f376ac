"""Object instance mining: what looks like the best proposal elsewhere in the photo is an object too (OIM, 2020)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from tag2box.errors import UserError
from tag2box.labelers.oicr import argmax_seeds
from tag2box.maths.instances import distances, instances, label_instances, spread
from tag2box.types import Labeling, Needs, Scene, Seeds


@dataclass(frozen=True, kw_only=True)
class Oim:
    """The top proposal is the core; proposals apart from it whose features are nearly as near as its neighbours' join.

    ``objective.refine.reweight`` is the other half of the system.
    """

    kind: Literal["oim"] = "oim"
    reach: Annotated[float, Field(ge=0)] = 5.0
    """rho: an instance is nearer to the core than this many times the mean of the core's neighbours."""
    late_reach: Annotated[float, Field(ge=0)] = 2.0
    """rho late in training."""
    late_from: Annotated[float, Field(ge=0, le=1)] = 0.78
    """The share of the training after which ``late_reach`` holds; the authors' is 70,000 of 90,000 iterations."""
    apart_iou: Annotated[float, Field(ge=0, lt=1)] = 1e-6
    """Instances of a class overlap each other no more than this."""
    foreground_iou: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """From this IoU on a proposal is the core's neighbour and its positive; around mined instances nothing is."""

    @property
    def needs(self) -> Needs:
        """Looks are compared by feature vectors."""
        return Needs(vectors=True)

    def __call__(self, scene: Scene) -> Labeling:
        """Cores, mined instances and labels of every stage."""
        num_classes = scene.tags.shape[1]
        cores = [argmax_seeds(scene, stage) for stage in range(len(scene.probs))]
        far = _distances(scene, cores)
        found = [self.find(scene, probs, own, far) for probs, own in zip(scene.probs, cores, strict=True)]
        stages = [
            label_instances(scene.proposals, seeds, len(own), num_classes, self.foreground_iou)
            for seeds, own in zip(found, cores, strict=True)
        ]
        return Labeling(tuple(stages))

    def find(
        self, scene: Scene, probs: Float[Tensor, "R C"], cores: Seeds, far: dict[int, Float[Tensor, " P"]]
    ) -> Seeds:
        """The cores of one stage, then what was mined, class after class; no proposal is taken twice.

        Args:
            far: the distance of every proposal of its image to each core.
        """
        reach = self.late_reach if scene.progress >= self.late_from else self.reach
        spans, images = scene.proposals.spans(), scene.proposals.image_ids()[cores.rows].tolist()
        free = torch.ones(len(probs), dtype=torch.bool, device=probs.device)
        free[cores.rows] = False
        picks = [torch.stack([cores.rows, cores.cls], dim=1)]
        for core, c, image in zip(cores.rows.tolist(), cores.cls.tolist(), images, strict=True):
            start, inside = spans[image].start, slice(spans[image].start, spans[image].stop)
            boxes, distance = scene.proposals.boxes[inside], far[core]
            limit = reach * spread(boxes, distance, core - start, self.foreground_iou)
            mined = instances(boxes, distance, core - start, limit=limit, free=free[inside], apart_iou=self.apart_iou)[
                1:
            ]
            free[mined + start] = False
            picks.append(torch.stack([mined + start, torch.full_like(mined, c)], dim=1))
        rows, cls = torch.cat(picks).unbind(dim=1)
        return Seeds(rows, cls, probs[rows, cls])


def _distances(scene: Scene, cores: Sequence[Seeds]) -> dict[int, Float[Tensor, " P"]]:
    """How far the proposals of an image are from each core in it, whatever stage it is of."""
    if scene.vectors is None:
        raise UserError("labeler oim: compares feature vectors of proposals, and this scene has none: set its vectors")
    rows = torch.cat([seeds.rows for seeds in cores]).unique()
    far: dict[int, Float[Tensor, " P"]] = {}
    for span in scene.proposals.spans():
        own = rows[(rows >= span.start) & (rows < span.stop)]
        columns = distances(scene.vectors[span.start : span.stop], own - span.start).T.contiguous()
        far |= dict(zip(own.tolist(), columns, strict=True))
    return far
