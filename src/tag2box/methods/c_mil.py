"""C-MIL, continuation MIL (Wan et al., 2019): proposals are scored in subsets that become smaller during training."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor

from tag2box.methods import oicr, protocols
from tag2box.ops import assign, iou, mil_scores, row_iou
from tag2box.types import BatchMeta, LabelerInput, Labeling, Proposals, PseudoLabels, Requirements, StageScores

_BLOCK = 128  # boxes compared with all others at a time


def continuation(fraction: float, steepness: float) -> float:
    """lambda: 0 at the start of training, 1 at its end, logarithmic in between; linear for a small steepness.

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
    """Subset index of each box of a photo; subsets are numbered in the order of their first rows.

    The best free box starts a subset; a lower-ranked free box joins if its IoU with all members is at least
    ``threshold``. At 0 all boxes are one subset; at 1 each is its own, even duplicates.

    Args:
        top: only this many of the best boxes are merged; the others stay alone.
        window: members are fewer than this many ranks below the box that started their subset.

    >>> boxes = torch.tensor([[0.0, 0.0, 4.0, 4.0], [9.0, 0.0, 13.0, 4.0], [1.0, 0.0, 5.0, 4.0]])
    >>> greedy_subsets(boxes, torch.tensor([0.9, 0.8, 0.7]), threshold=0.5)
    tensor([0, 1, 0])
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


def _overlapping(boxes: Float[Tensor, "P 4"], threshold: float) -> Bool[np.ndarray, "P P"]:
    """Which pairs have an IoU of at least the threshold; a few rows at a time, which stay in the CPU cache."""
    blocks = [iou(block, boxes) >= threshold for block in boxes.split(_BLOCK)]
    return torch.cat(blocks).cpu().numpy()


def _cliques(joins: Bool[np.ndarray, "P P"], window: int) -> list[list[int]]:
    """Greedy cliques of ranks: a rank joins if it overlaps all members before it.

    Sets of ranks are the bits of an integer, so that a thousand ranks are tested at once.
    """
    overlaps = [int.from_bytes(line.tobytes(), "little") for line in np.packbits(joins, axis=1, bitorder="little")]
    free, found = (1 << len(overlaps)) - 1, []
    while free:
        opener = _lowest(free)
        members, taken = [opener], 1 << opener
        candidates = free & overlaps[opener] & ((1 << (opener + window)) - 1) & ~taken
        while candidates:
            rank = _lowest(candidates)
            members.append(rank)
            taken |= 1 << rank
            candidates &= overlaps[rank] & ~taken
        free &= ~taken
        found.append(members)
    return found


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


def subset_sizes(subsets: Int[Tensor, " R"]) -> Int[Tensor, " S"]:
    """Number of members of each subset."""
    return torch.bincount(subsets)


def subset_means(x: Float[Tensor, "R c"], subsets: Int[Tensor, " R"]) -> Float[Tensor, "S c"]:
    """Mean over the members of each subset."""
    sizes = subset_sizes(subsets)
    return x.new_zeros(len(sizes), x.shape[1]).index_add(0, subsets, x) / sizes[:, None]


def member_scores(
    merged: Float[Tensor, "S c"],
    subsets: Int[Tensor, " R"],
    own: Float[Tensor, "R c"],
    to: Literal["best", "all"],
) -> Float[Tensor, "R c"]:
    """Scores of subsets distributed to their members, so that the members' scores sum to them.

    Args:
        own: score of each proposal on its own.
        to: ``best`` gives the whole score to the member with the highest own score, the first one on ties; ``all``
            gives equal parts.
    """
    if to == "all":
        return merged[subsets] / subset_sizes(subsets)[subsets][:, None]
    rows, places = torch.arange(len(own), device=own.device)[:, None], subsets[:, None].expand_as(own)
    most = torch.full_like(merged, -torch.inf).scatter_reduce(0, places, own, reduce="amax").detach()
    is_most = own == most[subsets]
    first = torch.full_like(merged, len(own), dtype=torch.long)
    first = first.scatter_reduce(0, places, torch.where(is_most, rows, len(own)), reduce="amin")
    return merged[subsets] * (rows == first[subsets])


def hinge_loss(
    merged: Float[Tensor, "S c"],
    tags: Bool[Tensor, "N c"],
    counts: Sequence[int],
    *,
    unsure: Bool[Tensor, "N c"] | None = None,
    over_classes: Literal["mean", "sum"] = "mean",
) -> Float[Tensor, ""]:
    """max(0, 1 - y max over subsets J of f_J), y = 1 or -1 by tag: mean or sum over classes, mean over photos.

    A photo without subsets, and a class that is ``unsure``, add zero.

    Args:
        merged: scores f of the subsets, photo after photo.
        counts: subsets per photo.
    """
    terms = [merged.sum() * 0]
    for n, own in enumerate(merged.split(list(counts))):
        if len(own):
            sign = tags[n].to(own.dtype) * 2 - 1
            hinge = (1 - sign * own.amax(dim=0)).clamp(min=0)
            hinge = hinge if unsure is None else hinge.masked_fill(unsure[n], 0)
            terms.append(hinge.mean() if over_classes == "mean" else hinge.sum())
    return torch.stack(terms).sum() / max(len(counts), 1)


def drop_uncertain(
    labels: PseudoLabels, proposals: Proposals, num_classes: int, *, positive_iou: float, negative_iou: float
) -> PseudoLabels:
    """Labels by two thresholds: the pseudo box's class from ``positive_iou`` on, background below ``negative_iou``.

    Proposals in between have weight zero.
    """
    overlap = row_iou(proposals.boxes, labels.boxes)
    is_assigned = labels.owner >= 0
    is_positive, is_negative = is_assigned & (overlap >= positive_iou), is_assigned & (overlap < negative_iou)
    background = torch.full_like(labels.cls, num_classes)
    positive_cls = labels.pseudo_boxes.cls[labels.owner[is_positive]]
    cls = background.masked_scatter(is_positive, positive_cls)
    weight = torch.where(is_positive | is_negative, labels.weight, 0)
    return replace(labels, cls=cls, weight=weight)


@dataclass(frozen=True, kw_only=True)
class CMil(protocols.TagLoss):
    """MIL head that scores overlapping proposals as one subset: all of a photo at first, each on its own at the end.

    The end of training equals WSDDN.

    Fang Wan, Chang Liu, Wei Ke, Xiangyang Ji, Jianbin Jiao and Qixiang Ye: C-MIL: Continuation Multiple Instance
    Learning for Weakly Supervised Object Detection, CVPR 2019. https://arxiv.org/abs/1904.05647

    Example:
        >>> from tag2box.recipes import Config
        >>> from tag2box.training.criterion import Criterion
        >>> config = Config(criterion=Criterion(mil=CMil(top=200, window=40)))
        >>> config.criterion.mil.share
        'best'
    """

    kind: Literal["c_mil"] = "c_mil"
    steepness: Annotated[float, Field(gt=0)] = 2000.0
    """How early lambda rises: ln(1 + steepness t) / ln(1 + steepness) at fraction t of training; 100 per epoch."""
    top: Annotated[int, Field(ge=1)] | None = None
    """Only this many of a photo's best boxes are merged; None merges all. A reimplementation uses 200."""
    window: Annotated[int, Field(ge=1)] | None = None
    """Boxes of a subset lie within this many ranks; None is no limit. A reimplementation uses 40."""
    share: Literal["best", "all"] = "best"
    """How the score of a subset is distributed: all of it to its best box, or equal parts to all boxes."""
    loss: Literal["cross_entropy", "hinge"] = "cross_entropy"
    """Image-level loss: cross-entropy of the summed scores, or the paper's hinge loss of the best subset's score."""

    @property
    def requirements(self) -> Requirements:
        """None beyond tags and logits."""
        return Requirements()

    def __call__(self, scores: StageScores, meta: BatchMeta, fraction: float) -> protocols.MilResult:
        """Scores of subsets, distributed to their boxes, and their loss."""
        own = mil_scores(scores.mil_cls, scores.mil_det, meta.proposals.sizes).detach()
        subsets, counts = self.merge(own[:, : meta.tags.shape[1]], meta.proposals, fraction)
        cls, det = subset_means(scores.mil_cls, subsets), subset_means(scores.mil_det, subsets)
        merged = mil_scores(cls, det, counts)
        mil = member_scores(merged, subsets, own, self.share)
        return protocols.MilResult(
            mil, self.tag_loss(mil, meta) if self.loss == "cross_entropy" else self._hinge(merged, meta, counts)
        )

    def _hinge(self, merged: Float[Tensor, "S c"], meta: BatchMeta, counts: Sequence[int]) -> Float[Tensor, ""]:
        columns = merged.shape[1]
        unsure = None if meta.unsure is None else protocols.with_background(meta.unsure, columns)
        tags = protocols.with_background(meta.tags, columns)
        return hinge_loss(merged, tags, counts, unsure=unsure, over_classes=self.over_classes)

    def merge(
        self, own: Float[Tensor, "R C"], proposals: Proposals, fraction: float
    ) -> tuple[Int[Tensor, " R"], list[int]]:
        """Subset index of each proposal of the batch, and the number of subsets per photo."""
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
    """Labeler of C-MIL: argmax pseudo boxes whose clusters grow during training; at the end it equals OICR.

    Fang Wan, Chang Liu, Wei Ke, Xiangyang Ji, Jianbin Jiao and Qixiang Ye: C-MIL: Continuation Multiple Instance
    Learning for Weakly Supervised Object Detection, CVPR 2019. https://arxiv.org/abs/1904.05647

    Example:
        >>> from tag2box.recipes import Config
        >>> from tag2box.training.criterion import Criterion
        >>> config = Config(criterion=Criterion(labeler=CMilLabeler(steepness=1000.0)))
        >>> config.criterion.labeler
        CMilLabeler(kind='c_mil', steepness=1000.0)
    """

    kind: Literal["c_mil"] = "c_mil"
    steepness: Annotated[float, Field(gt=0)] = 2000.0
    """How early lambda rises: ln(1 + steepness t) / ln(1 + steepness) at fraction t of training; 100 per epoch."""

    @property
    def requirements(self) -> Requirements:
        """None beyond scores."""
        return Requirements()

    def __call__(self, inputs: LabelerInput) -> Labeling:
        """Pseudo boxes and pseudo labels of every stage."""
        return Labeling(tuple(self.labels(inputs, stage) for stage in range(len(inputs.probs))))

    def labels(self, inputs: LabelerInput, stage: int) -> PseudoLabels:
        """Pseudo labels of one stage: positive from an IoU of 1 - lambda / 2 on, negative below lambda / 2."""
        num_classes, half = inputs.tags.shape[1], continuation(inputs.fraction, self.steepness) / 2
        labels = assign(inputs.proposals, oicr.argmax_pseudo_boxes(inputs, stage), num_classes)
        return drop_uncertain(labels, inputs.proposals, num_classes, positive_iou=1 - half, negative_iou=half)
