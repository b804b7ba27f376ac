"""Several views per photo: as sources make them, and through the network at once, photo by photo, over processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tag2box import settings
from tag2box.cli.training_data import check_attention
from tag2box.errors import UserError
from tag2box.images import Resize
from tag2box.methods.casd import Attention
from tag2box.methods.oicr import Oicr
from tag2box.methods.wscl import Contrast
from tag2box.models.augment import Augment
from tag2box.models.backbone import Backbone, BackboneSettings
from tag2box.models.detector import Detector, Heads
from tag2box.models.drop_block import DropBlock
from tag2box.models.rng import StepRng
from tag2box.recipes import Config
from tag2box.training.batches import BatchSampler, FeatureBatches, ImageBatches, Loader
from tag2box.training.criterion import Criterion
from tag2box.training.dist import DistContext
from tag2box.training.feature_cache import RoiMaps, TrunkMaps
from tag2box.training.grad_cache import preview
from tag2box.training.step import Step
from tag2box.types import Batch, BatchMeta, Proposals
from tiny import TinyBackbone, tiny_detector, tiny_photos, tiny_store
from together import together

RNG = StepRng(5, 2)
RESIZE = Resize(scales=(40, 48), flip=0.5)
CASD = Criterion(
    labeler=Oicr(),
    contrast=Contrast(enabled=False),
    attention=Attention(input_weight=1.0, layer_weight=1.0, ramp=0),
)


class TwoLayers(TinyBackbone):
    """The tiny network with a second trained layer: a 1 x 1 convolution by one channel."""

    layers = 2

    def responses(self, maps: Tensor, stem: Tensor) -> Tensor:
        second = torch.relu(maps * self.fc.weight[0, : self.channels].view(1, -1, 1, 1)).mean(dim=1)
        return torch.stack([maps.mean(dim=1), second], dim=1)


def sources(folder: Path, loader: Loader, dist: DistContext) -> dict[str, BatchSampler]:
    photos = tiny_photos(folder, 5)
    store = tiny_store(folder, photos.photos, counts=[6, 0, 6, 1, 6])
    backbone: Backbone = tiny_detector(3).backbone
    live, trunks = RoiMaps(backbone, photos.photos, store), TrunkMaps(backbone, photos.photos)
    return {
        "photos": ImageBatches(photos, store, loader, 0, dist=dist),
        "maps": FeatureBatches(photos, store, loader, 0, live, dist=dist),
        "trunks": FeatureBatches(photos, store, loader, 0, trunks, dist=dist),
    }


@pytest.mark.parametrize("kind", ["photos", "maps", "trunks"])
@pytest.mark.parametrize("views_per_image", [1, 2, 4])
def test_views_of_a_photo_differ_and_have_the_same_proposals(tmp_path: Path, kind: str, views_per_image: int) -> None:
    loader = Loader(batch_size=3, views_per_image=views_per_image, resize=RESIZE, max_proposals=4, workers=0)
    source = sources(tmp_path, loader, DistContext())[kind]
    for iteration in range(4):
        batch, turns = source.batch(iteration), source.sampled(iteration)  # type: ignore[attr-defined]
        assert len(turns) == len(batch.ids) == 3 * views_per_image and batch.views_per_image == views_per_image
        assert (batch.flipped is None) == (views_per_image == 1)
        for first in range(0, len(turns), views_per_image):
            group = turns[first : first + views_per_image]
            assert len({turn.view for turn in group}) == views_per_image
            assert len({turn.draw for turn in group}) == len({turn.index for turn in group}) == 1
            assert len(set(batch.proposals.sizes[first : first + views_per_image])) == 1
            check_same_boxes(batch, first, views_per_image)
        if batch.flipped is not None:
            assert batch.flipped.tolist() == [turn.view.flip for turn in turns]
        assert source.preview_batch(2).views_per_image == 1  # type: ignore[attr-defined]


def check_same_boxes(batch: Batch, first: int, views_per_image: int) -> None:
    """Every view has the same boxes: equal aspect ratios."""
    spans = batch.proposals.spans()
    shapes = []
    for i in range(first, first + views_per_image):
        sides = batch.proposals.boxes[spans[i].start : spans[i].stop]
        shapes.append((sides[:, 3] - sides[:, 1]) / (sides[:, 2] - sides[:, 0]))
    for shape in shapes[1:]:
        torch.testing.assert_close(shape, shapes[0], rtol=0.05, atol=0)


def test_four_views_are_two_scales_with_their_flips() -> None:
    loader = Loader(views_per_image=4, resize=Resize(scales=(40, 48, 56), flip=0.3))
    drawn = [loader.views((0, epoch, 3)) for epoch in range(30)]
    for views in drawn:
        assert len({view.short for view in views}) == 2
        assert [(a.short, a.flip) for a in views[::2]] == [(b.short, not b.flip) for b in views[1::2]]
    assert {view.short for views in drawn for view in views[2:]} == {40, 48, 56}
    scales = Loader(views_per_image=2, resize=Resize(scales=(40, 48), flip=0.0)).views((0, 0, 0))
    assert {view.short for view in scales} == {40, 48} and not any(view.flip for view in scales)


def test_one_view_is_the_first_of_several(tmp_path: Path) -> None:
    one, four = (
        sources(tmp_path, Loader(batch_size=2, views_per_image=n, resize=RESIZE), DistContext())["photos"]
        for n in (1, 4)
    )
    for iteration in range(3):
        assert four.sampled(iteration)[::4] == one.sampled(iteration)
        assert [turn.view for turn in one.sampled(iteration)] == [RESIZE.view(*t.draw) for t in one.sampled(iteration)]


@pytest.mark.parametrize("kind", ["photos", "maps", "trunks"])
def test_processes_share_photos_not_views(tmp_path: Path, kind: str) -> None:
    loader = Loader(batch_size=3, views_per_image=2, resize=RESIZE, workers=0)
    whole = sources(tmp_path, loader, DistContext())[kind].batch(1)  # type: ignore[attr-defined]
    parts = [sources(tmp_path, loader, DistContext(rank, 4))[kind].batch(1) for rank in range(4)]  # type: ignore[attr-defined]
    assert [len(part.ids) % 2 for part in parts] == [0] * 4
    joined, meta = BatchMeta.joined([part.meta() for part in parts]), whole.meta()
    assert (joined.views_per_image, joined.proposals.sizes) == (2, meta.proposals.sizes)
    assert joined.flipped is not None and meta.flipped is not None
    assert torch.equal(joined.flipped, meta.flipped)
    assert joined.view_groups() == meta.view_groups()


@pytest.mark.parametrize(
    ("overrides", "word"),
    [
        (["loader.views_per_image=2"], "1 view"),
        (["loader.views_per_image=3", "loader.resize.flip=0.5"], "2 view"),
        (["loader.views_per_image=0"], "views_per_image"),
    ],
)
def test_more_views_per_image_than_views_are_refused_in_a_line(overrides: list[str], word: str) -> None:
    one_view = ["loader.resize.scales=[480]", "loader.resize.flip=0"]
    with pytest.raises(UserError, match="views_per_image") as error:
        settings.load(Config, [], [*one_view, *overrides])
    assert word in str(error.value) and "\n" not in str(error.value)


# ---------------------------------------------------------------- through the network


def make_step(**how: object) -> Step:
    torch.manual_seed(1)
    detector = Detector(TwoLayers(frozen=False, dropout=0.3), 3, Heads(embed_dim=6)).double()
    with torch.no_grad():
        for p in detector.parameters():
            p.copy_(torch.randn(p.shape) * 0.4)
        detector.backbone.conv.bias += 2  # type: ignore[operator]  # no channel is dead
    return Step(detector, CASD, DropBlock(block=2), Augment(), **how)  # type: ignore[arg-type]


def views_of(sizes: tuple[int, ...], views_per_image: int) -> Batch:
    """Photos, each twice or more: at random pixels, so that views disagree."""
    g = torch.Generator().manual_seed(2)
    boxes = []
    for size in sizes:
        corner = torch.rand(size, 2, generator=g) * 20
        boxes += [
            torch.cat([corner, corner + 8 + torch.rand(size, 2, generator=g) * 12], dim=1).double()
        ] * views_per_image
    count = len(sizes) * views_per_image
    tags = torch.eye(3, dtype=torch.bool)[torch.arange(count) // views_per_image % 3]
    every = tuple(size for size in sizes for _ in range(views_per_image))
    return Batch(
        tuple(f"{i // views_per_image}" for i in range(count)),
        tags,
        Proposals(torch.cat(boxes), every),
        images=torch.rand(count, 3, 40, 44, generator=g, dtype=torch.float64) * 255,
        views_per_image=views_per_image,
        flipped=torch.arange(count) % 2 == 1,
    )


def gradients(step: Step) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in step.detector.named_parameters() if p.grad is not None}


def by_finite_differences(loss: Callable[[], float], weights: Tensor, index: int) -> float:
    flat, small = weights.data.view(-1), 1e-6
    flat[index] += small
    up = loss()
    flat[index] -= 2 * small
    down = loss()
    flat[index] += small
    return (up - down) / (2 * small)


@pytest.mark.parametrize(("sizes", "views_per_image"), [((0,), 2), ((1,), 1), ((5, 0, 7), 2)])
def test_photo_by_photo_and_at_once_are_the_same(sizes: tuple[int, ...], views_per_image: int) -> None:
    plain, exact = make_step(), make_step(memory="exact")
    first, second = (step(views_of(sizes, views_per_image), RNG) for step in (plain, exact))
    assert "attention" in first.losses and "attention" in second.losses
    assert first.total.item() == pytest.approx(second.total.item(), rel=1e-12)
    assert first.losses["attention"].item() == pytest.approx(second.losses["attention"].item(), rel=1e-12)
    mine, wanted = gradients(exact), gradients(plain)
    assert mine.keys() == wanted.keys()
    for name, grad in wanted.items():
        torch.testing.assert_close(mine[name], grad, rtol=1e-9, atol=1e-12, msg=name)


def test_the_gradient_is_that_of_the_loss_and_the_term_reaches_the_layers() -> None:
    """The term has no gradient in the heads."""
    step = make_step()
    batch = views_of((5, 7), 2)
    term = step(batch, RNG).losses["attention"]
    assert term is not None and term > 0
    with_term = gradients(step)
    plain = replace(step, criterion=replace(CASD, attention=Attention()))
    plain(batch, RNG)
    assert not torch.equal(with_term["backbone.conv.weight"], gradients(plain)["backbone.conv.weight"])
    assert torch.equal(with_term["refine.0.cls.weight"], gradients(plain)["refine.0.cls.weight"])
    weights = plain.detector.refine[0].cls.weight  # type: ignore[union-attr]
    wanted = gradients(plain)["refine.0.cls.weight"].flatten()[3].item()

    def loss() -> float:
        return preview(plain, batch, RNG).total.item()

    assert by_finite_differences(loss, weights, 3) == pytest.approx(wanted, rel=1e-4, abs=1e-8)  # type: ignore[arg-type]


@pytest.mark.parametrize("memory", ["plain", "exact"])
def test_processes_together_leave_the_gradients_of_one(memory: str) -> None:
    """Three processes and four views of two photos: views of a photo may even be on different ranks."""
    batch, alone = views_of((5, 7), 2), make_step()
    alone(batch, RNG)
    wanted = gradients(alone)

    def work(dist: DistContext) -> dict[str, Tensor]:
        step = make_step(memory=memory, dist=dist)
        mine, spans = dist.shard(len(batch.ids)), batch.proposals.spans()
        photos, rows = slice(mine.start, mine.stop), slice(spans[mine.start].start, spans[mine.stop - 1].stop)
        assert batch.images is not None and batch.flipped is not None
        own = Batch(
            batch.ids[photos],
            batch.tags[photos],
            Proposals(batch.proposals.boxes[rows], batch.proposals.sizes[photos]),
            images=batch.images[photos],
            views_per_image=2,
            flipped=batch.flipped[photos],
        )
        step(own, RNG)
        return gradients(step)

    for grads in together(3, work):
        for name, grad in wanted.items():
            torch.testing.assert_close(grads[name], grad, rtol=1e-9, atol=1e-12, msg=name)


# ---------------------------------------------------------------- impossible settings


FROZEN_VGG16 = ["backbone.kind=vgg16", "backbone.train_trunk=false"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["criterion.attention.input_weight=0.1"], ("loader.views_per_image", "is 1", "set loader.views_per_image=2")),
        (["criterion.attention.layer_weight=0.1", "backbone.kind=vgg16"], ("layer_weight", "vgg16", "or this to 0")),
        (["heads.early_layers=1", "backbone.pooled=true"], ("backbone.pooled", "one cell", "false")),
        (
            ["criterion.attention.layer_weight=0.1", "backbone.kind=resnet_ws"],
            ("layer_weight", "resnet_ws", "heads.early_layers=2"),
        ),
        (
            ["criterion.attention.layer_weight=0.1", "heads.early_layers=2", *FROZEN_VGG16],
            ("criterion.attention", "vgg16", "frozen", "backbone.neck_channels=128"),
        ),
        (
            ["criterion.attention.layer_weight=0.1", "backbone.train_neck=false"],
            ("criterion.attention", "lite0", "frozen", "backbone.train_neck=true"),
        ),
    ],
)
def test_nothing_to_compare_is_reported_before_training(overrides: list[str], words: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as error:
        check_attention(settings.load(Config, [], overrides))
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)


def test_more_early_layers_than_a_backbone_has_are_refused() -> None:
    with pytest.raises(UserError, match=r"heads.early_layers: is 1, .* has 0 early layers; set it to 0"):
        check_attention(replace(Config(), backbone=BackboneSettings(), heads=Heads(early_layers=1)))


def test_what_can_be_compared_is_accepted() -> None:
    layers, views_per_image = (
        ["criterion.attention.layer_weight=0.1"],
        ["criterion.attention.input_weight=1", "loader.views_per_image=2"],
    )
    early, narrow = "heads.early_layers=2", [*FROZEN_VGG16, "backbone.neck_channels=128"]
    for overrides in ([], layers, views_per_image, [*layers, early, "backbone.kind=vgg16"], [*layers, *narrow]):
        check_attention(settings.load(Config, [], overrides))
