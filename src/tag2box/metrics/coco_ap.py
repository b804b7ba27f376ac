"""COCO's twelve numbers, on arrays of all images at once; they agree with the official evaluator, pycocotools."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tag2box.annotations import Detections, Truth
from tag2box.metrics.voc_ap import ObjectAreas
from tag2box.ops.kernels import compiled

_IOUS = np.linspace(0.5, 0.95, 10)
_RECALLS = np.linspace(0.0, 1.0, 101)
_RANGES = np.array(
    [[0, 1e10], [0, 32**2], [32**2, 96**2], [96**2, 1e10]], dtype=np.float64
)  # all, small, medium, large
_LIMITS = np.array([1, 10, 100])  # detections per image and class
_SURE = 1 - 1e-10  # an IoU that always matches
_EPSILON = np.spacing(1)


@dataclass(frozen=True, slots=True)
class CocoScores:
    """COCO's summary, in the official order; None if no object falls into the range."""

    AP: float | None = None
    AP50: float | None = None
    AP75: float | None = None
    APs: float | None = None
    APm: float | None = None
    APl: float | None = None
    AR1: float | None = None
    AR10: float | None = None
    AR100: float | None = None
    ARs: float | None = None
    ARm: float | None = None
    ARl: float | None = None


def coco_scores(truth: Truth, detections: Mapping[str, Detections], *, areas: ObjectAreas | None = None) -> CocoScores:
    """COCO bounding-box AP and AR (Lin et al., 2014).

    ``areas`` gives per image the area of each object, which makes it small, medium or large: COCO files contain areas
    of masks. Without it, the area of the box is used. Difficult objects are ignored like crowds, the only way the COCO
    evaluator has.
    """
    if not truth.ids:
        return CocoScores()
    objects, found = _objects(truth, areas or {}), _found(truth, detections)
    starts = np.flatnonzero(np.diff(found.group, prepend=-1))
    ends = np.append(starts, len(found.group))[1:]
    groups = found.group[starts]
    begins, stops = (np.searchsorted(objects.group, groups, side) for side in ("left", "right"))
    matched, ignored = (np.zeros((len(_RANGES), len(_IOUS), len(found.group)), np.bool_) for _ in range(2))
    spans = np.stack([starts, ends, begins, stops], axis=1)
    _match_all(spans, found.boxes, objects.boxes, objects.areas, objects.is_ignored, matched, ignored)
    rank = np.arange(len(found.group)) - np.repeat(starts, ends - starts)
    shape = (len(_RANGES), len(truth.classes))
    precision, recall = np.full((len(_IOUS), len(_RECALLS), *shape), -1.0), np.full((len(_IOUS), 3, *shape), -1.0)
    in_range = ~objects.is_ignored & (objects.areas >= _RANGES[:, :1]) & (objects.areas <= _RANGES[:, 1:])  # (4, G)
    for label in range(len(truth.classes)):
        own = np.flatnonzero(found.group // len(truth) == label)
        own = own[np.argsort(-found.scores[own], kind="mergesort")]
        positives = in_range[:, objects.group // len(truth) == label].sum(axis=1)
        _accumulate(own, matched, ignored, rank, positives, precision[..., label], recall[..., label])
    return _summary(precision, recall)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Boxes of all images, sorted by class and image; those of one (class, image) are a group."""

    group: Int[np.ndarray, " n"]  # class * images + image
    boxes: Float[np.ndarray, "n 4"]  # x, y, width, height
    scores: Float[np.ndarray, " n"]
    areas: Float[np.ndarray, " n"]
    is_ignored: Bool[np.ndarray, " n"]


def _objects(truth: Truth, areas: ObjectAreas) -> _Rows:
    boxes, labels, images = _columns([(o.boxes, o.labels) for o in truth.objects])
    sizes = [
        np.asarray(areas[name], np.float64) if name in areas else np.full(len(own), np.nan)
        for name, own in zip(truth.ids, truth.objects, strict=True)
    ]
    given = np.concatenate(sizes)
    area = np.where(np.isnan(given), boxes[:, 2] * boxes[:, 3], given)
    is_ignored = torch.cat([o.difficult | o.crowd for o in truth.objects]).numpy()
    order = np.lexsort((images, labels))
    group = (labels * len(truth) + images)[order]
    return _Rows(group, boxes[order], np.zeros(len(order)), area[order], is_ignored[order])


def _found(truth: Truth, detections: Mapping[str, Detections]) -> _Rows:
    """Detections, best first in each group, of which at most a hundred count."""
    own = [detections.get(image_id, Detections.empty()) for image_id in truth.ids]
    boxes, labels, images = _columns([(d.boxes, d.labels) for d in own])
    scores = torch.cat([d.scores.double() for d in own]).numpy()
    order = np.lexsort((-scores, images, labels))
    group = (labels * len(truth) + images)[order]
    rank = np.arange(len(group)) - np.searchsorted(group, group, side="left")
    order, group = order[rank < _LIMITS[-1]], group[rank < _LIMITS[-1]]
    none = np.zeros(len(order))
    return _Rows(group, boxes[order], scores[order], none, none.astype(np.bool_))


def _columns(rows: Sequence[tuple[Tensor, Tensor]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Boxes as x, y, width and height in double precision, labels, and the number of the image."""
    boxes = torch.cat([box.double() for box, _ in rows]).numpy()
    labels = torch.cat([label for _, label in rows]).numpy()
    images = np.repeat(np.arange(len(rows)), [len(label) for _, label in rows])
    return np.concatenate([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], axis=1), labels, images


@compiled
def _match_all(spans: Any, found: Any, objects: Any, areas: Any, is_ignored: Any, matched: Any, ignored: Any) -> None:
    """Match the detections of each (class, image) in all ranges of area and at all IoU thresholds."""
    for i in range(len(spans)):
        start, end, begin, stop = spans[i]
        overlap = np.zeros((end - start, stop - begin))
        for d in range(end - start):
            for g in range(stop - begin):
                overlap[d, g] = _overlap(found[start + d], objects[begin + g], is_ignored[begin + g])
        for k in range(len(_RANGES)):
            low, high = _RANGES[k]
            is_out = is_ignored[begin:stop] | (areas[begin:stop] < low) | (areas[begin:stop] > high)
            order = np.argsort(is_out, kind="mergesort")
            for t in range(len(_IOUS)):
                own_matched, own_ignored = matched[k, t, start:end], ignored[k, t, start:end]
                _match(overlap, _IOUS[t], order, is_out, is_ignored[begin:stop], own_matched, own_ignored)
                for d in range(end - start):
                    area = found[start + d, 2] * found[start + d, 3]
                    own_ignored[d] |= (not own_matched[d]) & ((area < low) | (area > high))


@compiled
def _overlap(box: Any, other: Any, is_crowd: Any) -> float:
    """IoU; for a crowd the share of the detection that lies in it."""
    across = min(box[0] + box[2], other[0] + other[2]) - max(box[0], other[0])
    down = min(box[1] + box[3], other[1] + other[3]) - max(box[1], other[1])
    if across <= 0 or down <= 0:
        return 0.0
    shared = across * down
    area = box[2] * box[3]
    return float(shared / (area if is_crowd else area + other[2] * other[3] - shared))


@compiled
def _match(overlap: Any, threshold: float, order: Any, is_out: Any, is_crowd: Any, matched: Any, ignored: Any) -> None:
    """Each detection, best first, takes the free object of highest IoU; objects out of range only if none is in it."""
    is_taken = np.zeros(len(order), np.bool_)
    for d in range(overlap.shape[0]):
        best, chosen = min(threshold, _SURE), -1
        for g in order:
            if is_taken[g] and not is_crowd[g]:
                continue
            if chosen >= 0 and not is_out[chosen] and is_out[g]:
                break
            if overlap[d, g] >= best:
                best, chosen = overlap[d, g], g
        if chosen >= 0:
            matched[d], ignored[d], is_taken[chosen] = True, is_out[chosen], True


@compiled
def _accumulate(own: Any, matched: Any, ignored: Any, rank: Any, positives: Any, precision: Any, recall: Any) -> None:
    """Precision at 101 recalls and recall for each limit of detections, of one class; ``own`` are its rows by score."""
    exact = np.empty(len(own) + 1)  # precision at each true positive
    for k in range(len(positives)):
        if positives[k] == 0:
            continue
        for t in range(matched.shape[1]):
            right, wrong = 0, 0
            by_limit = np.zeros(len(_LIMITS), np.int64)
            for i in own:
                if ignored[k, t, i]:
                    continue
                if not matched[k, t, i]:
                    wrong += 1
                    continue
                right += 1
                exact[right - 1] = right / (wrong + right + _EPSILON)
                by_limit += rank[i] < _LIMITS
            for i in range(right - 2, -1, -1):
                exact[i] = max(exact[i], exact[i + 1])
            reached = 0
            for r in range(len(_RECALLS)):
                while reached < right and (reached + 1) / positives[k] < _RECALLS[r]:
                    reached += 1
                precision[t, r, k] = exact[reached] if reached < right else 0.0
            recall[t, :, k] = by_limit / positives[k]


def _summary(precision: Float[np.ndarray, "t r a c"], recall: Float[np.ndarray, "t m a c"]) -> CocoScores:
    """The twelve means over everything that is defined."""
    at_50, at_75 = 0, 5  # in _IOUS
    parts = [precision[:, :, 0], precision[at_50, :, 0], precision[at_75, :, 0]]
    parts += [precision[:, :, k] for k in (1, 2, 3)]
    parts += [recall[:, m, 0] for m in (0, 1, 2)] + [recall[:, 2, k] for k in (1, 2, 3)]
    known = [part[part > -1] for part in parts]
    return CocoScores(*(float(values.mean()) if len(values) else None for values in known))
