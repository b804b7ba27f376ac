"""The benchmark of intervals and calibration, at a small size, and on a label set with an oracle as its reviewer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from PIL import Image

from bench_figures import bench
from tag2box.formats.export import export_labels
from tag2box.formats.listing import DataSource
from tag2box.labels.label_set import LabelSet
from tag2box.labels.labelled import LabelBox, LabelledPhoto, LabelledPhotos

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "trust-coverage.json"


def test_intervals_cover_and_calibration_helps(monkeypatch) -> None:
    module = bench("trust_coverage")
    monkeypatch.setattr(module, "SIZES", (10, 50))
    monkeypatch.setattr(module, "POPULATION", 600)
    found = module.simulated(60, 2)
    for own in found["coverage"].values():
        assert own["mean"] >= 0.95 and own["wrong_verdicts"] < 0.02
    for name in ("too low", "too high"):
        assert found["calibration"][name]["after"] < found["calibration"][name]["before"] / 2


def test_the_recorded_figures_are_those_that_are_promised() -> None:
    recorded = json.loads(RESULTS.read_text())
    assert recorded["reviews_per_cell"] == 200
    assert all(own["worst_cell"] >= 0.93 for own in recorded["coverage"].values())


def test_a_label_set_reviewed_by_an_oracle(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    made, true = [], []
    (tmp_path / "photos").mkdir()
    for number in range(40):
        file = f"p{number}.png"
        Image.new("RGB", (60, 20)).save(tmp_path / "photos" / file)
        score = float(torch.rand((), generator=generator, dtype=torch.float64))
        left = 0.0 if float(torch.rand((), generator=generator)) < score**0.3 else 30.0
        photo = LabelledPhoto(f"p{number}", file, 60, 20, ("cat",), (LabelBox((0.0, 0.0, 10.0, 10.0), "cat", score),))
        made.append(photo)
        true.append(replace(photo, boxes=(LabelBox((left, 0.0, left + 10, 10.0), "cat"),)))
    LabelSet(LabelledPhotos(tmp_path / "photos", ("cat",), tuple(made))).write(tmp_path / "labels")
    export_labels("coco", tmp_path / "truth.json", LabelledPhotos(tmp_path / "photos", ("cat",), tuple(true)))
    source = DataSource(path=tmp_path / "truth.json", photos=tmp_path / "photos")
    found = bench("trust_coverage").on_labels(tmp_path / "labels", source, 20, 4)
    assert found["photos"] == 40 and found["intervals"] == 4
    assert 0.5 <= found["precision"]["cat"] <= 1 and found["coverage"] >= 0.75
    assert set(found["calibration_error"]) == {"before", "after"}
