from __future__ import annotations

import json
import mmap
import os
import pickle
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from tag2box import storage
from tag2box.annotations import Photo
from tag2box.errors import UserError
from tag2box.proposals import mapped_array, store as module
from tag2box.proposals.base import Candidates
from tag2box.proposals.store import ProposalStore, StoreEntry, store_lock, write_store

SOURCE = {"kind": "test", "level": 3}


def _photo(name: str, width: int = 100, height: int = 80) -> Photo:
    return Photo(name, Path(f"{name}.png"), width, height)


def _boxes(count: int) -> torch.Tensor:
    start = torch.arange(count, dtype=torch.float32)[:, None].expand(count, 2) % 40
    return torch.cat([start, start + 7.5], dim=1)


def _found(count: int) -> Candidates:
    return Candidates(_boxes(count), torch.linspace(1, 0, count))


def _content(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


@given(st.lists(st.integers(0, 9), max_size=6))
def test_what_is_written_is_read_again(tmp_path_factory: pytest.TempPathFactory, counts: list[int]) -> None:
    path = tmp_path_factory.mktemp("store")
    photos = [_photo(f"n{i}") for i in range(len(counts))]
    write_store(path, SOURCE, photos, (_found(count) for count in counts))
    store = ProposalStore.open(path)
    assert store.source == SOURCE and len(store) == len(counts) and store.ranked == any(counts)
    assert dict(store.sizes) == {photo.id: (100, 80) for photo in photos} and not store.failed
    for photo, count in zip(photos, counts, strict=True):
        assert torch.equal(store.boxes(photo.id), _boxes(count))
        assert torch.equal(store.scores(photo.id), torch.linspace(1, 0, count))
        assert len(store.candidates(photo.id)) == count
    store.check(photos)
    assert sorted(_content(path)) == ["boxes.npy", "index.json", "scores.npy"]


def test_boxes_without_scores_are_not_ranked(tmp_path: Path) -> None:
    write_store(tmp_path, SOURCE, [_photo("a")], [Candidates.unranked(_boxes(3))])
    store = ProposalStore.open(tmp_path)
    assert not store.ranked and store.scores("a").tolist() == [0, 0, 0]


@pytest.mark.parametrize("name", ["ünï/ço dé", "a\nb", "\udcff.jpg", "", " ", 'x"y'])
def test_photos_may_have_any_name(tmp_path: Path, name: str) -> None:
    write_store(tmp_path, SOURCE, [_photo(name)], [_found(2)])
    assert torch.equal(ProposalStore.open(tmp_path).boxes(name), _boxes(2))


def test_boxes_stay_on_disk_and_handed_out_ones_are_the_readers_own(tmp_path: Path) -> None:
    write_store(tmp_path, SOURCE, [_photo("a")], [_found(4)])
    store = ProposalStore.open(tmp_path)
    assert isinstance(store.box_rows.mapping, mmap.mmap) and not store.box_rows.values.flags.writeable
    store.boxes("a").zero_()
    assert torch.equal(store.boxes("a"), _boxes(4))


def test_reading_a_store_does_not_make_the_process_grow(tmp_path: Path) -> None:
    """64 MB of boxes are read at random; what stays mapped of them is counted by the kernel."""
    photos = [_photo(f"{i}") for i in range(400)]
    write_store(tmp_path, SOURCE, photos, (_found(10_000) for _ in photos))
    store = ProposalStore.open(tmp_path)

    def mapped() -> int:
        lines = Path("/proc/self/smaps").read_text().splitlines()
        starts = [i for i, line in enumerate(lines) if str(tmp_path) in line]
        return sum(int(next(x for x in lines[i:] if x.startswith("Rss:")).split()[1]) for i in starts)

    if not Path("/proc/self/smaps").exists():
        pytest.skip("only Linux tells")
    for i in torch.randperm(400).tolist():
        assert torch.equal(store.boxes(f"{i}")[-1], _boxes(10_000)[-1])
        store.scores(f"{i}")
    assert mapped() < 1024  # kB


def test_a_store_crosses_to_other_processes_as_a_path(tmp_path: Path) -> None:
    write_store(tmp_path, SOURCE, [_photo("a")], [_found(5000)])
    store = ProposalStore.open(tmp_path)
    packed = pickle.dumps(store)
    assert len(packed) < 1000
    assert torch.equal(pickle.loads(packed).boxes("a"), store.boxes("a"))  # noqa: S301 - our own


def test_opening_leaves_no_files_open(tmp_path: Path) -> None:
    write_store(tmp_path, SOURCE, [_photo("a")], [_found(3)])
    open_now = Path("/proc/self/fd")
    if not open_now.exists():
        pytest.skip("only Linux tells")
    before = len([*open_now.iterdir()])
    for _ in range(20):
        ProposalStore.open(tmp_path).boxes("a")
    assert len([*open_now.iterdir()]) <= before


def test_the_files_are_plain_npy(tmp_path: Path) -> None:
    write_store(tmp_path, SOURCE, [_photo("a"), _photo("b")], [_found(2), _found(1)])
    assert np.array_equal(np.load(tmp_path / "boxes.npy"), torch.cat([_boxes(2), _boxes(1)]).numpy())
    assert np.load(tmp_path / "scores.npy").tolist() == [1, 0, 1]


def test_unknown_photos_and_other_sizes_are_reported(tmp_path: Path) -> None:
    write_store(tmp_path, SOURCE, [_photo("a")], [_found(1)])
    store = ProposalStore.open(tmp_path)
    for ask in (store.boxes, store.scores, lambda name: store.check([_photo(name)])):
        with pytest.raises(UserError, match="no proposals for photo 'b'"):
            ask("b")
    with pytest.raises(UserError, match="was 100x80, it is 80x100"):
        store.check([_photo("a", 80, 100)])


# ---------------------------------------------------------------- photos by content


def _painted(folder: Path, name: str, content: bytes) -> Photo:
    """A file that stands for a photo of 100 x 80 pixels."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.png"
    path.write_bytes(content)
    os.utime(path, ns=(10**18, 10**18))
    return Photo(name, path, 100, 80)


def test_the_index_has_the_content_of_each_photo_that_can_be_read(tmp_path: Path) -> None:
    photos = [_painted(tmp_path, "a", b"one"), _photo("b")]
    write_store(tmp_path / "s", SOURCE, photos, [_found(1), _found(2)])
    store = ProposalStore.open(tmp_path / "s")
    assert store.entry("a") == StoreEntry("a", 100, 80, storage.FileStamp.of(photos[0].path))
    assert store.entry("b") == StoreEntry("b", 100, 80) and store.entry("c") is None
    assert all(map(store.holds, photos))


def test_a_photo_replaced_by_another_of_its_size_is_refused_by_name(tmp_path: Path) -> None:
    photo = _painted(tmp_path / "a", "IMG_0001", b"one")
    write_store(tmp_path / "s", SOURCE, [photo], [_found(1)])
    store = ProposalStore.open(tmp_path / "s")
    for other in (_painted(tmp_path / "b", "IMG_0001", b"a longer one"), _painted(tmp_path / "a", "IMG_0001", b"two")):
        os.utime(other.path, ns=(2, 2))
        with pytest.raises(UserError, match=rf"s: made for another photo IMG_0001 than {other.path}; make the propos"):
            store.check([other])
        assert not store.holds(other)
    photo.path.write_bytes(b"one")
    store.check([photo])


def test_a_copied_or_touched_photo_is_the_same_and_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photo = _painted(tmp_path / "a", "x", b"one")
    write_store(tmp_path / "s", SOURCE, [photo], [_found(1)])
    read: list[Path] = []
    digest = storage.file_digest
    monkeypatch.setattr(storage, "file_digest", lambda path: read.append(path) or digest(path))
    ProposalStore.open(tmp_path / "s").check([photo])
    assert read == []
    copy = _painted(tmp_path / "b", "x", b"one")
    os.utime(copy.path, ns=(3, 3))
    for _ in range(3):
        ProposalStore.open(tmp_path / "s").check([copy])
    assert read == [copy.path]
    entry = ProposalStore.open(tmp_path / "s").entry("x")
    assert entry is not None and entry.updated(copy) == StoreEntry("x", 100, 80, storage.FileStamp.of(copy.path))


def test_a_photo_that_is_gone_is_left_to_its_decoder(tmp_path: Path) -> None:
    photo = _painted(tmp_path / "a", "x", b"one")
    write_store(tmp_path / "s", SOURCE, [photo], [_found(1)])
    photo.path.unlink()
    ProposalStore.open(tmp_path / "s").check([photo])


@pytest.mark.parametrize("stamp", ["3", "3 4", "x 4 f", "3 4 f f", 3, ["3", 4, "f"]])
def test_what_is_no_stamp_is_reported(tmp_path: Path, stamp: object) -> None:
    photo = _painted(tmp_path / "a", "x", b"one")
    write_store(tmp_path / "s", SOURCE, [photo], [_found(1)])
    _rewrite_index(tmp_path / "s", {"stamps": [stamp]})
    with pytest.raises(UserError, match=r"index\.json: .+ is no stamp of photo 'x'; remove"):
        ProposalStore.open(tmp_path / "s").check([photo])


# ---------------------------------------------------------------- store_lock


@pytest.mark.parametrize(
    ("box", "score", "says"),
    [
        ([5, 5, 5, 9], 0, "is not a box"),
        ([9, 5, 5, 9], 0, "is not a box"),
        ([float("nan"), 0, 5, 9], 0, "is not a box"),
        ([0, 0, 5, 82], 0, "reaches beyond"),
        ([-3, 0, 5, 9], 0, "reaches beyond"),
        ([0, 0, 5, 9], float("nan"), "not a number"),
        ([0, 0, 5, 9], float("inf"), "not a number"),
    ],
)
def test_boxes_that_cannot_be_are_refused_and_change_nothing(
    tmp_path: Path, box: list[float], score: float, says: str
) -> None:
    write_store(tmp_path, SOURCE, [_photo("a")], [_found(1)])
    before = _content(tmp_path)
    wrong = Candidates(torch.tensor([box], dtype=torch.float32), torch.tensor([score]))
    with pytest.raises(UserError, match=says):
        write_store(tmp_path, SOURCE, [_photo("a"), _photo("b")], [_found(1), wrong])
    assert _content(tmp_path) == before


def test_a_store_is_replaced_atomically_and_readers_of_the_old_one_continue(tmp_path: Path) -> None:
    write_store(tmp_path, SOURCE, [_photo("a")], [_found(2)])
    old = ProposalStore.open(tmp_path)
    for generation in (2, 3):
        write_store(tmp_path, {"kind": "other"}, [_photo("b")], [_found(generation)])
        assert sorted(_content(tmp_path)) == [f"boxes-{generation}.npy", "index.json", f"scores-{generation}.npy"]
        assert len(ProposalStore.open(tmp_path).boxes("b")) == generation
    assert torch.equal(old.boxes("a"), _boxes(2))


def test_photos_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="1 photos share an id"):
        write_store(tmp_path, SOURCE, [_photo("a"), _photo("a")], [_found(1)] * 2)


@pytest.mark.parametrize("counts", [0, 3])
def test_photos_and_boxes_must_be_as_many(tmp_path: Path, counts: int) -> None:
    with pytest.raises(ValueError):
        write_store(tmp_path, SOURCE, [_photo("a")], [_found(1)] * counts)
    assert _content(tmp_path) == {}


def test_two_do_not_write_at_once(tmp_path: Path) -> None:
    with store_lock(tmp_path), pytest.raises(UserError, match="another process writes proposals here"):
        write_store(tmp_path, SOURCE, [_photo("a")], [_found(1)])
    write_store(tmp_path, SOURCE, [_photo("a")], [_found(1)])
    assert ".lock" not in _content(tmp_path)


def test_a_file_in_the_place_of_a_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("mine")
    with pytest.raises(UserError, match="s: is a file"):
        write_store(tmp_path / "s", SOURCE, [], [])
    assert (tmp_path / "s").read_text() == "mine"


# ---------------------------------------------------------------- damage


def _rewrite_index(path: Path, change: dict[str, object]) -> None:
    """Change an index so that its digest is right: written by a program that knows no better."""
    index = json.loads((path / "index.json").read_text())
    index.pop("sha256", None)
    storage.write_checked_json(path / "index.json", {**index, **change})


def _without_digests(path: Path) -> None:
    """Turn a store into one of format 2, as version 0.1 wrote it."""
    index = json.loads((path / "index.json").read_text())
    kept = {name: value for name, value in index.items() if name not in {"sha256", "stamps", "arrays"}}
    (path / "index.json").write_text(json.dumps({**kept, "format": 2}))


def _read_all(path: Path) -> None:
    store = ProposalStore.open(path)
    for name in store.sizes:
        store.candidates(name)


def _flip(path: Path, position: int, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)


@pytest.fixture(params=["verified when opened", "verified when read"])
def _verified(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that is small enough to be verified when it is opened, and one that is not."""
    if request.param == "verified when read":
        monkeypatch.setattr(module, "CHECKED_WHEN_OPENED", -1)


@pytest.mark.usefixtures("_verified")
@pytest.mark.parametrize("file", ["boxes.npy", "scores.npy", "index.json"])
def test_one_flipped_bit_is_refused_by_name(tmp_path: Path, file: str) -> None:
    """At the first, the last and every few bytes between: the header, all values, the index."""
    write_store(tmp_path, SOURCE, [_photo("a"), _photo("b")], [_found(3), _found(2)])
    whole = (tmp_path / file).read_bytes()
    positions = [*range(0, len(whole), 1 if file == "boxes.npy" else 3), len(whole) // 2, len(whole) - 2]
    for number, position in enumerate(positions):
        _flip(tmp_path / file, position, number % 8)
        with pytest.raises(UserError, match=rf"{file}: .+") as caught:
            _read_all(tmp_path)
        assert "\n" not in str(caught.value)
        (tmp_path / file).write_bytes(whole)
    _read_all(tmp_path)


def test_of_a_large_store_only_what_is_read_is_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHECKED_WHEN_OPENED", 10)
    monkeypatch.setattr(mapped_array, "BLOCK", 256)
    names = [f"p{i}" for i in range(20)]
    write_store(tmp_path, SOURCE, [_photo(name) for name in names], (_found(10) for _ in names))
    _flip(tmp_path / "boxes.npy", (tmp_path / "boxes.npy").stat().st_size // 2, 3)
    store, refused = ProposalStore.open(tmp_path), []
    for name in names:
        try:
            assert torch.equal(store.boxes(name), _boxes(10))
        except UserError as error:
            assert "boxes.npy: damaged in bytes" in str(error)
            refused.append(name)
        store.scores(name)
    assert refused == ["p8", "p9", "p10"]  # those with boxes in the block
    with pytest.raises(UserError, match=r"boxes\.npy: damaged in bytes 1536 and following; remove the folder"):
        store.verify_all()


@settings(max_examples=30)
@given(st.lists(st.integers(0, 40), max_size=8), st.integers(130, 400))
def test_digests_made_while_writing_are_those_of_the_file(
    tmp_path_factory: pytest.TempPathFactory, counts: list[int], block: int
) -> None:
    path = tmp_path_factory.mktemp("store")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mapped_array, "BLOCK", block)
        write_store(path, SOURCE, [_photo(f"{i}") for i in range(len(counts))], map(_found, counts))
    store = ProposalStore.open(path)
    for rows, file in ((store.box_rows, "boxes.npy"), (store.score_rows, "scores.npy")):
        assert rows.digests == storage.BlockDigests.of_file(path / file, block)
    assert store.verify_all()


@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 4), (123_456_789, 4), (10**12,)])
def test_headers_are_those_of_numpy(shape: tuple[int, ...]) -> None:
    content = BytesIO(mapped_array.npy_header(shape))
    assert np.lib.format.read_magic(content) == (1, 0)
    assert np.lib.format.read_array_header_1_0(content) == (shape, False, np.dtype("<f4"))
    assert len(mapped_array.npy_header(shape)) == 128


def test_a_store_of_format_2_is_read_unverified(tmp_path: Path) -> None:
    photo = _painted(tmp_path / "a", "x", b"one")
    write_store(tmp_path / "s", SOURCE, [photo, _photo("y")], [_found(3), _found(1)])
    _without_digests(tmp_path / "s")
    store = ProposalStore.open(tmp_path / "s")
    assert torch.equal(store.boxes("x"), _boxes(3)) and len(store.scores("y")) == 1 and not store.verify_all()
    _painted(tmp_path / "a", "x", b"two")
    store.check([photo])  # its content is not known
    write_store(tmp_path / "s", SOURCE, [photo], [_found(2)])  # replaced by one of the present format
    assert ProposalStore.open(tmp_path / "s").verify_all()


BAD_BOXES = {
    "reversed": ([9, 5, 5, 9], r"photo b: \[9.0, 5.0, 5.0, 9.0\] is not a box"),
    "empty": ([5, 5, 5, 9], "photo b: .+ is not a box"),
    "negative": ([-3, 0, 5, 9], r"photo b is 100x80, its box \[-3.0, .+ reaches beyond"),
    "outside": ([0, 0, 5, 82], "photo b is 100x80, its box .+ reaches beyond"),
    "NaN": ([float("nan"), 0, 5, 9], r"photo b: \[nan, .+ is not a box"),
    "infinite": ([0, 0, float("inf"), 9], "photo b: .+ is not a box"),
}


@pytest.mark.usefixtures("_verified")
@pytest.mark.parametrize(("box", "says"), BAD_BOXES.values(), ids=BAD_BOXES)
def test_a_store_with_boxes_that_cannot_be_is_refused(tmp_path: Path, box: list[float], says: str) -> None:
    """Of format 2: a digest would find the change before."""
    write_store(tmp_path, SOURCE, [_photo(name) for name in "abc"], [_found(2), _found(3), _found(0)])
    _without_digests(tmp_path)
    rows = np.load(tmp_path / "boxes.npy")
    rows[3] = box
    np.save(tmp_path / "boxes.npy", rows)
    with pytest.raises(UserError, match=f"{says}.*; remove the folder and make the proposals again"):
        _read_all(tmp_path)


@pytest.mark.usefixtures("_verified")
def test_a_store_with_scores_that_are_no_numbers_is_refused(tmp_path: Path) -> None:
    write_store(tmp_path, SOURCE, [_photo("a")], [_found(3)])
    _without_digests(tmp_path)
    np.save(tmp_path / "scores.npy", np.array([1, np.nan, 0], np.float32))
    with pytest.raises(UserError, match=r"photo a: a score is not a number; .+ make the proposals again"):
        _read_all(tmp_path)


DAMAGED_INDEX = {
    "another format": {"format": 99},
    "the format before": {"format": 1},
    "no stamps": {"stamps": None},
    "stamps of too few photos": {"stamps": []},
    "no digests": {"arrays": {}},
    "digests of too few blocks": {"arrays": {"boxes": {"bytes": 176, "block": 99, "blocks": []}}},
    "a width beyond all bounds": {"widths": [10**30]},
    "more boxes than can be": {"counts": [10**18]},
    "too few rows": {"counts": [2]},
    "negative rows": {"counts": [-1]},
    "rows that are no numbers": {"counts": ["3"]},
    "no rows": {"counts": []},
    "no sizes": {"widths": []},
    "odd sizes": {"heights": [None]},
    "no ids": {"ids": None},
    "a repeated id": {"ids": ["a", "a"], "counts": [2, 1], "widths": [1, 1], "heights": [1, 1]},
    "an id that is a list": {"ids": [["a"]]},
    "files elsewhere": {"generation": "/../../x"},
    "no such files": {"generation": 7},
    "failures in a list": {"failed": []},
    "no source": {"source": 3},
}


@pytest.mark.parametrize("change", DAMAGED_INDEX.values(), ids=DAMAGED_INDEX)
def test_a_damaged_index_is_reported_in_one_line(tmp_path: Path, change: dict[str, object]) -> None:
    write_store(tmp_path, SOURCE, [_photo("a")], [_found(3)])
    index = json.loads((tmp_path / "index.json").read_text())
    (tmp_path / "index.json").write_text(json.dumps({**index, **change}))
    with pytest.raises(UserError, match=r"index\.json: damaged, .+ again"):
        ProposalStore.open(tmp_path)
    _rewrite_index(tmp_path, change)
    with pytest.raises(UserError, match="again") as caught:
        ProposalStore.open(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "3", "null", "{}", '{"format": 2}', '{"format": 3}', '{"format": "3"}'])
def test_what_is_no_index_is_reported(tmp_path: Path, text: str) -> None:
    (tmp_path / "index.json").write_text(text)
    with pytest.raises(UserError, match=r"index\.json: "):
        ProposalStore.open(tmp_path)


def test_the_error_of_an_older_store_format_names_a_remedy(tmp_path: Path) -> None:
    index = {"format": 1, "source": {}, "ids": ["a"], "counts": [0], "sizes": [[4, 4]]}
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="format 1, expected 3; remove the folder and make the proposals again"):
        ProposalStore.open(tmp_path)


@pytest.mark.parametrize("file", ["boxes.npy", "scores.npy"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda rows: b"",
        lambda rows: b"rubbish",
        lambda rows: rows[:9],
        lambda rows: rows[:-9],
        lambda rows: rows + b"more",
        lambda rows: rows.replace(b"'<f4'", b"'<i4'"),
        lambda rows: rows.replace(b"False", b"True "),
        lambda rows: rows.replace(b"\x01\x00", b"\x03\x00", 1),
        lambda rows: rows.replace(b"'<f4'", b"'|O4'"),
    ],
)
def test_damaged_rows_are_reported_in_one_line(tmp_path: Path, file: str, damage) -> None:
    write_store(tmp_path, SOURCE, [_photo("a")], [_found(3)])
    rows = (tmp_path / file).read_bytes()
    (tmp_path / file).write_bytes(damage(rows))
    with pytest.raises(UserError, match=rf"{file}: .+ again") as caught:
        ProposalStore.open(tmp_path)
    assert "\n" not in str(caught.value)
