from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from tag2box.annotations import Photo, TaggedPhotos
from tag2box.images import Resize, view_size
from tag2box.training.batches import (
    BatchSource,
    FeatureBatches,
    ImageBatches,
    Loader,
    evenly_spaced_indices,
    preview_view,
)
from tag2box.training.feature_cache import RoiMaps
from tag2box.types import Batch
from tiny import TinyBackbone, tiny_detector, tiny_photos, tiny_store

RESIZE = Resize(scales=(32, 40, 24), long_max=60)
COUNTS = (6, 0, 9, 1, 6)
PAD = (127.5, 102.0, 76.5)


def sources(folder: Path, loader: Loader | None = None, seed: int = 0) -> tuple[ImageBatches, FeatureBatches]:
    photos = tiny_photos(folder, len(COUNTS))
    store = tiny_store(folder, photos.photos, counts=COUNTS)
    wanted = loader or Loader(batch_size=3, resize=RESIZE)
    live = RoiMaps(tiny_detector(3).backbone, photos.photos, store)
    return ImageBatches(photos, store, wanted, seed, PAD), FeatureBatches(photos, store, wanted, seed, live)


def pixels_of(batch: Batch) -> Tensor:
    pixels = batch.images if batch.images is not None else batch.maps
    assert pixels is not None
    return pixels


def same(a: Batch, b: Batch) -> bool:
    return (
        a.ids == b.ids
        and a.proposals.sizes == b.proposals.sizes
        and torch.equal(a.tags, b.tags)
        and torch.equal(a.proposals.boxes, b.proposals.boxes)
        and torch.equal(pixels_of(a), pixels_of(b))
        and (a.unsure is None) == (b.unsure is None)
        and (a.unsure is None or b.unsure is None or torch.equal(a.unsure, b.unsure))
    )


@pytest.mark.parametrize("kind", [0, 1])
def test_a_batch_is_a_function_of_its_iteration(tmp_path: Path, kind: int) -> None:
    source = sources(tmp_path)[kind]
    batches = [source.batch(i) for i in range(4)]
    other = sources(tmp_path)[kind]  # a resumed run
    torch.manual_seed(99)
    for iteration in (3, 0, 2, 1):
        assert same(other.batch(iteration), batches[iteration])
    assert not same(batches[0], batches[1])


@pytest.mark.parametrize("most", [None, 1, 4])
@pytest.mark.parametrize("batch", [1, 3, 7])
def test_photos_and_maps_give_the_same_proposals_and_tags(tmp_path: Path, batch: int, most: int | None) -> None:
    pixels, maps = sources(tmp_path, Loader(batch_size=batch, resize=RESIZE, max_proposals=most))
    for iteration in range(5):
        a, b = pixels.batch(iteration), maps.batch(iteration)
        assert a.ids == b.ids
        assert len(a.ids) == batch
        assert a.proposals.sizes == b.proposals.sizes
        assert torch.allclose(a.proposals.boxes, b.proposals.boxes, atol=1e-4)
        assert torch.equal(a.tags, b.tags)
        assert a.maps is None
        assert b.images is None


def test_maps_are_those_of_the_photos_a_batch_of_one_shows(tmp_path: Path) -> None:
    pixels, maps = sources(tmp_path, Loader(batch_size=1, resize=RESIZE, max_proposals=4))
    detector = tiny_detector(3)
    for iteration in range(5):
        with torch.no_grad():
            seen = detector.roi_maps(pixels.batch(iteration))
        kept = maps.batch(iteration).maps
        assert kept is not None
        assert torch.equal(seen.half().float(), kept)


def test_an_epoch_has_every_photo_once(tmp_path: Path) -> None:
    _, source = sources(tmp_path, Loader(batch_size=1, resize=RESIZE))
    ids = [source.batch(i).ids[0] for i in range(5)]
    assert sorted(ids) == [f"photo{i}" for i in range(5)]


def test_seeds_give_different_batches(tmp_path: Path) -> None:
    ids = {tuple(sources(tmp_path, Loader(batch_size=5, resize=RESIZE), seed)[1].batch(0).ids) for seed in range(4)}
    assert len(ids) > 1


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("most", [1, 4, 9])
def test_at_most_max_proposals_are_drawn(tmp_path: Path, kind: int, most: int) -> None:
    loader = Loader(batch_size=5, resize=Resize(scales=(40,), flip=0.0), max_proposals=most)
    source = sources(tmp_path, loader)[kind]
    batch = source.batch(0)
    for photo, size, boxes in zip(
        batch.ids, batch.proposals.sizes, batch.proposals.split(batch.proposals.boxes), strict=True
    ):
        count = COUNTS[int(photo.removeprefix("photo"))]
        assert size == min(count, most)
        assert len(boxes.unique(dim=0)) == size  # drawn without replacement


@pytest.mark.parametrize("kind", [0, 1])
def test_proposals_are_drawn_again_each_epoch(tmp_path: Path, kind: int) -> None:
    loader = Loader(batch_size=5, resize=Resize(scales=(40,), flip=0.0), max_proposals=3)
    source = sources(tmp_path, loader)[kind]
    drawn = []
    for epoch in range(4):
        batch = source.batch(epoch)
        boxes = batch.proposals.split(batch.proposals.boxes)[batch.ids.index("photo2")]
        drawn.append(tuple(boxes.flatten().tolist()))
    assert len(set(drawn)) > 1


@pytest.mark.parametrize("kind", [0, 1])
def test_preview_photos_are_upright_with_all_proposals_and_fixed(tmp_path: Path, kind: int) -> None:
    loader = Loader(batch_size=2, resize=Resize(scales=(40, 24, 32), flip=1.0), max_proposals=2)
    source: BatchSource = sources(tmp_path, loader)[kind]
    preview_batch = source.preview_batch(2)
    assert preview_batch.ids == ("photo0", "photo2")
    assert preview_batch.proposals.sizes == (6, 9)  # all of them
    assert same(preview_batch, source.preview_batch(2))
    own = source.photo_boxes("photo0")  # 48 x 40, shown with a short side of 32
    assert torch.allclose(preview_batch.proposals.boxes[:6], own * torch.tensor([38 / 48, 32 / 40] * 2), atol=1e-4)


@pytest.mark.parametrize("kind", [0, 1])
def test_names_and_boxes_of_the_photos_come_through(tmp_path: Path, kind: int) -> None:
    source = sources(tmp_path)[kind]
    assert source.classes == ("disc", "box", "bar")
    assert torch.equal(source.photo_boxes("photo2"), source.store.boxes("photo2"))
    assert source.photo_boxes("photo1").shape == (0, 4)


def test_photos_without_proposals_alone_make_a_batch(tmp_path: Path) -> None:
    photos = tiny_photos(tmp_path, 2)
    store = tiny_store(tmp_path, photos.photos, counts=(0, 0))
    live = RoiMaps(tiny_detector(3).backbone, photos.photos, store)
    batch = FeatureBatches(photos, store, Loader(batch_size=2, resize=RESIZE), 0, live).batch(0)
    assert batch.proposals.sizes == (0, 0)
    assert batch.maps is not None
    assert batch.maps.shape == (0, TinyBackbone.channels, 3, 3)


@pytest.mark.parametrize("kind", [0, 1])
def test_unsure_tags_come_with_their_photos(tmp_path: Path, kind: int) -> None:
    source = sources(tmp_path)[kind]
    assert source.batch(0).unsure is None and source.preview_batch(2).unsure is None
    unsure = ~source.photos.tags
    doubtful = replace(source, photos=replace(source.photos, unsure=unsure))
    for batch in (doubtful.batch(0), doubtful.batch(1), doubtful.preview_batch(3)):
        assert batch.unsure is not None and torch.equal(batch.unsure, ~batch.tags)


def test_padding_is_the_neutral_colour_of_the_network(tmp_path: Path) -> None:
    source = replace(sources(tmp_path)[0], pad=TinyBackbone.preprocess.neutral())
    pixels = TinyBackbone.preprocess(pixels_of(source.preview_batch(5)))
    sizes = [view_size(preview_view(RESIZE), (photo.height, photo.width)) for photo in source.photos.photos]
    assert len(set(sizes)) > 1
    for image, (height, width) in zip(pixels, sizes, strict=True):
        assert image[:, :height, :width].abs().mean() > 0.1
        assert torch.cat([image[:, height:].flatten(), image[:, :, width:].flatten()]).abs().sum() < 1e-4


def crowd(count: int, loader: Loader) -> ImageBatches:
    """Photos without files, every third one tall: enough to sample batches."""
    photos = tuple(Photo(str(i), Path(f"{i}.jpg"), 40, 60 if i % 3 == 0 else 30) for i in range(count))
    return ImageBatches(TaggedPhotos(("a",), photos, torch.ones(count, 1, dtype=torch.bool)), Nothing(), loader, 0)


class Nothing:
    """No proposals for any photo."""

    def boxes(self, photo_id: str) -> Tensor:
        return torch.zeros(0, 4)

    def scores(self, photo_id: str) -> Tensor:
        return torch.zeros(0)


def test_grouping_by_aspect_changes_the_batches_and_nothing_else() -> None:
    plain, grouped = (crowd(48, Loader(batch_size=4, resize=RESIZE, group_aspect=on)) for on in (False, True))
    turns = [[turn for i in range(24) for turn in source.sampled(i)] for source in (plain, grouped)]
    assert set(turns[0]) == set(turns[1]) and turns[0] != turns[1]  # the same photos in the same views
    mixed = [
        sum(len({t.index % 3 == 0 for t in source.sampled(i)}) == 2 for i in range(24)) for source in (plain, grouped)
    ]
    assert mixed[0] > 12 and mixed[1] == 0  # 16 tall and 32 wide photos fill their batches
    assert grouped.sampled(7) == crowd(48, grouped.loader).sampled(7)  # a resumed run


def test_the_largest_batch_is_never_underestimated(tmp_path: Path) -> None:
    source = sources(tmp_path, Loader(batch_size=4, resize=RESIZE))[0]
    assert max(pixels_of(source.batch(i)).nbytes for i in range(20)) <= source.max_bytes()
    one = replace(source, loader=Loader(batch_size=5, resize=Resize(scales=(40,), flip=0.0)))
    assert pixels_of(one.batch(0)).nbytes == one.max_bytes()


@pytest.mark.parametrize(("scales", "middle"), [((32,), 32), ((40, 24, 32), 32), ((24, 40), 40)])
def test_the_preview_view_is_the_middle_scale(scales: tuple[int, ...], middle: int) -> None:
    view = preview_view(Resize(scales=scales, flip=1.0, long_max=77))
    assert (view.short, view.flip, view.long_max) == (middle, False, 77)


def numbered(count: int) -> TaggedPhotos:
    """Photos without files."""
    photos = tuple(Photo(str(i), Path(f"{i}.jpg"), 1, 1) for i in range(count))
    return TaggedPhotos(("a",), photos, torch.ones(count, 1, dtype=torch.bool))


@given(st.integers(1, 60), st.integers(0, 80))
def test_evenly_spaced_indices_are_distinct_at_even_distances(total: int, count: int) -> None:
    rows = evenly_spaced_indices(total, count)
    assert len(rows) == min(total, count)
    assert len(set(rows)) == len(rows)
    gaps = [b - a for a, b in pairwise(rows)]
    assert rows == sorted(rows)
    assert not gaps or max(gaps) - min(gaps) <= 1
    assert all(0 <= row < total for row in rows)
