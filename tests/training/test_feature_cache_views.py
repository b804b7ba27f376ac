"""RoI maps of a photo in several views: read once, shared pixels, lazily computed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tag2box.images import View, read_photo
from tag2box.training.feature_cache import FeatureCache, RoiMaps, trunk_batch
from tiny import TinyBackbone, tiny_detector, tiny_photos, tiny_store


def live_world(folder: Path) -> RoiMaps:
    """Three photos, the second without proposals."""
    photos = tiny_photos(folder, 3).photos
    return RoiMaps(tiny_detector(3).backbone, photos, tiny_store(folder, photos, counts=(4, 0, 1)))


def read_counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The photos that are read after this call."""
    read: list[str] = []

    def counted(path: Path, at_least: tuple[int, int] | None = None) -> torch.Tensor:
        read.append(path.stem)
        return read_photo(path, at_least)

    monkeypatch.setattr("tag2box.images.read_photo", counted)
    return read


SEVERAL = (View(32), View(32, flip=True), View(24, flip=True), View(24), View(None), View(60, False, 50), View(40))


@pytest.mark.parametrize("views", [SEVERAL[:1], SEVERAL])
@pytest.mark.parametrize("frozen", [True, False])
def test_one_reading_serves_all_views(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, views: tuple[View, ...], frozen: bool
) -> None:
    live = replace(live_world(tmp_path), backbone=tiny_detector(3, frozen=frozen).backbone)
    apart = [[live.get(index, view) for view in views] for index in range(3)]
    read = read_counted(monkeypatch)
    for index, expected in enumerate(apart):
        together = list(live.passes(index, views))
        assert len(together) == len(views)
        for mine, own in zip(together, expected, strict=True):
            assert torch.equal(mine, own) and not mine.requires_grad
    assert read == ["photo0", "photo2"]  # photo1 has no proposals


def test_photos_are_read_eagerly_and_maps_computed_lazily(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live = live_world(tmp_path)
    read, computed = read_counted(monkeypatch), []
    trunk = TinyBackbone.trunk

    def counted(self: TinyBackbone, images: torch.Tensor) -> torch.Tensor:
        computed.append(len(images))
        return trunk(self, images)

    monkeypatch.setattr(TinyBackbone, "trunk", counted)
    passes = live.passes(0, SEVERAL)
    assert (read, computed) == (["photo0"], [])
    with torch.enable_grad():
        next(passes)
        assert torch.is_grad_enabled()  # a generator that pauses leaves the mode of its caller alone
    assert computed == [1, 1]  # the flipped view with it
    list(passes)
    assert sum(computed) == len(SEVERAL)


def test_views_of_equal_size_share_a_pass_through_the_trunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live = live_world(tmp_path)
    views = [View(short, flip, 50) for short in (44, 60) for flip in (False, True)]  # 42 x 50 pixels, all of them
    apart = [live.get(0, view) for view in views]
    computed: list[torch.Size] = []
    trunk = TinyBackbone.trunk

    def counted(self: TinyBackbone, images: torch.Tensor) -> torch.Tensor:
        computed.append(images.shape)
        return trunk(self, images)

    monkeypatch.setattr(TinyBackbone, "trunk", counted)
    assert all(torch.equal(a, b) for a, b in zip(live.passes(0, views), apart, strict=True))
    assert computed == [(1, 3, 42, 50)] * 2


@pytest.mark.parametrize(("device", "count"), [("cpu", 1), ("cuda", 2)])
def test_a_scale_and_its_flip_share_a_batch_if_that_pays(device: str, count: int) -> None:
    assert trunk_batch(torch.device(device)) == count


def test_cached_passes_never_read_the_photos(tmp_path: Path) -> None:
    live = live_world(tmp_path)
    cached = FeatureCache(live, tmp_path / "maps")
    cached.build(SEVERAL)
    expected = [live.get(0, view) for view in SEVERAL]
    for photo in live.photos:
        photo.path.unlink()
    for mine, own in zip(cached.passes(0, SEVERAL), expected, strict=True):
        assert torch.equal(mine, own)
    cached.close()
