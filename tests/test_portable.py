"""Other systems, faked: what macOS and Windows lack or do otherwise. Nothing here was run on them."""

from __future__ import annotations

import ast
import errno
import os
import signal
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

import tag2box
from tag2box import io, storage
from tag2box.errors import Busy
from tag2box.formats.export import place_photo
from tag2box.labels import journal
from tag2box.parallel import pool
from tag2box.proposals import mapped_array
from tag2box.training import dist, loader, loop


class FakeMsvcrt(types.ModuleType):
    """Byte locks of Windows: one holder per file and byte."""

    LK_UNLCK, LK_LOCK, LK_NBLCK = range(3)

    def __init__(self) -> None:
        super().__init__("msvcrt")
        self.held: dict[tuple[int, int], int] = {}
        self.modes: list[int] = []

    def locking(self, handle: int, mode: int, count: int) -> None:
        assert count == 1
        self.modes.append(mode)
        key = (os.fstat(handle).st_ino, os.lseek(handle, 0, os.SEEK_CUR))
        if mode == self.LK_UNLCK:
            if self.held.pop(key, handle) != handle:
                raise OSError(errno.EACCES, "another holds it")
        elif self.held.setdefault(key, handle) != handle:
            raise OSError(errno.EACCES, "another holds it")


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> FakeMsvcrt:
    """A system that says it is Windows, without what POSIX has; open files cannot be removed."""
    fake, unlink = FakeMsvcrt(), Path.unlink
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setitem(sys.modules, "msvcrt", fake)
    for name in ("fcntl", "resource"):
        monkeypatch.setitem(sys.modules, name, None)  # import fails
    for name in ("pread", "sched_getaffinity"):
        monkeypatch.delattr(os, name)
    monkeypatch.delattr(signal, "pthread_sigmask")

    def guarded(path: Path, missing_ok: bool = False) -> None:
        if path.exists() and any(inode == path.stat().st_ino for inode, _ in fake.held):
            raise PermissionError(errno.EACCES, "in use", str(path))
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", guarded)
    return fake


def test_a_lock_of_windows_excludes_a_second_holder_and_is_released(tmp_path: Path, windows: FakeMsvcrt) -> None:
    path = tmp_path / "x.lock"
    for _ in range(2):
        with io.locked(path, "cooks"):
            assert io.is_locked(path)
            with pytest.raises(Busy, match="another process cooks here"), io.locked(path, "cooks"):
                pytest.fail("two at once")
            assert list(windows.held) == [(path.stat().st_ino, io._LOCKED_BYTE)]
        assert not windows.held
        assert not io.is_locked(path)  # the file itself may stay


def test_the_position_of_a_file_survives_a_lock(tmp_path: Path, windows: FakeMsvcrt) -> None:
    (tmp_path / "x").write_bytes(b"0123456789")
    with (tmp_path / "x").open("r+b", buffering=0) as file:
        file.seek(4)
        io.lock(file.fileno(), wait=True)
        assert file.read(2) == b"45"
        io.unlock(file.fileno())
        assert file.read(2) == b"67"
    assert windows.modes == [windows.LK_LOCK, windows.LK_UNLCK]


def test_a_drive_without_locks_excludes_no_process(tmp_path: Path, windows: FakeMsvcrt, monkeypatch) -> None:
    def locking(*_: object) -> None:
        raise OSError(errno.ENOSYS, "no locks here")

    monkeypatch.setattr(windows, "locking", locking)
    with io.locked(tmp_path / "x", "cooks"), io.locked(tmp_path / "x", "cooks"):
        assert (tmp_path / "x").exists()


def test_files_are_flushed_through_a_handle_that_can_write_and_folders_not(tmp_path, windows, monkeypatch) -> None:
    flags, opened = {}, os.open

    def spy(path: Path, flag: int, *rest: int) -> int:
        flags[Path(path)] = flag
        return opened(path, flag, *rest)

    (tmp_path / "x").touch()
    monkeypatch.setattr(os, "open", spy)
    io.sync(tmp_path / "x")
    io.sync(tmp_path)
    assert flags == {tmp_path / "x": os.O_RDWR}


def test_text_has_the_same_bytes_on_every_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "linesep", "\r\n")  # what Python writes for a line end unless it is told
    io.write_text(tmp_path / "x", "a\nb\n")
    assert (tmp_path / "x").read_bytes() == b"a\nb\n"


@pytest.mark.parametrize(("start", "count", "wanted"), [(0, 0, b""), (0, 3, b"012"), (8, 5, b"89"), (20, 1, b"")])
def test_parts_of_files_are_read_without_pread(tmp_path, start: int, count: int, wanted: bytes) -> None:
    (tmp_path / "x").write_bytes(b"0123456789")
    handle = os.open(tmp_path / "x", os.O_RDONLY | io.BINARY)
    try:
        assert storage.seek_and_read(handle, count, start) == wanted == storage.read_at(handle, count, start)
    finally:
        os.close(handle)


@pytest.mark.parametrize(("system", "unit"), [("linux", 1024), ("darwin", 1)])
def test_peak_memory_is_in_the_unit_of_the_system(monkeypatch: pytest.MonkeyPatch, system: str, unit: int) -> None:
    usage = types.SimpleNamespace(ru_maxrss=3 * 2**20 // unit)  # kilobytes on Linux, bytes on macOS
    fake = types.SimpleNamespace(RUSAGE_SELF=0, getrusage=lambda who: usage)
    monkeypatch.setitem(sys.modules, "resource", fake)
    monkeypatch.setattr(sys, "platform", system)
    assert loop.peak_memory_mb() == 3


def test_peak_memory_is_unknown_on_windows(windows: FakeMsvcrt) -> None:
    assert loop.peak_memory_mb() is None


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_photos_are_read_by_the_training_process_itself(windows, monkeypatch, system: str) -> None:
    monkeypatch.setattr(sys, "platform", system)
    assert loader.count_workers(None, 1000) == 0  # a worker that is not forked would copy all there is
    assert loader.count_workers(2, 1000) == 2


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_ranks_share_the_cores_of_a_system_without_affinity(windows, monkeypatch, system: str) -> None:
    told: list[int] = []
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(dist.distributed, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(dist.distributed, "destroy_process_group", lambda: None)
    monkeypatch.setattr(dist.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(dist.distributed, "get_world_size", lambda: 2)
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    with dist.init_distributed() as context:
        assert context.world_size == 2
    assert told == [3]


def test_processes_start_without_a_mask_of_signals(windows: FakeMsvcrt) -> None:
    with pool._blocked(signal.SIGINT):
        assert not hasattr(signal, "pthread_sigmask")


def test_arrays_are_read_without_madvise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_array, "_RELEASE", None)
    np.save(tmp_path / "x.npy", np.arange(6, dtype=np.float32).reshape(3, 2))
    array = mapped_array.MappedArray.open(tmp_path / "x.npy", (3, 2), None, "make it again")
    assert array.copy(1, 3).tolist() == [[2, 3], [4, 5]]


def test_photos_are_copied_where_links_need_a_privilege(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "a required privilege is not held by the client")

    monkeypatch.setattr(Path, "symlink_to", refused)
    (tmp_path / "a.jpg").write_bytes(b"photo")
    place_photo(tmp_path / "a.jpg", tmp_path / "out" / "a.jpg")
    assert (tmp_path / "out" / "a.jpg").read_bytes() == b"photo" and not (tmp_path / "out" / "a.jpg").is_symlink()


def test_a_journal_locks_and_unlocks_on_windows(tmp_path: Path, windows: FakeMsvcrt) -> None:
    labels = types.SimpleNamespace(digest="d", content=types.SimpleNamespace(photos=()), classes=("a",))
    with journal.Journal(tmp_path, labels):  # type: ignore[arg-type]
        assert not windows.held
    assert windows.modes == [windows.LK_LOCK, windows.LK_UNLCK]
    assert b"\r" not in (tmp_path / journal.JOURNAL_FILE).read_bytes()


def test_no_module_needs_posix_to_be_imported() -> None:
    posix = {"fcntl", "grp", "pty", "pwd", "resource", "syslog", "termios", "tty"}
    files = sorted(Path(str(tag2box.__file__)).parent.rglob("*.py"))
    found = {
        (file.name, alias.name)
        for file in files
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in ([*node.names, ast.alias(node.module or "")] if isinstance(node, ast.ImportFrom) else node.names)
    }
    assert ("loop.py", "signal") in found  # the search finds imports
    assert not {pair for pair in found if pair[1] in posix}
