"""docs/adding-a-metric.md, executed; and metrics of other packages in general."""

import json
import shlex
import sys
from dataclasses import make_dataclass
from pathlib import Path

import pytest

from pages import DOCS, blocks
from tag2box import extend
from tag2box.errors import UserError
from tag2box.metrics.evaluation import evaluate_detections, metrics_table
from tag2box.metrics.voc_ap import ClassScores
from tiny_world import call
from worlds import detections, truth_of

GUIDE = DOCS / "adding-a-metric.md"
BOX = (0, 0, 40, 40)
TRUTH, FOUND = truth_of([(*BOX, 0, 0, 0)]), {"im0": detections([(*BOX, 0.9, 0)])}
NUMBERS = make_dataclass("Numbers", [("boxes", float)])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (code,) = blocks(GUIDE, "python")
    (tmp_path / "my_metrics.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_metrics", raising=False)
    extend.load_part.cache_clear()
    return tmp_path


def test_the_command_prints_the_metric(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    frame = {
        "images": [{"id": 1, "width": 60, "height": 60, "file_name": "a.jpg"}],
        "categories": [{"id": 1, "name": "cat"}],
    }
    truth = {**frame, "annotations": [{"id": 1, "image_id": 1, "category_id": 1, "bbox": [0, 0, 40, 40]}]}
    (folder / "truth.json").write_text(json.dumps(truth), encoding="utf-8")
    found = [{"image_id": 1, "category_id": 1, "bbox": [30, 30, 20, 20], "score": 0.9}]
    (folder / "boxes.json").write_text(json.dumps(found), encoding="utf-8")
    (command,) = (line for text in blocks(GUIDE, "") for line in text.splitlines() if line.startswith("tag2box "))
    done = call(shlex.split(command)[1:], monkeypatch, capsys)
    assert done.code == 0, done.err
    assert "my_metrics:touched" in done.out and "0.0" in done.out and "100.0" in done.out


def test_the_metric_of_the_guide(folder: Path) -> None:
    name = "my_metrics:touched"
    assert evaluate_detections(TRUTH, FOUND, [name]).to_json() == {
        name: {"mean": 1.0, "per_class": {"cat": 1.0, "dog": None}}
    }
    high = evaluate_detections(TRUTH, FOUND, [name], min_score=0.95).to_json()
    assert high[name]["mean"] == 0.0
    assert evaluate_detections(truth_of([]), {}, [name]).to_json()[name]["mean"] is None


@pytest.mark.parametrize("numbers", [{"boxes": 0.25}, NUMBERS(0.25)])
def test_named_numbers_are_a_dict_or_a_dataclass(numbers: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worlds.own_metric", lambda truth, found: numbers, raising=False)
    extend.load_part.cache_clear()
    result = evaluate_detections(TRUTH, FOUND, ["worlds:own_metric"])
    assert result.to_json() == {"worlds:own_metric": {"boxes": 0.25}}
    assert metrics_table(result).row_count == 1


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_such_module:f", "metric .*no_such_module.* cannot be imported"),
        ("worlds:no_such_name", "no attribute no_such_name"),
        ("worlds:NOT_A_FUNCTION", "must be a function of"),
        ("worlds:bad_metric", "must return ClassScores, a dict or a dataclass of numbers, not 0.5"),
    ],
)
def test_a_metric_that_cannot_work_is_one_line(name: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worlds.NOT_A_FUNCTION", 3, raising=False)
    monkeypatch.setattr("worlds.bad_metric", lambda truth, found: 0.5, raising=False)
    extend.load_part.cache_clear()
    with pytest.raises(UserError, match=words) as caught:
        evaluate_detections(TRUTH, FOUND, [name])
    assert "\n" not in str(caught.value)


def test_the_mean_of_classes_has_a_name() -> None:
    assert ClassScores(("a",), (0.5,)).mean_name == "mean"
    assert set(evaluate_detections(TRUTH, FOUND, ["voc07", "corloc"]).to_json()["voc07"]) == {"mAP", "per_class"}
