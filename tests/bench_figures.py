"""The benchmarks as modules, and their figures at small sizes, measured once per session.

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
    "frozen_network": ("--repeats", "1"),
    "coco_evaluation": ("--repeats", "1"),
    "kernels": ("--curves", "--repeats", "1"),
    "criterion": ("--curves", "--repeats", "1"),
    "steps": (),
    "precision": (),
    "memory_growth": (),
    "processes": (),
}


def bench(name: str) -> ModuleType:
    """A module of the benchmarks, imported as from its own folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        return importlib.import_module(name)


# Facts of an imaginary machine, so that no test depends on the one it runs on.
MACHINE: dict[str, Any] = {
    "cpu": "Imaginary CPU", "cores": 4, "memory_gb": 16.0, "threads": 1, "load": 0.5, "python": "3.11.0",
    "torch": "2.6.0", "numpy": "2.0.0", "capability": "AVX2", "gemm_gflops": 140.0, "gemm_gflops_per_cpu_second": 70.0,
}  # fmt: skip


SPREAD = {"min": 1.5, "median": 2.0, "max": 2.5}
# Made up: the script needs the git history of the package.
HISTORY: dict[str, Any] = {
    "command": "python x.py", "commit": "abc", "earlier": "600c397", "machine": MACHINE, "rounds": 3,
    "rows": [
        {"name": "NMS", "target": 1.6, "difference": {"old": 0.0}, "exact": True, "times_as_fast": SPREAD,
         "seconds": {"old": SPREAD, "new": {"min": 1.0, "median": 1.0, "max": 1.0}}},
    ],
}  # fmt: skip


def here(job: Callable[..., Any], *args: object) -> Any:
    """Instead of a fresh process, which would import torch again."""
    return job(*args)


@functools.cache
def small_figures(base: Path) -> dict[str, Any]:
    """Figures of every part on the imaginary machine, which has no bf16; pass ``tmp_path_factory.getbasetemp()``."""
    found = {name: part_figures(name, base / "bench" / f"{name}.json") for name in OPTIONS}
    return {"kernels_against_history": HISTORY, **found}


@functools.cache
def bf16_figures(base: Path) -> dict[str, Any]:
    """Figures of the part on precision on a machine with bf16 (torch computes the same numbers without, slowly)."""
    return part_figures("precision", base / "bench" / "precision-bf16.json", has_bf16=True)


def part_figures(name: str, out: Path, *, has_bf16: bool = False) -> dict[str, Any]:
    """Run one part at small size in this process, and return its figures."""
    module = bench(name)
    with pytest.MonkeyPatch.context() as patch:
        for way in {"in_fresh_process", "if_it_fits"} & set(vars(module)):
            patch.setattr(module, way, here)
        if "has_bf16" in vars(module):
            patch.setattr(module, "has_bf16", lambda: has_bf16)
        patch.setattr(module, "machine", lambda: dict(MACHINE))
        patch.setattr(sys, "argv", [name, "--small", "--threads", "1", "--out", str(out), *OPTIONS[name]])
        module.main()
    figures: dict[str, Any] = json.loads(out.read_text())
    return figures


def copied(figures: Any) -> Any:
    """Figures to change."""
    return json.loads(json.dumps(figures))
