"""Work spread over processes: every item answered once, and no process left behind."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from multiprocessing.context import SpawnProcess
from pathlib import Path

import pytest

from tag2box.errors import UserError
from tag2box.parallel.pool import _attempt, run_in_pool


def double(item: int) -> int:
    return 2 * item


def lost(item: int, signal: int) -> int:
    return -item


def children() -> set[int]:
    """Processes of this one, ended and unburied ones included; multiprocessing's own helpers stay for good."""
    found = {
        int(word) for task in Path("/proc/self/task").iterdir() for word in (task / "children").read_text().split()
    }
    return {pid for pid in found if b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes()}


@pytest.mark.parametrize(("items", "workers"), [(0, 1), (0, 2), (1, 2), (5, 1), (9, 2)])
def test_every_item_is_answered_once(items: int, workers: int) -> None:
    before = children()
    found = list(run_in_pool(double, range(items), workers=workers, lost=lost))
    assert sorted(found) == [(i, 2 * i) for i in range(items)]
    assert children() <= before


def test_work_that_is_given_up_leaves_no_process() -> None:
    before = children()
    work = run_in_pool(double, range(1000), workers=2, lost=lost)
    next(work)
    assert len(children() - before) == 2
    work.close()
    assert children() <= before
    assert os.getpid() not in before


def interrupted(item: int) -> int:
    """Ctrl-C, and the signal of a batch system, at the moment work begins."""
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGTERM)
    return item


def test_a_worker_leaves_signals_to_its_parent() -> None:
    assert sorted(run_in_pool(interrupted, range(3), workers=2, lost=lost)) == [(0, 0), (1, 1), (2, 2)]


class OwnError(Exception):
    """An error that cannot be sent to another process: it is created from two arguments."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def failing(error: Exception) -> int:
    raise error


def own_error(item: int) -> int:
    raise OwnError(item, 2)


def test_an_error_of_a_worker_is_raised_in_its_parent(capfd: pytest.CaptureFixture[str]) -> None:
    before = children()
    with pytest.raises(RuntimeError, match="OwnError: 1 and 2") as caught:
        list(run_in_pool(own_error, [1, 1], workers=2, lost=lost))
    assert "in own_error" in caught.value.__notes__[0]
    assert children() <= before
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("error", "kind"),
    [(UserError("a.jpg: broken"), UserError), (MemoryError(), MemoryError), (OSError(28, "full"), OSError)],
)
def test_the_kind_of_an_error_is_kept(error: Exception, kind: type[Exception]) -> None:
    found = pickle.loads(pickle.dumps(_attempt(failing, error)))  # noqa: S301 - our own
    assert type(found.error) is kind and str(found.error) == str(error)


def test_signals_while_a_worker_starts_do_not_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new process takes a while to import what it needs; an interrupt meanwhile must not end it with a traceback."""
    start = SpawnProcess.start

    def interrupt_at_once(process: SpawnProcess) -> None:
        start(process)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGINT)
        os.kill(process.pid, signal.SIGTERM)

    monkeypatch.setattr(SpawnProcess, "start", interrupt_at_once)
    assert sorted(run_in_pool(double, range(2), workers=2, lost=lost)) == [(0, 0), (1, 2)]


FRESH = """
import os, signal
from multiprocessing.context import SpawnProcess
from operator import neg
from tag2box.parallel.pool import run_in_pool

start = SpawnProcess.start

def interrupt_at_once(process):
    start(process)
    os.kill(process.pid, signal.SIGINT)

if __name__ == "__main__":
    SpawnProcess.start = interrupt_at_once
    print(sorted(run_in_pool(neg, range(2), workers=2, lost=lambda item, number: number)))
"""


def test_ctrl_c_does_not_reach_the_first_worker_of_a_process(tmp_path: Path) -> None:
    """The first spawn of a process also starts multiprocessing's resource tracker, which unblocks signals."""
    (tmp_path / "fresh.py").write_text(FRESH)
    done = subprocess.run([sys.executable, tmp_path / "fresh.py"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[(0, 0), (1, -1)]\n", "")
