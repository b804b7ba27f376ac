"""Continuation MIL: boxes merged into subsets that fall apart as training goes on (C-MIL, Wan et al. 2019)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from tag2box.methods.base import MilResult, TagLoss
from tag2box.methods.oicr import argmax_pseudo_boxes
from tag2box.ops.boxes import iou, row_iou
from tag2box.ops.mil import mil_scores
from tag2box.ops.refine import assign
from tag2box.types import BatchMeta, LabelerInput, Labeling, Proposals, PseudoLabels, Requirements, StageScores

_BLOCK = 128  # boxes compared with all others at a time


def continuation(fraction: float, steepness: float) -> float:
    """lambda: 0 at the start of training, 1 at its end, a logarithm between them; a line where steepness is small.

    ln((e + 0.01) / 0.01) / ln((E + 0.01) / 0.01) over E epochs has a steepness of 100 E.
    """
    return math.log1p(steepness * min(max(fraction, 0.0), 1.0)) / math.log1p(steepness)


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
    seed_cls = labels.pseudo_boxes.cls[labels.owner[is_positive]]
    cls = background.masked_scatter(is_positive, seed_cls)
    weight = torch.where(is_positive | is_negative, labels.weight, 0)
    return replace(labels, cls=cls, weight=weight)


@dataclass(frozen=True, kw_only=True)
class CMil(TagLoss):
    """Overlapping boxes are judged as one: first all of a photo, in the end each by itself, as WSDDN does."""

    kind: Literal["c_mil"] = "c_mil"
    steepness: Annotated[float, Field(gt=0)] = 2000.0
    """How early lambda rises: ln(1 + steepness t) / ln(1 + steepness) at the share t of training; 100 an epoch."""
    top: Annotated[int, Field(ge=1)] | None = None
    """Only so many of a photo's best boxes are merged; all where it is not set. A reimplementation takes 200."""
    window: Annotated[int, Field(ge=1)] | None = None
    """Boxes of a subset are of so many neighbouring ranks; any where it is not set. A reimplementation takes 40."""
    share: Literal["best", "all"] = "best"
    """Who gets the score of a subset: its best box all of it, or all boxes the same part."""

    @property
    def requirements(self) -> Requirements:
        """Nothing else."""
        return Requirements()

    def __call__(self, scores: StageScores, meta: BatchMeta, fraction: float) -> MilResult:
        """Scores of subsets, as scores of their boxes, and their loss."""
        own = mil_scores(scores.mil_cls, scores.mil_det, meta.proposals.sizes).detach()
        subsets, counts = self.merge(own[:, : meta.tags.shape[1]], meta.proposals, fraction)
        cls, det = subset_means(scores.mil_cls, subsets), subset_means(scores.mil_det, subsets)
        mil = shared_out(mil_scores(cls, det, counts), subsets, own, self.share)
        return MilResult(mil, self.tag_loss(mil, meta))

    def merge(
        self, own: Float[Tensor, "R C"], proposals: Proposals, fraction: float
    ) -> tuple[Int[Tensor, " R"], list[int]]:
        """The subset of each proposal of the batch, and the number of subsets of each photo."""
        threshold = continuation(fraction, self.steepness)
        subsets = [torch.zeros(0, dtype=torch.long, device=own.device)]
        counts: list[int] = []
        for boxes, x in zip(proposals.split(proposals.boxes), proposals.split(own), strict=True):
            ids = greedy_subsets(boxes, x.sum(dim=1), threshold, top=self.top, window=self.window)
            subsets.append(ids + sum(counts))
            counts.append(int(ids.max()) + 1 if len(ids) else 0)
        return torch.cat(subsets), counts


@dataclass(frozen=True, kw_only=True)
class CMilLabeler:
    """Argmax seeds whose neighbourhoods grow with training; in the end they are OICR's."""

    kind: Literal["c_mil"] = "c_mil"
    steepness: Annotated[float, Field(gt=0)] = 2000.0
    """How early lambda rises: ln(1 + steepness t) / ln(1 + steepness) at the share t of training; 100 an epoch."""

    @property
    def requirements(self) -> Requirements:
        """It looks at scores alone."""
        return Requirements()

    def __call__(self, inputs: LabelerInput) -> Labeling:
        """Seeds and labels of every stage."""
        return Labeling(tuple(self.labels(inputs, stage) for stage in range(len(inputs.probs))))

    def labels(self, inputs: LabelerInput, stage: int) -> PseudoLabels:
        """Of one stage: positive from an IoU of 1 - lambda / 2 on, negative below lambda / 2."""
        num_classes, half = inputs.tags.shape[1], continuation(inputs.fraction, self.steepness) / 2
        labels = assign(inputs.proposals, argmax_pseudo_boxes(inputs, stage), num_classes)
        return without_doubt(labels, inputs.proposals, num_classes, positive_iou=1 - half, negative_iou=half)
