"""Likelihood voting: scored boxes vote on the places they cover, and what is voted for is boxed again (SLV, 2020).

Votes are counted on a grid of square cells whose first corner is the photo's.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tag2box.maths.components import rectangles
from tag2box.maths.refine import first_argmax

_VOTE = 2.0**32  # the strongest vote as a whole number: sums are exact, in any order, on every device


def cells_of(boxes: Float[Tensor, "P 4"], cell: float) -> Int[Tensor, "P 4"]:
    """The first and the last line of cells that each box takes: edges go to the nearest line, one cell at least."""
    lines = (boxes.clamp(min=0) / cell).round().long()
    return torch.cat([lines[:, :2], torch.maximum(lines[:, 2:], lines[:, :2] + 1)], dim=1)


def likelihood_map(boxes: Float[Tensor, "P 4"], scores: Float[Tensor, " P"], cell: float) -> Float[Tensor, "h w"]:
    """The sum of the scores of the boxes over each cell, divided by its maximum; the grid reaches as far as the boxes.

    Four numbers a box (a difference array), then running sums down and across.
    """
    edges = cells_of(boxes, cell)
    width, height = edges[:, 2:].amax(dim=0).tolist() if len(edges) else (0, 0)
    votes = (scores / scores.max() * _VOTE).round().long() if len(scores) and scores.max() > 0 else scores.long()
    left, top, right, bottom = edges.unbind(dim=1)
    corners = torch.cat([top * (width + 1) + left, bottom * (width + 1) + right])
    others = torch.cat([top * (width + 1) + right, bottom * (width + 1) + left])
    counted = votes.new_zeros((height + 1) * (width + 1))
    counted.index_add_(0, corners, votes.repeat(2)).index_add_(0, others, -votes.repeat(2))
    total = counted.view(height + 1, width + 1).cumsum(dim=0).cumsum(dim=1)[:height, :width]
    most = total.amax() if total.numel() else 0
    return total.to(scores.dtype) / max(int(most), 1)


def voted_boxes(
    boxes: Float[Tensor, "P 4"], scores: Float[Tensor, " P"], *, threshold: float, cell: float
) -> Float[Tensor, "n 4"]:
    """The smallest rectangle around every connected part of the likelihood map that reaches the threshold.

    What a rectangle's side on the grid came from is a side of some voter, so the strongest such voter's own side is
    taken: one box alone gives itself back.
    """
    mask = likelihood_map(boxes, scores, cell) >= threshold
    found = torch.from_numpy(rectangles(mask.cpu().numpy())).to(boxes.device)  # (n, 4), in cells
    edges = cells_of(boxes, cell)
    sides = [_own_side(found, edges, boxes, scores, side) for side in range(4)]
    own, lines = torch.stack(sides, dim=1), found.to(boxes.dtype) * cell
    is_box = (own[:, 2:] > own[:, :2]).repeat(1, 2)  # sides of voters smaller than a cell may cross
    return torch.where(is_box, own, lines)


def _own_side(
    found: Int[Tensor, "n 4"],
    edges: Int[Tensor, "P 4"],
    boxes: Float[Tensor, "P 4"],
    scores: Float[Tensor, " P"],
    side: int,
) -> Float[Tensor, " n"]:
    """One side (0 to 3, as in xyxy) of each rectangle: that of the strongest voter it can have come from."""
    if len(boxes) == 0:
        return boxes.new_zeros(0)
    other = 1 - side % 2  # the axis along the side
    same_line = edges[:, side] == found[:, side, None]
    beside = (edges[:, other] < found[:, other + 2, None]) & (edges[:, other + 2] > found[:, other, None])
    strength = torch.where(same_line & beside, scores, -torch.inf)  # (n, P)
    return boxes[first_argmax(strength), side]
