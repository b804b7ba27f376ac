"""What many tests need: golden vectors from independent reference implementations, and tiny worlds."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import cv2
import hypothesis
import numpy as np
import pytest
import torch

from tiny_world import World, make_world, one_worker, small_network

# One thread each: tests compute on little, and threads that wait for each other on a busy machine make it crawl.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)

# Processes of pytest-xdist, and those a shell started in the background, ignore Ctrl-C; what they start would, too.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A busy machine is no fault of the code: no test fails for the seconds it took. The examples are the same in every run;
# HYPOTHESIS_PROFILE=explore searches for new ones (`make fuzz` does), quick takes a fifth of them (`make fast`).
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True)
hypothesis.settings.register_profile("quick", deadline=None, derandomize=True, max_examples=20)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=500)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

GOLDEN = Path(__file__).parent / "golden"
FURTHER_GOLDEN = os.environ.get("TAG2BOX_GOLDEN", "")
"""A second folder of reference files, found by the same patterns."""

# What `make fast` runs: folders, and files beside this one. All other tests are slow: whole runs, real processes.
FAST = {
    "formats", "inference", "methods", "metrics", "models", "ops", "reporting",
    "test_io.py", "test_lock.py", "test_package.py", "test_portable.py", "test_safe_pickle.py",
    "test_settings.py", "test_types.py", "test_words.py",
}  # fmt: skip
# Of these, guides train, pages are written whole, OpenVINO compiles, and a browser is a process of its own.
SLOW = {"test_page_in_browser.py", "test_report_page.py", "test_runtime.py"}
# Those on a local Ray cluster, whose every process imports torch: `make test-cluster` runs them.
CLUSTER = {"test_ray.py", "test_ray_data.py", "test_ray_networks.py", "test_row_jobs.py", "test_rows.py"}


def _is_fast(path: Path) -> bool:
    first = path.relative_to(Path(__file__).parent).parts[0]
    return first in FAST and "guide" not in path.name and path.name not in SLOW | CLUSTER


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import the files that `make fast` leaves out."""
    is_left_out = collection_path.suffix == ".py" and config.option.markexpr == "not slow"
    return True if is_left_out and not _is_fast(collection_path) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that `make fast` and `make test` leave out."""
    for item in items:
        if not _is_fast(item.path):
            item.add_marker(pytest.mark.slow)
        if item.path.name in CLUSTER:
            item.add_marker(pytest.mark.cluster)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # whatever the test before has set: a forked process waits for ever for threads it lacks
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever a library of the test before has set
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    cv2.setNumThreads(1)  # OpenCV divides by the number of threads that a test before may have left at none


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Scenes and runs of the real network, made once for all end-to-end tests."""
    return make_world(tmp_path_factory.getbasetemp())


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No further processes for proposals."""
    one_worker(monkeypatch)


def load_golden(name: str) -> dict[str, np.ndarray]:
    """The arrays of a reference file, by a name of ``golden_names``."""
    with np.load(GOLDEN / name, allow_pickle=False) as data:
        return {key: data[key] for key in data.files}


def golden_names(pattern: str, further: str = FURTHER_GOLDEN) -> list[str]:
    """Reference files that match a pattern, as names in ``GOLDEN`` and paths in a further folder; at least one."""
    found = sorted(path.name for path in GOLDEN.glob(pattern))
    if further:
        found += sorted(str(path.absolute()) for path in Path(further).glob(pattern))
    if not found:
        raise FileNotFoundError(f"{pattern}: no such reference file in {GOLDEN}" + (f" or {further}" * bool(further)))
    return found


def background_last(x: torch.Tensor, dim: int = 1) -> torch.Tensor:
    """The references keep background in column 0; ours is the last."""
    return torch.roll(x, -1, dims=dim)


@pytest.fixture
def tiny_study(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """For tests of studies: the tiny network in place of lite0, and no stored weights."""
    small_network(monkeypatch)
    monkeypatch.setenv("TAG2BOX_HOME", str(tmp_path_factory.mktemp("none")))
