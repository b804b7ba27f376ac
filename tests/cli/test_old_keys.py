"""Setting keys of version 0.1: still read from files, --set and run folders, with a warning that names the new key."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tag2box import settings
from tag2box.cli.detect import detect
from tag2box.cli.train import resume, train
from tag2box.errors import UserError
from tag2box.methods.discovery import Discovery
from tag2box.recipes import Config
from tag2box.runs import CONFIG_FILE, load_run, read_config
from tag2box.training.criterion import Criterion
from tiny_world import call, process, same, small_config, small_data, small_network, weights

OLD_FILE = """\
maps = "/cache"
maps_budget = 2.5

[objective.labeler]
exclusive = true

[feed]
batch = 6
looks = 2
max_proposals = 64

[plan.optimiser]
kind = "sgd"
lr = 0.25
"""
RENAMED = {  # old key -> new key
    "objective": "criterion",
    "feed.batch": "loader.batch_size",
    "feed.looks": "loader.views_per_image",
    "feed": "loader",
    "plan.optimiser": "plan.optimizer",
    "maps": "feature_cache",
    "maps_budget": "feature_cache_gb",
    "criterion.labeler.exclusive": "criterion.labeler.rule",
}


def old_text(text: str) -> str:
    """A settings file of this version as version 0.1 wrote it."""
    text = re.sub(r"(?m)^\[(?:adaptation|segmentation)\]\n(?:[^\[\n].*\n|\n)*", "", text)  # which it did not have
    new_names = {"[criterion": "[objective", "[loader": "[feed", "[plan.optimizer": "[plan.optimiser"}
    new_names |= {"\nbatch_size =": "\nbatch =", "\nviews_per_image =": "\nlooks ="}
    new_names |= {"feature_cache =": "maps =", "feature_cache_gb =": "maps_budget ="}
    for new, old in new_names.items():
        assert new in text, new
        text = text.replace(new, old)
    return text


def test_every_old_key_is_tested():
    assert RENAMED == Config.RENAMED


def test_a_file_of_old_keys_is_read_with_a_warning_for_each(tmp_path):
    (tmp_path / "old.toml").write_text(OLD_FILE)
    with pytest.warns(FutureWarning) as warned:
        config = settings.load(Config, [tmp_path / "old.toml"])
    assert (config.feature_cache, config.feature_cache_gb) == (Path("/cache"), 2.5)
    assert (config.loader.batch_size, config.loader.views_per_image, config.loader.max_proposals) == (6, 2, 64)
    assert (config.criterion.labeler.rule, config.plan.optimizer.kind, config.plan.optimizer.lr) == (
        "exclusive",
        "sgd",
        0.25,
    )
    lines = [str(warning.message) for warning in warned]
    assert len(lines) == len(RENAMED)
    for old, new in RENAMED.items():
        assert any(line.startswith(f"{tmp_path / 'old.toml'}: {old} is now called {new};") for line in lines), old


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("objective.labeler.kind=oicr", "criterion.labeler.kind=oicr"),
        ("feed.batch=3", "loader.batch_size=3"),
        ("feed.looks=2", "loader.views_per_image=2"),
        ("feed.resize.scales=[96]", "loader.resize.scales=[96]"),
        ("plan.optimiser.lr=0.5", "plan.optimizer.lr=0.5"),
        ("maps=cache", "feature_cache=cache"),
        ("maps_budget=1", "feature_cache_gb=1"),
        ("criterion.labeler.exclusive=true", "criterion.labeler.rule=exclusive"),
    ],
)
def test_an_old_override_means_the_new_one(old, new):
    with pytest.warns(FutureWarning, match=f"--set {old.partition('=')[0]}=.* is now called"):
        config = settings.load(Config, [], [old])
    assert config == settings.load(Config, [], [new]) != Config()


def test_the_old_rule_of_discovery_could_be_off_which_is_the_papers_and_nothing_else():
    base = replace(Config(), criterion=Criterion(labeler=Discovery(rule="published")))
    with pytest.warns(FutureWarning, match="criterion.labeler.exclusive is now called criterion.labeler.rule"):
        config = settings.load(Config, [], ["criterion.labeler.exclusive=false"], base=base)
    assert config.criterion.labeler.rule == "paper"
    with pytest.warns(FutureWarning), pytest.raises(UserError, match=r"labeler\.exclusive=maybe.*'published'"):
        settings.load(Config, [], ["criterion.labeler.exclusive=maybe"])


def test_the_command_prints_a_warning_as_one_line_and_continues(tmp_path):
    small_data(tmp_path)
    (tmp_path / "old.toml").write_text("[feed]\nbatch = 0\n")
    done = process(["train", f"{tmp_path / 'tags.csv'}", "--config", "old.toml", "--out", "run"], tmp_path)
    warning, error = done.err.splitlines()
    assert warning.startswith("tag2box: warning: old.toml: feed.batch is now called loader.batch_size;")
    assert error.startswith("tag2box: old.toml: loader.batch_size = 0: ") and done.code == 2


def without_digests(run: Path) -> None:
    """The files of version 0.1: no record of what the run was trained on, no manifest, a plain state file."""
    state = json.loads((run / "state.json").read_text())
    plain = {key: value for key, value in state.items() if key not in {"format", "manifest", "sha256"}}
    (run / "state.json").write_text(json.dumps(plain))
    folder = run / state["folder"]
    others = [path for path in run.glob("checkpoint-*") if path != folder]
    for path in (run / "run.json", run / "photos.json", folder / "manifest.json", folder / "state.json"):
        path.unlink()
    for path in others:
        shutil.rmtree(path)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_run_folder_of_version_0_1_is_loaded_resumed_and_used(tmp_path, monkeypatch, capsys):
    small_network(monkeypatch)
    small_data(tmp_path)
    config = small_config(tmp_path, "plan.iterations=4")
    train(config, tmp_path / "new")
    new = read_config(tmp_path / "new")
    train(config, tmp_path / "old")
    file = tmp_path / "old" / CONFIG_FILE
    file.write_text(old_text(file.read_text().replace("iterations = 4", "iterations = 6")))
    without_digests(tmp_path / "old")
    loaded = load_run(tmp_path / "old")
    assert loaded.config.criterion == new.criterion and loaded.config.loader == new.loader
    assert same(loaded.detector.state_dict(), weights(tmp_path / "new"))
    resume(tmp_path / "old")
    assert detect(tmp_path / "old", [tmp_path / "photos"]).keys() == {f"photo{i}" for i in range(4)}
    done = call(["report", f"{tmp_path / 'old'}", "--out", f"{tmp_path / 'r.html'}"], monkeypatch, capsys)
    assert done.code == 0 and (tmp_path / "r.html").exists()
