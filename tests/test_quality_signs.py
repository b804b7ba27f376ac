"""benchmarks/quality_signs.py: signs of made-up runs whose figures are known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench_figures import bench

signs = bench("quality_signs")
SQUARE, HALF, AWAY = (0.0, 0.0, 10.0, 10.0), (0.0, 0.0, 10.0, 5.0), (50.0, 50.0, 60.0, 60.0)


def write_run(folder: Path, name: str, corloc: float, boxes: list[tuple[float, ...]], score: float) -> None:
    place = folder / "cells" / name
    place.mkdir(parents=True)
    rows = [
        {
            "file_name": f"{i}.jpg",
            "category_name": "cat",
            "bbox": [box[0], box[1], box[2] - box[0], box[3] - box[1]],
            "score": score,
        }
        for i, box in enumerate(boxes)
    ]
    (place / "train-top-boxes.json").write_text(json.dumps(rows))
    (place / "metrics.json").write_text(json.dumps({"train": {"corloc": {"mean": corloc}}}))


def test_signs_of_study_folders_are_ranked_within_each(tmp_path: Path) -> None:
    easy, hard = tmp_path / "easy", tmp_path / "hard"
    for folder, base in ((easy, 0.8), (hard, 0.1)):
        write_run(folder, "good", base + 0.1, [SQUARE], 0.2)
        write_run(folder, "fair", base, [HALF], 0.3)
        write_run(folder, "poor", base - 0.1, [AWAY], 0.4)
    signs.main([str(easy), str(hard), "--out", str(tmp_path / "out.json"), "--resamples", "50"])
    page = json.loads((tmp_path / "out.json").read_text())
    assert page["runs"] == 6
    assert page["score"]["ranked"]["correlation"] == pytest.approx(-1)  # the surest runs are the worst, on both
    assert page["score"]["ranked"]["low"] == pytest.approx(-1)
    assert page["score"]["overall"]["correlation"] > -1, "another dataset is easier, not surer"
    assert page["agreement"]["within"]["easy"]["correlation"] == pytest.approx(0.866, abs=1e-3)  # two are tied
    assert page["score"]["chosen"]["easy"] == pytest.approx({"chosen": 0.7, "mean": 0.8, "best": 0.9})
    assert page["margin"]["runs"] == 0 and page["margin"]["overall"]["correlation"] is None


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([], (None, None)),
        ([[(0.1, 0.2)]], (None, None)),
        ([[(0.1, 0.2), (0.2, 0.4), (0.3, 0.6)]], (1.0, 1.0)),
    ],
)
def test_intervals_are_those_of_resampled_runs(groups, expected) -> None:
    found = signs.measured(groups, signs.joined, 50, 0)
    assert (found["correlation"], found["low"]) == expected
    assert found == signs.measured(groups, signs.joined, 50, 0), "the same with the same seed"


def test_signs_of_the_records_are_those_of_the_galleries(tmp_path: Path) -> None:
    write_run(tmp_path, "one", 0.5, [SQUARE], 0.5)
    own = {"id": "a", "labels": [0], "scores": [0.5]}
    rows = [{**own, "boxes": [HALF], "earlier": [{**own, "boxes": [AWAY]}]}, {**own, "boxes": [SQUARE], "earlier": []}]
    rows[1]["earlier"] = [{key: rows[0][key] for key in ("boxes", "labels", "scores")}]
    events = [{"event": "gallery", "iteration": n, "photos": [row]} for n, row in enumerate(rows)]
    folder = tmp_path / "cells" / "one"
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (row,) = signs.signs_of(signs.read_runs(tmp_path))
    assert row["stability"] == pytest.approx(0.5) and row["stages"] == pytest.approx(0.5)
    assert row["agreement"] is None and row["margin"] is None
