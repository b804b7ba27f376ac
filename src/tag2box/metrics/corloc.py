"""Correct localisation, the measure of weakly supervised detectors on their own training images."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tag2box.metrics.overlap import same_class_iou
from tag2box.metrics.scores import ClassScores, share
from tag2box.types import Detections, Truth

CORLOC_IOU = 0.5


def corloc(truth: Truth, detections: Mapping[str, Detections]) -> ClassScores:
    """CorLoc (Deselaers et al., 2012): share of a class's positive images whose best box of it has IoU >= 0.5.

    An image is positive where it shows an object of the class, difficult ones included: the tag says it is there.
    Crowds are regions, not objects. A positive image without a box of the class is a failure. Boxes and objects are
    compared in one pixel frame.
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
