from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from PIL import Image

from tag2box.errors import UserError
from tag2box.formats.csv_tags import read_tags, write_tags
from tag2box.formats.listing import Fault, TagRow, list_rows


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
        ("\n", r"tags.csv:1: no column 'image'"),
        ("image,tags\n", "no photos"),
        ("name,tags\na.jpg,x\n", "no column 'image'"),
        ("image\na.jpg\n", r"tags.csv:1: no column 'tags'"),
        ("image,labels\na.jpg,x\n", "no column 'tags'; expected a first line 'image,tags'; rename the column 'labels'"),
        ("image,hen,hen\na.jpg,1,1\n", r"tags.csv:1: column 'hen' is there twice"),
        ("image,hen,\na.jpg,1,1\n", r"tags.csv:1: column 3 has no name"),
        ("image,fox\na.jpg,1\n", r"tags.csv:1: no class 'hen'; there are fox"),
        ("image,hens\na.jpg,1\n", r"tags.csv:1: no class 'hen'; did you mean 'hens'\?"),
        ("image,hen\na.jpg,1\nb.jpg,640\n", r"tags.csv:3: column 'hen': expected 1, 0, .* got '640'"),
        ("image,hen\na.jpg,1\n\na.jpg,1\n", r"tags.csv:4: a.jpg was already listed at .*tags.csv:2"),
        ("image,tag\na.jpg,hen\na.jpg,fox\n", r"tags.csv:2: unknown class 'fox'"),
        ("image,tags\n../secret.jpg,hen\n", r"tags.csv:2: ../secret.jpg is outside the photos folder"),
        ("image,tags\n/etc/passwd,hen\n", r"tags.csv:2: /etc/passwd is outside the photos folder"),
        ("image,tags\n..\\..\\x.jpg,hen\n", r"outside the photos folder"),
        ("image,tags\nC:\\x.jpg,hen\n", r"tags.csv:2: no photo"),
        ("image,tags\n.,hen\n", r"tags.csv:2: . is outside the photos folder"),
        (f"image,tags\n{'x' * 5000}.jpg,hen\n", r"tags.csv:2: no photo x+ ... x+"),
        ('image,tags\n"a\n.jpg",hen\n', r"tags.csv:3: no photo a .jpg"),
        ("image,tags\na\0.jpg,hen\n", r"tags.csv: not readable \(holds NUL bytes"),
        (f'image,tags\na.jpg,"{"x" * 200_000}"\n', r"tags.csv:2: not readable as CSV \(field larger"),
        ('image,tags\n"a.jpg,hen\n', r"tags.csv:2: 1 columns, but the header has 2"),
        ("image,tags\na.jpg,hen\nb.jpg,fox\n", r"tags.csv:3: unknown class 'fox'; expected one of hen"),
        ("image,tags\nz.jpg,hen\n", r"tags.csv:2: no photo z.jpg"),
        ("image,tags\n,hen\n", r"tags.csv:2: field image is empty"),
        ("image,tags\na.jpg,hen\n\na.jpg,hen\n", r"tags.csv:4: a.jpg was already listed at .*tags.csv:2"),
        ("image,tags\na.jpg,hen\n./a.jpg,hen\n", r"already listed"),
        ("image,tags\na.jpg,hen,hen\n", r"tags.csv:2: 3 columns, but the header has 2"),
    ],
)
def test_mistakes_name_file_line_and_remedy(photos: Path, text: str, says: str) -> None:
    with pytest.raises(UserError, match=says) as error:
        read_tags(_table(photos, text), photos, ["hen"])
    assert "\n" not in str(error.value)


def test_a_table_of_excel_is_refused_with_the_cure(photos: Path) -> None:
    table = photos.parent / "tags.csv"
    table.write_bytes("image;tags\na.jpg;M\u00f6we\n".encode("cp1252"))
    with pytest.raises(UserError, match=r"line 2, byte 0xf6\); it seems to be Windows-1252 .* save it as UTF-8"):
        read_tags(table, photos)


@pytest.mark.parametrize(("count", "fits"), [(0, True), (5000, True), (5001, False), (20_000, False)])
def test_more_classes_than_can_be_trained_are_refused(count: int, fits: bool, photos: Path) -> None:
    text = f"image,tag\na.jpg,\n{''.join(f'a.jpg,c{number}{chr(10)}' for number in range(count))}"
    if fits:
        assert len(read_tags(_table(photos, text), photos).classes) == count
        return
    with pytest.raises(UserError, match=rf"photos: {count:,} classes \(c0, c1, c10 and .* choose some with --classes"):
        read_tags(_table(photos, text), photos)


def test_more_tags_than_fit_into_memory_are_refused(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = _table(photos, "image,tags\na.jpg,hen;fox\nb.jpg,hen\n")
    monkeypatch.setattr("tag2box.formats.listing._MAX_TAGS", 4)
    assert read_tags(table, photos).tags.shape == (2, 2)
    monkeypatch.setattr("tag2box.formats.listing._MAX_TAGS", 3)
    with pytest.raises(UserError, match="2 photos times 2 classes do not fit into memory; choose fewer"):
        read_tags(table, photos)


@pytest.mark.parametrize("name", ["file", "Filename", "FILE_NAME", "path", "Photo", "Image "])
def test_the_column_of_photos_has_several_names(photos: Path, name: str) -> None:
    assert read_tags(_table(photos, f"{name},tags\na.jpg,hen\n"), photos).classes == ("hen",)


@pytest.mark.parametrize(("delimiter", "separator"), [(",", ";"), (";", "|"), ("\t", ";")])
def test_columns_are_separated_as_the_header_is(photos: Path, delimiter: str, separator: str) -> None:
    lines = [("image", "tags"), ("a.jpg", f'"fox{separator}hen, red"'), ("b.jpg", "")]
    data = read_tags(_table(photos, "\n".join(delimiter.join(cells) for cells in lines)), photos)
    assert data.classes == ("fox", "hen, red") and data.tags.tolist() == [[True, True], [False, False]]


@pytest.mark.parametrize("name", ["tag", "class", "Label", "category"])
def test_one_row_a_photo_and_tag_is_merged(photos: Path, name: str) -> None:
    rows = "a.jpg,hen\nb.jpg,\n./a.jpg,fox\na.jpg,hen\n"
    data = read_tags(_table(photos, f"image,{name}\n{rows}"), photos)
    assert [photo.id for photo in data.photos] == ["a", "b"] and data.classes == ("fox", "hen")
    assert data.tags.tolist() == [[True, True], [False, False]]


@pytest.mark.parametrize(
    ("word", "there", "unsure"),
    [(w, True, False) for w in ("1", "1.0", "YES", "y", "True", "x", " X ")]
    + [(w, False, False) for w in ("", " ", "0", "0.0", "no", "N", "FALSE")]
    + [(w, False, True) for w in ("-1", "-1.0", "?")],
)
def test_one_column_a_class(photos: Path, word: str, there: bool, unsure: bool) -> None:
    data = read_tags(_table(photos, f"image,hen,Red Fox\na.jpg,{word},1\n"), photos)
    assert data.classes == ("hen", "Red Fox") and data.tags.tolist() == [[there, True]]
    assert data.unsure is None if not unsure else data.unsure is not None and data.unsure.tolist() == [[True, False]]


def test_chosen_columns_leave_others_unread(photos: Path) -> None:
    data = read_tags(_table(photos, "image,width,hen\na.jpg,640,1\n"), photos, ["hen"])
    assert data.classes == ("hen",) and data.tags.tolist() == [[True]]


def test_names_may_be_whole_paths_into_the_folder_and_links_out_of_it(photos: Path) -> None:
    (photos.parent / "elsewhere.jpg").write_bytes((photos / "a.jpg").read_bytes())
    (photos / "link.jpg").symlink_to(photos.parent / "elsewhere.jpg")
    data = read_tags(_table(photos, f"image,tags\n{photos}/more/../a.jpg,hen\nlink.jpg,hen\n"), photos)
    assert [photo.path for photo in data.photos] == [photos / "a.jpg", photos / "link.jpg"]


def test_a_complaint_leaves_the_row_out(photos: Path) -> None:
    (photos / "zero.jpg").write_bytes(b"")
    (photos / "text.jpg").write_text("no photo")
    rows = ["a.jpg,hen", "a.jpg,hen", "z.jpg,hen", "b.jpg,hen,hen", ",hen", "../b.jpg,hen", "zero.jpg,hen",
            "text.jpg,hen", "b.jpg,fox;hen"]  # fmt: skip
    faults: list[Fault] = []
    data = read_tags(_table(photos, "\n".join(["image,tags", *rows])), photos, ["hen"], faults.append)
    assert [(photo.id, tags) for photo, tags in zip(data.photos, data.tags.tolist(), strict=True)] == [
        ("a", [True]), ("b", [True])
    ]  # fmt: skip
    assert sorted(fault.kind for fault in faults) == [
        "bad row", "bad row", "empty photo", "listed twice", "missing photo", "outside the folder", "unknown class",
        "unreadable photo",
    ]  # fmt: skip


def test_a_missing_table_and_a_binary_one_are_named(photos: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        read_tags(photos / "none.csv", photos)
    (photos / "x.csv").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(UserError, match="UTF-8"):
        read_tags(photos / "x.csv", photos)


def test_a_class_listed_twice_is_refused(photos: Path) -> None:
    with pytest.raises(UserError, match="'hen' is listed twice"):
        list_rows([TagRow("a.jpg", ("hen",), "here:1")], photos, ["hen", "hen"])


names = st.text(st.characters(codec="utf-8", exclude_characters=";|", exclude_categories=["Cc", "Cs", "Z"]), min_size=1)


@settings(deadline=None)
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
