"""Reviews: what a person decided about the boxes of a label set, as it passes between review, trust and training.

The journal of a label set (``labels.journal``) records every action; replayed, it gives ``Reviews``. A photo counts as
reviewed once the reviewer has marked it as done: then its boxes are complete, and what is not boxed is background. Its
labels that are not rejected are right as they stand. Its ignore regions are dropped, unless the reviewer accepted them:
then they are objects.

The boxes of a photo have numbers: those of the label set from 0 in their order, ignore regions included, then the boxes
that reviewers draw. An action replaces the state of some boxes, or undoes or repeats the last one. States are values:
``act`` gives the next one, so that a journal of actions can be replayed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from tag2box.errors import UserError
from tag2box.labels.label_set import LabelSet
from tag2box.labels.labelled import Box, LabelBox, LabelledPhoto, LabelledPhotos

RIGHT_IOU = 0.5
"""A corrected box whose IoU with the original is at least this counts as right, as in CorLoc and AP50."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a reviewer decided about one box that was there before the review."""

    box: LabelBox  # as it was labelled
    decision: Literal["accepted", "rejected", "corrected"]
    corrected: Box | None = None  # where the reviewer moved it
    name: str | None = None  # the class the reviewer gave it, if another
    is_right: bool = True  # accepted, or corrected within ``RIGHT_IOU`` and of the same class


@dataclass(frozen=True, slots=True)
class ReviewedPhoto:
    """A photo whose review is finished."""

    id: str
    boxes: tuple[LabelBox, ...]  # all objects of the photo: source "review", why "reviewed", score None
    verdicts: tuple[Verdict, ...]  # one per label that was there before, in its order; ignore regions have none
    is_sampled: bool = False  # from the random sample of the queue: unbiased, unlike photos that were chosen as hard
    reviewer: str = ""


@dataclass(frozen=True, slots=True)
class Reviews:
    """All finished reviews of a label set."""

    labels_digest: str  # of the labels.json that was reviewed
    photos: Mapping[str, ReviewedPhoto] = field(default_factory=dict)  # by photo id

    def verdicts(self, *, sampled_only: bool = False) -> tuple[Verdict, ...]:
        """The verdicts on all boxes, in the order of the photos."""
        photos = (photo for photo in self.photos.values() if photo.is_sampled or not sampled_only)
        return tuple(verdict for photo in photos for verdict in photo.verdicts)

    def __len__(self) -> int:
        return len(self.photos)


# ---------------------------------------------------------------- actions

Decision = Literal["open", "accepted", "rejected"]
ActionKind = Literal[
    "accept", "reject", "restore", "move", "class", "draw", "swap", "done", "reopen", "undo", "redo"
]  # fmt: skip
DECISIONS: tuple[str, ...] = get_args(Decision)
ACTION_KINDS: tuple[str, ...] = get_args(ActionKind)
MOST_DRAWN = 10_000
"""Boxes that reviewers can draw in a photo."""
_MOST_UNDONE = 200
_EDGE = 0.01  # pixels beyond the photo that a box may have; its own boxes are as the detector gave them


class Impossible(UserError):
    """An action that does not fit the photo."""


@dataclass(frozen=True, slots=True)
class BoxState:
    """A box as the reviewer left it."""

    box: Box
    name: str
    decision: Decision = "open"

    def to_json(self) -> list[object]:
        """Corners, class, decision."""
        return [*self.box, self.name, self.decision]

    @classmethod
    def from_json(cls, value: Any) -> BoxState:
        """A state from its JSON form; raises ``ValueError`` or ``TypeError`` if it is none."""
        x1, y1, x2, y2, name, decision = value
        corners = (_number(x1), _number(y1), _number(x2), _number(y2))
        if not isinstance(name, str) or decision not in DECISIONS:
            raise ValueError(f"box {str(value)[:100]}: expected a class and a decision ({', '.join(DECISIONS)})")
        return cls(corners, name, decision)


@dataclass(frozen=True, slots=True)
class Action:
    """One step of a review of a photo."""

    kind: ActionKind
    boxes: Mapping[int, BoxState] = field(default_factory=dict)  # the boxes that it changes, as they are afterwards

    def to_json(self) -> dict[str, object]:
        """Kind and boxes."""
        return {"action": self.kind, "boxes": {str(number): own.to_json() for number, own in self.boxes.items()}}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Action:
        """An action from its JSON form; raises ``ValueError``, ``TypeError`` or the like if it is none."""
        kind, boxes = value["action"], value.get("boxes") or {}
        if kind not in ACTION_KINDS:
            raise ValueError(f"action {str(kind)[:40]!r}: expected one of {', '.join(ACTION_KINDS)}")
        return cls(kind, {int(number): BoxState.from_json(own) for number, own in boxes.items()})


@dataclass(frozen=True, slots=True)
class Moment:
    """What undo returns to."""

    boxes: Mapping[int, BoxState] = field(default_factory=dict)
    is_done: bool = False


@dataclass(frozen=True, slots=True)
class PhotoReview:
    """The state of a photo's review: the boxes that were touched, and what can be undone and repeated."""

    now: Moment = Moment()
    revision: int = 0  # number of actions so far, undo and redo included
    past: tuple[Moment, ...] = ()
    future: tuple[Moment, ...] = ()
    reviewer: str = ""  # of the last action
    is_sampled: bool = False  # whether the photo was of the random sample when it was done


def act(state: PhotoReview, action: Action, reviewer: str = "", *, is_sampled: bool = False) -> PhotoReview:
    """The state after an action; raises ``Impossible`` if there is nothing to undo or repeat."""
    past, future = state.past, state.future
    if action.kind == "undo":
        if not past:
            raise Impossible("there is nothing to undo in this photo")
        now, past, future = past[-1], past[:-1], (*future, state.now)
    elif action.kind == "redo":
        if not future:
            raise Impossible("there is nothing to repeat in this photo")
        now, past, future = future[-1], (*past, state.now), future[:-1]
    else:
        is_done = action.kind == "done" or (state.now.is_done and action.kind != "reopen")
        boxes = {**state.now.boxes, **action.boxes} if action.boxes else state.now.boxes
        now, past, future = Moment(boxes, is_done), (*past, state.now)[-_MOST_UNDONE:], ()
    is_sampled = is_sampled if action.kind == "done" else state.is_sampled
    return PhotoReview(now, state.revision + 1, past, future, reviewer, is_sampled)


def check_action(action: Action, photo: LabelledPhoto, state: PhotoReview, classes: Sequence[str]) -> None:
    """Raise ``Impossible`` unless the action fits the photo: known boxes and classes, corners inside."""
    known = max(len(photo.boxes), max(state.now.boxes, default=-1) + 1)
    for number, own in action.boxes.items():
        if not 0 <= number <= min(known, len(photo.boxes) + MOST_DRAWN):
            raise Impossible(f"box {number}: this photo has {known} boxes; reload the photo")
        if own.name not in classes:
            raise Impossible(f"box {number}: {own.name[:100]!r} is not one of the classes of the label set")
        x1, y1, x2, y2 = own.box
        is_inside = x1 >= -_EDGE and y1 >= -_EDGE and x2 <= photo.width + _EDGE and y2 <= photo.height + _EDGE
        is_as_labelled = number < len(photo.boxes) and own.box == photo.boxes[number].box
        if not ((is_inside and x1 < x2 and y1 < y2) or is_as_labelled):
            raise Impossible(
                f"box {number}: expected corners inside the photo ({photo.width}x{photo.height}), got {own.box}"
            )


# ---------------------------------------------------------------- what follows from it


def states_of(photo: LabelledPhoto, state: PhotoReview) -> dict[int, BoxState]:
    """All boxes of a photo as they are now, by number."""
    first = {number: BoxState(box.box, box.name) for number, box in enumerate(photo.boxes)}
    return {**first, **state.now.boxes}


def finished(photo: LabelledPhoto, state: PhotoReview) -> ReviewedPhoto:
    """The final boxes and the verdicts of a photo that is done."""
    boxes, verdicts = [], []
    for number, own in states_of(photo, state).items():
        before = photo.boxes[number] if number < len(photo.boxes) else None
        if before is not None and not before.is_doubtful:
            verdicts.append(_verdict(before, own))
            is_object = own.decision != "rejected"
        else:
            is_object = own.decision == "accepted"
        if is_object:
            boxes.append(LabelBox(own.box, own.name, is_tag=own.name in photo.tags, why="reviewed", source="review"))
    return ReviewedPhoto(photo.id, tuple(boxes), tuple(verdicts), state.is_sampled, state.reviewer)


def _verdict(before: LabelBox, own: BoxState) -> Verdict:
    if own.decision == "rejected":
        return Verdict(before, "rejected", is_right=False)
    corrected = None if own.box == before.box else own.box
    name = None if own.name == before.name else own.name
    if corrected is None and name is None:
        return Verdict(before, "accepted")
    is_near = corrected is None or overlap(before.box, corrected) >= RIGHT_IOU
    return Verdict(before, "corrected", corrected, name, is_right=is_near and name is None)


def overlap(a: Box, b: Box) -> float:
    """IoU of two boxes; 0 if both are empty."""
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    both = max(width, 0.0) * max(height, 0.0)
    either = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - both
    return both / either if either > 0 else 0.0


def apply_reviews(labels: LabelSet, reviews: Reviews, *, only_reviewed: bool = False) -> LabelledPhotos:
    """The photos of a label set with the boxes of their reviews; photos that are not reviewed keep theirs.

    Tags stay as they are: they are the user's own. A tag that lost all its boxes is wrong, or names something that has
    no box; ``is_reviewed`` says that such a photo is complete.

    Args:
        only_reviewed: leave out photos whose review is not finished.

    Example:
        labels = tag2box.LabelSet.open(folder)
        content = tag2box.apply_reviews(labels, tag2box.read_reviews(folder))
    """
    if reviews.labels_digest != labels.digest:
        raise UserError("these reviews are of another label set; read those of the set itself")
    photos = []
    for photo in labels.content.photos:
        own = reviews.photos.get(photo.id)
        if own is not None:
            photos.append(replace(photo, boxes=own.boxes, is_reviewed=True))
        elif not only_reviewed:
            photos.append(photo)
    return replace(labels.content, photos=tuple(photos))


@dataclass(frozen=True, slots=True)
class ReviewCounts:
    """What a review came to."""

    photos: int = 0
    accepted: int = 0
    rejected: int = 0
    corrected: int = 0
    added: int = 0  # drawn by a reviewer, or accepted ignore regions


def count_reviews(reviews: Reviews) -> ReviewCounts:
    """Number of finished photos, and of boxes by decision."""
    found = dict.fromkeys(("accepted", "rejected", "corrected", "added"), 0)
    for photo in reviews.photos.values():
        for verdict in photo.verdicts:
            found[verdict.decision] += 1
        found["added"] += len(photo.boxes) - sum(verdict.decision != "rejected" for verdict in photo.verdicts)
    return ReviewCounts(len(reviews), **found)


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"corner {str(value)[:40]}: expected a finite number")
    return float(value)


# ---------------------------------------------------------------- reviews of other tools


def compared_reviews(labels: LabelledPhotos, digest: str, corrected: LabelledPhotos) -> Reviews:
    """Reviews from corrected boxes of the same photos: a label is right if a box of its class matches it.

    Boxes match one to one at an IoU of at least 0.5, labels in the order of their scores. Labels that only match an
    ignore region have no verdict. All photos of ``corrected`` count as reviewed, and as a random sample.

    Args:
        digest: of the labels, as ``LabelSet`` has it.
    """
    known = {photo.file: photo for photo in labels.photos} | {p.id: p for p in labels.photos}
    found = {}
    for photo in corrected.photos:
        own = known.get(photo.id) or known.get(photo.file)
        if own is not None:
            boxes = tuple(replace(box, score=None, why="reviewed", source="review") for box in photo.boxes)
            found[own.id] = ReviewedPhoto(own.id, boxes, _match(own, boxes), is_sampled=True)
    return Reviews(digest, found)


def _match(photo: LabelledPhoto, boxes: Sequence[LabelBox]) -> tuple[Verdict, ...]:
    from tag2box.labels.rule import label_overlaps  # not above: the review page starts without torch
    from tag2box.ops.boxes import greedy_match

    order = sorted(range(len(photo.labels)), key=lambda at: -(photo.labels[at].score or 0.0))
    own = [photo.labels[at] for at in order]
    sure = [box for box in boxes if not box.is_doubtful]
    doubtful = [box for box in boxes if box.is_doubtful]
    found = greedy_match(label_overlaps(own, sure), RIGHT_IOU).tolist()
    is_near = (label_overlaps(own, doubtful) >= RIGHT_IOU).any(dim=1).tolist()
    verdicts = {}
    for at, box, match, near in zip(order, own, found, is_near, strict=True):
        if match >= 0:
            moved = None if sure[match].box == box.box else sure[match].box
            verdicts[at] = Verdict(box, "accepted" if moved is None else "corrected", moved)
        elif not near:
            verdicts[at] = Verdict(box, "rejected", is_right=False)
    return tuple(verdicts[at] for at in sorted(verdicts))
