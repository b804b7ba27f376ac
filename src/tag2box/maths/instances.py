"""Object instance mining: more objects of a class by where they are and what they look like (OIM, 2020)."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tag2box.maths.boxes import iou
from tag2box.maths.discovery import keep_apart
from tag2box.maths.refine import assign
from tag2box.types import Proposals, PseudoLabels, Seeds


def distances(vectors: Float[Tensor, "P F"], cores: Int[Tensor, " k"]) -> Float[Tensor, "P k"]:
    """d_r: how far every proposal of an image is from each core instance, by feature vectors."""
    return torch.cdist(vectors, vectors[cores], compute_mode="donot_use_mm_for_euclid_dist")


def spread(boxes: Float[Tensor, "P 4"], distance: Float[Tensor, " P"], core: int, near_iou: float) -> Float[Tensor, ""]:
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
    proposals: Proposals, seeds: Seeds, cores: int, num_classes: int, foreground_iou: float
) -> PseudoLabels:
    """Labels of one stage: the first ``cores`` seeds have clusters, the others (mined) stand for themselves alone.

    What overlaps a core is its positive. All else is judged by the seed it overlaps most, and is background, but for
    the mined instances themselves.
    """
    own = Seeds(seeds.rows[:cores], seeds.cls[:cores], seeds.score[:cores])
    around = assign(proposals, own, num_classes, foreground_iou, or_equal=True)
    mined = seeds.rows[cores:]
    in_cluster = around.cls < num_classes
    cls, owner = around.cls, torch.where(in_cluster, around.owner, assign(proposals, seeds, num_classes).owner)
    cls[mined] = seeds.cls[cores:]
    owner[mined] = torch.arange(cores, len(seeds), device=owner.device)
    rows = torch.cat([seeds.rows, mined.new_zeros(1)])[owner]  # an owner of -1 is the last
    boxes = torch.where((owner >= 0)[:, None], proposals.boxes[rows], proposals.boxes)
    weight = torch.cat([seeds.score, seeds.score.new_zeros(1)])[owner].to(boxes.dtype)
    return PseudoLabels(cls, weight, boxes, seeds, owner)
