"""Parts of another package, named ``package.module:Name``, work in every command: from proposals to the report."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tag2box.annotations import Objects, Truth
from tag2box.formats.coco_boxes import write_coco_truth
from tag2box.proposals.store import ProposalStore
from tag2box.runs import load_run, read_config
from tiny_world import Finished, call, one_worker, process, small_data

HERE = Path(__file__).parent
SETTINGS = (
    "criterion.labeler.kind=outside_parts:TopTwo", "criterion.labeler.count=3", "backbone.kind=outside_parts:Tiny",
    "drop_block.kind=outside_parts:Halved", 'criterion.extra=[{kind = "outside_parts:SmallScores", weight = 0.2}]',
    "heads.embed_dim=6", "loader.batch_size=2", "loader.resize.scales=[48]", "inference.scales=[48]",
    "plan.iterations=2", "plan.log_every=1", "plan.checkpoint_every=1", "plan.gallery=2",
)  # fmt: skip


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Commands in this process, in a folder with photos, tags and ground truth."""
    one_worker(monkeypatch)
    small_data(tmp_path)
    (tmp_path / "tags.csv").rename(tmp_path / "tags.mine")
    ids = tuple(f"photo{i}" for i in range(4))
    truth = Truth(("bar", "box", "disc"), ids, ((64, 44),) * 4, (Objects.of([[4, 6, 21, 27]], [0]),) * 4)
    write_coco_truth(tmp_path / "truth.json", truth, {name: f"{name}.jpg" for name in ids})
    monkeypatch.chdir(tmp_path)

    def typed(*words: str) -> Finished:
        return call(words, monkeypatch, capsys)

    return typed


def train_words(*more: str) -> list[str]:
    flags = [word for setting in SETTINGS for word in ("--set", setting)]
    data = ["tags.mine", "--photos", "photos", "--data-format", "outside_parts:MyTable", "--proposals", "store"]
    return ["train", *data, "--out", "run", *flags, *more]


def test_every_command_takes_parts_of_another_package(run, tmp_path):
    data = ("tags.mine", "--photos", "photos", "--data-format", "outside_parts:MyTable")
    assert run("data", "stats", *data).code == 0
    proposed = run("propose", *data, "--method", "outside_parts:Grid", "--set", "step=12", "--short-side", "0",
                   "--out", "store")  # fmt: skip
    assert proposed.code == 0, proposed.err
    assert "--data-format outside_parts:MyTable --proposals store" in proposed.out
    assert ProposalStore.open(tmp_path / "store").source["kind"] == "outside_parts:Grid"
    trained = run(*train_words())
    assert trained.code == 0, trained.err
    config = read_config(tmp_path / "run")
    assert (config.criterion.labeler.count, config.proposals.step, config.backbone.frozen) == (3, 12, True)
    assert load_run(tmp_path / "run").detector.backbone.channels == 2 * 5  # the recipe adds surroundings
    resumed = run("train", "--out", "run", "--resume")
    assert resumed.code == 0, resumed.err
    detected = run(
        "detect", "run", "photos", "--format", "outside_parts:CountFile", "--out", "n.txt", "--min-score", "0"
    )
    assert detected.code == 0, detected.err
    assert [line.split()[0] for line in (tmp_path / "n.txt").read_text().splitlines()] == [
        f"photo{i}" for i in range(4)
    ]
    assert run("detect", "run", "photos", "--min-score", "0").code == 0
    metrics = "voc07,outside_parts:share_of_photos"
    scored = run("evaluate", "--truth", "truth.json", "--detections", "detections.json", "--metrics", metrics,
                 "--json", "scores.json")  # fmt: skip
    assert scored.code == 0, scored.err
    assert json.loads((tmp_path / "scores.json").read_text())["outside_parts:share_of_photos"] == {"photos": 1.0}
    reported = run("report", "run", "--test-truth", "truth.json", "--test-photos", "photos")
    assert reported.code == 0, reported.err


def test_processes_find_a_package_on_pythonpath(run, tmp_path, monkeypatch):
    paths = os.pathsep.join([str(HERE), str(HERE.parent)])
    monkeypatch.setenv("PYTHONPATH", paths)
    done = process(train_words("--set", "proposals.kind=outside_parts:Grid"), tmp_path)
    assert (done.code, done.complaints) == (0, [])
    done = process(["detect", "run", "photos", "--proposals", "store"], tmp_path)
    assert (done.code, done.complaints) == (0, [])
    monkeypatch.delenv("PYTHONPATH")
    done = process(["detect", "run", "photos"], tmp_path)
    assert done.code == 2
    (line,) = done.err.splitlines()
    assert "config.toml" in line and "outside_parts" in line and "PYTHONPATH" in line


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("propose", "photos", "--out", "s", "--method", "edge_box"), ("--method edge_box", "edge_boxes")),
        (("propose", "photos", "--out", "s", "--method", "nowhere:X"), ("--method nowhere:X", "cannot be imported")),
        (("propose", "photos", "--out", "s", "--method", "outside_parts:TopTwo"), ("subclass", "ProposalMethod")),
        (("propose", "photos", "--out", "s", "--method", "imported"), ("not made here", "proposals import")),
        (("data", "check", "tags.mine", "--data-format", "excel"), ("excel", "csv")),
        (("detect", "run", "photos", "--format", "yolov9"), ("yolov9", "yolo")),
        (("evaluate", "--truth", "truth.json", "--detections", "d.json", "--metrics", "outside_parts:none"), ("none",)),
    ],
)
def test_an_unknown_part_is_one_line_that_names_the_choices(run, tmp_path, words, expected):
    (tmp_path / "d.json").write_text("[]")
    before = sorted(tmp_path.iterdir())
    done = run(*words)
    assert done.code == 2 and done.out == ""
    (line,) = done.complaints
    assert all(word in line for word in expected), line
    assert sorted(tmp_path.iterdir()) == before
