"""The benchmarks as modules, and what their parts say of small sizes, measured once for all tests.

bench("measuring").spread_of([1.0])
found = small_figures(tmp_path_factory.getbasetemp())       # by part
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
OPTIONS: dict[str, tuple[str, ...]] = {
    "kernels": ("--curves", "--repeats", "1"),
    "objective": ("--curves", "--repeats", "1"),
    "steps": (),
    "precision": (),
    "memory_growth": (),
    "processes": (),
}


def bench(name: str) -> ModuleType:
    """A module of the benchmarks, found as its own script finds it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        return importlib.import_module(name)


def here(job: Callable[..., Any], *args: object) -> Any:
    """Instead of a fresh process, which would import torch once more."""
    return job(*args)


@functools.cache
def small_figures(base: Path) -> dict[str, Any]:
    """What every part says: once per pytest session, pass ``tmp_path_factory.getbasetemp()``."""
    facts, found = bench("measuring").machine(), {}
    for name, options in OPTIONS.items():
        module, out = bench(name), base / "bench" / f"{name}.json"
        with pytest.MonkeyPatch.context() as patch:
            for way in {"in_fresh_process", "if_it_fits"} & set(vars(module)):
                patch.setattr(module, way, here)
            patch.setattr(module, "machine", lambda: facts)
            patch.setattr(sys, "argv", [name, "--small", "--threads", "1", "--out", str(out), *options])
            module.main()
        found[name] = json.loads(out.read_text())
    return found


def copied(figures: Any) -> Any:
    """Figures to change."""
    return json.loads(json.dumps(figures))
