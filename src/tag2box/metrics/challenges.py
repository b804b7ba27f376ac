"""The three challenges of weakly supervised detection (parts, groups, missed objects), and quality of pseudo boxes.

Each counted object (neither difficult nor a crowd) has exactly one outcome, so the shares sum to one. For pictures,
``match_boxes`` tells right, wrong and ignored detections of one photo, and missed objects.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tag2box.annotations import Detections, Objects, Truth
from tag2box.metrics.voc_ap import same_class_iou, share
from tag2box.ops.boxes import areas, greedy_match, intersections, iou

MIN_SCORE = 0.1
"""Detections below this score are ignored: lists go down to zero, and with all of them nothing is ever missed."""

FOUND_IOU = 0.5
MISSED_IOU = 0.1
COVERED = 0.5
"""A box covers an object if it contains half of the object's area."""
INSIDE = 0.8
"""A box lies inside an object by four fifths of its own area."""

OBJECT_OUTCOMES = ("found", "missed", "grouped", "part", "other")
"""Every outcome, in the order of the rules: the first that holds decides."""


@dataclass(frozen=True, slots=True)
class ChallengeShares:
    """Share of all counted objects with each outcome; all None if there is no object."""

    found: float | None
    part: float | None
    grouped: float | None
    missed: float | None
    other: float | None


def challenges(truth: Truth, detections: Mapping[str, Detections], *, min_score: float = MIN_SCORE) -> ChallengeShares:
    """Share of objects found, missed, grouped, found in part, or none of these, by detections from ``min_score`` on."""
    return _shares(outcome for outcome, _ in _outcomes(truth, detections, min_score))


def challenges_by_instance_count(
    truth: Truth, detections: Mapping[str, Detections], *, min_score: float = MIN_SCORE
) -> tuple[ChallengeShares, ChallengeShares]:
    """``challenges`` of the only objects of their class in a photo, and of those that are one of several."""
    found = list(_outcomes(truth, detections, min_score))
    single, multiple = (_shares(outcome for outcome, is_multiple in found if is_multiple is x) for x in (False, True))
    return single, multiple


def is_multi_instance(objects: Objects) -> tuple[bool, ...]:
    """Whether each counted object of an image is one of several counted objects of its class, in order."""
    labels = objects.labels[~(objects.difficult | objects.crowd)]
    return tuple(((labels[:, None] == labels).sum(dim=1) > 1).tolist())


def _outcomes(truth: Truth, detections: Mapping[str, Detections], min_score: float) -> Iterator[tuple[str, bool]]:
    """Yield the outcome of every counted object, and whether it is one of several."""
    for image_id, objects in zip(truth.ids, truth.objects, strict=True):
        found = detections.get(image_id, Detections.empty())
        kept = found[found.scores >= min_score]
        yield from zip(object_outcomes(kept, objects), is_multi_instance(objects), strict=True)


def _shares(outcomes: Iterable[str]) -> ChallengeShares:
    counts = Counter(outcomes)
    total = counts.total()
    return ChallengeShares(**{outcome: share(counts[outcome], total) for outcome in OBJECT_OUTCOMES})


def object_outcomes(kept: Detections, objects: Objects) -> tuple[str, ...]:
    """Outcome of each counted object of an image, in order.

    With the *best box* being the kept same-class box of highest IoU with the object (on ties, the best scored):

    * found: the best box has IoU >= 0.5;
    * missed: it has IoU < 0.1, or there is none;
    * grouped: it covers at least two objects of the class, each by >= 50 % of the object; difficult objects
      count here, crowds do not;
    * part: it lies >= 80 % inside the object and covers < 50 % of it;
    * other: badly placed in another way.
    """
    counted = torch.nonzero(~(objects.difficult | objects.crowd))[:, 0]
    if not len(kept):
        return ("missed",) * len(counted)
    ranked = kept[torch.argsort(kept.scores, descending=True, stable=True)]
    overlap = same_class_iou(ranked, objects)[:, counted]
    best = torch.from_numpy(overlap.numpy().argmax(axis=0))  # numpy's argmax returns the first on ties
    best_iou = overlap.gather(0, best[None])[0]
    boxes, targets = ranked.boxes.double(), objects.boxes.double()
    shared = intersections(boxes, targets)[best]  # (counted, all): each object's best box with every object
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
    first = torch.stack([rules[outcome] for outcome in OBJECT_OUTCOMES]).numpy().argmax(axis=0)
    return tuple(OBJECT_OUTCOMES[i] for i in first)


PSEUDO_IOUS = (0.25, 0.5, 0.75)


@dataclass(frozen=True, slots=True)
class PseudoQuality:
    """Precision and recall of pseudo boxes at each IoU of ``ious``, and their number per class."""

    ious: tuple[float, ...]
    precision: tuple[float | None, ...]
    recall: tuple[float | None, ...]
    counts: dict[str, int]


def pseudo_quality(
    truth: Truth, pseudo: Mapping[str, Detections], *, ious: tuple[float, ...] = PSEUDO_IOUS
) -> PseudoQuality:
    """Quality of one stage's pseudo boxes, over the images of ``truth`` that ``pseudo`` names.

    A pseudo box is correct if it overlaps an object of its class that is not a crowd; an object (neither difficult nor
    a crowd) is recalled if some pseudo box of its class overlaps it. Overlap means an IoU of at least the threshold.
    """
    levels = torch.tensor(ious, dtype=torch.float64)
    counts = torch.zeros(len(truth.classes), dtype=torch.long)
    correct, recalled = torch.zeros(len(ious), dtype=torch.long), torch.zeros(len(ious), dtype=torch.long)
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
        correct += hits.any(dim=1).sum(dim=0)
        recalled += hits[:, counted].any(dim=0).sum(dim=0)
    boxes_total = int(counts.sum())
    return PseudoQuality(
        ious=ious,
        precision=tuple(share(n, boxes_total) for n in correct.tolist()),
        recall=tuple(share(n, objects_total) for n in recalled.tolist()),
        counts=dict(zip(truth.classes, counts.tolist(), strict=True)),
    )


# ---------------------------------------------------------------- the boxes of one photo


@dataclass(frozen=True, slots=True)
class BoxMatching:
    """Matched detections of one photo. A detection that is neither right nor ignored is wrong."""

    right: Bool[Tensor, " B"]  # detections
    ignored: Bool[Tensor, " B"]  # detections of difficult objects or inside crowds
    finders: Int[Tensor, " G"]  # row of the detection that finds each object; -1: none, or the object does not count
    missed: Bool[Tensor, " G"]  # objects

    @property
    def wrong(self) -> Bool[Tensor, " B"]:
        """Detections of nothing, of a part, of a group, or of an object already found."""
        return ~(self.right | self.ignored)


def match_boxes(found: Detections, objects: Objects, *, min_iou: float = 0.5) -> BoxMatching:
    """Match detections, best score first: right if IoU >= ``min_iou`` with an unmatched object of the same class.

    Of several such objects the one with the largest IoU is matched. Difficult objects and crowds do not count: a
    detection that only overlaps one of those is ignored, and they are never missed. Detections of lower scores change
    nothing for those of higher ones.
    """
    counts = ~(objects.difficult | objects.crowd)  # (G,)
    same = found.labels[:, None] == objects.labels[None, :]  # (B, G)
    overlap = iou(found.boxes, objects.boxes) * same
    order = torch.argsort(found.scores, descending=True, stable=True)
    matched = torch.full_like(found.labels, -1)
    matched[order] = greedy_match(torch.where(counts & same, overlap, -1.0)[order], min_iou)
    right, finders = matched >= 0, torch.full_like(objects.labels, -1)
    finders[matched[right]] = right.nonzero().flatten()
    excused = torch.where(objects.crowd, _share_inside(found.boxes, objects.boxes) * same, overlap)
    ignored = ((excused >= min_iou) & ~counts).any(dim=1) & ~right
    return BoxMatching(right, ignored, finders, counts & (finders < 0))


def _share_inside(boxes: Float[Tensor, "B 4"], regions: Float[Tensor, "G 4"]) -> Float[Tensor, "B G"]:
    """Share of each box's area inside each region: COCO's overlap with crowds."""
    return intersections(boxes, regions) / areas(boxes).clamp(min=1e-6)[:, None]
