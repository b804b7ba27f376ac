"""The label rule: tables, properties, and a twin written with loops."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings as hypothesis_settings, strategies as st

from strategies import box_sets
from tag2box.annotations import Detections
from tag2box.labels.labelled import LabelBox
from tag2box.labels.rule import (
    LabelRule,
    PhotoTags,
    TwoViews,
    agreement_of,
    candidates_of_tags,
    choose_relative,
    label_photo,
)

CLASSES = ("cat", "dog", "hen")
RULE = LabelRule()


def detections(*rows: tuple[float, float, float, float, float, int]) -> Detections:
    table = torch.tensor(rows, dtype=torch.float64).reshape(-1, 6)
    return Detections(table[:, :4], table[:, 4], table[:, 5].long())


def tags(*present: int, unsure: tuple[int, ...] = (), counts: dict[int, int] | None = None) -> PhotoTags:
    return PhotoTags(frozenset(present), frozenset(unsure), counts)


A, B, C, IN_A = (0, 0, 10, 10), (20, 0, 30, 10), (40, 0, 50, 10), (1, 1, 4, 4)


@pytest.mark.parametrize(
    ("rows", "own", "expected"),
    [
        ([], tags(), []),
        ([], tags(0), []),
        ([(*A, 0.9, 1)], tags(0), []),
        ([(*A, 0.01, 0)], tags(0), [(A, "best of its tag")]),
        ([(*A, 0.8, 0), (*B, 0.4, 0)], tags(0), [(A, "best of its tag"), (B, "further instance")]),
        ([(*A, 0.8, 0), (*B, 0.39, 0)], tags(0), [(A, "best of its tag"), (B, "doubtful")]),
        ([(*A, 0.8, 0), (*B, 0.19, 0)], tags(0), [(A, "best of its tag")]),
        ([(*A, 0.08, 0), (*B, 0.04, 0)], tags(0), [(A, "best of its tag")]),  # below the floor
        ([(*A, 0.8, 0), (*IN_A, 0.7, 0)], tags(0), [(A, "best of its tag")]),
        ([(*IN_A, 0.8, 0), (*A, 0.7, 0)], tags(0), [(IN_A, "best of its tag")]),
        ([(*A, 0.8, 0), (*IN_A, 0.7, 1)], tags(0, 1), [(A, "best of its tag"), (IN_A, "best of its tag")]),
        ([(*A, 0.8, 0)], tags(unsure=(0,)), [(A, "unsure tag")]),
        (
            [(*A, 0.8, 0), (*B, 0.7, 0), (*C, 0.6, 0)],
            tags(0, counts={0: 2}),
            [(A, "best of its tag"), (B, "further instance"), (C, "doubtful")],
        ),
    ],
)
def test_boxes_and_reasons(rows, own, expected) -> None:
    made = label_photo(RULE, detections(*rows), own, CLASSES)
    assert [(box.box, box.why) for box in made] == expected
    assert all(box.is_doubtful == (box.why in {"doubtful", "unsure tag"}) for box in made)


def test_the_outer_of_two_nested_boxes_is_kept_if_asked_and_scores_enough() -> None:
    outer = replace(RULE, keep_nested="outer")
    made = label_photo(outer, detections((*IN_A, 0.8, 0), (*A, 0.7, 0)), tags(0), CLASSES)
    assert [(box.box, box.alternative, box.score) for box in made] == [(A, IN_A, 0.8)]
    weak = label_photo(outer, detections((*IN_A, 0.8, 0), (*A, 0.3, 0)), tags(0), CLASSES)
    assert [(box.box, box.alternative) for box in weak] == [(IN_A, A)]


def test_a_box_names_its_rank_its_margin_and_the_nested_box_dropped_for_it() -> None:
    rows = [(*A, 0.8, 0), (*IN_A, 0.7, 0), (*B, 0.5, 0)]
    first, second = label_photo(RULE, detections(*rows), tags(0), CLASSES)
    assert (first.rank, first.margin, first.alternative) == (1, pytest.approx(0.1), IN_A)
    assert (second.rank, second.margin, second.alternative) == (3, pytest.approx(0.5), None)


def test_other_classes_are_labelled_only_if_asked_and_confident() -> None:
    rows = [(*A, 0.8, 0), (*B, 0.6, 1), (*C, 0.4, 1)]
    asked = label_photo(replace(RULE, other_classes=True), detections(*rows), tags(0), CLASSES)
    assert [(box.name, box.is_tag, box.why) for box in asked[1:]] == [("dog", False, "untagged class")]


# ---------------------------------------------------------------- properties


@st.composite
def photos(draw: st.DrawFn) -> tuple[Detections, PhotoTags]:
    boxes = draw(box_sets(0, 9)).double()
    scores = draw(st.lists(st.floats(0.001, 1), min_size=len(boxes), max_size=len(boxes)))
    labels = draw(st.lists(st.integers(0, 2), min_size=len(boxes), max_size=len(boxes)))
    present = draw(st.frozensets(st.integers(0, 2)))
    unsure = draw(st.frozensets(st.integers(0, 2))) - present
    found = Detections(boxes, torch.tensor(scores, dtype=torch.float64), torch.tensor(labels, dtype=torch.long))
    return found, PhotoTags(present, unsure)


rules = st.builds(
    LabelRule,
    relative=st.sampled_from([0.3, 0.5, 1.0]),
    doubtful=st.sampled_from([0.0, 0.25]),
    floor=st.sampled_from([0.0, 0.2]),
    nested=st.sampled_from([0.7, 0.9]),
    keep_nested=st.sampled_from(["best", "outer"]),
    other_classes=st.booleans(),
)


@given(photos(), rules)
def test_every_tag_with_a_candidate_has_a_label_and_no_untagged_class_has_one(photo, rule) -> None:
    found, own = photo
    made = label_photo(rule, found, own, CLASSES)
    labelled = {CLASSES.index(box.name) for box in made if not box.is_doubtful}
    assert own.present & set(found.labels.tolist()) <= labelled
    if not rule.other_classes:
        assert labelled <= own.present
        assert {CLASSES.index(box.name) for box in made} <= own.present | own.unsure


@given(photos(), rules, st.randoms())
def test_the_order_of_the_detections_does_not_matter(photo, rule, random) -> None:
    found, own = photo
    order = list(range(len(found)))
    random.shuffle(order)
    shuffled = found[torch.tensor(order, dtype=torch.long)]
    assert label_photo(rule, shuffled, own, CLASSES) == label_photo(rule, found, own, CLASSES)


@given(photos(), rules)
def test_the_selected_candidates_give_the_same_labels(photo, rule) -> None:
    found, own = photo
    kept = candidates_of_tags(rule, found, own)
    assert label_photo(rule, kept, own, CLASSES) == label_photo(rule, found, own, CLASSES)
    assert len(candidates_of_tags(rule, kept, own)) == len(kept)


@hypothesis_settings(max_examples=200)
@given(photos(), rules)
def test_the_rule_is_the_one_written_with_loops(photo, rule) -> None:
    found, own = photo
    best = replace(rule, keep_nested="best")
    made = label_photo(best, found, own, CLASSES)
    assert [(box.name, box.box, box.is_doubtful) for box in made] == loops(best, found, own)


def loops(rule: LabelRule, found: Detections, own: PhotoTags) -> list[tuple[str, tuple[float, ...], bool]]:
    """The rule for ``keep_nested="best"``, one pair of boxes at a time."""
    made: list[tuple[str, tuple[float, ...], bool]] = []
    for number, name in enumerate(CLASSES):
        apart = loops_of_class(rule, found, number)
        for place, (score, box) in enumerate(apart):
            top = apart[0][0]
            if number in own.present:
                is_label = place == 0 or score >= max(rule.relative * top, rule.floor)
                is_doubtful = not is_label and score >= max(rule.doubtful * top, rule.floor)
            else:
                is_doubtful = number in own.unsure and place == 0 and score >= rule.floor
                is_other = rule.other_classes and number not in own.unsure
                is_label = is_other and score >= rule.other_min_score
            made += [(name, box, is_doubtful)] if is_label or is_doubtful else []
    return made


def loops_of_class(rule: LabelRule, found: Detections, number: int) -> list[tuple[float, tuple[float, ...]]]:
    """The boxes of a class after NMS, without nested ones."""
    columns = zip(found.boxes.tolist(), found.scores.tolist(), found.labels.tolist(), strict=True)
    rows = [(score, tuple(box)) for box, score, label in columns if label == number]
    rows.sort(key=lambda row: (-row[0], -area(row[1]), row[1]))
    survivors: list[tuple[float, tuple[float, ...]]] = []
    for score, box in rows:
        if all(overlap(box, other) <= rule.nms_iou for _, other in survivors):
            survivors.append((score, box))
    apart: list[tuple[float, tuple[float, ...]]] = []
    for score, box in survivors:
        if all(shared(box, other) / min(area(box), area(other)) < rule.nested for _, other in apart):
            apart.append((score, box))
    return apart


def overlap(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    return shared(a, b) / (area(a) + area(b) - shared(a, b))


def area(box: tuple[float, ...]) -> float:
    return (box[2] - box[0]) * (box[3] - box[1])


def shared(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    across = max(0.0, min(a[2], b[2]) - max(a[0], b[0]))
    return across * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))


# ---------------------------------------------------------------- the constant without boxes


def test_without_photos_the_rule_stays_as_it_is() -> None:
    choice = choose_relative(RULE, [], CLASSES)
    assert choice.rule == RULE and choice.agreement == {}


def test_equal_views_agree_at_every_value_and_the_smallest_is_chosen() -> None:
    found = detections((*A, 0.8, 0), (*B, 0.5, 0))
    choice = choose_relative(RULE, [TwoViews(found, found, tags(0))], CLASSES)
    assert set(choice.agreement.values()) == {1.0}
    assert (choice.rule.relative, choice.rule.doubtful) == (0.2, 0.1)


def test_boxes_that_only_one_view_shows_are_cut_off() -> None:
    first = detections((*A, 0.8, 0), (*B, 0.6, 0), (*C, 0.3, 0))
    second = detections((*A, 0.8, 0), (*B, 0.6, 0), (60, 0, 70, 10, 0.3, 0))
    choice = choose_relative(RULE, [TwoViews(first, second, tags(0))], CLASSES)
    assert choice.agreement[0.2] == pytest.approx(4 / 6)
    assert choice.rule.relative == 0.4  # the first value that leaves out the third box, and keeps the second
    made = label_photo(choice.rule, first, tags(0), CLASSES)
    assert [box.box for box in made if not box.is_doubtful] == [A, B]


@given(photos(), photos(), rules)
def test_agreement_is_within_zero_and_one_and_complete_for_equal_views(one, other, rule) -> None:
    views = TwoViews(one[0], other[0], one[1])
    value = agreement_of(rule, [views], CLASSES)
    assert 0 <= value <= 1
    assert agreement_of(rule, [TwoViews(one[0], one[0], one[1])], CLASSES) == 1


def test_a_box_is_finite_and_not_inside_out() -> None:
    for bad in ((0.0, 0.0, float("nan"), 1.0), (2.0, 0.0, 1.0, 1.0)):
        with pytest.raises(ValueError, match="expected finite"):
            LabelBox(bad, "cat")


@given(st.lists(st.floats(0.06, 1.0), min_size=1, max_size=6), st.floats(0.2, 1.0))
def test_a_rescaled_rule_labels_the_same_boxes(scores, power):
    boxes = torch.tensor([[20.0 * i, 0.0, 20.0 * i + 10, 10.0] for i in range(len(scores))])
    labels = torch.zeros(len(scores), dtype=torch.long)
    plain = Detections(boxes, torch.tensor(scores, dtype=torch.float64), labels)
    powered = Detections(boxes, torch.tensor(scores, dtype=torch.float64) ** power, labels)
    top = max(scores)
    if min(abs(score / top - share) for score in scores for share in (0.5, 0.25)) < 1e-6:
        return  # on the border, rounding decides
    rule = LabelRule(floor=0.0)
    chosen = [
        [(box.box, box.is_doubtful) for box in label_photo(own, found, tags(0), CLASSES)]
        for own, found in ((rule, plain), (rule.rescaled(power), powered))
    ]
    assert sorted(chosen[0]) == sorted(chosen[1])
