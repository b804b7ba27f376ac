from __future__ import annotations

import json
import os
import shutil
import signal
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from corners import COUNTS, Corner, Seen, content, counts, make, paint

from tag2box.annotations import Photo
from tag2box.errors import Interrupted, UserError
from tag2box.images import read_photo
from tag2box.proposals import shards
from tag2box.proposals.base import Candidates
from tag2box.proposals.build import build_proposals
from tag2box.proposals.store import StoreEntry


@pytest.fixture
def photos(tmp_path: Path) -> list[Photo]:
    return [paint(tmp_path / "photos", f"p{count}", count) for count in COUNTS]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "store"


# ---------------------------------------------------------------- undisturbed


def test_no_photos_make_an_empty_store(out: Path) -> None:
    store = make([], out)
    assert len(store) == 0 and not store.failed
    assert sorted(content(out)) == ["boxes.npy", "index.json", "scores.npy"]


def test_one_process_and_many_make_the_same(photos: list[Photo], tmp_path: Path) -> None:
    seen = Seen()
    alone = make(photos, tmp_path / "one")
    make(photos, tmp_path / "two", workers=2, progress=seen)
    assert counts(alone) == {f"p{n}": n for n in COUNTS} and alone.ranked
    assert alone.source == {
        "kind": "corners:Corner", "short_side": None, "max_boxes": 2000, "min_side": 0, "side": 5.0, "unused": [1, 2],
    }  # fmt: skip
    assert seen.opened == [(6, 0)] and seen.done == 6
    assert content(tmp_path / "one") == content(tmp_path / "two")


def test_a_finished_store_is_left_alone_and_needs_no_bar(photos: list[Photo], out: Path) -> None:
    make(photos, out)
    before, seen = content(out), Seen()
    for some in (photos, photos[::-1], photos[2:4], []):  # a store serves any part of its photos
        assert len(make(some, out, progress=seen)) == 6
    assert content(out) == before and seen.opened == []


def test_a_store_that_may_only_be_read_serves(photos: list[Photo], out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(photos, out)
    (out / "parts").mkdir()

    def forbidden(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr("tag2box.proposals.store.store_lock", forbidden)
    assert len(make(photos, out)) == 6


def test_a_working_resolution_reads_a_reduced_copy(tmp_path: Path, out: Path) -> None:
    photo = paint(tmp_path, "large", 3, (1200, 900))
    asked = []

    def read(path: Path, at_least: tuple[int, int] | None = None):
        asked.append(at_least)
        return read_photo(path, at_least)

    for short_side, box in ((None, [0, 0, 5, 5]), (90, [0, 0, 50, 50])):
        store = build_proposals([photo], Corner(short_side=short_side), out / f"{short_side}", read=read, workers=1)
        assert store.boxes("large").tolist()[-1] == box
    assert asked == [None, (120, 90)]
    assert read_photo(photo.path, (120, 90)).shape[1] < 900


# ---------------------------------------------------------------- other settings, other photos


def test_other_settings_are_refused(photos: list[Photo], out: Path) -> None:
    make(photos, out)
    before = content(out)
    with pytest.raises(UserError, match=r"store: made with side 5\.0, not 6\.0; remove it, or name another folder"):
        make(photos, out, Corner(side=6.0))
    assert content(out) == before


def test_photos_added_since_are_added_to_the_store(photos: list[Photo], out: Path) -> None:
    seen = Seen()
    make(photos[2:4], out)
    more = make(photos[1:], out, progress=seen)
    assert seen.opened == [(5, 2)] and seen.done == 3
    assert [*more.sizes] == ["p0", "p1", "p2", "p5", "p4"]  # the dataset's order
    both = make(photos[:1], out)
    assert counts(both) == {f"p{n}": n for n in COUNTS}
    assert next(iter(both.sizes)) == "p3"
    assert sorted(content(out)) == ["boxes-3.npy", "index.json", "scores-3.npy"]


def test_a_photo_whose_size_changed_is_searched_again(photos: list[Photo], out: Path) -> None:
    make(photos, out)
    photos[0] = paint(photos[0].path.parent, "p3", 9, (31, 20))
    store = make(photos, out)
    assert counts(store) == {**{f"p{n}": n for n in COUNTS}, "p3": 9} and store.sizes["p3"] == (31, 20)


def _repaint(photo: Photo, count: int) -> Photo:
    """Another photo in the place of one: same name, same size."""
    before = photo.path.stat().st_mtime_ns
    other = paint(photo.path.parent, photo.id, count, (photo.width, photo.height))
    os.utime(other.path, ns=(before + 1, before + 1))
    return other


def test_a_photo_replaced_by_another_of_its_size_is_searched_again(photos: list[Photo], out: Path) -> None:
    make(photos, out)
    _repaint(photos[0], 9)
    seen = Seen()
    store = make(photos, out, progress=seen)
    assert seen.opened == [(6, 5)] and counts(store) == {**{f"p{n}": n for n in COUNTS}, "p3": 9}
    make(photos, out, progress=seen)
    assert len(seen.opened) == 1


def test_a_photo_of_another_folder_does_not_get_the_boxes_of_its_namesake(
    photos: list[Photo], out: Path, tmp_path: Path
) -> None:
    make(photos, out)
    namesake = paint(tmp_path / "elsewhere", "p3", 7)
    assert counts(make([namesake], out)) == {**{f"p{n}": n for n in COUNTS}, "p3": 7}
    assert counts(make(photos, out)) == {f"p{n}": n for n in COUNTS}


def test_touched_and_copied_photos_are_not_searched_again(photos: list[Photo], out: Path, tmp_path: Path) -> None:
    make(photos, out)
    before, seen = content(out), Seen()
    os.utime(photos[0].path, ns=(1, 1))
    copies = [replace(photo, path=Path(shutil.copy(photo.path, tmp_path / f"copy-{photo.id}"))) for photo in photos]
    make(photos, out, progress=seen)
    make(copies, out, progress=seen)
    assert seen.opened == [] and content(out) == before
    more = make([*copies, paint(tmp_path, "new", 1)], out, progress=seen)
    assert seen.opened == [(7, 6)]
    assert more.entry("p3") == StoreEntry.of(copies[0])  # written again, with the present time


def test_a_store_without_stamps_goes_by_name_and_size(photos: list[Photo], out: Path) -> None:
    make(photos, out)
    index = json.loads((out / "index.json").read_text())
    kept = {name: value for name, value in index.items() if name not in {"sha256", "stamps", "arrays"}}
    (out / "index.json").write_text(json.dumps({**kept, "format": 2}))
    seen = Seen()
    _repaint(photos[0], 9)
    make(photos, out, progress=seen)
    assert seen.opened == []
    store = make([*photos, paint(photos[0].path.parent, "new", 1)], out, progress=seen)
    assert store.entry("p3") == StoreEntry("p3", 30, 20) and store.entry("new") != StoreEntry("new", 30, 20)


@pytest.mark.parametrize("is_finished", [True, False])
def test_only_propose_adds_photos_to_a_store_of_other_photos(
    photos: list[Photo], out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_finished: bool
) -> None:
    monkeypatch.setattr(shards, "_MAX_PHOTOS", 2)
    with suppress(Interrupted):
        make(photos, out, progress=Seen(0 if is_finished else 4, lambda: signal.raise_signal(signal.SIGINT)))
    before, others = content(out), [paint(tmp_path / "fruit", f"f{n}", n) for n in range(3)]
    count = 6 if is_finished else 4
    with pytest.raises(UserError, match=f"store: holds proposals of {count} other photos and of none of these 3; name"):
        make(others, out, any_store=False)
    assert content(out) == before
    assert len(make([photos[0], *others], out, any_store=False)) == (9 if is_finished else 4)


def test_any_store_that_is_empty_or_knows_a_photo_takes_photos(photos: list[Photo], out: Path) -> None:
    make([], out)
    photos[0].path.write_bytes(b"")
    assert [*make(photos[:1], out, any_store=False).failed] == ["p3"]
    whole = [paint(photos[0].path.parent, "p3", 3), *photos[1:]]
    assert counts(make(whole, out, any_store=False)) == {f"p{n}": n for n in COUNTS}


def test_photos_of_one_name_are_refused(photos: list[Photo], out: Path) -> None:
    with pytest.raises(UserError, match="1 photos share an id"):
        make([*photos, photos[0]], out)
    assert not out.exists()


def test_a_folder_of_something_else_is_refused(photos: list[Photo]) -> None:
    folder = photos[0].path.parent
    before = content(folder)
    with pytest.raises(UserError, match="is no part of a proposal store; name a folder of its own"):
        make(photos, folder)
    assert content(folder) == before


def test_a_damaged_store_is_reported(photos: list[Photo], out: Path) -> None:
    make(photos, out)
    (out / "boxes.npy").unlink()
    with pytest.raises(UserError, match=r"boxes\.npy: no such file; .+ make the proposals again"):
        make(photos, out)


# ---------------------------------------------------------------- photos that fail


def _trouble(photos: list[Photo]) -> dict[str, str]:
    """Spoil some photos; return the expected messages."""
    photos[0].path.unlink()
    photos[2].path.write_bytes(photos[2].path.read_bytes()[:60])
    photos[3] = replace(photos[3], width=31)
    paint(photos[4].path.parent, "p5", 200)
    return {
        "p3": "p3.png: no such photo",
        "p1": "p1.png: not readable as a photo",
        "p2": "p2.png: 30x20 pixels, expected 31x20",
        "p5": "p5.png: not searched (ValueError: no such colour)",
    }


def test_photos_that_fail_are_recorded_and_tried_again(photos: list[Photo], out: Path) -> None:
    told = _trouble(photos)
    store = make(photos, out)
    assert counts(store) == {"p0": 0, "p4": 4} and [*store.failed] == [*told]
    assert all(told[name] in store.failed[name] and "\n" not in store.failed[name] for name in told)
    with pytest.raises(UserError, match=r"photo 'p3' could not be searched: .+no such photo"):
        store.check(photos)
    before, seen = content(out), Seen()
    make(photos, out, progress=seen)
    assert seen.opened == [(6, 2)] and content(out) == before
    mended = [paint(photo.path.parent, photo.id, int(photo.id[1])) for photo in photos]
    whole = make(mended, out)
    assert counts(whole) == {f"p{n}": n for n in COUNTS} and not whole.failed
    whole.check(mended)


def test_without_leave_to_skip_the_first_failure_ends_it_and_nothing_is_written(photos: list[Photo], out: Path) -> None:
    paint(photos[4].path.parent, "p5", 200)
    with pytest.raises(UserError, match=r"p5\.png: not searched"):
        make(photos, out, skip_bad=False)
    assert content(out) == {}


def test_a_photo_that_ends_its_process_costs_only_itself(photos: list[Photo], out: Path) -> None:
    paint(photos[0].path.parent, "p3", 201)
    photos[5].path.unlink()
    store = make(photos, out, workers=2)
    assert counts(store) == {f"p{n}": n for n in COUNTS if n not in {3, 4}}
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
        build_proposals(photos, Corner(), out, read=Unimportable(), workers=2, skip_bad=True)
    assert content(out) == {}


def test_the_index_lists_what_was_skipped(photos: list[Photo], out: Path) -> None:
    photos[0].path.unlink()
    make(photos, out)
    index = json.loads((out / "index.json").read_text())
    assert [*index["failed"]] == ["p3"] and "p3" not in index["ids"] and index["format"] == 3


def test_a_shard_is_numbered_without_a_search_through_the_photos(photos: list[Photo], tmp_path: Path) -> None:
    class Unsearchable(dict[str, Path]):
        def values(self) -> None:
            raise AssertionError("with a million photos, every flush would take a second")

    begun = shards.Shards(tmp_path / "parts", {"kind": "corners"}, files=Unsearchable())
    for photo in photos[:3]:
        begun.add(StoreEntry.of(photo), Candidates.unranked(torch.tensor([[0.0, 0, 9, 9]])))
        begun.flush()
    (tmp_path / "parts" / "000002.npz").unlink()
    again = shards.Shards.open(tmp_path / "parts", {"kind": "corners"})
    again.add(StoreEntry.of(photos[3]), Candidates.unranked(torch.tensor([[0.0, 0, 9, 9]])))
    again.flush()
    assert sorted(path.name for path in (tmp_path / "parts").glob("*.npz")) == [f"00000{n}.npz" for n in (1, 3, 4)]
