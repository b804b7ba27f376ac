"""WSRPN's proposals: responses of the real lite0, boxes around shapes, the empty cases, the commands."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tag2box.errors import UserError
from tag2box.models.backbone import Backbone
from tag2box.models.resnet_ws import ResNetWs, ResNetWsBackbone
from tag2box.models.vgg16 import Vgg16, Vgg16Backbone
from tag2box.proposals.base import default_method, method_from_source
from tag2box.proposals.early_responses import Wsrpn, _network, channel_means

SMALL = Wsrpn(short_side=96, min_side=12, max_boxes=60)


def card(width: int = 128, height: int = 96) -> torch.Tensor:
    """A red square on grey, with noise."""
    image = torch.full((3, height, width), 120.0)
    image[:, 24:72, 40:96] = torch.tensor([210.0, 40.0, 30.0])[:, None, None]
    return (image + torch.randn(image.shape) * 3).clamp(0, 255).to(torch.uint8)


def network_of(name: str) -> Backbone:
    """The real lite0, the others with random weights."""
    torch.manual_seed(0)
    if name == "lite0":
        return _network("lite0", None)
    if name == "vgg16":
        return Vgg16Backbone(Vgg16(), vector_size=8).eval()
    return ResNetWsBackbone(ResNetWs(), width=4, neck=(6, 8)).eval()


@pytest.mark.parametrize("name", ["lite0", "vgg16", "resnet"])
@pytest.mark.parametrize("size", [(1, 1), (9, 8), (33, 50), (64, 40)])
def test_responses_cover_the_picture_at_three_resolutions(size: tuple[int, int], name: str) -> None:
    width, height = size
    means = channel_means(network_of(name), np.zeros((height, width, 3), np.uint8))
    assert [mean.shape for mean in means] == [(-(-height // cell), -(-width // cell)) for cell in (2, 4, 8)]
    assert all(mean.min() >= 0 and mean.dtype == np.float32 for mean in means)


def test_responses_are_the_channel_means_of_the_filters_written_with_loops() -> None:
    network, bgr = network_of("lite0"), card(64, 48).permute(1, 2, 0).numpy()[..., ::-1].copy()
    rgb = torch.from_numpy(bgr[..., ::-1].copy()).permute(2, 0, 1)[None].float()
    with torch.no_grad():
        x = network.stem(network.preprocess(rgb))
        for index, mean in zip(range(5), (0, None, 1, None, 2), strict=True):
            block = network.body[index]
            if mean is not None:
                filters = block.depthwise(block.expand(x))[0]
                wanted = sum(channel for channel in filters) / len(filters)
                assert np.allclose(channel_means(network, bgr)[mean], wanted.numpy(), atol=1e-5)
            x = block(x)


@pytest.mark.parametrize("name", ["vgg16", "resnet"])
def test_responses_of_other_backbones_are_those_of_their_layers(name: str) -> None:
    network, bgr = network_of(name), card(64, 48).permute(1, 2, 0).numpy()[..., ::-1].copy()
    with torch.no_grad():
        x = network.preprocess(torch.from_numpy(bgr[..., ::-1].copy()).permute(2, 0, 1)[None].float())
        if isinstance(network, Vgg16Backbone):
            layers = [network.features[:end](x) for end in (9, 16, 23)]  # after the last ReLU of conv2, conv3, conv4
        else:
            assert isinstance(network, ResNetWsBackbone)
            halve = torch.nn.MaxPool2d(2, ceil_mode=True)
            stem = network.stem(x)
            second = network.res2(halve(stem))
            layers = [stem, second, network.res3(halve(second))]
        for mean, maps in zip(channel_means(network, bgr), layers, strict=True):
            channels = list(maps[0])
            assert np.allclose(mean, (sum(channels[1:], channels[0]) / len(channels)).numpy(), rtol=1e-4, atol=1e-4)


def test_a_backbone_without_weights_is_refused_before_the_search() -> None:
    with pytest.raises(UserError, match=r"backbone\.weights: VGG16 needs a name"):
        replace(SMALL, network="vgg16").ready()
    with pytest.raises(UserError, match="no-such-weights"):
        replace(SMALL, network="r101-ws", weights="no-such-weights").ready()


def test_a_shape_gets_a_box_around_it() -> None:
    found = SMALL(card())
    corners = found.boxes
    target = torch.tensor([40.0, 24, 96, 72])
    lower, upper = torch.maximum(corners[:, :2], target[:2]), torch.minimum(corners[:, 2:], target[2:])
    shared = (upper - lower).clamp(min=0).prod(1)
    iou = shared / ((corners[:, 2:] - corners[:, :2]).prod(1) + 56 * 48 - shared)
    assert iou.max() > 0.6
    assert (found.scores > 0).all() and found.scores.tolist() == sorted(found.scores.tolist(), reverse=True)


@pytest.mark.parametrize("size", [(1, 1), (20, 20), (200, 9)])
def test_a_photo_of_one_colour_is_survived(size: tuple[int, int]) -> None:
    found = replace(SMALL, short_side=32)(torch.full((3, size[1], size[0]), 77, dtype=torch.uint8))
    assert found.boxes.isfinite().all() and found.scores.isfinite().all()


def test_the_same_photo_gives_the_same_boxes() -> None:
    image = card()
    assert torch.equal(SMALL(image).boxes, SMALL(image).boxes)


@pytest.mark.parametrize(
    "change",
    [
        {"layers": 1},
        {"smoothing": 0.5},
        {"alpha": 0.9},
        {"beta": 0.3},
        {"min_side": 40},
        {"max_boxes": 3},
        {"min_share": 0.4},
    ],
)
def test_every_setting_matters(change: dict[str, float]) -> None:
    image = card()
    assert SMALL(image).boxes.tolist() != replace(SMALL, **change)(image).boxes.tolist()


def test_a_photo_far_larger_than_its_searched_copy_has_boxes() -> None:
    """The smallest side is then less than a pixel of the copy, with which OpenCV's search found nothing."""
    assert len(SMALL(card(), size=(2560, 1920))) > 20


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5])
def test_boxes_below_a_share_of_the_short_side_are_dropped(share: float) -> None:
    sides = (found := replace(SMALL, min_side=0, min_share=share)(card(128, 96)).boxes)[:, 2:] - found[:, :2]
    assert len(found) and sides.min() >= share * 96


def test_the_store_records_it_and_new_photos_are_searched_alike() -> None:
    SMALL.ready()
    assert method_from_source(SMALL.source()) == SMALL and default_method("wsrpn") == Wsrpn()
    assert not {"network", "min_share"} & SMALL.source().keys()  # a store of before there was a choice is one of lite0
    other = replace(SMALL, network="vgg16", weights="vgg16")
    assert method_from_source(other.source()) == other
