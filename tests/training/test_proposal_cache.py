"""Evidence kept on disk: right, in the order of the proposals, made once, made again if anything changed."""

from __future__ import annotations

import os
import pickle
from collections.abc import Generator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from PIL import Image

from tag2box import storage
from tag2box.errors import UserError
from tag2box.images import read_photo
from tag2box.ops.superpixels import Superpixels, straddling
from tag2box.training import proposal_cache as module
from tag2box.training.proposal_cache import (
    LabelMapCache,
    ProposalCache,
    build_label_maps,
    build_superpixel_cache,
    build_superpixel_maps,
    label_runs,
)
from tiny import tiny_photos, tiny_store
from tiny_world import one_worker

CUT = Superpixels(min_size=20)


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    one_worker(monkeypatch)


@pytest.mark.parametrize("counts", [(), (0,), (1,), (6, 0, 9, 1)])
def test_values_are_those_of_each_photo_in_the_order_of_its_proposals(tmp_path: Path, counts: tuple[int, ...]) -> None:
    photos = tiny_photos(tmp_path, len(counts)).photos
    store = tiny_store(tmp_path, photos, counts=counts)
    made = build_superpixel_cache(photos, store, CUT, tmp_path / "maps")
    for photo in photos:
        boxes = store.boxes(photo.id).numpy()
        assert made(photo.id).tolist() == straddling(CUT(read_photo(photo.path)), boxes).tolist()
        assert made(photo.id).shape == (len(boxes),) and made(photo.id).dtype == torch.float32


def test_boxes_are_compared_with_the_reduced_copy(tmp_path: Path) -> None:
    photos = tiny_photos(tmp_path, 1).photos  # 48 x 40
    store = tiny_store(tmp_path, photos)
    small = replace(CUT, short_side=32)
    labels = small(read_photo(photos[0].path))
    wanted = straddling(labels, store.boxes("photo0").numpy() * np.array([38 / 48, 32 / 40] * 2, np.float32))
    assert labels.shape == (32, 38)
    assert build_superpixel_cache(photos, store, small, tmp_path / "maps")("photo0").tolist() == wanted.tolist()


def test_it_is_built_once_and_again_if_anything_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    photos, maps = tiny_photos(tmp_path, 2).photos, tmp_path / "maps"
    store = tiny_store(tmp_path, photos)
    seen: list[str] = []
    weigh = module._score

    def counted(superpixels: Superpixels, order: module._Job) -> module._Scores:
        seen.append(order.photo.id)
        return weigh(superpixels, order)

    monkeypatch.setattr(module, "_score", counted)
    build_superpixel_cache(photos, store, CUT, maps)
    build_superpixel_cache(photos, store, CUT, maps)
    assert seen == ["photo0", "photo1"] and len(list(maps.glob("*.npy"))) == 1
    build_superpixel_cache(photos, store, replace(CUT, scale=99.0), maps)
    build_superpixel_cache(photos, tiny_store(tmp_path / "other", photos, seed=1), CUT, maps)
    os.utime(photos[0].path, ns=(1, 1))
    build_superpixel_cache(photos, store, CUT, maps)
    assert len(seen) == 6  # a photo that was only touched is the same
    Image.new("RGB", (photos[0].width, photos[0].height), "white").save(photos[0].path)
    build_superpixel_cache(photos, store, CUT, maps)
    assert len(seen) == 8 and len(list(maps.glob("*.npy"))) == len(list(maps.glob("*.json"))) == 4
    for path in maps.glob("*.npy"):
        path.write_bytes(path.read_bytes()[:-4])
    assert build_superpixel_cache(photos, store, CUT, maps)("photo1").tolist() and len(seen) == 10
    for path in maps.glob("*.json"):
        path.unlink()
    assert build_superpixel_cache(photos, store, CUT, maps)("photo1").tolist() and len(seen) == 12


def test_one_flipped_bit_is_refused_by_name(tmp_path: Path) -> None:
    """At the first, the last and every few bytes between, of the values and of their digests."""
    photos = tiny_photos(tmp_path, 2).photos
    store = tiny_store(tmp_path, photos)
    build_superpixel_cache(photos, store, CUT, tmp_path / "maps")
    for path in (*(tmp_path / "maps").glob("*.npy"), *(tmp_path / "maps").glob("*.json")):
        whole = path.read_bytes()
        for number, position in enumerate([*range(0, len(whole), 5), len(whole) - 2]):
            damaged = bytearray(whole)
            damaged[position] ^= 1 << number % 8
            path.write_bytes(damaged)
            with pytest.raises(UserError, match=rf"{path}: ") as caught:
                opened = build_superpixel_cache(photos, store, CUT, tmp_path / "maps")
                for photo in photos:
                    opened(photo.id)
            assert "\n" not in str(caught.value)
        path.write_bytes(whole)
    assert build_superpixel_cache(photos, store, CUT, tmp_path / "maps")("photo1").shape == (6,)


@pytest.mark.parametrize("digests", [None, {}, {"bytes": 176, "block": 9, "blocks": []}])
def test_digests_that_are_none_are_reported(tmp_path: Path, digests: object) -> None:
    photos = tiny_photos(tmp_path, 1).photos
    store = tiny_store(tmp_path, photos)
    build_superpixel_cache(photos, store, CUT, tmp_path / "maps")
    (path,) = (tmp_path / "maps").glob("*.json")
    storage.write_checked_json(path, {"format": 1, "digests": digests})
    with pytest.raises(UserError, match=rf"{path}: no digests of numbers per proposal .+; remove the file"):
        build_superpixel_cache(photos, store, CUT, tmp_path / "maps")


def test_a_photo_that_cannot_be_read_leaves_nothing_behind(tmp_path: Path) -> None:
    photos = tiny_photos(tmp_path, 2).photos
    store = tiny_store(tmp_path, photos)
    photos[1].path.write_text("no photo")
    with pytest.raises(UserError, match=r"photo1.jpg: not readable as a photo") as error:
        build_superpixel_cache(photos, store, CUT, tmp_path / "maps")
    assert "\n" not in str(error.value) and list((tmp_path / "maps").glob("*.npy")) == []
    photos[1].path.unlink()
    with pytest.raises(UserError, match=r"photo1.jpg: no such photo"):
        build_superpixel_cache(photos, store, CUT, tmp_path / "maps")


def test_jobs_and_caches_can_be_pickled(tmp_path: Path) -> None:
    photos = tiny_photos(tmp_path, 1).photos
    store = tiny_store(tmp_path, photos)
    made = build_superpixel_cache(photos, store, CUT, tmp_path / "maps")
    order = module._Job(photos[0], store.boxes("photo0").numpy())
    again, work, crossed = pickle.loads(pickle.dumps((made, partial(module._score, CUT), order)))  # noqa: S301 - ours
    assert isinstance(again, ProposalCache) and again("photo0").tolist() == made("photo0").tolist()
    assert pickle.loads(pickle.dumps(work(crossed))).values.tolist() == made("photo0").tolist()  # noqa: S301


def test_a_photo_that_ends_its_process_is_named(tmp_path: Path) -> None:
    photos = tiny_photos(tmp_path, 1).photos
    lost = module._lost(module._Job(photos[0], np.zeros((0, 4), np.float32)), 11)
    assert lost.values is None and "photo0.jpg" in lost.problem and "signal 11" in lost.problem


# ---------------------------------------------------------------- label maps


@pytest.mark.parametrize("count", [0, 1, 3])
def test_superpixels_are_those_of_each_photo(tmp_path: Path, count: int) -> None:
    photos = tiny_photos(tmp_path, count).photos
    made = build_superpixel_maps(photos, CUT, tmp_path / "maps")
    again = pickle.loads(pickle.dumps(made))  # noqa: S301 - ours
    assert isinstance(again, LabelMapCache)
    for photo in photos:
        wanted = CUT(read_photo(photo.path)).tolist()
        assert made(photo.id).tolist() == wanted and again(photo.id).tolist() == wanted


def test_label_maps_are_built_once_and_again_if_settings_or_photos_changed(tmp_path: Path) -> None:
    photos, maps = tiny_photos(tmp_path, 2).photos, tmp_path / "maps"
    for settings, some, files in ((CUT, photos, 1), (CUT, photos, 1), (CUT, photos[:1], 2), (Superpixels(), photos, 3)):
        build_superpixel_maps(some, settings, maps)
        assert len(list(maps.glob("*.npy"))) == files


@given(st.integers(0, 5), st.integers(0, 5), st.data())
def test_runs_restore_the_map(height: int, width: int, data: st.DataObject) -> None:
    cells = data.draw(st.lists(st.integers(0, 2), min_size=height * width, max_size=height * width))
    labels = np.array(cells, np.int32).reshape(height, width)
    runs = label_runs(labels)
    lengths, values = runs.astype(int).T
    assert np.repeat(values, lengths).tolist() == cells
    assert (lengths > 0).all() and (values[1:] != values[:-1]).all()


def test_one_flipped_bit_of_label_maps_is_refused_by_name(tmp_path: Path) -> None:
    photos = tiny_photos(tmp_path, 2).photos
    build_superpixel_maps(photos, CUT, tmp_path / "maps")
    for path in (*(tmp_path / "maps").glob("*.npy"), *(tmp_path / "maps").glob("*.json")):
        whole = path.read_bytes()
        for number, position in enumerate([*range(0, len(whole), 97), len(whole) - 2]):
            damaged = bytearray(whole)
            damaged[position] ^= 1 << number % 8
            path.write_bytes(damaged)
            with pytest.raises(UserError, match=rf"{path}: ") as caught:
                opened = build_superpixel_maps(photos, CUT, tmp_path / "maps")
                for photo in photos:
                    opened(photo.id)
            assert "\n" not in str(caught.value)
        path.write_bytes(whole)


def test_maps_that_were_not_finished_leave_nothing_behind(tmp_path: Path) -> None:
    def results() -> Generator[tuple[str, np.ndarray], None, None]:
        yield "a", np.zeros((2, 3), np.int32)
        raise UserError("b.jpg: gone")

    with pytest.raises(UserError, match=r"b\.jpg"):
        build_label_maps(tmp_path / "x.npy", 2, results, title="maps")
    assert not list(tmp_path.glob("*.npy")) and not list(tmp_path.glob("*.json"))
