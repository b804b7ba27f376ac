"""Work that was killed, interrupted, or ran out of disk: the same call resumes and ends with the same store."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from corners import CORNER, COUNTS, Corner, Seen, content, counts, make, paint

from tag2box import io as lock
from tag2box.annotations import Photo
from tag2box.errors import Interrupted, UserError
from tag2box.proposals import shards as parts
from tag2box.proposals.base import Candidates
from tag2box.proposals.store import ProposalStore, StoreEntry, store_lock, write_entries


@pytest.fixture
def photos(tmp_path: Path) -> list[Photo]:
    return [paint(tmp_path / "photos", f"p{count}", count) for count in COUNTS]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def many(tmp_path: Path) -> list[Photo]:
    return [paint(tmp_path / "many", f"m{i:02}", (i * 7) % 11) for i in range(12)]


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "_MAX_PHOTOS", 3)


def _killed(step: int, act: Callable[[], object]) -> bool:
    """Do something in a copy of this process, which dies without a word before it changes a file the n-th time."""
    child = os.fork()
    if child == 0:
        left = [step]

        def mortal(function: Callable) -> Callable:
            def wrapper(*args: object, **options: object) -> object:
                left[0] -= 1
                if left[0] < 0:
                    os._exit(9)
                return function(*args, **options)

            return wrapper

        for name in ("replace", "unlink", "rename", "mkdir", "rmdir", "open", "fsync"):
            setattr(os, name, mortal(getattr(os, name)))
        shutil.rmtree = mortal(shutil.rmtree)
        act()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


@pytest.mark.usefixtures("small_parts")
def test_a_kill_before_any_change_of_a_file_changes_nothing_in_the_end(many: list[Photo], tmp_path: Path) -> None:
    """First a store of some photos, then one with all; killed before the n-th change, for every n there is."""
    for name, before in (("new", 0), ("extended", 4)):
        make(many[:before], tmp_path / name) if before else None
        fresh = tmp_path / f"{name}-fresh"
        if before:
            shutil.copytree(tmp_path / name, fresh)
        make(many, tmp_path / name)
        expected = content(tmp_path / name)
        steps = 0
        while True:
            out = tmp_path / f"{name}-{steps}"
            if before:
                shutil.copytree(fresh, out)
            if not _killed(steps, lambda out=out: make(many, out)):
                break
            if before:
                assert len(ProposalStore.open(out)) in {before, 12}  # the old store or the new one, at any moment
            make(many, out)
            assert content(out) == expected, steps
            steps += 1
        assert steps > 20


@pytest.mark.usefixtures("small_parts")
def test_what_was_done_is_not_done_again(many: list[Photo], out: Path) -> None:
    seen = Seen()
    with pytest.raises(Interrupted, match="store: 8 of 12 photos are done; rerun the same command to resume"):
        make(many, out, progress=Seen(8, lambda: signal.raise_signal(signal.SIGINT)))
    assert not ProposalStore.exists(out) and len([*(out / "parts").glob("*.npz")]) == 3
    make(many, out, progress=seen)
    assert seen.opened == [(12, 8)] and seen.done == 4


@pytest.mark.usefixtures("small_parts")
def test_interrupted_work_resumes_with_other_photos_but_not_with_other_settings(many: list[Photo], out: Path) -> None:
    with pytest.raises(Interrupted):
        make(many, out, progress=Seen(6, lambda: signal.raise_signal(signal.SIGINT)))
    with pytest.raises(UserError, match=r"store: unfinished, and made with side 5\.0, not 6\.0; remove it to start"):
        make(many, out, Corner(side=6.0))
    changed = [paint(many[1].path.parent, "m01", 10, (33, 20)), *many[4:]]
    assert counts(make(changed, out)) == {"m01": 10, **{f"m{i:02}": (i * 7) % 11 for i in range(4, 12)}}


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("damage", [b"", b"rubbish", None])
def test_a_damaged_part_is_made_again(many: list[Photo], out: Path, tmp_path: Path, damage: bytes | None) -> None:
    make(many, tmp_path / "whole")
    with pytest.raises(Interrupted):
        make(many, out, progress=Seen(7, lambda: signal.raise_signal(signal.SIGINT)))
    part = out / "parts" / "000002.npz"
    part.write_bytes(part.read_bytes()[:-30] if damage is None else damage)
    seen = Seen()
    make(many, out, progress=seen)
    assert seen.opened == [(12, 4)]
    assert content(out) == content(tmp_path / "whole")


def test_ctrl_c_waits_until_a_part_is_written(photos: list[Photo], out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, whole = parts._write, []

    def pressed(*args: object) -> None:
        signal.raise_signal(signal.SIGINT)
        write(*args)  # type: ignore[arg-type]
        whole.append(True)

    monkeypatch.setattr(parts, "_MAX_PHOTOS", 2)
    monkeypatch.setattr(parts, "_write", pressed)
    with pytest.raises(Interrupted, match="2 of 6 photos are done"):
        make(photos, out)
    assert whole == [True]
    assert [path.name for path in sorted((out / "parts").iterdir())] == ["000001.npz", "source.json"]
    monkeypatch.setattr(parts, "_write", write)
    assert len(make(photos, out)) == 6


def test_a_second_writer_waits_and_finds_the_work_done(
    photos: list[Photo], out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "LOCK_POLL_SECONDS", 0.01)
    seen = Seen()
    with ThreadPoolExecutor(1) as other:
        with store_lock(out):
            waiting = other.submit(make, photos, out, progress=seen)
            while not seen.opened:
                assert not waiting.done()
                time.sleep(0.01)
            boxes = [Candidates.unranked(torch.tensor([[0.0, 0, 9, 9]]))] * len(photos)
            entries = [StoreEntry(photo.id, photo.width, photo.height) for photo in photos]
            write_entries(out, json.loads(json.dumps(CORNER.source())), entries, boxes)
        assert len(waiting.result()) == 6
    assert seen.opened == [(1, 0)]  # nothing was searched


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_reported_in_one_line(
    photos: list[Photo], out: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    def full(*_: object) -> None:
        raise OSError(error, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(
            UserError, match="store: no space left on the disk; free some, then rerun the same command to resume"
        ):
            make(photos, out)
    assert not ProposalStore.exists(out)
    assert len(make(photos, out)) == 6


def test_other_errors_of_the_disk_are_not_taken_for_that(
    photos: list[Photo], out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="Input/output"):
        make(photos, out)
