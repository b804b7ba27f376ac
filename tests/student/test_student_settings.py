"""No dead switches: every setting of a student is shown to change what a run does. And where it starts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tag2box import runs, settings
from tag2box.cli.label import label
from tag2box.cli.student import train_student
from tag2box.cli.train import train
from tag2box.errors import UserError
from tag2box.formats.listing import DataSource
from tag2box.labels.label_set import LabelSet
from tag2box.student.student_training import StudentConfig, StudentPlan
from tag2box.training import checkpoint
from tag2box.training.dist import has_bf16
from tiny_student import SMALL, Tiny, tiny_labels
from tiny_world import same, small_config, small_data, small_network, story, weights

BASE = (*SMALL, "plan.iterations=3", "augmentation.mosaic=0.5")
CHANGES = {
    "name": "other", "network.width": "16", "network.depth": "2", "network.frozen_stages": "1",
    "noise.weights": "none", "noise.min_weight": "0.9", "noise.threshold": "0", "noise.ignore": "false",
    "noise.open_tags": "false", "noise.enlarge": "3", "noise.threshold_of": "photo", "noise.drop": "0.9",
    "noise.doubtful": "1", "augmentation.copy_paste": "1",
    "augmentation.sides": "[96]", "augmentation.zoom": "[0.5, 0.6]",
    "augmentation.stretch": "2", "augmentation.flip": "0", "augmentation.colour": "0.6", "augmentation.mosaic": "0",
    "augmentation.plain_end": "1", "augmentation.least_visible": "1", "rounds.count": "2", "rounds.agreement": "0",
    "rounds.rule.floor": "0", "plan.iterations": "4", "plan.batch_size": "3", "plan.seed": "1", "plan.lr": "0.01",
    "plan.backbone_lr": "3", "plan.weight_decay": "3", "plan.warmup": "0", "plan.average": "0.1",
    "plan.box_weight": "9", "plan.top": "2", "plan.assignment": "centre", "plan.log_every": "3",
    "plan.checkpoint_every": "3", "plan.keep_checkpoints": "1", "precision": "bf16",
}  # fmt: skip
ELSEWHERE = {
    "kind", "labels", "photos", "start", "device", "network.kind", "backbone.", "inference.", "rounds.rule.",
}  # fmt: skip
"""Shown by other tests: paths, plug-ins, and settings of parts that other rooms test."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Labels of every kind: certain and weak ones, doubtful boxes, a tag without any box."""
    folder = tmp_path_factory.mktemp("settings")
    made = LabelSet.open(tiny_labels(folder, 9))
    photos = list(made.content.photos)
    weak = replace(photos[1].boxes[0], score=0.3)
    photos[1] = replace(
        photos[1], boxes=(weak, replace(weak, box=(20.0, 4.0, 40.0, 20.0), score=0.2, is_doubtful=True))
    )
    photos[2] = replace(photos[2], boxes=(replace(photos[2].boxes[0], score=0.01),))
    photos[4] = replace(photos[4], boxes=())
    replace(made, content=replace(made.content, photos=tuple(photos))).write(folder / "mixed")
    return folder


def outcome(world: Path, name: str, *overrides: str) -> tuple[object, ...]:
    run = world / name
    if not run.exists():
        train_student(world / "mixed", run, overrides=(*BASE, *overrides))
    kept = sorted(path.name for path in run.glob("checkpoint-*"))
    kept += [path.read_text() for path in run.glob("labels-round-*/labels.json")]
    return story(run), kept, {key: value.tolist() for key, value in weights(run).items()}


@pytest.mark.parametrize("key", CHANGES)
def test_a_setting_changes_what_a_run_does(world: Path, key: str) -> None:
    if key == "precision" and not has_bf16():
        pytest.skip("this processor has no bf16 instructions")
    rounds = ("rounds.count=2", "rounds.agreement=1.0") if key.startswith("rounds.") and key != "rounds.count" else ()
    more = rounds or (("rounds.agreement=1.0",) if key == "rounds.count" else ())
    base = outcome(world, f"base-{len(more)}", *more)
    assert outcome(world, key, *more, f"{key}={CHANGES[key]}") != base


def test_every_setting_is_in_the_table() -> None:
    keys = {setting.key for setting in settings.describe(StudentConfig)}
    assert {key for key in keys - CHANGES.keys() if not key.startswith(tuple(ELSEWHERE))} == set()
    assert CHANGES.keys() <= keys


# ---------------------------------------------------------------- where it starts


def test_a_student_starts_from_its_teacher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_data(tmp_path, 4)
    small_network(monkeypatch)
    train(small_config(tmp_path, "plan.iterations=1"), tmp_path / "teacher")
    source = DataSource(path=tmp_path / "tags.csv", photos=tmp_path / "photos")
    label(tmp_path / "teacher", source, tmp_path / "labels")
    frozen = (*SMALL, "plan.iterations=1", "network.frozen_stages=100")
    for start in ("teacher", "imagenet"):
        train_student(tmp_path / "labels", tmp_path / f"from-{start}", overrides=(*frozen, f"start={start}"))
    teacher = {name: value for name, value in weights(tmp_path / "teacher").items() if name.startswith("backbone.")}
    students = [
        {name: value for name, value in weights(tmp_path / f"from-{start}").items() if name.startswith("backbone.")}
        for start in ("teacher", "imagenet")
    ]
    assert same(students[0], teacher) and not same(students[1], teacher)
    with pytest.raises(UserError, match="is another one; set backbone as in its"):
        train_student(
            tmp_path / "labels", tmp_path / "other", overrides=(*SMALL, "start=teacher", "backbone.kind=lite0")
        )
    (tmp_path / "teacher").rename(tmp_path / "moved")
    train(small_config(tmp_path, "plan.iterations=2"), tmp_path / "teacher")
    with pytest.raises(UserError, match="has other weights than when it made the labels; label again"):
        train_student(tmp_path / "labels", tmp_path / "other", overrides=(*frozen, "start=teacher"))


def test_a_network_of_another_package_is_trained_or_refused(world: Path, tmp_path: Path) -> None:
    own = (*SMALL, "plan.iterations=1", "network.kind=tiny_student:OwnNetwork")
    how = [o for o in own if not o.startswith(("network.width", "network.depth", "network.frozen"))]
    train_student(world / "mixed", tmp_path / "run", overrides=how)
    assert 'kind = "tiny_student:OwnNetwork"' in (tmp_path / "run" / "config.toml").read_text()
    trained = runs.open_run(tmp_path / "run")
    assert isinstance(trained, runs.StudentRun)
    assert len(trained.predict([torch.zeros(3, 40, 40, dtype=torch.uint8)])) == 1
    with pytest.raises(UserError, match="is no network of a student"):
        train_student(world / "mixed", tmp_path / "bad", overrides=[*how, "network.kind=tiny_student:NoNetwork"])


# ---------------------------------------------------------------- the schedule


@pytest.mark.parametrize(("iteration", "decay"), [(0, 0.1), (8, 0.5), (10**6, 0.995)])
def test_the_average_follows_quickly_at_first(iteration: int, decay: float) -> None:
    assert StudentPlan().average_decay(iteration) == pytest.approx(decay)


@pytest.mark.parametrize(("iteration", "factor"), [(0, 0.1), (9, 0.98054), (50, 0.51), (100, 0.02)])
def test_the_learning_rate_rises_quickly_and_falls_with_a_cosine(iteration: int, factor: float) -> None:
    assert StudentPlan(iterations=100, warmup=10).lr_factor(iteration) == pytest.approx(factor, abs=1e-5)


def test_state_names_the_classes_and_the_preprocessing(world: Path) -> None:
    outcome(world, "base-0")
    state = checkpoint.read_state(world / "base-0")
    assert state.classes == LabelSet.open(world / "mixed").classes
    assert json.loads(json.dumps(state.preprocess))["order"] == Tiny().build().preprocess.order
