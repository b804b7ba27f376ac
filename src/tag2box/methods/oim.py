"""Object instance mining: more objects of a class by where they are and what they look like (OIM, 2020)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor

from tag2box.errors import UserError
from tag2box.methods.discovery import keep_apart
from tag2box.methods.oicr import argmax_pseudo_boxes
from tag2box.ops.boxes import iou
from tag2box.ops.refine import assign
from tag2box.types import LabelerInput, Labeling, Proposals, PseudoBoxes, PseudoLabels, Requirements


def distances(vectors: Float[Tensor, "P F"], cores: Int[Tensor, " k"]) -> Float[Tensor, "P k"]:
    """d_r: how far every proposal of an image is from each core instance, by feature vectors."""
    return torch.cdist(vectors, vectors[cores], compute_mode="donot_use_mm_for_euclid_dist")


def embedding_spread(
    boxes: Float[Tensor, "P 4"], distance: Float[Tensor, " P"], core: int, near_iou: float
) -> Float[Tensor, ""]:
    """D: the mean distance over the spatial graph, which is the core instance and what overlaps it."""
    near = iou(boxes, boxes[core : core + 1]).squeeze(1) >= near_iou
    near[core] = True  # an empty box overlaps nothing, itself included
    return distance[near].mean()


def instances(
    boxes: Float[Tensor, "P 4"],
    distance: Float[Tensor, " P"],
    core: int,
    *,
    limit: Float[Tensor, ""],
    free: Bool[Tensor, " P"],
    apart_iou: float,
) -> Int[Tensor, " s"]:
    """The appearance graph: free proposals nearer than the limit, nearest first, that keep apart; the core comes first.

    Args:
        limit: rho D.
        free: proposals that may be taken.
        apart_iou: an instance overlaps the accepted ones no more than this.
    """
    return keep_apart(boxes, -distance, free & (distance < limit), core, apart_iou)


def label_instances(
    proposals: Proposals, pseudo_boxes: PseudoBoxes, cores: int, num_classes: int, foreground_iou: float
) -> PseudoLabels:
    """Labels of one stage: the first ``cores`` seeds have clusters, the others (mined) stand for themselves alone.

    What overlaps a core is its positive. All else is judged by the seed it overlaps most, and is background, but for
    the mined instances themselves.
    """
    own = PseudoBoxes(pseudo_boxes.rows[:cores], pseudo_boxes.cls[:cores], pseudo_boxes.score[:cores])
    around = assign(proposals, own, num_classes, foreground_iou, or_equal=True)
    mined = pseudo_boxes.rows[cores:]
    in_cluster = around.cls < num_classes
    cls, owner = around.cls, torch.where(in_cluster, around.owner, assign(proposals, pseudo_boxes, num_classes).owner)
    cls[mined] = pseudo_boxes.cls[cores:]
    owner[mined] = torch.arange(cores, len(pseudo_boxes), device=owner.device)
    rows = torch.cat([pseudo_boxes.rows, mined.new_zeros(1)])[owner]  # an owner of -1 is the last
    boxes = torch.where((owner >= 0)[:, None], proposals.boxes[rows], proposals.boxes)
    weight = torch.cat([pseudo_boxes.score, pseudo_boxes.score.new_zeros(1)])[owner].to(boxes.dtype)
    return PseudoLabels(cls, weight, boxes, pseudo_boxes, owner)


HARD_FROM = 0.3
"""A proposal that has less than this share of its weight is not hard but probably wrong: its weight stays."""


def reweighted(
    logits: Float[Tensor, "R c1"], labels: PseudoLabels, *, hard_gain: float, seed_cut: float
) -> Float[Tensor, " R"]:
    """Weights of proposals by q = p / w, the student's probability of the label over the weight.

    Foreground with 0.3 <= q < 1 counts (1 + ``hard_gain``) times: it belongs to an object and is not seen as one yet.
    A seed with other foreground around it counts (1 - ``seed_cut``) times, so that its surroundings catch up.
    """
    p = logits.detach().softmax(dim=1).gather(1, labels.cls[:, None]).squeeze(1)
    q = p / labels.weight  # inf or nan where the weight is zero, which is then neither hard nor anything
    is_foreground = labels.cls < logits.shape[1] - 1
    is_hard = is_foreground & (q >= HARD_FROM) & (q < 1)
    members = labels.owner[is_foreground].bincount(minlength=len(labels.pseudo_boxes))
    is_dominant = torch.zeros_like(is_foreground)
    is_dominant[labels.pseudo_boxes.rows[members > 1]] = True
    factor = torch.where(is_hard, 1 + hard_gain, 1.0)
    return labels.weight * torch.where(is_dominant & is_foreground, 1 - seed_cut, factor)


@dataclass(frozen=True, kw_only=True)
class Oim:
    """The top proposal is the core; proposals apart from it whose features are nearly as near as its neighbours' join.

    ``criterion.refine.reweight`` is the other half of the system.
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
    def requirements(self) -> Requirements:
        """Looks are compared by feature vectors."""
        return Requirements(vectors=True)

    def __call__(self, inputs: LabelerInput) -> Labeling:
        """Cores, mined instances and labels of every stage."""
        num_classes = inputs.tags.shape[1]
        cores = [argmax_pseudo_boxes(inputs, stage) for stage in range(len(inputs.probs))]
        far = _distances(inputs, cores)
        found = [self.find(inputs, probs, own, far) for probs, own in zip(inputs.probs, cores, strict=True)]
        stages = [
            label_instances(inputs.proposals, pseudo_boxes, len(own), num_classes, self.foreground_iou)
            for pseudo_boxes, own in zip(found, cores, strict=True)
        ]
        return Labeling(tuple(stages))

    def find(
        self, inputs: LabelerInput, probs: Float[Tensor, "R C"], cores: PseudoBoxes, far: dict[int, Float[Tensor, " P"]]
    ) -> PseudoBoxes:
        """The cores of one stage, then what was mined, class after class; no proposal is taken twice.

        Args:
            far: the distance of every proposal of its image to each core.
        """
        reach = self.late_reach if inputs.fraction >= self.late_from else self.reach
        spans, images = inputs.proposals.spans(), inputs.proposals.image_ids()[cores.rows].tolist()
        free = torch.ones(len(probs), dtype=torch.bool, device=probs.device)
        free[cores.rows] = False
        picks = [torch.stack([cores.rows, cores.cls], dim=1)]
        for core, c, image in zip(cores.rows.tolist(), cores.cls.tolist(), images, strict=True):
            start, inside = spans[image].start, slice(spans[image].start, spans[image].stop)
            boxes, distance = inputs.proposals.boxes[inside], far[core]
            limit = reach * embedding_spread(boxes, distance, core - start, self.foreground_iou)
            mined = instances(boxes, distance, core - start, limit=limit, free=free[inside], apart_iou=self.apart_iou)[
                1:
            ]
            free[mined + start] = False
            picks.append(torch.stack([mined + start, torch.full_like(mined, c)], dim=1))
        rows, cls = torch.cat(picks).unbind(dim=1)
        return PseudoBoxes(rows, cls, probs[rows, cls])


def _distances(inputs: LabelerInput, cores: Sequence[PseudoBoxes]) -> dict[int, Float[Tensor, " P"]]:
    """How far the proposals of an image are from each core in it, whatever stage it is of."""
    if inputs.vectors is None:
        raise UserError("labeler oim: compares feature vectors of proposals, and this scene has none: set its vectors")
    rows = torch.cat([pseudo_boxes.rows for pseudo_boxes in cores]).unique()
    far: dict[int, Float[Tensor, " P"]] = {}
    for span in inputs.proposals.spans():
        own = rows[(rows >= span.start) & (rows < span.stop)]
        columns = distances(inputs.vectors[span.start : span.stop], own - span.start).T.contiguous()
        far |= dict(zip(own.tolist(), columns, strict=True))
    return far
