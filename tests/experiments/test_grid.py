"""Runs are named by what their figures depend on, run once, and survive a kill at any moment."""

from __future__ import annotations

import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from study_world import WORLD, Killed, Mortal, study

from tag2box import settings
from tag2box.errors import Busy, Interrupted, UserError
from tag2box.experiments import grid
from tag2box.experiments.grid import (
    RUN_LOCK,
    GridRun,
    RunResult,
    finish_all,
    finish_run,
    is_finished,
    is_taken,
)
from tag2box.experiments.study_data import SplitStores, StudyData, open_data
from tag2box.identity import pathless
from tag2box.io import locked
from tag2box.proposals.base import Candidates
from tag2box.proposals.importers.proposal_files import Imported
from tag2box.proposals.store import write_store
from tag2box.recipes import Config, scenes
from tiny import tiny_boxes
from tiny_world import TINY, small_network, tree

BASE = settings.load(Config, [], TINY, base=scenes())


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> StudyData:
    return open_data(WORLD, 0, tmp_path_factory.mktemp("data"))


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    small_network(monkeypatch)


def changed(*overrides: str) -> Config:
    return settings.load(Config, [], overrides, base=BASE)


# ---------------------------------------------------------------- names


@pytest.mark.parametrize(
    "same",
    [
        BASE,
        replace(BASE, name="by another name"),
        replace(BASE, feature_cache=Path("elsewhere")),
        changed("data.tags=other.csv", "data.proposals=other"),
        changed("plan.iterations=4"),
    ],
)
def test_a_run_is_the_same_whatever_its_name_and_paths(data: StudyData, same: Config) -> None:
    assert GridRun(same, data).name == GridRun(BASE, data).name


@pytest.mark.parametrize(
    "change",
    [
        "plan.seed=1",
        "plan.iterations=5",
        "criterion.labeler.kind=oicr",
        "criterion.labeler.nms_iou=0.2",
        "inference.scales=[96, 128]",
        "proposals.max_boxes=15",
        "proposals.kind=edge_boxes",
        "backbone.pool_size=6",
        "backbone.kind=vgg16",
        "data.skip_bad=true",
    ],
)
def test_a_changed_setting_is_another_run(data: StudyData, change: str) -> None:
    assert GridRun(changed(change), data).name != GridRun(BASE, data).name


def test_other_photos_are_another_run(data: StudyData, tmp_path: Path) -> None:
    other = open_data(WORLD, 1, tmp_path)
    assert GridRun(BASE, other).name != GridRun(BASE, data).name


def test_the_same_photos_elsewhere_are_the_same_run(data: StudyData, tmp_path: Path) -> None:
    assert GridRun(BASE, open_data(WORLD, 0, tmp_path)).name == GridRun(BASE, data).name


def test_a_file_of_weights_counts_by_its_content(data: StudyData, tmp_path: Path) -> None:
    names = []
    for name, content in (("a.pth", b"x"), ("b.pth", b"x"), ("c.pth", b"y")):
        (tmp_path / name).write_bytes(content)
        names.append(GridRun(changed("backbone.kind=vgg16", f"backbone.weights={tmp_path / name}"), data).name)
    assert names[0] == names[1] != names[2]


def test_pathless_settings_keep_all_that_matters() -> None:
    config = changed("data.skip_bad=true", "plan.seed=3")
    assert pathless(config).plan == config.plan
    assert pathless(config).data.skip_bad
    assert pathless(pathless(config)) == pathless(config)


# ---------------------------------------------------------------- running


def figures(results: dict[str, RunResult]) -> dict[str, object]:
    return {name: {k: v for k, v in result.figures.items() if k != "cost"} for name, result in results.items()}


def test_nothing_to_do_is_nothing(tmp_path: Path) -> None:
    assert finish_all([], tmp_path) == {}


def test_a_finished_run_is_not_repeated(data: StudyData, tmp_path: Path) -> None:
    run = GridRun(BASE, data)
    first = finish_run(run, tmp_path)
    assert is_finished(run, tmp_path)
    assert first.figure(("test", "voc12", "mAP")) is not None
    assert first.figure(("cost", "iterations")) == 4
    assert first.figure(("no", "such", "figure")) is None
    before, watch = tree(tmp_path), Mortal(dies_at=1)
    assert finish_run(run, tmp_path, progress=watch) == first
    assert tree(tmp_path) == before


def test_a_run_whose_iterations_follow_from_epochs_is_resumed_and_read(data: StudyData, tmp_path: Path) -> None:
    run = GridRun(changed("plan.epochs=0.5", "plan.least_iterations=5"), data)
    asked = run.config.plan.iterations
    with pytest.raises(Killed):
        finish_run(run, tmp_path, progress=Mortal(dies_at=9))
    first = finish_run(run, tmp_path)
    assert first.figure(("cost", "iterations")) == 5 != asked
    assert finish_run(run, tmp_path) == first


def test_equal_runs_are_run_once(data: StudyData, tmp_path: Path) -> None:
    runs = [GridRun(replace(BASE, name=name), data) for name in ("a", "b")]
    assert len(finish_all(runs, tmp_path)) == 1
    assert len(list(tmp_path.iterdir())) == 1


def test_runs_share_proposals_and_feature_caches(data: StudyData, tmp_path: Path) -> None:
    runs = [GridRun(changed(f"plan.seed={seed}"), data) for seed in (0, 1)]
    watch = Mortal()
    finish_all(runs, tmp_path, progress=watch)
    assert not any((tmp_path / run.name / "proposals").exists() for run in runs)
    assert not any((tmp_path / run.name / "maps").exists() for run in runs)
    assert not any("run 2" in title and "proposals" in title for title in watch.titles)


def test_progress_titles_have_the_position_in_the_queue(data: StudyData, tmp_path: Path) -> None:
    runs = [GridRun(changed(f"plan.seed={seed}"), data) for seed in (0, 1, 2)]
    finish_run(runs[1], tmp_path)
    watch = Mortal()
    finish_all(runs, tmp_path, progress=watch)
    trained = [title for title in watch.titles if title.endswith("training")]
    assert trained[0] == "run 1 of 2: training"
    assert trained[1].startswith("run 2 of 2, about ") and " left: training" in trained[1]
    assert len(trained) == 2


def test_a_run_locked_by_another_process_comes_last(
    data: StudyData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grid, "QUEUE_PAUSE", 0.01)
    first, second = (GridRun(changed(f"plan.seed={seed}"), data) for seed in (0, 1))
    watch = Mortal()
    with ThreadPoolExecutor(1) as other:
        with locked(tmp_path / first.name / RUN_LOCK, "finishes a run"):
            assert is_taken(first, tmp_path) and not is_taken(second, tmp_path)
            with pytest.raises(Busy, match="another process finishes a run here"):
                finish_run(first, tmp_path)
            running = other.submit(finish_all, [first, second], tmp_path, progress=watch)
            while not watch.titles or "waiting" not in watch.titles[-1]:
                assert not running.done()
                time.sleep(0.01)
            assert is_finished(second, tmp_path) and not is_finished(first, tmp_path)
        assert list(running.result()) == [first.name, second.name]
    assert "waiting for another command, runs left: 1" in watch.titles
    assert not is_taken(first, tmp_path)


def test_killed_at_any_moment_a_queue_resumes_to_the_same_figures(data: StudyData, tmp_path: Path) -> None:
    def run(home: Path, watch: Mortal) -> dict[str, object]:
        runs = [GridRun(changed(f"plan.seed={seed}"), replace(data, home=home)) for seed in (0, 1)]
        return figures(finish_all(runs, home / "cells", progress=watch))

    run(tmp_path / "first", Mortal())  # what a process computes once
    counting = Mortal()
    unbroken = run(tmp_path / "unbroken", counting)
    for number, moment in enumerate(range(1, counting.steps + 1, max(1, counting.steps // 3))):
        with pytest.raises(Killed):
            run(tmp_path / "broken", Mortal(dies_at=moment))
        if number % 2:  # killed again before it is let through
            with pytest.raises(Killed):
                run(tmp_path / "broken", Mortal(dies_at=1))
        assert run(tmp_path / "broken", Mortal()) == unbroken
        shutil.rmtree(tmp_path / "broken")
    assert counting.steps > 30


def test_killed_between_two_files_a_run_starts_again(data: StudyData, tmp_path: Path) -> None:
    run = GridRun(BASE, data)
    whole = finish_run(run, tmp_path / "whole")
    broken = tmp_path / "broken" / run.name
    broken.mkdir(parents=True)
    shutil.copy(whole.folder / "config.toml", broken)
    assert finish_run(run, tmp_path / "broken").figures["test"] == whole.figures["test"]
    assert json.loads((broken / "events.jsonl").read_text().splitlines()[0])["event"] == "start"


def test_an_unfinished_run_survives_a_move_of_its_dataset(tmp_path: Path) -> None:
    run = GridRun(BASE, open_data(WORLD, 0, tmp_path / "before"))
    with pytest.raises(Killed):
        finish_run(run, tmp_path / "cells", progress=Mortal(dies_at=9))
    shutil.move(tmp_path / "before", tmp_path / "after")
    moved = GridRun(BASE, open_data(WORLD, 0, tmp_path / "after"))
    assert moved.name == run.name
    assert finish_run(moved, tmp_path / "cells").figure(("cost", "iterations")) == 4


def test_ctrl_c_names_the_position_and_the_way_to_resume(data: StudyData, tmp_path: Path) -> None:
    class Impatient(Mortal):
        def advance(self, note: str = "") -> None:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted, match="run 1 of 1; finished work is kept, and the same command resumes"):
        finish_all([GridRun(BASE, data)], tmp_path, progress=Impatient())


def test_imported_proposals_are_used_and_are_part_of_the_name(data: StudyData, tmp_path: Path) -> None:
    names = []
    for making in (0, 1):
        chance = torch.Generator().manual_seed(making)
        stores = {"train": data.tagged.photos, "test": data.test_photos}
        for part, photos in stores.items():
            boxes = [Candidates.unranked(tiny_boxes(photo, 6 + making, chance)) for photo in photos]
            write_store(tmp_path / f"{part}{making}", {"kind": "imported"}, photos, boxes)
        brought = replace(data, boxes=SplitStores(tmp_path / f"train{making}", tmp_path / f"test{making}"))
        names.append(GridRun(replace(BASE, proposals=Imported()), brought))
    assert names[0].name != names[1].name != GridRun(BASE, data).name
    assert finish_run(names[0], tmp_path / "cells").figure(("test", "voc12", "mAP")) is not None


# ---------------------------------------------------------------- folders that are not what they should be


def spoil(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("metrics.json", "{", "metrics.json: not readable as JSON"),
        ("metrics.json", "[]", "remove the folder"),
        ("quality.json", "{}", "remove the folder"),
        ("quality.json", "", "quality.json: not readable as JSON"),
        ("quality.json", '[{"iteration": 3}]', "quality.json: not written by a study"),
        ("quality.json", "[3]", "quality.json: not written by a study"),
        ("config.toml", "name = 3", "config.toml"),
        ("config.toml", "[plan]\niterations = 5", "is not the requested setting; remove the folder"),
    ],
)
def test_a_damaged_run_is_an_error_of_one_line(
    data: StudyData, tmp_path: Path, file: str, text: str, words: str
) -> None:
    run = GridRun(BASE, data)
    spoil(finish_run(run, tmp_path).folder, file, text)
    with pytest.raises(UserError) as error:
        finish_run(run, tmp_path)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_studies_share_runs(tmp_path: Path) -> None:
    study("table3a", tmp_path)
    before = tree(tmp_path / "cells")
    study("fig5", tmp_path)
    assert tree(tmp_path / "cells") == before
