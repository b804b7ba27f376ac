"""tools/house.py: every house rule can fail, and the traced runs cover what they should."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TOOLS = Path(__file__).parents[1] / "tools"


@pytest.fixture
def house(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(TOOLS)
    return importlib.import_module("house")


def package(folder: Path, files: dict[str, str]) -> Path:
    """A package called ``small`` with these files."""
    root = folder / "small"
    for name, text in {"__init__.py": "", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


FILLER = "".join(f"_n{i} = {i}\n" for i in range(60))
GOOD = {
    "a.py": f"import os\n{FILLER}",
    "b.py": f"from small import a\n{FILLER}",
    "room/__init__.py": "",
    "room/c.py": f"from small import a\n\n\ndef cut() -> None: ...\n{FILLER}",
}


def measured(house: ModuleType, root: Path) -> dict[str, Any]:
    return {m.name: m for m in house.measure_sources(root)}


def test_a_tidy_package_breaks_no_rule(house: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert house.main(["--package", str(package(tmp_path, GOOD)), "--no-trace"]) == 0
    out, err = capsys.readouterr()
    assert not err and "files" in out and "NO" not in out


@pytest.mark.parametrize(
    ("rule", "files", "bar", "words"),
    [
        ("files", {}, 4, ()),
        ("import statements, % of non-blank lines", {"d.py": "import os\nimport re\n" * 9}, 6.5, ("small.d: 18",)),
        ("module names used twice", {"room/a.py": FILLER}, 0, ("a.py: 2 files",)),
        (
            "public names defined twice",
            {"d.py": "def cut() -> None: ...\n", "e.py": "SIZE: int = 1\n", "room/f.py": "(SIZE, _x) = 1, 2\n"},
            1,
            ("SIZE: small.e, small.room.f", "cut: small.d, small.room.c"),
        ),
        (
            "modules with a single importer",
            {"d.py": f"def f():\n    import small.b\n{FILLER}"},
            0,
            ("small.b: small.d",),
        ),
        ("lines of the longest file", {"d.py": "\n" * 401}, 400, ("small.d: 401",)),
    ],
)
def test_every_rule_can_fail(
    house: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    rule: str, files: dict[str, str], bar: float, words: tuple[str, ...],
) -> None:  # fmt: skip
    monkeypatch.setitem(house.BARS, rule, bar)
    root = package(tmp_path, GOOD | files)
    assert house.main(["--package", str(root), "--no-trace"]) == 1
    out, err = capsys.readouterr()
    assert next(line for line in out.splitlines() if line.endswith("NO")).startswith(rule)
    assert f"house rule: {rule}: " in err and all(word in err for word in words)


def test_import_statements_are_counted_once_and_not_in_strings(house: ModuleType, tmp_path: Path) -> None:
    text = '"""Docs.\n\nfrom small import a\nimport os\n"""\n\nfrom os import (\n    path,\n    sep,\n)\n\n_x = path\n'
    found = measured(house, package(tmp_path, {"a.py": text}))
    assert found["import statements, % of non-blank lines"].value == round(100 / 9, 2)


@pytest.mark.parametrize(
    "line",
    ["import small.room.c", "from small.room import c", "from small.room.c import cut", "from .room.c import cut",
     "from .room import c", "from . import room\n    from .room import c"],
)  # fmt: skip
def test_importers_are_found_in_every_spelling(house: ModuleType, tmp_path: Path, line: str) -> None:
    found = measured(house, package(tmp_path, GOOD | {"d.py": f"def f():\n    {line}\n"}))
    single = found["modules with a single importer"]
    assert single.details == ("small.room.c: small.d",)


def test_a_relative_import_in_a_package_starts_there(house: ModuleType, tmp_path: Path) -> None:
    files = GOOD | {"room/__init__.py": "from .c import cut\n", "room/d.py": "from ..b import _n1\n"}
    single = measured(house, package(tmp_path, files))["modules with a single importer"]
    assert single.details == ("small.b: small.room.d", "small.room.c: small.room")


def test_json_has_every_measure(house: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    house.main(["--package", str(package(tmp_path, GOOD)), "--no-trace", "--json"])
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == list(house.BARS)[:6] and all(row["ok"] for row in rows)


def test_verbose_names_what_was_counted(house: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = package(tmp_path, GOOD | {"d.py": "from small import b\n"})
    house.main(["--package", str(root), "--no-trace", "--verbose"])
    assert "small.b: small.d" in capsys.readouterr().out


# ---------------------------------------------------------------- traced runs


def test_a_batch_and_a_photo_are_traced(house: ModuleType) -> None:
    found = {m.name: m for m in house.measure_calls()}
    batch, step = found["one batch: files"].details, found["one batch, step alone: files"].details
    assert {"training/loop.py", "training/step.py", "training/criterion.py"} <= set(batch)
    assert set(step) < set(batch) and "training/loop.py" not in step
    assert not {"training/checkpoint.py", "training/events.py", "recipes.py"} & set(batch)
    assert any(name.endswith(":fit") for name in found["one batch: functions"].details)
    assert {"inference/predict.py", "proposals/selective_search.py"} <= set(found["one photo of detect: files"].details)
    assert not any("<listcomp>" in name for name in found["one batch: functions"].details)


def test_too_many_files_in_a_batch_break_a_rule(house: ModuleType) -> None:
    crowded = house.Measure("one batch: files", 30, tuple(f"f{i}.py" for i in range(30)))
    (line,) = house.violations([crowded, house.Measure("one batch: functions", 90)])
    assert line.startswith("house rule: one batch: files: 30, at most 25 allowed")
    assert "f19.py" in line and "f20.py" not in line and line.endswith("... and 10 more: --verbose")
