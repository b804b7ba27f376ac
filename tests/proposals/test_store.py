from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tag2box.data.photos import read_photo
from tag2box.errors import UserError
from tag2box.proposals.store import ProposalStore, make_proposals, write_store
from tag2box.types import Photo

SOURCE = {"kind": "test", "level": 3}


def _photo(name: str, width: int = 100, height: int = 80) -> Photo:
    return Photo(name, Path(f"{name}.png"), width, height)


def _boxes(count: int) -> torch.Tensor:
    start = torch.arange(count, dtype=torch.float32)[:, None].expand(count, 2) % 40
    return torch.cat([start, start + 7.5], dim=1)


@dataclass(frozen=True, kw_only=True)
class Corner:
    """A method for tests: as many boxes as the top left pixel is red."""

    kind: str = "corner"
    side: float = 5.0
    unused: tuple[int, ...] = (1, 2)

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        count = int(image[0, 0, 0])
        return torch.tensor([[0, 0, self.side + i, self.side] for i in range(count)], dtype=torch.float32).reshape(
            -1, 4
        )


@pytest.fixture
def photos(tmp_path: Path) -> list[Photo]:
    found = []
    for count in (3, 0, 1, 2, 5, 4):
        path = tmp_path / f"p{count}.png"
        Image.new("RGB", (30, 20), (count, 0, 0)).save(path)
        found.append(Photo(f"p{count}", path, 30, 20))
    return found


@given(st.lists(st.integers(0, 9), max_size=6))
def test_what_is_written_is_read_again(tmp_path_factory: pytest.TempPathFactory, counts: list[int]) -> None:
    path = tmp_path_factory.mktemp("store")
    photos = [_photo(f"n{i}") for i in range(len(counts))]
    write_store(path, SOURCE, photos, (_boxes(count) for count in counts))
    store = ProposalStore.open(path)
    assert store.source == SOURCE and len(store) == len(counts)
    assert dict(store.sizes) == {photo.id: (100, 80) for photo in photos}
    for photo, count in zip(photos, counts, strict=True):
        assert torch.equal(store.boxes(photo.id), _boxes(count))
    store.check(photos)


def test_boxes_stay_on_disk_and_handed_out_ones_are_the_readers_own(tmp_path: Path) -> None:
    write_store(tmp_path, SOURCE, [_photo("a")], [_boxes(4)])
    store = ProposalStore.open(tmp_path)
    assert isinstance(store.rows.base, np.memmap)
    store.boxes("a").zero_()
    assert torch.equal(store.boxes("a"), _boxes(4))


def test_the_boxes_file_is_plain_npy(tmp_path: Path) -> None:
    write_store(tmp_path, SOURCE, [_photo("a"), _photo("b")], [_boxes(2), _boxes(1)])
    assert np.array_equal(np.load(tmp_path / "boxes.npy"), torch.cat([_boxes(2), _boxes(1)]).numpy())


def test_unknown_photos_and_other_sizes_are_told(tmp_path: Path) -> None:
    write_store(tmp_path, SOURCE, [_photo("a")], [_boxes(1)])
    store = ProposalStore.open(tmp_path)
    with pytest.raises(UserError, match="no proposals for photo 'b'"):
        store.boxes("b")
    with pytest.raises(UserError, match="no proposals for photo 'b'"):
        store.check([_photo("b")])
    with pytest.raises(UserError, match="was 100x80, it is 80x100"):
        store.check([_photo("a", 80, 100)])


@pytest.mark.parametrize(
    ("box", "says"),
    [
        ([5, 5, 5, 9], "is not a box"),
        ([9, 5, 5, 9], "is not a box"),
        ([float("nan"), 0, 5, 9], "is not a box"),
        ([0, 0, 5, 82], "reaches beyond"),
        ([-3, 0, 5, 9], "reaches beyond"),
    ],
)
def test_boxes_that_cannot_be_are_refused_and_leave_no_store(tmp_path: Path, box: list[float], says: str) -> None:
    write_store(tmp_path, SOURCE, [_photo("a")], [_boxes(1)])
    with pytest.raises(UserError, match=says):
        write_store(tmp_path, SOURCE, [_photo("a")], [torch.tensor([box], dtype=torch.float32)])
    with pytest.raises(UserError, match="no such file"):
        ProposalStore.open(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["boxes.npy"]  # no temporary left behind


def test_photos_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="1 photos share an id"):
        write_store(tmp_path, SOURCE, [_photo("a"), _photo("a")], [_boxes(1)] * 2)


@pytest.mark.parametrize("counts", [0, 3])
def test_photos_and_boxes_must_be_as_many(tmp_path: Path, counts: int) -> None:
    with pytest.raises(ValueError):
        write_store(tmp_path, SOURCE, [_photo("a")], [_boxes(1)] * counts)


def test_damaged_stores_do_not_open(tmp_path: Path) -> None:
    write_store(tmp_path, SOURCE, [_photo("a")], [_boxes(3)])
    index, boxes = tmp_path / "index.json", tmp_path / "boxes.npy"
    good, rows = json.loads(index.read_text()), boxes.read_bytes()
    for change in ({"format": 99}, {"counts": [2]}, {"counts": []}, {"sizes": [[1]]}, {"ids": None}):
        index.write_text(json.dumps({**good, **change}))
        with pytest.raises(UserError, match="make it anew"):
            ProposalStore.open(tmp_path)
    index.write_text("[]")
    with pytest.raises(UserError, match="not an index"):
        ProposalStore.open(tmp_path)
    index.write_text(json.dumps(good))
    for damage in (b"", rows[:-9], b"rubbish"):
        boxes.write_bytes(damage)
        with pytest.raises(UserError, match="anew"):
            ProposalStore.open(tmp_path)


def test_proposals_are_made_alike_by_one_process_and_by_many(photos: list[Photo], tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    alone = make_proposals(photos, Corner(), tmp_path / "one", read=read_photo, workers=1)
    many = make_proposals(
        photos, Corner(), tmp_path / "two", read=read_photo, workers=2, on_progress=lambda *done: seen.append(done)
    )
    assert [len(alone.boxes(photo.id)) for photo in photos] == [3, 0, 1, 2, 5, 4]
    assert seen == [(i, 6) for i in range(1, 7)] and alone.source == {"kind": "corner", "side": 5.0, "unused": [1, 2]}
    for name in ("boxes.npy", "index.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert np.array_equal(alone.rows, many.rows)


def test_an_equal_store_is_used_and_another_is_never_replaced(photos: list[Photo], tmp_path: Path) -> None:
    out, seen = tmp_path / "s", []

    def make(method: Corner, some: list[Photo]) -> ProposalStore:
        seen.clear()
        return make_proposals(
            some, method, out, read=read_photo, workers=1, on_progress=lambda *done: seen.append(done)
        )

    make(Corner(), photos)
    assert len(seen) == 6
    make(Corner(), photos)
    assert seen == []
    for method, some in ((Corner(side=6.0), photos), (Corner(), photos[::-1])):
        with pytest.raises(UserError, match="other photos or settings"):
            make(method, some)
    assert make(Corner(), photos).boxes("p1")[0, 3] == 5.0 and seen == []
    (out / "boxes.npy").unlink()
    with pytest.raises(UserError, match="not readable as boxes"):
        make(Corner(), photos)


def test_no_photos_make_an_empty_store(tmp_path: Path) -> None:
    assert len(make_proposals([], Corner(), tmp_path / "s", read=read_photo)) == 0


@pytest.mark.parametrize("workers", [1, 2])
def test_a_photo_of_another_size_or_that_is_gone_is_told(photos: list[Photo], tmp_path: Path, workers: int) -> None:
    wrong = [*photos[:2], Photo("p1", photos[2].path, 31, 20)]
    with pytest.raises(UserError, match="30x20 pixels, expected 31x20"):
        make_proposals(wrong, Corner(), tmp_path / "s", read=read_photo, workers=workers)
    photos[0].path.unlink()
    with pytest.raises(UserError, match="no such photo"):
        make_proposals(photos, Corner(), tmp_path / "s", read=read_photo, workers=1)
