"""Right, wrong and missed: the rule as a table, and as properties of any photo."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from tag2box.annotations import Detections, Objects
from tag2box.metrics.challenges import match_boxes
from tag2box.ops.boxes import iou

A, B = [0.0, 0.0, 10.0, 10.0], [20.0, 0.0, 30.0, 10.0]
HALF, LESS = [0.0, 0.0, 10.0, 5.0], [0.0, 0.0, 10.0, 4.9]  # IoU 0.5 and 0.49 with A
Found = list[tuple[list[float], float, int]]


def found(rows: Found) -> Detections:
    if not rows:
        return Detections.empty()
    boxes, scores, labels = zip(*rows, strict=True)
    return Detections(torch.tensor(boxes), torch.tensor(scores), torch.tensor(labels))


@pytest.mark.parametrize(
    ("rows", "boxes", "labels", "right", "missed"),
    [
        ([], [], [], [], []),
        ([], [A], [0], [], [True]),
        ([(A, 0.9, 0)], [], [], [False], []),
        ([(A, 0.9, 0)], [A], [0], [True], [False]),
        ([(A, 0.9, 1)], [A], [0], [False], [True]),  # another class
        ([(HALF, 0.9, 0)], [A], [0], [True], [False]),  # exactly one half
        ([(LESS, 0.9, 0)], [A], [0], [False], [True]),
        ([(A, 0.5, 0), (HALF, 0.9, 0)], [A], [0], [False, True], [False]),  # the surer one first, if worse placed
        ([(A, 0.5, 0), (A, 0.5, 0)], [A], [0], [True, False], [False]),  # of equals the first
        ([(A, 0.9, 0), (B, 0.8, 0)], [B, A], [0, 0], [True, True], [False, False]),
        ([(HALF, 0.9, 0)], [A, HALF], [0, 0], [True], [True, False]),  # the larger overlap
        ([(HALF, 0.9, 0), (HALF, 0.8, 0)], [A, HALF], [0, 0], [True, True], [False, False]),  # then the one left
    ],
)
def test_the_rule(
    rows: Found, boxes: list[list[float]], labels: list[int], right: list[bool], missed: list[bool]
) -> None:
    verdict = match_boxes(found(rows), Objects.of(boxes, labels))
    assert verdict.right.tolist() == right
    assert verdict.missed.tolist() == missed
    assert verdict.wrong.tolist() == [not r for r in right]
    assert not verdict.ignored.any()


@pytest.mark.parametrize(("difficult", "crowd"), [(True, False), (False, True)])
def test_difficult_objects_and_crowds_neither_reward_nor_punish(difficult: bool, crowd: bool) -> None:
    objects = Objects(torch.tensor([A]), torch.tensor([0]), torch.tensor([difficult]), torch.tensor([crowd]))
    verdict = match_boxes(found([(A, 0.9, 0), (A, 0.8, 0), (B, 0.7, 0), (A, 0.6, 1)]), objects)
    assert verdict.ignored.tolist() == [True, True, False, False]
    assert verdict.wrong.tolist() == [False, False, True, True]
    assert verdict.missed.tolist() == [False]


def test_a_small_box_inside_a_crowd_is_ignored_inside_a_difficult_object_wrong() -> None:
    small = found([([1.0, 1.0, 3.0, 3.0], 0.9, 0)])
    yes, no = torch.tensor([True]), torch.tensor([False])
    assert match_boxes(small, Objects(torch.tensor([A]), torch.tensor([0]), no, yes)).ignored.tolist() == [True]
    assert match_boxes(small, Objects(torch.tensor([A]), torch.tensor([0]), yes, no)).wrong.tolist() == [True]


boxes = st.tuples(st.integers(0, 8), st.integers(0, 8), st.integers(1, 8), st.integers(1, 8)).map(
    lambda b: [float(b[0]), float(b[1]), float(b[0] + b[2]), float(b[1] + b[3])]
)
rows = st.lists(st.tuples(boxes, st.floats(0, 1, width=32), st.integers(0, 1)), max_size=6)
objects = st.lists(st.tuples(boxes, st.integers(0, 1)), max_size=5)


@settings(max_examples=60, deadline=None)
@given(rows, objects)
def test_agrees_with_the_rule_written_with_loops(detected: Found, objects: list[tuple[list[float], int]]) -> None:
    verdict = match_boxes(found(detected), Objects.of([b for b, _ in objects], [c for _, c in objects]))
    free, right = set(range(len(objects))), [False] * len(detected)
    for i in sorted(range(len(detected)), key=lambda i: -detected[i][1]):
        best, chosen = 0.0, -1
        for g in sorted(free):
            overlap = float(iou(torch.tensor([detected[i][0]]), torch.tensor([objects[g][0]])))
            if objects[g][1] == detected[i][2] and overlap >= 0.5 and overlap > best:
                best, chosen = overlap, g
        if chosen >= 0:
            free.remove(chosen)
            right[i] = True
    assert verdict.right.tolist() == right
    assert verdict.missed.tolist() == [g in free for g in range(len(objects))]
