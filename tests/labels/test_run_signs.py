"""Signs of quality without true boxes: tables, properties, twins written with loops, and the choice among runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st

from strategies import box_sets
from tag2box.annotations import Detections
from tag2box.errors import UserError
from tag2box.labels import quality
from tag2box.labels.rule import PhotoTags
from tag2box.ops.boxes import iou

CLASSES = ("cat", "dog", "fox")
SQUARE, HALF, AWAY = (0.0, 0.0, 10.0, 10.0), (0.0, 0.0, 10.0, 5.0), (50.0, 50.0, 60.0, 60.0)
scores_of_tags = st.dictionaries(
    st.tuples(st.sampled_from("abcd"), st.sampled_from(CLASSES)), st.floats(0, 1, width=32), max_size=8
)


def detections(*rows: tuple[int, float]) -> Detections:
    """Detections of these classes and scores; the boxes are numbered by their width."""
    boxes = torch.tensor([[0.0, 0.0, 1.0 + n, 1.0] for n in range(len(rows))]).reshape(-1, 4)
    return Detections(boxes, torch.tensor([s for _, s in rows]), torch.tensor([c for c, _ in rows], dtype=torch.long))


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([], []),
        ([(1, 0.5)], [(1, 0.5)]),
        ([(1, 0.5), (0, 0.25), (1, 0.75)], [(0, 0.25), (1, 0.75)]),
    ],
)
def test_best_of_classes(rows: list[tuple[int, float]], expected: list[tuple[int, float]]) -> None:
    best = quality.best_of_classes(detections(*rows))
    assert list(zip(best.labels.tolist(), best.scores.tolist(), strict=True)) == expected
    tied = quality.best_of_classes(detections((0, 0.5), (0, 0.5)))
    assert tied.boxes.tolist() == [[0, 0, 1, 1]], "of equal scores the first"


def test_best_boxes_are_those_of_tags_and_of_classes_that_are_certainly_absent() -> None:
    found = {"a": detections((0, 0.5), (1, 0.25), (2, 0.125), (0, 0.75)), "b": Detections.empty()}
    tags = {"a": PhotoTags(frozenset({0}), frozenset({1})), "b": PhotoTags(frozenset({0}))}
    best = quality.boxes_of_tags(found, tags, CLASSES)
    assert best.scores == {("a", "cat"): 0.75} and best.boxes == {("a", "cat"): [0, 0, 4, 1]}
    assert best.absent == {("a", "fox"): 0.125}


def test_candidates_gain_one_box_of_each_absent_class() -> None:
    found = detections((0, 0.5), (1, 0.25), (2, 0.125), (2, 0.5))
    kept = quality.with_absent(found[found.labels == 0], found, PhotoTags(frozenset({0}), frozenset({1})))
    assert kept.labels.tolist() == [0, 2] and kept.scores.tolist() == [0.5, 0.5]
    alone = quality.with_absent(Detections.empty(), Detections.empty(), PhotoTags(frozenset({0})))
    assert len(alone) == 0


@pytest.mark.parametrize(
    ("own", "others", "expected"),
    [
        ({}, [], None),
        ({("a", "cat"): SQUARE}, [], None),
        ({("a", "cat"): SQUARE}, [{("b", "cat"): SQUARE}], None),
        ({("a", "cat"): SQUARE}, [{("a", "cat"): HALF}, {("a", "cat"): AWAY}], 0.25),
        ({("a", "cat"): SQUARE, ("b", "cat"): SQUARE}, [{("a", "cat"): SQUARE, ("b", "cat"): HALF}], 0.75),
    ],
)
def test_agreement_is_the_mean_overlap_of_the_best_boxes(own, others, expected) -> None:
    assert quality.seed_overlap(own, others) == (None if expected is None else pytest.approx(expected))


@given(box_sets(low=1), box_sets(low=1))
def test_overlap_is_a_loop_over_the_tags_that_both_have(one: torch.Tensor, two: torch.Tensor) -> None:
    first, second = ({(str(i), "cat"): box for i, box in enumerate(own.tolist())} for own in (one, two))
    pairs = [float(iou(one[i : i + 1], two[i : i + 1])) for i in range(min(len(one), len(two)))]
    assert quality.mean_overlap(first, second) == pytest.approx(sum(pairs) / len(pairs), abs=1e-6)
    assert quality.mean_overlap(first, first) == pytest.approx(1)


def loop_mean_score(scores: dict[tuple[str, str], float]) -> float | None:
    """``mean_score`` class by class."""
    means = []
    for name in CLASSES:
        own = [score for (_, other), score in scores.items() if other == name]
        if own:
            means.append(sum(own) / len(own))
    return sum(means) / len(means) if means else None


def loop_paired(one: dict[tuple[str, str], float], two: dict[tuple[str, str], float]) -> tuple[float, float] | None:
    """``paired_difference`` class by class."""
    means, squares = [], []
    for name in CLASSES:
        own = [one[tag] - two[tag] for tag in one if tag in two and tag[1] == name]
        if own:
            centre = sum(own) / len(own)
            means.append(centre)
            variance = own[0] ** 2 if len(own) == 1 else sum((d - centre) ** 2 for d in own) / (len(own) - 1)
            squares.append(variance / len(own))
    return (sum(means) / len(means), sum(squares) ** 0.5 / len(means)) if means else None


@given(scores_of_tags, scores_of_tags)
def test_means_and_differences_are_loops_over_the_classes(one, two) -> None:
    mean, expected = quality.mean_score(one), loop_mean_score(one)
    assert mean == (None if expected is None else pytest.approx(expected))
    found, pair = quality.paired_difference(one, two), loop_paired(one, two)
    assert (found is None) == (pair is None)
    if found is not None:
        assert (found.mean, found.error) == pytest.approx(pair, abs=1e-9)
        back = quality.paired_difference(two, one)
        assert back is not None
        assert (back.mean, back.error) == pytest.approx((-found.mean, found.error), abs=1e-9)


@pytest.mark.parametrize(
    ("one", "two", "expected", "is_sure"),
    [
        ([], [0.5], None, False),
        ([1.0, 3.0], [0.5, 0.5], (1.5, 1.0), False),
        ([0.8, 0.8], [0.5, 0.5], (0.3, 0.0), True),
        ([0.5, 0.5], [0.5, 0.5], (0.0, 0.0), False),
        ([0.5, 0.5], [0.8, 0.8], (-0.3, 0.0), False),
    ],
)
def test_a_difference_counts_from_two_standard_errors(one, two, expected, is_sure) -> None:
    found = quality.unpaired_difference(one, two)
    if expected is None:
        assert found is None
    else:
        assert found is not None and (found.mean, found.error) == pytest.approx(expected)
        assert found.is_sure == is_sure


# ---------------------------------------------------------------- the signs of a run


def run_signs() -> quality.QualitySigns:
    """Of a run that knows cats, does not tell dogs from the rest, and has no fox."""
    photos = "abcdefgh"
    found = {p: detections((0, 0.75 if p in "abcd" else 0.125), (1, 0.25 if p in "aceg" else 0.375)) for p in photos}
    tags = {p: PhotoTags(frozenset({0} if p in "abcd" else {1})) for p in photos}
    best = quality.boxes_of_tags(found, tags, CLASSES)
    moments = [{"a": detections((0, 0.5))}, {"a": detections((1, 0.1), (0, 0.5))}]
    return quality.quality_signs(best, CLASSES, moments, moments[:1])


def test_the_signs_name_a_class_that_is_not_told_from_the_others() -> None:
    signs = run_signs()
    cat, dog, fox = signs.classes.values()
    assert (cat.photos, cat.score, cat.margin, cat.error) == (4, 0.75, 0.625, 0.0)
    assert (dog.photos, dog.score, dog.margin) == (4, 0.3125, 0.0) and dog.error
    assert (fox.photos, fox.score, fox.margin) == (0, None, None)
    assert signs.unrecognised == ["dog"]
    assert signs.score == pytest.approx(0.53125) and signs.margin == pytest.approx(0.3125)
    assert signs.stages is None and signs.stability == pytest.approx(0.5)
    first, second, third = signs.words()
    assert "score 0.53 on photos with the tag, 0.22 on others" in first
    assert second.startswith("not recognised: dog") and "a moment before 0.50" in third


def test_signs_of_nothing_say_nothing() -> None:
    signs = quality.quality_signs(quality.BestBoxes({}, {}, {}), CLASSES)
    assert signs.words() == [] and signs.score is None and signs.unrecognised == []


def test_signs_are_read_back_and_damaged_files_are_refused(tmp_path: Path) -> None:
    path, signs = tmp_path / quality.SIGNS_FILE, run_signs()
    path.write_text(json.dumps(signs.to_json()))
    assert quality.read_signs(path) == signs
    for content in ("[]", "{}", '{"classes": {"cat": {"photos": "many"}}}'):
        path.write_text(content)
        with pytest.raises(UserError, match=r"quality-signs\.json: .*label again"):
            quality.read_signs(path)


# ---------------------------------------------------------------- choosing


def test_choosing_among_runs() -> None:
    assert quality.choose_run({}) is None and quality.choose_run({"one": {}}) is None
    tags = [(str(i), name) for i in range(6) for name in CLASSES[:2]]
    low = {tag: 0.25 + 0.01 * (i % 3) for i, tag in enumerate(tags)}
    high = {tag: 0.5 + 0.02 * (i % 2) for i, tag in enumerate(tags)}
    noisy = {tag: 0.5 + (0.3 if i % 4 < 2 else -0.28) for i, tag in enumerate(tags)}
    alone = quality.choose_run({"seed-0": low})
    assert alone is not None and alone.best == "seed-0" and not alone.is_sure and "only run" in alone.words()
    clear = quality.choose_run({"seed-0": low, "seed-1": high, "seed-2": low})
    assert clear is not None and clear.best == "seed-1" and clear.is_sure
    assert clear.words().startswith("best by the mean score of its boxes: seed-1, 0.510 against 0.260 of seed-0")
    open_choice = quality.choose_run({"seed-0": high, "seed-1": noisy})
    assert open_choice is not None and not open_choice.is_sure
    assert open_choice.words().startswith("cannot tell which is best: seed-")
    same = quality.choose_run({"seed-0": low, "seed-1": low})
    assert same is not None and not same.is_sure, "equal runs have no best"


def test_only_tags_that_all_runs_have_are_compared() -> None:
    one, two = {("a", "cat"): 0.5, ("b", "cat"): 1.0}, {("a", "cat"): 0.75}
    choice = quality.choose_run({"one": one, "two": two})
    assert choice is not None and dict(choice.scores) == {"two": 0.75, "one": 0.5}
