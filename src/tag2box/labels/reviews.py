"""Reviews: what a person decided about the boxes of a label set, as it passes between review, trust and training.

The journal of a label set (``labels.journal``) records every action; replayed, it gives ``Reviews``. A photo counts as
reviewed once the reviewer has marked it as done: then its boxes are complete, and what is not boxed is background.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

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
