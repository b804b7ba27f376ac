from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fake_weights import random_weights, shrink
from tag2box.models.augment import Augment
from tag2box.models.detector import Detector, Heads
from tag2box.models.drop_block import DropBlock
from tag2box.models.resnet_ws import ResNetWs, ResNetWsBackbone, fixed_norms
from tag2box.models.rng import StepRng, Stream
from tag2box.models.weights.state_dict import WS_BLOCKS, load_into, shapes_of
from tag2box.ops.roi import roi_pool
from tag2box.training import checkpoint
from tag2box.training.criterion import Criterion
from tag2box.training.optim import Sgd
from tag2box.training.step import Step
from tag2box.types import Batch, Proposals

WIDTH, NECK = 2, (3, 4)  # what fake_weights.shrink makes of the networks
CHANNELS = 32 * WIDTH
NO_BOXES = Proposals(torch.zeros(0, 4), (0, 0))


def small(depth: int = 50, **settings: object) -> ResNetWsBackbone:
    """The real blocks with few channels."""
    return ResNetWsBackbone(ResNetWs(depth=depth, **settings), width=WIDTH, neck=NECK)  # type: ignore[arg-type]


# ---------------------------------------------------------------- the network


def conv_twin(x: Tensor, w: dict[str, Tensor], name: str, *, stride: int = 1, dilation: int = 1) -> Tensor:
    """A convolution, then batch norm as torch itself evaluates it."""
    weight = w[f"{name}.weight"]
    pad = dilation * (weight.shape[2] // 2)
    y = F.conv2d(x, weight, stride=stride, padding=pad, dilation=dilation)
    kinds = ("running_mean", "running_var", "weight", "bias")
    return F.batch_norm(y, *(w[f"{name}.norm.{kind}"] for kind in kinds), training=False, eps=1e-5)


def trunk_twin(images: Tensor, w: dict[str, Tensor], blocks: tuple[int, ...]) -> Tensor:
    mean, std = (
        torch.tensor(v, dtype=images.dtype).view(3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    )
    x = (images / 255 - mean) / std
    x = F.relu(conv_twin(x, w, "stem.conv1", stride=2))
    x = F.relu(conv_twin(x, w, "stem.conv2"))
    x = F.relu(conv_twin(x, w, "stem.conv3"))
    x = F.max_pool2d(x, 2, ceil_mode=True)
    for stage, count in zip((2, 3, 4, 5), blocks, strict=True):
        gap = 2 if stage >= 4 else 1
        for block in range(count):
            at = f"res{stage}.{block}"
            y = F.relu(conv_twin(x, w, f"{at}.conv1"))
            y = F.relu(conv_twin(y, w, f"{at}.conv2", dilation=gap))
            y = conv_twin(y, w, f"{at}.conv3")
            x = F.relu(y + (conv_twin(x, w, f"{at}.shortcut") if block == 0 else x))
        x = F.max_pool2d(x, 2, ceil_mode=True) if stage == 2 else x
    return x


def mild(architecture: str) -> dict[str, Tensor]:
    """Random weights with statistics, in double precision, under which 33 blocks do not explode."""
    g = torch.Generator().manual_seed(3)
    raw = {k: v.double() for k, v in random_weights(architecture, statistics=True).items()}
    return {k: 0.5 * torch.randn(v.shape, generator=g, dtype=v.dtype) if v.dim() == 4 else v for k, v in raw.items()}


@pytest.mark.parametrize("depth", [50, 101])
def test_trunk_and_its_gradients_are_those_of_the_definition(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch)
    architecture = f"r{depth}-ws"
    weights = mild(architecture)
    backbone = small(depth).double()
    given = {**backbone.state_dict(), **{k: v.double() for k, v in fixed_norms(weights).items()}}
    for name in [k for k in given if k.endswith((".scale", ".shift"))]:  # fixed_norms rounds to single precision
        conv, _, kind = name.rpartition(".")
        scale = weights[f"{conv}.norm.weight"] / (weights[f"{conv}.norm.running_var"] + 1e-5).sqrt()
        shift = weights[f"{conv}.norm.bias"] - weights[f"{conv}.norm.running_mean"] * scale
        torch.testing.assert_close(given[name], scale if kind == "scale" else shift, rtol=1e-6, atol=1e-6)
        given[name] = scale if kind == "scale" else shift
    load_into(backbone, given, "a test")
    learnt = {k: v.requires_grad_(k.startswith(("res3", "res4", "res5")) and v.dim() == 4) for k, v in weights.items()}

    images = torch.rand(1, 3, 37, 50, dtype=torch.float64) * 255
    ours, twin = backbone.trunk(images), trunk_twin(images, learnt, WS_BLOCKS[architecture])
    assert ours.shape == (1, CHANNELS, 5, 7)
    torch.testing.assert_close(ours, twin)
    ours.square().mean().backward()
    twin.square().mean().backward()
    grads = dict(backbone.named_parameters())
    for name, value in learnt.items():
        if value.grad is not None:
            torch.testing.assert_close(grads[name].grad, value.grad)


@pytest.mark.parametrize("size", [(1, 1), (1, 40), (7, 9), (8, 8), (17, 33), (64, 63)])
def test_every_size_gives_a_map_that_covers_the_photo(size: tuple[int, int]) -> None:
    maps = small().trunk(torch.zeros(2, 3, *size))
    assert maps.shape == (2, CHANNELS, -(-size[0] // 8), -(-size[1] // 8))


def test_only_the_first_convolution_has_a_stride_and_only_late_stages_are_dilated() -> None:
    convs = {name: m for name, m in small(101).named_modules() if isinstance(m, nn.Conv2d)}
    assert [name for name, conv in convs.items() if conv.stride != (1, 1)] == ["stem.conv1"]
    dilated = {name for name, conv in convs.items() if conv.dilation != (1, 1)}
    assert dilated == {f"res4.{i}.conv2" for i in range(23)} | {f"res5.{i}.conv2" for i in range(3)}


@pytest.mark.parametrize("depth", [50, 101])
def test_full_size_is_the_papers_and_fits_the_weight_files(depth: int) -> None:
    with torch.device("meta"):
        backbone = ResNetWs(depth=depth).build(pretrained=False)  # type: ignore[arg-type]
    assert backbone.fc6.weight.shape == (2048, 100352) and backbone.fc7.weight.shape == (4096, 2048)
    assert (backbone.channels, backbone.map_size, backbone.vector_size, backbone.stride) == (2048, 7, 4096, 8)
    assert backbone.dropout == 0.5
    wanted = {k: v for k, v in shapes_of(f"r{depth}-ws", ["fc6.weight"]).items() if ".norm." not in k}
    assert {name: tuple(p.shape) for name, p in backbone.named_parameters()} == wanted


def test_maps_are_pooled_at_stride_eight_and_the_neck_is_two_layers() -> None:
    backbone = small(dropout=0.0)
    features = torch.randn(2, CHANNELS, 9, 8)
    proposals = Proposals(torch.tensor([[0, 0, 64, 72], [10, 20, 50, 60.0]]), (1, 1))
    maps = backbone.roi_maps(features, proposals)
    assert torch.equal(maps, roi_pool(features, proposals.boxes, torch.tensor([0, 1]), size=7, scale=1 / 8))
    twin = F.relu(backbone.fc7(F.relu(backbone.fc6(maps.reshape(2, -1)))))
    torch.testing.assert_close(backbone.neck(maps), twin)


def test_a_batch_without_proposals_passes_through() -> None:
    backbone = small()
    maps = backbone.roi_maps(backbone.trunk(torch.zeros(2, 3, 16, 16)), NO_BOXES)
    row_rng = StepRng(0, 0).row_rng(Stream.NECK, NO_BOXES.image_ids())
    assert maps.shape == (0, CHANNELS, 7, 7)
    assert backbone.neck(maps).shape == backbone.neck(maps, row_rng).shape == (0, NECK[1])


def test_dropout_draws_from_the_row_rng_alone() -> None:
    backbone = ResNetWsBackbone(ResNetWs(dropout=0.5), width=WIDTH, neck=(200, 300)).train()
    nn.init.constant_(backbone.fc7.bias, 1.0)
    maps, images = torch.rand(3, CHANNELS, 7, 7), torch.tensor([0, 0, 1])
    clean = backbone.neck(maps)
    one, two = (backbone.neck(maps, StepRng(0, 5).row_rng(Stream.NECK, images)) for _ in range(2))
    assert torch.equal(clean, backbone.neck(maps)) and torch.equal(one, two)
    assert 0.4 < (one == 0).float().mean() < 0.6 and (clean > 0).all()
    assert not torch.equal(one, backbone.neck(maps, StepRng(0, 6).row_rng(Stream.NECK, images)))


# ---------------------------------------------------------------- what learns


def test_stem_res2_and_every_norm_never_learn() -> None:
    backbone = small()
    frozen = {name for name, p in backbone.named_parameters() if not p.requires_grad}
    assert frozen == {n for n, _ in backbone.named_parameters() if n.startswith(("stem.", "res2."))}
    norms = {name for name, _ in backbone.named_buffers()} - {"pixels"}
    assert len(norms) == 2 * sum(isinstance(m, nn.Conv2d) for m in backbone.modules())
    assert not any(isinstance(m, nn.BatchNorm2d) for m in backbone.modules())
    assert not backbone.frozen_roi_maps and not backbone.frozen_trunk


def test_training_mode_changes_nothing_and_leaves_nothing_behind() -> None:
    backbone = small()
    before = {name: value.clone() for name, value in backbone.state_dict().items()}
    images = torch.rand(2, 3, 40, 24) * 255
    trained = backbone.train().trunk(images)
    assert torch.equal(trained, backbone.eval().trunk(images))
    assert all(torch.equal(value, before[name]) for name, value in backbone.state_dict().items())


def batch(count: int = 2) -> Batch:
    g = torch.Generator().manual_seed(1)
    corner = torch.rand(6 * count, 2, generator=g) * 20
    boxes = torch.cat([corner, corner + 12 + torch.rand(6 * count, 2, generator=g) * 12], dim=1)
    tags = torch.eye(3, dtype=torch.bool)[torch.arange(count) % 3]
    images = torch.rand(count, 3, 48, 44, generator=g, dtype=torch.float64) * 255
    return Batch(tuple(map(str, range(count))), tags, Proposals(boxes.double(), (6,) * count), images=images)


def stepped(memory: str) -> Detector:
    torch.manual_seed(0)
    backbone = ResNetWsBackbone(ResNetWs(dropout=0.2), width=8, neck=(16, 16))
    detector = Detector(backbone, 3, Heads(embed_dim=6)).double().train()
    for module in detector.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.2)
    Step(detector, Criterion(), DropBlock(), Augment(), memory)(batch(), StepRng(0, 0))  # type: ignore[arg-type]
    return detector


def test_a_step_reaches_all_that_learns_and_is_the_same_photo_by_photo() -> None:
    plain, exact = (dict(stepped(memory).named_parameters()) for memory in ("plain", "exact"))
    for name, p in plain.items():
        assert (p.grad is not None and bool(p.grad.any())) == p.requires_grad, name
        if p.grad is not None:
            torch.testing.assert_close(exact[name].grad, p.grad)


def test_a_checkpoint_brings_everything_back(tmp_path: Path) -> None:
    detector, other = stepped("exact"), stepped("plain")
    optimizer = Sgd().build(detector)
    optimizer.step()
    detector.backbone.res3[0].conv1.scale.fill_(3.0)  # type: ignore[index, union-attr]
    checkpoint.save(tmp_path, detector, optimizer, iteration=1, classes=("a", "b", "c"), seconds=0.0)
    checkpoint.load_model(tmp_path, checkpoint.read_state(tmp_path), other)
    theirs = other.state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in detector.state_dict().items())


# ---------------------------------------------------------------- fresh weights


def fresh_scales(depth: int) -> Iterator[float]:
    for seed in range(2):
        torch.manual_seed(seed)
        backbone = ResNetWsBackbone(ResNetWs(depth=depth), width=8, neck=NECK)  # type: ignore[arg-type]
        yield backbone.trunk(torch.rand(1, 3, 64, 64) * 255).std().item()


@pytest.mark.parametrize("depth", [50, 101])
def test_fresh_weights_neither_fade_nor_explode(depth: int) -> None:
    assert all(0.1 < scale < 100 for scale in fresh_scales(depth))
