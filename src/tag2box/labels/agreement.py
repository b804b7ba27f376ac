"""Agreement of label sets: what several runs say about the same photos, merged, and how far they agree.

What a run learns about a hard class depends on its seed. Where the labels of several seeds overlap, and where one run
is surer than the others, they are more likely to be right; a seed that learned the surroundings of a class instead is
outvoted. For a class of a photo, with B_t the labels of set t,

    score(b) = mean over all sets t of max IoU(b, b') x score(b') over b' in B_t

The label with the highest score is the best box of its tag; a further one needs an overlap of 0.5 with labels of more
than half of the sets. No true box is used. The runs need scores on one scale: the same recipe with other seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import fmean

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tag2box.errors import UserError, printable
from tag2box.labels.label_set import LabelSet
from tag2box.labels.labelled import Box, LabelBox, LabelledPhoto, LabelledPhotos, Why
from tag2box.labels.rule import LabelRule
from tag2box.ops.boxes import containment, iou

SAME_IOU = 0.5
"""Boxes of two sets with at least this IoU are of the same object."""
_RULE = LabelRule()


@dataclass(frozen=True, slots=True)
class ClassAgreement:
    """How far the best boxes of a class agree between label sets, and how sure each set is of its own."""

    photos: int  # with the tag, and a label in every set
    same: float  # share of pairs of sets, over these photos, whose best boxes have an IoU of 0.5 or more
    scores: tuple[float | None, ...]  # mean score of the best boxes of each set (``LabelledPhotos.best_scores``)


def merge_sets(sets: Sequence[LabelSet]) -> LabelledPhotos:
    """The labels that several sets of the same photos agree on.

    Photos that are reviewed in one of the sets keep the boxes of the first such set.
    """
    check_same(sets)
    first = sets[0].content
    photos = zip(*(own.content.photos for own in sets), strict=True)
    return LabelledPhotos(first.root, first.classes, tuple(merge_photo(versions, first.classes) for versions in photos))


def check_same(sets: Sequence[LabelSet]) -> None:
    """Raise unless there are two sets or more, of the same classes, photos and tags."""
    if len(sets) < 2:
        raise UserError(f"merge: expected two label sets or more, got {len(sets)}; label with runs of several seeds")
    first = sets[0].content
    for number, other in enumerate(sets[1:], start=2):
        other.check_classes(first.classes, "label set 1")
        if [photo.file for photo in other.content.photos] != [photo.file for photo in first.photos]:
            raise UserError(
                f"label set {number}: has other photos than label set 1; label the same photos with each run"
            )
        for own, same in zip(first.photos, other.content.photos, strict=True):
            if set(own.tags) != set(same.tags) and not (own.is_reviewed or same.is_reviewed):
                raise UserError(printable(f"label set {number}: {own.file} has other tags than in label set 1"))
            if own.stamp and same.stamp and own.stamp.sha256 != same.stamp.sha256:
                raise UserError(printable(f"label set {number}: {own.file} is another photo than in label set 1"))


def merge_photo(versions: Sequence[LabelledPhoto], classes: Sequence[str]) -> LabelledPhoto:
    """One photo with the labels and ignore regions that its versions agree on."""
    reviewed = next((photo for photo in versions if photo.is_reviewed), None)
    if reviewed is not None:
        return reviewed
    boxes = tuple(box for name in classes for box in merge_class([_of_class(photo.boxes, name) for photo in versions]))
    return replace(versions[0], boxes=boxes)


def merge_class(sets: Sequence[Sequence[LabelBox]]) -> list[LabelBox]:
    """The boxes of one class in one photo, highest score first.

    Of a tag, the first is a label if any set has one. A further label, or one of a class that is no tag, needs labels
    of the same object in more than half of the sets; without them, and of a box that is doubtful in as many sets, an
    ignore region is left. Boxes that overlap or contain one before, as by the label rule, are dropped.
    """
    found = [box for own in sets for box in own]
    owner = torch.tensor([number for number, own in enumerate(sets) for _ in own], dtype=torch.long)
    corners = torch.tensor([box.box for box in found], dtype=torch.float64).reshape(-1, 4)
    overlaps, is_label = iou(corners, corners), torch.tensor([not box.is_doubtful for box in found], dtype=torch.bool)
    hides = ((overlaps > _RULE.nms_iou) | (containment(corners, corners) >= _RULE.nested)).tolist()
    of_labels, of_any = (nearest(overlaps, owner, some, len(sets)) for some in (is_label, torch.ones_like(is_label)))
    label_votes, votes = ((own >= SAME_IOU).sum(dim=1).tolist() for own in (of_labels, of_any))
    own_scores = torch.tensor([_score(box) for box in found], dtype=torch.float64)
    scores = merged_scores(overlaps, owner, own_scores * is_label, len(sets))
    order = sorted(range(len(found)), key=lambda row: (found[row].is_doubtful, -scores[row], row))
    kept: list[int] = []
    merged: list[LabelBox] = []
    for row in order:
        box = found[row]
        if any(hides[row][other] for other in kept) or (box.is_doubtful and 2 * votes[row] <= len(sets)):
            continue
        needs_votes = bool(kept) or not box.is_tag
        is_doubtful = box.is_doubtful or (needs_votes and 2 * label_votes[row] <= len(sets))
        why: Why = "further instance" if kept else "best of its tag"
        if is_doubtful or not box.is_tag:
            why = box.why if box.is_doubtful == is_doubtful else "doubtful"
        kept.append(row)
        merged.append(LabelBox(box.box, box.name, scores[row], is_doubtful, box.is_tag, why, len(kept), source="label"))
    return merged


def merged_scores(
    overlaps: Float[Tensor, "n n"], owner: Int[Tensor, " n"], scores: Float[Tensor, " n"], sets: int
) -> list[float]:
    """Mean over the sets of the highest score of a label, times its overlap with the box.

    >>> overlaps = torch.tensor([[1.0, 0.5], [0.5, 1.0]])
    >>> merged_scores(overlaps, torch.tensor([0, 1]), torch.tensor([0.75, 0.5]), 2)
    [0.5, 0.4375]
    """
    every = torch.ones_like(owner, dtype=torch.bool)
    means: list[float] = nearest(overlaps * scores, owner, every, sets).mean(dim=1).tolist()
    return means


def nearest(
    overlaps: Float[Tensor, "n n"], owner: Int[Tensor, " n"], counts: Bool[Tensor, " n"], sets: int
) -> Float[Tensor, "n S"]:
    """The largest IoU of each box with those boxes of each set that count; 0 if a set has none.

    >>> overlaps = torch.tensor([[1.0, 0.6, 0.2], [0.6, 1.0, 0.0], [0.2, 0.0, 1.0]])
    >>> nearest(overlaps, torch.tensor([0, 1, 1]), torch.tensor([True, True, False]), 2)
    tensor([[1.0000, 0.6000],
            [0.6000, 1.0000],
            [0.2000, 0.0000]])
    """
    columns = [overlaps * ((owner == number) & counts) for number in range(sets)]
    return torch.stack([own.max(dim=1).values if len(own) else own.new_zeros(0) for own in columns], dim=1)


def class_agreement(sets: Sequence[LabelSet]) -> dict[str, ClassAgreement]:
    """How far the best boxes of each tag agree between the sets; reviewed photos do not count."""
    check_same(sets)
    found, scores = {}, [own.content.best_scores() for own in sets]
    for name in sets[0].classes:
        best = [_best_boxes(own.content, name) for own in sets]
        files = [file for file in best[0] if all(file in own for own in best)]
        pairs = [[own[file] for own in two] for two in combinations(best, 2) for file in files]
        same = [float(iou(torch.tensor([one]), torch.tensor([two]))) >= SAME_IOU for one, two in pairs]
        found[name] = ClassAgreement(len(files), fmean(same) if same else 0.0, tuple(own[name] for own in scores))
    return found


def _best_boxes(content: LabelledPhotos, name: str) -> dict[str, Box]:
    """The label with the highest score of a class in each photo that has it as a tag."""
    photos = [photo for photo in content.photos if name in photo.tags and not photo.is_reviewed]
    own = {photo.file: _of_class(photo.labels, name) for photo in photos}
    return {file: max(boxes, key=_score).box for file, boxes in own.items() if boxes}


def _score(box: LabelBox) -> float:
    """The score of a box; 1 if no detector gave it one."""
    return 1.0 if box.score is None else box.score


def _of_class(boxes: Sequence[LabelBox], name: str) -> list[LabelBox]:
    return [box for box in boxes if box.name == name]
