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

import numpy as np
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
        shutil.rmtree = mortal(shutil.rmtree)  # type: ignore[assignment]
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
def test_a_part_of_a_photo_that_was_replaced_since_is_not_used(many: list[Photo], out: Path) -> None:
    with pytest.raises(Interrupted):
        make(many, out, progress=Seen(6, lambda: signal.raise_signal(signal.SIGINT)))
    paint(many[0].path.parent, "m00", 5)  # of the same size
    os.utime(many[0].path, ns=(5, 5))
    seen = Seen()
    assert counts(make(many, out, progress=seen))["m00"] == 5
    assert seen.opened == [(12, 5)]


def test_settings_of_unfinished_work_that_are_damaged_are_refused_by_name(many: list[Photo], out: Path) -> None:
    with pytest.raises(Interrupted):
        make(many, out, progress=Seen(6, lambda: signal.raise_signal(signal.SIGINT)))
    path = out / "parts" / "source.json"
    path.write_text(path.read_text().replace("5.0", "5.1"))
    with pytest.raises(UserError, match=r"source\.json: damaged, .+; remove .+parts"):
        make(many, out)


def test_parts_of_version_0_1_are_used(many: list[Photo], out: Path) -> None:
    """Without stamps, and with settings that have no digest."""
    (out / "parts").mkdir(parents=True)
    (out / "parts" / "source.json").write_text(json.dumps(CORNER.source()))
    np.savez(
        out / "parts" / "000001.npz",
        photos=np.frombuffer(json.dumps([["m01", 30, 20]]).encode(), np.uint8),
        counts=np.array([1]),
        boxes=np.array([[1, 2, 3, 4]], np.float32),
        scores=np.array([1], np.float32),
    )
    seen = Seen()
    store = make(many[:2], out, progress=seen)
    assert seen.opened == [(2, 1)] and store.boxes("m01").tolist() == [[1, 2, 3, 4]]


DAMAGED_PARTS = {
    "empty": lambda whole: b"",
    "rubbish": lambda whole: b"rubbish",
    "cut short": lambda whole: whole[:-30],
    "a flipped bit in a value": lambda whole: _flipped(whole, len(whole) // 2),
    "a header that is no Python": lambda whole: whole.replace(b"'descr'", b"'descr("),
    "an unknown compression": lambda whole: whole.replace(b"PK\x01\x02\x2d\x03\x2d\0", b"PK\x01\x02" + b"\x63" * 4),
}


def _flipped(whole: bytes, position: int) -> bytes:
    return whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :]


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("damage", DAMAGED_PARTS.values(), ids=DAMAGED_PARTS)
def test_a_damaged_part_is_made_again(
    many: list[Photo], out: Path, tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    make(many, tmp_path / "whole")
    with pytest.raises(Interrupted):
        make(many, out, progress=Seen(7, lambda: signal.raise_signal(signal.SIGINT)))
    part = out / "parts" / "000002.npz"
    whole = part.read_bytes()
    part.write_bytes(damage(whole))
    assert part.read_bytes() != whole
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
            found = zip(map(StoreEntry.of, photos), boxes, strict=True)
            write_entries(out, json.loads(json.dumps(CORNER.source())), found)
        assert len(waiting.result()) == 6
    assert seen.opened == [(1, 0)]  # nothing was searched


@pytest.mark.parametrize("call", ["fsync", "replace", "open"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_full_or_broken_disk_is_reported_in_one_line_and_nothing_incomplete_stays(
    many: list[Photo], out: Path, small_parts: None, monkeypatch: pytest.MonkeyPatch, error: int, call: str
) -> None:
    """The disk fails at the n-th call, for every n until the work succeeds."""
    original, failures = getattr(os, call), 0
    while True:
        left = [failures]

        def failing(*args: object, **options: object) -> object:
            left[0] -= 1  # noqa: B023 - used within this turn
            if left[0] == -1:  # noqa: B023
                raise OSError(error, os.strerror(error))
            return original(*args, **options)

        with monkeypatch.context() as patched:
            patched.setattr(os, call, failing)
            try:
                make(many, out)
                break
            except UserError as problem:
                assert os.strerror(error) in str(problem) and "run the same command again" in str(problem)
        assert not any(path.name.startswith(".") for path in out.rglob("*")), failures
        failures += 1
    assert failures >= 3
    make(many, out)
    assert counts(ProposalStore.open(out)) == {f"m{i:02}": (i * 7) % 11 for i in range(12)}
