"""Proposals in .npz and JSON, the conventions of boxes, and how formats are recognised."""

from __future__ import annotations

import io
import json
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from proposal_files import BOXES, SCORES, assert_all, everything, in_convention, xywh

from strategies import box_sets
from tag2box.errors import UserError
from tag2box.extend import PROPOSAL_FILE_FORMATS, find_part
from tag2box.proposals.importers.proposal_files import COCO_PROPOSALS, proposal_format
from tag2box.proposals.importers.validate import ORDERS, BoxConvention, ConventionOverride

IDS = list(BOXES)
COUNTS = [len(boxes) for boxes in BOXES.values()]
ALL_BOXES, ALL_SCORES = np.concatenate(list(BOXES.values())), np.concatenate(list(SCORES.values()))


# ---------------------------------------------------------------- conventions


@settings(max_examples=50)
@given(boxes=box_sets(), order=st.sampled_from(ORDERS), first=st.sampled_from([0, 1]), inside=st.booleans())
def test_every_convention_comes_back(boxes: object, order: str, first: int, inside: bool) -> None:
    last = "included" if inside else "excluded"
    convention = BoxConvention(boxes_are=order, first_pixel=first, last_pixel=last)
    ours = boxes.double().numpy()
    np.testing.assert_array_equal(convention.corners(in_convention(ours, convention)), ours)


@pytest.mark.parametrize("form", PROPOSAL_FILE_FORMATS)
def test_options_override_the_convention_of_every_format(form: str) -> None:
    usual = find_part("proposal file format", form).convention
    assert ConventionOverride().over(usual) == usual
    other = ConventionOverride(boxes_are="xyxy", first_pixel=1 - usual.first_pixel, last_pixel="excluded").over(usual)
    assert (other.boxes_are, other.first_pixel, other.last_pixel) == ("xyxy", 1 - usual.first_pixel, "excluded")


def test_a_last_pixel_of_widths_is_refused() -> None:
    with pytest.raises(UserError, match="--last-pixel has no meaning"):
        ConventionOverride(last_pixel="included").over(COCO_PROPOSALS.convention)


# ---------------------------------------------------------------- .npz


def save_npz(path: Path, **arrays: object) -> Path:
    np.savez_compressed(path, **arrays)
    return path


def test_an_npz_of_no_images(tmp_path: Path) -> None:
    path = save_npz(tmp_path / "a.npz", ids=np.zeros(0, "U1"), counts=np.zeros(0, int), boxes=np.zeros((0, 4)))
    assert everything(path) == {}


@pytest.mark.parametrize("has_scores", [False, True])
def test_one_table_for_all_images(has_scores: bool, tmp_path: Path) -> None:
    more = {"scores": ALL_SCORES} if has_scores else {}
    path = save_npz(tmp_path / "a.npz", ids=np.array(IDS), counts=np.array(COUNTS), boxes=ALL_BOXES, **more)
    assert_all(everything(path), has_scores=has_scores)


def test_one_array_an_image(tmp_path: Path) -> None:
    arrays = {name: np.c_[boxes, SCORES[name]] for name, boxes in BOXES.items()}
    assert_all(everything(save_npz(tmp_path / "a.npz", **arrays)), has_scores=True)
    assert_all(everything(save_npz(tmp_path / "b.npz", **BOXES)), has_scores=False)


def npy(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def save_zip(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


HONEST = npy(np.ones((2, 4)))
CLAIMS = HONEST.replace(b"(2, 4), }" + b" " * 9, b"(2000000000, 4), }")
TABLE = {"ids": np.array(["a"]), "counts": np.array([1]), "boxes": np.ones((1, 4))}
NPZ: list[tuple[str, Callable[[Path], Path], str]] = [
    ("no arrays", lambda p: save_zip(p, {}), "holds no arrays"),
    ("no zip", lambda p: p.write_bytes(b"hello") and p, "not readable as .npz"),  # type: ignore[return-value]
    ("a lone array", lambda p: p.write_bytes(HONEST) and p, "not readable as .npz"),  # type: ignore[return-value]
    ("cut off", lambda p: p.write_bytes(save_npz(p, **TABLE).read_bytes()[:-30]) and p, "not readable as .npz"),  # type: ignore[return-value]
    ("objects", lambda p: save_npz(p, **TABLE | {"ids": np.array(["a", None], object)}), "Python objects"),
    ("an image of objects", lambda p: save_npz(p, a=np.array([[1, 2, 3, None]], object)), "Python objects"),
    ("a header that lies", lambda p: save_zip(p, {"a.npy": CLAIMS}), "its header declares (2000000000, 4)"),
    ("no numpy array", lambda p: save_zip(p, {"a.npy": b"hello"}), "not readable"),
    ("an array cut off", lambda p: save_zip(p, {"a.npy": HONEST[:-9]}), "expected 64 bytes"),
    ("no counts", lambda p: save_npz(p, ids=TABLE["ids"], boxes=TABLE["boxes"]), "no array counts"),
    ("halves", lambda p: save_npz(p, **TABLE | {"counts": np.array([1.5])}), "whole numbers"),
    ("negative counts", lambda p: save_npz(p, **TABLE | {"counts": np.array([-1])}), "from 0"),
    ("fewer counts", lambda p: save_npz(p, **TABLE | {"counts": np.array([1, 0])}), "1 ids but 2 counts"),
    ("more than there are", lambda p: save_npz(p, **TABLE | {"counts": np.array([2])}), "1 boxes but 2 by its counts"),
    ("counts that wrap around", lambda p: save_npz(p, ids=np.array(["a", "b"]), boxes=np.ones((1, 4)),
     counts=np.array([2**63, 2**63 + 1], np.uint64)), "by its counts"),
    ("fewer scores", lambda p: save_npz(p, **TABLE, scores=np.ones(2)), "2 scores"),
    ("not a number", lambda p: save_npz(p, **TABLE | {"boxes": np.full((1, 4), np.nan)}), "not finite"),
    ("text for boxes", lambda p: save_npz(p, a=np.array([["1", "2", "3", "4"]])), "not numbers"),
    ("six numbers", lambda p: save_npz(p, a=np.ones((1, 6))), "four numbers"),
    ("a name of two lines", lambda p: save_npz(p, **{"a\nb": np.ones((1, 4))}), "image id"),
    ("times for ids", lambda p: save_npz(p, **TABLE | {"ids": np.array(["2020-01-01"], "M8[D]")}), "image id"),
]  # fmt: skip


@pytest.mark.parametrize(("write", "reason"), [row[1:] for row in NPZ], ids=[row[0] for row in NPZ])
def test_broken_npz_files_are_refused_in_one_line(write: Callable[[Path], Path], reason: str, tmp_path: Path) -> None:
    refused(write(tmp_path / "a.npz"), reason)


@pytest.mark.parametrize("count", [1, 40])
def test_a_zip_bomb_is_refused_before_it_is_unpacked(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_npz(tmp_path / "a.npz", **{f"{i}": np.zeros((100_000 // count, 4)) for i in range(count)})
    assert len(everything(path)["0"][0]) == 100_000 // count
    monkeypatch.setattr("tag2box.proposals.importers.validate._MAX_EXTRA", 1 << 20)
    refused(path, "unpacks to far more than any boxes")


def test_no_more_is_unpacked_than_an_archive_declares(tmp_path: Path) -> None:
    """The array is 40 MB; header and archive agree on another size."""
    header = header_of("{'descr': '|u1', 'fortran_order': False, 'shape': (10000000, 4), }")
    path = save_zip(tmp_path / "a.npz", {"a.npy": header + bytes(40_000_000)})
    true, content = struct.pack("<I", len(header) + 40_000_000), path.read_bytes()
    assert content.count(true) == 2  # of the member and in the directory
    path.write_bytes(content.replace(true, struct.pack("<I", len(header) + 400)))
    refused(path, "Bad CRC-32")


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_compression_that_unpacks_without_limit_is_refused(method: int, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w", method) as archive:
        archive.writestr("a.npy", HONEST)
    refused(tmp_path / "a.npz", f"compression method {method}")


def test_more_ids_than_images_fit_into_the_file(tmp_path: Path) -> None:
    ids = np.zeros(2_000_000, np.uint8)
    refused(save_npz(tmp_path / "a.npz", **TABLE | {"ids": ids}), "images in so small a file")
    refused(save_npz(tmp_path / "a.npz", **TABLE | {"counts": ids}), "images in so small a file")


def test_a_pipe_in_place_of_an_archive(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.npz")
    refused(tmp_path / "a.npz", "not readable (a device or a pipe")


def header_of(text: str) -> bytes:
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode("latin-1")


HEADERS = [
    "", "(", "'", "{" * 5000, "(" * 9000, "{[]: 1}", "\x00", "\xff", " \n  a\n b", "1if 1else", "__import__('os')",
    "{'descr': '<f8', 'fortran_order': False, 'shape': (1, 4), ",
    "{'descr': '<f8', 'fortran_order': False, 'shape': (" + "9" * 5000 + ", 4), }",
    "{'descr': '<f8', 'fortran_order': False, 'shape': (-1, -4), }",
    "{'descr': '<f8', 'fortran_order': False, 'shape': (" + "1, " * 100 + "), }",
    "{'descr': 'O', 'fortran_order': False, 'shape': (1, 4), }",
    "{'descr': '(99999,99999)f8', 'fortran_order': False, 'shape': (1,), }",
    "{'descr': '" + "f8," * 3000 + "', 'fortran_order': False, 'shape': (1,), }",
    "{'descr': [('a', [('b', 'f8')])], 'fortran_order': False, 'shape': (1,), }",
]  # fmt: skip


@pytest.mark.parametrize("text", HEADERS, ids=range(len(HEADERS)))
def test_hostile_headers_of_arrays_are_one_line(text: str, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    refused(save_zip(tmp_path / "a.npz", {"a.npy": header_of(text) + bytes(64)}), "; expected ")
    # files that earlier tests left open are reported whenever the garbage collector finds them
    assert not [warning for warning in recwarn.list if not issubclass(warning.category, ResourceWarning)]


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_archives_changed_at_random_never_raise_anything_else(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = save_npz(tmp_path_factory.getbasetemp() / "random.npz", **TABLE)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        everything(path)
    except UserError as error:
        assert "\n" not in str(error)


def refused(path: Path, reason: str) -> None:
    with pytest.raises(UserError) as caught:
        everything(path)
    assert str(caught.value).startswith(f"{path}")
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------- JSON


def save_json(path: Path, value: object) -> Path:
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def coco_rows(*, has_scores: bool) -> list[dict[str, object]]:
    return [
        {"image_id": name, "category_id": 1, "bbox": row, **({"score": score} if has_scores else {})}
        for name, boxes in BOXES.items()
        for row, score in zip(xywh(boxes, 0).tolist(), SCORES[name].tolist(), strict=True)
    ]


@pytest.mark.parametrize("value", [[], {}])
def test_json_of_no_images(value: object, tmp_path: Path) -> None:
    assert everything(save_json(tmp_path / "a.json", value)) == {}


@pytest.mark.parametrize("has_scores", [False, True])
def test_coco_results(has_scores: bool, tmp_path: Path) -> None:
    path = save_json(tmp_path / "a.json", "\n " + json.dumps(coco_rows(has_scores=has_scores)))
    assert proposal_format(path, None)[0] == "coco"
    found = everything(path)
    assert_all({name: found.get(name, (np.zeros((0, 4)), None)) for name in BOXES}, has_scores=has_scores)


@pytest.mark.parametrize("has_scores", [False, True])
def test_boxes_by_image(has_scores: bool, tmp_path: Path) -> None:
    tables = {name: np.c_[b, SCORES[name]] if has_scores else b for name, b in BOXES.items()}
    path = save_json(tmp_path / "a.json", {name: table.tolist() for name, table in tables.items()})
    assert proposal_format(path, None)[0] == "json"
    assert_all(everything(path), has_scores=has_scores)


JSON: list[tuple[str, object, str]] = [
    ("nothing", "", "not readable as JSON"),
    ("cut off", '{"a": [[1, 2', "not readable as JSON"),
    ("a number", 5, "expected an object"),
    ("not UTF-8", "[\ud800", "not readable as JSON"),
    ("deep", "[" * 100_000, "not readable as JSON"),
    ("deep objects", '{"a":' * 100_000, "not readable as JSON"),
    ("ten thousand digits", '{"a": [[' + "9" * 10_000 + ", 1, 2, 3]]}", "not readable as JSON"),
    ("NaN", '{"a": [[NaN, 1, 2, 3]]}', "not finite"),
    ("infinite", '{"a": [[1e400, 1, 2, 3]]}', "not finite"),
    ("a box that is null", {"a": [None]}, "four numbers per box"),
    ("boxes that are null", {"a": None}, "expected a list of boxes"),
    ("text", {"a": [["1", "2", "3", "4"]]}, "not numbers"),
    ("true", {"a": [[True, 1, 2, 3]]}, "not numbers"),
    ("three numbers", {"a": [[1, 2, 3]]}, "four numbers per box"),
    ("a score for some", {"a": [[1, 2, 3, 4], [1, 2, 3, 4, 5]]}, "the same for all"),
    ("an id of two lines", {"a\nb": []}, "image id"),
    ("an empty id", {" ": []}, "image id"),
    ("rows that are no objects", [5], "expected image_id and bbox"),
    ("no image", [{"bbox": [1, 2, 3, 4]}], "expected image_id and bbox"),
    ("no box", [{"image_id": 1}], "expected image_id and bbox"),
    ("a box of text", [{"image_id": 1, "bbox": "abcd"}], "expected image_id and bbox"),
    ("a box of lists", [{"image_id": 1, "bbox": [[1], 2, 3, 4]}], "not numbers"),
    ("an image that is a list", [{"image_id": [1], "bbox": [1, 2, 3, 4]}], "image id"),
    ("a score of some", [{"image_id": 1, "bbox": [1, 2, 3, 4]}, {"image_id": 1, "bbox": [1, 2, 3, 4], "score": 1}],
     "1 of 2 boxes have a score"),
    ("a score of null", [{"image_id": 1, "bbox": [1, 2, 3, 4], "score": None}], "scores"),
    ("a huge id", [{"image_id": 10**30, "bbox": [1, 2, 3, 4]}], "image id"),
]  # fmt: skip


@pytest.mark.parametrize(("value", "reason"), [row[1:] for row in JSON], ids=[row[0] for row in JSON])
def test_broken_json_files_are_refused_in_one_line(value: object, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    text = value if isinstance(value, str) else json.dumps(value)
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    refused(path, reason)


# ---------------------------------------------------------------- recognising


def test_formats_that_cannot_be_known(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    for path, name, reason in [
        (tmp_path / "a.txt", None, "name it with --format"),
        (tmp_path / "none.pkl", None, "no such file or folder"),
        (tmp_path / "a.txt", "mgc", "did you mean mcg"),
    ]:
        with pytest.raises(UserError, match=reason):
            proposal_format(path, name)
