from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from tag2box.data.voc import read_voc_split, read_voc_truth
from tag2box.errors import UserError

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
    with pytest.raises(UserError, match="each name once"):
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
    with pytest.raises(UserError, match="no such split; splits found here: test"):
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
