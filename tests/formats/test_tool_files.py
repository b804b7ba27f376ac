"""Files as annotation tools write them, and everything that may be wrong with one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from tag2box.errors import UserError
from tag2box.formats import datasets
from tag2box.formats.listing import DataSource

CVAT = """<?xml version="1.0" encoding="utf-8"?>
<annotations><version>1.1</version>
  <meta><job><labels><label><name>dog</name></label><label><name>cat</name></label></labels></job></meta>
  <image id="0" name="one.png" width="40" height="30">
    <tag label="cat" source="manual"></tag>
    <box label="dog" source="manual" occluded="0" xtl="1.50" ytl="2.00" xbr="11.00" ybr="22.00" z_order="0"></box>
    <polygon label="dog" points="1,1;2,2;3,1"></polygon>
  </image>
  <image id="1" name="sub/two.png" width="40" height="30"></image>
</annotations>"""

RECTANGLE = {"x": 10, "y": 20, "width": 50, "height": 50, "rotation": 0, "rectanglelabels": ["dog"]}
SIZES = {"original_width": 40, "original_height": 30}
LABEL_STUDIO = [
    {
        "id": 1,
        "data": {"image": "/data/upload/3/0a1b2c3d-one.png"},
        "annotations": [
            {"result": [{"type": "choices", "value": {"choices": ["bird"]}}]},
            {
                "result": [
                    {"type": "rectanglelabels", **SIZES, "value": RECTANGLE},
                    {"type": "choices", "value": {"choices": ["cat"]}},
                    {"type": "textarea", "value": {"text": ["a note"]}},
                ]
            },
            {"was_cancelled": True, "result": []},
        ],
        "predictions": [{"result": [{"type": "choices", "value": {"choices": ["horse"]}}]}],
    },
    {"id": 2, "data": {"image": "/data/local-files/?d=sub%2Ftwo.png"}, "annotations": [], "predictions": []},
]

SHAPES = {
    "version": "3.0.1",
    "flags": {"cat": True, "bird": False},
    "shapes": [
        {"label": "dog", "points": [[1, 2], [11, 22]], "shape_type": "rectangle", "difficult": False},
        {"label": "dog", "points": [[5, 5], [9, 5], [7, 9]], "shape_type": "polygon", "difficult": True},
        {"label": "nose", "points": [[5, 5]], "shape_type": "point"},
    ],
    "imagePath": "one.png",
    "imageWidth": 40,
    "imageHeight": 30,
}

FIFTYONE = {"classes": ["cat", "dog"], "labels": {"one": [1, 0], "sub/two": "dog"}}
OPEN_IMAGES = (
    "ImageID,Source,LabelName,Confidence,XMin,XMax,YMin,YMax,IsOccluded,IsTruncated,IsGroupOf,IsDepiction,IsInside\n"
    "one,xclick,/m/0bt9lr,1,0.1,0.6,0.2,0.7,0,0,0,0,0\n"
    "one,xclick,/m/01yrx,1,0.0,0.5,0.0,0.5,0,0,1,0,0\n"
)


@pytest.fixture
def folder(tmp_path) -> Path:
    for name in ("one.png", "sub/two.png"):
        (tmp_path / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 30)).save(tmp_path / "images" / name)
    return tmp_path


def tags_of(source: DataSource) -> dict[str, list[str]]:
    found = datasets.read_tagged(source)
    return {
        photo.id: [name for name, is_there in zip(found.classes, row, strict=True) if is_there]
        for photo, row in zip(found.photos, found.tags.tolist(), strict=True)
    }


def test_cvat(folder):
    (folder / "annotations.xml").write_text(CVAT)
    for path in (folder, folder / "annotations.xml"):
        source = DataSource(path=path)
        assert datasets.dataset_format(source).what == "a CVAT file" and datasets.has_boxes(source)
        assert tags_of(source) == {"one": ["dog", "cat"], "two": []}
        truth = datasets.read_truth(source)
        assert truth.classes == ("dog", "cat") and truth.objects[0].boxes.tolist() == [[1.5, 2, 11, 22]]
        assert truth.ids == ("one", "two") and truth.sizes == ((40, 30), (40, 30))


def test_label_studio(folder):
    (folder / "project.json").write_text(json.dumps(LABEL_STUDIO))
    source = DataSource(path=folder / "project.json")
    assert datasets.dataset_format(source).what == "a Label Studio file"
    assert tags_of(source) == {"one": ["cat", "dog"], "two": []}
    truth = datasets.read_truth(source)
    assert truth.objects[0].boxes.tolist() == [[4, 6, 24, 21]] and len(truth.objects[1]) == 0
    RECTANGLE_TURNED = {**RECTANGLE, "x": 50, "rotation": 90}
    tasks = [{**LABEL_STUDIO[0], "annotations": [{"result": [{**SIZES, "value": RECTANGLE_TURNED}]}]}]
    (folder / "project.json").write_text(json.dumps(tasks))
    assert datasets.read_truth(source).objects[0].boxes[0].tolist() == pytest.approx([5, 6, 20, 26])


def test_x_anylabeling_and_labelme(folder):
    (folder / "images" / "one.json").write_text(json.dumps(SHAPES))
    source = DataSource(path=folder / "images")
    assert datasets.dataset_format(source).what == "an X-AnyLabeling folder"
    assert tags_of(source) == {"one": ["cat", "dog", "nose"], "two": []}
    truth = datasets.read_truth(source)
    assert truth.objects[0].boxes.tolist() == [[1, 2, 11, 22], [5, 5, 9, 9]]
    assert truth.objects[0].crowd.tolist() == [False, True]


def test_fiftyone_classification(folder):
    (folder / "images").rename(folder / "data")
    (folder / "labels.json").write_text(json.dumps(FIFTYONE))
    source = DataSource(path=folder / "labels.json")
    assert datasets.dataset_format(source).what == "a FiftyOne classification file"
    assert tags_of(source) == {"one": ["cat", "dog"], "two": ["dog"]} and not datasets.has_boxes(source)
    with pytest.raises(UserError, match="a FiftyOne classification file has no boxes"):
        datasets.read_truth(source)
    for target, expected in (({"label": "cat", "confidence": 1}, ["cat"]), (None, []), ({"labels": ["dog"]}, ["dog"])):
        (folder / "labels.json").write_text(json.dumps({**FIFTYONE, "labels": {"one": target}}))
        assert tags_of(source) == {"one": expected}


def test_open_images(folder):
    for name in ("one.png",):
        Image.new("RGB", (40, 30)).save(folder / "images" / "one.jpg")
        (folder / "images" / name).unlink()
    (folder / "train-annotations-bbox.csv").write_text(OPEN_IMAGES)
    (folder / "class-descriptions-boxable.csv").write_text("/m/01yrx,Cat\n/m/0bt9lr,Dog\n")
    source = DataSource(path=folder / "train-annotations-bbox.csv")
    assert datasets.dataset_format(source).what == "a CSV of boxes"
    found = datasets.read_tagged(source)
    assert found.classes == ("Cat", "Dog") and found.tags.tolist() == [[False, True]]
    assert found.unsure is not None and found.unsure.tolist() == [[True, False]]  # a group of cats
    truth = datasets.read_truth(source)
    assert truth.objects[0].boxes[0].tolist() == pytest.approx([4, 6, 24, 21])
    assert truth.objects[0].crowd.tolist() == [False, True]
    labels = folder / "labels.csv"
    labels.write_text(
        "ImageID,Source,LabelName,Confidence\none,verification,/m/0bt9lr,0\none,verification,/m/01yrx,1\n"
    )
    assert tags_of(DataSource(path=labels)) == {"one": ["Cat"]} and not datasets.has_boxes(DataSource(path=labels))


def test_tags_are_the_same_wherever_the_boxes_are(folder):
    """Corners that cannot be read do not matter to training."""
    (folder / "annotations.xml").write_text(CVAT.replace('xtl="1.50"', 'xtl="x"'))
    tasks = json.dumps(LABEL_STUDIO).replace('"x": 10', '"x": "y"')
    (folder / "project.json").write_text(tasks)
    (folder / "images" / "one.json").write_text(json.dumps(SHAPES).replace("[[1, 2]", '[["x", 2]'))
    (folder / "t.csv").write_text("image,class,x1,y1,x2,y2\none.png,dog,x,1,5,5\n")
    for path, fault in (
        (folder / "annotations.xml", "box 0: expected xtl <= xbr"),
        (folder / "project.json", r"region 0\.value\.x: "),
        (folder / "images", r"points\[0\]\[0\]"),
        (folder / "t.csv", "expected numbers x1 <= x2"),
    ):
        assert "dog" in tags_of(DataSource(path=path, photos=folder / "images"))["one"]
        with pytest.raises(UserError, match=fault):
            datasets.read_truth(DataSource(path=path, photos=folder / "images"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.xml", "<annotations><meta/></annotations>", "no photo|no photos|annotations"),
        ("a.xml", "<annotations>", "not readable as XML"),
        ("a.xml", "<annotations><track/></annotations>", "got another XML format or a video"),
        ("a.xml", '<annotations><image id="0"/></annotations>', "image 0: attribute name is missing"),
        ("a.xml", '<annotations><image name="../x.png"/></annotations>', r"\.\./x\.png"),
        ("a.xml", '<annotations><image name="one.png"><tag/></image></annotations>', "a tag has no label"),
        ("a.json", '[{"data": {}}]', r"task 0: field data has no photo; expected data\.image"),
        ("a.json", '[{"data": {"image": "gone.png"}}]', "gone.png"),
        ("a.json", '[{"data"', "not readable as JSON"),
        ("a.json", '[{"data": {"image": "one.png"}, "annotations": [{"result": [3]}]}]', "task 0: region 0"),
        ("a.json", '{"labels": {"one": [7]}, "classes": ["cat"]}', "expected a class or a number below 1, got 7"),
        ("a.json", '{"labels": {"one": ', "not readable as JSON"),
        ("a.json", '{"labels": {}, "classes": 3}', "expected an object with classes and labels"),
        ("a.csv", "image,class,x1,y1,x2,y2\n", "no photos; expected at least one row"),
        ("a.csv", "image,class,x1,y1,x2,y2\none.png,cat,1\n", "3 columns, but the header has 6"),
        ("a.csv", "image,class,x1,y1,x2,y2\n../one.png,cat,1,1,2,2\n", r"\.\./one\.png"),
    ],
)
def test_broken_files_are_one_line(folder, name, content, message):
    (folder / name).write_text(content)
    with pytest.raises(UserError, match=message) as error:
        datasets.read_tagged(DataSource(path=folder / name, photos=folder / "images"))
        raise UserError("no photos: an empty listing")
    assert len(str(error.value).splitlines()) == 1


def test_a_broken_file_beside_one_photo_is_a_fault_of_that_photo(folder):
    (folder / "images" / "one.json").write_text(json.dumps(SHAPES))
    (folder / "images" / "sub" / "two.json").write_text('{"shapes": [{}]}')
    faults: list[str] = []
    source = DataSource(path=folder / "images")
    found = datasets.read_tagged(source, lambda fault: faults.append(fault.line))
    assert len(found) == 2 and "two.json.shapes[0].label" in faults[0]
    (folder / "images" / "sub" / "two.json").write_text("{")
    with pytest.raises(UserError, match=r"two\.json: not readable as JSON"):
        datasets.read_tagged(source)
