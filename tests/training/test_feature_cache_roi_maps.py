"""The feature cache of RoI maps: cached equals live, file names, locks, interruption."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from tag2box import io as lock
from tag2box.errors import UserError
from tag2box.images import View, boxes_in_view, read_photo, render_view
from tag2box.io import locked
from tag2box.models.backbone import set_runtime
from tag2box.models.lite0 import Lite0
from tag2box.models.runtime import Runtime, has_openvino
from tag2box.progress import Bar, silent
from tag2box.training.feature_cache import FeatureCache, RoiMaps, verify_cache_file
from tag2box.types import Proposals
from tiny import TinyBackbone, tiny_detector, tiny_photos, tiny_store

VIEW = View(32, flip=False, long_max=64)
NOTHING_NEW = ""
needs_openvino = pytest.mark.skipif(not has_openvino(), reason="OpenVINO is not installed")


class OtherPooling(TinyBackbone):
    """The same weights with another pooling."""

    def roi_map_key(self) -> str:
        return super().roi_map_key() + " other pooling"


def live_world(folder: Path, counts: tuple[int, ...] = (4, 0, 1)) -> RoiMaps:
    photos = tiny_photos(folder, len(counts)).photos
    return RoiMaps(tiny_detector(3).backbone, photos, tiny_store(folder, photos, counts=counts))


def cache_files(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*.f16")}


def name_of(live: RoiMaps, folder: Path, view: View = VIEW) -> str:
    """Name of the file that a cache builds for a view; ``NOTHING_NEW`` if it reads an existing one."""
    before = cache_files(folder)
    cached = FeatureCache(live, folder)
    cached.get(0, view)
    cached.close()
    (name,) = cache_files(folder) - before or {NOTHING_NEW}
    return name


@pytest.mark.parametrize("view", [VIEW, View(48, flip=True), View(None), View(None, flip=True)])
def test_live_maps_are_trunk_and_pooling_of_the_rendered_view(tmp_path: Path, view: View) -> None:
    live = live_world(tmp_path)
    photo = live.photos[0]
    size = (photo.height, photo.width)
    image, boxes = (
        render_view(view, read_photo(photo.path).float(), size),
        boxes_in_view(view, live.store.boxes(photo.id), size),
    )
    expected = live.backbone.roi_maps(live.backbone.trunk(image[None]), Proposals(boxes, (4,)))
    maps = live.get(0, view)
    assert torch.equal(maps, expected.half().float())  # as they would be cached
    learning = tiny_detector(3, frozen=False).backbone
    assert torch.equal(replace(live, backbone=learning).get(0, view), expected)  # never cached: not rounded
    assert not maps.requires_grad


@pytest.mark.parametrize("view", [VIEW, View(32, flip=True, long_max=64), View(None)])
@pytest.mark.parametrize("network", ["tiny", "lite0"])
def test_cached_maps_equal_live_ones_in_bits_and_memory_layout(tmp_path: Path, view: View, network: str) -> None:
    live = live_world(tmp_path)
    if network == "lite0":
        live = replace(live, backbone=Lite0(pool_size=4).build(pretrained=False))
    cached = FeatureCache(live, tmp_path / "maps")
    for index in (2, 0, 1, 0):
        stored, fresh = cached.get(index, view), live.get(index, view)
        assert (stored.dtype, stored.stride()) == (torch.float32, fresh.stride())
        assert torch.equal(stored, fresh)
    cached.close()


@pytest.mark.parametrize("counts", [(0,), (0, 0), (1,), (0, 3)])
def test_photos_without_proposals_have_no_maps(tmp_path: Path, counts: tuple[int, ...]) -> None:
    live = live_world(tmp_path, counts)
    cached = FeatureCache(live, tmp_path / "maps")
    for index, count in enumerate(counts):
        assert cached.get(index, VIEW).shape == (count, TinyBackbone.channels, 3, 3)


def test_a_second_cache_reads_what_the_first_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live = live_world(tmp_path)
    expected = FeatureCache(live, tmp_path / "maps").get(0, VIEW)

    def refuse(self: RoiMaps, index: int, view: View) -> torch.Tensor:
        raise AssertionError("computed again")

    monkeypatch.setattr(RoiMaps, "get", refuse)
    assert torch.equal(FeatureCache(live, tmp_path / "maps").get(0, VIEW), expected)


@pytest.mark.parametrize("keep", [0, 7, -2])
def test_a_cut_file_is_made_again(tmp_path: Path, keep: int) -> None:
    live = live_world(tmp_path)
    expected = FeatureCache(live, tmp_path / "maps").get(2, VIEW)
    (path,) = (tmp_path / "maps").glob("*.f16")
    whole = path.read_bytes()
    path.write_bytes(whole[:keep])
    assert torch.equal(FeatureCache(live, tmp_path / "maps").get(2, VIEW), expected)
    assert path.read_bytes() == whole


def test_interrupted_work_leaves_what_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live = live_world(tmp_path)
    original = RoiMaps.get

    def broken(self: RoiMaps, index: int, view: View) -> torch.Tensor:
        if index == 2:
            raise KeyboardInterrupt
        return original(self, index, view)

    with monkeypatch.context() as patch:
        patch.setattr(RoiMaps, "get", broken)
        with pytest.raises(KeyboardInterrupt):
            FeatureCache(live, tmp_path / "maps").get(0, VIEW)
    (path,) = (tmp_path / "maps").glob("*.unfinished")
    assert sorted(tmp_path.glob("maps/*f16*")) == [path.with_suffix(".journal"), path]
    assert torch.equal(FeatureCache(live, tmp_path / "maps").get(0, VIEW), live.get(0, VIEW).half().float())


def test_unfinished_files_of_a_killed_process_are_deleted(tmp_path: Path) -> None:
    live = live_world(tmp_path)
    name = name_of(live, tmp_path / "maps")
    (tmp_path / "maps" / name).unlink()
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    mine = lock.temporary_path(tmp_path / "maps" / name)
    left = mine.with_name(mine.name.replace(f"-{os.getpid()}-", f"-{child}-"))
    mine.write_bytes(b"half")  # of this process, which lives
    left.write_bytes(b"half")
    assert name_of(live, tmp_path / "maps") == name
    assert {path.name for path in (tmp_path / "maps").iterdir()} - {"photos.digests"} == {name, mine.name}


def test_of_two_processes_one_builds_the_maps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "LOCK_POLL_SECONDS", 0.01)
    live, reported = live_world(tmp_path), []
    name = name_of(live, tmp_path / "maps")
    made = (tmp_path / "maps" / name).read_bytes()
    (tmp_path / "maps" / name).unlink()

    @contextmanager
    def progress(title: str, total: int, done: int = 0) -> Iterator[Bar]:
        reported.append(title)
        with silent(title, total, done) as bar:
            yield bar

    second = FeatureCache(live, tmp_path / "maps")
    with ThreadPoolExecutor(1) as pool:
        with locked(tmp_path / "maps" / f"{Path(name).stem}.lock", "makes maps"):
            waiting = pool.submit(second.build, [VIEW], progress)
            while not reported:
                assert not waiting.done()
                time.sleep(0.01)
            (tmp_path / "maps" / name).write_bytes(made)
        waiting.result()
    assert reported == ["RoI maps at 32: another process builds them; waiting"]
    assert torch.equal(second.get(0, VIEW), live.get(0, VIEW))


def test_unchanged_inputs_keep_the_file_name(tmp_path: Path) -> None:
    live = live_world(tmp_path)
    assert len(name_of(live, tmp_path / "maps")) == len("0" * 24 + ".f16")
    again = RoiMaps(tiny_detector(3).backbone, live.photos, tiny_store(tmp_path, live.photos, counts=(4, 0, 1)))
    assert name_of(again, tmp_path / "maps") == NOTHING_NEW


@pytest.mark.parametrize(
    "view",
    [
        View(40, flip=False, long_max=64),
        View(32, flip=True, long_max=64),
        View(32, flip=False, long_max=63),
        View(None),
    ],
)
def test_another_view_changes_the_file_name(tmp_path: Path, view: View) -> None:
    live = live_world(tmp_path)
    name_of(live, tmp_path / "maps")
    assert name_of(live, tmp_path / "maps", view)


def test_another_photo_changes_the_file_name(tmp_path: Path) -> None:
    live = live_world(tmp_path)
    name_of(live, tmp_path / "maps")
    photo = live.photos[1]
    Image.new("RGB", (photo.width, photo.height), "white").save(photo.path)
    assert name_of(live, tmp_path / "maps")
    os.utime(photo.path, ns=(1, 1))
    assert name_of(live, tmp_path / "maps") == NOTHING_NEW  # touched, not changed


def test_a_photo_replaced_by_one_of_equal_size_and_time_does_not_get_the_old_features(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("tag2box.storage._SETTLED", -(10**18))  # digests of new files are remembered, too
    live = live_world(tmp_path)
    photo = live.photos[0]
    for colour in ("black", "white"):  # BMP: the size of a file depends on that of the photo alone
        Image.new("RGB", (photo.width, photo.height), colour).save(tmp_path / f"{colour}.bmp")
    Path(tmp_path / "black.bmp").replace(photo.path)
    before = photo.path.stat()
    cached = FeatureCache(live, tmp_path / "maps")
    dark = cached.get(0, VIEW)
    cached.close()
    assert (tmp_path / "maps" / "photos.digests").exists()
    Path(tmp_path / "white.bmp").replace(photo.path)
    os.utime(photo.path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = photo.path.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    cached = FeatureCache(live, tmp_path / "maps")
    assert torch.equal(cached.get(0, VIEW), live.get(0, VIEW))
    assert not torch.equal(cached.get(0, VIEW), dark)
    cached.close()


def test_other_proposals_change_the_file_name(tmp_path: Path) -> None:
    live = live_world(tmp_path)
    name_of(live, tmp_path / "maps")
    moved = tiny_store(tmp_path, live.photos, counts=(4, 0, 1), seed=1)
    assert name_of(replace(live, store=moved), tmp_path / "maps")


def test_other_weights_or_pooling_change_the_file_name_but_a_trained_neck_does_not(tmp_path: Path) -> None:
    live = live_world(tmp_path)
    name_of(live, tmp_path / "maps")
    backbone = tiny_detector(3).backbone
    assert isinstance(backbone, TinyBackbone)
    backbone.fc.weight.data += 1
    assert name_of(replace(live, backbone=backbone), tmp_path / "maps") == NOTHING_NEW
    backbone.conv.weight.data[0] += 1e-3
    assert name_of(replace(live, backbone=backbone), tmp_path / "maps")
    other = OtherPooling()
    other.load_state_dict(live.backbone.state_dict())
    assert name_of(replace(live, backbone=other), tmp_path / "maps")


def test_the_poolings_of_lite0_have_keys_of_their_own() -> None:
    settings = (Lite0(pool_size=8), Lite0(pooling="max", pool_size=8), Lite0(pool_size=14))
    assert len({s.build(pretrained=False).roi_map_key() for s in settings}) == 3


def test_maps_of_a_trained_network_are_never_cached(tmp_path: Path) -> None:
    live = replace(live_world(tmp_path), backbone=tiny_detector(3, frozen=False).backbone)
    with pytest.raises(ValueError, match="frozen"):
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
    cached.build([View(32, flip=True)], progress)
    assert reported == ["RoI maps at 32 flipped of 3", "photo", "photo", "photo"]
    first = list(reported)
    cached.build([View(32, flip=True)], progress)
    cached.get(2, View(32, flip=True))
    assert reported == first


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files the Linux way")
def test_closing_gives_the_files_back_and_reading_opens_them_again(tmp_path: Path) -> None:
    def opened() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    cached = FeatureCache(live_world(tmp_path), tmp_path / "maps")
    at_first = opened()
    before = cached.get(0, VIEW)
    cached.get(0, View(None))
    assert opened() == at_first + 2
    cached.close()
    assert opened() == at_first
    assert torch.equal(cached.get(0, VIEW), before)
    cached.close()


@pytest.mark.parametrize(
    "runtime",
    [
        Runtime(),
        Runtime(precision="bf16"),
        Runtime(stored="bf16"),
        Runtime(stored="fp32"),
        Runtime(precision="bf16", stored="bf16"),
        pytest.param(Runtime(engine="openvino"), marks=needs_openvino),
    ],
)
def test_in_every_runtime_cached_maps_are_the_live_ones_in_a_file_of_their_own(
    tmp_path: Path, runtime: Runtime
) -> None:
    live = live_world(tmp_path)
    live = replace(live, backbone=Lite0(pool_size=4).build().requires_grad_(False))
    plain, cache = FeatureCache(live, tmp_path / "maps"), tmp_path / "maps"
    before = [plain.get(index, VIEW) for index in range(3)]
    files = set(cache.glob("*.*f*"))
    set_runtime(live.backbone, runtime)
    cached = FeatureCache(live, cache)
    found = [cached.get(index, VIEW) for index in range(3)]
    assert all(torch.equal(ours, live.get(index, VIEW)) for index, ours in enumerate(found))
    shapes = zip(found, before, strict=True)
    assert all(ours.dtype == torch.float32 and ours.shape == twin.shape for ours, twin in shapes)
    made = set(cache.glob("*.*f*")) - files
    assert len(made) == int(runtime != Runtime()) and all(verify_cache_file(path) for path in made)
    assert torch.equal(found[0], before[0]) == (runtime == Runtime())
    torch.testing.assert_close(found[0], before[0], rtol=0.1, atol=0.15 * float(before[0].abs().max()))
    sizes = {path.stat().st_size for path in made}
    assert all(size >= live.cache_bytes([VIEW]) for size in sizes)
    plain.close()
    cached.close()
