"""Further rounds: labels of teacher and student are mixed by confidence, and their agreement is measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tag2box.annotations import Detections
from tag2box.labels.labelled import Box, LabelBox, LabelledPhoto, LabelledPhotos
from tag2box.labels.rule import LabelRule
from tag2box.student.targets import mixed_boxes, relabelled, round_agreement

CLASSES = ("cat", "dog")
LEFT, RIGHT, NEAR_LEFT = (0.0, 0.0, 10.0, 10.0), (40.0, 0.0, 50.0, 10.0), (1.0, 0.0, 11.0, 10.0)


def one(box: Box, score: float | None, name: str = "cat", *, is_doubtful: bool = False) -> LabelBox:
    return LabelBox(box, name, score, is_doubtful=is_doubtful)


def told(boxes: tuple[LabelBox, ...]) -> list[tuple[Box, float | None, bool]]:
    return [(box.box, box.score, box.is_doubtful) for box in boxes]


@pytest.mark.parametrize(
    ("before", "own", "mixed"),
    [
        ([], [], []),
        ([one(LEFT, 0.5)], [], [(LEFT, 0.5, False)]),
        ([], [one(LEFT, 0.5)], [(LEFT, 0.5, False)]),
        # the more confident one stays, the other one becomes an ignore region
        ([one(LEFT, 0.5)], [one(RIGHT, 0.6)], [(RIGHT, 0.6, False), (LEFT, 0.5, True)]),
        ([one(LEFT, 0.5)], [one(RIGHT, 0.5)], [(LEFT, 0.5, False), (RIGHT, 0.5, True)]),
        # what both have gains the higher score, and the box of the more confident one
        ([one(LEFT, 0.5)], [one(NEAR_LEFT, 0.6)], [(NEAR_LEFT, 0.6, False)]),
        ([one(LEFT, 0.7), one(RIGHT, 0.2)], [one(NEAR_LEFT, 0.6), one(RIGHT, 0.4)],
         [(LEFT, 0.7, False), (RIGHT, 0.4, False)]),
        # nothing of the class of a reviewed box is changed; doubtful boxes are no labels
        ([one(LEFT, None)], [one(RIGHT, 1.0)], [(LEFT, None, False)]),
        ([one(LEFT, 0.9, is_doubtful=True)], [one(RIGHT, 0.1)], [(RIGHT, 0.1, False)]),
        ([one(LEFT, 0.5)], [one(RIGHT, 0.9, is_doubtful=True)], [(LEFT, 0.5, False)]),
        # classes do not mix
        ([one(LEFT, 0.5)], [one(LEFT, 0.9, "dog")], [(LEFT, 0.5, False), (LEFT, 0.9, False)]),
    ],
)  # fmt: skip
def test_of_two_labellings_the_more_confident_one_stays(
    before: list[LabelBox], own: list[LabelBox], mixed: list[object]
) -> None:
    assert told(mixed_boxes(before, own, CLASSES)) == mixed


def photos(*boxes: tuple[LabelBox, ...]) -> LabelledPhotos:
    found = [LabelledPhoto(f"p{i}", f"p{i}.jpg", 60, 40, ("cat",), own) for i, own in enumerate(boxes)]
    return LabelledPhotos(Path("photos"), CLASSES, tuple(found))


def detections(*rows: tuple[Box, float, int]) -> Detections:
    boxes, scores, names = zip(*rows, strict=True)
    return Detections(torch.tensor(boxes), torch.tensor(scores), torch.tensor(names))


def test_scores_are_compared_relative_to_those_of_their_class() -> None:
    before = photos((one(LEFT, 0.1),), (one(LEFT, 0.09),), (one(LEFT, 0.02),))  # a teacher with low scores
    found = {f"p{i}": detections((RIGHT, score, 0), (LEFT, 0.99, 1)) for i, score in enumerate((0.5, 0.9, 0.9))}
    after = relabelled(before, found, LabelRule())
    kept = [[box.box for box in photo.labels] for photo in after.photos]
    assert kept == [[LEFT], [LEFT], [RIGHT]]  # 1 against 0.56; 0.9 / 0.09 = 1, a tie; 0.2 against 1
    assert all(box.name == "cat" for photo in after.photos for box in photo.boxes)  # a dog is no tag
    assert all(0 <= (box.score or 0) <= 1 for photo in after.photos for box in photo.boxes)


def test_a_reviewed_photo_stays_as_the_reviewer_left_it() -> None:
    before = photos((), (one(LEFT, 0.5),))
    reviewed = replace(before, photos=(replace(before.photos[0], is_reviewed=True), before.photos[1]))
    found = {f"p{i}": detections((RIGHT, 0.9, 0), (LEFT, 0.99, 1)) for i in range(2)}
    after = relabelled(reviewed, found, LabelRule())
    assert after.photos[0] == reviewed.photos[0] and relabelled(before, found, LabelRule()).photos[0].boxes
    assert after.photos[1].boxes != before.photos[1].boxes


@pytest.mark.parametrize(
    ("before", "after", "f1"),
    [
        ((), (), 1.0),
        (((one(LEFT, 1.0),),), ((one(NEAR_LEFT, 0.1),),), 1.0),
        (((one(LEFT, 1.0),),), ((one(RIGHT, 1.0),),), 0.0),
        (((one(LEFT, 1.0), one(RIGHT, 1.0)),), ((one(LEFT, 1.0),),), 2 / 3),
        (((one(LEFT, 1.0),),), ((one(LEFT, 1.0), one(RIGHT, 1.0, is_doubtful=True)),), 1.0),
    ],
)
def test_agreement_is_the_f1_of_the_labels(
    before: tuple[tuple[LabelBox, ...], ...], after: tuple[tuple[LabelBox, ...], ...], f1: float
) -> None:
    assert round_agreement(photos(*before), photos(*after)) == pytest.approx(f1)
