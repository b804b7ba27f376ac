from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tag2box.data.coco import read_coco, read_coco_truth, write_coco_truth
from tag2box.errors import UserError
from tag2box.types import Objects, Truth

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
    with pytest.raises(UserError, match="each name once"):
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
def test_images_are_known_by_stem_or_by_the_whole_name(files, ids, tmp_path):
    images = [{"id": n, "file_name": f, "width": 1, "height": 1} for n, f in enumerate(files, start=1)]
    assert read_coco_truth(coco(tmp_path / "t.json", images=images, annotations=[])).ids == ids


def without(key: str) -> dict[str, object]:
    return {name: value for name, value in ANNOTATION.items() if name != key}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"images": None}, "images: input should be a valid list, got None"),
        ({"images": [{"id": 1, "file_name": "a"}]}, r"images\[0\]\.width: field required"),
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
        ({"annotations": [ANNOTATION | {"bbox": [1, 2, 0, 4]}]}, r"bbox\[2\]: input should be greater than 0, got 0"),
        ({"annotations": [ANNOTATION | {"bbox": [1, 2, 3, -4]}]}, r"bbox\[3\]: input should be greater than 0, got -4"),
        ({"annotations": [ANNOTATION | {"bbox": [1, 2, "x", 4]}]}, r"bbox\[2\]: .*'x'"),
        (
            {"annotations": [ANNOTATION | {"bbox": [float("nan"), 2, 3, 4]}]},
            r"bbox\[0\]: input should be a finite number",
        ),
        ({"annotations": [ANNOTATION | {"area": -1}]}, r"annotations\[0\]\.area"),
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
