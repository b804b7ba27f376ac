"""The log of an unfinished ``detect``: any part of it that reached the disk is read back, to the bit, or ignored."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tag2box.annotations import Detections, Photo
from tag2box.errors import UserError
from tag2box.formats.detection_log import DetectionLog

IDENTITY = {"format": 1, "weights": "a"}


@dataclass(frozen=True)
class Boxes:
    """Proposals of every photo."""

    rows: Tensor

    def boxes(self, photo_id: str, /) -> Tensor:
        return self.rows

    def scores(self, photo_id: str, /) -> Tensor:
        return self.rows[:, 0]


STORE = Boxes(torch.arange(8.0).reshape(2, 4))


def photos_in(folder: Path, count: int) -> list[Photo]:
    photos = [Photo(f"a/{n}", folder / f"{n}.jpg", 9, 9) for n in range(count)]
    for photo in photos:
        photo.path.write_bytes(photo.id.encode() * 9)
    return photos


def found_in(photo: Photo) -> Detections:
    """Numbers that decimal fractions cannot hold, and none at all in the first photo."""
    generator = torch.Generator().manual_seed(len(photo.path.read_bytes()) + ord(photo.id[-1]))
    count = int(photo.id[-1])
    return Detections(
        torch.rand(count, 4, generator=generator) / 3, torch.rand(count, generator=generator), torch.arange(count)
    )


def same(a: Detections, b: Detections) -> bool:
    pairs = ((a.boxes, b.boxes), (a.scores, b.scores), (a.labels, b.labels))
    return all(torch.equal(x, y) and x.dtype == y.dtype and x.shape == y.shape for x, y in pairs)


def logged(folder: Path, photos: list[Photo], rank: int = 0) -> DetectionLog:
    log = DetectionLog(folder, rank)
    log.open(IDENTITY)
    for photo in photos:
        log.add(photo, STORE, found_in(photo))
    log.close()
    return log


def right(found: dict[str, Detections], photos: list[Photo]) -> bool:
    return all(same(found[photo.id], found_in(photo)) for photo in photos if photo.id in found)


def test_a_new_log_has_nothing(tmp_path: Path) -> None:
    log = logged(tmp_path / "log", [])
    assert log.finished(photos_in(tmp_path, 3), STORE) == {}


def test_detections_come_back_to_the_bit_from_all_ranks(tmp_path: Path) -> None:
    photos = photos_in(tmp_path, 4)
    logged(tmp_path / "log", photos[:1])
    logged(tmp_path / "log", photos[1:], rank=1)
    found = DetectionLog(tmp_path / "log").finished(photos, STORE)
    assert [*found] == [photo.id for photo in photos] and right(found, photos)


def test_any_part_of_the_file_gives_whole_photos_and_can_be_continued(tmp_path: Path) -> None:
    photos = photos_in(tmp_path, 4)
    whole = (logged(tmp_path / "log", photos).folder / "0.jsonl").read_bytes()
    ends = [n + 1 for n, byte in enumerate(whole) if byte == ord("\n")]
    for length in sorted({*range(0, len(whole), 37), *ends, *(end - 1 for end in ends)}):
        (tmp_path / "log" / "0.jsonl").write_bytes(whole[:length])
        log = DetectionLog(tmp_path / "log")
        found = log.finished(photos, STORE)
        assert len(found) == sum(end <= length for end in ends) and right(found, photos)
        for photo in photos[len(found) :]:
            log.add(photo, STORE, found_in(photo))
        log.close()
        assert (tmp_path / "log" / "0.jsonl").read_bytes() == whole


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    photos = photos_in(tmp_path, 3)
    file = logged(tmp_path / "log", photos).folder / "0.jsonl"
    whole = file.read_bytes()
    for place in range(0, len(whole), 11):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        found = DetectionLog(tmp_path / "log").finished(photos, STORE)
        assert len(found) < 3 and right(found, photos)


def test_another_identity_starts_from_zero(tmp_path: Path) -> None:
    photos = photos_in(tmp_path, 2)
    log = logged(tmp_path / "log", photos)
    (tmp_path / "log" / "proposals").mkdir()
    log.open(IDENTITY)
    assert len(log.finished(photos, STORE)) == 2
    log.open(IDENTITY | {"weights": "b"})
    assert log.finished(photos, STORE) == {} and not (tmp_path / "log" / "proposals").exists()


def touched(photo: Photo) -> None:
    """Written again with the same content: still the same photo."""
    photo.path.write_bytes(photo.path.read_bytes())


def replaced(photo: Photo) -> None:
    photo.path.write_bytes(bytes(len(photo.path.read_bytes())))


@pytest.mark.parametrize(("change", "kept"), [(touched, 3), (replaced, 2)])
def test_a_photo_with_other_content_is_not_finished(tmp_path: Path, change, kept: int) -> None:
    photos = photos_in(tmp_path, 3)
    log = logged(tmp_path / "log", photos)
    change(photos[1])
    assert len(log.finished(photos, STORE)) == kept


def test_a_photo_with_other_proposals_is_not_finished(tmp_path: Path) -> None:
    photos = photos_in(tmp_path, 3)
    log = logged(tmp_path / "log", photos)
    assert log.finished(photos, replace(STORE, rows=STORE.rows + 1)) == {}


def test_a_photo_that_has_gone_is_not_kept(tmp_path: Path) -> None:
    photos = photos_in(tmp_path, 2)
    found = found_in(photos[1])
    photos[1].path.unlink()
    log = DetectionLog(tmp_path / "log")
    log.open(IDENTITY)
    log.add(photos[1], STORE, found)
    log.close()
    assert log.finished(photos[:1], STORE) == {}


def test_finished_photos_are_on_disk_after_a_few(tmp_path: Path) -> None:
    photos = photos_in(tmp_path, 9)
    log = DetectionLog(tmp_path / "log")
    log.open(IDENTITY)
    for photo in [*photos, *photos]:
        log.add(photo, STORE, found_in(photo))
    assert (tmp_path / "log" / "0.jsonl").read_bytes().count(b"\n") >= 16  # of 18; the process may now be killed
    log.close()


def test_what_was_added_is_read_from_disk(tmp_path: Path) -> None:
    photos = photos_in(tmp_path, 4)
    log = logged(tmp_path / "log", photos)
    assert len(log.stored) == 4 and right(dict(log.stored), photos)
    chosen = log.stored.of([photos[3], photos[1]])
    assert [*chosen] == ["a/3", "a/1"] and "a/0" not in chosen
    file = tmp_path / "log" / "0.jsonl"
    file.write_bytes(file.read_bytes().replace(b"[", b"("))
    with pytest.raises(UserError, match=r"0\.jsonl: damaged while it was in use"):
        chosen["a/1"]


def test_a_photo_that_has_gone_meanwhile_is_of_use_to_this_call_alone(tmp_path: Path) -> None:
    photos = photos_in(tmp_path, 2)
    found = found_in(photos[1])
    photos[1].path.unlink()
    log = DetectionLog(tmp_path / "log")
    log.open(IDENTITY)
    log.add(photos[1], STORE, found)
    log.close()
    assert same(log.stored["a/1"], found)
    photos_in(tmp_path, 2)  # it is back
    assert DetectionLog(tmp_path / "log").finished(photos, STORE) == {}
