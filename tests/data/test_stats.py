"""Datasets counted: by hand, by loops, across chunks, and without anything to count."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st

from strategies import box_sets
from tag2box.annotations import Objects, Photo, TaggedPhotos, Truth
from tag2box.data import stats
from tag2box.data.stats import SIZE_EDGES, adjacency, count_dataset, count_objects, count_sizes, count_tags, to_json

NAMES = ("ant", "bee", "cow")


def tagged(rows: list[list[int]], unsure: list[list[int]] | None = None, classes: int = 3) -> TaggedPhotos:
    photos = tuple(Photo(f"p{i}", Path(f"p{i}.jpg"), 10 + i % 2, 20) for i in range(len(rows)))
    shape = (len(rows), classes)
    doubts = None if unsure is None else torch.tensor(unsure, dtype=torch.bool).reshape(shape)
    return TaggedPhotos(NAMES[:classes], photos, torch.tensor(rows, dtype=torch.bool).reshape(shape), doubts)


def truth(*objects: Objects, size: tuple[int, int] = (24, 24)) -> Truth:
    return Truth(NAMES, tuple(f"p{i}" for i in range(len(objects))), (size,) * len(objects), objects)


# ---------------------------------------------------------------- tags


def test_no_photos_no_counts() -> None:
    found = count_tags(tagged([]))
    assert (found.photos, found.per_class, found.alone, found.unsure) == (0, (0, 0, 0), (0, 0, 0), (0, 0, 0))
    assert found.per_photo == () and found.untagged == () and found.unused == NAMES
    assert found.inseparable() == () and found.never_without() == ()


def test_no_classes_no_counts() -> None:
    found = count_tags(TaggedPhotos((), (Photo("a", Path("a"), 1, 1),), torch.zeros(1, 0, dtype=torch.bool)))
    assert found.per_photo == (1,) and found.untagged == ("a",) and found.together.shape == (0, 0)


def test_tags_by_hand() -> None:
    found = count_tags(
        tagged([[1, 0, 0], [1, 1, 0], [0, 0, 0], [1, 1, 0]], unsure=[[0, 0, 1], [0, 0, 1], [0] * 3, [0] * 3])
    )
    assert found.per_class == (3, 2, 0)
    assert found.alone == (1, 0, 0)
    assert found.per_photo == (1, 1, 2)
    assert found.untagged == ("p2",)
    assert found.unused == ("cow",)
    assert found.unsure == (0, 0, 2)
    assert found.together.tolist() == [[3, 2, 0], [2, 2, 0], [0, 0, 0]]
    assert found.never_without() == ((1, 0),)  # bee only beside ant
    assert found.inseparable() == ()


def test_classes_on_the_same_photos_cannot_be_distinguished() -> None:
    found = count_tags(tagged([[1, 0, 1], [0, 1, 0], [1, 0, 1]]))
    assert found.inseparable() == ((0, 2),)
    assert found.never_without() == ((0, 2), (2, 0))


@settings(deadline=None, max_examples=40)
@given(st.lists(st.lists(st.integers(0, 1), min_size=3, max_size=3), max_size=12), st.integers(1, 5))
def test_tags_match_loops_whatever_the_chunk(rows: list[list[int]], chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stats, "STATS_CHUNK", chunk)
        found = count_tags(tagged(rows))
    for a in range(3):
        assert found.per_class[a] == sum(row[a] for row in rows)
        assert found.alone[a] == sum(row[a] and sum(row) == 1 for row in rows)
        for b in range(3):
            assert int(found.together[a, b]) == sum(row[a] and row[b] for row in rows)
    assert list(found.per_photo) == [sum(sum(row) == n for row in rows) for n in range(len(found.per_photo))]
    assert sum(found.per_photo) == len(rows)


def test_sizes_most_frequent_first() -> None:
    assert count_sizes([]).sizes == ()
    assert math.isnan(count_sizes([]).shares(lambda w, h: True))
    found = count_sizes([Photo("a", Path("a"), 4, 3), Photo("b", Path("b"), 2, 3), Photo("c", Path("c"), 4, 3)])
    assert found.sizes == ((4, 3), (2, 3)) and found.counts == (2, 1)
    assert found.shares(lambda w, h: w > h) == pytest.approx(2 / 3)


# ---------------------------------------------------------------- objects


@pytest.mark.parametrize("known", [truth(), truth(Objects.of([], []))])
def test_no_objects(known: Truth) -> None:
    found = count_objects(known)
    assert found.objects == found.pairs == found.missed == (0, 0, 0)
    assert math.isnan(found.missed_share)
    assert found.per_pair.shape == (3, 0)


def test_objects_by_hand() -> None:
    marks = Objects(
        torch.tensor([[0.0, 0, 2, 2], [0, 0, 12, 12], [1, 1, 3, 3], [4, 4, 6, 6], [0, 0, 24, 24]]),
        torch.tensor([0, 0, 0, 1, 2]),
        torch.tensor([0, 0, 1, 0, 0]).bool(),
        torch.tensor([0, 0, 0, 0, 1]).bool(),
    )
    found = count_objects(truth(marks, Objects.of([[0, 0, 3, 3]], [0])))
    assert found.objects == (3, 1, 0)
    assert found.pairs == (2, 1, 0)
    assert found.missed == (1, 0, 0) and found.missed_share == 0.25
    assert found.difficult == (1, 0, 0) and found.crowds == (0, 0, 1)
    assert found.per_pair.tolist() == [[1, 1], [1, 0], [0, 0]]
    assert found.by_size.tolist() == [[1, 1, 1], [1, 0, 0], [0, 0, 0]]  # 4/576, 144/576, 9/576; 4/576
    assert found.by_adjacency.tolist() == [[1, 0, 2], [1, 0, 0], [0, 0, 0]]


def test_photos_and_classes_are_not_mixed_up() -> None:
    box = [[0, 0, 2, 2]]
    found = count_objects(truth(Objects.of(box, [2]), Objects.of(box, [0]), Objects.of(box, [1])))
    assert found.objects == found.pairs == (1, 1, 1)
    assert found.by_adjacency.tolist() == [[1, 0, 0]] * 3


def test_sizes_at_the_edges_belong_to_the_larger_kind() -> None:
    found = count_objects(
        truth(Objects.of([[0, 0, 10, 10], [0, 0, 10, 100], [0, 0, 9, 10]], [0, 1, 2]), size=(100, 100))
    )
    assert SIZE_EDGES == (0.01, 0.1)
    assert found.by_size.tolist() == [[0, 1, 0], [0, 0, 1], [1, 0, 0]]


@pytest.mark.parametrize(
    ("boxes", "pair", "expected"),
    [
        ([], [], []),
        ([[0, 0, 1, 1]], [0], [0]),
        ([[0, 0, 1, 1], [2, 2, 3, 3]], [0, 0], [1, 1]),
        ([[0, 0, 1, 1], [1, 1, 2, 2]], [0, 0], [2, 2]),  # a corner
        ([[1, 1, 2, 2], [0, 0, 1, 1]], [0, 0], [2, 2]),
        ([[0, 2, 3, 3], [1, 0, 2, 2]], [0, 0], [2, 2]),  # an edge
        ([[0, 0, 1, 1], [0, 2, 1, 3]], [0, 0], [1, 1]),  # one above the other
        ([[0, 0, 1, 1], [0, 0, 1, 1]], [0, 1], [0, 0]),  # of two classes
        ([[0, 0, 1, 1], [5, 5, 6, 6], [0, 0, 9, 1]], [0, 0, 0], [2, 1, 2]),  # not the next but the one after
    ],
)
def test_objects_with_others_by_hand(boxes: list[list[float]], pair: list[int], expected: list[int]) -> None:
    rows = torch.tensor(boxes, dtype=torch.double).reshape(-1, 4)
    assert adjacency(rows, torch.tensor(pair, dtype=torch.long)).tolist() == expected


@st.composite
def truths(draw: st.DrawFn) -> Truth:
    objects = []
    for _ in range(draw(st.integers(0, 4))):
        boxes = draw(box_sets(high=6))
        n = len(boxes)
        labels = torch.tensor(draw(st.lists(st.integers(0, 2), min_size=n, max_size=n)), dtype=torch.long)
        marks = torch.tensor(draw(st.lists(st.integers(0, 7), min_size=n, max_size=n)), dtype=torch.long)
        objects.append(Objects(boxes, labels, marks == 6, marks == 7))  # most count
    return truth(*objects)


@settings(deadline=None, max_examples=50)
@given(truths(), st.integers(1, 4))
def test_objects_match_loops_whatever_the_chunk(known: Truth, chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stats, "STATS_CHUNK", chunk)
        found = count_objects(known)
    for c in range(3):
        kept = [[b for b, o, d, w in rows(objects) if o == c and not d and not w] for objects in known.objects]
        assert found.objects[c] == sum(map(len, kept))
        assert found.pairs[c] == sum(bool(boxes) for boxes in kept)
        most = found.per_pair.shape[1]
        assert found.per_pair[c].tolist() == [sum(len(boxes) == n for boxes in kept) for n in range(1, most + 1)]
        kinds = [neighbours(i, boxes) for boxes in kept for i in range(len(boxes))]
        assert found.by_adjacency[c].tolist() == [kinds.count(k) for k in range(3)]
        shares = [(b[2] - b[0]) * (b[3] - b[1]) / 24**2 for boxes in kept for b in boxes]
        bins = [sum(share >= edge for edge in SIZE_EDGES) for share in shares]
        assert found.by_size[c].tolist() == [bins.count(k) for k in range(3)]
        assert found.difficult[c] == sum(o == c and d for objects in known.objects for _, o, d, _ in rows(objects))
        assert found.crowds[c] == sum(o == c and w for objects in known.objects for _, o, _, w in rows(objects))


def rows(objects: Objects) -> list[tuple[list[float], int, bool, bool]]:
    columns = (objects.boxes, objects.labels, objects.difficult, objects.crowd)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def neighbours(index: int, boxes: list[list[float]]) -> int:
    """0 alone, 1 apart, 2 touching."""
    a = boxes[index]
    others = boxes[:index] + boxes[index + 1 :]
    touching = any(a[0] <= b[2] and b[0] <= a[2] and a[1] <= b[3] and b[1] <= a[3] for b in others)
    return 2 if touching else 1 if others else 0


# ---------------------------------------------------------------- numbers for programs


@pytest.mark.parametrize("known", [None, truth(), truth(Objects.of([[0, 0, 2, 2]] * 2, [0, 0]))])
def test_json_has_every_number_and_no_nan(known: Truth | None) -> None:
    report = json.loads(json.dumps(to_json(count_dataset(tagged([[1, 0, 0]]), known)), allow_nan=False))
    assert report["tags"]["per_class"] == [1, 0, 0]
    assert report["sizes"] == {"sizes": [[10, 20]], "counts": [1]}
    assert (report["objects"] is None) == (known is None)
    if known is not None and len(known):
        assert report["objects"]["total"] == {"objects": 2, "pairs": 1, "missed": 1, "missed_share": 0.5}
