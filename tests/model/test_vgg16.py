from __future__ import annotations

import warnings

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from tag2box.errors import UserError
from tag2box.maths.roi import roi_pool
from tag2box.model.vgg16 import Vgg16, Vgg16Backbone, load_vgg16
from tag2box.types import Proposals

NUMBERS = (0, 2, 5, 7, 10, 12, 14, 17, 19, 21, 24, 26, 28)  # of torchvision's 13 convolutions


@pytest.fixture(scope="module")
def small():
    """The real convolutions with a small neck."""
    return Vgg16Backbone(Vgg16(dropout=0.0), vector_size=16)


def convolutions(backbone):
    return {f"features.{k}": v.clone() for k, v in backbone.features.state_dict().items()}


def trunk_twin(images, state):
    x = (images / 255 - torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)) / torch.tensor([0.229, 0.224, 0.225]).view(
        3, 1, 1
    )
    for order, number in enumerate(NUMBERS):
        gap = 2 if order >= 10 else 1
        x = F.conv2d(x, state[f"features.{number}.weight"], state[f"features.{number}.bias"], padding=gap, dilation=gap)
        x = x if number == 28 else F.relu(x)
        x = F.max_pool2d(x, 2) if order in (1, 3, 6) else x
    return x


def test_the_trunk_is_dilated_and_ends_raw_at_stride_eight(small):
    images = torch.rand(1, 3, 48, 32) * 255
    features = small.trunk(images)
    assert features.shape == (1, 512, 6, 4)
    assert (features < 0).any()  # no ReLU after conv5_3
    torch.testing.assert_close(features, trunk_twin(images, convolutions(small)), rtol=1e-4, atol=1e-5)


def test_maps_are_pooled_at_stride_eight_and_the_neck_is_two_layers(small):
    features = torch.randn(2, 512, 9, 8)
    proposals = Proposals(torch.tensor([[0, 0, 64, 72], [10, 20, 50, 60.0]]), (1, 1))
    maps = small.roi_maps(features, proposals)
    assert torch.equal(maps, roi_pool(features, proposals.boxes, torch.tensor([0, 1]), size=7, scale=1 / 8))
    fc6, fc7 = small.classifier[0], small.classifier[3]
    torch.testing.assert_close(small.neck(maps), F.relu(fc7(F.relu(fc6(maps.reshape(2, -1))))))
    assert small.neck(small.roi_maps(features, Proposals(torch.zeros(0, 4), (0, 0)))).shape == (0, 16)


def test_conv1_and_conv2_do_not_learn_and_the_rest_does(small):
    frozen = {name for name, p in small.named_parameters() if not p.requires_grad}
    assert frozen == {f"features.{n}.{kind}" for n in (0, 2, 5, 7) for kind in ("weight", "bias")}
    assert not small.frozen_maps


def test_the_neck_is_the_papers_size_and_drops_half():
    with torch.device("meta"):
        backbone = Vgg16().build(pretrained=False)
    shapes = [layer.weight.shape for layer in backbone.classifier if isinstance(layer, nn.Linear)]
    assert shapes == [(4096, 25088), (4096, 4096)] and backbone.vector_size == 4096
    assert [layer.p for layer in backbone.classifier if isinstance(layer, nn.Dropout)] == [0.5, 0.5]


def test_a_full_state_dict_loads_fc6_and_fc7_and_leaves_the_classifier_out(small, tmp_path):
    donor = Vgg16Backbone(Vgg16(), vector_size=16)
    state = {**donor.state_dict(), "classifier.6.weight": torch.zeros(10, 16), "classifier.6.bias": torch.zeros(10)}
    torch.save(state, tmp_path / "vgg.pth")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_vgg16(small, tmp_path / "vgg.pth")
    assert all(torch.equal(v, donor.state_dict()[k]) for k, v in small.state_dict().items())


def test_convolutions_alone_load_with_a_warning_and_a_random_neck(small, tmp_path):
    donor = convolutions(Vgg16Backbone(Vgg16(), vector_size=1))
    neck = small.classifier[0].weight.clone()
    save_file(donor, tmp_path / "convs.safetensors")
    with pytest.warns(UserWarning, match="far more photos"):
        load_vgg16(small, tmp_path / "convs.safetensors")
    assert all(torch.equal(small.state_dict()[k], v) for k, v in donor.items())
    assert torch.equal(small.classifier[0].weight, neck)
    assert 0.009 < neck.std() < 0.011


@pytest.mark.parametrize("change", [{"features.28.weight": None}, {"features.0.weight": torch.zeros(64, 1, 3, 3)}])
def test_other_networks_are_refused_by_key(small, tmp_path, change):
    state = {k: v for k, v in {**convolutions(small), **change}.items() if v is not None}
    torch.save(state, tmp_path / "other.pth")
    with pytest.raises(UserError, match=r"other\.pth.*" + next(iter(change)).removeprefix("features.")):
        load_vgg16(small, tmp_path / "other.pth")


def test_weights_must_be_named_and_preprocessing_follows_them():
    with torch.device("meta"):
        with pytest.raises(UserError, match=r"vgg16\.weights"):
            Vgg16().build()
        assert Vgg16(preprocess="caffe").build(pretrained=False).preprocess.order == "bgr"
        assert Vgg16().build(pretrained=False).preprocess.order == "rgb"
