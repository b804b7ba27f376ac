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
from tag2box.types import (
    BatchMeta,
    LabelerInput,
    Labeling,
    Proposals,
    PseudoBoxes,
    PseudoLabels,
    Requirements,
    StageScores,
)

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


def chosen_subsets(
    probs: Float[Tensor, "P C"], subsets: Int[Tensor, " P"], present: Int[Tensor, " c"]
) -> tuple[Int[Tensor, " c"], Float[Tensor, " c"]]:
    """Best member of the best subset J of each present class of a photo, and f(J), the sum of its members' scores.

    As in OICR the best member for one class cannot be that of a later one; a subset may be chosen for several classes.

    >>> chosen_subsets(torch.tensor([[0.3], [0.2], [0.4]]), torch.tensor([0, 0, 1]), torch.tensor([0]))
    (tensor([0]), tensor([0.5000]))
    """
    own, ids = probs[:, present], subsets.unique(return_inverse=True)[1]
    sums = own.new_zeros(len(subset_sizes(ids)), own.shape[1]).index_add(0, ids, own)
    is_free, rows, scores = torch.ones_like(ids, dtype=torch.bool), [ids[:0]], [probs.new_zeros(0)]
    for x, f in zip(own.unbind(dim=1), sums.unbind(dim=1), strict=True):
        is_open = torch.zeros_like(f, dtype=torch.bool).index_fill(0, ids[is_free], value=True)
        best = torch.where(is_open, f, -1).argmax()
        row = torch.where(ids == best, torch.where(is_free, x, -1), -2).argmax()
        is_free[row] = False
        rows.append(row[None])
        scores.append(f[best][None])
    return torch.cat(rows), torch.cat(scores)


def nearest_subset(
    boxes: Float[Tensor, "P 4"],
    subsets: Int[Tensor, " P"],
    tops: Int[Tensor, " s"],
    scores: Float[Tensor, " s"],
) -> tuple[Int[Tensor, " P"], Float[Tensor, " P"]]:
    """Which chosen subset each box of a photo overlaps most, and its largest IoU with a member.

    Among equals, such as the members of a subset that is chosen for two classes, the one with the highest score counts.

    Args:
        tops: a member of each chosen subset.
    """
    members = [boxes[subsets == subset] for subset in subsets[tops]]
    overlap = torch.stack([iou(boxes, own).amax(dim=1) for own in members], dim=1)
    best = overlap.amax(dim=1, keepdim=True)
    # without any overlap all are equally far, and the first one counts, as in OICR
    nearest = torch.where(overlap == best, scores.to(boxes.dtype) * (best > 0), -1).argmax(dim=1)
    return nearest, best[:, 0]


def drop_uncertain(
    labels: PseudoLabels, overlap: Float[Tensor, " R"], num_classes: int, *, positive_iou: float, negative_iou: float
) -> PseudoLabels:
    """Labels by two thresholds: the pseudo box's class from ``positive_iou`` on, background below ``negative_iou``.

    Proposals in between have weight zero.

    Args:
        overlap: IoU of each proposal with what it is compared with.
    """
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
    subset_score: Literal["merged", "mean"] = "merged"
    """Score of a subset: both softmaxes of the mean logits of its boxes, as in a reimplementation, or the mean of their
    scores (the paper)."""
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
        own = mil_scores(scores.mil_cls, scores.mil_det, meta.proposals.sizes)
        subsets, counts = self.merge(own.detach()[:, : meta.tags.shape[1]], meta.proposals, fraction)
        if self.subset_score == "mean":
            merged = subset_means(own, subsets)
        else:
            merged = mil_scores(subset_means(scores.mil_cls, subsets), subset_means(scores.mil_det, subsets), counts)
        mil = member_scores(merged, subsets, own.detach(), self.share)
        loss = self.tag_loss(mil, meta) if self.loss == "cross_entropy" else self._hinge(merged, meta, counts)
        return protocols.MilResult(mil, loss, subsets=subsets)

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
    """Labeler of C-MIL: certain positives and negatives by overlap with the best subset; at the end it equals OICR.

    Fang Wan, Chang Liu, Wei Ke, Xiangyang Ji, Jianbin Jiao and Qixiang Ye: C-MIL: Continuation Multiple Instance
    Learning for Weakly Supervised Object Detection, CVPR 2019. https://arxiv.org/abs/1904.05647

    Example:
        >>> from tag2box.recipes import Config
        >>> from tag2box.training.criterion import Criterion
        >>> config = Config(criterion=Criterion(labeler=CMilLabeler(steepness=1000.0)))
        >>> config.criterion.labeler
        CMilLabeler(kind='c_mil', steepness=1000.0, positives='top')
    """

    kind: Literal["c_mil"] = "c_mil"
    steepness: Annotated[float, Field(gt=0)] = 2000.0
    """How early lambda rises: ln(1 + steepness t) / ln(1 + steepness) at fraction t of training; 100 per epoch."""
    positives: Literal["top", "subset"] = "top"
    """What proposals are compared with in stage 1: the best box of a tag, or all boxes of the subset that is chosen for
    it (the paper). Later stages, and MIL heads that score boxes one by one, have the best box alone."""

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
        if self.positives == "subset" and stage == 0 and inputs.subsets is not None:
            labels, overlap = _around_subsets(inputs, inputs.subsets)
        else:
            labels = assign(inputs.proposals, oicr.argmax_pseudo_boxes(inputs, stage), num_classes)
            overlap = row_iou(inputs.proposals.boxes, labels.boxes)
        return drop_uncertain(labels, overlap, num_classes, positive_iou=1 - half, negative_iou=half)


def _around_subsets(inputs: LabelerInput, subsets: Int[Tensor, " R"]) -> tuple[PseudoLabels, Float[Tensor, " R"]]:
    """Proposals assigned to the chosen subset they overlap most, and the IoU with its nearest member.

    Pseudo boxes are the best members of the chosen subsets, and have the scores of these.
    """
    proposals, probs = inputs.proposals, inputs.probs[0]
    owner = torch.full((len(probs),), -1, dtype=torch.long, device=probs.device)
    overlap, weight = proposals.boxes.new_zeros(len(probs)), proposals.boxes.new_zeros(len(probs))
    rows, classes, values = [owner[:0]], [owner[:0]], [probs.new_zeros(0)]
    for span, tags in zip(proposals.spans(), inputs.tags, strict=True):
        inside, present = slice(span.start, span.stop), tags.nonzero().flatten()
        if len(span) == 0 or len(present) == 0:
            continue
        tops, scores = chosen_subsets(probs[inside], subsets[inside], present)
        nearest, overlap[inside] = nearest_subset(proposals.boxes[inside], subsets[inside], tops, scores)
        owner[inside], weight[inside] = nearest + sum(map(len, rows)), scores[nearest].to(weight.dtype)
        rows.append(tops + span.start)
        classes.append(present)
        values.append(scores)
    pseudo_boxes = PseudoBoxes(torch.cat(rows), torch.cat(classes), torch.cat(values))
    cls, boxes = torch.full_like(owner, inputs.tags.shape[1]), proposals.boxes.clone()
    boxes[owner >= 0] = pseudo_boxes.placed(proposals)[owner[owner >= 0]]
    return PseudoLabels(cls, weight, boxes, pseudo_boxes, owner), overlap
