"""Pickled dictionaries of proposals, as repositories of weakly supervised detectors share them."""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from proposal_files import BOXES, SCORES, assert_all, cells, everything

from tag2box.errors import UserError

INCLUSIVE = [boxes - [0, 0, 1, 1] for boxes in BOXES.values()]  # Detectron's: from 0, the last pixel included
IDS = list(BOXES)


def save(path: Path, value: object, protocol: int = 2) -> Path:
    path.write_bytes(pickle.dumps(value, protocol))
    return path


def test_an_empty_dictionary_of_lists(tmp_path: Path) -> None:
    assert everything(save(tmp_path / "a.pkl", {"boxes": [], "scores": [], "indexes": []})) == {}


SCORE_LISTS = list(SCORES.values())
SHARED: list[tuple[str, object, bool]] = [
    ("indexes", {"boxes": INCLUSIVE, "scores": SCORE_LISTS, "indexes": IDS}, True),
    ("ids", {"boxes": INCLUSIVE, "ids": IDS}, False),
    ("no scores", {"boxes": INCLUSIVE, "scores": None, "ids": IDS}, False),
    ("columns", {"boxes": INCLUSIVE, "scores": [s[:, None] for s in SCORE_LISTS], "ids": IDS}, True),
    ("five numbers", {"boxes": [np.c_[b, s] for b, s in zip(INCLUSIVE, SCORE_LISTS, strict=True)], "ids": IDS}, True),
    ("bytes", {b"boxes": INCLUSIVE, b"indexes": [name.encode() for name in IDS]}, False),
    ("arrays", {"boxes": cells(INCLUSIVE)[0], "scores": cells(SCORE_LISTS), "ids": np.array(IDS)}, True),
    ("tuples", OrderedDict(boxes=tuple(INCLUSIVE), ids=tuple(IDS)), False),
    ("small types", {"boxes": [b.astype(np.uint16) for b in INCLUSIVE], "ids": [np.str_(i) for i in IDS]}, False),
    ("lists", {"boxes": [b.tolist() for b in INCLUSIVE], "ids": IDS}, False),
]


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize(("value", "has_scores"), [row[1:] for row in SHARED], ids=[row[0] for row in SHARED])
def test_dictionaries_as_they_are_shared(value: object, has_scores: bool, protocol: int, tmp_path: Path) -> None:
    assert_all(everything(save(tmp_path / "a.pkl", value, protocol)), has_scores=has_scores)


@pytest.mark.parametrize(
    ("ids", "texts"),
    [
        ([5, 7, 9], ["5", "7", "9"]),
        ([np.int64(5), np.int32(7), 9.0], ["5", "7", "9"]),
        (np.array([5, 7, 9]), ["5", "7", "9"]),
        (["a/000005.jpg", "000007.jpg", " 9 "], ["a/000005.jpg", "000007.jpg", "9"]),
        ([np.array([5]), np.array(["7"]), np.array([[9]])], ["5", "7", "9"]),
    ],
)
def test_ids_as_they_come(ids: object, texts: list[str], tmp_path: Path) -> None:
    assert list(everything(save(tmp_path / "a.pkl", {"boxes": INCLUSIVE, "indexes": ids}))) == texts


def test_the_same_number_of_boxes_everywhere_may_be_one_array(tmp_path: Path) -> None:
    boxes = np.arange(24.0).reshape(2, 3, 4)
    found = everything(save(tmp_path / "a.pkl", {"boxes": boxes, "scores": np.ones((2, 3)), "ids": ["a", "b"]}, 4))
    np.testing.assert_array_equal(found["b"][0], boxes[1] + [0, 0, 1, 1])


ONE = np.ones((1, 4))
WRONG: list[tuple[str, object, str]] = [
    ("a list", [ONE], "a list"),
    ("nothing in it", {}, "no indexes or ids"),
    ("no ids", {"boxes": [ONE]}, "no indexes or ids or image_ids in it (there is: 'boxes')"),
    ("no boxes", {"ids": [1]}, "no boxes"),
    ("boxes as text", {"boxes": "abc", "ids": [1]}, "a str where a list was expected"),
    ("boxes by id", {"boxes": {1: ONE}, "ids": [1]}, "a dict where a list was expected"),
    ("fewer ids", {"boxes": [ONE, ONE], "ids": [1]}, "2 tables of boxes but 1 ids"),
    ("fewer scores", {"boxes": [ONE], "scores": [], "ids": [1]}, "0 tables of scores"),
    ("other scores", {"boxes": [ONE], "scores": [[1, 2]], "ids": [1]}, "1 boxes but 2 scores"),
    ("three numbers", {"boxes": [np.ones((1, 3))], "ids": [1]}, "four numbers"),
    ("a line of numbers", {"boxes": [np.ones(4)], "ids": [1]}, "four numbers"),
    ("a cube", {"boxes": [np.ones((1, 4, 1))], "ids": [1]}, "four numbers"),
    ("ragged", {"boxes": [[[1, 2, 3, 4], [1]]], "ids": [1]}, "not numbers"),
    ("text in a box", {"boxes": [[["a", 2, 3, 4]]], "ids": [1]}, "not numbers"),
    ("objects", {"boxes": [np.array([[None, 1, 2, 3]], object)], "ids": [1]}, "not numbers"),
    ("complex", {"boxes": [ONE + 1j], "ids": [1]}, "not numbers"),
    ("not a number", {"boxes": [ONE * np.nan], "ids": [1]}, "not finite"),
    ("too large", {"boxes": [ONE * 1e300], "ids": [1]}, "not finite"),
    ("a huge number", {"boxes": [[[10**400, 1, 2, 3]]], "ids": [1]}, "not numbers"),
    ("a score that is none", {"boxes": [ONE], "scores": [[np.inf]], "ids": [1]}, "scores: row 0"),
    ("an id that is a list", {"boxes": [ONE], "ids": [[1]]}, "image id"),
    ("an id that is nothing", {"boxes": [ONE], "ids": [None]}, "image id"),
    ("an id that is half", {"boxes": [ONE], "ids": [1.5]}, "image id"),
    ("an id that is true", {"boxes": [ONE], "ids": [True]}, "image id"),
    ("an id of two lines", {"boxes": [ONE], "ids": ["a\nb"]}, "image id"),
    ("a name of two lines", {"a\nb": 1}, "no indexes or ids"),
    ("an id that is empty", {"boxes": [ONE], "ids": [" "]}, "image id"),
]


@pytest.mark.parametrize(("value", "reason"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
def test_wrong_content_is_refused_in_one_line(value: object, reason: str, tmp_path: Path) -> None:
    path = save(tmp_path / "a.pkl", value)
    with pytest.raises(UserError) as caught:
        everything(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_lists_that_share_lists_do_not_fill_the_memory(tmp_path: Path) -> None:
    table: object = [1.0]
    for _ in range(60):
        table = [table, table]
    with pytest.raises(UserError, match="not numbers"):
        everything(save(tmp_path / "a.pkl", {"boxes": [table], "ids": [1]}))


class Hostile:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (self.command,)


def test_a_hostile_file_is_refused_and_nothing_runs(tmp_path: Path) -> None:
    sentinel = tmp_path / "sentinel"
    path = save(tmp_path / "a.pkl", {"boxes": [Hostile(f"touch {sentinel}")], "ids": [1]})
    with pytest.raises(UserError, match=r"refers to \w+\.system; nothing was run"):
        everything(path)
    assert not sentinel.exists()
