"""Greedy non-maximum suppression, without a loop over boxes."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tag2box.ops.boxes import iou

_BLOCK = 256  # boxes settled among themselves at a time


def nms(boxes: Float[Tensor, "A 4"], scores: Float[Tensor, " A"], iou_threshold: float) -> Int[Tensor, " kept"]:
    """Rows that survive, best score first; a box falls when a kept better one overlaps it by more than the threshold.

    Equal scores keep their order. The best boxes left are settled among themselves, then all that they suppress goes:
    most boxes fall to the first few blocks, and are never compared with each other.
    """
    left = scores.argsort(descending=True, stable=True)
    kept = [left[:0]]
    while len(left):
        best, left = left[:_BLOCK], left[_BLOCK:]
        best = best[_settle(boxes[best], iou_threshold)]
        left = left[~(iou(boxes[best], boxes[left]) > iou_threshold).any(dim=0)]
        kept.append(best)
    return torch.cat(kept)


def _settle(ranked: Float[Tensor, "a 4"], iou_threshold: float) -> Bool[Tensor, " a"]:
    """Which of a few boxes, best first, survive each other.

    Greedy suppression is the only solution of ``kept[j] = no kept i < j suppresses j``, so iterating that equation from
    "all kept" reaches it: after t rounds the first t ranks are final, and in practice a handful settles everything.
    """
    suppresses = (iou(ranked, ranked) > iou_threshold).triu(diagonal=1).to(torch.float32)  # (a, a), better row first
    kept = torch.ones(len(ranked), dtype=torch.bool, device=ranked.device)
    for _ in range(len(ranked)):
        settled = (kept.to(torch.float32) @ suppresses) == 0
        if torch.equal(settled, kept):
            break
        kept = settled
    return kept


def class_nms(
    boxes: Float[Tensor, "A 4"],
    scores: Float[Tensor, " A"],
    labels: Int[Tensor, " A"],
    iou_threshold: float,
) -> Int[Tensor, " kept"]:
    """NMS within each class; rows of all classes, best score first."""
    kept = [ids[nms(boxes[ids], scores[ids], iou_threshold)] for ids in _groups(labels)]
    if not kept:
        return labels.new_zeros(0)
    rows = torch.cat(kept)
    return rows[scores[rows].argsort(descending=True, stable=True)]


def _groups(labels: Int[Tensor, " A"]) -> list[Int[Tensor, " a"]]:
    return [(labels == label).nonzero().flatten() for label in labels.unique()]
