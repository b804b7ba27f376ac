"""Responses of early layers on every backbone: those of the layers themselves, pooled proposal by proposal."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tag2box.models.backbone import Backbone, LayeredBackbone, innermost
from tag2box.models.context import ContextBackbone
from tag2box.models.detector import Detector, Heads
from tag2box.models.lite0 import Lite0
from tag2box.models.resnet_ws import ResNetWs, ResNetWsBackbone
from tag2box.models.vgg16 import Vgg16, Vgg16Backbone
from tag2box.ops.roi import roi_align
from tag2box.types import Proposals

BOXES = torch.tensor([[4.0, 6.0, 60.0, 50.0], [0.0, 0.0, 96.0, 64.0], [30.0, 2.0, 95.0, 40.0]])
PROPOSALS = Proposals(BOXES, (2, 1), ((96, 64), (96, 64)))
IMAGES = torch.rand(2, 3, 64, 96, generator=torch.Generator().manual_seed(0)) * 255


def vgg16() -> Vgg16Backbone:
    return Vgg16Backbone(Vgg16(), vector_size=8)


def narrow() -> Vgg16Backbone:
    """Frozen convolutions, and a trained 1 x 1 convolution."""
    return Vgg16Backbone(Vgg16(train_trunk=False, neck_channels=3), vector_size=8)


def resnet() -> ResNetWsBackbone:
    return ResNetWsBackbone(ResNetWs(), width=4, neck=(6, 8))


def lite0() -> Backbone:
    return Lite0(pool_size=6, train_tail=True, train_blocks=1).build(pretrained=False)


BACKBONES = {"vgg16": vgg16, "vgg16-narrow": narrow, "resnet": resnet, "lite0": lite0}


def made(name: str) -> Backbone:
    torch.manual_seed(0)
    return BACKBONES[name]()


def layers_with_loops(backbone: Backbone) -> Tensor:
    """Channel means of the two early layers, each channel pooled on its own, then averaged."""
    ids, side, scale = PROPOSALS.image_ids(), backbone.map_size, 1 / backbone.stride

    def pooled(maps: Tensor) -> Tensor:
        channels = [roi_align(maps[:, c : c + 1], BOXES, ids, size=side, scale=scale) for c in range(maps.shape[1])]
        return sum(channels[1:], channels[0])[:, 0] / len(channels)

    x = backbone.preprocess(IMAGES)
    if isinstance(backbone, Vgg16Backbone):
        early = [backbone.features[: end + 1](x) for end in (16, 23)]
        return torch.stack([pooled(maps) for maps in early], dim=1)
    if isinstance(backbone, ResNetWsBackbone):
        halve = torch.nn.MaxPool2d(2, ceil_mode=True)
        third = backbone.res3(halve(backbone.res2(halve(backbone.stem(x)))))
        return torch.stack([pooled(third), pooled(backbone.res4(third))], dim=1)
    trunk = backbone.trunk(IMAGES)
    rois = roi_align(trunk, BOXES, ids, size=6, scale=scale)
    fourteen = backbone.get_submodule("tail")[:-1](rois)  # type: ignore[index]
    return torch.stack([pooled(trunk), fourteen.mean(dim=1)], dim=1)


@pytest.mark.parametrize("name", BACKBONES)
def test_responses_begin_with_those_of_the_early_layers(name: str) -> None:
    backbone = made(name)
    outer = LayeredBackbone(backbone, 2)
    with torch.no_grad():
        maps, plain = (
            outer.roi_maps(outer.trunk(IMAGES), PROPOSALS),
            backbone.roi_maps(backbone.trunk(IMAGES), PROPOSALS),
        )
        torch.testing.assert_close(maps[:, : backbone.channels], plain)
        stem = outer.neck_stem(maps)
        responses = outer.responses(maps, stem)
        torch.testing.assert_close(responses[:, :2], layers_with_loops(backbone), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(responses[:, 2:], backbone.responses(plain, backbone.neck_stem(plain)))
        assert responses.shape[1] == outer.layers and maps.shape[1] == outer.channels
        torch.testing.assert_close(outer.neck(maps), backbone.neck(plain))
        nearest = LayeredBackbone(backbone, 1)
        near = nearest.roi_maps(nearest.trunk(IMAGES), PROPOSALS)
        assert torch.equal(nearest.responses(near, stem)[:, 0], responses[:, 1])


@pytest.mark.parametrize("name", BACKBONES)
def test_a_term_over_layers_trains_what_is_trainable(name: str) -> None:
    """The property of CASD on a backbone: pulling early layers towards the late ones reaches trained convolutions."""
    outer = LayeredBackbone(made(name), 2)
    maps = outer.roi_maps(outer.trunk(IMAGES), PROPOSALS)
    outer.responses(maps, outer.neck_stem(maps)).square().sum().backward()
    reached = {key for key, p in outer.named_parameters() if p.grad is not None and bool(p.grad.any())}
    trained = {key for key, p in outer.named_parameters() if p.requires_grad}
    wanted = {
        "vgg16": "inner.features.17.weight",
        "vgg16-narrow": "inner.reduce.weight",
        "resnet": "inner.res3.0.conv2.weight",
        "lite0": "inner.tail.4.expand.weight",
    }
    assert wanted[name] in reached <= trained
    assert not any(key.startswith(("inner.stem", "inner.body", "inner.tail.3", "inner.features.0")) for key in reached)


@pytest.mark.parametrize("name", BACKBONES)
def test_no_proposals_are_survived(name: str) -> None:
    outer = LayeredBackbone(made(name), 2)
    none = Proposals(torch.zeros(0, 4), (0, 0), PROPOSALS.frames)
    maps = outer.roi_maps(outer.trunk(IMAGES), none)
    assert maps.shape == (0, outer.channels, outer.map_size, outer.map_size)
    assert outer.responses(maps, outer.neck_stem(maps)).shape[:2] == (0, outer.layers)


def test_context_and_layers_work_together() -> None:
    backbone = made("vgg16")
    detector = Detector(backbone, 3, Heads(early_layers=2)).eval()
    assert isinstance(detector.backbone, LayeredBackbone) and innermost(detector.backbone) is backbone
    both = ContextBackbone(LayeredBackbone(backbone, 2), 1.8)
    assert innermost(both) is backbone
    with torch.no_grad():
        maps = both.roi_maps(both.trunk(IMAGES), PROPOSALS)
        own = both.inner.roi_maps(both.trunk(IMAGES), PROPOSALS)
        expected = both.inner.responses(own, both.inner.neck_stem(own))
        torch.testing.assert_close(both.responses(maps, both.neck_stem(maps)), expected)


def test_cache_keys_name_the_layers() -> None:
    backbone = made("vgg16")
    keys = {LayeredBackbone(backbone, count).roi_map_key() for count in (1, 2)}
    assert len({*keys, backbone.roi_map_key()}) == 3
    assert LayeredBackbone(backbone, 1).trunk_key() != backbone.trunk_key()
    assert LayeredBackbone(made("lite0"), 1).trunk_modules() != ()


@pytest.mark.parametrize("count", [1, 2, 5])
def test_so_many_of_the_last_blocks_of_lite0_are_trained(count: int) -> None:
    tail = Lite0(train_tail=True, train_blocks=count).build(pretrained=False).tail
    trained = [any(p.requires_grad for p in block.parameters()) for block in tail]
    assert trained == [False] * (5 - count) + [True] * count
    assert not any(p.requires_grad for p in Lite0(train_blocks=count).build(pretrained=False).tail.parameters())
