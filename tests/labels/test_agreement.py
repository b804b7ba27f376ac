"""Merged label sets: tables, properties, a twin written with loops, and the command."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st
from PIL import Image

import tag2box
from strategies import box_sets
from tag2box.errors import UserError
from tag2box.labels.agreement import class_agreement, merge_class, merge_photo, merge_sets
from tag2box.labels.journal import Journal
from tag2box.labels.label_set import LabelSet
from tag2box.labels.labelled import LabelBox, LabelledPhoto, LabelledPhotos
from tag2box.labels.reviews import Action
from tag2box.ops.boxes import iou
from tag2box.storage import FileStamp
from tiny_world import call

A, NEAR_A, B, C = (0.0, 0.0, 10.0, 10.0), (0.0, 0.0, 10.0, 8.0), (20.0, 0.0, 30.0, 10.0), (40.0, 0.0, 50.0, 10.0)


def label(box: tuple[float, float, float, float], score: float = 0.5, *, doubtful: bool = False) -> LabelBox:
    why = "doubtful" if doubtful else "best of its tag"
    return LabelBox(box, "cat", score, is_doubtful=doubtful, why=why, source="label")


@pytest.mark.parametrize(
    ("sets", "expected"),
    [
        ([[], []], []),
        ([[label(A)], []], [(A, "best of its tag")]),
        ([[label(A)], [label(A)]], [(A, "best of its tag")]),
        ([[label(B)], [label(A)], [label(NEAR_A)]], [(A, "best of its tag"), (B, "doubtful")]),  # B is outvoted
        ([[label(A), label(B)], [label(A), label(B)]], [(A, "best of its tag"), (B, "further instance")]),
        (
            [[label(A), label(B)], [label(A), label(B)], [label(A), label(C)]],
            [(A, "best of its tag"), (B, "further instance"), (C, "doubtful")],
        ),
        ([[label(A), label(B, doubtful=True)], [label(A)], [label(A)]], [(A, "best of its tag")]),
        (
            [[label(A), label(B, doubtful=True)], [label(A), label(B, doubtful=True)], [label(A)]],
            [(A, "best of its tag"), (B, "doubtful")],
        ),
        ([[label(A), label((1.0, 1.0, 4.0, 4.0))], [label(A)]], [(A, "best of its tag")]),  # nested
    ],
)
def test_boxes_and_reasons(sets, expected) -> None:
    merged = merge_class(sets)
    assert [(box.box, box.why) for box in merged] == expected
    assert all(box.is_doubtful == (box.why == "doubtful") for box in merged)
    assert [box.rank for box in merged] == list(range(1, len(merged) + 1))


@pytest.mark.parametrize(
    ("sets", "expected"),
    [
        ([[{"is_doubtful": True, "why": "unsure tag"}]] * 2, [(True, "unsure tag")]),
        ([[{"is_doubtful": True, "why": "unsure tag"}], []], []),
        ([[{"why": "untagged class"}]] * 2, [(False, "untagged class")]),
        ([[{"why": "untagged class"}], []], [(True, "doubtful")]),
    ],
)
def test_boxes_of_classes_that_are_no_tags_need_the_agreement_of_the_sets(sets, expected) -> None:
    boxes = [[replace(label(A), is_tag=False, **change) for change in own] for own in sets]
    assert [(box.is_doubtful, box.why) for box in merge_class(boxes)] == expected


def test_a_box_without_a_score_counts_as_certain() -> None:
    (best, *_) = merge_class([[label(A, 0.9)], [replace(label(B), score=None)]])
    assert best.box == B and best.score == 0.5


def test_the_score_is_the_mean_over_sets_times_the_overlap() -> None:
    (best,) = merge_class([[label(A, 0.6)], [label(NEAR_A, 0.5)], []])
    assert best.box == A and best.score == pytest.approx((0.6 + 0.8 * 0.5 + 0) / 3)


# ---------------------------------------------------------------- properties


@st.composite
def versions(draw: st.DrawFn) -> list[list[LabelBox]]:
    sets = []
    for _ in range(draw(st.integers(2, 4))):
        boxes = draw(box_sets(0, 4)).double().tolist()
        scores = draw(st.lists(st.floats(0.01, 1), min_size=len(boxes), max_size=len(boxes)))
        doubts = draw(st.lists(st.booleans(), min_size=len(boxes), max_size=len(boxes)))
        sets.append([label(tuple(b), s, doubtful=d) for b, s, d in zip(boxes, scores, doubts, strict=True)])
    return sets


@given(versions())
def test_there_is_a_label_if_and_only_if_a_set_has_one(sets) -> None:
    merged = merge_class(sets)
    has_label = any(not box.is_doubtful for own in sets for box in own)
    assert any(not box.is_doubtful for box in merged) == has_label
    assert {box.box for box in merged} <= {box.box for own in sets for box in own}


@given(versions())
def test_the_best_box_has_the_highest_score_of_a_loop_written_twin(sets) -> None:
    def overlap(a: LabelBox, b: LabelBox) -> float:
        return float(iou(torch.tensor([a.box], dtype=torch.float64), torch.tensor([b.box], dtype=torch.float64)))

    def score(box: LabelBox) -> float:
        total = 0.0
        for own in sets:
            best = 0.0
            for other in own:
                if not other.is_doubtful:
                    best = max(best, overlap(box, other) * other.score)
            total += best
        return total / len(sets)

    merged = merge_class(sets)
    scores = [score(box) for own in sets for box in own if not box.is_doubtful]
    if scores:
        assert merged[0].score == pytest.approx(max(scores), abs=1e-6)
    for box in merged:
        assert box.score == pytest.approx(score(box), abs=1e-6)


@given(versions())
def test_merging_equal_sets_changes_no_best_box(sets) -> None:
    own = merge_class([sets[0], sets[0]])
    again = merge_class([own, own])
    assert [(box.box, box.is_doubtful) for box in again] == [(box.box, box.is_doubtful) for box in own]


# ---------------------------------------------------------------- label sets


def photo(name: str, *boxes: LabelBox, reviewed: bool = False) -> LabelledPhoto:
    return LabelledPhoto(name, f"{name}.jpg", 60, 20, ("cat",), boxes, is_reviewed=reviewed)


def label_set(*photos: LabelledPhoto, classes: tuple[str, ...] = ("cat",)) -> LabelSet:
    return LabelSet(LabelledPhotos(Path("photos"), classes, photos))


def test_agreement_and_scores_by_class() -> None:
    sets = [
        label_set(photo("one", label(A)), photo("two", label(B))),
        label_set(photo("one", label(A)), photo("two", label(B))),
        label_set(photo("one", label(A)), photo("two", label(C))),
    ]
    found = class_agreement(sets)["cat"]
    assert found.photos == 2 and found.same == pytest.approx((1 + 0.5 + 0.5) / 3)
    assert found.scores == (0.5, 0.5, 0.5)
    assert class_agreement([label_set(photo("one")), label_set(photo("one"))])["cat"].photos == 0


def test_the_mean_score_is_that_of_the_best_labels_of_tags() -> None:
    content = label_set(
        photo("one", label(A, 0.2), label(B, 0.4), label(C, 0.9, doubtful=True)),
        photo("two", label(A, 0.6)),
        photo("three"),
        photo("four", label(A, 0.9), reviewed=True),
        replace(photo("five", label(A, 0.9)), tags=()),
    ).content
    assert content.best_scores() == {"cat": pytest.approx(0.5)}
    assert label_set().content.best_scores() == {"cat": None}


def test_a_reviewed_photo_keeps_its_boxes_and_does_not_count_as_agreement() -> None:
    reviewed = photo("one", label(C), reviewed=True)
    assert merge_photo([photo("one", label(A)), reviewed, photo("one", label(A))], ("cat",)) == reviewed
    assert class_agreement([label_set(reviewed), label_set(photo("one", label(A)))])["cat"].photos == 0


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        ([], "expected two label sets or more, got 0"),
        ([label_set()], "expected two label sets or more, got 1"),
        ([label_set(), label_set(classes=("dog",))], "class 1 is"),
        ([label_set(photo("one")), label_set(photo("two"))], "label set 2: has other photos"),
        ([label_set(photo("one")), label_set(replace(photo("one"), tags=()))], "one.jpg has other tags"),
        (
            [label_set(replace(photo("one"), stamp=FileStamp(1, 1, digest))) for digest in ("a" * 64, "b" * 64)],
            "one.jpg is another photo",
        ),
    ],
)
def test_only_sets_of_the_same_photos_are_merged(sets, says) -> None:
    with pytest.raises(UserError, match=says):
        merge_sets(sets)


# ---------------------------------------------------------------- the command


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    (tmp_path / "photos").mkdir()
    Image.new("RGB", (60, 20)).save(tmp_path / "photos" / "one.jpg")
    names = []
    for number, boxes in enumerate(([A], [A, B], [NEAR_A])):
        own = label_set(photo("one", *map(label, boxes)))
        names.append(tmp_path / f"labels-{number}")
        replace(own, content=replace(own.content, root=tmp_path / "photos"), run={"uses": "masks"}).write(names[-1])
    return names


def test_the_command_merges_and_shows_agreement(folders, tmp_path, monkeypatch, capsys) -> None:
    done = call(["merge", *map(str, folders), "--out", str(tmp_path / "merged")], monkeypatch, capsys)
    assert done.code == 0 and "agree" in done.out and "100" in done.out
    merged = LabelSet.open(tmp_path / "merged")
    merged.verify()
    assert [(box.box, box.why) for box in merged.content.photos[0].boxes] == [(A, "best of its tag"), (B, "doubtful")]
    assert merged.run["uses"] == "masks"
    assert [own["labels"] for own in merged.run["merged"]] == [str(folder) for folder in folders]  # type: ignore[attr-defined]


def test_reviews_are_kept(folders: list[Path], tmp_path: Path) -> None:
    with Journal(folders[1], LabelSet.open(folders[1])) as journal:
        journal.append("one", Action("done"), based_on=0, key="1")
    merged = tag2box.merge_labels(folders, tmp_path / "merged")
    assert merged.content.photos[0].is_reviewed and len(merged.content.photos[0].labels) == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["labels-0", "--out", "merged"], "expected two label sets or more"),
        (["labels-0", "labels-0", "--out", "merged"], "named twice"),
        (["labels-0", "nothing", "--out", "merged"], "no label set here"),
        (["labels-0", "labels-1", "--out", "labels-2"], "already holds a label set"),
    ],
)
def test_one_line_about_bad_input(folders, tmp_path, monkeypatch, capsys, arguments, says) -> None:
    monkeypatch.chdir(tmp_path)
    done = call(["merge", *arguments], monkeypatch, capsys)
    assert done.code != 0 and says in done.err and done.err.count("\n") == 1 and not (tmp_path / "merged").exists()
