"""Coupled MIL heads: what the second must not see, and which of both top boxes is kept (C-MIDN, Gao et al. 2019)."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tag2box.maths.boxes import containment, iou
from tag2box.maths.voting import cells_of, likelihood_map


def class_mask(
    boxes: Float[Tensor, "P 4"], scores: Float[Tensor, " P"], *, cell: float, threshold: float
) -> Bool[Tensor, "h w"]:
    """Where a photo shows a class: cells whose likelihood, voted for by scored boxes, reaches the threshold.

    It stands in for the paper's segmentation head.
    """
    likelihood = likelihood_map(boxes, scores, cell)
    return (likelihood >= threshold) & (likelihood > 0)


def cells_inside(mask: Bool[Tensor, "h w"], boxes: Float[Tensor, "P 4"], cell: float) -> Float[Tensor, " P"]:
    """Cells of the mask in each box, from a table of running sums; boxes end at the grid's border."""
    height, width = mask.shape
    sums = torch.zeros(height + 1, width + 1, dtype=torch.long, device=mask.device)
    sums[1:, 1:] = mask.long().cumsum(dim=0).cumsum(dim=1)
    border = sums.new_tensor([width, height, width, height])
    left, top, right, bottom = cells_of(boxes, cell).minimum(border).unbind(dim=1)
    return (sums[bottom, right] - sums[top, right] - sums[bottom, left] + sums[top, left]).to(boxes.dtype)


def coverage(mask: Bool[Tensor, "h w"], boxes: Float[Tensor, "P 4"], cell: float) -> Float[Tensor, " P"]:
    """Share of the mask that lies in each box; zero of an empty mask."""
    return cells_inside(mask, boxes, cell) / mask.sum().clamp(min=1)


def fit(mask: Bool[Tensor, "h w"], boxes: Float[Tensor, "P 4"], cell: float) -> Float[Tensor, " P"]:
    """Intersection over union of each box with the mask, counted in cells: high for a box that is large and tight."""
    shared = cells_inside(mask, boxes, cell)
    left, top, right, bottom = cells_of(boxes, cell).unbind(dim=1)
    union = (right - left) * (bottom - top) + mask.sum() - shared
    return shared / union


def is_removed(
    boxes: Float[Tensor, "P 4"], top: int, covered: Float[Tensor, " P"], *, iou_threshold: float, enough: float
) -> Bool[Tensor, " P"]:
    """Which proposals the second head does not see for a class.

    Those that overlap the first head's top box by more than the threshold, but for those that cover enough of the
    class's mask. None, where nothing else would be left.
    """
    near = iou(boxes, boxes[top : top + 1]).squeeze(1) > iou_threshold
    removed = near & (covered < enough)
    return removed & ~removed.all()


def kept_of_two(
    boxes: Float[Tensor, "2 4"], mask: Bool[Tensor, "h w"], *, apart: float, cell: float
) -> Bool[Tensor, " 2"]:
    """Which of both heads' top boxes are objects: both where they lie apart, else the one that fits the mask better.

    Equals keep the first.
    """
    if containment(boxes[:1], boxes[1:]).item() <= apart:
        return torch.ones(2, dtype=torch.bool, device=boxes.device)
    first, second = fit(mask, boxes, cell)
    return torch.stack([first >= second, first < second])
