"""Reviews: what a person decided about the boxes of a label set, as it passes between review, trust and training.

The journal of a label set (``labels.journal``) records every action; replayed, it gives ``Reviews``. A photo counts as
reviewed once the reviewer has marked it as done: then its boxes are complete, and what is not boxed is background.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from tag2box.labels.labelled import Box, LabelBox

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
