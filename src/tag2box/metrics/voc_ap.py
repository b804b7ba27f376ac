"""VOC AP, CorLoc, and the types that all metrics share: numbers are fractions, None if undefined, never NaN."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int

from tag2box.annotations import Detections, Objects, Truth
from tag2box.ops import iou

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


def voc07(truth: Truth, detections: Mapping[str, Detections]) -> ClassScores:
    """VOC 2007 AP at IoU 0.5: mean of the best precision at or beyond the recalls 0, 0.1, ... 1."""
    return _average_precision(truth, detections, eleven_point)


def voc12(truth: Truth, detections: Mapping[str, Detections]) -> ClassScores:
    """VOC 2010-2012 AP at IoU 0.5: area under the precision-recall curve made monotone."""
    return _average_precision(truth, detections, area_under)


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


def curves(truth: Truth, detections: Mapping[str, Detections]) -> tuple[Curve, ...]:
    """Precision-recall curve of every class; difficult objects and crowds are ignored, as are their matches."""
    matches = _matches(truth, detections)
    counted = [objects.labels[~(objects.difficult | objects.crowd)] for objects in truth.objects]
    labels = torch.cat(counted) if counted else torch.zeros(0, dtype=torch.long)
    positives = torch.bincount(labels, minlength=len(truth.classes)).tolist()
    return tuple(_curve(matches, label, count) for label, count in enumerate(positives))


def _average_precision(
    truth: Truth, detections: Mapping[str, Detections], average: Callable[[Curve], float]
) -> ClassScores:
    values = tuple(average(c) if c.positives else None for c in curves(truth, detections))
    return ClassScores(truth.classes, values, mean_name="mAP")


@dataclass(frozen=True, slots=True)
class _Matches:
    """All detections of the set, image after image, with the object that each would match. P detections."""

    scores: Float[np.ndarray, " P"]
    labels: Int[np.ndarray, " P"]
    target: Int[np.ndarray, " P"]  # index of the matched object within the set, -1 for none
    ignored: Bool[np.ndarray, " P"]  # the matched object is difficult or a crowd


def _matches(truth: Truth, detections: Mapping[str, Detections]) -> _Matches:
    scores, labels, targets, ignored = [], [], [], []
    offset = 0
    for image_id, objects in zip(truth.ids, truth.objects, strict=True):
        found = detections.get(image_id, Detections.empty())
        if len(found):
            overlap = same_class_iou(found, objects).numpy()
            # numpy's argmax returns the first on ties, as the classic evaluator does
            best = overlap.argmax(axis=1) if len(objects) else np.zeros(len(found), dtype=np.int64)
            is_match = overlap.max(axis=1, initial=-1.0) > MATCH_IOU
            skip = (objects.difficult | objects.crowd).numpy()
            scores.append(found.scores.double().numpy())
            labels.append(found.labels.numpy())
            targets.append(np.where(is_match, best + offset, -1))
            ignored.append(is_match & skip[best] if len(objects) else is_match)
        offset += len(objects)
    if not scores:
        return _Matches(np.zeros(0), np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, bool))
    return _Matches(*(np.concatenate(column) for column in (scores, labels, targets, ignored)))


def _curve(matches: _Matches, label: int, positives: int) -> Curve:
    rows = np.flatnonzero(matches.labels == label)
    rows = rows[np.argsort(-matches.scores[rows], kind="stable")]
    target, ignored = matches.target[rows], matches.ignored[rows]
    is_true = np.zeros(len(rows), dtype=bool)
    _, first = np.unique(target, return_index=True)  # only the best-scored match of an object is correct
    is_true[first] = True
    is_true &= (target >= 0) & ~ignored
    is_false = ~is_true & ~ignored
    right, wrong = np.cumsum(is_true), np.cumsum(is_false)
    precision = right / np.maximum(right + wrong, 1)
    return Curve(right / max(positives, 1), precision, positives)


CORLOC_IOU = 0.5


def corloc(truth: Truth, detections: Mapping[str, Detections]) -> ClassScores:
    """CorLoc (Deselaers et al., 2012): fraction of a class's positive images whose best box of it has IoU >= 0.5.

    An image is positive if it shows an object of the class, even a difficult one: it has the tag. Crowds are regions,
    not objects. A positive image without a box of the class is a failure. Boxes and objects are compared in one pixel
    frame.
    """
    positive = np.zeros(len(truth.classes), dtype=np.int64)
    right = np.zeros(len(truth.classes), dtype=np.int64)
    for image_id, objects in zip(truth.ids, truth.objects, strict=True):
        labels = np.where(objects.crowd.numpy(), -1, objects.labels.numpy())
        present = np.unique(labels[labels >= 0])
        positive[present] += 1
        found = detections.get(image_id, Detections.empty())
        if not len(found) or not len(present):
            continue
        overlap = same_class_iou(found, objects).numpy()
        scores, classes = found.scores.double().numpy(), found.labels.numpy()
        for label in present:
            rows = np.flatnonzero(classes == label)
            if len(rows):
                best = rows[scores[rows].argmax()]
                right[label] += overlap[best, labels == label].max() >= CORLOC_IOU
    values = tuple(share(int(r), int(p)) for r, p in zip(right, positive, strict=True))
    return ClassScores(truth.classes, values)
