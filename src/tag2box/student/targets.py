"""What the cells of a student should say: assignment, losses, labels that are dropped; and labels of further rounds.

Functions of tensors and labels; only what is dropped depends on other ranks.

Further rounds: the student labels its own training photos, and its labels are mixed with those before. A tag says that
an object is there, so that the student's detections go through the label rule, as a teacher's do. Of both labellings of
a tag, the more confident one stays; scores are compared relative to the best ones of a class, since those of different
detectors have different scales. What both agree on gains weight, what only the other one says becomes an ignore region.
No true box is used: ``round_agreement`` says whether another round would change anything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Literal

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from tag2box.annotations import Detections
from tag2box.labels.labelled import LabelBox, LabelledPhoto, LabelledPhotos
from tag2box.labels.rule import LabelRule, PhotoTags, label_photo, matches, near_boxes
from tag2box.ops.boxes import areas, iou, row_iou
from tag2box.student.student_data import PhotoLabels, top_scores
from tag2box.training.dist import SINGLE_PROCESS, DistContext

# ---------------------------------------------------------------- assignment


@dataclass(frozen=True, slots=True)
class CellTargets:
    """What the cells of one photo should say."""

    classes: Float[Tensor, "A C"]  # 0: background; above: how well the cell's box should fit
    weights: Float[Tensor, "A C"]  # of the classification loss; 0: none
    owners: Int[Tensor, " A"]  # the label that the cell's box should be; -1: none
    fit: Float[Tensor, " A"]  # weight of the box loss; 0 without an owner


def inside(cells: Float[Tensor, "A 3"], boxes: Float[Tensor, "G 4"]) -> Bool[Tensor, "A G"]:
    """Whether the centre of each cell lies in each box."""
    x, y = cells[:, 0, None], cells[:, 1, None]
    return (x > boxes[:, 0]) & (x < boxes[:, 2]) & (y > boxes[:, 1]) & (y < boxes[:, 3])


def assign_cells(
    probs: Float[Tensor, "A C"],
    boxes: Float[Tensor, "A 4"],
    cells: Float[Tensor, "A 3"],
    labels: PhotoLabels,
    *,
    top: int,
    power: float = 6.0,
) -> CellTargets:
    """Task-aligned assignment (TOOD, Feng et al., ICCV 2021): cells that already classify and localise a label best.

    Of the cells whose centre lies in a label (the nearest cell, if there is none), the ``top`` ones by
    probability * IoU ** power belong to it; a cell of several labels belongs to the one it fits best. The class target
    is that metric, scaled so that the best cell of a label has the label's largest IoU.

    In the box of a label, all cells have the label's weight for its class, so that a doubtful label says neither
    "object" nor "background" loudly; in a region, its class has no weight, unless the cell belongs to a label.
    """
    targets = _background(probs, cells, labels)
    if len(labels) == 0:
        return targets
    overlaps, chosen, metric = _candidates(probs, boxes, cells, labels, top, power)
    best, owner = torch.where(chosen, overlaps + 1e-9, overlaps.new_tensor(-1.0)).max(dim=1)
    owned = best >= 0
    mine = owned[:, None] & (owner[:, None] == torch.arange(len(labels), device=probs.device))
    scaled = _scaled(torch.where(mine, metric, metric.new_zeros(())), torch.where(mine, overlaps, 0.0))
    spread = inside(cells, labels.boxes)
    for number, label in enumerate(labels.labels.tolist()):
        cover = spread[:, number] & (targets.weights[:, label] > 0)
        targets.weights[cover, label] = torch.minimum(targets.weights[cover, label], labels.weights[number])
    rows = owned.nonzero().flatten()
    quality = scaled[rows, owner[rows]]
    return _owned(targets, labels, rows, owner[rows], quality, quality * labels.weights[owner[rows]])


def assign_centres(
    probs: Float[Tensor, "A C"],
    boxes: Float[Tensor, "A 4"],
    cells: Float[Tensor, "A 3"],
    labels: PhotoLabels,
    *,
    radius: float = 1.5,
) -> CellTargets:
    """Assignment by place alone (FCOS, Tian et al., ICCV 2019): cells near the centre of a label, on one level.

    A cell inside a label, at most ``radius`` strides beside its centre, belongs to it if the farthest side is more than
    4 and at most 8 strides away; the first level also has the nearer ones, the last level the farther ones. A cell of
    several labels belongs to the smallest. A label that holds no such cell has the nearest one of its level. The class
    target is the IoU of the cell's box (GFL). The other cells of a doubtful label are background with full weight.
    """
    targets = _background(probs, cells, labels)
    if len(labels) == 0:
        return targets
    stride = cells[:, 2, None]
    centres = (labels.boxes[:, :2] + labels.boxes[:, 2:]) / 2
    beside = (cells[:, None, :2] - centres).abs().amax(dim=2)
    sides = torch.cat([cells[:, None, :2] - labels.boxes[:, :2], labels.boxes[:, 2:] - cells[:, None, :2]], dim=2)
    far = sides.amax(dim=2)
    fits = ((far > 4 * stride) | (stride == stride.min())) & ((far <= 8 * stride) | (stride == stride.max()))
    is_own = (beside <= radius * stride) & fits & inside(cells, labels.boxes)
    lonely = ~is_own.any(dim=0)
    nearest = torch.where(fits, beside, torch.inf).argmin(dim=0)
    is_own[nearest[lonely], lonely.nonzero().flatten()] = True
    smallest, owner = torch.where(is_own, areas(labels.boxes), torch.inf).min(dim=1)
    rows = smallest.isfinite().nonzero().flatten()
    quality = row_iou(boxes[rows], labels.boxes[owner[rows]])
    return _owned(targets, labels, rows, owner[rows], quality, labels.weights[owner[rows]])


def _background(probs: Float[Tensor, "A C"], cells: Float[Tensor, "A 3"], labels: PhotoLabels) -> CellTargets:
    """All cells background, without weight for the class of a region in it."""
    weights = torch.ones_like(probs)
    within = inside(cells, labels.regions)
    for region, label in enumerate(labels.region_labels.tolist()):
        weights[within[:, region], label] = 0
    owners = torch.full((len(probs),), -1, dtype=torch.long, device=probs.device)
    return CellTargets(torch.zeros_like(probs), weights, owners, probs.new_zeros(len(probs)))


def _owned(
    targets: CellTargets,
    labels: PhotoLabels,
    rows: Int[Tensor, " R"],
    own: Int[Tensor, " R"],
    quality: Float[Tensor, " R"],
    fit: Float[Tensor, " R"],
) -> CellTargets:
    """The targets, of which these rows belong to these labels."""
    targets.owners[rows] = own
    targets.classes[rows, labels.labels[own]] = quality
    targets.weights[rows, labels.labels[own]] = labels.weights[own]
    targets.fit[rows] = fit
    return targets


def _candidates(
    probs: Float[Tensor, "A C"],
    boxes: Float[Tensor, "A 4"],
    cells: Float[Tensor, "A 3"],
    labels: PhotoLabels,
    top: int,
    power: float,
) -> tuple[Float[Tensor, "A G"], Bool[Tensor, "A G"], Float[Tensor, "A G"]]:
    """IoU, the candidates of each label, and the metric they were ranked by."""
    overlaps = iou(boxes, labels.boxes)
    metric = probs[:, labels.labels] * overlaps**power
    allowed = inside(cells, labels.boxes)
    centres = (labels.boxes[:, :2] + labels.boxes[:, 2:]) / 2
    far = ((cells[:, None, :2] - centres) ** 2).sum(dim=2)
    lonely = ~allowed.any(dim=0)
    allowed[far.argmin(dim=0)[lonely], lonely.nonzero().flatten()] = True
    # equal metrics, such as zeros of the first iterations, are ranked by distance, in pixels of the label
    rank = metric - 1e-12 * far / areas(labels.boxes).clamp(min=1.0)
    rank = torch.where(allowed, rank, rank.new_tensor(-torch.inf))
    rows = rank.topk(min(top, len(rank)), dim=0).indices
    chosen = torch.zeros_like(allowed).scatter_(0, rows, value=True) & allowed
    return overlaps, chosen, metric


def _scaled(metric: Float[Tensor, "A G"], overlaps: Float[Tensor, "A G"]) -> Float[Tensor, "A G"]:
    """The metric of each label's cells, scaled so that its largest value is the largest IoU among them."""
    return metric / metric.amax(dim=0).clamp(min=1e-12) * overlaps.amax(dim=0)


# ---------------------------------------------------------------- losses


def quality_focal(
    logits: Float[Tensor, "... C"], targets: Float[Tensor, "... C"], weights: Float[Tensor, "... C"]
) -> Float[Tensor, ""]:
    """Quality focal loss (GFL, eq. 4, beta = 2), weighted and summed: cross-entropy times the squared error."""
    entropy = functional.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    return (weights * (targets - logits.sigmoid()) ** 2 * entropy).sum()


def giou(a: Float[Tensor, "A 4"], b: Float[Tensor, "A 4"]) -> Float[Tensor, " A"]:
    """Generalised IoU of rows (Rezatofighi et al., CVPR 2019): IoU minus the empty share of the box around both."""
    around = areas(torch.cat([torch.minimum(a[:, :2], b[:, :2]), torch.maximum(a[:, 2:], b[:, 2:])], dim=1))
    overlap = row_iou(a, b)
    union = (areas(a) + areas(b)) / (1 + overlap)  # from IoU = shared / union and shared + union = both areas
    return overlap - (around - union) / around.clamp(min=1e-9)


@dataclass(frozen=True, slots=True)
class StudentLoss:
    """Sums over the cells of a batch, and what they are divided by."""

    classes: Float[Tensor, ""]
    boxes: Float[Tensor, ""]
    fit: Float[Tensor, ""]  # sum of the weights of the box loss

    def total(self, fit: float, box_weight: float) -> Float[Tensor, ""]:
        """The loss of the whole batch, whose ``fit`` may include that of other ranks."""
        return (self.classes + box_weight * self.boxes) / max(fit, 1.0)


def student_loss(
    logits: Float[Tensor, "N A C"],
    boxes: Float[Tensor, "N A 4"],
    cells: Float[Tensor, "A 3"],
    labels: Sequence[PhotoLabels],
    *,
    top: int = 10,
    assignment: Literal["aligned", "centre"] = "aligned",
) -> StudentLoss:
    """Classification and box losses of a batch, as sums."""
    assign = partial(assign_cells, top=top) if assignment == "aligned" else assign_centres
    with torch.no_grad():
        found = [assign(p, b, cells, own) for p, b, own in zip(logits.sigmoid(), boxes, labels, strict=True)]
    classes = quality_focal(
        logits, torch.stack([one.classes for one in found]), torch.stack([one.weights for one in found])
    )
    fit = torch.stack([one.fit for one in found])
    owned = torch.stack([one.owners for one in found]) >= 0
    wanted = torch.cat([own.boxes[one.owners[one.owners >= 0]] for one, own in zip(found, labels, strict=True)])
    overlap = giou(boxes[owned], wanted)
    return StudentLoss(classes, (fit[owned] * (1 - overlap)).sum(), fit.sum())


# ---------------------------------------------------------------- labels that are dropped

DROP_AFTER = 1 / 3
"""First share of a round in which no label is dropped: losses do not say yet which labels are wrong."""


def label_losses(probs: Float[Tensor, "A C"], boxes: Float[Tensor, "A 4"], labels: PhotoLabels) -> Float[Tensor, " G"]:
    """The loss of each label in the cell that says it best: -log p - log IoU, p being the probability of its class.

    Cross-entropy plus IoU loss (UnitBox, Yu et al., ACM MM 2016). The loss that is trained on does not tell noise: its
    targets are small where a label fits badly.
    """
    best = (probs[:, labels.labels] * iou(boxes, labels.boxes)).amax(dim=0)
    return -best.clamp(min=1e-9).log()


def drop_limit(losses: Sequence[float], share: float) -> float:
    """The largest loss that stays if a share of them, rounded down, is dropped; equal losses all stay.

    >>> drop_limit([0.5, 3.0, 1.0], 0.4)
    1.0
    """
    ranked = sorted(losses)
    return ranked[len(ranked) - int(share * len(ranked)) - 1] if ranked else math.inf


@torch.no_grad()
def without_worst(
    labels: Sequence[PhotoLabels],
    outputs: tuple[Float[Tensor, "N A C"], Float[Tensor, "N A 4"], Float[Tensor, "A 3"]] | None,
    share: float,
    dist: DistContext = SINGLE_PROCESS,
) -> list[PhotoLabels]:
    """The labels of a batch, a share of them being regions: those with the largest loss over all ranks.

    Boxes without a score are neither counted nor dropped.

    Args:
        outputs: logits, boxes and cells of the photos; None on a rank without any.
    """
    pairs = [] if outputs is None else zip(outputs[0].sigmoid(), outputs[1], labels, strict=True)
    losses = [label_losses(probs, boxes, own) for probs, boxes, own in pairs]
    scored = [value for own, loss in zip(labels, losses, strict=True) for value in loss[~own.certain].tolist()]
    limit = drop_limit([value for part in dist.all_gather_object(scored) for value in part], share)
    dropped = [(loss > limit) & ~own.certain for own, loss in zip(labels, losses, strict=True)]
    return [own.with_regions(rows).picked(~rows) for own, rows in zip(labels, dropped, strict=True)]


# ---------------------------------------------------------------- further rounds


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """Rounds of training; before each but the first, the student labels its training photos."""

    count: Annotated[int, Field(ge=1, le=20)] = 1
    """Most rounds, of ``plan.iterations`` each."""
    agreement: Annotated[float, Field(ge=0, le=1)] = 0.95
    """No further round if the labels for it agree with those before by at least this F1."""
    rule: LabelRule = LabelRule()
    """Which detections of the student become labels."""


def relabelled(before: LabelledPhotos, found: Mapping[str, Detections], rule: LabelRule) -> LabelledPhotos:
    """The labels of a further round: those before, mixed with the student's own detections; scores are relative.

    Reviewed photos stay as they are.
    """
    own = tuple(
        replace(
            photo,
            boxes=_keep_tags(label_photo(rule, found[photo.id], photo_tags(photo, before.classes), before.classes)),
        )
        for photo in before.photos
    )
    tops = (top_scores(before.photos, before.classes), top_scores(own, before.classes))
    mixed = tuple(
        old
        if old.is_reviewed
        else replace(
            old, boxes=mixed_boxes(_relative(old.boxes, tops[0]), _relative(new.boxes, tops[1]), before.classes)
        )
        for old, new in zip(before.photos, own, strict=True)
    )
    return replace(before, photos=mixed)


def photo_tags(photo: LabelledPhoto, classes: Sequence[str]) -> PhotoTags:
    """The tags of a photo as class numbers."""
    index = {name: number for number, name in enumerate(classes)}
    present, unsure = (frozenset(index[name] for name in names) for names in (photo.tags, photo.unsure))
    return PhotoTags(present, unsure - present)


def _keep_tags(boxes: Sequence[LabelBox]) -> tuple[LabelBox, ...]:
    return tuple(box for box in boxes if box.is_tag)


def _relative(boxes: Sequence[LabelBox], top: Mapping[str, float]) -> tuple[LabelBox, ...]:
    """Boxes with scores relative to the best ones of their class, at most 1; those without a score stay as they are."""
    return tuple(box if box.score is None else replace(box, score=min(1.0, box.score / top[box.name])) for box in boxes)


def mixed_boxes(before: Sequence[LabelBox], own: Sequence[LabelBox], classes: Sequence[str]) -> tuple[LabelBox, ...]:
    """The boxes of one photo, class by class; scores of both labellings are relative to those of their class.

    Boxes without a score, such as reviewed ones, are certain: nothing of their class is changed. Else the labelling
    whose best label has the higher score stays, the one before if both are equal.
    """
    mixed: list[LabelBox] = []
    for name in classes:
        old, new = ([box for box in boxes if box.name == name] for boxes in (before, own))
        if any(box.score is None for box in old if not box.is_doubtful) or _best(new) < 0:
            mixed += old
        elif _best(new) > _best(old):
            mixed += _confirmed(new, old)
        else:
            mixed += _confirmed(old, new)
    return tuple(mixed)


def _best(boxes: Sequence[LabelBox]) -> float:
    """The score of the best label; -1 without one."""
    return max((box.score or 0.0 for box in boxes if not box.is_doubtful), default=-1.0)


def _confirmed(kept: Sequence[LabelBox], other: Sequence[LabelBox]) -> list[LabelBox]:
    """Boxes that are kept, with the higher score if the other labelling has them too; its other labels are doubtful."""
    labels = [box for box in other if not box.is_doubtful]
    boxes = []
    for box in kept:
        shared = [near.score or 0.0 for near in near_boxes(box, labels)]
        boxes.append(box if box.is_doubtful else replace(box, score=max([box.score or 0.0, *shared])))
    own = [box for box in kept if not box.is_doubtful]
    lone = [box for box in labels if not near_boxes(box, own)]
    return [*boxes, *(replace(box, is_doubtful=True, why="doubtful") for box in lone)]


def round_agreement(before: LabelledPhotos, after: LabelledPhotos) -> float:
    """F1 of the labels of two rounds: twice the boxes of a class that match, per label of either; 1 without labels."""
    pairs = [(old.labels, new.labels) for old, new in zip(before.photos, after.photos, strict=True)]
    total = sum(len(old) + len(new) for old, new in pairs)
    return 2 * sum(matches(old, new) for old, new in pairs) / total if total else 1.0
