"""``tag2box compare``: every system runs on equal terms, once, and is on one page."""

from __future__ import annotations

import json
import re
import resource
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from study_world import WORLD, Killed, Mortal, study, write_voc

from pages import DOCS, load
from tag2box import settings
from tag2box.annotations import Detections
from tag2box.errors import UserError
from tag2box.experiments import comparison
from tag2box.experiments.comparison import compare, plan_comparisons, run_comparisons
from tag2box.experiments.grid import read_result, reset_peak_memory, with_outcomes
from tag2box.experiments.outcomes import best_of
from tag2box.experiments.reproduction import StudyFiles
from tag2box.experiments.study_data import Splits, open_data, splits_of
from tag2box.formats.listing import DataSource
from tag2box.labels.label_set import LabelSet
from tag2box.models.vgg16 import Vgg16
from tag2box.recipes import RECIPES, Config
from tag2box.systems import SYSTEMS
from tiny_student import SMALL as TINY_STUDENT
from tiny_world import TINY, call, tree

pytestmark = pytest.mark.usefixtures("tiny_study")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder shared by all comparisons of this file."""
    return tmp_path_factory.mktemp("compared")


def run_compare(
    out: Path, *names: str, seeds: tuple[int, ...] = (0,), overrides: tuple[str, ...] = (), **more
) -> StudyFiles:
    sources = more.pop("sources", (WORLD,))
    return compare(names, sources, out, seeds=seeds, overrides=(*TINY, *overrides), **more)


def numbers(out: Path) -> dict:
    return json.loads((out / "compare.json").read_text())


def trained(watch: Mortal) -> list[str]:
    return [title for title in watch.titles if "training" in title or "detecting" in title]


# ---------------------------------------------------------------- all systems, end to end


def test_all_systems_end_on_one_page_and_a_second_call_runs_nothing(out: Path) -> None:
    written = run_compare(out, commands=["tag2box compare it"])
    page, found = written.page.read_text(), numbers(out)
    titles = [system.title for system in SYSTEMS.values()]
    assert found["systems"] == titles
    rows = {row["row"]: row for row in found["datasets"][0]["rows"]}
    assert list(rows) == titles
    for name, row in rows.items():
        assert (out / row["runs"]["0"] / "metrics.json").exists(), name
        assert f'href="{row["runs"]["0"]}/"' in page
        assert {"mAP50", "mAP50 in a trivial box", "CorLoc",
                "found", "part", "grouped", "missed", "labels' precision", "labels' recall",
                "ms a step", "MB at most"} == set(row["figures"])  # fmt: skip
        assert all(figure["0"] >= 0 for key, figure in row["figures"].items() if figure and key != "CorLoc")
        assert row["figures"]["ms a step"]["0"] > 0 and row["figures"]["MB at most"]["0"] > 0
        assert row["paper"]["VOC07"] == SYSTEMS[next(s for s in SYSTEMS if SYSTEMS[s].title == name)].reported("voc07")
    assert len({row["runs"]["0"] for row in rows.values()}) == len(SYSTEMS)  # no two are the same run
    for words in ("tag2box compare it", "other data and at another scale", "The order", "Pseudo boxes, scenes"):
        assert words in page
    assert not re.search(r"(src|href)=\"https?:", page)
    assert (out / "compare.md").read_text() == written.table
    assert all(title in written.table for title in titles)
    before, watch = tree(out / "cells"), Mortal()
    run_compare(out, progress=watch)
    assert tree(out / "cells") == before and trained(watch) == []


def test_trivial_boxes_have_rows_and_a_figure_that_is_not_above_them_is_called_so(out: Path) -> None:
    written = run_compare(out, "oicr", "od-wscl", seeds=(0, 1))
    found, page = numbers(out)["datasets"][0], written.page.read_text()
    trivial = {row["row"]: row["figures"] for row in found["trivial_rows"]}
    names = [f"{box}, {what}" for what in ("best class scores", "tags known") for box in ("centred box", "whole photo")]
    names += ["centred box, probe", "whole photo, probe", "component of the class map"]  # of the frozen features
    assert list(trivial) == names
    for name in names:
        assert set(trivial[name]["mAP50"]) == set(trivial[name]["CorLoc"]) == {"0", "1"}
        assert trivial[name]["found"] == trivial[name]["ms a step"] == {}
        assert name in page and name in written.table
    own = [row["figures"]["mAP50 in a trivial box"]["0"] for row in found["rows"]]
    assert max(own) == max(trivial[name]["mAP50"]["0"] for name in (*names[:2], *names[4:]))
    metrics = [json.loads((out / row["runs"]["0"] / "metrics.json").read_text()) for row in found["rows"]]
    assert own == [100 * m["test"]["verdicts"]["voc12"]["best"] for m in metrics]
    corloc = next(words for words in found["remarks"] if words.startswith("CorLoc, training photos: "))
    assert corloc in page.replace("&#39;", "'") and corloc in written.table
    for row in found["rows"]:
        mean = sum(row["figures"]["CorLoc"].values()) / 2
        bar = sum(max(trivial[name]["CorLoc"][seed] for name in names) for seed in ("0", "1")) / 2
        assert (f"{row['row']} (" in corloc) == (mean <= bar)


def test_systems_have_intervals_and_paired_differences_and_figures_are_marked(out: Path) -> None:
    written = run_compare(out, "oicr", "od-wscl", seeds=(0, 1))
    found, page = numbers(out)["datasets"][0], written.page.read_text()
    for figure in ("mAP50", "CorLoc"):
        first, second = found["intervals"][figure]["OICR"], found["intervals"][figure]["OD-WSCL"]
        assert "difference" not in first
        assert second["difference"]["value"] == pytest.approx(second["value"] - first["value"])
        for row in found["rows"]:
            own = found["intervals"][figure][row["row"]]
            assert own["value"] == pytest.approx(sum(row["figures"][figure].values()) / 200)
            assert own["interval"][0] <= own["value"] <= own["interval"][1]
    section = page.split('<section id="0-intervals">')[1].split("</section>")[0]
    assert "AP50 by size and number of objects" in section and "objects" in section.split("<thead>")[-1]
    assert "centred box, best class scores" in section
    bars = {row["row"]: row["figures"]["mAP50 in a trivial box"] for row in found["rows"]}
    for row in found["rows"]:
        mean, bar = (sum(values.values()) for values in (row["figures"]["mAP50"], bars[row["row"]]))
        assert ("mAP50" in row["not_above_trivial"]) == (mean <= bar)
        line = next(line for line in written.table.splitlines() if line.startswith(f"| {row['row']} |"))
        assert ("*" in line.split("|")[2]) == (mean <= bar)


def test_the_top_boxes_of_all_systems_are_in_one_table(out: Path) -> None:
    page = run_compare(out, "oicr", "od-wscl").page.read_text()
    errors = numbers(out)["datasets"][0]["errors"]
    for split in ("test", "train"):
        assert list(errors[split]) == ["OICR", "OD-WSCL", "centred box", "whole photo"]
        for own in errors[split].values():
            assert sum(kind["0"] for kind in own.values()) == pytest.approx(100)
    section = page.split('<section id="0-errors">')[1].split("</section>")[0]
    assert "Top boxes on test photos" in section and "Top boxes on training photos" in section


def test_metrics_of_an_older_version_are_completed_without_training(out: Path) -> None:
    run_compare(out, "oicr")
    (row,) = numbers(out)["datasets"][0]["rows"]
    place = out / row["runs"]["0"] / "metrics.json"
    new = json.loads(place.read_text())
    added = ("baselines", "verdicts", "errors", "extents", "breakdown", "intervals")
    old = {
        k: {n: v for n, v in part.items() if n not in added} if isinstance(part, dict) else part
        for k, part in new.items()
    }
    place.write_text(json.dumps(old))
    watch = Mortal()
    run_compare(out, "oicr", progress=watch)
    assert trained(watch) == []
    completed = json.loads(place.read_text())
    assert completed["test"]["verdicts"].keys() == new["test"]["verdicts"].keys()
    assert completed["test"]["intervals"] == new["test"]["intervals"]
    assert completed["test"]["breakdown"] == new["test"]["breakdown"]
    assert completed["train"]["verdicts"]["corloc"]["best"] == new["train"]["verdicts"]["corloc"]["best"]
    place.write_text(json.dumps(new))


def test_tables_say_which_systems_are_reduced_and_why(out: Path) -> None:
    written = run_compare(out, "oicr", "mist")
    states = {row["row"]: row["state"] for row in numbers(out)["datasets"][0]["rows"]}
    reason = "reduced: mask net of 64 channels, not 512"
    assert states == {"OICR": "whole", "MIST": reason}
    assert f"| {reason} |" in written.table and "| whole |" in written.table
    assert reason in written.page.read_text()


def test_every_system_is_shown_on_the_same_photos(out: Path) -> None:
    names = ("oicr", "mist", "od-wscl")
    page = run_compare(out, *names).page.read_text()
    captions = re.findall(r"(OICR|MIST|OD-WSCL): ", page)
    assert captions.count("OICR") == captions.count("MIST") == captions.count("OD-WSCL") > 3


def test_systems_and_tables_of_the_paper_share_their_runs(out: Path) -> None:
    run_compare(out)
    before = set((out / "cells").iterdir())
    study("table2", out)
    rows = {row["row"]: row["runs"] for row in json.loads((out / "table2.json").read_text())["rows"]}
    assert set((out / "cells").iterdir()) == before
    assert {row["row"]: row["runs"] for row in numbers(out)["datasets"][0]["rows"]}.items() <= rows.items()


def test_an_override_is_on_top_of_what_a_system_changes(out: Path) -> None:
    run_compare(out, "oicr", "mist", overrides=("criterion.contrast.enabled=true", "plan.iterations=2"))
    for row in numbers(out)["datasets"][0]["rows"]:
        config = (out / row["runs"]["0"] / "config.toml").read_text()
        assert "enabled = true" in config and "iterations = 2" in config
        assert "criterion.contrast.enabled=true" in row["settings"]


def test_several_datasets_and_seeds_are_one_page(out: Path, tmp_path: Path) -> None:
    data = open_data(WORLD, 0, tmp_path)
    ids, photos = list(data.train.ids), {p.id: p.path for p in data.tagged.photos}
    voc = write_voc(tmp_path / "VOC", data.train, photos, {"trainval": ids[:4], "test": ids[4:]})
    source = splits_of(DataSource(path=voc), None, None)
    assert isinstance(source, Splits)
    written = run_compare(out, "oicr", "c-wsl", seeds=(0, 1), sources=(WORLD, source))
    scenes, folder = numbers(out)["datasets"]
    assert (scenes["on"], scenes["seeds"], folder["seeds"]) == ("scenes", [0, 1], [0, 1])
    assert (folder["train_photos"], folder["test_photos"]) == (4, 2)
    assert len({place for d in (scenes, folder) for row in d["rows"] for place in row["runs"].values()}) == 8
    page = written.page.read_text()
    assert f"On {folder['on']}" in page and "On scenes" in page
    assert len(re.findall(r'<section id="\d-table">', page)) == 2


def test_several_backbones_are_a_table_each(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(comparison.NAMED_BACKBONES, "other", ("backbone.dropout=0.25",))
    written = run_compare(out, "oicr", "casd", backbones=("recipe", "other"))
    found = numbers(out)["datasets"]
    assert [own["backbone"] for own in found] == ["recipe", "other"]
    folders = [[place for row in own["rows"] for place in row["runs"].values()] for own in found]
    assert len({*folders[0], *folders[1]}) == 4
    for folder, dropout in zip(folders, ("dropout = 0.5", "dropout = 0.25"), strict=True):
        assert all(dropout in (out / place / "config.toml").read_text() for place in folder)
    page = written.page.read_text()
    assert "On scenes, backbone recipe" in page and "On scenes, backbone other" in page
    assert len(re.findall(r'<section id="\d-table">', page)) == 2
    for own in found:
        assert all(min(row["figures"]["ms a step"].values()) > 0 for row in own["rows"])


@pytest.mark.parametrize(
    ("name", "message"),
    [("vgg19", "--backbone vgg19: unknown; there are recipe"), ("vgg16-narrow", "weights get vgg16")],
)
def test_a_backbone_that_is_not_there_is_named_before_anything_runs(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        run_compare(tmp_path, "oicr", backbones=(name,))
    assert not list(tmp_path.iterdir())


def test_the_narrow_vgg16_is_settings_that_exist() -> None:
    base = RECIPES["scenes"]()
    config = settings.load(Config, [], list(comparison.NAMED_BACKBONES["vgg16-narrow"]), base=base)
    assert config.backbone == Vgg16(weights="vgg16-conv", train_trunk=False, neck_channels=128, neck_size=1024)


def test_the_command_compares_on_a_folder(tmp_path: Path, monkeypatch, capsys) -> None:
    data = open_data(WORLD, 0, tmp_path)
    ids, photos = list(data.train.ids), {p.id: p.path for p in data.tagged.photos}
    voc = write_voc(tmp_path / "VOC", data.train, photos, {"fit": ids[:4], "rest": ids[4:]})
    argv = ["compare", "--systems", "oicr,wsddn", "--on", f"{voc}", "--split", "fit", "--test-split", "rest"]
    argv += ["--seeds", "3", "--out", f"{tmp_path / 'out'}", *(word for o in TINY for word in ("--set", o))]
    done = call(argv, monkeypatch, capsys)
    assert done.code == 0, done.err
    assert f"page: {tmp_path / 'out' / 'compare.html'}" in done.out
    assert [row["row"] for row in numbers(tmp_path / "out")["datasets"][0]["rows"]] == ["OICR", "WSDDN"]
    assert "| OICR |" in done.out and "tag2box compare --systems" in (tmp_path / "out" / "compare.html").read_text()


def test_pictures_of_all_systems_are_small_and_of_the_same_photos(out: Path, tmp_path: Path) -> None:
    files = load(DOCS / "make_systems.py").main(out, *TINY, world=WORLD, images=tmp_path)
    assert [file.name for file in files] == [f"{name}.png" for name in SYSTEMS]
    sizes = set()
    for file in files:
        assert file.stat().st_size < 120_000
        with Image.open(file) as picture:
            sizes.add(picture.size)
    assert len(sizes) == 1  # the same photos


@pytest.mark.parametrize("page", ["", "no room", "a\n<!-- picture -->\nb\n<!-- cost -->\n"])
def test_pages_of_systems_are_filled_at_their_marks_and_again(page: str) -> None:
    fill = load(DOCS / "make_systems.py").fill
    once = fill(page, {"slv": "SLV"}, {"slv": "two seconds", "oicr": "one"})
    assert fill(once, {"slv": "SLV"}, {"slv": "two seconds"}) == once
    assert once.count("systems/slv.png") == once.count("two seconds") == page.count("cost")
    assert "one" not in once and once.startswith(page[:2])


def test_counts_come_from_boxes_and_reach_only_systems_that_require_them(out: Path) -> None:
    run_compare(out, "oicr", "c-wsl")
    configs = [(out / row["runs"]["0"] / "config.toml").read_text() for row in numbers(out)["datasets"][0]["rows"]]
    assert ['counts = "boxes"' in config for config in configs] == [False, True]
    assert ["truth.json" in config for config in configs] == [False, True]


@pytest.mark.parametrize("step", [3, 25])
def test_killed_anywhere_the_same_call_resumes_to_the_same_figures(step: int, out: Path, tmp_path: Path) -> None:
    with pytest.raises(Killed):
        run_compare(tmp_path, "oicr", "slv", progress=Mortal(step))
    run_compare(tmp_path, "oicr", "slv")
    run_compare(out, "oicr", "slv")
    for ours, theirs in zip(numbers(tmp_path)["datasets"][0]["rows"], numbers(out)["datasets"][0]["rows"], strict=True):
        assert ours["runs"] == theirs["runs"]
        for name, figures in ours["figures"].items():
            assert name in {"ms a step", "MB at most"} or figures == theirs["figures"][name]


def test_outcomes_do_not_depend_on_the_scale_of_scores(out: Path) -> None:
    run_compare(out, "oicr")
    folder = out / numbers(out)["datasets"][0]["rows"][0]["runs"]["0"]
    shares = json.loads((folder / "outcomes.json").read_text())
    assert sum(shares.values()) == pytest.approx(1)
    data = open_data(WORLD, 0, out)
    found = read_result(folder).record(data).test_detections or {}
    shrunk = {photo: Detections(d.boxes, d.scores / 1000, d.labels) for photo, d in found.items()}
    kept, small = best_of(found, data.test), best_of(shrunk, data.test)
    assert all(torch.equal(kept[photo].boxes, small[photo].boxes) for photo in kept)
    assert with_outcomes(read_result(folder), data).figures["outcomes"] == shares


def test_the_peak_memory_of_one_run_is_not_that_of_the_next() -> None:
    np.ones(60_000_000, dtype=np.float64)  # half a gigabyte, and gone
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    reset_peak_memory()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before - 300_000


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--systems", "oicr,mits"], ("mits", "did you mean mist?", "tag2box systems")),
        (["--systems", ","], ("--systems", "oicr,mist")),
        (["--on", "nowhere"], ("nowhere", "no such file or folder")),
        (["--set", "plan.seed=3"], ("--set plan.seed", "--seeds")),
        (["--set", "criterion.labeler.share=0.1"], ("criterion.labeler.share",)),
        (["--seeds", "x"], ("--seeds x", "whole numbers")),
        (["--recipe", "scense"], ("--recipe scense", "did you mean scenes?")),
        (["--on", "scenes", "--split", "train"], ("--on scenes", "leave out")),
        (["--on", "a", "--on", "b", "--split", "train"], ("--on b", "one dataset")),
    ],
)
def test_an_error_is_one_line_and_nothing_is_written(argv, words, tmp_path, monkeypatch, capsys):
    done = call(["compare", *argv, "--out", str(tmp_path / "out")], monkeypatch, capsys)
    assert done.code == 2 and done.out == ""
    assert len(done.complaints) == 1, done.err
    assert all(word in done.complaints[0] for word in words), done.complaints[0]
    assert not (tmp_path / "out").exists()


def test_missing_requirements_are_reported_before_training(tmp_path: Path) -> None:
    plans = plan_comparisons(["oicr", "c-wsl"], [WORLD], tmp_path, seeds=(0,), overrides=TINY)
    data = plans[0].data[0]
    bare = replace(data, counted=data.source)  # a dataset without counts
    with pytest.raises(UserError, match="no photo has any"):
        run_comparisons([replace(plans[0], data={0: bare})], tmp_path)
    assert not (tmp_path / "cells").exists()


def test_the_same_system_twice_is_one_row(out: Path) -> None:
    run_compare(out, "oicr", "oicr")
    assert [row["row"] for row in numbers(out)["datasets"][0]["rows"]] == ["OICR"]


# ---------------------------------------------------------------- students


STUDENTS = tuple(f"student.{own}" for own in (*TINY_STUDENT, "plan.iterations=2"))


def test_a_student_stands_below_its_teacher_and_is_trained_once(out: Path) -> None:
    written = run_compare(out, "oicr", "od-wscl", overrides=STUDENTS, students=True)
    rows = {row["row"]: row for row in numbers(out)["datasets"][0]["rows"]}
    assert list(rows) == ["OICR", "OICR, student", "OD-WSCL", "OD-WSCL, student"]
    folders = {name: out / row["runs"]["0"] for name, row in rows.items()}
    for name in ("OICR", "OD-WSCL"):
        student = rows[f"{name}, student"]
        assert student["state"] == "student on its labels" and not student["paper"]
        assert student["figures"]["mAP50"]["0"] >= 0 and student["figures"]["ms a step"]["0"] > 0
        assert not student["figures"]["labels' precision"]
        labels = LabelSet.open(folders[f"{name}, student"] / "labels")
        assert labels.run["folder"] == str(folders[name].absolute())
    assert "| OICR, student |" in written.table and "OICR, student" in written.page.read_text()
    watch = Mortal()
    run_compare(out, "oicr", "od-wscl", overrides=STUDENTS, students=True, progress=watch)
    assert trained(watch) == []
    alone = plan_comparisons(("oicr",), (WORLD,), out, seeds=(0,), overrides=TINY)[0].runs["OICR", 0]
    assert (out / "cells" / alone.name).samefile(folders["OICR"])  # a comparison without students shares the run


def test_an_interrupted_student_resumes_with_the_same_figures(out: Path, tmp_path: Path) -> None:
    run_compare(tmp_path, "oicr")
    for step in (2, 9):
        with pytest.raises(Killed):
            run_compare(tmp_path, "oicr", overrides=STUDENTS, students=True, progress=Mortal(dies_at=step))
    found = []
    for place in (tmp_path, out):
        run_compare(place, "oicr", overrides=STUDENTS, students=True)
        rows = numbers(place)["datasets"][0]["rows"]
        found.append({row["row"]: row["figures"]["mAP50"] for row in rows})
    assert found[0] == found[1] and len(found[0]) == 2


@pytest.mark.parametrize(
    ("overrides", "students", "says"),
    [
        (("student.plan.iterations=2",), False, "there are no students; add --students"),
        (("student.plan.iteration=2",), True, "iteration"),
        (("student.plan.seed=2",), True, "plan.seed: set by the study itself"),
    ],
)
def test_settings_of_students_are_checked_before_training(tmp_path, overrides, students, says) -> None:
    with pytest.raises(UserError, match=says):
        run_compare(tmp_path, "oicr", overrides=overrides, students=students)
    assert not (tmp_path / "cells").exists()
