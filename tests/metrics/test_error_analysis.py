"""What the top box of every (photo, tag) pair is; scores of parts and enlargements."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
from hypothesis import given, settings

from strategies import box_sets
from tag2box.annotations import Detections
from tag2box.metrics.error_analysis import (
    COUNT_BINS,
    ERROR_KINDS,
    SIZE_BINS,
    PairExtent,
    box_kind,
    count_bin,
    errors,
    extent_shares,
    pair_extents,
    size_bin,
    top_boxes,
)
from tag2box.metrics.evaluation import breakdown_tables, evaluate_detections, metrics_table
from tag2box.metrics.voc_ap import corloc
from worlds import detections, objects, truth_of, worlds

BIG = (0, 0, 40, 40)
FAR = (60, 60, 90, 90)

KINDS = {
    "nothing there": (BIG, [], [], "nowhere"),
    "an empty box": ((5, 5, 5, 9), [BIG], [], "nowhere"),
    "an empty object": (BIG, [(5, 5, 5, 9)], [], "nowhere"),
    "same box": (BIG, [BIG], [], "correct"),
    "exactly half": ((0, 0, 20, 40), [BIG], [], "correct"),
    "any object of the class": (FAR, [BIG, FAR], [], "correct"),
    "correct goes before another class": (BIG, [BIG], [BIG], "correct"),
    "another class": (FAR, [BIG], [FAR], "other_class"),
    "another class goes before part": ((0, 0, 10, 10), [BIG], [(0, 0, 10, 10)], "other_class"),
    "another class goes before too large": (BIG, [(0, 0, 10, 10)], [BIG], "other_class"),
    "a quarter": ((0, 0, 20, 20), [BIG], [], "part"),
    "a hundredth": ((0, 0, 4, 4), [BIG], [], "part"),
    "exactly four fifths inside": ((-4, 0, 16, 40), [BIG], [], "part"),
    "less than four fifths inside": ((-5, 0, 15, 40), [BIG], [], "surroundings"),
    "contains it": ((0, 0, 100, 100), [BIG], [], "too_large"),
    "contains a small one": ((0, 0, 100, 100), [(50, 50, 51, 51)], [], "too_large"),
    "exactly four fifths contained": ((0, 8, 100, 100), [BIG], [], "too_large"),
    "less than four fifths contained": ((0, 9, 100, 100), [BIG], [], "surroundings"),
    "contains two": ((0, 0, 40, 20), [(0, 0, 18, 20), (22, 0, 40, 20)], [], "too_large"),
    "part goes before too large": ((0, 0, 40, 40), [(0, 0, 100, 100), (10, 10, 12, 12)], [], "part"),
    "exactly a tenth": ((9, 0, 20, 10), [(0, 0, 11, 10)], [], "surroundings"),
    "a corner": ((30, 30, 70, 70), [BIG], [], "nowhere"),
    "a third": ((20, 0, 60, 40), [BIG], [], "surroundings"),
    "beside it": (FAR, [BIG], [], "nowhere"),
}


def boxes(rows: list[tuple[float, ...]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float32).reshape(-1, 4)


@pytest.mark.parametrize("case", KINDS)
def test_the_kind_of(case):
    box, own, other, expected = KINDS[case]
    assert box_kind(boxes([box])[0], boxes(own), boxes(other)) == expected


def area(box: list[float]) -> float:
    return max(box[2] - box[0], 0) * max(box[3] - box[1], 0)


def shared(a: list[float], b: list[float]) -> float:
    return area([max(a[0], b[0]), max(a[1], b[1]), min(a[2], b[2]), min(a[3], b[3])])


def overlap(a: list[float], b: list[float]) -> float:
    union = area(a) + area(b) - shared(a, b)
    return shared(a, b) / union if union else 0.0


def rules_that_hold(box: list[float], own: list[list[float]], other: list[list[float]]) -> list[str]:
    """All rules that hold, in order, written with loops."""
    held = dict.fromkeys(ERROR_KINDS, False)
    for target in own:
        held["correct"] |= overlap(box, target) >= 0.5
        held["part"] |= area(box) > 0 and shared(box, target) / area(box) >= 0.8
        held["too_large"] |= area(target) > 0 and shared(box, target) / area(target) >= 0.8
        held["surroundings"] |= overlap(box, target) >= 0.1
    for target in other:
        held["other_class"] |= overlap(box, target) >= 0.5
    held["nowhere"] = True
    return [kind for kind in ERROR_KINDS if held[kind]]


@settings(max_examples=150, deadline=None)
@given(box_sets(1, 1), box_sets(0, 4), box_sets(0, 3))
def test_the_kind_is_the_first_rule_that_holds(box, own, other):
    kind = box_kind(box[0], own, other)
    assert kind == rules_that_hold(box[0].tolist(), own.tolist(), other.tolist())[0]


@settings(max_examples=100, deadline=None)
@given(box_sets(1, 1), box_sets(1, 1))
def test_no_box_is_both_part_and_too_large_for_one_object(box, own):
    held = rules_that_hold(box[0].tolist(), own.tolist(), [])
    assert "correct" in held or not {"part", "too_large"} <= set(held)


@settings(max_examples=40, deadline=None)
@given(worlds)
def test_every_pair_has_exactly_one_kind(world):
    truth, found = world
    tops = top_boxes(truth, found)
    pairs = [
        (photo, label)
        for photo, own in zip(truth.ids, truth.objects, strict=True)
        for label in sorted(set(own.labels[~own.crowd].tolist()))
    ]
    assert [(top.photo, top.label) for top in tops] == pairs
    numbers = errors(truth, found)
    kinds = [numbers[kind] for kind in ERROR_KINDS]
    assert numbers["pairs"] == len(pairs)
    assert kinds == [None] * len(ERROR_KINDS) if not pairs else sum(kinds) == pytest.approx(1)
    for group in ("by_class", "by_size", "by_count"):
        assert sum(own["pairs"] for own in numbers[group].values()) == len(pairs)
        for kind in ERROR_KINDS:
            parts = sum(own[kind] * own["pairs"] for own in numbers[group].values())
            assert parts == pytest.approx((numbers[kind] or 0) * len(pairs))


@settings(max_examples=40, deadline=None)
@given(worlds)
def test_correct_is_corloc(world):
    truth, found = world
    by_class = errors(truth, found)["by_class"]
    expected = {name: value for name, value in corloc(truth, found).per_class().items() if value is not None}
    assert {name: own["correct"] for name, own in by_class.items()} == pytest.approx(expected)


@settings(max_examples=40, deadline=None)
@given(worlds)
def test_top_boxes_are_the_definition_written_with_loops(world):
    truth, found = world
    expected = []
    for photo, own in zip(truth.ids, truth.objects, strict=True):
        rows = [
            row for row in zip(own.boxes.tolist(), own.labels.tolist(), own.crowd.tolist(), strict=True) if not row[2]
        ]
        for label in sorted({row[1] for row in rows}):
            best = None
            mine = found[photo]
            for box, score, cls in zip(mine.boxes.tolist(), mine.scores.tolist(), mine.labels.tolist(), strict=True):
                if cls == label and (best is None or score > best[1]):
                    best = (box, score)
            same, others = [r[0] for r in rows if r[1] == label], [r[0] for r in rows if r[1] != label]
            kind = "nowhere" if best is None else rules_that_hold(best[0], same, others)[0]
            expected.append((photo, label, kind, max(map(area, same)) / 10_000, len(same)))
    got = [(top.photo, top.label, top.kind, pytest.approx(top.size), top.count) for top in top_boxes(truth, found)]
    assert got == expected


def test_no_box_of_the_class_is_nowhere():
    truth = truth_of([(*BIG, 0, 0, 0)])
    for found in ({}, {"im0": Detections.empty()}, {"im0": detections([(*BIG, 0.9, 1)])}):
        (top,) = top_boxes(truth, found)
        assert (top.kind, top.box, top.score) == ("nowhere", None, None)


def test_crowds_make_no_pair_and_match_nothing_difficult_objects_do():
    truth = truth_of([(*BIG, 0, 0, 1)], [(*BIG, 0, 1, 0)], [(*BIG, 0, 0, 0), (*FAR, 0, 0, 1), (*FAR, 1, 0, 1)])
    found = {name: detections([(*box, 0.9, 0)]) for name, box in zip(truth.ids, (BIG, BIG, FAR), strict=True)}
    assert [(top.photo, top.kind, top.count) for top in top_boxes(truth, found)] == [
        ("im1", "correct", 1),
        ("im2", "nowhere", 1),
    ]


@pytest.mark.parametrize(
    ("size", "name"),
    [
        (0.0, "under 3 % of the photo"),
        (0.0299, "under 3 % of the photo"),
        (0.03, "3 to 10 % of the photo"),
        (0.1, "10 to 30 % of the photo"),
        (0.3, "30 % of the photo or more"),
        (1.2, "30 % of the photo or more"),
    ],
)
def test_the_size_bin_of(size, name):
    assert size_bin(size) == name


@pytest.mark.parametrize(
    ("count", "name"), [(1, "1 object"), (2, "2 or 3 objects"), (3, "2 or 3 objects"), (4, "4 objects or more")]
)
def test_the_count_bin_of(count, name):
    assert count_bin(count) == name


def test_breakdowns_are_in_order_and_leave_out_what_is_not_there():
    truth = truth_of([(*FAR, 1, 0, 0), (0, 0, 50, 50, 1, 0, 0)], [(0, 0, 5, 5, 0, 0, 0)], [(*BIG, 1, 0, 0)])
    numbers = errors(truth, {"im0": detections([(*FAR, 0.9, 1)])})
    assert list(numbers["by_class"]) == ["cat", "dog"]
    assert list(numbers["by_size"]) == [
        name for name, _ in SIZE_BINS if name in ("under 3 % of the photo", "10 to 30 % of the photo")
    ]
    assert list(numbers["by_count"]) == [name for name, _ in COUNT_BINS][:2]
    assert (
        numbers["by_count"]["2 or 3 objects"]["correct"]
        == 1
        == numbers["by_size"]["10 to 30 % of the photo"]["correct"] * 2
    )
    json.dumps(numbers, allow_nan=False)
    assert errors(truth_of([]), {})["by_class"] == {}


def test_the_breakdown_is_a_table_of_its_own():
    truth = truth_of([(*BIG, 0, 0, 0)])
    result = evaluate_detections(truth, {"im0": detections([(0, 0, 20, 20, 0.9, 0)])}, ["voc07", "errors"])
    assert [column.header for column in metrics_table(result).columns] == ["", "voc07"]
    (table,) = breakdown_tables(result)
    assert [column.header for column in table.columns][:4] == ["errors", "correct", "other class", "part"]
    assert list(table.columns[0].cells) == ["all", "cat", "10 to 30 % of the photo", "1 object"]
    assert list(table.columns[3].cells) == ["100.0"] * 4
    assert list(table.columns[-1].cells) == ["1"] * 4
    assert breakdown_tables(evaluate_detections(truth, {}, ["voc07", "challenges"])) == []


# ---------------------------------------------------------------- proposals and their scores

PROPOSALS = boxes([(0, 0, 40, 40), (0, 0, 39, 40), (0, 0, 20, 20), (0, 0, 10, 10), (0, 0, 100, 100), FAR])
SCORES = torch.tensor([[0.5, 0.0], [0.9, 0.0], [0.6, 0.0], [0.2, 0.0], [0.4, 0.3], [0.1, 0.8]])


def test_the_extents_of_a_photo():
    own = objects([(*BIG, 0, 0, 0), (*FAR, 1, 0, 0), (*FAR, 0, 0, 1)])
    cat, dog = pair_extents(PROPOSALS, SCORES, own)
    assert (cat.label, cat.iou, cat.is_reachable) == (0, 1.0, True)
    assert (cat.score, cat.part, cat.enlargement) == pytest.approx((0.5, 0.6, 0.4))
    assert (dog.score, dog.part, dog.enlargement) == (pytest.approx(0.8), None, pytest.approx(0.3))
    numbers = extent_shares([cat, dog], ("cat", "dog", "emu"))
    assert numbers == {"oracle_corloc": 1.0, "above_part": 0.0, "above_enlargement": 1.0, "above_both": 0.5, "pairs": 2}


def test_the_extents_of_nothing():
    assert list(pair_extents(PROPOSALS, SCORES, objects([]))) == []
    assert list(pair_extents(boxes([]), torch.zeros(0, 2), objects([(*BIG, 0, 0, 0)]))) == [
        PairExtent(0, 0.0, 0.0, None, None)
    ]
    assert set(extent_shares([], ("cat",)).values()) == {None, 0}


def test_an_object_no_proposal_fits_counts_in_the_oracle_alone():
    pairs = list(pair_extents(PROPOSALS[4:], SCORES[4:], objects([(*BIG, 0, 0, 0)])))
    assert not pairs[0].is_reachable
    numbers = extent_shares(pairs, ("cat", "dog"))
    assert (numbers["oracle_corloc"], numbers["above_part"], numbers["above_both"]) == (0.0, None, None)


def test_the_oracle_is_a_mean_over_classes():
    pairs = [PairExtent(0, 0.9, 1.0, None, None)] * 3 + [PairExtent(1, 0.4, 1.0, None, None)]
    assert extent_shares(pairs, ("cat", "dog"))["oracle_corloc"] == 0.5


@settings(max_examples=60, deadline=None)
@given(box_sets(0, 7), box_sets(1, 3))
def test_extents_match_the_definition_written_with_loops(candidates, targets):
    scores = torch.arange(len(candidates), dtype=torch.float32)[:, None] % 3
    own = objects([(*box, 0, 0, 0) for box in targets.tolist()])
    (got,) = pair_extents(candidates, scores, own)
    best, target, fit = 0, 0, -1.0
    for row, box in enumerate(candidates.tolist()):
        for column, each in enumerate(targets.tolist()):
            if overlap(box, each) > fit:
                best, target, fit = row, column, overlap(box, each)
    if fit < 0:
        assert (got.iou, got.part) == (0.0, None)
        return
    goal = targets.tolist()[target]
    found: dict[str, list[float]] = {"part": [], "enlargement": []}
    for row, box in enumerate(candidates.tolist()):
        if overlap(box, goal) < 0.5 and shared(box, goal) > 0:
            if shared(box, goal) / area(box) >= 0.8:
                found["part"].append(float(scores[row]))
            if shared(box, goal) / area(goal) >= 0.8:
                found["enlargement"].append(float(scores[row]))
    assert got.iou == pytest.approx(fit)
    assert got.score == float(scores[best])
    assert got.part == max(found["part"], default=None)
    assert got.enlargement == max(found["enlargement"], default=None)


def test_all_kinds_can_happen():
    assert set(Counter(expected for *_, expected in KINDS.values())) == set(ERROR_KINDS)
