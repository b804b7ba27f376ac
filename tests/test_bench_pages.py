"""Figures of the benchmarks are cached, compared with their targets, and shown as tables and plots."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from bench_figures import BENCHMARKS, HISTORY, MACHINE, bench, bf16_figures, copied, small_figures
from tag2box.errors import UserError


@pytest.fixture(scope="session")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return small_figures(tmp_path_factory.getbasetemp())


def stored(figures: dict[str, Any]) -> dict[str, Any]:
    """As run.py stores them."""
    return {
        name: {"key": "k", "commit": "abc", "seconds": 3.0, "when": "today", "figures": part}
        for name, part in figures.items()
    }


# ---------------------------------------------------------------- run.py

SCRIPT = """
import json, pathlib, sys
calls = pathlib.Path(__file__).with_suffix(".calls")
calls.write_text(calls.read_text() + "x" if calls.exists() else "x")
if {fails}:
    sys.exit(3)
pathlib.Path(sys.argv[sys.argv.index("--out") + 1]).write_text(json.dumps({figures}))
"""


@pytest.fixture
def parts(figures: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Two parts that return at once, and how often each was run."""
    run, bench_parts = bench("run"), bench("bench_parts")
    for name in ("kernels", "steps"):
        script = SCRIPT.replace("{fails}", "False").replace("{figures}", repr(figures[name]))
        (tmp_path / f"{name}.py").write_text(script)
    few = (bench_parts.Part("kernels", 1), bench_parts.Part("steps", 2))
    monkeypatch.setattr(bench_parts, "HERE", tmp_path)
    monkeypatch.setattr(run, "PARTS", few)

    def call(*options: str) -> int:
        place = ["--parts", str(tmp_path / "kept"), "--out", str(tmp_path / "docs/results/bench.json")]
        return int(run.main([*place, "--images", str(tmp_path / "docs/images"), *options]))

    def calls() -> dict[str, int]:
        files = {part.name: tmp_path / f"{part.name}.calls" for part in few}
        return {name: len(file.read_text()) if file.exists() else 0 for name, file in files.items()}

    return SimpleNamespace(call=call, calls=calls, folder=tmp_path)


def test_a_second_call_measures_nothing(parts: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    assert parts.call() == 0 and parts.calls() == {"kernels": 1, "steps": 1}
    assert "[1/2] kernels: about 60 s; remaining: about 3 min" in capsys.readouterr().out
    assert parts.call() == 0 and parts.calls() == {"kernels": 1, "steps": 1}
    assert parts.call("--fresh", "--only", "steps") == 0 and parts.calls() == {"kernels": 1, "steps": 2}
    assert parts.call("--threads", "1") == 0 and parts.calls() == {"kernels": 2, "steps": 3}
    result = json.loads((parts.folder / "docs/results/bench.json").read_text())
    assert list(result["parts"]) == ["kernels", "steps"] and result["trial"] is False
    assert "bench-kernels.svg" in {file.name for file in (parts.folder / "docs/images").iterdir()}
    assert "../images/bench-kernels.svg" in (parts.folder / "docs/results/bench.md").read_text()


def test_a_changed_script_is_measured_again(parts: SimpleNamespace) -> None:
    parts.call()
    with (parts.folder / "steps.py").open("a") as file:
        file.write("# changed\n")
    parts.call()
    assert parts.calls() == {"kernels": 1, "steps": 2}


def test_what_was_measured_before_a_failure_stays(parts: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    good = (parts.folder / "steps.py").read_text()
    (parts.folder / "steps.py").write_text(good.replace("if False", "if True"))
    assert parts.call() == 1
    assert "finished parts are saved" in capsys.readouterr().err
    (parts.folder / "steps.py").write_text(good)
    assert parts.call() == 0 and parts.calls() == {"kernels": 1, "steps": 2}


def test_one_part_alone_is_published_with_those_that_are_there(parts: SimpleNamespace) -> None:
    parts.call("--only", "steps")
    assert list(json.loads((parts.folder / "docs/results/bench.json").read_text())["parts"]) == ["steps"]


def test_a_broken_file_of_figures_is_named(parts: SimpleNamespace) -> None:
    parts.call()
    (parts.folder / "kept/steps.json").write_text("{")
    with pytest.raises(UserError, match=r"steps\.json: not readable as JSON"):
        parts.call()


def test_a_trial_stays_out_of_the_docs() -> None:
    args = bench("run").parsed(["--small", "--parts", "runs/bench"])
    assert args.out.parts[-3:] == ("bench", "small", "bench.json") and args.images == args.out.parent


def test_every_part_of_the_benchmark_has_its_files() -> None:
    module = bench("bench_parts")
    assert all((module.PACKAGE / name).exists() for name in module.MEASURED)
    for part in module.PARTS:
        assert all((BENCHMARKS / f"{name}.py").exists() for name in (part.name, *part.helpers))
    assert (
        {part.name for part in module.PARTS} == set(bench("bench_tables").PARTS) == set(bench("bench_verdicts").JUDGES)
    )


def test_figures_have_their_command_and_commit_and_no_paths_of_this_machine(tmp_path: Path) -> None:
    found = bench("bench_parts").provenance(__file__, ["voc", f"{tmp_path}/VOC 2007", f"--out={tmp_path}/x.json"])
    assert found["command"] == "python benchmarks/test_bench_pages.py voc 'VOC 2007' --out=x.json"
    assert found["commit"]


# ---------------------------------------------------------------- tables and plots


@pytest.mark.parametrize("has_bf16", [False, True])
def test_the_page_has_every_part(
    figures: dict[str, Any], tmp_path_factory: pytest.TempPathFactory, has_bf16: bool
) -> None:
    tables = bench("bench_tables")
    found = figures | {"precision": bf16_figures(tmp_path_factory.getbasetemp())} if has_bf16 else figures
    text = tables.page(stored(found), {}, Path(), is_trial=True)
    assert all(f"## {title}" in text for title, _ in tables.PARTS.values())
    assert "A trial at tiny sizes" in text
    assert ("the processor has no bf16 instructions" in text) is not has_bf16
    assert ("x as fast as fp32" in text and "bf16, plain step" in text) is has_bf16
    assert all(line.count("|") - 2 * line.count("\\|") >= 3 for line in text.splitlines() if line.startswith("|"))


def test_the_page_of_nothing() -> None:
    text = bench("bench_tables").page({}, {}, Path(), is_trial=False)
    assert text.startswith("# What `make bench` measured") and "trial" not in text


def test_a_missed_target_is_marked(figures: dict[str, Any]) -> None:
    slow = copied(figures["processes"]) | {"time_ratio": 1.4}
    lines = bench("bench_tables").targets({"processes": slow}, is_trial=False)
    assert [line.split("|")[-2].strip() for line in lines[2:]] == ["**no**", "yes"]


def test_the_target_of_the_criterion_scales_with_the_machine_s_speed(figures: dict[str, Any]) -> None:
    found = copied(figures["criterion"])
    found["machine"]["gemm_gflops_per_cpu_second"] = 35
    found["ours"]["cpu"]["median"] = 7.9
    verdict = bench("bench_verdicts").of_criterion(found)[0]
    assert verdict.is_met and "so 8.0 CPU s here" in verdict.target


def test_a_step_that_did_not_fit(figures: dict[str, Any]) -> None:
    steps = copied(figures["steps"])
    plain = next(row for row in steps["rows"] if row["memory"] == "plain" and row["images"] == 2)
    for field in ("wall", "cpu", "peak_mb", "held_mb", "repeats"):
        del plain[field]
    plain["fits"], steps["relative_difference"], steps["compared_at"] = False, None, None
    assert any("out of memory" in line for line in bench("bench_tables").steps(steps))
    assert [v.what for v in bench("bench_verdicts").of_steps(steps)] == ["exact step, 2 photos: peak memory"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ""),
        ("no marks", "no marks"),
        ("a <!-- bench: begin -->old<!-- bench: end --> z", "a <!-- bench: begin -->\n{}\n<!-- bench: end --> z"),
    ],
)
def test_the_page_on_speed_is_filled_between_its_markers(figures: dict[str, Any], text: str, expected: str) -> None:
    tables = bench("bench_tables")
    table = "\n".join(tables.targets(figures, is_trial=False))
    assert tables.filled(text, stored(figures), is_trial=False) == expected.replace("{}", table)


def test_a_mark_without_an_end_is_named() -> None:
    with pytest.raises(UserError, match=r"speed\.md: .* has no"):
        bench("bench_tables").filled("<!-- bench: begin -->", {}, is_trial=False)


def test_plots_stand_alone(figures: dict[str, Any]) -> None:
    plots = bench("bench_plots").plots
    assert plots({}) == {}
    drawn = plots(figures)
    assert set(drawn) == {
        f"bench-{n}.svg" for n in ("proposals", "images", "classes", "exemplars", "kernels", "growth")
    }
    for svg in drawn.values():
        root = ElementTree.fromstring(svg)
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert len(root.findall(".//{*}path[@class='line']")) >= 2


# ---------------------------------------------------------------- bench_check.py


@pytest.mark.parametrize(
    ("ratio", "cpu", "capability", "code", "verdict"),
    [
        (2.0, "Imaginary CPU", "AVX2", 0, "ok"),
        (1.6, "Imaginary CPU", "AVX2", 0, "ok"),
        (1.4, "Imaginary CPU", "AVX2", 1, "SLOWER"),
        (1.1, "Another CPU", "AVX2", 0, "ok"),  # of another processor half is enough
        (0.9, "Another CPU", "AVX2", 1, "SLOWER"),
        (0.9, "Another CPU", "AVX512", 0, "SLOWER"),  # of other instructions nothing fails
    ],
)
def test_a_ratio_that_has_fallen_fails_the_check(
    ratio: float, cpu: str, capability: str, code: int, verdict: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The best of the rounds counts, against three quarters of the committed median, on the same processor."""
    module, now = bench("bench_check"), copied(HISTORY)
    (tmp_path / "kernels-history.json").write_text(json.dumps(HISTORY))
    now["machine"] |= {"cpu": cpu, "capability": capability}
    now["rows"][0]["times_as_fast"] = {"min": 1.0, "median": 1.2, "max": ratio}
    now["rows"].append(now["rows"][0] | {"name": "a row that the table does not have"})
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    monkeypatch.setattr(module, "measured", lambda *_: now)
    assert module.main(["--only", "kernels_against_history"]) == code
    said = capsys.readouterr().out
    assert said.count("NMS") == 1 and f"{verdict:>6}  " in said
    assert ("shown only" in said) == (capability == "AVX512")


def test_the_check_takes_the_table_of_the_processor_then_of_its_instructions() -> None:
    module = bench("bench_check")
    machines = [("a", "AVX2"), ("b", "AVX512"), ("c", "AVX512")]
    tables = [(cpu, {"machine": {"cpu": cpu, "capability": has}}) for cpu, has in machines]
    found = [
        module.nearest(tables, {"machine": {"cpu": cpu, "capability": has}})
        for cpu, has in [("c", "AVX512"), ("d", "AVX512"), ("d", "AVX2"), ("a", "NEON")]
    ]
    assert [(name, can) for name, _, can in found] == [("c", True), ("b", True), ("a", True), ("a", False)]


def test_what_bf16_gains_is_judged_on_the_same_processor_alone() -> None:
    module = bench("bench_check")
    rows = [module.Compared(name, 2.0, 0.5, 0.5, kept) for name in ("trunk, bf16", "trunk") for kept in (0.75, 0.5)]
    assert [module.is_judged(row) for row in rows] == [True, False, True, True]


def test_the_check_has_a_committed_table_for_each_part() -> None:
    module = bench("bench_check")
    for script, part in module.PARTS.items():
        assert (BENCHMARKS / f"{script}.py").exists()
        for name in part.tables:
            table = json.loads((module.RESULTS / name).read_text())
            assert module.compared(part, table, table) and table["machine"]["capability"]


# ---------------------------------------------------------------- growth


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0, 2.0])
def test_the_exponent_is_that_of_a_power(power: float) -> None:
    module, sizes = bench("bench_growth"), [1, 10, 100]
    assert module.exponent(sizes, [3.0 * size**power for size in sizes]) == pytest.approx(power)
    assert math.isnan(module.exponent([], [])) and math.isnan(module.exponent([5, 5], [1.0, 2.0]))


def test_the_fit_of_rows_finds_both_parts() -> None:
    rows = [100.0, 1000.0, 5000.0]
    fit = bench("bench_growth").fit_rows(rows, [2.0 * r + 0.004 * r * r for r in rows])
    assert (fit.linear, fit.quadratic) == pytest.approx((2.0, 0.004)) and fit.equal_at == pytest.approx(500)
    assert fit.largest_error < 1e-9


def curve(against: str, power: float, memory: float = 1.0) -> list[dict[str, Any]]:
    sizes = [1, 2, 4, 8]
    return [
        {"against": against, against: size, "rows": 10 * size, "peak_mb": size**memory,
         "cpu": {"median": 0.1 * size**power}}
        for size in sizes
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("against", "power", "memory", "verdict"),
    [
        ("classes", 1.1, 1.0, "<= 1.2"),
        ("classes", 1.4, 1.0, "**faster than linear**"),
        ("images", 1.9, 1.0, "quadratic: pairs of exemplars"),
        ("images", 1.9, 1.9, "**faster than linear**"),  # memory has no such reason
    ],
)
def test_the_verdict_on_a_curve(against: str, power: float, memory: float, verdict: str) -> None:
    module = bench("bench_growth")
    figures = {"criterion": {"curves": curve(against, power, memory)}}
    (found,) = module.growths(figures)
    assert found.verdict == verdict and verdict in "\n".join(module.growth_lines(figures))
    assert list(module.growths({})) == [] == module.growth_lines({"criterion": {}})


def test_the_tables_of_the_page_are_those_of_the_committed_figures(tmp_path: Path) -> None:
    """`python benchmarks/bench_tables.py` writes them; docs/speed.md has nothing else between the markers."""
    docs, tables = BENCHMARKS.parent / "docs", bench("bench_tables")
    (tmp_path / "results").mkdir()
    for name in ("bench.json", "kernels-history.json"):
        (tmp_path / "results" / name).write_bytes((docs / "results" / name).read_bytes())
    page = (docs / "speed.md").read_text(encoding="utf-8")
    (tmp_path / "speed.md").write_text(page, encoding="utf-8")
    tables.fill_speed(tmp_path)
    assert (tmp_path / "speed.md").read_text(encoding="utf-8") == page
    assert all(f"<!-- {name}: begin -->" in page for name in ("bench", "growth", "kernels"))


# ---------------------------------------------------------------- end_to_end_history.py


def test_whole_runs_are_compared_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With commands that return at once: what is run, in which order, and the summary."""
    module, calls = bench("end_to_end_history"), []

    def timed(sources: Path, words: list[str], threads: int) -> dict[str, float]:
        calls.append((sources.name, words))
        seconds = 6.0 if sources.name == "old" else 2.0
        return {"cpu": seconds, "wall": seconds}

    monkeypatch.setattr(module, "timed", timed)
    monkeypatch.setattr(module, "earlier_sources", lambda folder: folder)
    monkeypatch.setattr(module, "evaluated", lambda *_: 40.0)
    monkeypatch.setattr(module, "machine", lambda: dict(MACHINE))
    out = tmp_path / "figures.json"
    words = ["x", str(tmp_path), "--new", "compute.precision=bf16", "--out", str(out), "--seeds"]
    for seeds in (["0"], ["0", "1"]):
        monkeypatch.setattr(sys, "argv", [*words, *seeds])
        module.main()
    assert [(name, words[0]) for name, words in calls] == 2 * [
        (name, stage) for name in ("old", "src") for stage in ("propose", "train", "detect")
    ]
    assert ["compute.precision=bf16" in words for _, words in calls][:6] == [False, False, False, False, True, False]
    assert "photos" in calls[1][1] and "photos-frozen" in calls[4][1]
    written = json.loads(out.read_text())
    found = written["summary"]
    assert written["earlier"] == module.COMMIT != written["commit"] and written["command"].endswith("--seeds 0 1")
    assert found["seeds"] == [0, 1] and found["times_as_fast_cpu"]["all"]["median"] == 3.0
    assert found["map50_today"] == {"mean": 40.0, "deviation": 0.0, "values": [40.0, 40.0]}
    assert module.summary([]) == {} and not any(out.with_suffix(".work").iterdir())


def test_of_whole_runs_each_command_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed while it detects: the next call detects again, from an empty place, with what training wrote."""
    module, calls = bench("end_to_end_history"), []

    def timed(sources: Path, words: list[str], threads: int) -> dict[str, float]:
        calls.append(words[0])
        out = Path(words[words.index("--out") + 1])
        assert not out.exists()
        out.mkdir() if words[0] != "detect" else out.write_text("[]")
        if len(calls) == 3:
            raise KeyboardInterrupt
        return {"cpu": 1.0, "wall": 1.0}

    monkeypatch.setattr(module, "timed", timed)
    monkeypatch.setattr(module, "earlier_sources", lambda folder: folder)
    monkeypatch.setattr(module, "evaluated", lambda *_: 40.0)
    monkeypatch.setattr(module, "machine", lambda: dict(MACHINE))
    out = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", ["x", str(tmp_path), "--out", str(out), "--seeds", "0", "--recipe-new", "light"])
    with pytest.raises(KeyboardInterrupt):
        module.main()
    assert json.loads(out.read_text())["summary"] == {}
    module.main()
    assert calls == ["propose", "train", "detect", "detect", "propose", "train", "detect"]
    assert json.loads(out.read_text())["settings"]["recipe_new"] == "light"
