from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st
from PIL import Image

from tag2box.annotations import Detections, Objects, Photo, Truth
from tag2box.errors import UserError
from tag2box.formats.coco_boxes import write_coco_detections, write_coco_results
from tag2box.formats.detection_files import read_detections
from tag2box.formats.voc_boxes import write_voc_results
from tag2box.labels.label_set import LabelSet
from tag2box.labels.labelled import LabelBox, LabelledPhoto, LabelledPhotos
from tag2box.storage import FileStamp
from worlds import detections, random_world

BOX = [10, 20, 30, 40]
ENTRY = {"image_id": 12, "category_id": 1, "bbox": BOX, "score": 0.5}


def truth_named(*ids: str, classes: tuple[str, ...] = ("cat", "traffic light", "police_car")) -> Truth:
    return Truth(classes, ids, ((100, 100),) * len(ids), (Objects.of([], []),) * len(ids))


TRUTH = truth_named("000012", "photo one", "a/x.jpg", "b/x.jpg")


def saved(path: Path, content: object) -> Path:
    path.write_text(json.dumps(content))
    return path


def read_one(path: Path, **names) -> dict[str, list[float]]:
    """The images that have detections, with their rows as [x1, y1, x2, y2, score, label]."""
    read = read_detections(path, TRUTH, **names)
    assert list(read) == list(TRUTH.ids)
    return {i: torch.cat([d.boxes[0], d.scores[:1], d.labels[:1]]).tolist() for i, d in read.items() if len(d)}


def test_an_empty_list_has_no_detections(tmp_path):
    assert read_one(saved(tmp_path / "r.json", [])) == {}


@pytest.mark.parametrize(
    ("entry", "names", "image"),
    [
        ({}, {}, "000012"),
        ({"image_id": "000012"}, {}, "000012"),
        ({"image_id": "photo one.jpeg"}, {}, "photo one"),
        ({"image_id": "b/x.jpg"}, {}, "b/x.jpg"),
        ({"image_id": "photo one"}, {}, "photo one"),
        ({"image_id": "a\\x.jpg"}, {}, "a/x.jpg"),
        ({"file_name": "photo one.jpg"}, {"images": {12: "a/x.jpg"}}, "photo one"),
        ({}, {"images": {12: "a/x.jpg"}}, "a/x.jpg"),
        ({"category_id": 90, "category_name": "cat"}, {}, "000012"),
        ({"category_id": 90}, {"categories": {90: "cat"}}, "000012"),
    ],
)
def test_images_and_classes_are_found_by(entry, names, image, tmp_path):
    path = saved(tmp_path / "r.json", [ENTRY | entry])
    assert read_one(path, **names) == {image: [10, 20, 40, 60, 0.5, 0]}


def test_our_own_object_names_its_images_and_categories(tmp_path):
    content = {
        "images": [{"id": 12, "file_name": "photo one.png"}],
        "categories": [{"id": 1, "name": "police_car"}],
        "annotations": [ENTRY],
    }
    path = saved(tmp_path / "r.json", content)
    assert read_one(path, images={12: "a/x.jpg"}, categories={1: "cat"}) == {"photo one": [10, 20, 40, 60, 0.5, 2]}


def without(key: str) -> dict[str, object]:
    return {name: value for name, value in ENTRY.items() if name != key}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (3, "expected a list of COCO results, or an object with annotations, got 3"),
        ([3], "entry 0: "),
        ({}, "images: field required"),
        (
            {"images": [], "categories": [], "annotations": [without("score")]},
            r"entry 0, score: field required",
        ),
        ([ENTRY, without("bbox")], r"entry 1, bbox: field required"),
        ([ENTRY | {"bbox": [1, 2, 3]}], r"entry 0, bbox"),
        ([ENTRY | {"bbox": [1, 2, -3, 4]}], r"entry 0, bbox\[2\]: input should be greater than or equal to 0, got -3"),
        ([ENTRY | {"bbox": [1, float("nan"), 3, 4]}], r"entry 0, bbox\[1\]"),
        ([ENTRY | {"score": float("nan")}], r"entry 0, score: input should be a finite number, got nan"),
        ([ENTRY | {"score": float("inf")}], r"entry 0, score"),
        ([ENTRY | {"score": "high"}], r"entry 0, score.*'high'"),
        ([ENTRY | {"image_id": 13}], r"entry 0, image_id: image 13 is not in the truth"),
        ([ENTRY | {"image_id": "x"}], r"image 'x' is not in the truth"),
        ([ENTRY | {"file_name": "c/x.jpg"}], r"image 'c/x.jpg' is not in the truth"),
        ([ENTRY | {"category_id": 4}], r"entry 0, category_id: expected 1 to 3, got 4"),
        ([ENTRY | {"category_id": 0}], r"entry 0, category_id: expected 1 to 3, got 0"),
        (
            [ENTRY | {"category_name": "cats"}],
            "class 'cats' is not in the truth; the nearest class of the truth is 'cat'",
        ),
    ],
)
def test_bad_results_are_refused_in_one_line(content, words, tmp_path):
    path = saved(tmp_path / "r.json", content)
    with pytest.raises(UserError, match=words) as caught:
        read_detections(path, TRUTH)
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)


def test_categories_of_the_truth_file_bind(tmp_path):
    path = saved(tmp_path / "r.json", [ENTRY])
    with pytest.raises(UserError, match="no category has id 1; the ids begin 90"):
        read_detections(path, TRUTH, categories={90: "cat"})
    with pytest.raises(UserError, match="class 'horse' is not in the truth"):
        read_detections(path, TRUTH, categories={1: "horse"})


def test_ids_that_spell_one_number_twice_are_not_guessed(tmp_path):
    with pytest.raises(UserError, match="image 12 is not in the truth"):
        read_detections(saved(tmp_path / "r.json", [ENTRY]), truth_named("012", "0012"))


def test_missing_and_broken_files(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        read_detections(tmp_path / "none.json", TRUTH)
    (tmp_path / "bad.json").write_text("[{")
    with pytest.raises(UserError, match="not readable as JSON"):
        read_detections(tmp_path / "bad.json", TRUTH)


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("comp4_det_cat.txt", 0),
        ("comp3_det_test_cat.txt", 0),
        ("comp4_det_traffic light.txt", 1),
        ("comp4_det_police_car.txt", 2),
        ("comp4_det_my_val_police_car.txt", 2),
    ],
)
def test_voc_files_become_zero_based_and_exclusive(name, label, tmp_path):
    (tmp_path / name).write_text("000012 0.5 11 21 40 60\n\n")
    (tmp_path / "notes.txt").write_text("not a result file")
    assert read_one(tmp_path) == {"000012": [10, 20, 40, 60, 0.5, label]}


def test_voc_ids_may_hold_spaces(tmp_path):
    (tmp_path / "comp4_det_cat.txt").write_text("photo one 5e-1 11 21 40 60")
    assert read_one(tmp_path) == {"photo one": [10, 20, 40, 60, 0.5, 0]}


@pytest.mark.parametrize(
    ("name", "line", "words"),
    [
        ("comp4_det_test_dog.txt", "000012 0.5 11 21 40 60", "class 'dog' is not in the truth"),
        ("comp4_det_cat.txt", "000012 0.5 11 21 40", "line 2: expected 'image score xmin ymin xmax ymax'"),
        ("comp4_det_cat.txt", "000012 nan 11 21 40 60", "line 2: expected"),
        ("comp4_det_cat.txt", "000012 x 11 21 40 60", "line 2: expected"),
        ("comp4_det_cat.txt", "000013 0.5 11 21 40 60", "line 2: image '000013' is not in the truth"),
        ("comp4_det_cat.txt", "000012 0.5 11 21 9 60", "line 2: box: expected xmin <= xmax"),
    ],
)
def test_bad_voc_files_are_refused_in_one_line(name, line, words, tmp_path):
    (tmp_path / name).write_text(f"000012 0.5 11 21 40 60\n{line}\n")
    with pytest.raises(UserError, match=words) as caught:
        read_detections(tmp_path, TRUTH)
    assert name in str(caught.value) and "\n" not in str(caught.value)


def test_voc_folders_without_files_or_with_two_splits(tmp_path):
    with pytest.raises(UserError, match="no comp4_det_CLASS"):
        read_detections(tmp_path, TRUTH)
    for split in ("train", "test"):
        (tmp_path / f"comp4_det_{split}_cat.txt").write_text("")
    with pytest.raises(UserError, match=r"'cat' is also in comp4_det_test_cat.txt"):
        read_detections(tmp_path, TRUTH)


def same(a: Detections, b: Detections) -> bool:
    pairs = ((a.boxes, b.boxes), (a.scores, b.scores), (a.labels, b.labels))
    return all(torch.equal(x.double(), y.double()) for x, y in pairs)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1000))
def test_what_is_written_is_read_back(seed, tmp_path_factory):
    truth, found = random_world(seed)
    folder = tmp_path_factory.mktemp("round")
    found = {i: Detections((d.boxes / 3).float(), (d.scores / 7).float(), d.labels) for i, d in found.items()}
    photos = [Photo(i, Path("somewhere") / f"{i}.jpg", 100, 100) for i in truth.ids]
    write_coco_results(folder / "list.json", found, truth.classes, file_names={p.id: p.path.name for p in photos})
    write_coco_detections(folder / "object.json", found, truth.classes, photos)
    for name in ("list.json", "object.json"):
        read = read_detections(folder / name, truth)
        assert all(same(read[i], found[i]) for i in truth.ids)


def test_voc_submission_files_are_read_back(tmp_path):
    truth, found = random_world(5)
    write_voc_results(tmp_path, found, truth.classes, split="test")
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"comp4_det_test_{name}.txt" for name in truth.classes]
    for image_id, read in read_detections(tmp_path, truth).items():
        order = torch.argsort(found[image_id].labels, stable=True)  # the files go class by class
        assert same(read, found[image_id][order])


def test_coco_numbers_of_the_truth_file_are_kept(tmp_path):
    found = {"000012": detections([(10, 20, 40, 60, 0.5, 0)])}
    write_coco_results(tmp_path / "r.json", found, ["cat"], image_ids={"000012": 12}, category_ids={"cat": 17})
    (entry,) = json.loads((tmp_path / "r.json").read_text())
    assert {key: entry[key] for key in ENTRY} == ENTRY | {"category_id": 17}


def test_photos_of_one_name_stay_apart(tmp_path):
    for names in (("a/x", "b/x"), ("x.jpg", "x.png"), ("x", "y")):
        truth = truth_named(*names)
        paths = {"a/x": "a/x.jpg", "b/x": "b/x.jpg", "x": "x.jpg", "y": "y.jpg"}
        photos = [Photo(name, tmp_path / paths.get(name, name), 100, 100) for name in names]
        found = {name: detections([(n, 0, 9, 9, 0.5, 0)]) for n, name in enumerate(names)}
        write_coco_detections(tmp_path / "r.json", found, truth.classes, photos)
        read = read_detections(tmp_path / "r.json", truth)
        assert all(same(read[name], found[name]) for name in names)


def label_set(folder: Path, name: str = "000012", class_name: str = "cat") -> Path:
    """One label, one without a score and one doubtful box on a photo."""
    path = folder / "photos" / f"{name}.png"
    path.parent.mkdir()
    Image.new("RGB", (100, 100)).save(path)
    boxes = (
        LabelBox((1.0, 2.0, 3.0, 4.0), class_name, 0.25, why="best of its tag"),
        LabelBox((5.0, 6.0, 7.0, 8.0), class_name, None, source="review"),
        LabelBox((9.0, 9.0, 10.0, 10.0), class_name, 0.1, is_doubtful=True, why="doubtful"),
    )
    photo = LabelledPhoto(name, path.name, 100, 100, (class_name,), boxes, stamp=FileStamp.of(path))
    content = LabelledPhotos(path.parent, (class_name,), (photo,))
    LabelSet(content, {}, {}, {}).write(folder / "labels")
    return folder / "labels"


def test_labels_of_a_label_set_are_detections(tmp_path):
    found = read_detections(label_set(tmp_path), TRUTH)["000012"]
    assert found.boxes.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert found.scores.tolist() == [0.25, 1.0] and found.labels.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("photo", "class_name", "words"),
    [("other", "cat", "photo 'other.png' is not in the truth"), ("000012", "cot", "nearest class of the truth is")],
)
def test_label_sets_of_other_photos_or_classes_are_refused_in_one_line(photo, class_name, words, tmp_path):
    with pytest.raises(UserError, match=words) as caught:
        read_detections(label_set(tmp_path, photo, class_name), TRUTH)
    assert "\n" not in str(caught.value)
