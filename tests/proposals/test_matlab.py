"""MATLAB files of proposals: selective search, MCG and COB, EdgeBoxes; and broken ones."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import scipy.io
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp
from proposal_files import (
    BOXES,
    SCORES,
    assert_all,
    cells,
    everything,
    matlab,
    mcg_folder,
    save_mat,
    selective_search_mat,
    xywh,
)

from tag2box.errors import UserError
from tag2box.proposals.importers.matlab import read_mat
from tag2box.proposals.importers.proposal_files import proposal_format


def test_an_empty_list_of_images(tmp_path: Path) -> None:
    path = save_mat(tmp_path / "none.mat", boxes=cells([]), images=cells([]))
    assert everything(path) == {}


@pytest.mark.parametrize("packed", [False, True])
def test_selective_search(packed: bool, tmp_path: Path) -> None:
    path = selective_search_mat(tmp_path / "voc.mat", packed=packed)
    assert proposal_format(path, None)[0] == "selective-search"
    assert_all(everything(path), has_scores=False)


def test_cells_with_scores_and_images_in_a_column(tmp_path: Path) -> None:
    variables = {"boxes": cells([matlab(b) for b in BOXES.values()]).T, "images": cells(list(BOXES)).T}
    path = save_mat(tmp_path / "voc.mat", boxScores=cells(list(SCORES.values())), **variables)
    assert_all(everything(path), has_scores=True)


@pytest.mark.parametrize(
    "images",
    [np.array(list(BOXES)), cells([5.0, 7.0, 9.0]), np.array([[5, 7, 9]], np.uint16)],
    ids=["rows of characters", "cells of numbers", "numbers"],
)
def test_ids_as_they_come(images: np.ndarray, tmp_path: Path) -> None:
    path = save_mat(tmp_path / "voc.mat", boxes=cells([matlab(b) for b in BOXES.values()]), images=images)
    assert [name.lstrip("0") for name in everything(path)] == ["5", "7", "9"]


def test_boxes_stored_as_small_whole_numbers(tmp_path: Path) -> None:
    boxes = cells([matlab(b).astype(np.uint8) for b in BOXES.values()])
    assert_all(everything(save_mat(tmp_path / "voc.mat", boxes=boxes, images=cells(list(BOXES)))), has_scores=False)


def test_a_folder_of_mcg(tmp_path: Path) -> None:
    folder = mcg_folder(tmp_path / "mcg")
    (folder / "readme.txt").write_text("not one of them")
    assert proposal_format(folder, None)[0] == "mcg"
    assert_all(everything(folder), has_scores=True)


def test_other_names_of_mcg(tmp_path: Path) -> None:
    for name, boxes in BOXES.items():
        save_mat(tmp_path / "cob" / f"{name}.mat", bboxes=matlab(boxes), bboxes_scores=SCORES[name])
    assert_all(everything(tmp_path / "cob"), has_scores=True)


def edge_rows(name: str) -> np.ndarray:
    return np.concatenate([xywh(BOXES[name], 1), SCORES[name][:, None]], axis=1)


def test_a_folder_of_edge_boxes(tmp_path: Path) -> None:
    for name in BOXES:
        save_mat(tmp_path / "eb" / f"{name}.mat", bbs=edge_rows(name))
    assert proposal_format(tmp_path / "eb", None)[0] == "edge-boxes"
    assert_all(everything(tmp_path / "eb"), has_scores=True)


def test_one_file_of_edge_boxes(tmp_path: Path) -> None:
    path = save_mat(tmp_path / "eb.mat", bbs=cells([edge_rows(name) for name in BOXES]), images=cells(list(BOXES)))
    assert_all(everything(path), has_scores=True)


def test_a_single_image(tmp_path: Path) -> None:
    found = everything(save_mat(tmp_path / "000009.mat", boxes=matlab(BOXES["000009"]), scores=SCORES["000009"]))
    assert list(found) == ["000009"]
    np.testing.assert_array_equal(found["000009"][0], BOXES["000009"])


def test_images_of_a_folder_are_opened_one_by_one(tmp_path: Path) -> None:
    folder = mcg_folder(tmp_path / "mcg")
    (folder / "000007.mat").write_bytes(b"broken")
    with pytest.raises(UserError, match=r"000007\.mat"):
        everything(folder)


# ---------------------------------------------------------------- the file format, against an independent writer


@settings(max_examples=30, deadline=None)
@given(
    array=hnp.arrays(
        st.sampled_from(["f8", "f4", "u1", "u2", "i4", "i8", "u8"]),
        hnp.array_shapes(min_dims=2, max_dims=3, min_side=0, max_side=5),
    ),
    packed=st.booleans(),
    name=st.sampled_from(["b", "abcd", "boxes", "a_long_name_of_a_variable"]),
)
def test_numbers_are_those_that_scipy_wrote(
    array: np.ndarray, packed: bool, name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = save_mat(tmp_path_factory.getbasetemp() / "numbers.mat", packed=packed, **{name: array, "other": "text"})
    found = read_mat(path)
    assert set(found) == {name, "other"}
    np.testing.assert_array_equal(found[name].numbers(), scipy.io.loadmat(path)[name])


@settings(max_examples=30, deadline=None)
@given(
    texts=st.lists(st.text(st.characters(min_codepoint=33, max_codepoint=0x2FF), min_size=1, max_size=9), max_size=5)
)
def test_texts_are_those_that_scipy_wrote(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = save_mat(tmp_path_factory.getbasetemp() / "texts.mat", images=cells(texts))
    assert list(read_mat(path)["images"].texts()) == [text.strip() for text in texts]


# ---------------------------------------------------------------- broken and hostile

HEADER = b"MATLAB 5.0 MAT-file".ljust(124) + b"\x00\x01IM"


def element(kind: int, body: bytes, count: int | None = None) -> bytes:
    return struct.pack("<II", kind, len(body) if count is None else count) + body + b"\0" * (-len(body) % 8)


def matrix(name: bytes, kind: int, shape: tuple[int, ...], body: bytes) -> bytes:
    flags = element(6, struct.pack("<II", kind, 0))
    return element(14, flags + element(5, struct.pack(f"<{len(shape)}i", *shape)) + element(1, name) + body)


def boxes_file(kind: int, shape: tuple[int, ...], body: bytes) -> bytes:
    return HEADER + matrix(b"boxes", kind, shape, body)


def packed(content: bytes) -> bytes:
    squeezed = zlib.compress(content)
    return HEADER + struct.pack("<II", 15, len(squeezed)) + squeezed


def deep(levels: int) -> bytes:
    inner = b""
    for _ in range(levels):
        inner = matrix(b"", 1, (1, 1), inner)
    return HEADER + matrix(b"boxes", 1, (1, 1), inner) + matrix(b"images", 1, (1, 1), inner)


EIGHT = element(9, np.arange(8.0).tobytes())
BROKEN: list[tuple[str, bytes, str]] = [
    ("nothing", b"", "version 5 to 7.2"),
    ("text", b"hello", "version 5 to 7.2"),
    ("no variables", HEADER, "no variable boxes"),
    ("MATLAB 7.3", b"MATLAB 7.3 MAT-file, Platform".ljust(124) + b"\x00\x02IM" + b"\0" * 384 + b"\x89HDF", "-v7"),
    ("HDF5", b"\x89HDF\r\n\x1a\n" + b"\0" * 600, "-v7"),
    ("cut in a tag", HEADER + b"\x0e\0\0", "ends too early"),
    ("cut in a body", HEADER + element(14, b"abcd", 1 << 30), "ends too early"),
    ("a variable without parts", HEADER + element(14, element(6, b"\0" * 8)), "without class"),
    ("a negative side", boxes_file(6, (-1, 4), EIGHT), "shape"),
    ("one side", boxes_file(6, (8,), EIGHT), "shape"),
    ("a thousand sides", boxes_file(6, (1,) * 1000, EIGHT), "shape"),
    ("claims a billion rows", boxes_file(6, (1 << 30, 4), EIGHT), "damaged"),
    ("claims a billion cells", boxes_file(1, (1 << 30, 1), b"") + matrix(b"images", 1, (0, 0), b""), "images in so"),
    ("fewer cells", boxes_file(1, (3, 1), b"") + matrix(b"images", 1, (0, 0), b""), "0 cells or more"),
    ("more cells", boxes_file(1, (0, 0), element(14, b"") * 9) + matrix(b"images", 1, (0, 0), b""), "1 cells or more"),
    ("claims a billion ids", boxes_file(1, (0, 0), b"") + matrix(b"images", 1, (1 << 30, 1), b""), "images in so"),
    ("a billion numeric ids", boxes_file(1, (0, 0), b"") + matrix(b"images", 6, (1 << 30, 1), EIGHT), "images in so"),
    ("a billion rows of text", boxes_file(1, (0, 0), b"") + matrix(b"images", 4, (1 << 30, 0), element(16, b"")),
     "more text than ids"),
    ("numbers of no type", boxes_file(6, (2, 4), element(99, b"\0" * 64)), "damaged"),
    ("no numbers", boxes_file(6, (2, 4), b""), "damaged"),
    ("a struct", boxes_file(2, (1, 1), b""), "expected numbers"),
    ("an object", boxes_file(3, (1, 1), b""), "expected numbers"),
    ("sparse", boxes_file(5, (2, 4), EIGHT), "expected numbers"),
    ("a function", boxes_file(16, (1, 1), b""), "expected numbers"),
    ("text for boxes", boxes_file(4, (1, 4), element(16, b"abcd")), "expected numbers"),
    ("three columns", boxes_file(6, (2, 3), element(9, b"\0" * 48)), "four numbers"),
    ("not a number", boxes_file(6, (1, 4), element(9, np.array([1, 2, np.nan, 4]).tobytes())), "finite"),
    ("infinite", boxes_file(6, (1, 4), element(9, np.array([1, 2, np.inf, 4]).tobytes())), "finite"),
    ("not packed", HEADER + struct.pack("<II", 15, 5) + b"hello", "not readable"),
    ("packed and cut off", packed(matrix(b"boxes", 6, (2, 4), EIGHT))[:-9], "not readable"),
    ("cells without end", deep(100), "expected"),
    ("texts that are not text", HEADER + matrix(b"boxes", 1, (0, 0), b"")
     + matrix(b"images", 4, (1, 2), element(16, b"\xff\xfe")), "damaged"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "reason"), [row[1:] for row in BROKEN], ids=[row[0] for row in BROKEN])
def test_broken_files_are_refused_in_one_line(content: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "file.mat"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        everything(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


WRONG: list[tuple[str, Callable[[Path], Path], str | None, str]] = [
    ("no boxes", lambda p: save_mat(p, images=cells(["a"])), None, "no variable boxes or bboxes (there is: images)"),
    ("no images", lambda p: save_mat(p, boxes=cells([np.ones((1, 4))])), None, "no variable images"),
    ("fewer images", lambda p: save_mat(p, boxes=cells([np.ones((1, 4))] * 2), images=cells(["a"])), None, "1 images"),
    ("fewer scores", lambda p: selective_search_mat(p, boxScores=cells([np.ones(1)])), None, "1 cells of scores"),
    ("other scores", lambda p: save_mat(p, boxes=np.ones((2, 4)), scores=np.ones(3)), None, "3 scores"),
    ("no number", lambda p: save_mat(p, boxes=np.ones((1, 4)), scores=np.array([np.nan])), None, "scores"),
    ("empty id", lambda p: save_mat(p, boxes=cells([np.ones((1, 4))]), images=cells([""])), None, "expected"),
    ("wrong format", lambda p: save_mat(p, boxes=np.ones((1, 4))), "pkl", "pickle"),
]  # fmt: skip


@pytest.mark.parametrize(("write", "form", "reason"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
def test_wrong_content_is_refused_in_one_line(
    write: Callable[[Path], Path], form: str | None, reason: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "file.mat")
    with pytest.raises(UserError) as caught:
        everything(path, form)
    assert str(caught.value).startswith(f"{path}: ")
    assert reason in str(caught.value)


@pytest.mark.parametrize("count", [1, 40])
def test_a_packed_bomb_is_not_unpacked(count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is that of the whole file: many variables of a tenth of it are refused, too."""
    variables = {f"x{number}": np.zeros((100_000 // count, 4)) for number in range(count - 1)}
    path = save_mat(tmp_path / "a.mat", boxes=np.zeros((100_000 // count, 4)), **variables)
    assert len(everything(path)["a"][0]) == 100_000 // count
    monkeypatch.setattr("tag2box.proposals.importers.validate._MAX_EXTRA", 1 << 20)
    with pytest.raises(UserError, match="far larger than any boxes"):
        everything(path)


def test_cells_without_end_in_a_small_file_are_not_counted(tmp_path: Path) -> None:
    """30 million empty cells fit into 230 kB; to visit each would take minutes."""
    cells_of_nothing = element(14, b"") * 8_000_000
    path = tmp_path / "a.mat"
    inner = matrix(b"boxes", 1, (8_000_000, 1), cells_of_nothing)
    path.write_bytes(packed(inner) + matrix(b"images", 1, (0, 0), b""))
    assert path.stat().st_size < 100_000
    with pytest.raises(UserError, match="8,000,000 images in so small a file"):
        everything(path)


def test_more_boxes_than_any_image_has(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="more than 200,000 boxes in one image"):
        everything(save_mat(tmp_path / "a.mat", boxes=np.zeros((300_000, 4), np.uint8)))


def test_a_pipe_in_place_of_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.mat")
    with pytest.raises(UserError, match=r"a\.mat: not readable \(a device or a pipe"):
        everything(tmp_path / "a.mat")


def test_a_folder_without_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no \.mat files"):
        everything(tmp_path)


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_bytes_changed_at_random_never_raise_anything_else(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = selective_search_mat(tmp_path_factory.getbasetemp() / "random.mat", packed=False)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(120, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(120, len(content)))])
    try:
        everything(path)
    except UserError as error:
        assert "\n" not in str(error)
