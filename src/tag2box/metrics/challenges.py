"""The three challenges of weakly supervised detection as numbers: parts, groups and missed objects.

Each object that counts (neither difficult nor a crowd) has exactly one fate, so the shares sum to one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from tag2box.annotations import Detections, Objects, Truth
from tag2box.metrics.voc_ap import same_class_iou, share
from tag2box.ops.boxes import areas, intersections

MIN_SCORE = 0.1
"""Detections below this score are not kept: lists go down to zero, and with all of them nothing is ever missed."""

FOUND_IOU = 0.5
MISSED_IOU = 0.1
COVERED = 0.5
"""A box covers an object with half of the object's area."""
INSIDE = 0.8
"""A box lies inside an object with four fifths of its own area."""

FATES = ("found", "missed", "grouped", "part", "other")
"""Every fate, in the order the rules are tried: the first that holds decides."""


@dataclass(frozen=True, slots=True)
class ChallengeShares:
    """Share of all counted objects with each fate; all None where there is no object."""

    found: float | None
    part: float | None
    grouped: float | None
    missed: float | None
    other: float | None


def challenges(truth: Truth, detections: Mapping[str, Detections], *, min_score: float = MIN_SCORE) -> ChallengeShares:
    """Share of objects found, missed, grouped, shown in part, or none of these, by detections of ``min_score`` up."""
    return _shares(fate for fate, _ in _fates(truth, detections, min_score))


def challenges_by_company(
    truth: Truth, detections: Mapping[str, Detections], *, min_score: float = MIN_SCORE
) -> tuple[ChallengeShares, ChallengeShares]:
    """The same of objects that are alone of their class in their photo, and of those in company."""
    fates = list(_fates(truth, detections, min_score))
    alone, others = (_shares(fate for fate, is_other in fates if is_other is which) for which in (False, True))
    return alone, others


def in_company(objects: Objects) -> tuple[bool, ...]:
    """Whether each counted object of an image is one of several of its class that count, in order."""
    labels = objects.labels[~(objects.difficult | objects.crowd)]
    return tuple(((labels[:, None] == labels).sum(dim=1) > 1).tolist())


def _fates(truth: Truth, detections: Mapping[str, Detections], min_score: float) -> Iterator[tuple[str, bool]]:
    """The fate of every counted object, and whether it is in company."""
    for image_id, objects in zip(truth.ids, truth.objects, strict=True):
        found = detections.get(image_id, Detections.empty())
        yield from zip(object_fates(found[found.scores >= min_score], objects), in_company(objects), strict=True)


def _shares(fates: Iterable[str]) -> ChallengeShares:
    counts = Counter(fates)
    total = counts.total()
    return ChallengeShares(**{fate: share(counts[fate], total) for fate in FATES})


def object_fates(kept: Detections, objects: Objects) -> tuple[str, ...]:
    """The fate of each counted object of an image, in order.

    With the *best box* being the kept same-class box of highest IoU with the object (of equals, the best scored):

    * found: the best box has IoU >= 0.5;
    * missed: it has IoU < 0.1, or there is none;
    * grouped: it covers at least two objects of the class, each by >= 50 % of the object; difficult objects are
      there to be grouped too, crowds are not;
    * part: it lies >= 80 % inside the object and covers < 50 % of it;
    * other: badly placed in another way.
    """
    counted = torch.nonzero(~(objects.difficult | objects.crowd))[:, 0]
    if not len(kept):
        return ("missed",) * len(counted)
    ranked = kept[torch.argsort(kept.scores, descending=True, stable=True)]
    overlap = same_class_iou(ranked, objects)[:, counted]
    best = torch.from_numpy(overlap.numpy().argmax(axis=0))  # numpy's argmax takes the first of equals
    best_iou = overlap.gather(0, best[None])[0]
    boxes, targets = ranked.boxes.double(), objects.boxes.double()
    shared = intersections(boxes, targets)[best]  # (counted, all): what each object's best box shares with every object
    own = shared.gather(1, counted[:, None])[:, 0]
    coverage = shared / areas(targets)
    same = (objects.labels[counted][:, None] == objects.labels[None]) & ~objects.crowd
    rules = {
        "found": best_iou >= FOUND_IOU,
        "missed": best_iou < MISSED_IOU,
        "grouped": ((coverage >= COVERED) & same).sum(1) >= 2,
        "part": (own >= INSIDE * areas(boxes)[best]) & (own < COVERED * areas(targets)[counted]),
        "other": torch.ones_like(best_iou, dtype=torch.bool),
    }
    first = torch.stack([rules[fate] for fate in FATES]).numpy().argmax(axis=0)
    return tuple(FATES[i] for i in first)


PSEUDO_IOUS = (0.25, 0.5, 0.75)


@dataclass(frozen=True, slots=True)
class PseudoQuality:
    """Precision and recall of pseudo boxes at each IoU of ``ious``, and how many there are of each class."""

    ious: tuple[float, ...]
    precision: tuple[float | None, ...]
    recall: tuple[float | None, ...]
    counts: dict[str, int]


def pseudo_quality(
    truth: Truth, pseudo: Mapping[str, Detections], *, ious: tuple[float, ...] = PSEUDO_IOUS
) -> PseudoQuality:
    """Quality of one stage's pseudo boxes, over the images of ``truth`` that ``pseudo`` names.

    A pseudo box is right where it overlaps an object of its class that is no crowd; an object (neither difficult nor
    a crowd) is recalled where some pseudo box overlaps it. Overlap means IoU of at least the threshold.
    """
    levels = torch.tensor(ious, dtype=torch.float64)
    counts = torch.zeros(len(truth.classes), dtype=torch.long)
    right, recalled = torch.zeros(len(ious), dtype=torch.long), torch.zeros(len(ious), dtype=torch.long)
    objects_total = 0
    for image_id, objects in zip(truth.ids, truth.objects, strict=True):
        if image_id not in pseudo:
            continue
        boxes = pseudo[image_id]
        overlap = same_class_iou(boxes, objects).masked_fill(objects.crowd, -1.0)
        counted = ~(objects.difficult | objects.crowd)
        counts += torch.bincount(boxes.labels, minlength=len(truth.classes))
        objects_total += int(counted.sum())
        hits = overlap[..., None] >= levels  # (boxes, objects, levels)
        right += hits.any(dim=1).sum(dim=0)
        recalled += hits[:, counted].any(dim=0).sum(dim=0)
    boxes_total = int(counts.sum())
    return PseudoQuality(
        ious=ious,
        precision=tuple(share(n, boxes_total) for n in right.tolist()),
        recall=tuple(share(n, objects_total) for n in recalled.tolist()),
        counts=dict(zip(truth.classes, counts.tolist(), strict=True)),
    )
