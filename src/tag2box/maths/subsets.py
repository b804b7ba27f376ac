"""Continuation MIL: boxes merged into subsets that fall apart as training goes on (C-MIL, Wan et al. 2019)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from tag2box.maths.boxes import iou, row_iou
from tag2box.types import Proposals, PseudoLabels

_BLOCK = 128  # boxes compared with all others at a time


def continuation(progress: float, steepness: float) -> float:
    """lambda: 0 at the start of training, 1 at its end, a logarithm between them; a line where steepness is small.

    ln((e + 0.01) / 0.01) / ln((E + 0.01) / 0.01) over E epochs has a steepness of 100 E.
    """
    return math.log1p(steepness * min(max(progress, 0.0), 1.0)) / math.log1p(steepness)


def greedy_subsets(
    boxes: Float[Tensor, "P 4"],
    objectness: Float[Tensor, " P"],
    threshold: float,
    *,
    top: int | None = None,
    window: int | None = None,
) -> Int[Tensor, " P"]:
    """The subset of each box of a photo; subsets are numbered in the order of their first rows.

    The best free box opens a subset; a lower-ranked free one joins where it overlaps all members by ``threshold`` at
    least. At 0 all boxes are one subset; at 1 each is its own, copies of a box too.

    Args:
        top: only so many of the best boxes are merged; the others stay alone.
        window: members are fewer than so many ranks below the box that opened their subset.
    """
    first_row = list(range(len(boxes)))  # of the subset of each box
    if threshold < 1:
        ranked = objectness.argsort(descending=True, stable=True)[:top]
        rows, joins = ranked.tolist(), _overlapping(boxes[ranked], threshold)
        for ranks in _cliques(joins, len(rows) if window is None else window):
            members = [rows[rank] for rank in ranks]
            first = min(members)
            for row in members:
                first_row[row] = first
    subsets: Tensor = torch.tensor(first_row, dtype=torch.long).unique(return_inverse=True)[1]
    return subsets.to(boxes.device)


def _overlapping(boxes: Float[Tensor, "P 4"], threshold: float) -> NDArray[np.bool_]:
    """Which pairs overlap by so much: a few rows at a time, which stay in the cache."""
    blocks = [iou(block, boxes) >= threshold for block in boxes.split(_BLOCK)]
    return torch.cat(blocks).cpu().numpy()


def _cliques(joins: NDArray[np.bool_], window: int) -> list[list[int]]:
    """Ranks that belong together: one joins where all members before it let it.

    Sets of ranks are the bits of an integer: a thousand ranks are asked at once.
    """
    lets = [int.from_bytes(line.tobytes(), "little") for line in np.packbits(joins, axis=1, bitorder="little")]
    free, found = (1 << len(lets)) - 1, []
    while free:
        opener = _lowest(free)
        members, taken = [opener], 1 << opener
        welcome = free & lets[opener] & ((1 << (opener + window)) - 1) & ~taken
        while welcome:
            rank = _lowest(welcome)
            members.append(rank)
            taken |= 1 << rank
            welcome &= lets[rank] & ~taken
        free &= ~taken
        found.append(members)
    return found


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


def subset_sizes(subsets: Int[Tensor, " R"]) -> Int[Tensor, " S"]:
    """Members of each subset."""
    return torch.bincount(subsets)


def subset_means(x: Float[Tensor, "R c"], subsets: Int[Tensor, " R"]) -> Float[Tensor, "S c"]:
    """The mean of the members of each subset."""
    sizes = subset_sizes(subsets)
    return x.new_zeros(len(sizes), x.shape[1]).index_add(0, subsets, x) / sizes[:, None]


def shared_out(
    merged: Float[Tensor, "S c"],
    subsets: Int[Tensor, " R"],
    own: Float[Tensor, "R c"],
    to: Literal["best", "all"],
) -> Float[Tensor, "R c"]:
    """Scores of subsets as scores of their members, which add up to them.

    Args:
        own: what each proposal scores by itself.
        to: the member that is the ``best`` by itself gets all of it, the first of equals; or ``all`` get the same part.
    """
    if to == "all":
        return merged[subsets] / subset_sizes(subsets)[subsets][:, None]
    rows, places = torch.arange(len(own), device=own.device)[:, None], subsets[:, None].expand_as(own)
    most = torch.full_like(merged, -torch.inf).scatter_reduce(0, places, own, reduce="amax").detach()
    is_most = own == most[subsets]
    first = torch.full_like(merged, len(own), dtype=torch.long)
    first = first.scatter_reduce(0, places, torch.where(is_most, rows, len(own)), reduce="amin")
    return merged[subsets] * (rows == first[subsets])


def without_doubt(
    labels: PseudoLabels, proposals: Proposals, num_classes: int, *, positive_iou: float, negative_iou: float
) -> PseudoLabels:
    """Labels judged anew by two overlaps: a seed's class from ``positive_iou`` on, background below ``negative_iou``.

    What lies between them has no weight.
    """
    overlap = row_iou(proposals.boxes, labels.boxes)
    is_judged = labels.owner >= 0
    is_positive, is_negative = is_judged & (overlap >= positive_iou), is_judged & (overlap < negative_iou)
    background = torch.full_like(labels.cls, num_classes)
    seed_cls = labels.seeds.cls[labels.owner[is_positive]]
    cls = background.masked_scatter(is_positive, seed_cls)
    weight = torch.where(is_positive | is_negative, labels.weight, 0)
    return replace(labels, cls=cls, weight=weight)
