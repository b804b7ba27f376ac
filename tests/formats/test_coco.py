from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

from tag2box.annotations import Objects, Truth
from tag2box.errors import UserError
from tag2box.formats.coco_boxes import coco_has_boxes, read_coco, read_coco_truth, write_coco_truth
from tag2box.formats.coco_tags import list_coco, list_coco_photos
from tag2box.formats.listing import DataSource, Fault

IMAGES = [
    {"id": 9, "file_name": "nine.jpg", "width": 60, "height": 40},
    {"id": 2, "file_name": "sub/two.png", "width": 30, "height": 20},
]
CATEGORIES = [{"id": 18, "name": "dog"}, {"id": 3, "name": "cat"}]
ANNOTATION = {"id": 1, "image_id": 9, "category_id": 18, "bbox": [1, 2, 3, 4.5], "area": 7.5, "iscrowd": 0}


def coco(path: Path, **changes: object) -> Path:
    content = {"images": IMAGES, "categories": CATEGORIES, "annotations": [ANNOTATION]} | changes
    path.write_text(json.dumps(content))
    return path


def test_an_empty_file_is_an_empty_truth(tmp_path):
    truth = read_coco_truth(coco(tmp_path / "t.json", images=[], categories=[], annotations=[]))
    assert (truth.classes, truth.ids, truth.objects) == ((), (), ())


def test_images_and_classes_come_in_the_order_of_their_numbers(tmp_path):
    crowd = ANNOTATION | {"id": 2, "category_id": 3, "iscrowd": 1}
    del crowd["area"]
    own = read_coco(coco(tmp_path / "t.json", annotations=[ANNOTATION, crowd]))
    assert own.truth.classes == ("cat", "dog")
    assert own.truth.ids == ("two", "nine")
    assert own.truth.sizes == ((30, 20), (60, 40))
    assert own.images == {2: "two", 9: "nine"}
    assert own.categories == {3: "cat", 18: "dog"}
    empty, full = own.truth.objects
    assert empty.boxes.shape == (0, 4)
    assert full.boxes.tolist() == [[1, 2, 4, 6.5], [1, 2, 4, 6.5]]
    assert full.labels.tolist() == [1, 0]
    assert full.crowd.tolist() == [False, True]
    assert own.areas["nine"].tolist() == [7.5, 13.5]
    assert own.areas["two"].tolist() == []


def test_chosen_classes_leave_the_others_out(tmp_path):
    path = coco(tmp_path / "t.json", annotations=[ANNOTATION, ANNOTATION | {"id": 2, "category_id": 3}])
    own = read_coco(path, ["cat"])
    assert (own.truth.classes, own.truth.objects[1].labels.tolist()) == (("cat",), [0])
    assert own.areas["nine"].shape == (1,)
    with pytest.raises(UserError, match="no class 'cats'; did you mean 'cat'"):
        read_coco(path, ["cats"])
    with pytest.raises(UserError, match="'cat' is listed twice"):
        read_coco(path, ["cat", "cat"])


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        (("a.jpg", "b.jpg"), ("a", "b")),
        (("x/a.jpg", "y/a.jpg"), ("x/a", "y/a")),
        (("x\\a.jpg", "a.png"), ("x/a", "a")),
        (("a.jpg", "a.png"), ("a.jpg", "a.png")),
        ((None, "b.jpg"), ("1", "b")),
    ],
)
def test_images_are_found_by_stem_or_by_full_name(files, ids, tmp_path):
    images = [{"id": n, "file_name": f, "width": 1, "height": 1} for n, f in enumerate(files, start=1)]
    assert read_coco_truth(coco(tmp_path / "t.json", images=images, annotations=[])).ids == ids


def without(key: str) -> dict[str, object]:
    return {name: value for name, value in ANNOTATION.items() if name != key}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"images": None}, "images: expected a list, got None"),
        ({"images": [{"id": 9, "file_name": "a"}]}, r"images\[0\]\.width: field required"),
        ({"images": [IMAGES[0] | {"height": 0}]}, r"images\[0\]\.height: input should be greater than 0, got 0"),
        ({"images": [IMAGES[0], IMAGES[0]]}, "images: id 9 is used twice"),
        ({"images": [IMAGES[0], IMAGES[0] | {"id": 8}]}, "file_name 'nine.jpg' is used 2 times"),
        ({"categories": [CATEGORIES[0], CATEGORIES[0]]}, "categories: id 18 is used twice"),
        ({"categories": [CATEGORIES[0], {"id": 1, "name": "dog"}]}, "name 'dog' is used 2 times"),
        ({"categories": [{"id": "x", "name": "dog"}]}, r"categories\[0\]\.id: .*'x'"),
        ({"annotations": [ANNOTATION, ANNOTATION]}, "annotations: id 1 is used twice"),
        ({"annotations": [ANNOTATION | {"image_id": 5}]}, r"annotations\[0\]\.image_id: no image has id 5"),
        ({"annotations": [ANNOTATION | {"category_id": 5}]}, r"annotations\[0\]\.category_id: no category has id 5"),
        ({"annotations": [without("bbox")]}, r"annotations\[0\]\.bbox: field required"),
        ({"annotations": [ANNOTATION | {"bbox": [1, 2, 3]}]}, r"annotations\[0\]\.bbox"),
        ({"annotations": [ANNOTATION | {"bbox": [1, 2, 3, -4]}]}, r"bbox\[3\]: input should be greater .*, got -4"),
        ({"annotations": [ANNOTATION | {"bbox": [1e300, 2, 3, 4]}]}, r"bbox\[0\]: input should be less than .*1e\+300"),
        ({"annotations": [ANNOTATION | {"bbox": [1, 2, "x", 4]}]}, r"bbox\[2\]: .*'x'"),
        (
            {"annotations": [ANNOTATION | {"bbox": [float("nan"), 2, 3, 4]}]},
            r"bbox\[0\]: input should be a finite number",
        ),
        ({"annotations": [ANNOTATION | {"area": -1}]}, r"annotations\[0\]\.area"),
        ({"annotations": [3]}, r"annotations\[0\]: expected an object, got 3"),
        ({"annotations": {"a": 1}}, "annotations: expected a list, got {'a': 1}"),
        ({"images": [IMAGES[0] | {"file_name": "."}]}, r"images\[0\]\.file_name: expected a file's name, got '.'"),
        ({"images": [IMAGES[0] | {"id": 10**30, "width": 10**9}]}, r"images\[0\]\.width: input should be less than"),
    ],
)
def test_bad_files_are_refused_in_one_line(changes, words, tmp_path):
    path = coco(tmp_path / "t.json", **changes)
    with pytest.raises(UserError, match=words) as caught:
        read_coco_truth(path)
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


def test_other_files_are_refused(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        read_coco_truth(tmp_path / "none.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(UserError, match="expected an object with images, categories and annotations, got a list"):
        read_coco_truth(tmp_path / "list.json")


def test_a_file_without_annotations_is_no_truth(tmp_path):
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"images": IMAGES, "categories": CATEGORIES}))
    with pytest.raises(UserError, match="annotations: field required; this file has no boxes"):
        read_coco_truth(path)
    assert not coco_has_boxes(path)


def test_ignored_objects_become_difficult_and_flat_boxes_stay_objects(tmp_path):
    """The official evaluator counts boxes without height, of which train2017 has a few."""
    ignored = without("id") | {"ignore": 1}
    flat = without("id") | {"bbox": [1, 2, 3, 0]}
    objects = read_coco_truth(coco(tmp_path / "t.json", annotations=[ignored, flat])).objects[1]
    assert objects.difficult.tolist() == [True, False] and not objects.crowd.any()
    assert objects.boxes.tolist() == [[1, 2, 4, 6.5], [1, 2, 4, 2]]


def test_complaints_leave_rows_out_of_the_truth(tmp_path):
    rows = [ANNOTATION, ANNOTATION, without("bbox"), ANNOTATION | {"id": 5, "image_id": 77}, 3,
            ANNOTATION | {"id": 6, "category_id": 77}, ANNOTATION | {"id": 7, "image_id": 2}]  # fmt: skip
    images = [*IMAGES, {"id": 3, "file_name": "three.jpg"}, IMAGES[0], {"id": "x"}]
    faults: list[Fault] = []
    truth = read_coco_truth(coco(tmp_path / "t.json", images=images, annotations=rows), on_fault=faults.append)
    assert truth.ids == ("two", "nine") and [len(objects) for objects in truth.objects] == [1, 1]
    assert sorted(fault.kind for fault in faults) == [
        "bad box", "bad row", "bad row", "bad row", "bad row", "bad row", "listed twice", "unknown class"
    ]  # fmt: skip


# ---------------------------------------------------------------- tags


@pytest.fixture
def tree(tmp_path) -> Path:
    """COCO's own: annotations/instances_train2017.json and train2017/."""
    for name in ("nine.jpg", "sub/two.png"):
        (tmp_path / "train2017" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (60, 40)).save(tmp_path / "train2017" / name)
    (tmp_path / "annotations").mkdir()
    return tmp_path / "annotations" / "instances_train2017.json"


def tags_of(path: Path, classes: tuple[str, ...] | None = None) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    listing = list_coco(DataSource(path=path, classes=classes))
    return {entry.id: (entry.tags, entry.unsure) for entry in listing.entries}


def test_images_without_annotations_have_no_tags(tree):
    assert tags_of(coco(tree, annotations=[])) == {"two": ((), ()), "nine": ((), ())}


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([{}], (("dog",), ())),
        ([{}, {"category_id": 3}], (("cat", "dog"), ())),
        ([{"iscrowd": 1}], ((), ("dog",))),
        ([{"ignore": 1}], ((), ("dog",))),
        ([{"difficult": 1}], ((), ("dog",))),
        ([{"iscrowd": 1}, {}], (("dog",), ())),
        ([{}, {"iscrowd": 1}, {"iscrowd": 1, "category_id": 3}], (("dog",), ("cat",))),
    ],
)
@pytest.mark.parametrize("box", [[1, 2, 3, 4], None, [1e308, -5, "x"]], ids=["box", "no box", "nonsense"])
def test_tags_come_from_annotations_whatever_their_boxes(rows, expected, box, tree):
    common = {"image_id": 9, "category_id": 18} | ({} if box is None else {"bbox": box})
    path = coco(tree, annotations=[common | row for row in rows])
    assert tags_of(path) == {"two": ((), ()), "nine": expected}
    assert coco_has_boxes(path) == (box is not None)


@pytest.mark.parametrize(
    "own", [{"category_ids": [18, 3]}, {"categories": ["dog", "cat"]}, {"tags": ["cat", "18"]}, {"tags": ["dog", 3]}]
)
def test_tags_come_from_lists_of_the_images(own, tree):
    tree.write_text(json.dumps({"images": [IMAGES[0] | own, IMAGES[1]], "categories": CATEGORIES}))
    assert tags_of(tree) == {"two": ((), ()), "nine": (("cat", "dog"), ())}
    assert tags_of(tree, ("dog",)) == {"two": ((), ()), "nine": (("dog",), ())}


def test_a_tag_of_no_category_is_refused_or_left_out(tree):
    tree.write_text(json.dumps({"images": [IMAGES[0] | {"tags": ["dgo", "cat"]}], "categories": CATEGORIES}))
    with pytest.raises(UserError, match=r"images\[0\]: no category has the name or id 'dgo'"):
        tags_of(tree)
    faults: list[Fault] = []
    listing = list_coco(DataSource(path=tree), faults.append)
    assert [fault.kind for fault in faults] == ["unknown class"] and listing.entries[0].tags == ("cat",)


def test_images_alone_can_be_listed_but_not_learned_from(tree):
    tree.write_text(json.dumps({"images": IMAGES, "categories": []}))
    with pytest.raises(UserError, match="annotations: field required; expected them, or a list of tags in each image"):
        tags_of(tree)
    listing = list_coco_photos(DataSource(path=tree))
    assert [(entry.id, entry.file) for entry in listing.entries] == [("two", "sub/two.png"), ("nine", "nine.jpg")]
    assert listing.folder == tree.parent.parent / "train2017"


@pytest.mark.parametrize("place", ["annotations", "annotations/photos", "images/train2017", "images"])
def test_photos_are_looked_for_in_the_usual_places(place, tree):
    root = tree.parent.parent
    (root / place).parent.mkdir(parents=True, exist_ok=True)
    if place == "annotations":
        shutil.copytree(root / "train2017", root / place, dirs_exist_ok=True)
        shutil.rmtree(root / "train2017")
    else:
        (root / "train2017").rename(root / place)
    assert list_coco(DataSource(path=coco(tree))).folder.resolve() == root / place


def test_if_no_photo_is_found_the_error_names_the_folders_searched(tree):
    shutil.rmtree(tree.parent.parent / "train2017")
    with pytest.raises(UserError, match=r"no photo sub/two.png in .*annotations, .*train2017.* and .*images; name the"):
        list_coco(DataSource(path=coco(tree)))
    with pytest.raises(UserError, match="nowhere: no such folder"):
        list_coco(DataSource(path=tree, photos=tree.parent / "nowhere"))


@pytest.mark.parametrize("name", ["../secret.jpg", "/etc/passwd", "sub/../../secret.jpg", "..\\secret.jpg"])
def test_names_that_lead_out_of_the_photos_folder_are_refused(name, tree):
    images = [*IMAGES, {"id": 10, "file_name": name}]
    with pytest.raises(UserError, match=r"images\[2\]\.file_name: .* is outside the photos folder"):
        list_coco(DataSource(path=coco(tree, images=images)))


def test_what_is_written_is_read_back(tmp_path):
    boxes = torch.tensor([[1.25, 2, 11, 20.1], [0, 0, 5, 5]])
    flags = torch.tensor([True, False])
    truth = Truth(
        ("cat", "dog"),
        ("b", "a"),
        ((30, 20), (60, 40)),
        (Objects(boxes, torch.tensor([1, 0]), flags, ~flags), Objects.of([], [])),
    )
    write_coco_truth(tmp_path / "t.json", truth, {"a": "photos/a.jpg", "b": "photos/b.jpg"})
    read = read_coco_truth(tmp_path / "t.json")
    assert (read.classes, read.ids, read.sizes) == (truth.classes, truth.ids, truth.sizes)
    assert torch.equal(read.objects[0].boxes, boxes.double())
    assert torch.equal(read.objects[0].labels, truth.objects[0].labels)
    assert torch.equal(read.objects[0].difficult, flags)
    assert torch.equal(read.objects[0].crowd, ~flags)
    assert len(read.objects[1]) == 0
    raw = json.loads((tmp_path / "t.json").read_text())
    assert raw["annotations"][1] == {
        "id": 2,
        "image_id": 1,
        "category_id": 1,
        "bbox": [0, 0, 5, 5],
        "area": 25,
        "iscrowd": 1,
        "difficult": 0,
    }
