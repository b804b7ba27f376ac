from __future__ import annotations

import io
import json

import pytest
import torch
from rich.console import Console

from tag2box.errors import UserError
from tag2box.extend import METRICS
from tag2box.metrics.evaluation import EvaluationResult, evaluate_detections, metrics_table
from worlds import detections, random_world, truth_of

BOX = (0, 0, 40, 40)
COCO_NAMES = ["AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs", "ARm", "ARl"]


def printed(result: EvaluationResult) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=120).print(metrics_table(result))
    return out.getvalue().splitlines()


def test_every_metric_has_its_json():
    truth, found = random_world(3)
    content = evaluate_detections(truth, found, list(METRICS)).to_json()
    assert list(content) == ["voc07", "voc12", "corloc", "coco", "challenges", "errors", "breakdown"]
    assert set(content["voc07"]) == set(content["voc12"]) == {"mAP", "per_class"}
    assert set(content["corloc"]) == {"mean", "per_class"}
    assert list(content["corloc"]["per_class"]) == list(truth.classes)
    assert list(content["coco"]) == COCO_NAMES
    assert set(content["challenges"]) == {"found", "part", "grouped", "missed", "other"}
    json.dumps(content, allow_nan=False)


def test_only_the_given_metrics_in_their_order():
    assert list(evaluate_detections(truth_of([]), {}, ["corloc", "voc07"]).to_json()) == ["corloc", "voc07"]
    assert evaluate_detections(truth_of([]), {}, []).to_json() == {}


def test_undefined_is_none_and_left_out_of_the_mean():
    truth = truth_of([(*BOX, 0, 0, 0)])
    content = evaluate_detections(truth, {"im0": detections([(*BOX, 0.9, 0)])}, ["voc07"]).to_json()
    assert content == {"voc07": {"mAP": 1.0, "per_class": {"cat": 1.0, "dog": None}}}
    empty = evaluate_detections(truth_of([]), {}, list(METRICS)).to_json()
    assert empty["voc12"] == {"mAP": None, "per_class": {"cat": None, "dog": None}}
    assert set(empty["coco"].values()) == set(empty["challenges"].values()) == {None}


@pytest.mark.parametrize(("typed", "meant"), [("voc7", "voc07"), ("CorLoc", "corloc"), ("challenge", "challenges")])
def test_an_unknown_metric_names_the_nearest(typed, meant):
    with pytest.raises(UserError, match=f"'{typed}': did you mean '{meant}'") as caught:
        evaluate_detections(truth_of([]), {}, ["coco", typed])
    assert "\n" not in str(caught.value)


def test_settings_reach_their_metrics():
    truth = truth_of([(*BOX, 0, 0, 0)])
    found = {"im0": detections([(*BOX, 0.3, 0)])}
    low = evaluate_detections(truth, found, ["challenges"], min_score=0.2).to_json()
    high = evaluate_detections(truth, found, ["challenges"], min_score=0.4).to_json()
    assert (low["challenges"]["found"], high["challenges"]["missed"]) == (1, 1)
    assert evaluate_detections(truth, found, ["coco"]).to_json()["coco"]["APm"] == pytest.approx(1)
    large = evaluate_detections(truth, found, ["coco"], areas={"im0": torch.tensor([1e5])}).to_json()["coco"]
    assert (large["APm"], large["APl"]) == (None, pytest.approx(1))


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"elsewhere": detections([])}, "'elsewhere' is not in the truth"),
        ({"im0": detections([(*BOX, 0.9, 2)])}, r"label outside 0\.\.1"),
        ({"im0": detections([(*BOX, 0.9, -1)])}, r"label outside 0\.\.1"),
    ],
)
def test_detections_of_another_set_are_refused(found, words):
    with pytest.raises(UserError, match=words):
        evaluate_detections(truth_of([]), found, ["voc07"])


def test_the_table_shows_classes_means_and_numbers():
    truth = truth_of([(*BOX, 0, 0, 0)])
    lines = printed(evaluate_detections(truth, {"im0": detections([(*BOX, 0.9, 0)])}, list(METRICS)))
    row = {
        line.split("│")[1].strip(): [cell.strip() for cell in line.split("│")[2:-1]] for line in lines if "│" in line
    }
    assert row["cat"] == ["100.0", "100.0", "100.0", "", ""]
    assert row["dog"] == ["-", "-", "-", "", ""]
    assert row["mean"] == ["100.0", "100.0", "100.0", "", ""]
    assert row["AP50"] == ["", "", "", "100.0", ""]
    assert row["APl"] == ["", "", "", "-", ""]
    assert row["found"] == ["", "", "", "", "100.0"]


def test_the_table_of_nothing_is_empty():
    assert metrics_table(evaluate_detections(truth_of([]), {}, [])).row_count == 0
