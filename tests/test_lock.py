"""One process at a time."""

from __future__ import annotations

import errno
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tag2box import io as lock
from tag2box.errors import Busy, UserError
from tag2box.io import is_locked, locked, wait_for_lock


class Waiting:
    """Counts the beginnings and ends of waits."""

    def __init__(self) -> None:
        self.began = self.ended = 0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        self.began += 1
        yield
        self.ended += 1


def test_a_lock_is_there_while_it_is_held(tmp_path: Path) -> None:
    path = tmp_path / "new" / "x.lock"
    assert not is_locked(path)
    assert not path.parent.exists()  # the check creates nothing
    with locked(path, "cooks"):
        assert is_locked(path)
        with pytest.raises(Busy, match="new: another process cooks here; wait until it is done"), locked(path, "cooks"):
            pytest.fail("two at once")
        assert path.exists()
    assert not path.exists() and not is_locked(path)


def test_a_lock_ends_with_a_block_that_fails(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(KeyError), locked(tmp_path / "x.lock", "cooks"):
            raise KeyError
    with pytest.raises(KeyError), wait_for_lock(tmp_path / "x.lock", Waiting()):
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    script = f"""
import os
from pathlib import Path
from tag2box.io import locked
with locked(Path({str(path)!r}), "cooks"):
    os._exit(9)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 9
    assert path.exists()  # as after a kill; and yet
    assert not is_locked(path)
    path.touch()
    with locked(path, "cooks"):
        assert path.exists()
    assert not path.exists()


def test_a_free_lock_is_taken_at_once(tmp_path: Path) -> None:
    waiting = Waiting()
    with wait_for_lock(tmp_path / "x.lock", waiting):
        assert is_locked(tmp_path / "x.lock")
    assert waiting.began == 0


def test_one_waits_for_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "LOCK_POLL_SECONDS", 0.01)
    path, waiting, order = tmp_path / "x.lock", Waiting(), []

    def second() -> None:
        with wait_for_lock(path, waiting):
            order.append(("second", waiting.ended))

    with ThreadPoolExecutor(1) as pool:
        with locked(path, "cooks"):
            later = pool.submit(second)
            while not waiting.began:
                time.sleep(0.01)
            order.append(("first", waiting.ended))
        later.result()
    assert order == [("first", 0), ("second", 1)]  # the wait is over before the work begins


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_disk_without_locks_excludes_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def flock(*_: object) -> None:
        raise OSError(code, "no locks here")

    monkeypatch.setattr("fcntl.flock", flock)
    waiting = Waiting()
    with locked(tmp_path / "x.lock", "cooks"), wait_for_lock(tmp_path / "x.lock", waiting):
        assert not waiting.began


@pytest.mark.parametrize("hold", [lambda p: locked(p, "cooks"), lambda p: wait_for_lock(p, Waiting())])
def test_a_file_in_the_place_of_a_folder_is_reported(tmp_path: Path, hold: type[Waiting]) -> None:
    (tmp_path / "s").write_text("mine")
    with pytest.raises(UserError, match="s: is a file"), hold(tmp_path / "s" / "x.lock"):  # type: ignore[call-arg]
        pytest.fail("held in a file")
    assert (tmp_path / "s").read_text() == "mine"
