"""Batches of trunk maps: the same photos, boxes and tags as of pixels, and the same training, cached or live."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tag2box.cli.train import train
from tag2box.images import Resize, view_size
from tag2box.models.detector import Detector
from tag2box.recipes import Config
from tag2box.training.batches import FeatureBatches, ImageBatches, Loader, preview_view
from tag2box.training.dist import DistContext
from tag2box.training.feature_cache import FeatureCache, TrunkMaps
from tag2box.types import Batch, Proposals
from tiny import TinyBackbone, tiny_detector, tiny_photos, tiny_store
from tiny_world import one_worker, same, small_config, small_data, story, weights

RESIZE = Resize(scales=(32, 40, 24), long_max=60)
COUNTS = (6, 0, 9, 1, 6)


class TailBackbone(TinyBackbone):
    """A frozen trunk, and a trained convolution after pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.tail = nn.Conv2d(self.channels, self.channels, 1)

    def roi_maps(self, features: Tensor, proposals: Proposals) -> Tensor:
        return torch.relu(self.tail(super().roi_maps(features, proposals)))

    def trunk_modules(self) -> tuple[nn.Module, ...]:
        return (self.conv,)

    def roi_map_modules(self) -> tuple[nn.Module, ...]:
        return (self.conv, self.tail)


def source_of(folder: Path, loader: Loader | None = None, seed: int = 0) -> FeatureBatches:
    photos = tiny_photos(folder, len(COUNTS))
    store = tiny_store(folder, photos.photos, counts=COUNTS)
    live = TrunkMaps(tiny_detector(3).backbone, photos.photos)
    return FeatureBatches(photos, store, loader or Loader(batch_size=3, resize=RESIZE), seed, live)


def parts(batch: Batch) -> list[object]:
    """All of a batch, to compare."""
    assert batch.trunks is not None and batch.images is None and batch.maps is None
    unsure = None if batch.unsure is None else batch.unsure.tolist()
    trunks = [trunk.tolist() for trunk in batch.trunks]
    return [batch.ids, batch.tags.tolist(), batch.proposals.sizes, batch.proposals.boxes.tolist(), trunks, unsure]


@pytest.mark.parametrize("most", [None, 1, 4])
@pytest.mark.parametrize("batch", [1, 3, 7])
def test_photos_boxes_and_tags_are_those_of_the_other_sources(tmp_path: Path, batch: int, most: int | None) -> None:
    source = source_of(tmp_path, Loader(batch_size=batch, resize=RESIZE, max_proposals=most))
    pixels = ImageBatches(source.photos, source.store, source.loader, 0)
    for iteration in range(5):
        a, b = source.batch(iteration), pixels.batch(iteration)
        assert (a.ids, a.proposals.sizes) == (b.ids, b.proposals.sizes)
        assert torch.equal(a.proposals.boxes, b.proposals.boxes) and torch.equal(a.tags, b.tags)


def test_each_photo_brings_its_own_map(tmp_path: Path) -> None:
    source = source_of(tmp_path, Loader(batch_size=5, resize=RESIZE))
    batch, numbers = source.batch(0), [turn.index for turn in source.sampled(0)]
    assert batch.trunks is not None
    for trunk, turn in zip(batch.trunks, source.sampled(0), strict=True):
        assert torch.equal(trunk, source.features.get(turn.index, turn.view))
    assert sorted(numbers) == [0, 1, 2, 3, 4] and len({trunk.shape for trunk in batch.trunks}) > 1


def test_a_batch_is_a_function_of_its_iteration(tmp_path: Path) -> None:
    batches = [parts(source_of(tmp_path).batch(i)) for i in range(4)]
    other = source_of(tmp_path)  # a resumed run
    torch.manual_seed(99)
    for iteration in (3, 0, 2, 1):
        assert parts(other.batch(iteration)) == batches[iteration]
    assert batches[0] != batches[1]


@pytest.mark.parametrize("workers", [None, 0, 2])
@pytest.mark.parametrize("iterations", [range(0), range(1), range(2, 6)])
def test_batches_made_ahead_are_the_same(tmp_path: Path, workers: int | None, iterations: range) -> None:
    source = source_of(tmp_path, Loader(batch_size=3, resize=RESIZE, workers=workers))
    with source.batches(iterations) as batches:
        assert [parts(b) for b in batches] == [parts(source.batch(i)) for i in iterations]


def test_preview_photos_are_upright_with_all_proposals(tmp_path: Path) -> None:
    source = source_of(tmp_path, Loader(batch_size=2, resize=Resize(scales=(40, 24, 32), flip=1.0), max_proposals=2))
    preview_batch = source.preview_batch(2)
    assert preview_batch.ids == ("photo0", "photo2") and preview_batch.proposals.sizes == (6, 9)
    assert parts(preview_batch) == parts(source.preview_batch(2)) and preview_batch.trunks is not None
    height, width = view_size(preview_view(source.loader.resize), (40, 48))
    assert preview_batch.trunks[0].shape[1:] == (-(-height // 4), -(-width // 4))


def test_unsure_tags_come_with_their_photos(tmp_path: Path) -> None:
    source = source_of(tmp_path)
    doubtful = replace(source, photos=replace(source.photos, unsure=~source.photos.tags))
    for batch in (doubtful.batch(0), doubtful.batch(1), doubtful.preview_batch(3)):
        assert batch.unsure is not None and torch.equal(batch.unsure, ~batch.tags)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_processes_share_a_batch_and_some_may_have_nothing(tmp_path: Path, size: int) -> None:
    source = source_of(tmp_path)
    shares = [replace(source, dist=DistContext(rank, size)).batch(1) for rank in range(size)]
    assert tuple(name for share in shares for name in share.ids) == source.batch(1).ids
    assert all(share.trunks is not None and len(share.trunks) == len(share.ids) for share in shares)


# ---------------------------------------------------------------- training


def tail_detector(config: Config, num_classes: int, *, pretrained: bool) -> Detector:
    torch.manual_seed(config.plan.seed)
    return Detector(TailBackbone(), num_classes, config.heads)


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tag2box.runs.build_detector", tail_detector)
    one_worker(monkeypatch)
    small_data(tmp_path)
    return tmp_path


def test_cached_trunk_maps_train_as_live_ones_to_the_bit(small: Path) -> None:
    shared = (f"data.proposals={small / 'proposals'}", "loader.resize.scales=[48, 40]")
    cached, live = small / "cached", small / "live"
    train(small_config(small, *shared), cached)
    train(small_config(small, *shared, "feature_cache_gb=0"), live)
    assert len(list((cached / "maps").glob("*.f16"))) == 4  # two scales, flipped or not
    assert not (live / "maps").exists()
    assert same(weights(cached), weights(live))
    assert story(cached) == story(live)
    fresh = tail_detector(small_config(small), 3, pretrained=False).state_dict()
    assert torch.equal(weights(cached)["backbone.conv.weight"], fresh["backbone.conv.weight"])
    assert not torch.equal(weights(cached)["backbone.tail.weight"], fresh["backbone.tail.weight"])


def test_the_batch_source_follows_from_frozen_layers_and_the_cache_budget(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[tuple[str, ...]] = []

    def note(step: object, source: object, *rest: object, **more: object) -> None:
        kind = type(source.features) if isinstance(source, FeatureBatches) else None
        used.append((type(source).__name__, kind.__name__ if kind else ""))

    monkeypatch.setattr("tag2box.training.loop.fit", note)
    shared = (f"data.proposals={small / 'proposals'}",)
    for name, frozen in (("frozen", True), ("learns", False)):
        monkeypatch.setattr(
            "tag2box.runs.build_detector", lambda config, n, *, pretrained, f=frozen: tiny_detector(n, f)
        )
        train(small_config(small, *shared), small / name)
        train(small_config(small, *shared, "feature_cache_gb=0"), small / f"{name}-0")
    monkeypatch.setattr("tag2box.runs.build_detector", tail_detector)
    train(small_config(small, *shared), small / "tail")
    roomless = "feature_cache_gb=1e-7"  # a hundred bytes
    train(small_config(small, *shared, roomless), small / "tail-0")
    assert used == [
        (FeatureBatches.__name__, FeatureCache.__name__),
        (FeatureBatches.__name__, TrunkMaps.__name__),
        (ImageBatches.__name__, ""),
        (ImageBatches.__name__, ""),
        (FeatureBatches.__name__, FeatureCache.__name__),
        (FeatureBatches.__name__, TrunkMaps.__name__),
    ]
