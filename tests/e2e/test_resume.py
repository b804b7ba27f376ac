"""A run that was stopped and continued is the run that was not; the same seed is the same run; boxes cannot leak."""

from __future__ import annotations

import ast
import dataclasses
import os
import shutil
import signal
import subprocess
import time
import typing
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import tag2box
from bench_figures import bench
from tag2box import settings
from tag2box.annotations import Objects, TaggedPhotos, Truth
from tag2box.cli.train import resume, train
from tag2box.errors import Interrupted, UserError
from tag2box.io import locked
from tag2box.recipes import Config
from tag2box.reporting.records import read_run
from tag2box.training.batches import Sample
from tag2box.types import Batch, LabelerInput, SideInfo
from tiny_world import (
    COMMAND,
    ctrl_c,
    environment,
    same,
    sign_again,
    small_config,
    small_data,
    small_network,
    stopping_at,
    story,
    tree,
    weights,
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("alone")

LONG = ("plan.iterations=30", "plan.checkpoint_every=4")


# ---------------------------------------------------------------- real processes, really stopped


@dataclasses.dataclass(frozen=True)
class Stopped:
    run: Path
    code: int
    err: str
    iterations: int  # steps in its event log


def wait_for(condition: Callable[[], bool], running: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 300  # enough for a busy machine
    while time.monotonic() < deadline:
        if condition():
            return
        assert running.poll() is None, running.communicate()
        time.sleep(0.02)
    raise AssertionError("the process never got there")


def steps(run: Path) -> int:
    """How far a run that is still writing has come."""
    file = run / "events.jsonl"
    return file.read_text().count('"event": "step"') if file.exists() else 0


@pytest.fixture(scope="module")
def unbroken(world) -> Path:
    return world.trained("unbroken", *LONG)


@pytest.fixture(scope="module", params=["interrupted", "killed"])
def stopped(request, world, unbroken, tmp_path_factory) -> Stopped:
    run = tmp_path_factory.mktemp("stopped") / request.param
    argv = [*COMMAND, *world.argv(run, *LONG)]
    running = subprocess.Popen(argv, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: steps(run) >= (3 if request.param == "interrupted" else 6), running)
        running.send_signal(signal.SIGINT if request.param == "interrupted" else signal.SIGKILL)
        _, err = running.communicate(timeout=300)
    finally:
        running.kill()
    return Stopped(run, running.returncode, err, steps(run))


def test_a_stopped_process_leaves_a_run_that_can_go_on(stopped):
    assert stopped.iterations < 30
    assert (stopped.run / "state.json").exists()
    assert "Traceback" not in stopped.err
    if stopped.run.name == "interrupted":
        assert stopped.code == 130
        last = stopped.err.splitlines()[-1]
        assert f"stopped after {stopped.iterations} of 30 iterations" in last
        assert "--resume" in last
    else:
        assert stopped.code == -signal.SIGKILL


def test_it_resumes_to_the_weights_of_an_unbroken_run(stopped, unbroken):
    resume(stopped.run)
    assert same(weights(stopped.run), weights(unbroken))
    resumed, wanted = read_run(stopped.run), read_run(unbroken)
    assert [s.iteration for s in resumed.steps] == list(range(1, 31))
    assert [s.losses for s in resumed.steps] == [s.losses for s in wanted.steps]
    assert resumed.galleries == wanted.galleries
    assert len(resumed.resumed_at) == 1


def test_of_two_trainings_into_one_folder_one_is_refused_before_it_writes(tmp_path):
    two_trains = bench("two_trains")
    two_trains.SCENES.write(tmp_path / "world")
    outcome = two_trains.trial(tmp_path / "world", tmp_path / "run")
    assert outcome["good"], outcome


# ---------------------------------------------------------------- every place a run can break at, with the tiny network


class Stop(Exception):
    """Power cut."""


def power_cut() -> None:
    raise Stop


OPTIMISERS = {
    # the rate steps at iterations 4 and 8: breaks before, at and after them are all in the table below
    "sgd": ("plan.schedule.steps=[0.4, 0.8]", "plan.schedule.gamma=0.3"),
    "adam": ("plan.optimizer.kind=adam", "plan.optimizer.lr=0.003"),
}


@pytest.fixture
def small(tmp_path, monkeypatch) -> Path:
    small_network(monkeypatch)
    small_data(tmp_path)
    return tmp_path


@pytest.mark.parametrize("optimizer", OPTIMISERS)
def test_a_break_anywhere_changes_nothing(small, optimizer):
    config = small_config(small, "plan.iterations=10", "plan.checkpoint_every=3", *OPTIMISERS[optimizer])
    train(config, small / "unbroken")
    expected = weights(small / "unbroken")
    breaks = [(ctrl_c, Interrupted, i) for i in (1, 3, 4, 5, 7, 8, 9)] + [(power_cut, Stop, i) for i in (1, 3, 5, 9)]
    for how, error, iteration in breaks:
        run = small / f"{how.__name__}-{iteration}"
        with pytest.raises(error):
            train(config, run, progress=stopping_at(iteration, how))
        resume(run)
        assert same(weights(run), expected), run.name


def test_a_run_broken_again_and_again_still_ends_the_same(small):
    config = small_config(small, "plan.iterations=6", "plan.checkpoint_every=100")
    train(config, small / "unbroken")
    with pytest.raises(Interrupted):
        train(config, small / "run", progress=stopping_at(1, ctrl_c))
    for iteration in (2, 3, 5):
        with pytest.raises(Interrupted, match=f"after {iteration} of 6"):
            resume(small / "run", progress=stopping_at(iteration, ctrl_c))
    resume(small / "run")
    assert same(weights(small / "run"), weights(small / "unbroken"))
    assert read_run(small / "run").resumed_at == (1, 2, 3, 5)


def test_ctrl_c_in_the_last_iteration_is_no_interruption(small):
    train(small_config(small), small / "run", progress=stopping_at(6, ctrl_c))
    assert story(small / "run")[-1]["event"] == "end"


def test_a_finished_run_is_left_alone(small):
    train(small_config(small), small / "run")
    before = tree(small)
    resume(small / "run")
    assert tree(small) == before


def test_a_run_that_another_process_trains_is_left_alone(small):
    with pytest.raises(Interrupted):
        train(small_config(small), small / "run", progress=stopping_at(3, ctrl_c))
    before = tree(small)
    with (
        locked(small / "run" / ".lock", "trains"),
        pytest.raises(UserError, match="run: another process trains here; wait until it is done"),
    ):
        resume(small / "run")
    assert tree(small) == before
    resume(small / "run")
    assert story(small / "run")[-1]["event"] == "end"


def test_a_run_broken_after_its_last_checkpoint_gets_its_end(small):
    train(small_config(small), small / "run")
    events = small / "run" / "events.jsonl"
    events.write_text("".join(events.read_text().splitlines(keepends=True)[:-1]))
    resume(small / "run")
    assert [e["event"] for e in story(small / "run")][-2:] == ["resume", "end"]


def test_momentum_is_restored_and_matters(small):
    """Without the optimizer state the weights differ: the equality above is not vacuous."""
    config = small_config(small)
    train(config, small / "unbroken")
    with pytest.raises(Interrupted):
        train(config, small / "run", progress=stopping_at(3, ctrl_c))
    from safetensors.torch import load_file, save_file

    file = small / "run" / "checkpoint-000003" / "optimiser.safetensors"
    save_file({name: value * 0 for name, value in load_file(file).items()}, file)
    sign_again(small / "run")
    resume(small / "run")
    assert not same(weights(small / "run"), weights(small / "unbroken"))


# ---------------------------------------------------------------- seeds


def test_a_seed_is_a_run(world, tmp_path):
    first = world.trained("od-wscl")
    train(world.config(), tmp_path / "again")
    train(world.config("plan.seed=1"), tmp_path / "other")
    assert same(weights(tmp_path / "again"), weights(first))
    assert story(tmp_path / "again") == story(first)
    assert not same(weights(tmp_path / "other"), weights(first))


def test_a_feature_cache_and_fresh_features_give_the_same_run(world, tmp_path):
    train(world.config('feature_cache=""', 'data.proposals=""'), tmp_path / "fresh")
    assert same(weights(tmp_path / "fresh"), weights(world.trained("od-wscl")))


# ---------------------------------------------------------------- weak supervision


def test_training_without_the_truth_on_disk_gives_the_same_weights(world, tmp_path):
    copy = tmp_path / "scenes" / "train"
    shutil.copytree(world.tags.parent, copy, copy_function=os.link)
    (copy / "truth.json").unlink()
    paths = (f"data.photos={copy / 'photos'}", f"data.tags={copy / 'tags.csv'}")
    train(world.config(*paths), tmp_path / "run")
    assert same(weights(tmp_path / "run"), weights(world.trained("od-wscl")))


def reachable(hint: object, seen: set[object]) -> set[object]:
    """Every class that a value of this type may hold, however deep."""
    for part in typing.get_args(hint):
        reachable(part, seen)
    if dataclasses.is_dataclass(hint) and hint not in seen:
        seen.add(hint)
        for inner in typing.get_type_hints(hint, localns={"Tensor": torch.Tensor, "torch": torch}).values():
            reachable(inner, seen)
    return seen


@pytest.mark.parametrize("kind", [TaggedPhotos, Batch, LabelerInput, Sample, Config])
def test_what_training_sees_has_no_room_for_true_boxes(kind):
    assert not reachable(kind, set()) & {Truth, Objects}
    assert {Truth, Objects} & reachable(Truth, set())  # the walk finds them


def test_fields_of_training_types_are_pinned():
    kinds = (TaggedPhotos, Batch, LabelerInput, Sample, SideInfo)
    names = {kind: [field.name for field in dataclasses.fields(kind)] for kind in kinds}
    assert names[TaggedPhotos] == ["classes", "photos", "tags", "unsure", "counts"]
    assert names[Batch] == [
        "ids", "tags", "proposals", "images", "maps", "unsure", "trunks", "side_info", "views_per_image", "flipped"
    ]  # fmt: skip
    assert names[LabelerInput] == [
        "proposals", "tags", "probs", "embed", "exemplars", "vectors", "deltas", "second", "side_info",
        "fraction", "subsets",
    ]  # fmt: skip
    assert names[Sample] == ["id", "image", "tags", "boxes", "unsure", "side_info"]
    # a number a class, or a proposal, or both: no room for boxes; "reviewed" marks proposals of `train --boxes`;
    # superpixels come from pixels, segments from tags
    assert names[SideInfo] == [
        "counts", "evidence", "objectness", "class_evidence", "reviewed", "superpixels", "segments"
    ]  # fmt: skip
    assert not [s.key for s in settings.describe(Config) if "truth" in s.key or "annotation" in s.key]


def imports(file: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{name.name}" for name in node.names}
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
    return found


def test_training_code_imports_nothing_that_reads_truth():
    root = Path(str(tag2box.__file__)).parent
    folders = ("ops", "methods", "models", "models/weights", "training")
    files = [root / "recipes.py", root / "systems.py", root / "runs.py", root / "run_inputs.py"]
    files += [root / "cli" / "train.py", root / "cli" / "training_data.py"]
    files += [file for folder in folders for file in (root / folder).glob("*.py")]
    forbidden = ("tag2box.Truth", "tag2box.annotations.Truth", "tag2box.annotations.Objects", "tag2box.metrics",
                 "tag2box.data.reviewed_boxes", "tag2box.formats.coco_boxes",
                 "tag2box.formats.voc_boxes", "tag2box.formats.yolo_boxes")  # fmt: skip
    leaks = [(file.name, name) for file in files for name in imports(file) if name.startswith(forbidden)]
    assert sorted(leaks) == [  # those that a setting enables
        ("training_data.py", "tag2box.data.reviewed_boxes.counts_from_boxes"),
        ("training_data.py", "tag2box.data.reviewed_boxes.read_reviewed"),
    ]
    assert len(files) > 20


def test_boxes_in_a_config_file_are_refused(world, tmp_path):
    (tmp_path / "more.toml").write_text('[data]\ntruth = "truth.json"\n')
    with pytest.raises(UserError, match=r"unknown key data\.truth"):
        settings.load(Config, [tmp_path / "more.toml"])
