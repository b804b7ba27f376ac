"""The benchmarks run at small sizes and produce the figures that the tables need."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bench_figures import BENCHMARKS, MACHINE, bench, bf16_figures, small_figures
from tag2box.systems import SYSTEMS

FIELDS = {
    "kernels": {"machine", "rows", "curves"},
    "criterion": {"machine", "ours", "twin", "relative_difference", "curves"},
    "steps": {"machine", "rows", "compared_at", "relative_difference"},
    "precision": {"machine", "bf16", "rows"},
    "memory_growth": {"machine", "steps", "every", "points", "verdict"},
    "processes": {"machine", "one", "two", "time_ratio", "relative_difference", "memory"},
}


@pytest.fixture(scope="session")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return small_figures(tmp_path_factory.getbasetemp())


# ---------------------------------------------------------------- the cost of labels

LABELS = {"system", "fraction", "labeler_cpu", "criterion_cpu", "share_of_step", "bar", "is_within"}


def check_shares(figures: dict[str, Any]) -> None:
    """Every row has the share of its numbers, and its bar."""
    for row in figures["rows"]:
        assert set(row) == LABELS and row["bar"] == bench("labelers").BAR == 0.25
        whole = figures["network_cpu"] + row["criterion_cpu"]
        assert row["share_of_step"] == pytest.approx(row["labeler_cpu"] / whole)
        assert row["is_within"] is (row["share_of_step"] <= row["bar"])


def test_labels_have_a_share_of_a_step_and_a_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, out = bench("labelers"), tmp_path / "labelers.json"
    monkeypatch.setattr(module, "machine", lambda: dict(MACHINE))
    argv = [
        "labelers",
        "--small",
        "--threads",
        "1",
        "--repeats",
        "1",
        "--systems",
        "oicr,c-mil,wsod2",
        "--out",
        f"{out}",
    ]
    monkeypatch.setattr("sys.argv", argv)
    module.main()
    figures = json.loads(out.read_text(encoding="utf-8"))
    assert [row["system"] for row in figures["rows"]] == ["OICR", "C-MIL", "WSOD2"]
    check_shares(figures)


@pytest.mark.parametrize(("labels", "criterion", "share"), [(0.0, 0.0, 0.0), (1.0, 2.0, 0.25), (3.0, 4.0, 0.5)])
def test_the_share_is_of_network_and_criterion(labels: float, criterion: float, share: float) -> None:
    found = bench("labelers").share_of({"labeler_cpu": labels, "criterion_cpu": criterion}, 2.0)
    assert found == {"share_of_step": share, "bar": 0.25, "is_within": share <= 0.25}


def test_labels_of_all_systems_stay_below_the_bar() -> None:
    """In docs/results/labelers.json, once it has been measured with a bar."""
    figures = json.loads((BENCHMARKS.parent / "docs" / "results" / "labelers.json").read_text(encoding="utf-8"))
    if "network_cpu" not in figures:
        pytest.skip("measured before there was a bar; python benchmarks/labelers.py --out docs/results/labelers.json")
    check_shares(figures)
    assert [row["system"] for row in figures["rows"]] == [system.title for system in SYSTEMS.values()]
    assert all(row["is_within"] for row in figures["rows"])


# ---------------------------------------------------------------- the parts


@pytest.mark.parametrize("name", FIELDS)
def test_every_part_has_the_fields_of_its_table(figures: dict[str, Any], name: str) -> None:
    assert FIELDS[name] <= set(figures[name])
    assert figures[name]["machine"] == MACHINE


def test_the_description_of_the_machine() -> None:
    facts = bench("measuring").machine()
    assert set(facts) == set(MACHINE) and facts["torch"] == torch.__version__
    assert facts["gemm_gflops"] > 0 and facts["gemm_gflops_per_cpu_second"] > 0


def test_the_exact_step_is_the_plain_one(figures: dict[str, Any]) -> None:
    steps = figures["steps"]
    assert [row["name"] for row in steps["rows"]] == ["plain, 1 x 24", "plain, 2 x 24", "exact, 2 x 24"]
    assert steps["relative_difference"] <= 1e-4
    assert all(row["sampled"] > 0 and row["peak_mb"] > 0 for row in steps["rows"])


def test_two_processes_give_the_gradients_of_one(figures: dict[str, Any]) -> None:
    assert [row["rank"] for row in figures["processes"]["two"]] == [0, 1]
    assert figures["processes"]["relative_difference"] <= 1e-5


def test_the_profile_finds_every_group(figures: dict[str, Any]) -> None:
    (row,) = figures["precision"]["rows"]
    assert list(row["profile"]) == list(bench("step_profile").GROUPS)
    assert all(seconds > 0 for seconds in row["profile"].values())
    assert row["profiled_seconds"] > 0 and row["step_tflop"] > 0 and row["share_of_peak"] > 0


def test_bf16_is_measured_if_the_processor_has_it(
    figures: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    without, found = figures["precision"], bf16_figures(tmp_path_factory.getbasetemp())
    assert not without["bf16"]["can"] and [row["precision"] for row in without["rows"]] == ["fp32"]
    assert found["bf16"]["can"] and [row["precision"] for row in found["rows"]] == ["fp32", "bf16"]
    assert all(list(row["profile"]) == list(bench("step_profile").GROUPS) for row in found["rows"])


def test_twins_agree(figures: dict[str, Any]) -> None:
    rows = {row["name"]: row for row in figures["kernels"]["rows"]}
    assert rows["NMS at 0.4"]["same_kept"] and rows["IoU of all pairs"]["equal"]
    assert figures["criterion"]["relative_difference"] <= 1e-4


def test_a_long_run_is_sampled_at_every_step(figures: dict[str, Any]) -> None:
    points = figures["memory_growth"]["points"]
    assert [point["step"] for point in points] == list(range(1, 21))
    assert all(point["rss_mb"] > 0 and point["files"] > 0 for point in points)


def growth(rss: Callable[[int], float], files: Callable[[int], int]) -> list[dict[str, float]]:
    return [{"step": s, "rss_mb": rss(s), "files": files(s)} for s in range(20, 2001, 20)]


@pytest.mark.parametrize(
    ("points", "slope", "holds"),
    [
        (growth(lambda s: 300.0, lambda s: 9), 0.0, True),
        (growth(lambda s: 300.0 + (50 if s > 200 else 0), lambda s: 9), 0.0, True),
        (growth(lambda s: 300.0 + 0.02 * s, lambda s: 9), 20.0, False),
        (growth(lambda s: 300.0, lambda s: 9 + s // 500), 0.0, False),
    ],
    ids=["flat", "growth in the warm-up", "leaks memory", "leaks files"],
)
def test_the_verdict_on_growth(points: list[dict[str, float]], slope: float, holds: bool) -> None:
    found = bench("memory_growth").verdict(points)
    assert found["rss_mb_per_1000_steps"] == pytest.approx(slope, abs=0.01)
    assert found["holds"] is holds


# ---------------------------------------------------------------- measuring


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([], [], 0.0),
        ([0.0], [0.0], 0.0),
        ([1.0], [0.0], 1.0),
        ([3.0, 4.0], [3.0, 4.0], 0.0),
        ([3.0, 5.0], [3.0, 4.0], 0.2),
    ],
)
def test_relative_difference(tmp_path: Path, a: list[float], b: list[float], expected: float) -> None:
    measuring = bench("measuring")
    for name, values in (("a", a), ("b", b)):
        measuring.save_vector(tmp_path / f"{name}.npy", torch.tensor(values))
    assert measuring.relative_difference(tmp_path / "a.npy", tmp_path / "b.npy") == pytest.approx(expected)


def test_the_gradient_of_a_network_is_that_of_its_trainable_parameters() -> None:
    layer = nn.Linear(2, 1)
    layer.bias.requires_grad_(False)
    assert bench("measuring").gradient(layer).tolist() == [0.0, 0.0]
    layer(torch.ones(1, 2)).sum().backward()
    assert bench("measuring").gradient(layer).tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("seconds", "words"), [(0, "0 s"), (99, "99 s"), (120, "2 min"), (5990, "1 h 40 min"), (7500, "2 h 05 min")]
)
def test_in_words(seconds: float, words: str) -> None:
    assert bench("measuring").in_words(seconds) == words


def grab(megabytes: int) -> int:
    """Allocate some memory and use it for a while."""
    block = torch.ones(megabytes << 18)
    for _ in range(100):
        block.add_(1)
    return megabytes


def stumble() -> None:
    raise ValueError("a job with a mistake in it")


def test_a_job_without_enough_memory_returns_none(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    measuring = bench("measuring")
    with pytest.raises(RuntimeError, match="stumble ended with exit code 1"):
        measuring.if_it_fits(stumble)
    assert "a job with a mistake in it" in capfd.readouterr().err
    monkeypatch.setattr(measuring, "SPARE_MB", 1 << 30)  # leaves the minimum: 500 MB
    assert measuring.if_it_fits(grab, 900) is None


def test_groups_follow_where_work_ran_forward_and_back() -> None:
    tools = bench("step_profile")
    x = torch.randn(300, 300, requires_grad=True)
    inside = tools.marked("criterion", lambda: (x @ x).exp().sum())
    outside = tools.marked("network", lambda: x @ x)
    _, criterion = tools.profiled(lambda: inside().backward())
    _, network = tools.profiled(lambda: outside().sum().backward())
    assert criterion["criterion"] > 0 and criterion["linear"] == 0
    assert network["linear"] > 0 and network["criterion"] == 0


def test_the_exponent_of_a_growth() -> None:
    exponent = bench("many_photos").exponent
    assert exponent([10, 100, 1000], [3e-4 * n for n in (10, 100, 1000)]) == 1
    assert exponent([10, 100], [3e-4 * n * n for n in (10, 100)]) == 2


@pytest.mark.slow
def test_many_photos_are_measured_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many = bench("many_photos")
    rows = {part: [many.one_size(part, size, tmp_path) for size in (20, 40)] for part in many.PARTS}
    assert all(point["photos"] > 0 and point["wall"] >= 0 for points in rows.values() for point in points)
    assert many.plot(rows).count("photos") >= 6 and not [*tmp_path.iterdir()]
