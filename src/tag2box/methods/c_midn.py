"""Coupled MIL heads: what the second must not see, and which of both top boxes is kept (C-MIDN, Gao et al. 2019)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor

from tag2box.errors import UserError
from tag2box.methods.base import MilResult, TagLoss
from tag2box.methods.oicr import argmax_pseudo_boxes
from tag2box.methods.slv import cells_of, likelihood_map
from tag2box.ops.boxes import containment, iou
from tag2box.ops.mil import mil_scores
from tag2box.ops.refine import assign
from tag2box.types import BatchMeta, LabelerInput, Labeling, PseudoBoxes, Requirements, StageScores


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


def mask_fit(mask: Bool[Tensor, "h w"], boxes: Float[Tensor, "P 4"], cell: float) -> Float[Tensor, " P"]:
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
    first, second = mask_fit(mask, boxes, cell)
    return torch.stack([first >= second, first < second])


@dataclass(frozen=True, kw_only=True)
class CMidn(TagLoss):
    """Two heads learn the tags; the second is not shown what overlaps the first one's top box of a tagged class."""

    kind: Literal["c_midn"] = "c_midn"
    removed_iou: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Proposals that overlap the first head's top box by more are taken from the second head."""
    covered: Annotated[float, Field(ge=0)] = 0.8
    """But for those that hold so much of the class's mask; above 1 there are none."""
    mask: Annotated[float, Field(ge=0, le=1)] = 0.5
    """A place belongs to the class's mask where its likelihood is so high; its best place has 1."""
    cell: Annotated[float, Field(gt=0)] = 8.0
    """Side of the mask's cells in pixels of the resized photo."""

    @property
    def requirements(self) -> Requirements:
        """A second MIL head."""
        return Requirements(mil_heads=2)

    def __call__(self, scores: StageScores, meta: BatchMeta, fraction: float) -> MilResult:
        """X of both heads, and the sum of their losses."""
        if len(scores.mil_more) != 2:
            raise UserError("heads.mil_heads: criterion.mil.kind c_midn reads two MIL heads; --set heads.mil_heads=2")
        sizes, (cls, det) = meta.proposals.sizes, scores.mil_more
        first = mil_scores(scores.mil_cls, scores.mil_det, sizes)
        second = mil_scores(cls, det.masked_fill(self.removed(first.detach(), meta), -torch.inf), sizes)
        return MilResult(first, self.tag_loss(first, meta) + self.tag_loss(second, meta), second)

    def removed(self, first: Float[Tensor, "R c"], meta: BatchMeta) -> Bool[Tensor, "R c"]:
        """What the second head does not see, by class."""
        removed = torch.zeros_like(first, dtype=torch.bool)
        for span, tags in zip(meta.proposals.spans(), meta.tags, strict=True):
            inside = slice(span.start, span.stop)
            boxes = meta.proposals.boxes[inside]
            for c in tags.nonzero().flatten().tolist() if len(span) else []:
                scores = first[inside, c]
                mask = class_mask(boxes, scores, cell=self.cell, threshold=self.mask)
                covered = coverage(mask, boxes, self.cell)
                removed[inside, c] = is_removed(
                    boxes, int(scores.argmax()), covered, iou_threshold=self.removed_iou, enough=self.covered
                )
        return removed


@dataclass(frozen=True, kw_only=True)
class CMidnLabeler:
    """Stage 1 learns from the top proposals of both MIL heads, later stages from the top of the stage before."""

    kind: Literal["c_midn"] = "c_midn"
    apart: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Both are objects where no more than this share of the smaller lies in the other."""
    mask: Annotated[float, Field(ge=0, le=1)] = 0.5
    """A place belongs to the class's mask where its likelihood is so high; its best place has 1."""
    cell: Annotated[float, Field(gt=0)] = 8.0
    """Side of the mask's cells in pixels of the resized photo."""
    foreground_iou: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """A proposal joins its nearest seed above this IoU; others are background."""

    @property
    def requirements(self) -> Requirements:
        """A second MIL head."""
        return Requirements(mil_heads=2)

    def __call__(self, inputs: LabelerInput) -> Labeling:
        """Seeds and labels of every stage."""
        later = [argmax_pseudo_boxes(inputs, stage) for stage in range(1, len(inputs.probs))]
        pseudo_boxes, num_classes = [self.coupled(inputs), *later], inputs.tags.shape[1]
        return Labeling(tuple(assign(inputs.proposals, s, num_classes, self.foreground_iou) for s in pseudo_boxes))

    def coupled(self, inputs: LabelerInput) -> PseudoBoxes:
        """Seeds of stage 1; those of the first head alone where a MIL strategy has no second."""
        first = argmax_pseudo_boxes(inputs, 0)
        if inputs.second is None:
            return first
        second = argmax_pseudo_boxes(
            replace(inputs, probs=(inputs.second,)), 0
        )  # the same images and classes in the same order
        rows = torch.stack([first.rows, second.rows], dim=1)  # (pairs, 2)
        scores = torch.stack([first.score, second.score], dim=1)
        cls = first.cls[:, None].expand_as(rows)
        keep = [self.keep(inputs, pair, c) for pair, c in zip(rows, first.cls.tolist(), strict=True)]
        is_kept = torch.stack(keep) if keep else rows > 0
        return PseudoBoxes(rows[is_kept], cls[is_kept], scores[is_kept])

    def keep(self, inputs: LabelerInput, pair: Int[Tensor, " 2"], c: int) -> Bool[Tensor, " 2"]:
        """Which of two top proposals of one class of one image are objects, by the mask that both heads vote for."""
        assert inputs.second is not None
        span = next(span for span in inputs.proposals.spans() if int(pair[0]) in span)
        inside = slice(span.start, span.stop)
        votes = inputs.probs[0][inside, c] + inputs.second[inside, c]
        mask = class_mask(inputs.proposals.boxes[inside], votes, cell=self.cell, threshold=self.mask)
        return kept_of_two(inputs.proposals.boxes[pair], mask, apart=self.apart, cell=self.cell)
