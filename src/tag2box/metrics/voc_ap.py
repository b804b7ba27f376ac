"""VOC AP, CorLoc, and the types that all metrics share: numbers are fractions, None if undefined, never NaN."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int

from tag2box.annotations import Detections, Objects, Truth
from tag2box.ops import areas, iou

ObjectAreas = Mapping[str, Float[torch.Tensor, " B"]]
"""Area of each object of an image, by image id."""

JsonNumbers = dict[str, float | Mapping[str, object] | None]
"""Numbers of a metric as JSON: names to fractions (counts are whole numbers), or to tables of such names."""


@dataclass(frozen=True, slots=True)
class ClassScores:
    """One fraction per class; None for a class without objects."""

    classes: tuple[str, ...]
    values: tuple[float | None, ...]
    mean_name: str = "mean"  # of the mean in JSON

    @property
    def mean(self) -> float | None:
        """Mean over the classes that have objects."""
        known = [value for value in self.values if value is not None]
        return sum(known) / len(known) if known else None

    def per_class(self) -> dict[str, float | None]:
        """Class name to value."""
        return dict(zip(self.classes, self.values, strict=True))


def share(part: int, whole: int) -> float | None:
    """``part / whole``, or None if the whole is zero."""
    return part / whole if whole else None


OTHER_CLASS = -1.0
"""Value for a detection and an object of different classes: below every IoU, even zero."""


def same_class_iou(detections: Detections, objects: Objects) -> Float[torch.Tensor, "B G"]:
    """IoU of every detection with every object of its class, ``OTHER_CLASS`` for others; in double precision."""
    overlap = iou(detections.boxes.double(), objects.boxes.double())
    same = detections.labels[:, None] == objects.labels[None, :]
    return torch.where(same, overlap, overlap.new_tensor(OTHER_CLASS))


MATCH_IOU = 0.5
"""A detection matches an object above this IoU; exactly this IoU is not enough."""

PIXEL = 1.0
"""VOC counts pixels from one."""


def from_voc_pixels(boxes: Float[torch.Tensor, "B 4"]) -> Float[torch.Tensor, "B 4"]:
    """Convert VOC boxes (first pixel is 1, last pixel included) to xyxy from 0 with exclusive right and bottom."""
    return boxes - boxes.new_tensor([PIXEL, PIXEL, 0.0, 0.0])


def to_voc_pixels(boxes: Float[torch.Tensor, "B 4"]) -> Float[torch.Tensor, "B 4"]:
    """Inverse of ``from_voc_pixels``."""
    return boxes + boxes.new_tensor([PIXEL, PIXEL, 0.0, 0.0])


@dataclass(frozen=True, slots=True)
class Curve:
    """Precision-recall curve of one class over decreasing score thresholds. P detections, best first."""

    recall: Float[np.ndarray, " P"]
    precision: Float[np.ndarray, " P"]
    positives: int  # objects that count: neither difficult nor a crowd


def voc07(truth: Truth, detections: Mapping[str, Detections], *, min_iou: float = MATCH_IOU) -> ClassScores:
    """VOC 2007 AP: mean of the best precision at or beyond the recalls 0, 0.1, ... 1; matches are above ``min_iou``."""
    return average_precision(curves(truth, detections, min_iou=min_iou), truth.classes, eleven_point)


def voc12(truth: Truth, detections: Mapping[str, Detections], *, min_iou: float = MATCH_IOU) -> ClassScores:
    """VOC 2010-2012 AP: area under the precision-recall curve made monotone; matches are above ``min_iou``."""
    return average_precision(curves(truth, detections, min_iou=min_iou), truth.classes, area_under)


def eleven_point(curve: Curve) -> float:
    """Mean over eleven recalls of the best precision at or beyond them.

    >>> eleven_point(Curve(recall=np.array([0.5, 1.0]), precision=np.array([1.0, 0.5]), positives=2))
    0.7727272727272727
    """
    # As in the classic evaluators, 3 * 0.1 > 0.3: a recall of exactly 0.3 misses the fourth point.
    levels = np.arange(11) * 0.1
    reached = curve.recall[None, :] >= levels[:, None]  # (11, P)
    return float(np.where(reached, curve.precision[None, :], 0.0).max(axis=1, initial=0.0).mean())


def area_under(curve: Curve) -> float:
    """Area under the curve after every precision is raised to the best one at any higher recall.

    >>> area_under(Curve(recall=np.array([0.5, 1.0]), precision=np.array([1.0, 0.5]), positives=2))
    0.75
    """
    recall = np.concatenate([[0.0], curve.recall])
    best_beyond = np.maximum.accumulate(curve.precision[::-1])[::-1]
    return float(((recall[1:] - recall[:-1]) * best_beyond).sum())


def curves(truth: Truth, detections: Mapping[str, Detections], *, min_iou: float = MATCH_IOU) -> tuple[Curve, ...]:
    """Precision-recall curve of every class; difficult objects and crowds are ignored, as are their matches."""
    matches = match_set(truth, detections, min_iou=min_iou)
    return tuple(ranked.curve() for ranked in ranked_classes(matches, matches.objects.counts))


def average_precision(
    found: Sequence[Curve], classes: tuple[str, ...], average: Callable[[Curve], float] = area_under
) -> ClassScores:
    """AP of every class from its curve; None for a class without objects that count."""
    return ClassScores(classes, tuple(average(c) if c.positives else None for c in found), mean_name="mAP")


@dataclass(frozen=True, slots=True)
class ObjectTable:
    """All objects of a set, photo after photo. G objects."""

    photos: Int[np.ndarray, " G"]  # row of the photo
    labels: Int[np.ndarray, " G"]
    counts: Bool[np.ndarray, " G"]  # neither difficult nor a crowd
    crowd: Bool[np.ndarray, " G"]
    area: Float[np.ndarray, " G"]  # as a fraction of the photo's
    size: tuple[int, int]  # number of photos and of classes

    def per_photo(self, chosen: Bool[np.ndarray, " G"]) -> Int[np.ndarray, "N C"]:
        """Number of the chosen objects in each photo, by class."""
        return table_counts(self.photos[chosen], self.labels[chosen], self.size)


def table_counts(
    rows: Int[np.ndarray, " K"], columns: Int[np.ndarray, " K"], size: tuple[int, int]
) -> Int[np.ndarray, "N C"]:
    """How often each pair of a row and a column occurs.

    >>> table_counts(np.array([0, 0, 1]), np.array([1, 1, 0]), (2, 2)).tolist()
    [[0, 2], [1, 0]]
    """
    flat = np.bincount(rows * size[1] + columns, minlength=size[0] * size[1])
    return flat.reshape(size)


@dataclass(frozen=True, slots=True)
class SetMatches:
    """All detections of a set, photo after photo, with the object that each would match. P detections."""

    objects: ObjectTable
    photos: Int[np.ndarray, " P"]  # row of the photo
    scores: Float[np.ndarray, " P"]
    labels: Int[np.ndarray, " P"]
    target: Int[np.ndarray, " P"]  # row of the matched object, -1 for none
    area: Float[np.ndarray, " P"]  # as a fraction of the photo's


def object_table(truth: Truth) -> ObjectTable:
    """The objects of all photos in one table."""
    sizes = np.array([len(objects) for objects in truth.objects], dtype=np.int64)
    return ObjectTable(
        np.repeat(np.arange(len(truth)), sizes),
        np.concatenate([np.zeros(0, np.int64), *(o.labels.numpy() for o in truth.objects)]),
        np.concatenate([np.zeros(0, bool), *(~(o.difficult | o.crowd).numpy() for o in truth.objects)]),
        np.concatenate([np.zeros(0, bool), *(o.crowd.numpy() for o in truth.objects)]),
        _area_shares([o.boxes for o in truth.objects], truth.sizes),
        (len(truth), len(truth.classes)),
    )


def _area_shares(
    boxes: Sequence[Float[torch.Tensor, "B 4"]], sizes: Sequence[tuple[int, int]]
) -> Float[np.ndarray, " K"]:
    shares = [areas(b.double()).numpy() / max(w * h, 1) for b, (w, h) in zip(boxes, sizes, strict=True)]
    return np.concatenate([np.zeros(0), *shares])


def match_set(truth: Truth, detections: Mapping[str, Detections], *, min_iou: float = MATCH_IOU) -> SetMatches:
    """Each detection with its nearest object of its class, if their IoU is above ``min_iou``; ties go to the first.

    This is VOC's rule: an object that is taken already stays the nearest, so that a second detection of it is wrong.
    """
    found = [detections.get(photo, Detections.empty()) for photo in truth.ids]
    targets, offset = [np.zeros(0, np.int64)], 0
    for own, objects in zip(found, truth.objects, strict=True):
        if len(own) and len(objects):
            overlap = same_class_iou(own, objects).numpy()
            # numpy's argmax returns the first on ties, as the classic evaluator does
            targets.append(np.where(overlap.max(axis=1) > min_iou, overlap.argmax(axis=1) + offset, -1))
        else:
            targets.append(np.full(len(own), -1))
        offset += len(objects)
    return SetMatches(
        object_table(truth),
        np.repeat(np.arange(len(found)), np.array([len(own) for own in found], dtype=np.int64)),
        np.concatenate([np.zeros(0), *(own.scores.double().numpy() for own in found)]),
        np.concatenate([np.zeros(0, np.int64), *(own.labels.numpy() for own in found)]),
        np.concatenate(targets),
        _area_shares([own.boxes for own in found], truth.sizes),
    )


@dataclass(frozen=True, slots=True)
class RankedClass:
    """The detections of one class, best first, and the number of objects to find in each photo."""

    photos: Int[np.ndarray, " P"]
    is_true: Bool[np.ndarray, " P"]
    is_false: Bool[np.ndarray, " P"]  # neither: ignored
    positives: Int[np.ndarray, " N"]

    def curve(self) -> Curve:
        """The precision-recall curve over decreasing score thresholds."""
        right, wrong, positives = np.cumsum(self.is_true), np.cumsum(self.is_false), int(self.positives.sum())
        return Curve(right / max(positives, 1), right / np.maximum(right + wrong, 1), positives)


def ranked_classes(
    matches: SetMatches, counted: Bool[np.ndarray, " G"], judged: Bool[np.ndarray, " P"] | None = None
) -> tuple[RankedClass, ...]:
    """The ranked detections of every class. The best-scored match of an object is right, further ones are wrong.

    Args:
        counted: objects to find; matches of all others are ignored.
        judged: detections without a match that are wrong; default: all. The others are ignored.
    """
    is_match = matches.target >= 0
    is_ignored = np.where(is_match, ~np.append(counted, False)[matches.target], False)  # row -1: no object
    if judged is not None:
        is_ignored |= ~is_match & ~judged
    positives = matches.objects.per_photo(counted)
    order = np.argsort(-matches.scores, kind="stable")
    return tuple(
        _ranked(matches, order[matches.labels[order] == label], is_ignored, positives[:, label])
        for label in range(matches.objects.size[1])
    )


def _ranked(
    matches: SetMatches,
    rows: Int[np.ndarray, " P"],
    is_ignored: Bool[np.ndarray, " A"],
    positives: Int[np.ndarray, " N"],
) -> RankedClass:
    target, ignored = matches.target[rows], is_ignored[rows]
    is_true = np.zeros(len(rows), dtype=bool)
    _, first = np.unique(target, return_index=True)  # only the best-scored match of an object is correct
    is_true[first] = True
    is_true &= (target >= 0) & ~ignored
    return RankedClass(matches.photos[rows], is_true, ~is_true & ~ignored, positives)


# ---------------------------------------------------------------- CorLoc

CORLOC_IOU = 0.5


@dataclass(frozen=True, slots=True)
class PhotoShares:
    """Right ones of a number of cases, by photo and class: photos of a class (CorLoc), or objects (recall)."""

    right: Int[np.ndarray, "N C"]
    total: Int[np.ndarray, "N C"]

    def scores(self, classes: tuple[str, ...]) -> ClassScores:
        """The share of right ones of each class; None for a class without cases."""
        pairs = zip(self.right.sum(axis=0).tolist(), self.total.sum(axis=0).tolist(), strict=True)
        return ClassScores(classes, tuple(share(right, total) for right, total in pairs))


def corloc(truth: Truth, detections: Mapping[str, Detections], *, min_iou: float = CORLOC_IOU) -> ClassScores:
    """CorLoc (Deselaers et al., 2012): share of a class's positive images whose best box of it has IoU >= ``min_iou``.

    An image is positive if it shows an object of the class, even a difficult one: it has the tag. Crowds are regions,
    not objects. A positive image without a box of the class is a failure. Boxes and objects are compared in one pixel
    frame.
    """
    return localised(truth, detections, min_iou=min_iou).scores(truth.classes)


def localised(truth: Truth, detections: Mapping[str, Detections], *, min_iou: float = CORLOC_IOU) -> PhotoShares:
    """CorLoc's positive images of every class, and those of them whose best box is right."""
    positive = np.zeros((len(truth), len(truth.classes)), dtype=np.int64)
    right = np.zeros_like(positive)
    for row, (image_id, objects) in enumerate(zip(truth.ids, truth.objects, strict=True)):
        labels = np.where(objects.crowd.numpy(), -1, objects.labels.numpy())
        present = np.unique(labels[labels >= 0])
        positive[row, present] = 1
        found = detections.get(image_id, Detections.empty())
        if not len(found) or not len(present):
            continue
        overlap = same_class_iou(found, objects).numpy()
        scores, classes = found.scores.double().numpy(), found.labels.numpy()
        for label in present:
            rows = np.flatnonzero(classes == label)
            if len(rows):
                best = rows[scores[rows].argmax()]
                right[row, label] = overlap[best, labels == label].max() >= min_iou
    return PhotoShares(right, positive)


def recalled(matches: SetMatches, counted: Bool[np.ndarray, " G"]) -> PhotoShares:
    """Recall of every class: the counted objects, and those of them that some detection matches."""
    is_found = np.zeros(len(counted), dtype=bool)
    is_found[matches.target[matches.target >= 0]] = True
    return PhotoShares(matches.objects.per_photo(counted & is_found), matches.objects.per_photo(counted))
