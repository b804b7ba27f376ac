"""The rows of benchmarks/student.py: trained once, kept, and read again."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tag2box.formats.listing import DataSource
from tag2box.labels.label_set import LabelSet
from tiny_student import SMALL, tiny_labels

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return import_module("student")


def test_rows_are_measured_once(bench: Any, tmp_path: Path) -> None:
    labels = tiny_labels(tmp_path)
    source = DataSource(path=labels)
    data = bench.Data(LabelSet.open(labels), source, source)
    names = ["one box per tag", "second round", "true boxes"]
    cells = bench.measure(data, names, [0], tmp_path / "work", 2, SMALL)
    assert [(cell["row"], cell["iterations"]) for cell in cells] == [(name, 2) for name in names]
    assert all(0 <= cell["voc07"]["mAP"] <= 1 and cell["photos_per_cpu_second"] > 0 for cell in cells)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "work").iterdir()}
    assert bench.measure(data, names, [0], tmp_path / "work", 2, SMALL) == cells
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "work").iterdir()} == before


def test_one_box_per_tag_is_the_best_one(bench: Any, tmp_path: Path) -> None:
    labels = LabelSet.open(tiny_labels(tmp_path))
    data = bench.Data(labels, DataSource(path=tmp_path / "labels"), DataSource(path=tmp_path / "labels"))
    made = data.best_boxes().content
    for photo, own in zip(labels.content.photos, made.photos, strict=True):
        assert sorted(box.name for box in own.boxes) == sorted(photo.tags)
    assert [photo.boxes for photo in data.true_boxes().content.photos] != []


def test_held_out_photos_are_tested_on_and_not_trained_on(bench: Any, tmp_path: Path) -> None:
    labels = tiny_labels(tmp_path, 5)
    data = bench.Data.held_out(bench.read_labels(labels, "", None), DataSource(path=labels))
    trained = [photo.id for photo in data.labels.content.photos]
    assert (trained, list(data.test_truth().ids)) == (["photo1", "photo2", "photo3"], ["photo0", "photo4"])
