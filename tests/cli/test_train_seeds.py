"""``tag2box train --seeds``: a run and a label set for each, what is unfinished continued, and the best one named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tag2box import runs
from tag2box.cli.train import SEEDS_FILE, train_seeds
from tag2box.errors import Interrupted, UserError
from tag2box.labels.label_set import LabelSet
from tag2box.labels.quality import SIGNS_FILE, read_signs
from tiny_world import call, small_config, small_data, small_network, stopping_at


def test_every_seed_is_kept_and_the_best_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_network(monkeypatch)
    small_data(tmp_path, 6)
    config, out = small_config(tmp_path, "plan.iterations=2"), tmp_path / "runs"
    with pytest.raises(Interrupted):
        train_seeds(config, [0, 1], out, progress=stopping_at(1))
    assert not (out / SEEDS_FILE).exists() and not (out / "seed-1").exists()
    choice = train_seeds(config, [0, 1], out)
    found = json.loads((out / SEEDS_FILE).read_text())
    assert found["best"] == choice.best and found["is_sure"] == choice.is_sure and set(found["scores"]) == {
        "seed-0", "seed-1",
    }  # fmt: skip
    for seed in (0, 1):
        run = out / f"seed-{seed}"
        assert runs.read_config(run).plan.seed == seed and not (run / "proposals").exists()
        mean = LabelSet.open(out / f"labels-{seed}").content.best_scores()
        assert {name: own.score for name, own in read_signs(run / SIGNS_FILE).classes.items()} == pytest.approx(mean)
    before = (out / "seed-0" / "events.jsonl").read_bytes()
    assert train_seeds(config, [0, 1], out) == choice
    assert (out / "seed-0" / "events.jsonl").read_bytes() == before, "what is finished is not trained again"
    with pytest.raises(UserError, match="other settings"):
        train_seeds(small_config(tmp_path, "plan.iterations=3"), [0, 1], out)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seeds", "0"], "expected two different seeds or more"),
        (["--seeds", "1,1"], "expected two different seeds or more"),
        (["--seeds", "one,two"], "expected whole numbers"),
        (["--seeds", "0,1", "--resume"], "--resume takes its settings from the run"),
    ],
)
def test_bad_seeds_are_one_line(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = call(["train", "--out", f"{tmp_path / 'run'}", *words], monkeypatch, capsys)
    assert said.code == 2 and message in said.err and not (tmp_path / "run").exists()


def test_the_command_says_which_run_is_best_and_what_to_do_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small_network(monkeypatch)
    small_data(tmp_path, 6)
    shown = ["heads.embed_dim=6", "proposals.min_side=6", "proposals.max_boxes=12", "loader.batch_size=2",
             "loader.resize.scales=[48]", "inference.scales=[48]", "plan.iterations=1",
             "plan.schedule.warmup=1"]  # fmt: skip
    words = [word for one in shown for word in ("--set", one)]
    said = call(
        ["train", f"{tmp_path / 'tags.csv'}", "--photos", f"{tmp_path / 'photos'}", "--recipe", "od-wscl", "--out",
         f"{tmp_path / 'runs'}", "--seeds", "0,1", *words],
        monkeypatch, capsys,
    )  # fmt: skip
    assert said.code == 0, said.err
    assert "seed-0" in said.out and "seed-1" in said.out and "next: tag2box" in said.out
