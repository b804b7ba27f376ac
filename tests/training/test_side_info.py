"""Side info in batches: of the photos and proposals that were drawn, alike for every source, only where needed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tag2box.images import Resize
from tag2box.training.batches import FeatureBatches, ImageBatches, Loader
from tag2box.training.dist import DistContext
from tag2box.training.feature_cache import RoiMaps, TrunkMaps
from tag2box.types import NO_SIDE_INFO, TAGS_ONLY, BatchMeta, SideInfo, SideInfoLoader
from tiny import tiny_detector, tiny_photos, tiny_store

LOADER = Loader(batch_size=3, resize=Resize(scales=(32, 40)), max_proposals=4, workers=0)
COUNTS = (6, 0, 9, 1, 6)
KINDS = ("pixels", "maps", "trunks")


def source_of(kind: str, folder: Path, loader: Loader = LOADER) -> ImageBatches | FeatureBatches:
    photos = tiny_photos(folder, len(COUNTS))
    store = tiny_store(folder, photos.photos, counts=COUNTS)
    numbers = torch.arange(photos.tags.numel()).reshape(photos.tags.shape)

    def left_edges(photo_id: str) -> Tensor:
        """A value that identifies its proposal."""
        return store.boxes(photo_id)[:, 0] / 100

    def of_classes(photo_id: str) -> Tensor:
        return left_edges(photo_id)[:, None] * torch.tensor([1.0, 2.0, 3.0])

    side_info = SideInfoLoader(
        counts=numbers,
        evidence=left_edges,
        objectness=lambda name: left_edges(name) / 2,
        class_evidence=of_classes,
        reviewed=lambda name: torch.full((len(store.boxes(name)),), TAGS_ONLY),
        superpixels=lambda name: torch.arange(6).view(2, 3) + 10 * int(name.removeprefix("photo")),
        segments=lambda name: torch.full((1, 2), int(name.removeprefix("photo"))),
    )
    backbone = tiny_detector(3).backbone
    if kind == "pixels":
        return ImageBatches(photos, store, loader, 0, side_info=side_info)
    if kind == "maps":
        return FeatureBatches(photos, store, loader, 0, RoiMaps(backbone, photos.photos, store), side_info=side_info)
    return FeatureBatches(photos, store, loader, 0, TrunkMaps(backbone, photos.photos), side_info=side_info)


def assert_same(one: SideInfo, other: SideInfo) -> None:
    for name in SideInfo.__slots__:
        a, b = getattr(one, name), getattr(other, name)
        for x, y in zip(a, b, strict=True) if isinstance(a, tuple) else [(a, b)]:
            assert torch.equal(x, y)


@pytest.mark.parametrize("kind", KINDS)
def test_label_maps_are_those_of_the_photos_and_flipped_with_them(tmp_path: Path, kind: str) -> None:
    source, flips = source_of(kind, tmp_path), set()
    for iteration in range(4):
        batch = source.batch(iteration)
        assert batch.side_info.superpixels is not None and batch.side_info.segments is not None
        views = [one.view.flip for one in source.shard(iteration)]
        for name, flip, labels in zip(batch.ids, views, batch.side_info.superpixels, strict=True):
            upright = torch.arange(6).view(2, 3) + 10 * int(name.removeprefix("photo"))
            assert torch.equal(labels, upright.flip(1) if flip else upright)
            flips.add(flip)
        (one,) = batch.photo(1).side_info.superpixels or ()
        assert torch.equal(one, batch.side_info.superpixels[1])
    assert flips == {False, True}


@pytest.mark.parametrize("kind", KINDS)
def test_side_info_is_that_of_the_photos_and_proposals_drawn(tmp_path: Path, kind: str) -> None:
    source = source_of(kind, tmp_path)
    for iteration in range(4):
        batch, side_info = source.batch(iteration), source.batch(iteration).side_info
        assert side_info.counts is not None and side_info.evidence is not None and side_info.objectness is not None
        rows = [int(name.removeprefix("photo")) for name in batch.ids]
        assert side_info.counts.tolist() == [[3 * row, 3 * row + 1, 3 * row + 2] for row in rows]
        assert side_info.evidence.shape == side_info.objectness.shape == (len(batch.proposals.boxes),)
        assert torch.equal(side_info.objectness, side_info.evidence / 2)
        assert side_info.class_evidence is not None
        assert torch.equal(side_info.class_evidence, side_info.evidence[:, None] * torch.tensor([1.0, 2.0, 3.0]))


@pytest.mark.parametrize("kind", KINDS)
def test_evidence_stays_with_its_proposal(tmp_path: Path, kind: str) -> None:
    loader = replace(LOADER, resize=Resize(scales=(40,), flip=0.0))
    source = source_of(kind, tmp_path, loader)
    for iteration in range(4):
        batch = source.batch(iteration)
        assert batch.side_info.evidence is not None
        parts = batch.proposals.split(torch.stack([batch.proposals.boxes[:, 0], batch.side_info.evidence], dim=1))
        for name, part in zip(batch.ids, parts, strict=True):
            photo = next(photo for photo in source.photos.photos if photo.id == name)
            factor = round(photo.width * 40 / photo.height) / photo.width  # all are wide
            assert torch.allclose(part[:, 0], part[:, 1] * 100 * factor, atol=1e-3)


def test_all_sources_give_the_same(tmp_path: Path) -> None:
    seen = [source_of(kind, tmp_path) for kind in KINDS]
    for iteration in range(3):
        first, *others = (source.batch(iteration).side_info for source in seen)
        for other in others:
            assert_same(first, other)


@pytest.mark.parametrize("kind", KINDS)
def test_preview_photos_have_side_info(tmp_path: Path, kind: str) -> None:
    preview_batch = source_of(kind, tmp_path).preview_batch(2)  # photos 0 and 2, with all proposals
    assert preview_batch.side_info.counts is not None and preview_batch.side_info.counts.tolist() == [
        [0, 1, 2],
        [6, 7, 8],
    ]
    assert preview_batch.side_info.evidence is not None and len(preview_batch.side_info.evidence) == 15


@pytest.mark.parametrize("kind", KINDS)
def test_side_info_that_is_not_required_is_absent(tmp_path: Path, kind: str) -> None:
    source = replace(source_of(kind, tmp_path), side_info=NO_SIDE_INFO)
    assert source.batch(0).side_info == SideInfo() and source.preview_batch(2).side_info == SideInfo()


@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_shards_of_processes_join_to_the_whole(tmp_path: Path, kind: str, size: int) -> None:
    """Also if there are more processes than photos, so that some have none."""
    source = source_of(kind, tmp_path)
    whole = source.batch(1).meta()
    shares = [replace(source, dist=DistContext(rank, size)).batch(1).meta() for rank in range(size)]
    joined = BatchMeta.joined(shares)
    assert joined.proposals.frames == whole.proposals.frames
    assert_same(joined.side_info, whole.side_info)


def test_worker_processes_return_side_info(tmp_path: Path) -> None:
    source = source_of("pixels", tmp_path, replace(LOADER, workers=1))
    with source.batches(range(2)) as batches:
        for iteration, batch in enumerate(batches):
            assert_same(batch.side_info, source.batch(iteration).side_info)
