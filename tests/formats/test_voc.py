from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from tag2box.errors import UserError
from tag2box.formats.datasets import has_boxes, read_photos, read_tagged, read_truth
from tag2box.formats.listing import DataSource, Fault
from tag2box.formats.voc_boxes import read_voc_truth
from tag2box.formats.voc_tags import list_voc, read_voc_split

SIZE = "<size><width>60</width><height>40</height><depth>3</depth></size>"


def boxed(name: str, corners: tuple[object, ...] = (1, 2, 30, 40), extra: str = "") -> str:
    fields = "".join(f"<{f}>{c}</{f}>" for f, c in zip(("xmin", "ymin", "xmax", "ymax"), corners, strict=True))
    return f"<object><name>{name}</name>{extra}<bndbox>{fields}</bndbox></object>"


def voc(folder: Path, images: dict[str, str], split: str | None = None) -> Path:
    (folder / "Annotations").mkdir(parents=True)
    (folder / "ImageSets" / "Main").mkdir(parents=True)
    (folder / "JPEGImages").mkdir()
    for name, body in images.items():
        (folder / "Annotations" / f"{name}.xml").write_text(f"<annotation>{body}</annotation>")
    (folder / "ImageSets" / "Main" / "test.txt").write_text("\n".join(images) if split is None else split)
    return folder


def test_an_empty_split_is_an_empty_truth(tmp_path):
    truth = read_voc_truth(voc(tmp_path, {}), split="test")
    assert (truth.classes, truth.ids, truth.objects) == ((), (), ())


def test_boxes_become_zero_based_with_exclusive_edges(tmp_path):
    body = SIZE + boxed("dog") + boxed("cat", (5, 5.5, 5, 5.5), "<difficult>1</difficult>")
    truth = read_voc_truth(voc(tmp_path, {"one": body, "none": SIZE}), split="test")
    assert truth.classes == ("cat", "dog")
    assert (truth.ids, truth.sizes) == (("one", "none"), ((60, 40), (60, 40)))
    assert truth.objects[0].boxes.tolist() == [[0, 1, 30, 40], [4, 4.5, 5, 5.5]]
    assert truth.objects[0].labels.tolist() == [1, 0]
    assert truth.objects[0].difficult.tolist() == [False, True]
    assert not truth.objects[0].crowd.any()
    assert truth.objects[1].boxes.shape == (0, 4)


def test_classes_given_before_listed_before_seen(tmp_path):
    folder = voc(tmp_path, {"one": SIZE + boxed("dog") + boxed("cat")})
    (folder / "classes.txt").write_text("horse\ndog\n\n")
    listed = read_voc_truth(folder, split="test")
    assert (listed.classes, listed.objects[0].labels.tolist()) == (("horse", "dog"), [1])
    given = read_voc_truth(folder, split="test", classes=["cat"])
    assert (given.classes, given.objects[0].labels.tolist()) == (("cat",), [0])
    with pytest.raises(UserError, match="'cat' is listed twice"):
        read_voc_truth(folder, split="test", classes=["cat", "cat"])


def test_a_folder_that_holds_the_one(tmp_path):
    voc(tmp_path / "VOC2007", {"one": SIZE + boxed("dog")})
    assert len(read_voc_truth(tmp_path, split="test")) == 1
    voc(tmp_path / "VOC2012", {})
    with pytest.raises(UserError, match="name one of VOC2007, VOC2012"):
        read_voc_truth(tmp_path, split="test")


def test_split_lines_with_flags_spaces_and_repeats(tmp_path):
    folder = voc(tmp_path, {"a": SIZE, "b c": SIZE, "photo 1": SIZE}, split="a -1\nb c  1\n\nphoto 1\n")
    assert read_voc_split(folder, "test") == ("a", "b c", "photo 1")
    (folder / "ImageSets" / "Main" / "test.txt").write_text("a\nb c\na\n")
    with pytest.raises(UserError, match="line 3: image a is already on line 1"):
        read_voc_split(folder, "test")
    with pytest.raises(UserError, match="no such split; splits found here: test, all"):
        read_voc_split(folder, "val")


@pytest.mark.parametrize("size", ["", "<size><width>0</width><height>0</height></size>"])
@pytest.mark.parametrize(("orientation", "expected"), [(1, (30, 20)), (6, (20, 30))])
def test_a_missing_size_is_taken_from_the_photo(size, orientation, expected, tmp_path):
    folder = voc(tmp_path, {"one[1]": size})
    with pytest.raises(UserError, match=r"one\[1\]\.xml: size: expected width and height above 0"):
        read_voc_truth(folder, split="test")
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.new("RGB", (30, 20)).save(folder / "JPEGImages" / "one[1].jpg", exif=exif)
    assert read_voc_truth(folder, split="test").sizes == (expected,)
    (folder / "JPEGImages" / "one[1].jpg").write_text("no photo")
    with pytest.raises(UserError, match="not readable as a photo"):
        read_voc_truth(folder, split="test")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("<object>", "not readable as XML"),
        (SIZE + "<object><bndbox/></object>", "object 1, field name: expected a class name"),
        (SIZE + boxed("cat") + "<object><name>dog</name></object>", r"object 2 \(dog\), field bndbox: missing"),
        (SIZE + "<object><name>dog</name><bndbox><xmin>1</xmin></bndbox></object>", "field ymin: missing"),
        (SIZE + boxed("dog", (1, "two", 3, 4)), r"object 1 \(dog\), field ymin: expected a number, got 'two'"),
        (SIZE + boxed("dog", (1, "nan", 3, 4)), "field ymin: expected a number, got 'nan'"),
        (SIZE + boxed("dog", (1, "1e400", 3, 4)), "field ymin: expected a number, got '1e400'"),
        (SIZE + boxed("dog", (1, "1e300", 3, 4)), "field ymin: expected a number, got '1e300'"),
        (SIZE + boxed("dog", (9, 1, 3, 4)), "expected xmin <= xmax and ymin <= ymax, got 9 1 3 4"),
        (SIZE + boxed("dog", extra="<difficult>?</difficult>"), "field difficult: expected a number"),
        ("<size><width>x</width><height>1</height></size>", "field width: expected a number, got 'x'"),
    ],
)
def test_bad_annotations_are_refused_in_one_line(body, words, tmp_path):
    folder = voc(tmp_path, {"one": body})
    with pytest.raises(UserError, match=words) as caught:
        read_voc_truth(folder, split="test")
    assert "one.xml" in str(caught.value) and "\n" not in str(caught.value)


def test_missing_files_and_folders(tmp_path):
    folder = voc(tmp_path / "voc", {}, split="one")
    with pytest.raises(UserError, match=r"one\.xml: no such file"):
        read_voc_truth(folder, split="test")
    for bad in (tmp_path / "none", tmp_path / "voc" / "JPEGImages"):
        with pytest.raises(UserError, match="expected a folder with Annotations"):
            read_voc_truth(bad, split="test")


# ---------------------------------------------------------------- tags


def shot(folder: Path, *names: str) -> None:
    for name in names:
        (folder / "JPEGImages" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (60, 40)).save(folder / "JPEGImages" / name)


def tags_of(folder: Path, **wanted: object) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    entries = list_voc(DataSource(path=folder, **wanted)).entries
    return {entry.id: (entry.tags, entry.unsure) for entry in entries}


def test_an_empty_split_has_no_tags(tmp_path):
    listing = list_voc(DataSource(path=voc(tmp_path, {}), split="test"))
    assert (listing.classes, listing.entries) == ((), ())


HARD = "<difficult>1</difficult>"


@pytest.mark.parametrize(
    ("body", "tags", "unsure"),
    [
        ("", (), ()),
        (boxed("dog"), ("dog",), ()),
        (boxed("dog") + boxed("dog", extra=HARD), ("dog",), ()),
        (boxed("dog", extra=HARD), (), ("dog",)),
        (boxed("dog", extra=HARD) + boxed("cat"), ("cat",), ("dog",)),
        ("<object><name> dog </name></object>", ("dog",), ()),
        (boxed("dog", ("nonsense", -1, 1e9, "")), ("dog",), ()),
        (boxed("dog") + boxed("bird"), ("dog",), ()),
    ],
)
def test_tags_are_the_classes_of_objects_and_difficult_ones_are_unsure(body, tags, unsure, tmp_path):
    folder = voc(tmp_path, {"one": body})
    assert tags_of(folder, classes=("cat", "dog")) == {"one": (tags, unsure)}


def test_photos_have_any_suffix_and_ids_their_own_folders(tmp_path):
    folder = voc(tmp_path, {"a": boxed("dog"), "b.v2": boxed("dog"), "c": boxed("dog")})
    (folder / "Annotations" / "sub").mkdir()
    (folder / "Annotations" / "sub" / "d.xml").write_text(f"<annotation>{boxed('dog')}</annotation>")
    shot(folder, "a.JPG", "b.v2.png", "c.webp", "sub/d.jpeg")
    (folder / "ImageSets" / "Main" / "test.txt").write_text("c\na\nsub/d\nb.v2\n")
    data = read_tagged(DataSource(path=folder))
    assert [photo.path.name for photo in data.photos] == ["c.webp", "a.JPG", "d.jpeg", "b.v2.png"]
    assert [photo.id for photo in data.photos] == ["c", "a", "sub/d", "b.v2"]
    assert data.unsure is None


def test_parts_of_a_folder(tmp_path):
    folder = voc(tmp_path, {name: SIZE + boxed("dog") for name in "abc"})
    assert list(tags_of(folder)) == ["a", "b", "c"]  # the only list
    main = folder / "ImageSets" / "Main"
    (main / "train.txt").write_text("b\n")
    (main / "dog_train.txt").write_text("b  1\n")
    with pytest.raises(UserError, match="several image lists; name one with --split: test, train, all"):
        tags_of(folder)
    assert list(tags_of(folder, split="train")) == list(tags_of(folder, split="dog_train")) == ["b"]
    assert list(tags_of(folder, split="all")) == ["a", "b", "c"]
    own = tmp_path / "mine.txt"
    own.write_text("c\na.jpg\n")
    assert list(tags_of(folder, split=str(own))) == ["c", "a"]
    assert read_voc_truth(folder, split=str(own)).ids == ("c", "a")
    for path in main.iterdir():
        path.unlink()
    assert list(tags_of(folder)) == ["a", "b", "c"]  # no list: all


@pytest.mark.parametrize("line", ["../../etc/passwd", "/etc/passwd", "a/../../x", ".."])
def test_ids_that_lead_out_of_the_folder_are_refused(line, tmp_path):
    folder = voc(tmp_path / "voc", {"a": SIZE}, split=f"a\n{line}\n")
    for read in (tags_of, lambda at: read_voc_truth(at, split="test")):
        with pytest.raises(UserError, match=r"test.txt: line 2: .* is no image of"):
            read(folder)


def test_a_public_test_set_gives_photos_and_neither_tags_nor_truth(tmp_path):
    folder = voc(tmp_path, {}, split="x\ny\n")
    shot(folder, "x.jpg", "y.jpg")
    (folder / "Annotations").rmdir()
    source = DataSource(path=folder, split="test")
    assert [photo.id for photo in read_photos(source)] == ["x", "y"]
    assert not has_boxes(source)
    for read in (read_tagged, read_truth):
        with pytest.raises(UserError, match=r"x\.xml: no such file; no image of test is annotated, as in VOC's public"):
            read(source)


BOMB = '<!DOCTYPE a [<!ENTITY a "ha"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;">]>'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no element found"),
        (f"{BOMB}<annotation><object><name>&b;</name></object></annotation>", "it has a DOCTYPE"),
        ('<!DOCTYPE a SYSTEM "file:///etc/passwd"><annotation/>', "it has a DOCTYPE"),
        ("<annotation>&b;</annotation>", "undefined entity"),
        ("<annotation>\0</annotation>", "not well-formed|invalid token"),
        ("<annotation>" + "<a>" * 100_000, "no element found"),
        ('<?xml version="1.0" encoding="nonsense"?><annotation/>', "not readable as XML"),
        (b"<annotation>\xff\xfe</annotation>", "not well-formed|invalid token"),
        ("{}", "not well-formed|syntax error"),
        (f"<!--{'x' * (16 << 20)}--><annotation/>", r"larger than 16 MB"),
    ],
    ids=range(10),
)
def test_hostile_xml_is_refused_in_one_line_by_tags_and_truth(text, says, tmp_path):
    folder = voc(tmp_path, {"one": ""})
    (folder / "Annotations" / "one.xml").write_bytes(text if isinstance(text, bytes) else text.encode())
    for read in (tags_of, lambda at: read_voc_truth(at, split="test")):
        with pytest.raises(UserError, match=says) as caught:
            read(folder)
        assert "one.xml: not readable" in str(caught.value) and "\n" not in str(caught.value)


def test_deep_but_whole_xml_and_many_objects_are_read(tmp_path):
    folder = voc(tmp_path, {"one": boxed("dog") * 20_000 + "<a>" * 50_000 + "</a>" * 50_000})
    assert tags_of(folder) == {"one": (("dog",), ())}


def test_complaints_leave_images_and_objects_out(tmp_path):
    bodies = {"good": SIZE + boxed("dog"), "nameless": SIZE + "<object/>" + boxed("dog"), "xml": "<", "far": SIZE
              + boxed("dog", (1, 2, "1e400", 4)) + boxed("dog"), "flat": "<size><width>0</width></size>"}  # fmt: skip
    folder = voc(tmp_path, bodies, split="\n".join([*bodies, "gone", "good", "../x"]))
    shot(folder, "good.jpg", "nameless.jpg", "xml.jpg", "far.jpg")
    faults: list[Fault] = []
    data = read_tagged(DataSource(path=folder), faults.append)
    assert [photo.id for photo in data.photos] == ["good", "nameless", "far"]
    assert sorted(fault.kind for fault in faults) == [
        "bad row", "listed twice", "missing annotation", "missing photo", "outside the folder", "unreadable annotation"
    ]  # fmt: skip
    faults.clear()
    truth = read_truth(DataSource(path=folder), faults.append)
    assert dict(zip(truth.ids, map(len, truth.objects), strict=True)) == {"good": 1, "nameless": 1, "far": 1}
    assert sorted(fault.kind for fault in faults) == [
        "bad box", "bad row", "bad row", "listed twice", "missing annotation", "outside the folder",
        "unreadable annotation",
    ]  # fmt: skip
