"""What ``tag2box train`` says before it begins: how long it takes, and what is odd about the data."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tag2box import runs
from tag2box.cli.train import resume, train
from tag2box.cli.training_data import training_summary
from tag2box.errors import Interrupted, UserError
from tag2box.recipes import RECIPES
from tiny import tiny_photos, tiny_store
from tiny_world import call, same, small_config, small_data, small_network, stopping_at, story, weights


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    small_network(monkeypatch)
    monkeypatch.chdir(tmp_path)
    small_data(tmp_path)
    return tmp_path


def argv(*more: str) -> list[str]:
    tiny = ("heads.embed_dim=6", "proposals.min_side=6", "proposals.max_boxes=12", "loader.batch_size=2",
            "loader.resize.scales=[48]", "plan.log_every=1", "plan.gallery=0")  # fmt: skip
    flags = [word for o in tiny for word in ("--set", o)]
    return ["train", "tags.csv", "--photos", "photos", "--recipe", "od-wscl", "--out", "run", *flags, *more]


def test_photos_proposals_iterations_and_rounds_are_announced(small, monkeypatch, capsys):
    done = call(argv("--set", "plan.iterations=3"), monkeypatch, capsys)
    assert (done.code, done.complaints) == (0, [])
    first, last = done.out.splitlines()
    assert re.fullmatch(r"4 photos, \d+ proposals each; 3 iterations of 2 photos = 1\.5 rounds", first), first
    assert last.startswith("trained: run")


def test_epochs_become_iterations_that_the_run_records_and_resumes(small):
    config = small_config(small, "plan.epochs=2.5")
    said: list[str] = []
    train(config, small / "whole", announce=said.append)
    assert "5 iterations of 2 photos = 2.5 rounds" in said[0]
    recorded = runs.read_config(small / "whole").plan
    assert (recorded.epochs, recorded.iterations) == (2.5, 5)
    assert story(small / "whole")[0]["iterations"] == 5
    with pytest.raises(Interrupted, match="stopped after 3 of 5 iterations"):
        train(config, small / "part", progress=stopping_at(3))
    resume(small / "part")
    assert same(weights(small / "part"), weights(small / "whole"))


def test_torchrun_resumes_a_run_whose_iterations_followed_from_epochs(small, monkeypatch):
    config = small_config(small, "plan.epochs=2.5")
    with pytest.raises(Interrupted):
        train(config, small / "run", progress=stopping_at(3))
    monkeypatch.setattr("tag2box.cli.train.is_torchrun", lambda: True)
    train(config, small / "run")
    assert story(small / "run")[-1]["event"] == "end"
    with pytest.raises(UserError, match="already holds a run with other settings"):
        train(small_config(small, "plan.epochs=3"), small / "run")


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (4, "4 photos, 6 proposals each; 300 iterations of 8 photos = 600.0 rounds, as plan.least_iterations has it"),
        (40, "40 photos, 6 proposals each; 300 iterations of 8 photos = 60.0 rounds, as plan.least_iterations has it"),
    ],
)
def test_a_bound_on_the_length_is_named(count, expected, tmp_path):
    photos = tiny_photos(tmp_path, count)
    config = RECIPES["photos"]()
    config = replace(config, plan=config.plan.for_photos(count, 8))
    assert training_summary(config, photos, tiny_store(tmp_path, photos.photos)) == expected


def test_proposals_that_class_maps_leave_out_are_told(tmp_path):
    photos = tiny_photos(tmp_path, 3)
    config = RECIPES["photos"]()
    config = replace(
        config, adaptation=replace(config.adaptation, keep_boxes=4), plan=replace(config.plan, epochs=None)
    )
    line = training_summary(config, photos, tiny_store(tmp_path, photos.photos))
    assert line == "3 photos, 6 proposals each, 4 of them used; 500 iterations of 8 photos = 1,333.3 rounds"


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("photo0.jpg,Apple\nphoto1.jpg,apple\n", "classes 'Apple' and 'apple' are spelled alike"),
        ('photo0.jpg,"apple, banana"\nphoto1.jpg,\n', "class 'apple, banana' has a comma"),
        ("photo0.jpg,a\ncopy.jpg,a\n", "same photo twice: "),
        ("photo0.jpg,a\ncopy.jpg,b\n", "same photo, other tags: "),
    ],
)
def test_what_a_check_of_the_data_would_find_is_told_before_training(rows, words, small, monkeypatch, capsys):
    shutil.copy("photos/photo0.jpg", "photos/copy.jpg")
    Path("tags.csv").write_text(f"image,tags\n{rows}")
    done = call(argv("--set", "plan.iterations=1"), monkeypatch, capsys)
    assert done.code == 0
    (line,) = done.complaints
    assert line.startswith("tag2box: warning: "), line
    assert words in line
    assert done.err.index(line) < done.err.index("proposals (")  # before anything takes long
    logged = [str(event["problem"]) for event in story(small / "run") if event["event"] == "warning"]
    assert [words in problem for problem in logged] == ([True] if words.startswith("same") else [])


def test_a_resumed_run_does_not_repeat_them(small, monkeypatch, capsys):
    shutil.copy("photos/photo0.jpg", "photos/copy.jpg")
    Path("tags.csv").write_text("image,tags\nphoto0.jpg,a\ncopy.jpg,a\n")
    assert call(argv("--set", "plan.iterations=1"), monkeypatch, capsys).code == 0
    done = call(["train", "--out", "run", "--resume"], monkeypatch, capsys)
    assert (done.code, done.complaints) == (0, [])


def test_a_store_that_does_not_exist_is_told_with_the_one_of_a_similar_name(small, monkeypatch, capsys):
    one = ("--set", "plan.iterations=1")
    first = call(argv(*one, "--proposals", "proposals"), monkeypatch, capsys)
    assert "proposals: proposals does not exist, so they are computed into it\n" in first.out
    done = call([*argv(*one, "--proposals", "propsals"), "--out", "other"], monkeypatch, capsys)
    assert done.code == 0
    assert "proposals: propsals does not exist, so they are computed into it; did you mean proposals?\n" in done.out
    index = json.loads((small / "propsals" / "index.json").read_text())
    assert index["source"]["kind"] == "selective_search"
