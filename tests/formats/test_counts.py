"""Counts of objects: given in tables and COCO files, or taken from boxes; and what of boxes gets through."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st
from PIL import Image

from pages import DOCS, blocks
from tag2box.annotations import Photo, TaggedPhotos
from tag2box.data.reviewed_boxes import counts_from_boxes
from tag2box.errors import UserError
from tag2box.formats.datasets import read_photos, read_tagged
from tag2box.formats.listing import DataSource, Fault, counts_of_tags, parse_counts, refuse

PHOTOS = ("a.jpg", "b.jpg", "c.jpg")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in PHOTOS:
        Image.new("RGB", (40, 30)).save(tmp_path / name)
    return tmp_path


def table(folder: Path, *lines: str) -> DataSource:
    (folder / "tags.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return DataSource(path=folder / "tags.csv")


# ---------------------------------------------------------------- cells


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("", ()), (" ; ", ()), ("dog:2", (("dog", 2),)), (" dog : 2 |car:10;", (("dog", 2), ("car", 10))),
        ("red: fox:003", (("red: fox", 3),)), ("dog:999999", (("dog", 999_999),)),
    ],
)  # fmt: skip
def test_a_cell_is_class_and_number(text: str, counts: tuple[tuple[str, int], ...]) -> None:
    assert parse_counts(text) == counts


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("3", "expected class:number, like dog:2;car:1, got '3'"),
        ("dog", "got 'dog'"),
        (":3", "got ':3'"),
        ("dog:0", "a whole number of 1 or more after 'dog', got '0'"),
        ("dog:-1", "got '-1'"),
        ("dog:1.5", "got '1.5'"),
        ("dog:two", "got 'two'"),
        ("dog:٣", "got '٣'"),
        (f"dog:{'9' * 5000}", "got '9+'"),
    ],
)
def test_the_error_of_a_bad_cell_names_what_was_expected(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says) as error:
        parse_counts(text)
    assert len(str(error.value)) < 200


names = st.text(st.characters(codec="utf-8", exclude_characters=";|", exclude_categories=["Cc", "Cs", "Z"]), min_size=1)


@given(st.dictionaries(names, st.integers(1, 999_999), max_size=4))
def test_what_is_written_is_read_again(counts: dict[str, int]) -> None:
    assert parse_counts(";".join(f"{name}:{n}" for name, n in counts.items())) == tuple(counts.items())


def test_counts_of_unknown_classes_and_contradictions_are_reported_and_skipped() -> None:
    faults: list[Fault] = []
    counts = (("dog", 2), ("car", 1), ("dog", 2), ("dog", 3))
    assert counts_of_tags(counts, ["dog"], "tags.csv:4", faults.append) == (("dog", 2),)
    assert [fault.line for fault in faults] == [
        "tags.csv:4: counts: 'car' is counted and not tagged; tag it, or remove its count",
        "tags.csv:4: counts: 'dog' is counted twice, as 2 and 3; keep one",
    ]
    assert counts_of_tags((), [], "here", refuse) == ()


# ---------------------------------------------------------------- tables

FORMS = {
    "tags": ("image,tags,counts", "a.jpg,dog;car,dog:2", "b.jpg,car,", "c.jpg,,"),
    "one tag a row": ("image,counts,tag", "a.jpg,dog:2,dog", "a.jpg,,car", "b.jpg,,car", "c.jpg,,"),
    "a column a class": ("image,dog,Counts,car", "a.jpg,1,dog:2,1", "b.jpg,0,,1", "c.jpg,0,,0"),
}


@pytest.mark.parametrize("lines", FORMS.values(), ids=FORMS)
def test_every_form_of_table_may_count(folder: Path, lines: tuple[str, ...]) -> None:
    data = read_tagged(table(folder, *lines))
    column = [data.classes.index(name) for name in ("car", "dog")]
    assert data.tags[:, column].tolist() == [[True, True], [True, False], [False, False]]
    assert data.counts is not None and data.counts[:, column].tolist() == [[-1, 2], [-1, -1], [-1, -1]]


@pytest.mark.parametrize("lines", FORMS.values(), ids=FORMS)
def test_without_a_number_there_is_no_count(folder: Path, lines: tuple[str, ...]) -> None:
    assert read_tagged(table(folder, *(line.replace("dog:2", "") for line in lines))).counts is None
    assert len(read_photos(table(folder, *lines))) == 3


def test_counts_of_columns_that_are_not_selected_are_skipped(folder: Path) -> None:
    source = table(folder, "image,dog,car,counts", "a.jpg,1,1,dog:2;car:3")
    data = read_tagged(DataSource(path=source.path, classes=("car",)))
    assert data.counts is not None and data.counts.tolist() == [[3]]


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (("image,tags,counts", "a.jpg,dog,dog:0"), r"tags.csv:2: column 'counts': expected a whole number of 1"),
        (("image,tags,counts", "a.jpg,dog,", "b.jpg,dog,dog:x"), r"tags.csv:3: column 'counts': .* got 'x'"),
        (("image,tags,counts", "a.jpg,dog,3"), r"tags.csv:2: column 'counts': expected class:number"),
        (("image,tags,counts", "a.jpg,dog,car:1"), r"tags.csv:2: counts: 'car' is counted and not tagged"),
        (("image,dog,counts", "a.jpg,?,dog:1"), r"tags.csv:2: counts: 'dog' is counted and not tagged"),
        (("image,tag,counts", "a.jpg,dog,dog:1", "a.jpg,dog,dog:2"), r"tags.csv:2: counts: 'dog' is counted twice"),
        (("image,counts", "a.jpg,dog:1"), r"tags.csv:1: no column 'tags'"),
    ],
)
def test_mistakes_name_file_line_and_remedy(folder: Path, lines: tuple[str, ...], says: str) -> None:
    with pytest.raises(UserError, match=says) as error:
        read_tagged(table(folder, *lines))
    assert "\n" not in str(error.value)


# ---------------------------------------------------------------- COCO


def coco(folder: Path, *, counts: object = None, annotations: list[dict[str, object]] | None = None) -> DataSource:
    image: dict[str, object] = {"id": 1, "file_name": "a.jpg", "tags": ["dog", "car"], "width": 40, "height": 30}
    document: dict[str, object] = {
        "images": [image | ({} if counts is None else {"counts": counts}), {"id": 2, "file_name": "b.jpg"} | SIZE],
        "categories": [{"id": 1, "name": "dog"}, {"id": 2, "name": "car"}],
    }
    if annotations is not None:
        document["annotations"] = annotations
    (folder / "tags.json").write_text(json.dumps(document))
    return DataSource(path=folder / "tags.json")


SIZE = {"width": 40, "height": 30}


@pytest.mark.parametrize(
    ("counts", "wanted"),
    [(None, None), ({}, None), ({"dog": 2}, [2, -1]), ({"2": 3, "dog": 1}, [1, 3])],
)
def test_images_of_a_coco_file_may_count(folder: Path, counts: object, wanted: list[int] | None) -> None:
    data = read_tagged(coco(folder, counts=counts))
    assert (None if data.counts is None else data.counts.tolist()) == (None if wanted is None else [wanted, [-1, -1]])


def test_chosen_classes_leave_other_counts_out(folder: Path) -> None:
    source = coco(folder, counts={"dog": 2, "car": 4})
    data = read_tagged(DataSource(path=source.path, classes=("car",)))
    assert data.counts is not None and data.counts.tolist() == [[4], [-1]]


@pytest.mark.parametrize(
    ("counts", "says"),
    [
        ({"dog": 0}, r"images\[0\]\.counts\.dog: input should be greater than or equal to 1, got 0"),
        ({"dog": "2"}, r"images\[0\]\.counts\.dog: input should be a valid integer, got '2'"),
        ({"dog": True}, r"images\[0\]\.counts\.dog: input should be a valid integer"),
        (3, r"images\[0\]\.counts: input should be a valid dictionary, got 3"),
        ({"cow": 1}, r"images\[0\]: counts: 'cow' is counted and not tagged"),
    ],
)
def test_mistakes_of_a_coco_file_name_the_place(folder: Path, counts: object, says: str) -> None:
    with pytest.raises(UserError, match=says) as error:
        read_tagged(coco(folder, counts=counts))
    assert "\n" not in str(error.value)


# ---------------------------------------------------------------- boxes, for study


def boxed(folder: Path, boxes: list[list[float]]) -> DataSource:
    """Two dogs, a crowd of them, a difficult one, and cars in a crowd only."""
    kinds = [(1, {}), (1, {}), (1, {"iscrowd": 1}), (1, {"difficult": 1}), (2, {"iscrowd": 1})]
    rows = [
        {"id": n, "image_id": 1, "category_id": kind, "bbox": box, "area": 16.0} | more
        for n, ((kind, more), box) in enumerate(zip(kinds, boxes, strict=True), start=1)
    ]
    return coco(folder, annotations=rows)


BOXES = [[0.0, 0, 4, 4], [5, 5, 4, 4], [9, 9, 4, 4], [1, 1, 4, 4], [2, 2, 4, 4]]


def test_objects_of_tagged_classes_are_counted(folder: Path) -> None:
    source = boxed(folder, BOXES)
    data = counts_from_boxes(read_tagged(source), source)
    assert data.counts is not None and data.counts.tolist() == [[2, -1], [-1, -1]]


def test_nothing_of_a_box_but_its_being_there_gets_through(folder: Path) -> None:
    """The same number of boxes anywhere gives the same dataset to the bit: only counts leak."""
    seen = []
    for boxes in (BOXES, [[7.0, 3, 20, 11], [0, 0, 40, 30], *BOXES[2:]][::-1]):
        source = boxed(folder, boxes)
        seen.append(counts_from_boxes(read_tagged(source), source))
    for part in fields(TaggedPhotos):
        one, other = (getattr(data, part.name) for data in seen)
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other, part.name
    assert {part.name for part in fields(TaggedPhotos)} == {"classes", "photos", "tags", "unsure", "counts"}


def test_a_class_that_is_not_tagged_is_not_counted(folder: Path) -> None:
    source = boxed(folder, BOXES)
    data = read_tagged(source)
    blind = TaggedPhotos(data.classes, data.photos, torch.zeros_like(data.tags))
    counts = counts_from_boxes(blind, source).counts
    assert counts is not None and (counts == -1).all()


@pytest.mark.parametrize("photos", [(), (Photo("elsewhere", Path("elsewhere.jpg"), 40, 30),)])
def test_photos_without_truth_are_not_counted(folder: Path, photos: tuple[Photo, ...]) -> None:
    data = TaggedPhotos(("dog", "car"), photos, torch.ones(len(photos), 2, dtype=torch.bool))
    counts = counts_from_boxes(data, boxed(folder, BOXES)).counts
    assert counts is not None and counts.shape == (len(photos), 2) and (counts == -1).all()


def test_a_dataset_without_boxes_is_refused(folder: Path) -> None:
    for source in (table(folder, "image,tags", "a.jpg,dog"), coco(folder)):
        with pytest.raises(UserError, match=r'data.counts = "boxes": .*has no boxes to count; expected') as error:
            counts_from_boxes(read_tagged(source), source)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("language", ["csv", "json"])
def test_the_counts_of_the_docs_are_read(tmp_path: Path, language: str) -> None:
    (tmp_path / f"tags.{language}").write_text(blocks(DOCS / "datasets.md", language)[-1], encoding="utf-8")
    for name in ("beach", "garden", "empty-street"):
        Image.new("RGB", (8, 6)).save(tmp_path / f"{name}.jpg")
    data = read_tagged(DataSource(path=tmp_path / f"tags.{language}"))
    counts = dict(zip((photo.id for photo in data.photos), data.counts.tolist(), strict=True))  # type: ignore[union-attr]
    dog, ball = data.classes.index("dog"), data.classes.index("ball")
    assert [counts["beach"][dog], counts["beach"][ball], counts["garden"][dog]] == [2, -1, 1]
