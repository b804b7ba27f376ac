"""benchmarks/label_rule.py: its matching against a twin, the choice of the score, and a whole table, resumed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from bench_figures import bench
from tag2box import settings
from tag2box.cli.train import train
from tag2box.recipes import Config, Data, od_wscl
from test_oracle_reviewer import SETTINGS, voc_folder
from tiny_world import small_network, tree
from worlds import detections, random_world, truth_of

rule = bench("label_rule")


@pytest.mark.parametrize(
    ("objects", "boxes", "expected"),
    [
        ([], [], (None, None, None, None)),
        ([(0, 0, 10, 10, 0, 0, 0)], [], (None, 0.0, 0.0, 1.0)),
        ([], [(0, 0, 10, 10, 0.9, 0)], (0.0, None, 0.0, None)),
        ([(0, 0, 10, 10, 0, 0, 0)], [(0, 0, 10, 10, 0.9, 0)], (1.0, 1.0, 1.0, 0.0)),
        ([(0, 0, 10, 10, 0, 0, 0)], [(0, 0, 10, 10, 0.9, 0), (0, 0, 10, 9, 0.8, 0)], (0.5, 1.0, 2 / 3, 0.0)),
        ([(0, 0, 10, 10, 0, 0, 0)], [(0, 0, 10, 10, 0.9, 1)], (0.0, 0.0, 0.0, 1.0)),  # another class
        ([(0, 0, 10, 10, 0, 1, 0)], [(0, 0, 10, 10, 0.9, 0)], (None, None, None, 0.0)),  # difficult
        ([(0, 0, 10, 10, 0, 0, 0)], [(0, 0, 5, 10, 0.9, 0)], (1.0, 1.0, 1.0, 0.0)),  # exactly 0.5
    ],
)
def test_figures_of_one_photo(objects: list, boxes: list, expected: tuple[float | None, ...]) -> None:
    own = rule.figures({"im0": detections(boxes)}, truth_of(objects))
    assert (own["precision"], own["recall"], own["F1"], own["empty tags"]) == expected


@given(seed=st.integers(0, 10_000))
def test_the_chosen_score_is_the_best_of_all(seed: int) -> None:
    truth, found = random_world(seed)
    chosen = rule.best_score(rule.judged(found, truth), rule.count_objects(truth))

    def f1(score: float) -> float:
        return rule.figures(rule.above(found, score, truth, tagged_only=False), truth)["F1"] or 0.0

    scores = {float(score) for own in found.values() for score in own.scores}
    assert f1(chosen) == pytest.approx(max((f1(score) for score in scores), default=0.0))


@pytest.mark.slow
def test_a_table_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    small_network(monkeypatch)
    voc = voc_folder(tmp_path)
    base = replace(od_wscl(), data=Data(tags=voc, split="train"))
    train(settings.load(Config, [], list(SETTINGS), base=base), tmp_path / "run")
    argv = [f"{voc}", "--runs", f"{tmp_path / 'run'}", "--test-split", "test", "--work", f"{tmp_path / 'work'}",
            "--out", f"{tmp_path / 'rule.json'}"]  # fmt: skip
    rule.main(argv)
    rows = json.loads((tmp_path / "rule.json").read_text())["rows"]
    names = ["detect", "detect, tagged classes", "label", "label, auto"]
    assert [(row["split"], row["row"]) for row in rows] == [(split, n) for split in ("train", "test") for n in names]
    assert all(row["empty tags"] == 0 for row in rows if row["row"].startswith("label"))
    assert rows[0]["score"] == rows[4]["score"] and rows[1]["score"] == rows[5]["score"]
    assert rows[0]["F1"] <= rows[1]["F1"]
    before, table = tree(tmp_path / "work"), capsys.readouterr().out
    rule.main(argv)
    assert tree(tmp_path / "work") == before and capsys.readouterr().out == table
