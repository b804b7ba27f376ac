from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from tag2box.errors import UserError
from tag2box.models.backbone import Preprocess
from tag2box.models.lite0 import Lite0, fold_weights
from tag2box.models.rng import StepRng, Stream
from tag2box.models.weights.zoo import lite0_weights
from tag2box.ops.roi import roi_align, roi_pool
from tag2box.types import Proposals

STRIDES = (1, 2, 1, 2, 1, 2, 1, 1, 1, 1, 1, 2, 1, 1, 1, 1)


@pytest.fixture(scope="module")
def raw():
    return lite0_weights()


@pytest.fixture(scope="module")
def backbone():
    return Lite0().build().eval()


def same_conv(x, weight, *, stride=1, groups=1):
    """TensorFlow's "same" padding: ceil(size / stride) cells out, the odd pad after."""
    pads = []
    for size, kernel in zip(reversed(x.shape[2:]), reversed(weight.shape[2:]), strict=True):
        total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
        pads += [total // 2, total - total // 2]
    return F.conv2d(F.pad(x, pads), weight, stride=stride, groups=groups)


def norm(x, raw, name):
    names = ("running_mean", "running_var", "weight", "bias")
    return F.batch_norm(x, *(raw[f"{name}.{n}"] for n in names), eps=1e-3)


def block_twin(x, raw, index):
    """One inverted residual with its batch norms left as they are."""
    name, stride, y = f"_blocks.{index}", STRIDES[index], x
    if f"{name}._expand_conv.weight" in raw:
        y = F.relu6(norm(same_conv(y, raw[f"{name}._expand_conv.weight"]), raw, f"{name}._bn0"))
    y = same_conv(y, raw[f"{name}._depthwise_conv.weight"], stride=stride, groups=y.shape[1])
    y = F.relu6(norm(y, raw, f"{name}._bn1"))
    y = norm(same_conv(y, raw[f"{name}._project_conv.weight"]), raw, f"{name}._bn2")
    return x + y if x.shape == y.shape else y


def trunk_twin(images, raw):
    x = (images / 255 - 0.498) / 0.502
    x = F.relu6(norm(same_conv(x, raw["_conv_stem.weight"], stride=2), raw, "_bn0"))
    for index in range(11):
        x = block_twin(x, raw, index)
    return x


def test_the_trunk_equals_the_published_network_with_its_batch_norms(backbone, raw):
    images = torch.rand(2, 3, 96, 64) * 255
    features = backbone.trunk(images)
    assert features.shape == (2, 112, 6, 4)
    torch.testing.assert_close(features, trunk_twin(images, raw), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("pooling", ["align", "max"])
@pytest.mark.parametrize(("pool_size", "map_size"), [(14, 7), (8, 4)])
def test_tail_and_neck_equal_the_published_network(raw, pooling, pool_size, map_size):
    backbone = Lite0(pool_size=pool_size, pooling=pooling).build().eval()
    features = torch.randn(2, 112, 9, 11)
    proposals = Proposals(torch.tensor([[0, 0, 170, 140], [20, 30, 90, 120], [5, 5, 30, 40.0]]), (1, 2))
    maps = backbone.roi_maps(features, proposals)
    assert maps.shape == (3, 320, map_size, map_size) and backbone.map_size == map_size
    pool = roi_align if pooling == "align" else roi_pool
    x = pool(features, proposals.boxes, torch.tensor([0, 1, 1]), size=pool_size, scale=1 / 16)
    for index in range(11, 16):
        x = block_twin(x, raw, index)
    torch.testing.assert_close(maps, x, rtol=1e-3, atol=1e-3)
    vector = F.relu6(norm(same_conv(x, raw["_conv_head.weight"]), raw, "_bn1")).mean(dim=(2, 3))
    torch.testing.assert_close(backbone.neck(maps), vector, rtol=1e-3, atol=1e-3)


def test_photos_of_any_size_are_covered_and_padding_leaves_far_cells_alone(backbone):
    images = torch.rand(1, 3, 97, 150) * 255
    features = backbone.trunk(images)
    assert features.shape == (1, 112, 7, 10)
    r, g, b = backbone.preprocess.neutral()
    padded = torch.tensor([r, g, b]).view(1, 3, 1, 1).repeat(1, 1, 112, 160)
    padded[:, :, :97, :150] = images
    torch.testing.assert_close(backbone.trunk(padded), features, rtol=1e-4, atol=1e-4)


def test_no_proposals_give_no_maps(backbone):
    maps = backbone.roi_maps(torch.randn(2, 112, 4, 4), Proposals(torch.zeros(0, 4), (0, 0)))
    assert maps.shape == (0, 320, 7, 7) and backbone.neck(maps).shape == (0, 1280)


def test_many_proposals_run_in_parts_with_the_same_result(backbone):
    features = torch.randn(1, 112, 6, 6)
    boxes = torch.rand(70, 4).sort(dim=1).values[:, [0, 1, 2, 3]] * 96
    whole = backbone.roi_maps(features, Proposals(boxes, (70,)))
    last = backbone.roi_maps(features, Proposals(boxes[66:], (4,)))
    torch.testing.assert_close(whole[66:], last, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "learning", "frozen"),
    [
        (Lite0(), {"head"}, True),
        (Lite0(train_neck=False), set(), True),
        (Lite0(train_tail=True), {"tail", "head"}, False),
    ],
)
def test_settings_decide_what_learns(settings, learning, frozen):
    backbone = settings.build(pretrained=False)
    assert {name.split(".")[0] for name, p in backbone.named_parameters() if p.requires_grad} == learning
    assert backbone.frozen_roi_maps is frozen
    assert backbone.frozen_trunk
    assert "pool" not in backbone.trunk_key()  # its maps serve every pooling


def test_gradients_reach_the_tail_where_it_learns():
    backbone = Lite0(train_tail=True, pool_size=4).build(pretrained=False)
    proposals = Proposals(torch.tensor([[0, 0, 60, 60.0], [8, 8, 40, 50]]), (2,))
    backbone.neck(backbone.roi_maps(torch.rand(1, 112, 4, 4), proposals)).sum().backward()
    assert all(p.grad is not None for p in backbone.tail.parameters())
    assert all(p.grad is None for p in backbone.body.parameters())


def test_training_mode_changes_nothing_and_dropout_needs_an_rng(backbone):
    images = torch.rand(1, 3, 64, 64) * 255
    quiet = backbone.trunk(images)
    maps = 9 * torch.randn(3, 320, 7, 7)
    vector = backbone.neck(maps)
    assert (vector > 0).sum() > 100
    backbone.train()
    try:
        assert torch.equal(backbone.trunk(images), quiet) and torch.equal(backbone.neck(maps), vector)
    finally:
        backbone.eval()
    assert not list(backbone.buffers())
    backbone.dropout = 0.5
    try:
        dropped = backbone.neck(maps, StepRng(0, 0).row_rng(Stream.NECK, torch.zeros(3, dtype=torch.long)))
        assert torch.equal(backbone.neck(maps), vector)
    finally:
        backbone.dropout = 0.0
    assert ((dropped == 0) | (dropped == 2 * vector)).all()
    assert 0.4 < (dropped == 0)[vector > 0].float().mean() < 0.6


def test_folding_names_every_parameter_of_the_network(raw):
    own = Lite0().build(pretrained=False).state_dict()
    folded = fold_weights(raw)
    assert {k: v.shape for k, v in folded.items()} == {k: v.shape for k, v in own.items()}


def test_preprocessing_orders_scales_and_shifts_and_has_a_neutral_colour():
    image = torch.tensor([10.0, 20.0, 30.0]).view(1, 3, 1, 1)
    bgr = Preprocess(order="bgr", scale=0.5, mean=(1.0, 2.0, 3.0), std=(1.0, 2.0, 4.0))
    assert bgr(image).flatten().tolist() == [14.0, 4.0, 0.5]
    assert bgr.neutral() == (6.0, 4.0, 2.0)
    assert not bgr(torch.tensor(bgr.neutral()).view(1, 3, 1, 1)).any()
    assert Preprocess(order="rgb", scale=1.0, mean=(1.0, 2.0, 3.0), std=(1.0, 1.0, 1.0)).neutral() == (1.0, 2.0, 3.0)


@pytest.mark.parametrize("count", [0, 1, 70])
def test_responses_are_means_over_channels_of_the_map_and_of_the_head_convolution(backbone, count):
    side = backbone.map_size
    maps = torch.randn(count, backbone.channels, side, side, generator=torch.Generator().manual_seed(0))
    seen = backbone.responses(maps, backbone.neck_stem(maps))
    head = F.relu6(F.conv2d(maps, backbone.head.weight, backbone.head.bias)).mean(dim=1)
    wanted = torch.stack([maps.mean(dim=1), head.detach()], dim=1)
    torch.testing.assert_close(seen.detach(), wanted, rtol=1e-4, atol=1e-5)
    assert seen.shape == (count, backbone.layers, side, side)


def test_a_pooled_backbone_has_the_vectors_of_the_other() -> None:
    torch.manual_seed(0)
    plain = Lite0(pool_size=4, train_neck=False).build(pretrained=False).eval()
    with torch.no_grad():
        for p in plain.parameters():
            p.mul_(2)
    pooled = Lite0(pool_size=4, train_neck=False, pooled=True).build(pretrained=False).eval()
    pooled.load_state_dict(plain.state_dict())
    assert (pooled.map_size, pooled.channels, pooled.frozen_roi_maps) == (1, plain.vector_size, True)
    trunk = plain.trunk(torch.rand(1, 3, 64, 64) * 255)
    for count in (0, 1, 5):
        boxes = torch.tensor([[4.0, 4.0, 40.0, 50.0], [0, 0, 64, 64], [8, 2, 30, 60], [1, 1, 9, 9], [2, 3, 60, 20]])
        proposals = Proposals(boxes[:count], (count,))
        vectors = pooled.neck(pooled.roi_maps(trunk, proposals))
        torch.testing.assert_close(vectors, plain.neck(plain.roi_maps(trunk, proposals)))
    assert pooled.roi_map_key() != plain.roi_map_key()


def test_a_pooled_backbone_with_a_trained_neck_is_refused() -> None:
    with pytest.raises(UserError, match=r"backbone\.pooled: needs a frozen network"):
        Lite0(pooled=True).build(pretrained=False)
