"""tools/fuzz.py: a fixed sample of its cases, and proof that it notices each kind of failure."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def fuzz(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module("fuzz")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits of processes")
def test_300_cases_and_every_command_on_intact_files() -> None:
    """A failed case is repeated with ``python tools/fuzz.py --case NUMBER``."""
    command = [sys.executable, str(ROOT / "tools" / "fuzz.py"), "--count", "300", "--jobs", "1", "--intact"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]


# ---------------------------------------------------------------- a program with faults


def fails() -> None:
    raise KeyError("a bug")


def complains(lines: int, code: int = 2) -> Callable[[], None]:
    def main() -> None:
        for _ in range(lines):
            print("tag2box: wrong", file=sys.stderr)
        sys.exit(code)

    return main


def writes(name: str, text: str = "") -> Callable[[], None]:
    def main() -> None:
        Path(name).write_text(text)

    return main


def spins() -> None:
    while True:
        pass


def fills_memory() -> None:
    here = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGESIZE")
    print(len(b"x" * (2 << 30)) + here)


def colors() -> None:
    print("\x1b[31mred")


PROGRAMS: dict[str, tuple[Callable[[], None], list[str]]] = {
    "succeeds": (lambda: None, []),
    "one line": (complains(1), []),
    "findings": (complains(0, 1), []),
    "an output": (writes("out.json", "{}"), []),
    "an exception": (fails, ["traceback"]),
    "a bug in one line": (complains(1, 3), ["traceback"]),
    "two lines": (complains(2), ["2 lines"]),
    "no line": (complains(0), ["0 lines"]),
    "code": (writes("canary"), ["code run"]),
    "outside": (writes("../../outside", "x"), ["escaped"]),
    "a temporary file": (writes(".out.json.5bce98-1-00000000"), ["left .out.json...-1-.."]),
    "half an output": (writes("out.json", '{"a":'), ["partial output"]),
    "an input": (writes("in.txt", "changed"), ["changed input"]),
    "endless": (spins, ["hang", "slow"]),
    "memory": (fills_memory, ["memory"]),
    "escape codes": (colors, ["control characters"]),
}


@pytest.mark.skipif(sys.platform != "linux", reason="limits of processes")
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_the_oracle_says_of_a_program_that(
    name: str, fuzz: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, problems = PROGRAMS[name]
    monkeypatch.setattr(fuzz.cli, "main", program)
    resident = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGESIZE")
    monkeypatch.setattr(fuzz, "MEGABYTES", 1024 + (resident >> 20))  # a fork has the memory of the tests before it
    monkeypatch.setattr(fuzz, "SECONDS", 1 if program is spins else 120)  # no other program depends on its speed
    scenario = fuzz.Scenario("evaluate", ("evaluate",), ("in.txt",), (), {"out.json": "json"})
    case = fuzz.Case(0, scenario, scenario.argv, "", "arguments", "none")
    slot = fuzz.Slot(tmp_path)
    slot.corpus.mkdir()
    (slot.corpus / "in.txt").write_text("intact")
    (outcome,) = fuzz.run_cases(iter([case]), [slot], 0)
    assert outcome.problems == problems, outcome


# ---------------------------------------------------------------- cases


@pytest.mark.parametrize("suffix", [".json", ".png", ".pkl", ".npz", ".mat", ".other"])
def test_a_mutation_follows_from_its_seed_and_changes_something(fuzz: ModuleType, suffix: str) -> None:
    mutators = fuzz.fuzz_mutators
    content = b'{"a": [1, 2.5, "text"], "b": {"c": null}}' * 3
    drawn = [mutators.mutate(content, suffix, mutators.Rng(seed)) for seed in range(60)]
    assert drawn == [mutators.mutate(content, suffix, mutators.Rng(seed)) for seed in range(60)]
    assert sum(changed != content for changed, _ in drawn) > 50
    assert len({name for _, name in drawn}) > 5


def test_every_command_that_reads_files_has_scenarios(fuzz: ModuleType) -> None:
    covered = {scenario.command for scenario in fuzz.fuzz_corpus.scenarios()}
    assert set(fuzz.cli.COMMANDS) - covered == {
        "demo",  # reads nothing
        "track",  # writes into the run that it reads
    }
