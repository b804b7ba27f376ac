"""Labels through every format and back: nothing is lost that the format can hold."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from PIL import Image

from tag2box.cli.label_export import convert, export, parse_splits
from tag2box.errors import UserError
from tag2box.extend import EXPORT_FORMATS
from tag2box.formats import datasets
from tag2box.formats.export import export_labels, read_labelled, with_splits
from tag2box.formats.listing import DataSource
from tag2box.labels.label_set import LabelSet
from tag2box.labels.labelled import LabelBox, LabelledPhoto, LabelledPhotos
from tiny_world import call

CLASSES = ("cat", "traffic light", "zebra, plain & <striped>")
SIZE = (40, 30)
FORMATS = ("coco", "voc", "yolo", "cvat", "labelstudio", "fiftyone", "xanylabeling", "csv")
EXACT = frozenset({"coco", "csv", "fiftyone", "xanylabeling"})
"""Formats with full precision; CVAT has four decimals, Label Studio per cent, YOLO nine decimals, VOC whole pixels."""
WITH_TAGS = frozenset({"coco", "cvat", "labelstudio", "xanylabeling", "csv"})
"""Formats in which a tag needs no box."""


def photo_files(root: Path, *names: str) -> None:
    for number, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", SIZE, (number, 0, 0)).save(root / name)


def two_photos(root: Path) -> LabelledPhotos:
    """Two photos of the same name, one with boxes and an ignore region, one with a tag without a box."""
    photo_files(root, "a/one.png", "b/one.png")
    boxes = (
        LabelBox((1.0, 2.0, 11.0, 22.0), CLASSES[0], 0.5, source="label"),
        LabelBox((0.0, 0.0, 40.0, 30.0), CLASSES[2], 0.25, source="label"),
        LabelBox((5.0, 5.0, 9.0, 9.0), CLASSES[0], 0.125, is_doubtful=True, source="label"),
    )
    first = LabelledPhoto("a/one", "a/one.png", *SIZE, (CLASSES[0], CLASSES[2]), boxes)
    second = LabelledPhoto("b/one", "b/one.png", *SIZE, (CLASSES[1],), ())
    return LabelledPhotos(root, CLASSES, (first, second))


def place(folder: Path, kind: str) -> Path:
    """Where a format is written: with the suffix by which its reader is found."""
    return folder / {"coco": "out.json", "csv": "out.csv"}.get(kind, "out")


def read_back(folder: Path, kind: str, root: Path, *, classes: tuple[str, ...] = CLASSES) -> LabelledPhotos:
    path = place(folder, kind)
    if kind == "fiftyone":
        return read_labelled(DataSource(path=path / "labels.json", classes=classes))
    photos = root if kind in {"coco", "csv", "labelstudio"} else None
    chosen = None if kind == "csv" else classes  # a table has the classes of its rows
    return read_labelled(DataSource(path=path, photos=photos, classes=chosen))


def outline(labels: LabelledPhotos, kind: str) -> list[object]:
    """What a format holds of labels, in the order of the photos."""
    digits = {"voc": 0, "cvat": 4, "yolo": 4, "labelstudio": 6}.get(kind, 9)
    rows: list[object] = []
    for photo in labels.photos:
        kept = photo.labels if kind == "yolo" else photo.boxes
        boxes = sorted((box.name, tuple(round(v, digits) for v in box.box), box.is_doubtful) for box in kept)
        tags = set(photo.tags) if kind in WITH_TAGS else {box.name for box in photo.labels}
        rows.append((photo.width, photo.height, sorted(tags), boxes))
    return rows


@pytest.mark.parametrize("kind", FORMATS)
def test_labels_are_read_back(kind, tmp_path):
    labels = two_photos(tmp_path / "photos")
    export_labels(kind, place(tmp_path, kind), labels)
    found = read_back(tmp_path, kind, tmp_path / "photos")
    assert found.classes == CLASSES
    assert outline(found, kind) == outline(labels, kind)
    assert [found.path(photo).read_bytes() for photo in found.photos] == [
        labels.path(photo).read_bytes() for photo in labels.photos
    ]


@pytest.mark.parametrize("source", FORMATS)
def test_any_format_is_converted_to_any_other(source, tmp_path):
    labels = two_photos(tmp_path / "photos")
    export_labels(source, place(tmp_path / "in", source), labels)
    start = place(tmp_path / "in", source)
    data = DataSource(
        path=start / "labels.json" if source == "fiftyone" else start,
        photos=tmp_path / "photos" if source in {"coco", "csv", "labelstudio"} else None,
    )
    wanted = outline(read_labelled(data), source)
    for kind in FORMATS:
        folder = tmp_path / kind
        made = convert(data, place(folder, kind), export=kind)
        found = read_back(folder, kind, made.root, classes=made.classes)
        assert outline(found, kind) == outline(made, kind) and len(wanted) == len(found)


def boxes_of(precise: bool) -> st.SearchStrategy[list[LabelBox]]:
    edge = st.floats(0, 1, width=32) if precise else st.integers(0, 10).map(lambda n: n / 10)

    @st.composite
    def box(draw: st.DrawFn) -> LabelBox:
        xs, ys = (sorted((draw(edge), draw(edge))) for _ in range(2))
        corners = (xs[0] * 40, ys[0] * 30, xs[1] * 40, ys[1] * 30)
        name, doubtful = draw(st.sampled_from(CLASSES)), draw(st.booleans())
        return LabelBox(corners, name, draw(st.none() | st.floats(0, 1)), doubtful)

    return st.lists(box(), max_size=4)


@pytest.mark.parametrize("kind", FORMATS)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_boxes_survive(kind, tmp_path_factory, data):
    boxes = data.draw(boxes_of(kind in EXACT))
    if kind in {"voc", "yolo"}:  # which have no boxes without area
        boxes = [box for box in boxes if box.area > 0]
    folder = tmp_path_factory.mktemp(kind)
    photo_files(folder / "photos", "one.png")
    tags = tuple(name for name in CLASSES if any(box.name == name and not box.is_doubtful for box in boxes))
    photo = LabelledPhoto("one", "one.png", *SIZE, tags, tuple(boxes))
    labels = LabelledPhotos(folder / "photos", CLASSES, (photo,))
    export_labels(kind, place(folder, kind), labels)
    assert outline(read_back(folder, kind, folder / "photos"), kind) == outline(labels, kind)


names = st.text(min_size=1, max_size=8).filter(lambda name: name.encode(errors="ignore").decode() == name)


@pytest.mark.parametrize("kind", FORMATS)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(classes=st.lists(names, min_size=1, max_size=3, unique=True))
def test_class_names_with_odd_characters_survive_or_are_refused_in_one_line(kind, tmp_path_factory, classes):
    folder = tmp_path_factory.mktemp(kind)
    photo_files(folder / "photos", "one.png")
    boxes = tuple(LabelBox((1.0, 2.0, 11.0, 12.0), name) for name in classes)
    photo = LabelledPhoto("one", "one.png", *SIZE, tuple(classes), boxes)
    labels = LabelledPhotos(folder / "photos", tuple(classes), (photo,))
    try:
        export_labels(kind, place(folder, kind), labels)
    except UserError as error:
        assert "rename" in str(error) and len(str(error).splitlines()) == 1
        assert not place(folder, kind).exists()
        return
    found = read_back(folder, kind, folder / "photos", classes=tuple(classes))
    assert outline(found, kind) == outline(labels, kind)


# ---------------------------------------------------------------- places, photos, splits


@pytest.mark.parametrize("kind", EXPORT_FORMATS)
def test_a_place_that_is_taken_is_refused_and_kept(kind, tmp_path):
    labels = two_photos(tmp_path / "photos")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine.txt").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "folder"):
        with pytest.raises(UserError, match=f"{out.name}: already exists; name another place, or remove it"):
            export_labels(kind, out, labels)
    assert (tmp_path / "file").read_text() == (tmp_path / "folder" / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize("kind", ["yolo", "voc", "cvat", "fiftyone", "xanylabeling"])
def test_an_export_that_fails_leaves_nothing(kind, tmp_path):
    labels = two_photos(tmp_path / "photos")
    (tmp_path / "photos" / "b" / "one.png").unlink()
    with pytest.raises(UserError, match=r"one\.png: no such photo"):
        export_labels(kind, tmp_path / "out", labels)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["photos"]
    export_labels(kind, tmp_path / "out", labels, placing="none")


def test_photos_are_linked_copied_or_left_out(tmp_path):
    labels = two_photos(tmp_path / "photos")
    for placing, links, files in (("link", 2, 0), ("copy", 0, 2), ("none", 0, 0)):
        export_labels("yolo", tmp_path / placing, labels, placing=placing)
        found = [path for path in (tmp_path / placing / "images").rglob("*") if path.is_file()]
        assert sum(path.is_symlink() for path in found) == links and len(found) - links == files


def test_photos_whose_names_collide_keep_their_own_boxes(tmp_path):
    root = tmp_path / "photos"
    photo_files(root, "x/b.png", "X/b.png", "x_b.png")
    files = ("x/b.png", "X/b.png", "x_b.png")
    photos = tuple(
        LabelledPhoto(name[:-4], name, *SIZE, ("cat",), (LabelBox((n, 0.0, 20.0, 20.0), "cat"),))
        for n, name in enumerate(files)
    )
    labels = LabelledPhotos(root, ("cat",), photos)
    for kind in FORMATS:
        export_labels(kind, place(tmp_path / kind, kind), labels)
        found = read_back(tmp_path / kind, kind, root, classes=("cat",))
        by_content = {found.path(photo).read_bytes(): photo.boxes[0].box[0] for photo in found.photos}
        assert by_content == pytest.approx({(root / name).read_bytes(): float(n) for n, name in enumerate(files)})


def test_splits_are_stable_and_kept_by_yolo_and_voc(tmp_path):
    root = tmp_path / "photos"
    photo_files(root, *(f"{n}.png" for n in range(20)))
    photos = tuple(
        LabelledPhoto(str(n), f"{n}.png", *SIZE, ("cat",), (LabelBox((1.0, 1.0, 9.0, 9.0), "cat"),)) for n in range(20)
    )
    labels = with_splits(LabelledPhotos(root, ("cat",), photos), {"train": 0.7, "val": 0.3})
    fewer = with_splits(LabelledPhotos(root, ("cat",), photos[:5]), {"train": 0.7, "val": 0.3})
    assert [photo.split for photo in fewer.photos] == [photo.split for photo in labels.photos[:5]]
    wanted = {photo.id: photo.split for photo in labels.photos}
    assert set(wanted.values()) == {"train", "val"}
    for kind in ("yolo", "voc"):
        export_labels(kind, tmp_path / kind, labels)
        found = read_labelled(DataSource(path=tmp_path / kind))
        assert {photo.id: photo.split for photo in found.photos} == wanted
    export_labels("cvat", tmp_path / "cvat", labels)
    assert len(read_labelled(DataSource(path=tmp_path / "cvat"))) == 20
    text = (tmp_path / "yolo" / "data.yaml").read_text()
    assert text.startswith('train: "images/train"\nval: "images/val"\nnames:\n')
    only = with_splits(labels, {"val": 1})
    export_labels("yolo", tmp_path / "only", only)
    assert (tmp_path / "only" / "data.yaml").read_text().startswith('train: "images/val"\nval: "images/val"\n')


@pytest.mark.parametrize("text", ["train", "train=x", "train=0.8,train=0.2", "=1", "train=-1", "train=0"])
def test_bad_shares_are_one_line(text):
    with pytest.raises(UserError, match=r"expected shares such as train=0\.8,val=0\.2"):
        parse_splits(text)
    assert parse_splits(None) == {} and parse_splits("train=0.8, val=0.2") == {"train": 0.8, "val": 0.2}


# ---------------------------------------------------------------- label sets and commands


@pytest.fixture
def label_set(tmp_path) -> Path:
    LabelSet(two_photos(tmp_path / "photos")).write(tmp_path / "labels")
    return tmp_path / "labels"


def test_a_label_set_is_a_dataset(label_set, tmp_path):
    source = DataSource(path=label_set)
    assert datasets.dataset_format(source).what == "a label set"
    tagged = datasets.read_tagged(source)
    assert tagged.tags.tolist() == [[True, False, True], [False, True, False]]
    assert datasets.read_truth(source).objects[0].crowd.tolist() == [False, False, True]
    assert read_labelled(source) == LabelSet.open(label_set).content
    (label_set / "labels.json").write_text("{}")
    with pytest.raises(UserError, match=r"labels\.json: damaged"):
        datasets.read_tagged(source)


def test_a_photo_that_is_gone_or_another_is_refused_before_anything_is_written(label_set, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(tmp_path / "photos", moved)
    assert export(label_set, tmp_path / "yolo", export="yolo", photos=moved).root == moved
    (tmp_path / "photos" / "a" / "one.png").unlink()
    with pytest.raises(UserError, match=r"one\.png: this photo of the label set is gone"):
        export(label_set, tmp_path / "voc", export="voc")
    assert not (tmp_path / "voc").exists()


def test_the_commands(label_set, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    done = call(["export", "labels", "--format", "yolo", "--splits", "train=1,val=1"], monkeypatch, capsys)
    assert (done.code, done.out) == (0, "2 boxes and 1 ignore regions of 2 photos: yolo\n")
    done = call(["convert", "yolo", "boxes.csv", "--to", "csv"], monkeypatch, capsys)
    assert (done.code, done.out) == (0, "2 boxes and 0 ignore regions of 2 photos: boxes.csv\n")
    done = call(["convert", "yolo", "boxes.csv", "--to", "csv"], monkeypatch, capsys)
    assert done.code == 2 and done.err == "tag2box: boxes.csv: already exists; name another place, or remove it\n"
    done = call(["export", "labels", "--format", "yolov9"], monkeypatch, capsys)
    assert done.code == 2 and "did you mean yolo?" in done.err
    done = call(["export", "photos", "--format", "yolo"], monkeypatch, capsys)
    assert done.code == 2 and "photos: no label set here" in done.err


def test_faulty_rows_are_skipped_if_asked(tmp_path):
    photo_files(tmp_path, "one.png")
    (tmp_path / "t.csv").write_text(
        "image,class,x1,y1,x2,y2\none.png,cat,1,1,5,5\none.png,cat,9,1,5,5\ngone.png,cat,1,1,2,2\n"
    )
    with pytest.raises(UserError, match=r"gone\.png|x1 <= x2"):
        convert(tmp_path / "t.csv", tmp_path / "no.json", export="coco")
    skipped: list[str] = []
    made = convert(tmp_path / "t.csv", tmp_path / "out.json", export="coco", skipped=skipped)
    assert [len(photo.boxes) for photo in made.photos] == [1]
    assert any("gone.png" in line for line in skipped) and any("x1 <= x2" in line for line in skipped)


def test_a_format_of_ones_own_without_write_receives_the_labels_as_detections(tmp_path):
    labels = two_photos(tmp_path / "photos")
    export_labels("coco-results", tmp_path / "out.json", labels)
    rows = json.loads((tmp_path / "out.json").read_text())
    assert [(row["category_name"], row["score"]) for row in rows] == [("cat", 0.5), (CLASSES[2], 0.25)]
    unscored = replace(labels.photos[0], boxes=(LabelBox((0.0, 0.0, 1.0, 1.0), "cat"),))
    assert replace(labels, photos=(unscored,)).detections()["a/one"].scores.tolist() == [1.0]
