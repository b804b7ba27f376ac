from __future__ import annotations

import contextlib
import io
import re
from dataclasses import astuple, fields
from pathlib import Path

import numpy as np
import pytest
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from tag2box.annotations import Detections, Truth
from tag2box.formats.coco_boxes import read_coco
from tag2box.formats.detection_files import read_detections
from tag2box.metrics.coco_ap import CocoScores, coco_scores
from worlds import detections, random_world, truth_of

BOX = (10, 10, 30, 30)


@pytest.fixture
def shared() -> Path:
    folder = Path(__file__).resolve().parents[3] / "shared" / "eval" / "cocoapi_fakebbox100"
    if not folder.is_dir():
        pytest.skip("the official COCO example (cocoapi_fakebbox100) is not on this machine")
    return folder


def test_the_official_numbers_of_the_official_example(shared):
    printed = (shared / "val2014_fake_eval_res.txt").read_text().split("type=bbox")[1].split("type=")[0]
    official = re.findall(r"= (\d\.\d{3})", printed)
    own = read_coco(shared / "instances_val2014_100.json")
    results = shared / "instances_val2014_fakebbox100_results.json"
    found = read_detections(results, own.truth, images=own.images, categories=own.categories)
    scores = coco_scores(own.truth, found, areas=own.areas)
    assert [f"{value:.3f}" for value in astuple(scores)] == official
    by_box = coco_scores(own.truth, found)
    assert abs(by_box.AP - scores.AP) < 1e-9  # areas only sort objects by size
    assert by_box.APs != scores.APs


def _pycocotools(truth: Truth, found: dict[str, Detections], areas: dict[str, list[float]]) -> list[float]:
    """The official evaluator on dictionaries of our own making."""
    images = [{"id": 10 + n, "width": 100, "height": 100} for n in range(len(truth))]
    categories = [{"id": 7 + n, "name": name} for n, name in enumerate(truth.classes)]
    annotations, results = [], []
    for n, (name, own) in enumerate(zip(truth.ids, truth.objects, strict=True)):
        for k in range(len(own)):
            x1, y1, x2, y2 = own.boxes[k].tolist()
            ignored = int(own.difficult[k] or own.crowd[k])
            row = {"id": len(annotations) + 1, "image_id": 10 + n, "category_id": 7 + int(own.labels[k])}
            annotations.append(row | {"bbox": [x1, y1, x2 - x1, y2 - y1], "area": areas[name][k], "iscrowd": ignored})
        for k in range(len(found[name])):
            x1, y1, x2, y2 = found[name].boxes[k].tolist()
            row = {"image_id": 10 + n, "category_id": 7 + int(found[name].labels[k])}
            results.append(row | {"bbox": [x1, y1, x2 - x1, y2 - y1], "score": float(found[name].scores[k])})
    with contextlib.redirect_stdout(io.StringIO()):
        official = COCO()
        official.dataset = {"images": images, "categories": categories, "annotations": annotations}
        official.createIndex()
        run = COCOeval(official, official.loadRes(results), "bbox")
        run.evaluate()
        run.accumulate()
        run.summarize()
    return run.stats.tolist()


@pytest.mark.parametrize("seed", range(8))
def test_pycocotools_agrees_on_random_worlds(seed, capsys):
    truth, found = random_world(seed, images=12)
    draw = np.random.default_rng(seed)
    areas = {
        i: o.boxes.new_tensor(draw.choice([100, 2000, 20000], len(o)))
        for i, o in zip(truth.ids, truth.objects, strict=True)
    }
    expected = _pycocotools(truth, found, {name: values.tolist() for name, values in areas.items()})
    scores = coco_scores(truth, found, areas=areas)
    assert astuple(scores) == tuple(None if e < 0 else pytest.approx(e, abs=1e-12) for e in expected)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("images", [[], [[]], [[], []]])
def test_nothing_to_find_is_none(images):
    truth = truth_of(*images)
    assert coco_scores(truth, {}) == CocoScores()
    assert coco_scores(truth, dict.fromkeys(truth.ids, detections([(*BOX, 0.9, 0)]))) == CocoScores()


def test_objects_without_detections_are_zero():
    scores = coco_scores(truth_of([(*BOX, 0, 0, 0)]), {})
    assert (scores.AP, scores.APs, scores.AR100, scores.APm) == (0, 0, 0, None)


def test_an_area_on_the_border_of_small_counts_where_pycocotools_counts_it():
    truth = truth_of([(0, 0, 32, 32, 0, 0, 0)])
    found = {"im0": detections([(0, 0, 32, 32, 0.9, 0)])}
    expected = _pycocotools(truth, found, {"im0": [1024.0]})
    assert astuple(coco_scores(truth, found)) == tuple(None if e < 0 else pytest.approx(e) for e in expected)


def test_twelve_numbers():
    assert len(fields(CocoScores)) == 12
