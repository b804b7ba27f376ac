from __future__ import annotations

from dataclasses import asdict

import pytest
from hypothesis import given, settings

from tag2box.annotations import Detections
from tag2box.metrics.challenges import (
    OBJECT_OUTCOMES,
    challenges,
    challenges_by_instance_count,
    is_multi_instance,
    object_outcomes,
)
from worlds import detections, objects, truth_of, worlds

LEFT, RIGHT = (0, 0, 20, 20), (20, 0, 40, 20)
BIG = (0, 0, 40, 40)

CASES = {
    "no objects": ([], [(*BIG, 0.9, 0)], ()),
    "no boxes": ([(*BIG, 0, 0, 0)], [], ("missed",)),
    "difficult and crowds are not counted": ([(*BIG, 0, 1, 0), (*BIG, 0, 0, 1)], [(*BIG, 0.9, 0)], ()),
    "same box": ([(*BIG, 0, 0, 0)], [(*BIG, 0.9, 0)], ("found",)),
    "exactly half is found": ([(*BIG, 0, 0, 0)], [(0, 0, 20, 40, 0.9, 0)], ("found",)),
    "another class's box": ([(*BIG, 0, 0, 0)], [(*BIG, 0.9, 1)], ("missed",)),
    "a quarter of it": ([(*BIG, 0, 0, 0)], [(0, 0, 20, 20, 0.9, 0)], ("part",)),
    "exactly a tenth is not missed": ([(0, 0, 40, 40, 0, 0, 0)], [(0, 0, 4, 40, 0.9, 0)], ("part",)),
    "less than a tenth is missed": ([(*BIG, 0, 0, 0)], [(0, 0, 3, 40, 0.9, 0)], ("missed",)),
    "exactly four fifths inside": ([(*BIG, 0, 0, 0)], [(-4, 0, 16, 40, 0.9, 0)], ("part",)),
    "three quarters inside": ([(*BIG, 0, 0, 0)], [(-5, 0, 15, 40, 0.9, 0)], ("other",)),
    "two in one box": (
        [(0, 0, 18, 20, 0, 0, 0), (22, 0, 40, 20, 0, 0, 0)],
        [(0, 0, 40, 20, 0.9, 0)],
        ("grouped", "grouped"),
    ),
    "each covered by exactly half is grouped": (
        [(*LEFT, 0, 0, 0), (*RIGHT, 0, 0, 0)],
        [(10, 0, 30, 20, 0.9, 0)],
        ("grouped", "grouped"),
    ),
    "one of another class beside it": (
        [(0, 0, 18, 20, 0, 0, 0), (22, 0, 40, 20, 1, 0, 0)],
        [(0, 0, 40, 20, 0.9, 0)],
        ("other", "missed"),
    ),
    "a difficult neighbour can be grouped": (
        [(0, 0, 18, 20, 0, 0, 0), (22, 0, 40, 20, 0, 1, 0)],
        [(0, 0, 40, 20, 0.9, 0)],
        ("grouped",),
    ),
    "a crowd neighbour can not": (
        [(0, 0, 18, 20, 0, 0, 0), (22, 0, 40, 20, 0, 0, 1)],
        [(0, 0, 40, 20, 0.9, 0)],
        ("other",),
    ),
    "found goes before grouped": (
        [(0, 0, 38, 40, 0, 0, 0), (38, 0, 42, 40, 0, 0, 0)],
        [(0, 0, 42, 40, 0.9, 0)],
        ("found", "missed"),
    ),
    "grouped goes before part": (
        [(0, 0, 100, 100, 0, 0, 0), (0, 0, 20, 20, 0, 0, 0), (20, 0, 40, 20, 0, 0, 0)],
        [(0, 0, 40, 40, 0.9, 0)],
        ("grouped", "grouped", "grouped"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_fate_of(case):
    own, boxes, expected = CASES[case]
    assert object_outcomes(detections(boxes), objects(own)) == expected


def test_of_equal_overlaps_the_better_score_decides():
    inside, across = (0, 0, 16, 40), (20, 0, 50, 40)  # IoU 640 / 1600 and 800 / 2000
    own = objects([(*BIG, 0, 0, 0)])
    assert object_outcomes(detections([(*across, 0.8, 0), (*inside, 0.9, 0)]), own) == ("part",)
    assert object_outcomes(detections([(*inside, 0.8, 0), (*across, 0.9, 0)]), own) == ("other",)


def test_only_kept_detections_count():
    truth = truth_of([(*BIG, 0, 0, 0)])
    found = {"im0": detections([(*BIG, 0.3, 0)])}
    assert challenges(truth, found, min_score=0.3).found == 1
    assert challenges(truth, found, min_score=0.31).missed == 1


def test_shares_of_nothing_are_none():
    assert set(asdict(challenges(truth_of([]), {})).values()) == {None}


@settings(max_examples=40, deadline=None)
@given(worlds)
def test_shares_sum_to_one_and_everything_is_missed_without_detections(world):
    truth, found = world
    shares = asdict(challenges(truth, found))
    counted = sum(int((~(o.difficult | o.crowd)).sum()) for o in truth.objects)
    if not counted:
        assert set(shares.values()) == {None}
        return
    assert set(shares) == set(OBJECT_OUTCOMES)
    assert sum(shares.values()) == pytest.approx(1)
    assert challenges(truth, dict.fromkeys(truth.ids, Detections.empty())).missed == 1


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ([], ()),
        ([(*BIG, 0, 0, 0)], (False,)),
        ([(*LEFT, 0, 0, 0), (*RIGHT, 1, 0, 0)], (False, False)),  # of two classes
        ([(*LEFT, 0, 0, 0), (*RIGHT, 0, 0, 0), (*BIG, 1, 0, 0)], (True, True, False)),
        ([(*LEFT, 0, 0, 0), (*RIGHT, 0, 1, 0), (*BIG, 0, 0, 1)], (False,)),  # difficult objects and crowds do not count
    ],
)
def test_multi_instance(own, expected):
    assert is_multi_instance(objects(own)) == expected


@settings(max_examples=40, deadline=None)
@given(worlds)
def test_shares_by_instance_count_add_up_to_the_whole(world):
    truth, found = world
    several = [is_other for own in truth.objects for is_other in is_multi_instance(own)]
    parts = [asdict(shares) for shares in challenges_by_instance_count(truth, found)]
    sizes = [several.count(False), several.count(True)]
    for outcome, whole in asdict(challenges(truth, found)).items():
        sums = [(part[outcome] or 0) * size for part, size in zip(parts, sizes, strict=True)]
        assert sum(sums) == pytest.approx((whole or 0) * len(several))
    assert [part["found"] is None for part in parts] == [size == 0 for size in sizes]
