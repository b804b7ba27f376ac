"""The order of review: difficult photos first, an honest sample between them, and nothing twice or never."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from tag2box.labels.labelled import LabelBox, LabelledPhoto
from tag2box.labels.review_order import (
    SAMPLE_EVERY,
    Doubt,
    PhotoFilter,
    doubt_of,
    draw_sample,
    median_pace,
    nested_pairs,
    random_sequence,
    review_order,
)

BOX = LabelBox((0, 0, 10, 10), "cat", 0.8, why="best of its tag", margin=0.8, source="label")
FAR = replace(BOX, box=(50.0, 50.0, 60.0, 60.0))


def photo(*boxes: LabelBox, tags: tuple[str, ...] = ("cat",), name: str = "a") -> LabelledPhoto:
    return LabelledPhoto(name, f"{name}.jpg", 100, 100, tags, boxes)


@pytest.mark.parametrize(
    ("own", "value", "reasons"),
    [
        (photo(tags=()), 0.0, ()),
        (photo(BOX), 0.0, ()),
        (photo(), 0.5, ("tag without box",)),
        (photo(replace(BOX, alternative=(0.0, 0.0, 5.0, 5.0))), 0.6, ("part or whole",)),
        (photo(BOX, replace(BOX, box=(1.0, 1.0, 6.0, 6.0), why="further instance")), 0.6, ("part or whole",)),
        (photo(BOX, replace(BOX, box=(1.0, 1.0, 6.0, 6.0), name="dog", why="further instance")), 0.0, ()),
        (photo(replace(BOX, margin=0.0)), 0.4, ("close scores",)),
        (photo(replace(BOX, margin=0.2)), 0.3, ("close scores",)),
        (photo(replace(BOX, margin=0.0, why="further instance")), 0.0, ()),
        (photo(replace(BOX, margin=None, score=None)), 0.0, ()),
        (photo(BOX, replace(FAR, is_doubtful=True)), 0.2, ("doubtful box",)),
        (photo(replace(BOX, is_doubtful=True), replace(FAR, is_doubtful=True)), 1 - 0.5 * 0.8 * 0.8,
         ("tag without box", "doubtful box")),
    ],
)  # fmt: skip
def test_doubts(own: LabelledPhoto, value: float, reasons: tuple[str, ...]) -> None:
    found = doubt_of(own)
    assert found.value == pytest.approx(value) and found.reasons == reasons


def test_each_nested_pair_counts_once() -> None:
    boxes = [replace(BOX, box=(float(n), float(n), 30.0 - n, 30.0 - n)) for n in range(3)]
    assert nested_pairs([]) == 0 and nested_pairs(boxes) == 3
    empty = replace(BOX, box=(5.0, 5.0, 5.0, 5.0))
    assert nested_pairs([BOX, empty]) == 0


values = st.lists(st.floats(0, 1), max_size=40)


@given(values, st.sampled_from(["queue", "random", "file"]), st.integers(0, 5))
def test_every_photo_has_one_place(doubts: list[float], order: str, seed: int) -> None:
    ids = [f"photo {number}" for number in range(len(doubts))]
    found = review_order([Doubt(value) for value in doubts], ids, order, seed)  # type: ignore[arg-type]
    assert sorted(found) == list(range(len(doubts)))
    assert found == review_order([Doubt(value) for value in doubts], ids, order, seed)  # type: ignore[arg-type]
    if order == "file":
        assert found == sorted(found)


@given(values, st.integers(0, 5))
def test_every_third_photo_is_of_the_sample_and_the_others_are_sorted(doubts: list[float], seed: int) -> None:
    ids = [f"photo {number}" for number in range(len(doubts))]
    found = review_order([Doubt(value) for value in doubts], ids, "queue", seed)
    sample = draw_sample(ids, seed)
    assert len(sample) == -(-len(ids) // SAMPLE_EVERY)
    assert [number for number in found if number in sample] == list(sample), "the sample keeps its random order"
    hard = [doubts[number] for number in found if number not in sample]
    assert hard == sorted(hard, reverse=True)
    thirds = found[SAMPLE_EVERY - 1 :: SAMPLE_EVERY]
    assert set(thirds) <= set(sample)


def test_the_sample_is_random_and_does_not_depend_on_doubts_or_the_order_of_photos() -> None:
    ids = [f"photo {number}" for number in range(3000)]
    first, second = draw_sample(ids, 0), draw_sample(ids, 1)
    assert len(first) == 1000 and set(first) != set(second)
    assert statistics.mean(first) == pytest.approx(1500, abs=60) and len(set(first) & set(second)) < 400
    turned = draw_sample(ids[::-1], 0)
    assert [ids[::-1][number] for number in turned] == [ids[number] for number in first]
    assert random_sequence(ids, 0)[:1000] == list(first)
    assert review_order([Doubt()] * 3000, ids, "random")[:1000] == list(first)
    assert draw_sample([]) == () and review_order([], []) == []


@pytest.mark.parametrize(
    ("own", "wanted", "kept"),
    [
        (photo(tags=()), PhotoFilter(), True),
        (photo(tags=()), PhotoFilter("cat"), False),
        (photo(), PhotoFilter("cat"), True),
        (photo(), PhotoFilter("dog"), False),
        (photo(BOX), PhotoFilter("cat", 0.5, 0.9), True),
        (photo(BOX), PhotoFilter("cat", 0.0, 0.7), False),
        (photo(BOX), PhotoFilter(None, 0.9, 1.0), False),
        (photo(replace(BOX, score=None)), PhotoFilter(None, 0.9, 1.0), True),
        (photo(replace(BOX, name="dog"), BOX), PhotoFilter("dog"), True),
    ],
)
def test_filters(own: LabelledPhoto, wanted: PhotoFilter, kept: bool) -> None:
    assert wanted.keeps(own) is kept


@pytest.mark.parametrize(
    ("times", "pace"),
    [
        ([], None),
        ([5.0], None),
        ([0.0, 4.0, 10.0], 5.0),
        ([10.0, 0.0, 4.0], 5.0),
        ([0.0, 4.0, 4000.0, 4006.0], 5.0),
        ([0.0, 4000.0], None),
        ([*range(0, 1000, 100), *range(1000, 1051)], 1.0),
    ],
)
def test_the_pace_is_that_of_the_last_photos_without_pauses(times: list[float], pace: float | None) -> None:
    assert median_pace(times) == pace
