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


@pytest.mark.parametrize(
    ("boxes", "agreements"),
    [
        ([[], []], [0.0, 0.0]),
        ([[SQUARE]], [0.0]),
        ([[SQUARE], [HALF], [AWAY]], [0.25, 0.25, 0.0]),
        ([[SQUARE, SQUARE], [SQUARE, HALF]], [0.75, 0.75]),
    ],
)
def test_agreement_is_the_mean_overlap_with_every_other_run(
    boxes: list[list[tuple[float, ...]]], agreements: list[float]
) -> None:
    tagged = [{(f"{i}.jpg", "cat"): box for i, box in enumerate(own)} for own in boxes]
    runs = [signs.MeasuredRun(str(i), 0.5, own, dict.fromkeys(own, 0.5)) for i, own in enumerate(tagged)]
    found = [signs.agreement(run, [other for other in runs if other is not run]) for run in runs]
    assert found == pytest.approx(agreements)


def test_signs_of_study_folders_are_ranked_within_each(tmp_path: Path) -> None:
    easy, hard = tmp_path / "easy", tmp_path / "hard"
    for folder, base in ((easy, 0.8), (hard, 0.1)):
        write_run(folder, "good", base + 0.1, [SQUARE], 0.2)
        write_run(folder, "fair", base, [HALF], 0.3)
        write_run(folder, "poor", base - 0.1, [AWAY], 0.4)
    signs.main([str(easy), str(hard), "--out", str(tmp_path / "out.json")])
    page = json.loads((tmp_path / "out.json").read_text())
    assert page["runs"] == 6
    assert page["score"]["all"] == pytest.approx(-1)  # the surest runs are the worst, on both
    assert page["agreement"]["within"]["easy"] == pytest.approx(0.866, abs=1e-3)  # good and fair are tied
    assert page["score"]["chosen"]["hard"] == pytest.approx({"chosen": 0.0, "mean": 0.1, "best": 0.2})
    assert [row["corloc"] for row in page["folders"]["easy"]] == pytest.approx([0.8, 0.9, 0.7])  # by name
