"""YOLO datasets: their layouts, splits, tags and boxes, and faults in them."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given, strategies as st
from PIL import Image

from tag2box.errors import UserError
from tag2box.formats.datasets import dataset_format, everything, has_boxes, read_photos, read_tagged, read_truth
from tag2box.formats.listing import DataSource, Fault
from tag2box.formats.yolo_boxes import Yolo
from tag2box.formats.yolo_tags import label_file, parse_yaml

NAMES = "names:\n  0: cat\n  1: dog\n"


def photo(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (40, 20)).save(path)


def label(path: Path, *lines: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))


@pytest.fixture
def splits(tmp_path: Path) -> Path:
    """The layout of ultralytics: two splits, one photo without labels."""
    for split, name, lines in (
        ("train", "one", ["1 0.5 0.5 0.5 0.5", "1 0.125 0.125 0.25 0.25", "0 0.5 0.5 1 1"]),
        ("train", "none", None),
        ("val", "two", ["0 0.25 0.5 0.5 1"]),
    ):
        photo(tmp_path / "images" / split / f"{name}.jpg")
        if lines is not None:
            label(tmp_path / "labels" / split / f"{name}.txt", *lines)
    (tmp_path / "data.yaml").write_text(f"path: .\ntrain: images/train\nval: images/val\n{NAMES}")
    return tmp_path


def tags_of(source: DataSource) -> dict[str, list[str]]:
    found = read_tagged(source)
    return {
        photo.id: [name for name, is_there in zip(found.classes, row, strict=True) if is_there]
        for photo, row in zip(found.photos, found.tags.tolist(), strict=True)
    }


def test_tags_and_boxes_of_a_split(splits):
    for path in (splits, splits / "data.yaml"):
        source = DataSource(path=path, split="train")
        assert isinstance(dataset_format(source), Yolo) and has_boxes(source)
        assert tags_of(source) == {"none": [], "one": ["cat", "dog"]}
        truth = read_truth(source)
        assert (truth.classes, truth.ids, truth.sizes) == (("cat", "dog"), ("none", "one"), ((40, 20),) * 2)
        assert truth.objects[1].boxes.tolist() == [[10, 5, 30, 15], [0, 0, 10, 5], [0, 0, 40, 20]]
        assert truth.objects[1].labels.tolist() == [1, 1, 0] and len(truth.objects[0]) == 0


def test_several_splits_must_be_named(splits):
    for read in (read_tagged, read_truth):
        with pytest.raises(UserError, match=r"several splits; name one with --split: train, val, all"):
            read(DataSource(path=splits))
    with pytest.raises(UserError, match=r"no split test; splits found here: train, val, all"):
        read_tagged(DataSource(path=splits, split="test"))
    assert len(read_photos(DataSource(path=splits))) == len(read_tagged(everything(DataSource(path=splits)))) == 3
    (splits / "some.txt").write_text("two\nnone.jpg\n")
    assert tags_of(DataSource(path=splits, split=str(splits / "some.txt"))) == {"none": [], "two": ["cat"]}


def test_chosen_classes_leave_the_others_out(splits):
    source = DataSource(path=splits, split="train", classes=("dog",))
    assert tags_of(source) == {"none": [], "one": ["dog"]}
    assert [len(objects) for objects in read_truth(source).objects] == [0, 2]


def test_images_and_labels_without_a_yaml(tmp_path):
    photo(tmp_path / "images" / "one.png")
    label(tmp_path / "labels" / "one.txt", "0 0.5 0.5 0.5 0.5")
    with pytest.raises(UserError, match=r"no class names; expected a data.yaml with names, or a classes.txt"):
        read_tagged(DataSource(path=tmp_path))
    (tmp_path / "labels" / "classes.txt").write_text("cat\n")
    assert tags_of(DataSource(path=tmp_path)) == {"one": ["cat"]}


def test_roboflow_and_lists_of_photos(tmp_path):
    for name in ("one", "two"):
        photo(tmp_path / "train" / "images" / f"{name}.jpg")
        label(tmp_path / "train" / "labels" / f"{name}.txt", "0 0.5 0.5 0.5 0.5")
    (tmp_path / "data.yaml").write_text("train: ../train/images\nnc: 1\nnames: ['cat']\n")
    assert tags_of(DataSource(path=tmp_path)) == {"one": ["cat"], "two": ["cat"]}
    (tmp_path / "train" / "list.txt").write_text("./images/two.jpg\ntrain/images/one.jpg\n")
    (tmp_path / "data.yaml").write_text("train: train/list.txt\nnames: ['cat']\n")
    assert list(tags_of(DataSource(path=tmp_path))) == ["two", "one"]
    (tmp_path / "train" / "list.txt").write_text("../secret.jpg\n")
    with pytest.raises(UserError, match=r"line 1: ../secret.jpg is outside the photos folder"):
        read_tagged(DataSource(path=tmp_path))


def test_a_path_elsewhere_is_named_by_the_user(splits, tmp_path_factory):
    other = tmp_path_factory.mktemp("elsewhere")
    for outside in (f"path: {splits}\n", "path: ../nowhere\n"):
        (other / "data.yaml").write_text(f"{outside}train: images/train\n{NAMES}")
        with pytest.raises(UserError, match=r"no images/train in .*; name the folder .* with --photos"):
            read_tagged(DataSource(path=other))
        assert len(read_tagged(DataSource(path=other, photos=splits))) == 2


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("images/train/1.jpg", "labels/train/1.txt"),
        ("images/images/1.a.jpg", "images/labels/1.a.txt"),
        ("train/1.jpg", "train/1.txt"),
        ("images.jpg", "images.txt"),
    ],
)
def test_labels_are_where_ultralytics_expects_them(file, expected):
    assert label_file(file) == expected


@pytest.mark.parametrize(
    ("line", "kind", "words"),
    [
        ("x 0.5 0.5 0.5 0.5", "bad row", "line 2: expected a class number and a box"),
        ("-1 0.5 0.5 0.5 0.5", "bad row", "line 2: expected a class number"),
        ("2 0.5 0.5 0.5 0.5", "unknown class", "line 2: no class 2 in .*data.yaml, which names 2"),
        ("0", "bad box", "line 2: expected x, y, width and height"),
        ("0 0.5 0.5 0.5", "bad box", "line 2: expected x, y, width and height"),
        ("0 0.5 0.5 0.5 nan", "bad box", "line 2: expected x, y, width and height"),
        ("0 120 33 40 20", "bad box", "from 0 to 1, got '120 33 40 20'"),
    ],
)
def test_bad_lines_are_faults(line, kind, words, splits):
    label(splits / "labels" / "val" / "two.txt", "0 0.5 0.5 0.5 0.5", line)
    source = DataSource(path=splits, split="val")
    with pytest.raises(UserError, match=words):
        read_truth(source)
    faults: list[Fault] = []
    truth = read_truth(source, faults.append)
    assert [fault.kind for fault in faults] == [kind] and len(truth.objects[0]) == 1


def test_outlines_become_boxes_and_scores_are_ignored(splits):
    label(splits / "labels" / "val" / "two.txt", "0 0.25 0 0.5 0.5 0.25 1", "1 0.5 0.5 0.5 0.5 0.93")
    (objects,) = read_truth(DataSource(path=splits, split="val")).objects
    assert objects.boxes.tolist() == [[10, 0, 20, 20], [10, 5, 30, 15]]


def test_a_dataset_without_any_label_is_refused(splits):
    (splits / "labels" / "val" / "two.txt").unlink()
    with pytest.raises(UserError, match=r"two\.txt: no such file; expected the labels of images/val/two\.jpg"):
        read_tagged(DataSource(path=splits, split="val"))
    assert not has_boxes(DataSource(path=splits, split="val"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (NAMES, "train: field required"),
        ("train: images/train\n", "names: field required"),
        ("train: images/train\nnames:\n  1: cat\n", "names: expected the numbers 0 to 0"),
        ("train: images/train\nnames: [cat, cat]\n", "'cat' is listed twice"),
        ("train: images/train\nval: ../../x\nnames: [cat]\n", "is outside the photos folder"),
        ("", "train: field required"),
        ("\0", "holds NUL bytes"),
    ],
)
def test_bad_yaml_files_are_refused_in_one_line(text, words, splits):
    (splits / "data.yaml").write_text(text)
    with pytest.raises(UserError, match=words) as caught:
        read_tagged(DataSource(path=splits, split="train"))
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------- YAML


@pytest.mark.parametrize(
    "text",
    [
        "names: [a, 'b, c', \"d\"]  # three\n",
        "names: [\n  a, b,\n  c\n]\n",
        "names: {0: a, 1: 'b, c'}\n",
        "names:\n- a\n- 'it''s'\n",
        "names:\n  - fire truck, red\n  - b # not this\n",
        '# head\n---\ntrain: x/y\nnames:\n  0: a\n  1: "b \\u00e9\\x41"\n  2: c#d\n\nnc: 3\n',
        "names: []\n",
        "path: ../datasets/coco8 # root\ntrain: [a, b]\nval: ''\n",
    ],
)
def test_yaml_is_read_as_pyyaml_reads_it(text):
    def as_text(value: object) -> object:
        if isinstance(value, dict):
            return {str(k): str(v) for k, v in value.items()}
        return [str(v) for v in value] if isinstance(value, list) else str(value)

    assert parse_yaml(text) == {key: as_text(value) for key, value in yaml.safe_load(text).items()}


@pytest.mark.parametrize("text", ["a" + " " * 200_000 + "b", "'" * 200_001, '"\\' * 100_000, "a: " + "['" * 100_000])
def test_hostile_yaml_is_read_in_linear_time(text):
    assert len(parse_yaml(text)) <= 1


@given(st.text(max_size=200))
def test_no_text_breaks_the_yaml_reader(text):
    assert isinstance(parse_yaml(text), dict)
