"""The rows of benchmarks/student.py: trained once, kept, and read again."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tag2box import settings
from tag2box.formats.listing import DataSource
from tag2box.labels.label_set import LabelSet
from tag2box.student.student_training import StudentConfig
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
    wanted = {"one box per tag": 2, "second round": 2, "true boxes": 2, "two full rounds": 4, "pasted boxes": 2}
    names = list(wanted)
    cells = bench.measure(data, names, [0], tmp_path / "work", 2, SMALL)
    assert {cell["row"]: cell["iterations"] for cell in cells} == wanted
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


def test_each_further_row_is_the_default_with_one_change(bench: Any) -> None:
    default = StudentConfig(noise=bench.DEFAULT)
    for name in bench.ROWS.keys() - bench.LADDER.keys():
        row = bench.ROWS[name]
        changed = settings.load(StudentConfig, [], list(row.overrides), base=replace(default, noise=row.noise))
        lines = set(settings.dump(changed).splitlines()) - set(settings.dump(default).splitlines())
        assert len(lines) == (0 if name == "two full rounds" else 1), name


def test_a_threshold_per_photo_sees_all_boxes_of_a_tag(bench: Any, tmp_path: Path) -> None:
    labels = LabelSet.open(tiny_labels(tmp_path))
    photo = next(photo for photo in labels.content.photos if photo.boxes)
    kinds = [replace(photo.boxes[0], is_doubtful=True, why=why) for why in ("doubtful", "unsure tag")]
    doubted = replace(labels, content=replace(labels.content, photos=(replace(photo, boxes=tuple(kinds)),)))
    source = DataSource(path=tmp_path / "labels")
    (made,) = bench.Data(doubted, source, source).all_boxes().content.photos
    assert [box.is_doubtful for box in made.boxes] == [False, True]


def test_held_out_photos_are_tested_on_and_not_trained_on(bench: Any, tmp_path: Path) -> None:
    labels = tiny_labels(tmp_path, 5)
    data = bench.Data.held_out(bench.read_labels(labels, "", None), DataSource(path=labels))
    trained = [photo.id for photo in data.labels.content.photos]
    assert (trained, list(data.test_truth().ids)) == (["photo1", "photo2", "photo3"], ["photo0", "photo4"])
