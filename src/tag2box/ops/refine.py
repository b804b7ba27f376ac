"""Refinement stages: labels from pseudo ground truth, and the two losses on them (eq. 2-4)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from tag2box.ops.boxes import encode, iou
from tag2box.types import Proposals, PseudoBoxes, PseudoLabels


def first_argmax(x: Float[Tensor, "a b"]) -> Int[Tensor, " a"]:
    """Column of each row's maximum; the first of equals, on every device."""
    columns = torch.arange(x.shape[1], device=x.device).expand_as(x)
    return torch.where(x == x.max(dim=1, keepdim=True).values, columns, x.shape[1]).min(dim=1).values


def assign(
    proposals: Proposals,
    pseudo_boxes: PseudoBoxes,
    num_classes: int,
    foreground_iou: float = 0.5,
    *,
    or_equal: bool = False,
    ignore_below: float = 0.0,
) -> PseudoLabels:
    """Labels of one stage (eq. 2): every proposal goes to the best-overlapping seed of its image.

    Above ``foreground_iou`` it takes the seed's class, else it is background; either way its loss weight is the seed's
    score. In an image without seeds all weights are zero.

    Args:
        or_equal: an overlap of just ``foreground_iou`` is foreground too, as in PCL, MIST and what came after them.
        ignore_below: proposals with less overlap get no weight: they may show what no seed found.
    """
    total = sum(proposals.sizes)
    cls = torch.full((total,), num_classes, dtype=torch.long, device=proposals.boxes.device)
    weight = proposals.boxes.new_zeros(total)
    boxes = proposals.boxes.clone()
    owner = torch.full_like(cls, -1)
    pseudo = pseudo_boxes.placed(proposals)
    for span in proposals.spans():
        inside = ((pseudo_boxes.rows >= span.start) & (pseudo_boxes.rows < span.stop)).nonzero().flatten()
        if len(inside) == 0:
            continue
        rows = slice(span.start, span.stop)
        overlap = iou(proposals.boxes[rows], pseudo[inside])  # (P, s)
        nearest = first_argmax(overlap)
        best = overlap.gather(1, nearest[:, None]).squeeze(1)
        chosen = inside[nearest]
        is_foreground = best >= foreground_iou if or_equal else best > foreground_iou
        cls[rows] = torch.where(is_foreground, pseudo_boxes.cls[chosen], num_classes)
        weight[rows] = torch.where(best < ignore_below, 0, pseudo_boxes.score[chosen].to(weight.dtype))
        boxes[rows] = pseudo[chosen]
        owner[rows] = chosen
    return PseudoLabels(cls, weight, boxes, pseudo_boxes, owner)


def _image_mean(per_proposal: Float[Tensor, " R"], sizes: Sequence[int], divisors: Sequence[int]) -> Float[Tensor, ""]:
    """Sum within an image over its divisor, then mean over images."""
    sums = torch.stack([x.sum() for x in per_proposal.split(list(sizes))])
    return (sums / sums.new_tensor([max(d, 1) for d in divisors])).sum() / max(len(sizes), 1)


def refine_loss(logits: Float[Tensor, "R c1"], labels: PseudoLabels, sizes: Sequence[int]) -> Float[Tensor, ""]:
    """L_cls of one stage (eq. 3): weighted cross-entropy, mean over an image's proposals, then over images."""
    entropy = functional.cross_entropy(logits, labels.cls, reduction="none")
    return _image_mean(labels.weight * entropy, sizes, sizes)


def box_loss(
    deltas: Float[Tensor, "R c4"],
    proposals: Proposals,
    labels: PseudoLabels,
    divisor: Literal["proposals", "pseudo_boxes"] = "proposals",
) -> Float[Tensor, ""]:
    """L_reg of one stage (eq. 4): weighted smooth-L1 of the labelled class's deltas, on foreground proposals.

    The paper divides by the number of pseudo boxes; the published numbers come from dividing by all proposals.
    """
    num_classes = deltas.shape[1] // 4
    is_foreground = labels.cls < num_classes
    own = labels.cls.clamp(max=max(num_classes - 1, 0))[:, None, None].expand(-1, 1, 4)
    predicted = deltas.reshape(len(deltas), num_classes, 4).gather(1, own).squeeze(1)  # (R, 4)
    error = functional.smooth_l1_loss(predicted, encode(labels.boxes, proposals.boxes), reduction="none").sum(dim=1)
    weighted = torch.where(is_foreground, labels.weight * error, error.new_zeros(()))
    divisors = proposals.sizes if divisor == "proposals" else _pseudo_box_counts(proposals, labels.pseudo_boxes)
    return _image_mean(weighted, proposals.sizes, divisors)


def _pseudo_box_counts(proposals: Proposals, pseudo_boxes: PseudoBoxes) -> tuple[int, ...]:
    counts = torch.bincount(proposals.image_ids()[pseudo_boxes.rows], minlength=len(proposals.sizes))
    return tuple(int(n) for n in counts)
