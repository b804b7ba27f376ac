"""``tag2box reproduce``: every experiment builds, runs, writes its files, and repeats no run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from markupsafe import escape
from study_world import WORLD, Mortal, study

from tag2box.data.scenes import Scenes
from tag2box.errors import UserError
from tag2box.experiments import EXPERIMENTS
from tag2box.experiments.experiment import StudyVariant
from tag2box.experiments.paper_tables import KINDS
from tag2box.experiments.reproduction import (
    NOT_SELECTED,
    base_config,
    find_experiment,
    reproduce,
    select_rows,
    unique_seeds,
)
from tag2box.experiments.study_data import open_data
from tag2box.experiments.summary import experiments_table
from tag2box.models.weights.weight_cache import weights_folder
from tiny_world import TINY, call, environment, tree

pytestmark = pytest.mark.usefixtures("tiny_study")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder shared by all studies of this file."""
    return tmp_path_factory.mktemp("studies")


SHORT = ("table1", "table3a", "fig1c", "fig5", "fig6", "fig7", "appendix-a", "appendix-b")


def numbers(out: Path, name: str) -> dict:
    return json.loads((out / f"{name}.json").read_text())


@pytest.mark.parametrize("name", SHORT)
def test_a_study_leaves_page_numbers_and_table_and_a_second_call_runs_nothing(name: str, out: Path) -> None:
    written = study(name, out, seeds=(0,), commands=["tag2box reproduce it"])
    experiment, found, page = EXPERIMENTS[name], numbers(out, name), written.page.read_text()
    assert found["experiment"] == name and found["seeds"] == [0]
    assert escape(experiment.title) in page
    assert "tag2box reproduce it" in page or not experiment.rows
    assert not re.search(r"(src|href)=\"https?:", page)  # self-contained
    assert (out / f"{name}.md").exists() is bool(experiment.rows) is bool(written.table)
    for row in found["rows"]:
        assert bool(row["runs"]) is (row["left_out"] is None)
        assert all((out / place / "metrics.json").exists() for place in row["runs"].values())
        assert all(f'href="{place}/"' in page for place in row["runs"].values())
    before, watch = tree(out / "cells"), Mortal()
    study(name, out, seeds=(0,), progress=watch)
    assert tree(out / "cells") == before
    assert [title for title in watch.titles if "training" in title or "detecting" in title] == []


COMMAND = """
import sys
from pathlib import Path
import pytest
from study_world import Mortal, study
from tiny_world import small_network
small_network(pytest.MonkeyPatch())
watch = Mortal()
study("table3a", Path(sys.argv[1]), seeds=(0, 1), progress=watch)
print(*watch.titles, sep="\\n")
"""


def test_two_commands_at_once_share_the_work(tmp_path: Path) -> None:
    paths = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    words = [sys.executable, "-c", COMMAND, str(tmp_path / "shared")]
    both = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment() | paths) for _ in range(2)]
    titles = [title for one in both for title in one.communicate(timeout=300)[0].splitlines()]
    assert [one.returncode for one in both] == [0, 0]
    assert sum(title.endswith("training") for title in titles) == 8  # 4 rows of 2 seeds, once each
    study("table3a", tmp_path / "alone", seeds=(0, 1))
    rows = [numbers(tmp_path / where, "table3a")["rows"] for where in ("shared", "alone")]
    assert rows[0] == rows[1]
    assert not list((tmp_path / "shared").rglob("*.lock"))


def test_the_table_has_mean_and_spread_and_the_papers_figures(out: Path) -> None:
    written = study("table3a", out, seeds=(0, 1))
    found = numbers(out, "table3a")
    assert [row["paper"] for row in found["rows"]] == [{"mAP50": f} for f in (52.3, 56.1, 54.5, 58.7)]
    first = found["rows"][0]["figures"]["mAP50"]
    low, high = sorted(first.values())
    assert f"{(low + high) / 2:.1f} ({low:.1f} to {high:.1f}) | 52.3 |" in written.table.splitlines()[2]
    assert set(found["pseudo_labels"]) == {row["row"] for row in found["rows"]}
    moment = found["pseudo_labels"]["OICR+"][-1]
    assert moment["iteration"] == 4 and set(moment["precision"]) == set(moment["recall"]) == {"0.25", "0.5", "0.75"}
    assert sum(moment["boxes"].values()) <= sum(moment["objects"].values())  # argmax: one box per tag
    assert moment["threshold"] is None
    assert "mAP50 above OICR+, on the same photos" in written.page.read_text()


def test_rows_not_selected_are_not_run_and_keep_the_papers_figures(out: Path) -> None:
    written = study("table3c", out, seeds=(0,), rows=("IoU + mask", "mask + noise"))
    found = numbers(out, "table3c")["rows"]
    assert [row["row"] for row in found if row["runs"]] == ["IoU + mask", "mask + noise"]
    assert {row["left_out"] for row in found if not row["runs"]} == {NOT_SELECTED}
    assert "54.8" in written.table  # noise alone, in the paper
    assert select_rows(EXPERIMENTS["fig4"], ()) is EXPERIMENTS["fig4"]


def test_objects_alone_and_with_others_are_distinguished(out: Path) -> None:
    page = study("table3a", out, seeds=(0,)).page.read_text()
    found = numbers(out, "table3a")
    assert "Alone and with others of the class" in page
    assert sum(found["objects_by_instance_count"]["0"].values()) == sum(
        int((~(o.difficult | o.crowd)).sum()) for o in open_data(WORLD, 0, out).test.objects
    )
    assert set(found["by_instance_count"]) == {"OICR+", "+ OD", "+ WSCL", "+ both (OD-WSCL)"}
    assert set(found["by_instance_count"]["+ OD"]["several instances"]) == {"found", "missed"}


def test_changed_settings_are_new_runs(out: Path) -> None:
    study("fig5", out)
    before = set((out / "cells").iterdir())
    study("fig5", out, "plan.iterations=2")
    assert len(set((out / "cells").iterdir()) - before) == 2


def test_every_row_of_every_experiment_builds_its_settings(tmp_path: Path) -> None:
    data = {0: open_data(WORLD, 0, tmp_path)}
    for experiment in EXPERIMENTS.values():
        base = base_config(experiment, Scenes(), None, ())
        labels = [row.label for row in experiment.rows]
        assert len(set(labels)) == len(labels)
        configs = {row.label: row.config(base, 7) for row in experiment.rows if not row.absent}
        assert all(config.plan.seed == 7 for config in configs.values())
        able = [row for row in experiment.rows if not row.skip_reason()]
        assert len(experiment.runs(base, data)) == len(able)
        assert set(experiment.tracked) <= set(labels)
        assert all(row.paper or not row.absent for row in experiment.rows)  # a row is run, or the paper's


def test_rows_of_an_experiment_differ_unless_they_are_the_papers_choice() -> None:
    for name, distinct_runs in {"table3a": 4, "table3c": 8, "fig4": 16, "appendix-c": 9}.items():
        experiment = EXPERIMENTS[name]
        base = base_config(experiment, Scenes(), None, ())
        configs = {str(row.config(base, 0).criterion) + str(row.config(base, 0).augment) for row in experiment.rows}
        assert len(configs) == distinct_runs, name


def test_backbones_without_weights_are_left_out_with_the_cure(out: Path) -> None:
    assert list(weights_folder().glob("*")) == []
    study("table3b", out)
    left = {row["row"]: row["left_out"] for row in numbers(out, "table3b")["rows"]}
    assert "tag2box weights get r50-ws" in left["OD-WSCL, R50-WS"]
    assert left["OD-WSCL, lite0"] is None
    assert "tag2box weights get r50-ws" in (out / "table3b.html").read_text()


@pytest.mark.parametrize("name", KINDS)
def test_backbones_of_the_paper_are_registered(name: str) -> None:
    weights, kind, more = KINDS[name]
    row = StudyVariant(label=name, settings=(f"backbone.kind={kind}", f"backbone.weights={weights}", *more))
    assert row.config(base_config(EXPERIMENTS["table3b"], Scenes(), None, ()), 0).backbone.kind == kind


def test_a_sweep_on_scenes_trains_less_unless_a_recipe_is_named() -> None:
    fig4 = EXPERIMENTS["fig4"]
    light, full = base_config(fig4, Scenes(), None, ()), base_config(fig4, Scenes(), "scenes", ())
    assert light.plan.iterations < full.plan.iterations
    assert base_config(fig4, Scenes(), None, ("plan.iterations=7",)).plan.iterations == 7


def test_the_list_names_all() -> None:
    assert experiments_table().row_count == len(EXPERIMENTS) == 13


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["table3"], ("table3", "did you mean table3", "--list")),
        (["table3a", "--on", "nowhere"], ("nowhere", "no such file or folder")),
        (["table3a", "--on", "{csv}"], ("tags.csv", "--test FILE")),
        (["table3a", "--on", "{csv}", "--test", "{csv}"], ("tags.csv", "has no boxes")),
        (["table3a", "--on", "scenes", "--split", "train"], ("--on scenes", "leave out")),
        (["table3a", "--set", "plan.iteratons=3"], ("--set plan.iteratons=3", "did you mean plan.iterations?")),
        (["table3a", "--set", "plan.seed=3"], ("--set plan.seed", "--seeds")),
        (["table3a", "--set", "data.split=x"], ("--set data", "--on")),
        (["table3a", "--set", "feature_cache=x"], ("--set feature_cache", "--out")),
        (["table3a", "--row", "OD"], ("--row OD", "table3a has no row", "OICR+; + OD; + WSCL; + both")),
        (["fig7", "--row", "OD"], ("--row OD", "there are: none")),
        (["table3a", "--seeds", "0,one"], ("--seeds 0,one", "whole numbers")),
        (["table3a", "--recipe", "scense"], ("--recipe scense", "did you mean scenes?")),
        (["table3a", "--on", "{csv}", "--proposals", "x"], ("--test-proposals", "go together")),
    ],
)
def test_an_error_is_one_line_and_nothing_is_written(argv, words, tmp_path, monkeypatch, capsys):
    (tmp_path / "tags.csv").write_text("image,tags\na.jpg,cat\n")
    filled = [word.format(csv=tmp_path / "tags.csv") for word in argv]
    done = call(["reproduce", *filled, "--out", str(tmp_path / "out")], monkeypatch, capsys)
    assert done.code == 2 and done.out == ""
    assert len(done.complaints) == 1, done.err
    assert all(word in done.complaints[0] for word in words), done.complaints[0]
    assert not (tmp_path / "out").exists()


def test_without_a_name_the_list_is_shown(monkeypatch, capsys):
    done = call(["reproduce"], monkeypatch, capsys)
    assert done.code == 0 and "appendix-c" in done.out


def test_names_and_seeds_are_checked() -> None:
    assert find_experiment("fig4").name == "fig4"
    assert unique_seeds((1, 0, 1)) == (1, 0)
    with pytest.raises(UserError, match="below 0"):
        unique_seeds((0, -1))
    with pytest.raises(UserError, match="did you mean fig"):
        reproduce("fig8", WORLD, Path("unused"), overrides=TINY)
