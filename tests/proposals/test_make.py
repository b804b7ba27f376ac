from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from PIL import Image

from tag2box.data.photos import read_photo
from tag2box.errors import Interrupted, UserError
from tag2box.proposals import parts
from tag2box.proposals.lock import locked
from tag2box.proposals.make import make_proposals
from tag2box.proposals.policy import Found, ProposalMethod
from tag2box.proposals.store import ProposalStore
from tag2box.types import Photo


@dataclass(frozen=True, kw_only=True)
class Corner(ProposalMethod):
    """A method for tests: as many boxes as the top left pixel is red. Colours of 200 and up bring trouble."""

    kind: Literal["corner"] = "corner"
    min_side: int = 0
    side: float = 5.0
    unused: tuple[int, ...] = (1, 2)

    def search(self, bgr: np.ndarray, min_side: float) -> Found:
        count = int(bgr[0, 0, 2])
        if count == 200:
            raise ValueError("no such colour\nsecond line")
        if count == 201:
            os.kill(os.getpid(), signal.SIGKILL)
        return Found(
            np.array([[0, 0, self.side + i, self.side] for i in range(count)]).reshape(-1, 4), np.arange(count)
        )


CORNER = Corner()
COUNTS = (3, 0, 1, 2, 5, 4)


def _paint(folder: Path, name: str, count: int, size: tuple[int, int] = (30, 20)) -> Photo:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.png"
    Image.new("RGB", size, (count, 0, 0)).save(path)
    return Photo(name, path, *size)


@pytest.fixture
def photos(tmp_path: Path) -> list[Photo]:
    return [_paint(tmp_path / "photos", f"p{count}", count) for count in COUNTS]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "store"


class Seen:
    """A progress that remembers, and may do something after a photo."""

    def __init__(self, at: int = 0, act: Callable[[], None] = lambda: None) -> None:
        self.opened: list[tuple[int, int]] = []
        self.done = 0
        self._at, self._act = at, act

    @contextmanager
    def __call__(self, title: str, total: int, done: int = 0) -> Iterator[Seen]:
        self.opened.append((total, done))
        yield self

    def advance(self, note: str = "") -> None:
        self.done += 1
        if self.done == self._at:
            self._act()


def _make(photos: list[Photo], out: Path, method: Corner = CORNER, **options) -> ProposalStore:
    return make_proposals(photos, method, out, read=read_photo, **{"workers": 1, "skip_bad": True, **options})


def _content(path: Path) -> dict[str, bytes]:
    return {str(f.relative_to(path)): f.read_bytes() for f in path.rglob("*") if f.is_file()}


def _counts(store: ProposalStore) -> dict[str, int]:
    return {name: len(store.boxes(name)) for name in store.sizes}


# ---------------------------------------------------------------- undisturbed


def test_no_photos_make_an_empty_store(out: Path) -> None:
    store = _make([], out)
    assert len(store) == 0 and not store.failed
    assert sorted(_content(out)) == ["boxes.npy", "index.json", "scores.npy"]


def test_one_process_and_many_make_the_same(photos: list[Photo], tmp_path: Path) -> None:
    seen = Seen()
    alone = _make(photos, tmp_path / "one")
    _make(photos, tmp_path / "two", workers=2, progress=seen)
    assert _counts(alone) == {f"p{n}": n for n in COUNTS} and alone.ranked
    assert alone.source == {
        "kind": "corner", "short_side": None, "max_boxes": 2000, "min_side": 0, "side": 5.0, "unused": [1, 2],
    }  # fmt: skip
    assert seen.opened == [(6, 0)] and seen.done == 6
    assert _content(tmp_path / "one") == _content(tmp_path / "two")


def test_a_finished_store_is_left_alone_and_needs_no_bar(photos: list[Photo], out: Path) -> None:
    _make(photos, out)
    before, seen = _content(out), Seen()
    for some in (photos, photos[::-1], photos[2:4], []):  # a store serves any part of its photos
        assert len(_make(some, out, progress=seen)) == 6
    assert _content(out) == before and seen.opened == []


def test_a_store_that_may_only_be_read_serves(photos: list[Photo], out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _make(photos, out)
    (out / "parts").mkdir()

    def forbidden(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr("tag2box.proposals.make.locked", forbidden)
    assert len(_make(photos, out)) == 6


def test_a_working_resolution_asks_for_a_reduced_copy(tmp_path: Path, out: Path) -> None:
    photo = _paint(tmp_path, "large", 3, (1200, 900))
    asked = []

    def read(path: Path, at_least: tuple[int, int] | None = None):
        asked.append(at_least)
        return read_photo(path, at_least)

    for short_side, box in ((None, [0, 0, 5, 5]), (90, [0, 0, 50, 50])):
        store = make_proposals([photo], Corner(short_side=short_side), out / f"{short_side}", read=read, workers=1)
        assert store.boxes("large").tolist()[-1] == box
    assert asked == [None, (120, 90)]
    assert read_photo(photo.path, (120, 90)).shape[1] < 900


# ---------------------------------------------------------------- other settings, other photos


def test_other_settings_are_refused(photos: list[Photo], out: Path) -> None:
    _make(photos, out)
    before = _content(out)
    with pytest.raises(UserError, match=r"store: made with side 5\.0, not 6\.0; remove it, or name another folder"):
        _make(photos, out, Corner(side=6.0))
    assert _content(out) == before


def test_photos_added_since_are_added_to_the_store(photos: list[Photo], out: Path) -> None:
    seen = Seen()
    _make(photos[2:4], out)
    more = _make(photos[1:], out, progress=seen)
    assert seen.opened == [(5, 2)] and seen.done == 3
    assert [*more.sizes] == ["p0", "p1", "p2", "p5", "p4"]  # the dataset's order
    both = _make(photos[:1], out)
    assert _counts(both) == {f"p{n}": n for n in COUNTS}
    assert next(iter(both.sizes)) == "p3"
    assert sorted(_content(out)) == ["boxes-3.npy", "index.json", "scores-3.npy"]


def test_a_photo_whose_size_changed_is_searched_again(photos: list[Photo], out: Path) -> None:
    _make(photos, out)
    photos[0] = _paint(photos[0].path.parent, "p3", 9, (31, 20))
    store = _make(photos, out)
    assert _counts(store) == {**{f"p{n}": n for n in COUNTS}, "p3": 9} and store.sizes["p3"] == (31, 20)


def test_photos_of_one_name_are_refused(photos: list[Photo], out: Path) -> None:
    with pytest.raises(UserError, match="1 photos share an id"):
        _make([*photos, photos[0]], out)
    assert not out.exists()


def test_a_folder_of_something_else_is_refused(photos: list[Photo]) -> None:
    folder = photos[0].path.parent
    before = _content(folder)
    with pytest.raises(UserError, match="is no part of a proposal store; name a folder of its own"):
        _make(photos, folder)
    assert _content(folder) == before


def test_a_damaged_store_says_so(photos: list[Photo], out: Path) -> None:
    _make(photos, out)
    (out / "boxes.npy").unlink()
    with pytest.raises(UserError, match=r"boxes\.npy: not readable as proposals"):
        _make(photos, out)


# ---------------------------------------------------------------- photos that fail


def _trouble(photos: list[Photo]) -> dict[str, str]:
    """Spoil some photos; gives what is to be said of them."""
    photos[0].path.unlink()
    photos[2].path.write_bytes(photos[2].path.read_bytes()[:60])
    photos[3] = replace(photos[3], width=31)
    _paint(photos[4].path.parent, "p5", 200)
    return {
        "p3": "p3.png: no such photo",
        "p1": "p1.png: not readable as a photo",
        "p2": "p2.png: 30x20 pixels, expected 31x20",
        "p5": "p5.png: not searched (ValueError: no such colour)",
    }


def test_photos_that_fail_are_recorded_and_tried_again(photos: list[Photo], out: Path) -> None:
    told = _trouble(photos)
    store = _make(photos, out)
    assert _counts(store) == {"p0": 0, "p4": 4} and [*store.failed] == [*told]
    assert all(told[name] in store.failed[name] and "\n" not in store.failed[name] for name in told)
    with pytest.raises(UserError, match=r"photo 'p3' could not be searched: .+no such photo"):
        store.check(photos)
    before, seen = _content(out), Seen()
    _make(photos, out, progress=seen)
    assert seen.opened == [(6, 2)] and _content(out) == before
    mended = [_paint(photo.path.parent, photo.id, int(photo.id[1])) for photo in photos]
    whole = _make(mended, out)
    assert _counts(whole) == {f"p{n}": n for n in COUNTS} and not whole.failed
    whole.check(mended)


def test_without_leave_to_skip_the_first_failure_ends_it_and_nothing_is_written(photos: list[Photo], out: Path) -> None:
    _paint(photos[4].path.parent, "p5", 200)
    with pytest.raises(UserError, match=r"p5\.png: not searched"):
        _make(photos, out, skip_bad=False)
    assert _content(out) == {}


def test_a_photo_that_ends_its_process_costs_only_itself(photos: list[Photo], out: Path) -> None:
    _paint(photos[0].path.parent, "p3", 201)
    photos[5].path.unlink()
    store = _make(photos, out, workers=2)
    assert _counts(store) == {f"p{n}": n for n in COUNTS if n not in {3, 4}}
    assert "p4.png: no such photo" in store.failed["p4"]
    assert "p3.png: the process that searched it was ended by SIGKILL; perhaps out of memory" in store.failed["p3"]


class Unimportable:
    """What reads photos here, but cannot be found there."""

    def __reduce__(self):
        return (__import__, ("no_such_module_anywhere",))

    def __call__(self, path: Path, at_least=None):
        return read_photo(path, at_least)


def test_workers_that_cannot_start_are_no_fault_of_the_photos(photos: list[Photo], out: Path) -> None:
    with pytest.raises(RuntimeError, match="ended with exit code 1 before its work"):
        make_proposals(photos, Corner(), out, read=Unimportable(), workers=2, skip_bad=True)
    assert _content(out) == {}


# ---------------------------------------------------------------- broken off


@pytest.fixture
def many(tmp_path: Path) -> list[Photo]:
    return [_paint(tmp_path / "many", f"m{i:02}", (i * 7) % 11) for i in range(12)]


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "_PHOTOS", 3)


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
    for name, before in (("new", 0), ("grown", 4)):
        _make(many[:before], tmp_path / name) if before else None
        fresh = tmp_path / f"{name}-fresh"
        if before:
            shutil.copytree(tmp_path / name, fresh)
        _make(many, tmp_path / name)
        expected = _content(tmp_path / name)
        steps = 0
        while True:
            out = tmp_path / f"{name}-{steps}"
            if before:
                shutil.copytree(fresh, out)
            if not _killed(steps, lambda out=out: _make(many, out)):
                break
            if before:
                assert len(ProposalStore.open(out)) in {before, 12}  # the old store or the new one, at any moment
            _make(many, out)
            assert _content(out) == expected, steps
            steps += 1
        assert steps > 20


@pytest.mark.usefixtures("small_parts")
def test_what_was_done_is_not_done_again(many: list[Photo], out: Path) -> None:
    seen = Seen()
    with pytest.raises(Interrupted, match="store: 8 of 12 photos are done; the same command goes on"):
        _make(many, out, progress=Seen(8, lambda: signal.raise_signal(signal.SIGINT)))
    assert not ProposalStore.exists(out) and len([*(out / "parts").glob("*.npz")]) == 3
    _make(many, out, progress=seen)
    assert seen.opened == [(12, 8)] and seen.done == 4


@pytest.mark.usefixtures("small_parts")
def test_broken_off_work_goes_on_with_other_photos_but_not_with_other_settings(many: list[Photo], out: Path) -> None:
    with pytest.raises(Interrupted):
        _make(many, out, progress=Seen(6, lambda: signal.raise_signal(signal.SIGINT)))
    with pytest.raises(UserError, match=r"store: unfinished, and made with side 5\.0, not 6\.0; remove it to begin"):
        _make(many, out, Corner(side=6.0))
    changed = [_paint(many[1].path.parent, "m01", 10, (33, 20)), *many[4:]]
    assert _counts(_make(changed, out)) == {"m01": 10, **{f"m{i:02}": (i * 7) % 11 for i in range(4, 12)}}


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("damage", [b"", b"rubbish", None])
def test_a_damaged_part_is_made_again(many: list[Photo], out: Path, tmp_path: Path, damage: bytes | None) -> None:
    _make(many, tmp_path / "whole")
    with pytest.raises(Interrupted):
        _make(many, out, progress=Seen(7, lambda: signal.raise_signal(signal.SIGINT)))
    part = out / "parts" / "000002.npz"
    part.write_bytes(part.read_bytes()[:-30] if damage is None else damage)
    seen = Seen()
    _make(many, out, progress=seen)
    assert seen.opened == [(12, 4)]
    assert _content(out) == _content(tmp_path / "whole")


def test_a_second_writer_is_refused(photos: list[Photo], out: Path) -> None:
    with locked(out), pytest.raises(UserError, match="another process writes proposals here; wait until it is done"):
        _make(photos, out)
    assert len(_make(photos, out)) == 6


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_told_in_a_line(
    photos: list[Photo], out: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    def full(*_: object) -> None:
        raise OSError(error, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(UserError, match="store: no space left on the disk; free some, and the same command goes"):
            _make(photos, out)
    assert not ProposalStore.exists(out)
    assert len(_make(photos, out)) == 6


def test_other_errors_of_the_disk_are_not_taken_for_that(
    photos: list[Photo], out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="Input/output"):
        _make(photos, out)


def test_the_index_says_what_was_left_out(photos: list[Photo], out: Path) -> None:
    photos[0].path.unlink()
    _make(photos, out)
    index = json.loads((out / "index.json").read_text())
    assert [*index["failed"]] == ["p3"] and "p3" not in index["ids"] and index["format"] == 2
