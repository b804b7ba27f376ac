"""Shared types: refuse inconsistent fields, and split and index as documented."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st

from tag2box.annotations import Detections, Objects, Photo, TaggedPhotos, Truth
from tag2box.types import Batch, Exemplars, Proposals, PseudoBoxes

PHOTO = Photo("a", Path("a.jpg"), 4, 3)


@pytest.mark.parametrize(
    ("photos", "classes", "shape", "fits"),
    [
        ((), (), (0, 0), True), ((), ("cat",), (0, 1), True), ((PHOTO,), ("cat",), (1, 1), True),
        ((PHOTO,), ("cat",), (1, 2), False), ((PHOTO,), ("cat",), (2, 1), False), ((PHOTO,), (), (1,), False),
    ],
)  # fmt: skip
def test_tags_are_photos_by_classes(photos, classes, shape, fits):
    tags = torch.zeros(shape, dtype=torch.bool)
    if fits:
        assert len(TaggedPhotos(classes, photos, tags)) == len(photos)
    else:
        with pytest.raises(ValueError, match=f"{len(photos)} photos x {len(classes)} classes"):
            TaggedPhotos(classes, photos, tags)


@pytest.mark.parametrize(
    ("shape", "sizes", "fits"),
    [
        ((0, 4), (), True), ((0, 4), (0, 0), True), ((3, 4), (1, 0, 2), True), ((3, 4), (1, 1), False),
        ((3, 5), (3,), False), ((0,), (), False),
    ],
)  # fmt: skip
def test_proposals_add_up(shape, sizes, fits):
    if fits:
        assert Proposals(torch.zeros(shape), sizes).sizes == sizes
    else:
        with pytest.raises(ValueError, match="do not match sizes"):
            Proposals(torch.zeros(shape), sizes)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=5))
def test_split_spans_and_ids_agree(sizes):
    total = sum(sizes)
    proposals = Proposals(torch.zeros(total, 4), tuple(sizes))
    rows = torch.arange(total)
    assert [part.tolist() for part in proposals.split(rows)] == [list(span) for span in proposals.spans()]
    assert proposals.image_ids().tolist() == [i for i, size in enumerate(sizes) for _ in range(size)]
    assert [len(span) for span in proposals.spans()] == sizes


def test_a_batch_has_pixels_or_maps_never_both():
    none = Proposals(torch.zeros(0, 4), (0,))
    tags, images, maps = torch.zeros(1, 2, dtype=torch.bool), torch.zeros(1, 3, 8, 8), torch.zeros(0, 5, 2, 2)
    assert Batch(("a",), tags, none, images=images).maps is None
    assert Batch(("a",), tags, none, maps=maps).images is None
    with pytest.raises(ValueError, match="either images, trunks or maps"):
        Batch(("a",), tags, none)
    with pytest.raises(ValueError, match="either images, trunks or maps"):
        Batch(("a",), tags, none, images=images, maps=maps)


@pytest.mark.parametrize(
    ("boxes", "scores", "labels"),
    [((0, 5), (0,), (0,)), ((2, 4), (1,), (2,)), ((2, 4), (2,), (1,)), ((2, 4), (2, 1), (2,)), ((2,), (2,), (2,))],
)
def test_detections_agree_in_length(boxes, scores, labels):
    with pytest.raises(ValueError, match="disagree"):
        Detections(torch.zeros(boxes), torch.zeros(scores), torch.zeros(labels, dtype=torch.long))


def test_detections_are_indexed_by_mask_and_by_rows():
    found = Detections(torch.arange(12.0).reshape(3, 4), torch.tensor([0.1, 0.9, 0.5]), torch.tensor([0, 1, 2]))
    by_mask, by_rows = found[found.scores > 0.3], found[torch.tensor([2, 0])]
    assert (len(by_mask), by_mask.labels.tolist()) == (2, [1, 2])
    assert (by_rows.labels.tolist(), by_rows.boxes[0].tolist()) == ([2, 0], [8, 9, 10, 11])
    assert len(found[torch.zeros(3, dtype=torch.bool)]) == 0


def test_nothing_detected_is_still_detections():
    nothing = Detections.empty()
    assert (len(nothing), nothing.boxes.shape, nothing.labels.dtype) == (0, (0, 4), torch.long)
    assert len(nothing[nothing.scores > 0]) == 0


@pytest.mark.parametrize(("boxes", "labels"), [([], []), ([[0, 0, 1, 1]], [2]), ([[0, 0, 1, 1], [1, 2, 3, 4]], [0, 1])])
def test_plain_objects_are_neither_difficult_nor_crowds(boxes, labels):
    objects = Objects.of(boxes, labels)
    assert len(objects) == len(labels)
    assert objects.boxes.shape == (len(labels), 4)
    assert objects.labels.tolist() == labels
    assert not (objects.difficult | objects.crowd).any()


def test_lengths():
    none = torch.zeros(0, dtype=torch.long)
    assert len(Exemplars(torch.zeros(0, 3), none, torch.zeros(0), none)) == 0
    assert len(PseudoBoxes(torch.tensor([4, 7]), torch.tensor([0, 1]), torch.rand(2))) == 2
    assert len(Truth(("cat",), ("a", "b"), ((1, 1), (2, 2)), (Objects.of([], []), Objects.of([], [])))) == 2


@pytest.mark.parametrize("value", [PHOTO, Detections.empty(), Proposals(torch.zeros(0, 4), ())])
def test_they_are_frozen(value):
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, dataclasses.fields(value)[0].name, None)


@pytest.mark.parametrize(
    ("tags", "unsure", "fits"),
    [
        ([[]], None, True), ([[]], [[]], True), ([[1, 0]], [[0, 1]], True),
        ([[1, 0]], [[1, 0]], False), ([[1, 0]], [[0]], False),
    ],
)  # fmt: skip
def test_a_tag_is_true_false_or_unsure(tags, unsure, fits):
    rows = torch.tensor(tags, dtype=torch.bool)
    open_ = None if unsure is None else torch.tensor(unsure, dtype=torch.bool)
    classes = ("cat", "dog")[: rows.shape[1]]
    if fits:
        assert TaggedPhotos(classes, (PHOTO,), rows, open_).unsure is open_
    else:
        with pytest.raises(ValueError, match="unsure"):
            TaggedPhotos(classes, (PHOTO,), rows, open_)


@pytest.mark.parametrize("wanted", [[], [True], [False], [True, False, True]])
def test_a_part_keeps_photos_tags_and_doubts_together(wanted):
    count = len(wanted)
    photos = tuple(Photo(f"{i}", Path(f"{i}.jpg"), 4, 3) for i in range(count))
    tags = torch.arange(2 * count).reshape(count, 2) % 3 == 0
    for unsure in (None, ~tags):
        part = TaggedPhotos(("cat", "dog"), photos, tags, unsure).part(wanted)
        kept = [i for i, is_wanted in enumerate(wanted) if is_wanted]
        assert [photo.id for photo in part.photos] == [f"{i}" for i in kept]
        assert part.tags.tolist() == tags[kept].tolist()
        assert (part.unsure is None) == (unsure is None)
        assert part.unsure is None or part.unsure.tolist() == (~tags)[kept].tolist()
