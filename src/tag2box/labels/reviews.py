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
    own = photo.labels
    import torch  # not above: the review page starts without it

    from tag2box.ops.boxes import iou

    corners = [torch.tensor([box.box for box in side], dtype=torch.float64).reshape(-1, 4) for side in (own, boxes)]
    overlaps = iou(corners[0], corners[1]).tolist()
    free, verdicts = set(range(len(boxes))), {}
    for row in sorted(range(len(own)), key=lambda at: -(own[at].score or 0.0)):
        near = [at for at in range(len(boxes)) if boxes[at].name == own[row].name and overlaps[row][at] >= RIGHT_IOU]
        matches = [at for at in near if at in free and not boxes[at].is_doubtful]
        if matches:
            best = max(matches, key=lambda at: overlaps[row][at])
            free.discard(best)
            moved = None if boxes[best].box == own[row].box else boxes[best].box
            verdicts[row] = Verdict(own[row], "accepted" if moved is None else "corrected", moved)
        elif not any(boxes[at].is_doubtful for at in near):
            verdicts[row] = Verdict(own[row], "rejected", is_right=False)
    return tuple(verdicts[row] for row in sorted(verdicts))
