"""The order in which photos are reviewed: those that teach most first, between them a random sample.

Photos that were chosen because they are difficult say nothing about the label set as a whole. So every third photo of
the queue is drawn at random: what reviewers decide about this sample is an honest estimate for all photos.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from tag2box.labels.labelled import Box, LabelBox, LabelledPhoto

Order = Literal["queue", "random", "file"]
Reason = Literal["part or whole", "close scores", "tag without box", "doubtful box"]
SAMPLE_EVERY = 3
"""Every photo of the queue with a number divisible by this is of the random sample."""
NESTED = 0.8
"""Share of a box inside another one of its class, from which the two are part and whole of one object."""
_WEIGHTS: dict[Reason, float] = {
    "part or whole": 0.6,
    "tag without box": 0.5,
    "close scores": 0.4,
    "doubtful box": 0.2,
}
_PAUSE = 300.0  # seconds; longer ones are pauses
_PACE_PHOTOS = 50


@dataclass(frozen=True, slots=True)
class Doubt:
    """Why a photo is worth a review, and how much."""

    value: float = 0.0  # from 0 to 1
    reasons: tuple[Reason, ...] = ()


@dataclass(frozen=True, slots=True)
class PhotoFilter:
    """Which photos are reviewed: those with a box that meets all conditions."""

    name: str | None = None  # a class; photos with this tag and no box are included
    low: float = 0.0  # score
    high: float = 1.0

    def keeps(self, photo: LabelledPhoto) -> bool:
        """Whether a photo is one of them; boxes without a score have every score."""
        if self.name is None and self.low <= 0 and self.high >= 1:
            return True
        if self.name is not None and self.name in photo.unboxed_tags:
            return True
        own = (box for box in photo.boxes if self.name in {None, box.name})
        return any(box.score is None or self.low <= box.score <= self.high for box in own)


# ---------------------------------------------------------------- what teaches most


def doubt_of(photo: LabelledPhoto) -> Doubt:
    """The doubts about a photo's boxes, as if each were an independent chance of a mistake: ``1 - prod(1 - w)``.

    Part or whole: a nested box was dropped for a label, or two labels are nested. Close scores: the best box of a tag
    has a small margin, relative to its score. Tags without a box, and ignore regions.
    """
    found: list[tuple[Reason, float]] = []
    for box in photo.labels:
        if box.alternative is not None:
            found.append(("part or whole", _WEIGHTS["part or whole"]))
        if (close := _closeness(box)) > 0.5:
            found.append(("close scores", _WEIGHTS["close scores"] * close))
    found += [("part or whole", _WEIGHTS["part or whole"])] * nested_pairs(photo.labels)
    found += [("tag without box", _WEIGHTS["tag without box"])] * len(photo.unboxed_tags)
    found += [("doubtful box", _WEIGHTS["doubtful box"])] * len(photo.doubtful)
    value = 1 - math.prod(1 - weight for _, weight in found)
    return Doubt(value, tuple(dict.fromkeys(reason for reason, _ in found)))


def _closeness(box: LabelBox) -> float:
    """1 if the next candidate of a tag's best box has its score, 0 if it has none."""
    if box.why != "best of its tag" or box.margin is None or not box.score:
        return 0.0
    return min(max(1 - box.margin / box.score, 0.0), 1.0)


def nested_pairs(boxes: Sequence[LabelBox]) -> int:
    """Number of pairs of a class of which one lies inside the other, by ``NESTED`` of its area."""
    return sum(
        first.name == second.name and _inside(first.box, second.box) >= NESTED
        for number, first in enumerate(boxes)
        for second in boxes[:number]
    )


def _inside(a: Box, b: Box) -> float:
    """Share of the smaller box that lies in the other."""
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    smaller = min((a[2] - a[0]) * (a[3] - a[1]), (b[2] - b[0]) * (b[3] - b[1]))
    return max(width, 0.0) * max(height, 0.0) / smaller if smaller > 0 else 0.0


# ---------------------------------------------------------------- order


def random_sequence(ids: Sequence[str], seed: int = 0) -> list[int]:
    """The numbers of the photos in a random order that depends on the seed and the ids alone."""
    return sorted(range(len(ids)), key=lambda number: (_hash(seed, ids[number]), ids[number]))


def draw_sample(ids: Sequence[str], seed: int = 0) -> tuple[int, ...]:
    """The random sample: the beginning of the random sequence, a third of all photos (rounded up)."""
    return tuple(random_sequence(ids, seed)[: -(-len(ids) // SAMPLE_EVERY)])


def review_order(doubts: Sequence[Doubt], ids: Sequence[str], order: Order = "queue", seed: int = 0) -> list[int]:
    """The numbers of all photos in the order of review.

    Args:
        order: ``queue`` has two photos with the most doubts, then the next of the random sample, and so on; ``random``
            the sample first, then all others at random; ``file`` is the order of the label set.
    """
    if order == "file":
        return list(range(len(ids)))
    if order == "random":
        return random_sequence(ids, seed)
    sample = draw_sample(ids, seed)
    drawn = set(sample)
    hard = sorted((n for n in range(len(ids)) if n not in drawn), key=lambda number: (-doubts[number].value, number))
    queue: list[int] = []
    rest, chosen = iter(hard), iter(sample)
    for place in range(1, len(ids) + 1):
        first, second = (chosen, rest) if place % SAMPLE_EVERY == 0 else (rest, chosen)
        queue.append(next(first, -1))
        if queue[-1] < 0:
            queue[-1] = next(second)
    return queue


def _hash(seed: int, name: str) -> bytes:
    return hashlib.blake2b(f"{seed}\0{name}".encode(errors="surrogatepass"), digest_size=8).digest()


# ---------------------------------------------------------------- pace


def median_pace(times: Sequence[float]) -> float | None:
    """Seconds per photo: the median interval between the last finished photos, without pauses; None if unknown."""
    recent = sorted(times)[-_PACE_PHOTOS:]
    intervals = [later - earlier for earlier, later in pairwise(recent) if later - earlier <= _PAUSE]
    return statistics.median(intervals) if intervals else None
