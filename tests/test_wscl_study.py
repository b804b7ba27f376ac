"""benchmarks/wscl_study.py: its rows and their order, and a small queue that is run, resumed and written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench_figures import bench
from tag2box.errors import UserError
from tag2box.experiments.study_data import open_data
from tag2box.recipes import RECIPES
from tag2box.systems import SYSTEMS
from tag2box.training.optim import Adam
from tiny_world import SCENES, TINY

study = bench("wscl_study")
WORLD = replace(SCENES, train=6, test=3)


def test_the_grid_covers_every_question_and_the_telling_rows_come_first() -> None:
    base = RECIPES["scenes"]()
    rows = study.rows_of(study.STUDIES, base, tiers=range(5))
    assert [row.tier for row in rows] == sorted(row.tier for row in rows)
    by_study = {name: [row for row in rows if row.study == name] for name in study.STUDIES}
    assert [len(own) for own in by_study.values()] == [7, 4 + 2 * 3 + 2 * 3 * 3 * 4 + 2 * 4, len(SYSTEMS), 19, 5 + 4]
    configs = [row.config(base, 0) for row in by_study["wscl"] if not row.name.startswith("discovery")]
    weights = {c.criterion.contrast.weight for c in configs if c.criterion.contrast.enabled}
    assert max(weights) / min(weights) == pytest.approx(1000)  # three decades
    assert {c.criterion.contrast.omega for c in configs} == {"share", "batch", "pair"}
    assert {(c.plan.optimizer.kind, c.backbone.train_tail, c.backbone.train_trunk) for c in configs} == {
        (kind, *parts) for kind in ("sgd", "adam") for parts in ((False, False), (True, False), (True, True))
    }
    assert all(c.criterion.labeler.kind == "oicr" for c in configs)
    rules = [row.config(base, 0).criterion.labeler for row in by_study["discovery"][1:]]
    assert [own.rule for own in rules] == 2 * ["paper", "exclusive", "published"]
    first = [row for row in by_study["wscl"] if row.tier == 0]
    assert len(first) == 4 + 2 + 2 * 3 and all(row.config(base, 0).backbone == base.backbone for row in first)


def test_a_row_without_wscl_stands_before_or_beside_the_rows_it_is_compared_with() -> None:
    rows = study.rows_of(("wscl",), RECIPES["scenes"]())
    rows = [row for row in rows if not row.name.startswith("none, SGD, lr")]
    tiers = {tuple(row.name.split(", ")[-2:]): row.tier for row in rows if row.name.startswith("none")}
    assert all(tiers[tuple(row.name.split(", ")[-2:])] <= row.tier for row in rows)


def test_rates_of_sgd_are_swept_without_wscl_and_one_is_given_to_all_other_rows() -> None:
    base = RECIPES["scenes"]()
    rows = {row.name: row.config(base, 0) for row in study.rows_of(("wscl",), base, sgd_lr=0.1)}
    sweep = [config for name, config in rows.items() if name.startswith("none, SGD, lr")]
    assert [config.plan.optimizer.lr for config in sweep] == [0.01, 0.03, 0.1, 0.3]
    assert not any(config.criterion.contrast.enabled for config in sweep)
    others = [config for name, config in rows.items() if config not in sweep]
    assert {config.plan.optimizer.lr for config in others if config.plan.optimizer.kind == "sgd"} == {0.1}
    adam = base.plan.optimizer.lr if base.plan.optimizer.kind == "adam" else Adam().lr
    assert {config.plan.optimizer.lr for config in others if config.plan.optimizer.kind == "adam"} == {adam}


def test_every_omega_is_also_run_on_the_labels_of_discovery() -> None:
    base = RECIPES["scenes"]()
    rows = [row for row in study.rows_of(("wscl",), base) if row.name.startswith("discovery")]
    configs = [row.config(base, 0) for row in rows]
    assert {row.tier for row in rows} == {1} and all(c.criterion.labeler.kind == "discovery" for c in configs)
    found = [(c.plan.optimizer.kind, c.criterion.contrast.enabled and c.criterion.contrast.omega) for c in configs]
    assert found == [(kind, omega) for kind in ("sgd", "adam") for omega in (False, "share", "batch", "pair")]


def test_the_last_tier_is_run_on_demand_and_described() -> None:
    base = RECIPES["scenes"]()
    usual, whole = (study.rows_of(("wscl",), base, tiers=tiers) for tiers in (study.DEFAULT_TIERS, range(5)))
    rest = [row for row in whole if row not in usual]
    assert rest and {row.tier for row in rest} == {study.OTHERS}
    assert all("omega pair" in row.name or "head" not in row.name for row in rest)
    assert "Tier 4 of wscl is not run unless --tiers has it" in study.__doc__


def test_a_lever_is_left_out_or_alone_and_nothing_else_changes() -> None:
    base = RECIPES["photos"]()
    configs = {row.name: row.config(base, 0) for row in study.lever_rows()}
    no_prior = configs["without class maps"].criterion.prior, configs["without class maps"].inference.prior
    assert [prior.evidence for prior in no_prior] == [0, 0]
    assert [prior.area for prior in no_prior] == [base.criterion.prior.area, base.inference.prior.area]
    assert configs["without context"].heads.context.on == "none" != base.heads.context.on
    assert configs["without context"].adaptation == base.adaptation
    bare, maps = configs["without adaptation"], configs["adaptation and class maps alone"]
    assert bare.adaptation.epochs == 0 and bare.criterion.prior.evidence == 0  # class maps come from adaptation
    assert maps.adaptation.epochs == base.adaptation.epochs and maps.inference.prior.evidence > 0
    assert maps.inference.prior.area == 0 and maps.heads.context.on == "none"
    none = configs["none"]
    assert (none.adaptation.epochs, none.inference.prior.area, none.heads.context.on) == (0, 0, "none")
    assert len({repr(config) for config in configs.values()}) == len(configs)


def test_rows_of_labelers_differ_in_the_labeler_and_wscl_alone() -> None:
    base = RECIPES["photos"]()
    rows = list(study.labeler_rows())
    with_neck = [row.config(base, 0) for row in rows if row.name.endswith("neck")]
    assert [config.heads.neck for config in with_neck] == [512] * 4
    criteria = [row.config(base, 0).criterion for row in rows if not row.name.endswith("neck")]
    assert [config.criterion for config in with_neck] == criteria[:4]
    found = [(own.labeler.kind, own.contrast.enabled) for own in criteria]
    both = (("oicr", False), ("discovery", False), ("oicr", True), ("discovery", True), ("mist", False))
    assert tuple(found) == both
    assert all(own.prior == base.criterion.prior for own in criteria)


def test_an_unknown_study_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        study.main(["--studies", "wslc"])
    assert "--studies wslc: unknown; there are discovery, wscl, systems, levers, labelers" in capsys.readouterr().err


def test_a_run_that_diverges_is_noted_and_the_next_one_follows(tmp_path: Path, monkeypatch) -> None:
    runs: list[str] = []

    def finish(run, folder, progress):
        runs.append(run.name)
        if len(runs) == 1:
            raise UserError("the loss is not finite")

    monkeypatch.setattr(study.grid, "finish_run", finish)
    rows = study.rows_of(("wscl",), RECIPES["scenes"]())[:6]
    data = {0: open_data(WORLD, 0, tmp_path)}
    queue = study.Queue(RECIPES["scenes"](), data, rows, tmp_path)
    assert [row.name for row, _, _ in queue.open()][:5] == [
        "none, SGD, lr 0.01", "none, SGD, lr 0.03", "none, SGD, lr 0.1", "none, SGD, lr 0.3", "none, Adam, head",
    ]  # fmt: skip
    study.work(queue, tmp_path / "out.json", {}, most=2)
    written = json.loads((tmp_path / "out.json").read_text())
    assert len(runs) == 2 and written["open"] == 3
    assert [(one["row"], one["error"]) for one in written["failed"]] == [
        ("none, SGD, lr 0.01", "the loss is not finite")
    ]


@pytest.mark.slow
def test_a_queue_is_run_in_parts_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "studies.json"
    argv = ["--studies", "wscl,systems", "--seeds", "0", "--work", f"{tmp_path}", "--out", f"{out}"]
    argv += [word for change in TINY for word in ("--set", change)]
    study.main([*argv, "--list"], world=WORLD)
    listed = capsys.readouterr().out
    assert "runs left; minutes per run, with evaluation: about unknown" in listed
    study.main([*argv, "--most", "1"], world=WORLD)
    one = json.loads(out.read_text())
    first = ["none, SGD, lr 0.01", "none, SGD, head"]  # the same settings: one run
    assert [row["row"] for row in one["rows"]] == first and one["rows"][0]["contrast_share"] == {}
    study.main([*argv, "--most", "2"], world=WORLD)
    again = json.loads(out.read_text())
    assert again["rows"][0] == one["rows"][0] and again["open"] == one["open"] - 2
    assert again["failed"] == []
    capsys.readouterr()
    study.main([*argv, "--list"], world=WORLD)
    assert "about unknown" not in capsys.readouterr().out
    study.main([*argv, "--tiers", "1", "--most", "1", "--intervals"], world=WORLD)
    sure = {row["row"]: row for row in json.loads(out.read_text())["intervals"]}
    assert all(row["seeds"] == [0] and row["against"] == next(iter(sure)) for row in sure.values())
    for place, row in enumerate(sure.values()):
        low, high = row["CorLoc"]["interval"]
        assert 0 <= low <= row["CorLoc"]["value"] <= high <= 1
        assert ("difference" in row["CorLoc"]) == (place > 0)
    shared = [row for row in json.loads(out.read_text())["rows"] if row["row"].startswith("omega")]
    assert len(shared) == 1 and shared[0]["contrast_share"]["0"] >= 0
    own = {"mAP50", "mAP50, 11 points", "COCO AP", "CorLoc", "labels' precision", "labels' recall", "ms a step"}
    trivial = {name for name in shared[0]["figures"] if name.endswith(("same class scores", "of the class map"))}
    assert set(shared[0]["figures"]) == own | trivial and len(trivial) == 4
