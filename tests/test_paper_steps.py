"""benchmarks/paper_steps.py runs at its small size, and resumes."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tag2box.images import Resize
from tag2box.paper_runs import PAPER_RUNS
from tag2box.recipes import RECIPES
from tag2box.training.batches import Loader

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmark, run in this process: a fresh one would import torch again."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    module = importlib.import_module("paper_steps")

    def here(job: Callable[..., Any], *args: object) -> Any:
        return job(*args)

    monkeypatch.setattr(module, "if_it_fits", here)
    monkeypatch.setattr(module, "machine", lambda: {"threads": 1, "gemm_gflops": 30.0})
    return module


def test_a_step_is_shared_by_all_recipes_of_its_family(bench: ModuleType) -> None:
    families = {bench.family(name) for name in PAPER_RUNS}
    assert families == {f"{data}-{net}" for data in ("voc", "coco") for net in ("vgg16", "r50-ws", "r101-ws")}


def test_two_steps_and_the_cost_of_a_run(bench: ModuleType, tmp_path: Path) -> None:
    only = ["--only", "coco17-cob-r50-ws", "--only", "coco14-ss-r50-ws"]
    bench.main(["--small", "--threads", "1", "--out", str(tmp_path / "steps.json"), *only])
    found = json.loads((tmp_path / "steps.json").read_text())
    (row,) = found["steps"]
    assert row["family"] == "coco-r50-ws" and len(row["seconds"]) == len(row["losses"]) == 2
    assert (row["batch"], row["proposals"], row["fits"]) == (2, 24, True) and row["peak_mb"] > 0
    runs = {run["recipe"]: run for run in found["runs"]}
    assert len(runs) == 36 and runs["voc07-ss-vgg16"]["days"] is None
    assert [max(size) for size in row["padded"]] == [85, 107]  # short sides of 64, the smallest scale, then of 80
    config = RECIPES["coco14-mcg-r50-ws"]()
    photo = bench.seconds_per_photo(row, bench.mean_padded_pixels("coco14-mcg-r50-ws", config.loader))
    assert runs["coco14-mcg-r50-ws"]["days"] == pytest.approx(130_000 * 8 * photo / 86_400, abs=0.06)


@pytest.mark.parametrize(("pixels", "seconds"), [(300, 0.5), (1200, 2.0), (750, 1.25)])
def test_a_photo_s_time_is_on_the_line_through_both_steps(bench: ModuleType, pixels: int, seconds: float) -> None:
    row = {"batch": 2, "padded": [[15, 20], [30, 40]], "seconds": [1.0, 4.0]}
    assert bench.seconds_per_photo(row, pixels) == pytest.approx(seconds)


def test_batches_are_padded_to_their_largest_sides(bench: ModuleType) -> None:
    loader = Loader(batch_size=1, resize=Resize(scales=(480,)))
    assert bench.mean_padded_pixels("voc07-ss-vgg16", loader, batches=20) == 480 * 640
    loader = Loader(batch_size=8, resize=Resize(scales=(480, 1200)))
    assert 0.9 * 1200 * 1600 < bench.mean_padded_pixels("voc07-ss-vgg16", loader, batches=200) < 1600 * 1600


def test_measured_steps_are_not_measured_again(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []

    def case(name: str, sizes: Any, threads: int) -> dict[str, object] | None:
        called.append(name)
        if "r101" in name:
            return None
        facts = {"family": bench.family(name), "batch": sizes.batch, "fits": True}
        return facts | {"seconds": [1.0, 1.0], "padded": [[4, 5], [8, 10]], "peak_mb": 1.0}

    monkeypatch.setattr(bench, "case", case)
    monkeypatch.setattr(bench, "expected_seconds", lambda *_: 1.0)
    options = ["--small", "--threads", "1", "--out", str(tmp_path / "steps.json")]
    bench.main([*options, "--only", "voc12-mcg-vgg16"])
    assert called == ["voc12-mcg-vgg16"]
    bench.main(options)
    assert called[1:] == ["voc07-ss-r50-ws", "voc07-ss-r101-ws", "coco14-ss-vgg16", "coco14-ss-r50-ws",
                         "coco14-ss-r101-ws"]  # fmt: skip
    called.clear()
    bench.main(options)
    assert called == ["voc07-ss-r101-ws", "coco14-ss-r101-ws"]  # did not fit in memory: tried again
    bench.main([*options, "--photos", "3", "--only", "voc07-ss-vgg16"])
    assert called[2:] == ["voc07-ss-vgg16"]  # another batch size: a second row
    found = json.loads((tmp_path / "steps.json").read_text())
    assert [row["batch"] for row in found["steps"] if row["family"] == "voc-vgg16"] == [2, 3]


def test_the_estimate_grows_with_the_work(bench: ModuleType) -> None:
    small, full = (bench.expected_seconds("voc07-ss-r50-ws", sizes, 30.0) for sizes in (bench.SMALL, bench.FULL))
    assert 0 < small < 60 < 600 < full
