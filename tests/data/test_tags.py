from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tag2box.data.tags import TagRow, read_tags, tag_photos, write_tags
from tag2box.errors import UserError


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    (folder / "more").mkdir(parents=True)
    for name in ("a.jpg", "b.jpg", "a.png", "more/b.jpg"):
        Image.new("RGB", (8, 5)).save(folder / name)
    return folder


def _table(folder: Path, text: str) -> Path:
    path = folder.parent / "tags.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_photo_without_tags_shows_nothing(photos: Path) -> None:
    data = read_tags(_table(photos, "image,tags\na.jpg,\n"), photos)
    assert data.classes == () and data.tags.shape == (1, 0)
    assert (data.photos[0].id, data.photos[0].width, data.photos[0].height) == ("a", 8, 5)


@pytest.mark.parametrize("tags", ["red fox;hen", "red fox|hen", " hen ; red fox ;; hen"])
def test_tags_are_separated_by_semicolon_or_bar(photos: Path, tags: str) -> None:
    data = read_tags(_table(photos, f"image,tags\na.jpg,{tags}\nb.jpg,hen\n"), photos)
    assert data.classes == ("hen", "red fox")
    assert data.tags.tolist() == [[True, True], [True, False]]


def test_given_classes_set_the_columns(photos: Path) -> None:
    data = read_tags(_table(photos, "image,tags\na.jpg,hen\n"), photos, ["fox", "hen"])
    assert data.classes == ("fox", "hen") and data.tags.tolist() == [[False, True]]


def test_other_columns_blank_lines_and_a_byte_order_mark_do_no_harm(photos: Path) -> None:
    table = photos.parent / "t.csv"
    table.write_bytes("\ufeffTags, who ,Image\r\nhen,me,a.jpg\r\n\r\n".encode())
    assert read_tags(table, photos).photos[0].id == "a"


@pytest.mark.parametrize(
    ("images", "ids"),
    [
        (["a.jpg", "b.jpg"], ["a", "b"]),
        (["b.jpg", "more/b.jpg"], ["b", "more/b"]),
        (["a.jpg", "a.png"], ["a.jpg", "a.png"]),
    ],
)
def test_ids_are_stems_unless_stems_repeat(photos: Path, images: list[str], ids: list[str]) -> None:
    data = read_tags(_table(photos, "image,tags\n" + "".join(f"{i},x\n" for i in images)), photos)
    assert [photo.id for photo in data.photos] == ids


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", r"tags.csv:1: no column 'image'"),
        ("image,tags\n", "no photos"),
        ("name,tags\na.jpg,x\n", "no column 'image'"),
        ("image,label\na.jpg,x\n", "no column 'tags'"),
        ("image,tags\na.jpg,hen\nb.jpg,fox\n", r"tags.csv:3: unknown class 'fox'; expected one of hen"),
        ("image,tags\nz.jpg,hen\n", r"tags.csv:2: no photo z.jpg"),
        ("image,tags\n,hen\n", r"tags.csv:2: field image is empty"),
        ("image,tags\na.jpg,hen\n\na.jpg,hen\n", r"tags.csv:4: a.jpg was already listed at .*tags.csv:2"),
        ("image,tags\na.jpg,hen\n./a.jpg,hen\n", r"already listed"),
        ("image,tags\na.jpg,hen,hen\n", r"tags.csv:2: 3 columns where the header has 2"),
    ],
)
def test_mistakes_name_file_line_and_remedy(photos: Path, text: str, says: str) -> None:
    with pytest.raises(UserError, match=says) as error:
        read_tags(_table(photos, text), photos, ["hen"])
    assert "\n" not in str(error.value)


def test_a_missing_table_and_a_binary_one_are_named(photos: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        read_tags(photos / "none.csv", photos)
    (photos / "x.csv").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(UserError, match="UTF-8"):
        read_tags(photos / "x.csv", photos)


def test_a_class_listed_twice_is_refused(photos: Path) -> None:
    with pytest.raises(UserError, match="'hen' is listed twice"):
        tag_photos([TagRow("a.jpg", ("hen",), "here:1")], photos, ["hen", "hen"])


names = st.text(st.characters(codec="utf-8", exclude_characters=";|", exclude_categories=["Cc", "Cs", "Z"]), min_size=1)


@given(st.lists(st.sets(names, max_size=3), min_size=1, max_size=2))
def test_what_is_written_is_read_again(tmp_path_factory: pytest.TempPathFactory, tags: list[set[str]]) -> None:
    folder = tmp_path_factory.mktemp("tags")
    images = ["a, b.png", "c.png"][: len(tags)]
    for image in images:
        Image.new("L", (1, 1)).save(folder / image)
    write_tags(folder / "tags.csv", [(i, sorted(t)) for i, t in zip(images, tags, strict=True)])
    data = read_tags(folder / "tags.csv", folder)
    read = [{name for name, is_on in zip(data.classes, row, strict=True) if is_on} for row in data.tags.tolist()]
    assert read == tags and [photo.path.name for photo in data.photos] == images
