"""Exports opened by the tools they are for. A tool that is not installed is skipped; pycocotools always is."""

from __future__ import annotations

import contextlib
import io
import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tag2box.annotations import Detections
from tag2box.formats.export import export_labels
from tag2box.labels.labelled import LabelBox, LabelledPhoto, LabelledPhotos

CLASSES = ("cat", "traffic light")
SIZE = (40, 30)
BOX, DOUBTFUL = (1.0, 2.0, 11.0, 22.0), (20.0, 5.0, 30.0, 15.0)


@pytest.fixture
def labels(tmp_path) -> LabelledPhotos:
    root = tmp_path / "photos"
    root.mkdir()
    boxes = (
        LabelBox(BOX, "traffic light", 0.5, source="label"),
        LabelBox(DOUBTFUL, "cat", 0.25, is_doubtful=True, is_tag=False, source="label"),
    )
    photos = []
    for name, own in (("one", boxes), ("two", ())):
        Image.new("RGB", SIZE, "red").save(root / f"{name}.jpg")
        photos.append(LabelledPhoto(name, f"{name}.jpg", *SIZE, ("traffic light",) if own else (), own))
    return LabelledPhotos(root, CLASSES, tuple(photos))


def exported(kind: str, labels: LabelledPhotos, out: Path) -> Path:
    export_labels(kind, out, labels)
    return out


def test_pycocotools_reads_labels_as_truth(labels, tmp_path):
    coco_module = pytest.importorskip("pycocotools.coco")
    with contextlib.redirect_stdout(io.StringIO()):
        coco = coco_module.COCO(str(exported("coco", labels, tmp_path / "labels.json")))
    assert [image["file_name"] for image in coco.loadImgs(coco.getImgIds())] == ["one.jpg", "two.jpg"]
    (label,) = coco.loadAnns(coco.getAnnIds(iscrowd=False))
    assert (label["bbox"], label["area"], coco.cats[label["category_id"]]["name"]) == ([1, 2, 10, 20], 200, CLASSES[1])
    assert len(coco.getAnnIds(iscrowd=True)) == 1


def test_supervision_holds_detections():
    supervision = pytest.importorskip("supervision")
    found = Detections(torch.tensor([BOX]), torch.tensor([0.5]), torch.tensor([1]))
    made = found.to_supervision(CLASSES)
    assert isinstance(made, supervision.Detections)
    assert made.xyxy.tolist() == [list(BOX)] and made.confidence.tolist() == [0.5] and made.class_id.tolist() == [1]
    assert made["class_name"].tolist() == ["traffic light"]
    assert len(Detections.empty().to_supervision(CLASSES)) == 0
    assert len(made[made.confidence > 0.6]) == 0


def test_without_supervision_one_line_says_what_to_install(monkeypatch):
    import sys

    from tag2box.errors import UserError

    monkeypatch.setitem(sys.modules, "supervision", None)
    with pytest.raises(UserError, match=r"pip install tag2box\[supervision\]"):
        Detections.empty().to_supervision()


@pytest.mark.parametrize("kind", ["coco", "voc", "yolo"])
def test_supervision_reads_datasets(kind, labels, tmp_path):
    supervision = pytest.importorskip("supervision")
    out = exported(kind, labels, tmp_path / ("out.json" if kind == "coco" else "out"))
    load = supervision.DetectionDataset
    if kind == "coco":
        made = load.from_coco(str(labels.root), str(out))
    elif kind == "voc":
        made = load.from_pascal_voc(str(out / "JPEGImages"), str(out / "Annotations"))
    else:
        made = load.from_yolo(str(out / "images"), str(out / "labels"), str(out / "data.yaml"))
    by_name = {Path(path).stem: found for path, _, found in made}
    names = [made.classes[label] for label in by_name["one"].class_id]
    assert "traffic light" in names and len(by_name["two"]) == 0
    box = by_name["one"].xyxy[names.index("traffic light")]
    assert np.allclose(box, BOX, atol=1)  # VOC counts whole pixels from 1


@pytest.mark.parametrize("split", ["", "val"])
def test_datumaro_reads_cvat(split, labels, tmp_path):
    datumaro = pytest.importorskip("datumaro")
    labels = replace(labels, photos=tuple(replace(photo, split=split) for photo in labels.photos))
    made = datumaro.Dataset.import_from(str(exported("cvat", labels, tmp_path / "cvat")), "cvat")
    names = [label.name for label in made.categories()[datumaro.AnnotationType.label]]
    assert names == list(CLASSES)
    found = {item.id: item for item in made}
    assert set(found) == {"one", "two"} and {item.subset for item in made} == {split or "annotations"}
    boxes = [own for own in found["one"].annotations if own.type == datumaro.AnnotationType.bbox]
    assert [(names[box.label], box.get_bbox()) for box in boxes] == [
        ("traffic light", [1, 2, 10, 20]),
        ("cat", [20, 5, 10, 10]),
    ]
    assert [box.attributes["doubtful"] for box in boxes] == [False, True]
    tags = [own.label for own in found["one"].annotations if own.type == datumaro.AnnotationType.label]
    assert [names[label] for label in tags] == ["traffic light"]


def test_label_studio_accepts_the_interface_and_the_predictions(labels, tmp_path):
    interface = pytest.importorskip("label_studio_sdk.label_interface")
    out = exported("labelstudio", labels, tmp_path / "studio")
    made = interface.LabelInterface((out / "config.xml").read_text())
    made.validate()
    tasks = json.loads((out / "tasks.json").read_text())
    assert made.validate_prediction(tasks[0]["predictions"][0], return_errors=True) == []
    assert made.validate_annotation(tasks[1]["annotations"][0])
    converter = pytest.importorskip("label_studio_sdk.converter")
    reviewed = [{**task, "annotations": task.get("annotations") or task["predictions"]} for task in tasks]
    for number, task in enumerate(reviewed):
        task["annotations"] = [{**task["annotations"][0], "id": number, "completed_by": 1, "was_cancelled": False}]
    (tmp_path / "reviewed.json").write_text(json.dumps(reviewed))
    coco = converter.Converter(str(out / "config.xml"), str(tmp_path), download_resources=False)
    coco.convert_to_coco(str(tmp_path / "reviewed.json"), str(tmp_path / "coco"), is_dir=False)
    content = json.loads((tmp_path / "coco" / "result.json").read_text())
    names = {row["id"]: row["name"] for row in content["categories"]}
    first = content["annotations"][0]
    assert names[first["category_id"]] == "traffic light" and first["bbox"] == pytest.approx([1, 2, 10, 20])


def test_fiftyone_imports_coco_and_classifications(labels, tmp_path, monkeypatch):
    monkeypatch.setitem(os.environ, "FIFTYONE_DISABLE_SERVICES", "1")  # its readers need no database
    pytest.importorskip("fiftyone")
    from fiftyone.utils.coco import COCODetectionDatasetImporter
    from fiftyone.utils.data.importers import FiftyOneImageClassificationDatasetImporter

    out = exported("fiftyone", labels, tmp_path / "fiftyone")
    importer = COCODetectionDatasetImporter(dataset_dir=str(out), label_types=["detections"], include_id=False)
    with importer:
        rows = {Path(path).stem: found for path, _, found in importer}
    found = rows["one"].detections
    assert [one.label for one in found] == ["traffic light", "cat"]
    assert list(found[0].bounding_box) == pytest.approx([1 / 40, 2 / 30, 10 / 40, 20 / 30])
    assert [bool(one["iscrowd"]) for one in found] == [False, True]
    reader = FiftyOneImageClassificationDatasetImporter(
        dataset_dir=str(out), labels_path=str(out / "classifications.json")
    )
    with reader:
        tags = {Path(path).stem: [own.label for own in found.classifications] for path, _, found in reader}
    assert tags == {"one": ["traffic light"], "two": []}


def test_ultralytics_accepts_the_yolo_files(labels, tmp_path):
    utils = pytest.importorskip("ultralytics.data.utils", exc_type=ImportError)
    out = exported("yolo", labels, tmp_path / "yolo")
    made = utils.check_det_dataset(str(out / "data.yaml"), autodownload=False)
    assert made["names"] == dict(enumerate(CLASSES)) and made["nc"] == 2
    image, label = out / "images" / "one.jpg", out / "labels" / "one.txt"
    row = utils.verify_image_label((str(image), str(label), "", False, 2, 0, 0, False))
    assert row[1].tolist() == [pytest.approx([1, 6 / 40, 12 / 30, 10 / 40, 20 / 30])]
    assert row[-1] == ""  # no complaint
