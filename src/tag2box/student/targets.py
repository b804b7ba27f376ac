"""What a student learns from: labels with weights and regions without a loss; assignment of cells; losses.

Pure functions. Labels of a teacher are noisy, so each has a weight, and where the teacher is in doubt a class is
neither right nor wrong. Classes that are not tags are certain: they are background everywhere.

Further rounds: the student labels its own training photos, and its labels are mixed with those before. A tag says that
an object is there, so that the student's detections go through the label rule, as a teacher's do. Of both labellings of
a tag, the more confident one stays; scores are compared relative to the best ones of a class, since those of different
detectors have different scales. What both agree on gains weight, what only the other one says becomes an ignore region.
No true box is used: ``round_agreement`` says whether another round would change anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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

_Share = Annotated[float, Field(ge=0, le=1)]
_TOP_SCORES = 0.9  # quantile of the best scores of a class that counts as certain


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Treatment of labels as noisy ones; reviewed boxes and those of other tools, which have no score, are certain."""

    weights: Literal["none", "score", "class"] = "class"
    """Loss weight of a label: 1, its score, or its score relative to the best ones of its class in the label set."""
    min_weight: _Share = 0.2
    """Smallest weight of a label."""
    threshold: _Share = 0.3
    """Labels with less than this share of the best scores of their class become ignore regions; 0: none."""
    ignore: bool = True
    """No loss for the class of a doubtful box inside it; false: doubtful boxes are background."""
    open_tags: bool = True
    """A tag without a certain label: no loss for its class inside its doubtful boxes, enlarged, or anywhere."""
    enlarge: Annotated[float, Field(ge=1, le=10)] = 1.5
    """Factor by which the sides of such boxes are enlarged."""


@dataclass(frozen=True, slots=True)
class PhotoLabels:
    """Labels of one photo, or of a part of it, and regions in which one class has no loss."""

    boxes: Float[Tensor, "G 4"]
    labels: Int[Tensor, " G"]
    weights: Float[Tensor, " G"]
    regions: Float[Tensor, "I 4"]
    region_labels: Int[Tensor, " I"]

    @classmethod
    def joined(cls, parts: Sequence[PhotoLabels]) -> PhotoLabels:
        """The labels of several photos in one picture."""
        return cls(
            torch.cat([part.boxes for part in parts]),
            torch.cat([part.labels for part in parts]),
            torch.cat([part.weights for part in parts]),
            torch.cat([part.regions for part in parts]),
            torch.cat([part.region_labels for part in parts]),
        )

    def to(self, device: torch.device) -> PhotoLabels:
        """The same on a device."""
        columns = (self.boxes, self.labels, self.weights, self.regions, self.region_labels)
        return PhotoLabels(*(column.to(device) for column in columns))

    def __len__(self) -> int:
        return len(self.boxes)


# ---------------------------------------------------------------- from a label set to weights and regions


def top_scores(photos: Sequence[LabelledPhoto], classes: Sequence[str]) -> dict[str, float]:
    """Per class, a high quantile of the scores of the best labels of its tags: what a certain label has.

    1 for a class without scores.
    """
    best: dict[str, list[float]] = {name: [] for name in classes}
    for photo in photos:
        own: dict[str, float] = {}
        for box in photo.labels:
            if box.score is not None:
                own[box.name] = max(own.get(box.name, 0.0), box.score)
        for name, score in own.items():
            best[name].append(score)
    return {name: _quantile(scores) for name, scores in best.items()}


def _quantile(scores: Sequence[float]) -> float:
    ranked = sorted(scores)
    return max(ranked[int(_TOP_SCORES * (len(ranked) - 1))], 1e-6) if ranked else 1.0


def label_weight(box: LabelBox, noise: Noise, top: Mapping[str, float]) -> float:
    """The loss weight of a label; 1 if no detector gave it a score.

    >>> label_weight(LabelBox((0, 0, 1, 1), "cat", 0.2), Noise(weights="class"), {"cat": 0.4})
    0.5
    """
    if box.score is None or noise.weights == "none":
        return 1.0
    share = box.score / top[box.name] if noise.weights == "class" else box.score
    return min(1.0, max(noise.min_weight, share))


def is_certain(box: LabelBox, noise: Noise, top: Mapping[str, float]) -> bool:
    """Whether a box is a label to learn from: not doubtful, and not far below the best scores of its class."""
    return not box.is_doubtful and (box.score is None or box.score >= noise.threshold * top[box.name])


def prepare_labels(photo: LabelledPhoto, classes: Sequence[str], noise: Noise, top: Mapping[str, float]) -> PhotoLabels:
    """Labels with weights, and regions without a loss, of one photo.

    * Certain boxes are labels.
    * Other boxes are regions, with ``noise.ignore``.
    * A tag without a certain label has enlarged regions, or, without any box, the whole photo, with
      ``noise.open_tags``. So has an unsure tag: the whole photo.
    * The labels of a reviewed photo are complete: whatever its tags, a class is background where it has no box.
    """
    whole = (0.0, 0.0, float(photo.width), float(photo.height))
    sure = [box for box in photo.boxes if is_certain(box, noise, top)]
    rest = [box for box in photo.boxes if not is_certain(box, noise, top)]
    settled, unsure = {box.name for box in sure}, () if photo.is_reviewed else photo.unsure
    has_open_tags = noise.open_tags and not photo.is_reviewed
    is_open = {tag for tag in photo.tags if tag not in settled} if has_open_tags else set()
    regions = [(box.name, _enlarged(box.box, noise.enlarge) if box.name in is_open else box.box) for box in rest]
    regions = regions if noise.ignore else [own for own in regions if own[0] in is_open]
    seen = {box.name for box in rest}
    regions += [(name, whole) for name in (*unsure, *(tag for tag in photo.tags if tag in is_open - seen))]
    index = {name: number for number, name in enumerate(classes)}
    return PhotoLabels(
        torch.tensor([box.box for box in sure], dtype=torch.float32).reshape(-1, 4),
        torch.tensor([index[box.name] for box in sure], dtype=torch.long),
        torch.tensor([label_weight(box, noise, top) for box in sure], dtype=torch.float32),
        torch.tensor([box for _, box in regions], dtype=torch.float32).reshape(-1, 4),
        torch.tensor([index[name] for name, _ in regions], dtype=torch.long),
    )


def _enlarged(box: Sequence[float], factor: float) -> tuple[float, float, float, float]:
    x1, y1, x2, y2 = box
    across, down = (x2 - x1) * (factor - 1) / 2, (y2 - y1) * (factor - 1) / 2
    return x1 - across, y1 - down, x2 + across, y2 + down


# ---------------------------------------------------------------- assignment


@dataclass(frozen=True, slots=True)
class CellTargets:
    """What the cells of one photo should say."""

    classes: Float[Tensor, "A C"]  # 0: background; above: how well the cell's box should fit
    weights: Float[Tensor, "A C"]  # of the classification loss; 0: none
    owners: Int[Tensor, " A"]  # the label that the cell's box should be; -1: none
    fit: Float[Tensor, " A"]  # the target of the owner's class, times the owner's weight; 0 without an owner


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
    count = len(probs)
    targets, weights = torch.zeros_like(probs), torch.ones_like(probs)
    within = inside(cells, labels.regions)
    for region, label in enumerate(labels.region_labels.tolist()):
        weights[within[:, region], label] = 0
    owners = torch.full((count,), -1, dtype=torch.long, device=probs.device)
    fit = probs.new_zeros(count)
    if len(labels) == 0:
        return CellTargets(targets, weights, owners, fit)
    overlaps, chosen, metric = _candidates(probs, boxes, cells, labels, top, power)
    best, owner = torch.where(chosen, overlaps + 1e-9, overlaps.new_tensor(-1.0)).max(dim=1)
    owned = best >= 0
    owners = torch.where(owned, owner, owners)
    mine = owned[:, None] & (owner[:, None] == torch.arange(len(labels), device=probs.device))
    scaled = _scaled(torch.where(mine, metric, metric.new_zeros(())), torch.where(mine, overlaps, 0.0))
    spread = inside(cells, labels.boxes)
    for number, label in enumerate(labels.labels.tolist()):
        cover = spread[:, number] & (weights[:, label] > 0)
        weights[cover, label] = torch.minimum(weights[cover, label], labels.weights[number])
    rows = owned.nonzero().flatten()
    own = owners[rows]
    targets[rows, labels.labels[own]] = scaled[rows, own]
    weights[rows, labels.labels[own]] = labels.weights[own]
    fit[rows] = scaled[rows, own] * labels.weights[own]
    return CellTargets(targets, weights, owners, fit)


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
    fit: Float[Tensor, ""]  # sum of the weighted class targets

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
) -> StudentLoss:
    """Classification and box losses of a batch, as sums."""
    with torch.no_grad():
        probs = logits.sigmoid()
        found = [assign_cells(p, b, cells, own, top=top) for p, b, own in zip(probs, boxes, labels, strict=True)]
    classes = quality_focal(
        logits, torch.stack([one.classes for one in found]), torch.stack([one.weights for one in found])
    )
    fit = torch.stack([one.fit for one in found])
    owned = torch.stack([one.owners for one in found]) >= 0
    wanted = torch.cat([own.boxes[one.owners[one.owners >= 0]] for one, own in zip(found, labels, strict=True)])
    overlap = giou(boxes[owned], wanted)
    return StudentLoss(classes, (fit[owned] * (1 - overlap)).sum(), fit.sum())


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
