"""benchmarks/merged_labels.py: CorLoc of sets and of their merger, and the rank correlation with mean scores."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from bench_figures import bench
from tag2box.labels.label_set import LabelSet
from tag2box.labels.labelled import LabelBox, LabelledPhoto, LabelledPhotos
from worlds import truth_of

merged_labels = bench("merged_labels")
RIGHT, WRONG = (0.0, 0.0, 10.0, 10.0), (20.0, 0.0, 30.0, 10.0)


def label_set(*boxes: tuple[float, float, float, float], score: float) -> LabelSet:
    own = tuple(LabelBox(box, "c0", score, why="best of its tag", source="label") for box in boxes)
    photo = LabelledPhoto("im0", "im0.jpg", 100, 100, ("c0",), own)
    return LabelSet(LabelledPhotos(Path("photos"), ("c0",), (photo,)))


def test_a_sure_set_outvotes_an_unsure_one() -> None:
    truth = truth_of([(0, 0, 10, 10, 0, 0, 0)], classes=("c0",))
    sets = [label_set(RIGHT, score=0.6), label_set(WRONG, score=0.2)]
    page = merged_labels.measure("made", sets, truth)
    assert [own["corloc"] for own in page["sets"]] == [1.0, 0.0] and page["merged"]["corloc"] == 1.0
    assert page["agreement"] == {"c0": 0.0} and page["uses"] == "tags"
    both = merged_labels.summary([page])
    assert both["pairs"] == 2 and both["rank_correlation"] == pytest.approx(1.0)
    assert both["rank_correlation_within"] == {"made, tags": pytest.approx(1.0)}


@pytest.mark.parametrize("pairs", [[], [(0.1, 1.0)], [(0.1, 1.0), (0.1, 2.0)]])
def test_without_two_different_pairs_there_is_no_correlation(pairs) -> None:
    assert merged_labels.rank_correlation(pairs) is None


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=3, max_size=8))
def test_the_rank_correlation_against_a_twin(pairs) -> None:
    def ranks(values: list[int]) -> list[float]:
        places = sorted(values)
        return [(places.index(a) + len(places) - places[::-1].index(a) + 1) / 2 for a in values]

    a, b = (ranks([pair[side] for pair in pairs]) for side in (0, 1))
    mean = (len(pairs) + 1) / 2
    spread = math.sqrt(sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b))
    found = merged_labels.rank_correlation([(float(x), float(y)) for x, y in pairs])
    if spread == 0:
        assert found is None
    else:
        assert found == pytest.approx(sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True)) / spread)
