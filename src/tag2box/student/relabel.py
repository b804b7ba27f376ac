"""Further rounds: the student labels its own training photos, and its labels are mixed with those before.

A tag says that an object is there, so that the student's detections go through the label rule, as a teacher's do. Of
both labellings of a tag, the more confident one stays; scores are compared relative to the best ones of a class,
since those of different detectors have different scales. What both agree on gains weight, what only the other one says
becomes an ignore region. No true box is used: ``round_agreement`` says whether another round would change anything.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field

from tag2box.annotations import Detections
from tag2box.labels.labelled import LabelBox, LabelledPhoto, LabelledPhotos
from tag2box.labels.rule import LabelRule, PhotoTags, label_photo, matches, near_boxes
from tag2box.student.targets import top_scores


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
