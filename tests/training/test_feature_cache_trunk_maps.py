"""The feature cache of trunk maps: cached equals live, file names, broken files, disk space."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from tag2box.errors import UserError
from tag2box.images import View, read_photo, render_view
from tag2box.models.backbone import Backbone
from tag2box.models.vgg16 import Vgg16, Vgg16Backbone
from tag2box.progress import Bar
from tag2box.training import feature_cache
from tag2box.training.feature_cache import FeatureCache, TrunkMaps, verify_cache_file
from tiny import TinyBackbone, tiny_detector, tiny_photos

VIEW = View(32, flip=False, long_max=64)
VIEWS = [VIEW, View(32, flip=True, long_max=64), View(48), View(None), View(None, flip=True)]
NOTHING_NEW = ""


class OtherPixels(TinyBackbone):
    """The same weights with pixels in another channel order."""

    preprocess = replace(TinyBackbone.preprocess, order="bgr")


def live_world(folder: Path, count: int = 3, backbone: Backbone | None = None) -> TrunkMaps:
    return TrunkMaps(backbone or tiny_detector(3).backbone, tiny_photos(folder, count).photos)


def cache_files(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*.f16")}


def name_of(live: TrunkMaps, folder: Path, view: View = VIEW) -> str:
    """Name of the file that a cache builds for a view; ``NOTHING_NEW`` if it reads an existing one."""
    before = cache_files(folder)
    cached = FeatureCache(live, folder)
    cached.build([view])
    cached.close()
    (name,) = cache_files(folder) - before or {NOTHING_NEW}
    return name


def refuse(self: TrunkMaps, index: int, view: View) -> Tensor:
    raise AssertionError("computed again")


@pytest.mark.parametrize("view", VIEWS)
def test_live_trunk_maps_are_those_of_the_rendered_view_in_half_precision(tmp_path: Path, view: View) -> None:
    live = live_world(tmp_path)
    photo = live.photos[1]
    image = render_view(view, read_photo(photo.path).float(), (photo.height, photo.width))
    (expected,) = live.backbone.trunk(image[None]).detach()
    trunk = live.get(1, view)
    assert trunk.dtype == torch.float32 and not trunk.requires_grad
    assert torch.equal(trunk, expected.half().float())
    assert trunk.shape[1:] == (-(-image.shape[1] // 4), -(-image.shape[2] // 4))  # nothing is padded


@pytest.mark.parametrize("view", VIEWS)
def test_cached_trunk_maps_equal_live_ones_to_the_bit_with_the_same_strides(tmp_path: Path, view: View) -> None:
    live = live_world(tmp_path)
    cached = FeatureCache(live, tmp_path / "maps")
    for index in (2, 0, 1, 0):
        stored, fresh = cached.get(index, view), live.get(index, view)
        assert torch.equal(stored, fresh)
        assert (stored.dtype, stored.stride()) == (fresh.dtype, fresh.stride())
    assert len({live.get(index, view).shape for index in range(3)}) > 1  # of different sizes in one file
    cached.close()


def test_a_frozen_vgg16_trunk_is_cached_to_the_bit(tmp_path: Path) -> None:
    backbone = Vgg16Backbone(Vgg16(train_trunk=False), vector_size=4)
    assert backbone.frozen_trunk and backbone.frozen_roi_maps
    assert [name for name, p in backbone.named_parameters() if p.requires_grad] == [
        f"classifier.{n}.{kind}" for n in (0, 3) for kind in ("weight", "bias")
    ]
    live = live_world(tmp_path, 1, backbone)
    assert torch.equal(FeatureCache(live, tmp_path / "maps").get(0, VIEW), live.get(0, VIEW))
    assert live.get(0, VIEW).shape == (512, 4, 4)  # 32 x 38 pixels
    learning = Vgg16Backbone(Vgg16(), vector_size=4)
    assert not learning.frozen_trunk
    with pytest.raises(ValueError, match="frozen network"):
        FeatureCache(replace(live, backbone=learning), tmp_path / "maps")


def test_no_photos_make_an_empty_file(tmp_path: Path) -> None:
    cached = FeatureCache(replace(live_world(tmp_path), photos=()), tmp_path / "maps")
    cached.build(VIEWS)
    assert len(cache_files(tmp_path / "maps")) == len(VIEWS)
    cached.close()


def test_a_second_cache_reads_what_the_first_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live = live_world(tmp_path)
    expected = FeatureCache(live, tmp_path / "maps").get(1, VIEW)
    monkeypatch.setattr(TrunkMaps, "get", refuse)
    assert torch.equal(FeatureCache(live, tmp_path / "maps").get(1, VIEW), expected)


HEAD = 8 * (2 + 4 * 3) + 32 * 4  # bytes before the values of three photos
INCOMPLETE = {
    "empty": lambda whole: b"",
    "a few bytes": lambda whole: whole[:7],
    "the head alone": lambda whole: whole[:HEAD],
    "the end is missing": lambda whole: whole[:-2],
    "longer": lambda whole: whole + b"\0\0",
}
DAMAGED = {
    "zeros": lambda whole: bytes(len(whole)),
    "no magic number": lambda whole: b"NUMPY..." + whole[8:],
    "another number of photos": lambda whole: whole[:8] + (4).to_bytes(8, "little") + whole[16:],
    "a wild shape": lambda whole: whole[:16] + b"\xff" * 8 + whole[24:],
    "an endless shape": lambda whole: whole[:16] + (2**62).to_bytes(8, "little") * 4 + whole[48:],
}


@pytest.mark.parametrize("how", INCOMPLETE)
def test_an_incomplete_file_is_made_again(tmp_path: Path, how: str) -> None:
    live = live_world(tmp_path)
    FeatureCache(live, tmp_path / "maps").build([VIEW])
    (path,) = (tmp_path / "maps").glob("*.f16")
    whole = path.read_bytes()
    path.write_bytes(INCOMPLETE[how](whole))
    assert torch.equal(FeatureCache(live, tmp_path / "maps").get(2, VIEW), live.get(2, VIEW))
    assert path.read_bytes() == whole


@pytest.mark.parametrize("how", DAMAGED)
def test_a_damaged_header_is_refused_by_name(tmp_path: Path, how: str) -> None:
    live = live_world(tmp_path)
    FeatureCache(live, tmp_path / "maps").build([VIEW])
    (path,) = (tmp_path / "maps").glob("*.f16")
    path.write_bytes(DAMAGED[how](path.read_bytes()))
    with pytest.raises(UserError, match=rf"{path}: damaged in its header; remove the file; it is built again"):
        FeatureCache(live, tmp_path / "maps").get(2, VIEW)
    path.unlink()
    assert torch.equal(FeatureCache(live, tmp_path / "maps").get(2, VIEW), live.get(2, VIEW))


def test_one_flipped_bit_is_refused_by_name(tmp_path: Path) -> None:
    """At the first, the last and every few bytes between: the header, the digests, all values."""
    live = live_world(tmp_path)
    cached = FeatureCache(live, tmp_path / "maps")
    cached.build([VIEW])
    (path,) = (tmp_path / "maps").glob("*.f16")
    whole = path.read_bytes()
    for number, position in enumerate([*range(0, HEAD, 3), *range(HEAD, len(whole), 41), len(whole) - 1]):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << number % 8
        path.write_bytes(damaged)
        cached.close()
        with pytest.raises(UserError, match=rf"{path}: damaged in .+; remove the file; it is built again"):
            for index in range(3):
                cached.get(index, VIEW)
        with pytest.raises(UserError, match=rf"{path}: damaged "):
            verify_cache_file(path)
    path.write_bytes(whole)
    assert verify_cache_file(path)
    cached.close()


def test_features_are_verified_once_and_those_of_other_photos_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = live_world(tmp_path)
    cached = FeatureCache(live, tmp_path / "maps")
    cached.build([VIEW])
    (path,) = (tmp_path / "maps").glob("*.f16")
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x55")
    digested: list[int] = []
    monkeypatch.setattr(feature_cache, "_SHA", lambda raw: digested.append(len(raw)) or hashlib.sha256(raw))
    for _ in range(2):
        for index in range(2):
            assert torch.equal(cached.get(index, VIEW), live.get(index, VIEW))
        with pytest.raises(UserError, match="damaged in the features of photo 2"):
            cached.get(2, VIEW)
    assert len(digested) == 2 + 2  # the damaged ones each time
    cached.close()


@pytest.mark.parametrize("content", [b"", b"x", b"rubbish" * 9, (b"tg2bexv2" + b"\xff" * 8) * 3])
def test_a_file_that_is_no_cache_is_reported_by_its_verification(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.f16").write_bytes(content)
    with pytest.raises(UserError, match=r"x\.f16: damaged or cut short; remove the file"):
        verify_cache_file(tmp_path / "x.f16")


def test_files_of_version_0_1_are_neither_read_nor_called_damaged(tmp_path: Path) -> None:
    (tmp_path / "x.f16").write_bytes(b"tg2bexv1" + bytes(99))
    assert not verify_cache_file(tmp_path / "x.f16")


def test_a_full_disk_is_one_line_and_the_next_call_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live = live_world(tmp_path)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    cached = FeatureCache(live, tmp_path / "maps")
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(
            UserError, match=r"\.f16: cannot be written \(No space left on device\); free some space, or"
        ):
            cached.build([VIEW])
    assert [path for path in (tmp_path / "maps").glob("*") if not path.name.startswith(".")] == []
    assert torch.equal(cached.get(0, VIEW), live.get(0, VIEW))
    assert {path.suffix for path in (tmp_path / "maps").glob("*")} <= {".f16", ".digests"}


def test_a_file_truncated_while_in_use_is_reported_in_one_line(tmp_path: Path) -> None:
    cached = FeatureCache(live_world(tmp_path), tmp_path / "maps")
    cached.build([VIEW])
    (path,) = (tmp_path / "maps").glob("*.f16")
    os.truncate(path, path.stat().st_size - 2)
    with pytest.raises(UserError, match=r"\.f16: truncated while it was in use; rerun"):
        cached.get(2, VIEW)
    cached.close()


def test_interrupted_work_leaves_what_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live = live_world(tmp_path)
    original = TrunkMaps.get

    def broken(self: TrunkMaps, index: int, view: View) -> Tensor:
        if index == 2:
            raise KeyboardInterrupt
        return original(self, index, view)

    with monkeypatch.context() as patch:
        patch.setattr(TrunkMaps, "get", broken)
        with pytest.raises(KeyboardInterrupt):
            FeatureCache(live, tmp_path / "maps").build([VIEW])
    (path,) = (tmp_path / "maps").glob("*.unfinished")
    assert sorted(tmp_path.glob("maps/*f16*")) == [path.with_suffix(".journal"), path]
    assert torch.equal(FeatureCache(live, tmp_path / "maps").get(0, VIEW), live.get(0, VIEW))


def test_what_trunk_maps_depend_on_changes_the_file_name(tmp_path: Path) -> None:
    live, folder = live_world(tmp_path), tmp_path / "maps"
    assert len(name_of(live, folder)) == len("0" * 24 + ".f16")
    assert not name_of(live_world(tmp_path / "same"), folder)  # a copy of the photos
    for view in (View(40, False, 64), View(32, True, 64), View(32, False, 63), View(None)):
        assert name_of(live, folder, view)
    photo = live.photos[1]
    Image.new("RGB", (photo.width, photo.height), "white").save(photo.path)
    assert name_of(live, folder)
    os.utime(photo.path, ns=(1, 1))
    assert not name_of(live, folder)  # touched, not changed
    assert name_of(replace(live, photos=live.photos[:2]), folder)
    assert name_of(replace(live, photos=live.photos[::-1]), folder)
    other = OtherPixels()
    other.load_state_dict(live.backbone.state_dict())
    assert name_of(replace(live, backbone=other), folder)
    backbone = tiny_detector(3).backbone
    assert isinstance(backbone, TinyBackbone)
    backbone.conv.weight.data[0] += 1e-3
    assert name_of(replace(live, backbone=backbone), folder)


def test_what_trunk_maps_do_not_depend_on_keeps_the_file_name(tmp_path: Path) -> None:
    live, folder = live_world(tmp_path), tmp_path / "maps"
    name_of(live, folder)
    assert name_of(live, folder) == NOTHING_NEW
    backbone = tiny_detector(3).backbone
    assert isinstance(backbone, TinyBackbone)
    backbone.fc.weight.data += 1  # the neck was trained
    assert name_of(replace(live, backbone=backbone), folder) == NOTHING_NEW


def test_maps_of_a_trained_trunk_are_never_cached(tmp_path: Path) -> None:
    live = live_world(tmp_path, backbone=tiny_detector(3, frozen=False).backbone)
    with pytest.raises(ValueError, match="frozen network"):
        FeatureCache(live, tmp_path / "maps")


def test_a_photo_that_vanished_is_named(tmp_path: Path) -> None:
    live = live_world(tmp_path)
    live.photos[1].path.unlink()
    with pytest.raises(UserError, match=r"photo1\.jpg: no such photo"):
        FeatureCache(live, tmp_path / "maps")


def test_progress_counts_the_photos_of_a_view_once(tmp_path: Path) -> None:
    reported: list[str] = []

    class Counting:
        def advance(self, note: str = "") -> None:
            reported.append("photo")

    @contextmanager
    def progress(title: str, total: int, done: int = 0) -> Iterator[Bar]:
        reported.append(f"{title} of {total}")
        yield Counting()

    cached = FeatureCache(live_world(tmp_path), tmp_path / "maps")
    for _ in range(2):
        cached.build([View(32, flip=True), View(None)], progress)
    photos = ["photo"] * 3
    assert reported == ["trunk maps at 32 flipped of 3", *photos, "trunk maps at full size of 3", *photos]
    cached.close()


class Halving(TinyBackbone):
    """A trunk that drops incomplete cells at the right and bottom, like VGG16."""

    def trunk(self, images: Tensor) -> Tensor:
        return torch.relu(self.conv(nn.functional.avg_pool2d(self.preprocess(images), self.stride)))


@pytest.mark.parametrize("backbone", [TinyBackbone(), Halving()])
@pytest.mark.parametrize("views", [[], [VIEW], [View(33), View(47, flip=True), View(None)]])
def test_the_disk_space_of_trunk_maps_is_never_underestimated(
    tmp_path: Path, backbone: Backbone, views: Sequence[View]
) -> None:
    live = live_world(tmp_path, 5, backbone)
    FeatureCache(live, tmp_path / "maps").build(views)
    head = 8 * (2 + 4 * 5) + 32 * 6
    taken = sum(path.stat().st_size - head for path in (tmp_path / "maps").glob("*.f16"))
    estimate = live.cache_bytes(views)
    assert taken <= estimate
    assert type(backbone) is Halving or taken == estimate
