from __future__ import annotations

import json
import mmap
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from tag2box.annotations import Photo
from tag2box.errors import UserError
from tag2box.proposals.base import Candidates
from tag2box.proposals.store import ProposalStore, store_lock, write_store

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

DAMAGED_INDEX = {
    "another format": {"format": 99},
    "the format before": {"format": 1},
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
    with pytest.raises(UserError, match="again") as caught:
        ProposalStore.open(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["[]", "3", "null", "{}", '{"format": 2}'])
def test_what_is_no_index_is_reported(tmp_path: Path, text: str) -> None:
    (tmp_path / "index.json").write_text(text)
    with pytest.raises(UserError, match="not an index"):
        ProposalStore.open(tmp_path)


def test_the_error_of_an_older_store_format_names_a_remedy(tmp_path: Path) -> None:
    index = {"format": 1, "source": {}, "ids": ["a"], "counts": [0], "sizes": [[4, 4]]}
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="format 1, expected 2; remove the folder and make the proposals again"):
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
