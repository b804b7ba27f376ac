from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from tag2box.metrics.voc_ap import corloc
from tag2box.ops.boxes import iou
from worlds import detections, truth_of, worlds

BOX = (10, 10, 30, 30)
HALF = (10, 10, 20, 30)
FAR = (60, 60, 90, 90)

CASES = {
    "no images": ([], [], (None, None)),
    "no objects": ([[]], [[(*BOX, 0.9, 0)]], (None, None)),
    "no detections": ([[(*BOX, 0, 0, 0)]], [[]], (0.0, None)),
    "exactly half is enough": ([[(*BOX, 0, 0, 0)]], [[(*HALF, 0.9, 0)]], (1.0, None)),
    "only the best box counts": ([[(*BOX, 0, 0, 0)]], [[(*BOX, 0.8, 0), (*FAR, 0.9, 0)]], (0.0, None)),
    "any object of the class will do": ([[(*BOX, 0, 0, 0), (*FAR, 0, 0, 0)]], [[(*FAR, 0.9, 0)]], (1.0, None)),
    "a difficult object makes an image positive": ([[(*BOX, 0, 1, 0)]], [[(*BOX, 0.9, 0)]], (1.0, None)),
    "a crowd does not": ([[(*BOX, 0, 0, 1)]], [[(*BOX, 0.9, 0)]], (None, None)),
    "classes on their own": (
        [[(*BOX, 0, 0, 0), (*FAR, 1, 0, 0)], [(*BOX, 0, 0, 0)]],
        [[(*BOX, 0.2, 0), (*BOX, 0.9, 1)], [(*FAR, 0.9, 0)]],
        (0.5, 0.0),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_corloc_of(case):
    images, found, expected = CASES[case]
    world = truth_of(*images)
    scores = corloc(world, {i: detections(rows) for i, rows in zip(world.ids, found, strict=True)})  # type: ignore[call-overload]
    assert scores.values == expected


@settings(max_examples=30, deadline=None)
@given(worlds, st.sampled_from([0.05, 0.3, 0.5, 0.9]))
def test_corloc_matches_the_definition_written_with_loops(world, min_iou):
    truth, found = world
    for label, value in enumerate(corloc(truth, found, min_iou=min_iou).values):
        outcomes = []
        for image, own in zip(truth.ids, truth.objects, strict=True):
            targets = own.boxes[(own.labels == label) & ~own.crowd]
            if not len(targets):
                continue
            mine = found[image][found[image].labels == label]
            ranked = sorted(range(len(mine)), key=lambda k: -float(mine.scores[k]))
            outcomes.append(bool(ranked) and bool((iou(mine.boxes[ranked[:1]], targets) >= min_iou).any()))
        assert value == (pytest.approx(sum(outcomes) / len(outcomes)) if outcomes else None)
