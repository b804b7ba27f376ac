from __future__ import annotations

import pytest
from hypothesis import given, settings

from tag2box.metrics.challenges import PSEUDO_IOUS, pseudo_quality
from tag2box.ops.boxes import iou
from worlds import detections, truth_of, worlds

BOX = (0, 0, 40, 40)


def test_no_images_no_numbers():
    quality = pseudo_quality(truth_of([(*BOX, 0, 0, 0)]), {})
    assert quality.precision == quality.recall == (None, None, None)
    assert quality.counts == {"cat": 0, "dog": 0}


CASES = {
    "no boxes": ([(*BOX, 0, 0, 0)], [], (None,) * 3, (0, 0, 0)),
    "no objects": ([], [(*BOX, 1, 0)], (0, 0, 0), (None,) * 3),
    "half of it": ([(*BOX, 0, 0, 0)], [(0, 0, 20, 40, 1, 0)], (1, 1, 0), (1, 1, 0)),
    "a quarter of it": ([(*BOX, 0, 0, 0)], [(0, 0, 20, 20, 1, 0)], (1, 0, 0), (1, 0, 0)),
    "wrong class": ([(*BOX, 0, 0, 0)], [(*BOX, 1, 1)], (0, 0, 0), (0, 0, 0)),
    "one object twice": ([(*BOX, 0, 0, 0)], [(*BOX, 1, 0), (*BOX, 1, 0)], (1, 1, 1), (1, 1, 1)),
    "difficult is right but not asked for": ([(*BOX, 0, 1, 0)], [(*BOX, 1, 0)], (1, 1, 1), (None,) * 3),
    "a crowd is neither": ([(*BOX, 0, 0, 1)], [(*BOX, 1, 0)], (0, 0, 0), (None,) * 3),
}


@pytest.mark.parametrize("case", CASES)
def test_quality_of(case):
    own, boxes, precision, recall = CASES[case]
    quality = pseudo_quality(truth_of(own), {"im0": detections(boxes)})
    assert (quality.precision, quality.recall) == (precision, recall)
    assert sum(quality.counts.values()) == len(boxes)


def test_images_without_an_entry_are_left_out():
    truth = truth_of([(*BOX, 0, 0, 0)], [(*BOX, 0, 0, 0)])
    assert pseudo_quality(truth, {"im1": detections([(*BOX, 1, 0)])}).recall == (1, 1, 1)


@settings(max_examples=25, deadline=None)
@given(worlds)
def test_quality_matches_the_definition_written_with_loops(world):
    truth, found = world
    quality = pseudo_quality(truth, found)
    for level, precision, recall in zip(PSEUDO_IOUS, quality.precision, quality.recall, strict=True):
        right, recalled = [], []
        for image, own in zip(truth.ids, truth.objects, strict=True):
            boxes = found[image]
            overlap = iou(boxes.boxes, own.boxes)
            meets = lambda b, k: bool(boxes.labels[b] == own.labels[k]) and float(overlap[b, k]) >= level  # noqa: B023, E731
            real = [k for k in range(len(own)) if not own.crowd[k]]
            right += [any(meets(b, k) for k in real) for b in range(len(boxes))]
            recalled += [any(meets(b, k) for b in range(len(boxes))) for k in real if not own.difficult[k]]
        assert precision == (pytest.approx(sum(right) / len(right)) if right else None)
        assert recall == (pytest.approx(sum(recalled) / len(recalled)) if recalled else None)
