"""Reference files are found by patterns: none is left out, and a pattern that finds nothing is no silent success."""

from __future__ import annotations

import ast
import fnmatch
import shutil
from pathlib import Path

import numpy as np
import pytest

from conftest import GOLDEN, golden_names, load_golden


def patterns() -> set[str]:
    """The patterns in all tests."""
    calls = [
        node
        for file in Path(__file__).parent.rglob("test_*.py")
        if file != Path(__file__)
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "golden_names"
    ]
    return {ast.literal_eval(call.args[0]) for call in calls}


def test_every_reference_file_is_found_by_a_pattern_and_every_pattern_finds_one() -> None:
    used, files = patterns(), {path.name for path in GOLDEN.iterdir()}
    assert all(golden_names(pattern) for pattern in used)
    lonely = {name for name in files if not any(fnmatch.fnmatch(name, pattern) for pattern in used)}
    assert {name for name in lonely if not (GOLDEN / name).with_suffix(".json").exists()} == set()  # arrays of a JSON


def test_tests_name_no_reference_file() -> None:
    for file in Path(__file__).parent.rglob("test_*.py"):
        source = file.read_text(encoding="utf-8")
        assert not [path.name for path in GOLDEN.iterdir() if f'"{path.name}' in source or f'"{path.stem}"' in source]


def test_a_pattern_without_files_fails(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nothing_\*\.npz"):
        golden_names("nothing_*.npz")
    with pytest.raises(FileNotFoundError, match=tmp_path.name):
        golden_names("nothing_*.npz", f"{tmp_path}")


def test_a_further_folder_adds_its_files(tmp_path: Path) -> None:
    own = golden_names("roi_pool_*.npz", "")
    shutil.copy(GOLDEN / own[0], tmp_path / "roi_pool_99.npz")
    assert golden_names("roi_pool_*.npz", f"{tmp_path}") == [*own, f"{tmp_path / 'roi_pool_99.npz'}"]
    np.savez(tmp_path / "only_here.npz", x=np.arange(3))
    (name,) = golden_names("only_*.npz", f"{tmp_path}")
    assert load_golden(name)["x"].tolist() == [0, 1, 2]
