"""``evaluate`` as a user types it: tables, trivial boxes, and what is not above them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tag2box.annotations import Objects, Truth
from tag2box.formats.coco_boxes import write_coco_results, write_coco_truth
from tiny_world import call
from worlds import detections

MIDDLE, SMALL = (12.5, 12.5, 87.5, 87.5), (0.0, 0.0, 20.0, 20.0)  # of photos of 100 x 100


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Two photos, each with a cat in the middle; the detections are parts of them."""
    truth = Truth(("cat",), ("a", "b"), ((100, 100),) * 2, (Objects.of([MIDDLE], [0]),) * 2)
    names = {name: f"{name}.jpg" for name in truth.ids}
    found = {"a": detections([(40, 40, 60, 60, 0.9, 0)]), "b": detections([(*SMALL, 0.8, 0)])}
    write_coco_truth(tmp_path / "truth.json", truth, names)
    write_coco_results(tmp_path / "found.json", found, truth.classes, file_names=names)
    return ["--truth", f"{tmp_path / 'truth.json'}", "--detections", f"{tmp_path / 'found.json'}"]


def test_figures_below_a_centred_box_are_called_so(files, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    done = call(["evaluate", *files, "--json", f"{tmp_path / 'n.json'}"], monkeypatch, capsys)
    assert (done.code, done.err) == (0, "")
    for words in ("centred box, same class scores", "whole photo, tags known", "too large", "surroundings", "1 object"):
        assert words in done.out
    assert "corloc: 0.0 is not above a centred box (100.0) [centred box, same class scores]" in done.out
    numbers = json.loads((tmp_path / "n.json").read_text())
    assert numbers["errors"]["part"] == numbers["errors"]["nowhere"] == 0.5
    assert numbers["verdicts"]["voc07"]["is_above"] is False
    assert numbers["baselines"]["centred box, tags known"]["corloc"]["mean"] == 1


def test_without_baselines_there_are_none(files, tmp_path, monkeypatch, capsys):
    argv = ["evaluate", *files, "--metrics", "voc07", "--no-baselines", "--json", f"{tmp_path / 'n.json'}"]
    done = call(argv, monkeypatch, capsys)
    assert done.code == 0
    assert "centred" not in done.out
    assert set(json.loads((tmp_path / "n.json").read_text())) == {"voc07", "intervals"}


def test_an_own_metric_has_rows_of_trivial_boxes_in_json_and_no_verdict(files, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("worlds.boxes_per_photo", lambda truth, found: {"boxes": len(found)}, raising=False)
    argv = ["evaluate", *files, "--metrics", "worlds:boxes_per_photo", "--json", f"{tmp_path / 'n.json'}"]
    done = call(argv, monkeypatch, capsys)
    assert done.code == 0
    assert "not above" not in done.out and "All figures" not in done.out
    numbers = json.loads((tmp_path / "n.json").read_text())
    assert numbers["baselines"]["whole photo, tags known"] == {"worlds:boxes_per_photo": {"boxes": 2}}
    assert numbers["verdicts"] == {}


def test_any_iou_and_the_intervals(files, tmp_path, monkeypatch, capsys):
    """The part in photo a has an IoU of 0.07 with its cat, that in photo b one below 0.01."""
    monkeypatch.setenv("COLUMNS", "200")
    argv = [
        "evaluate",
        *files,
        "--metrics",
        "corloc,voc12,coco",
        "--iou",
        "0.05, 0.5",
        "--json",
        f"{tmp_path / 'n.json'}",
    ]
    done = call(argv, monkeypatch, capsys)
    assert (done.code, done.err) == (0, "")
    assert "95 % interval" in done.out
    numbers = json.loads((tmp_path / "n.json").read_text())
    assert list(numbers)[:5] == ["corloc@0.05", "corloc", "voc12@0.05", "voc12", "coco"]
    assert (numbers["corloc@0.05"]["mean"], numbers["corloc"]["mean"]) == (0.5, 0)
    low, high = numbers["intervals"]["corloc@0.05"]["mean"]
    assert (low, high) == pytest.approx((0, 1), abs=0.1)  # with replacement: none, one or both photos are a
    assert numbers["intervals"]["corloc"]["mean"] == [0, 0]
    assert numbers["verdicts"]["corloc@0.05"]["is_above"] is False
    assert "corloc@0.05: 50.0 is not above a centred box (100.0)" in done.out
    assert "50.0*" in done.out


def test_detections_against_others(files, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    better = tmp_path / "better.json"
    found = {name: detections([(*MIDDLE, 0.9, 0)]) for name in ("a", "b")}
    write_coco_results(better, found, ("cat",), file_names={name: f"{name}.jpg" for name in found})
    argv = [
        "evaluate",
        *files,
        "--metrics",
        "voc12,corloc",
        "--against",
        f"{better}",
        "--json",
        f"{tmp_path / 'n.json'}",
    ]
    done = call(argv, monkeypatch, capsys)
    assert (done.code, done.err) == (0, "")
    assert "difference" in done.out and "-100.0 to -100.0" in done.out
    gap = json.loads((tmp_path / "n.json").read_text())["differences"]["voc12"]["mAP"]
    assert gap == {"value": -1, "low": -1, "high": -1, "share_above": 0, "is_significant": True}
    same = call([*argv[:-4], "--against", files[3], *argv[-2:]], monkeypatch, capsys)
    gap = json.loads((tmp_path / "n.json").read_text())["differences"]["corloc"]["mean"]
    assert same.code == 0
    assert gap == {"value": 0, "low": 0, "high": 0, "share_above": 0.5, "is_significant": False}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--iou", "1"], "IoU '1'"),
        (["--iou", ""], "IoU ''"),
        (["--iou", "0.3,half"], "IoU 'half'"),
        (["--metrics", "coco@0.3"], "coco has no IoU to set"),
        (["--metrics", "voc07@2"], "IoU '2'"),
        (["--resamples", "-1"], "--resamples"),
        (["--resamples", "0", "--against", "x.json"], "--against needs at least 1"),
        (["--against", "missing.json"], "missing.json"),
    ],
)
def test_what_cannot_be_evaluated_is_one_line(files, tmp_path, monkeypatch, capsys, more, words):
    done = call(["evaluate", *files, *more, "--json", f"{tmp_path / 'n.json'}"], monkeypatch, capsys)
    assert done.code == 2
    assert words in done.err and done.err.count("\n") == 1
    assert not (tmp_path / "n.json").exists()


def test_classes_are_names_or_a_file_of_them(files, tmp_path, monkeypatch, capsys):
    (tmp_path / "classes.txt").write_text("cat\n")
    printed = [
        call(["evaluate", *files, "--metrics", "corloc", "--classes", classes], monkeypatch, capsys).out
        for classes in ("cat", f"{tmp_path / 'classes.txt'}")
    ]
    assert printed[0] == printed[1] and "cat" in printed[0]
