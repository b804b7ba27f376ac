from __future__ import annotations

import functools
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from tag2box.errors import UserError
from tag2box.methods.casd import attention
from tag2box.models import vgg16
from tag2box.models.backbone import Preprocess
from tag2box.models.vgg16 import Vgg16, Vgg16Backbone, load_vgg16
from tag2box.models.weights import state_dict
from tag2box.models.weights.state_dict import PREPROCESS, Weights, load_into, read_state_dict
from tag2box.models.weights.weight_cache import Origin, store
from tag2box.ops.roi import roi_pool
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
    assert not small.frozen_roi_maps


def test_the_neck_is_the_papers_size_and_drops_half():
    with torch.device("meta"):
        backbone = Vgg16().build(pretrained=False)
    shapes = [layer.weight.shape for layer in backbone.classifier if isinstance(layer, nn.Linear)]
    assert shapes == [(4096, 25088), (4096, 4096)] and backbone.vector_size == 4096
    assert backbone.dropout == 0.5


# ---------------------------------------------------------------- weights, and the pixels they bring


@pytest.fixture
def narrow(tmp_path, monkeypatch) -> Path:
    """Few channels and a neck of 16 in networks and files, and a folder of stored weights."""
    blocks = ((4, 2), (5, 2), (6, 3), (7, 3), (8, 3))
    monkeypatch.setattr(state_dict, "VGG_BLOCKS", blocks)
    monkeypatch.setattr(state_dict, "VGG_NECK", 16)
    monkeypatch.setattr(Vgg16Backbone, "channels", 8)
    monkeypatch.setattr(vgg16, "Vgg16Backbone", functools.partial(Vgg16Backbone, vector_size=16))
    monkeypatch.setenv("TAG2BOX_HOME", str(tmp_path / "home"))
    return tmp_path


@pytest.fixture
def donor(narrow):
    torch.manual_seed(7)
    return Vgg16Backbone(Vgg16(), vector_size=16)


def tensors(backbone, *, neck=True):
    parts = ("features.", "classifier.") if neck else ("features.",)
    return {k: v.clone() for k, v in backbone.state_dict().items() if k.startswith(parts)}


def kept(name, backbone, *, neck, pixels):
    weights = Weights("vgg16" if neck else "vgg16-conv", PREPROCESS[pixels], tensors(backbone, neck=neck))
    store(name, weights, Origin("a test", "none", "00"))


def test_a_stored_name_loads_everything_without_a_warning(narrow, donor):
    kept("mine", donor, neck=True, pixels="caffe")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        built = Vgg16(weights="mine").build()
    assert all(torch.equal(v, donor.state_dict()[k]) for k, v in tensors(built).items())
    assert built.preprocess == PREPROCESS["caffe"]


def test_a_state_dict_loads_fc6_and_fc7_and_leaves_the_classifier_out(narrow, donor):
    state = {**tensors(donor), "classifier.6.weight": torch.zeros(10, 16), "classifier.6.bias": torch.zeros(10)}
    torch.save(state, narrow / "vgg.pth")
    built = Vgg16(weights=str(narrow / "vgg.pth"), preprocess="torchvision").build()
    assert all(torch.equal(v, donor.state_dict()[k]) for k, v in tensors(built).items())


def test_convolutions_alone_load_with_a_warning_and_a_random_neck(narrow, donor):
    kept("convolutions", donor, neck=False, pixels="torchvision")
    with pytest.warns(UserWarning, match="convolutions: holds .* learn from your photos alone") as said:
        built = Vgg16(weights="convolutions").build()
    assert len(said) == 1 and "\n" not in str(said[0].message)
    assert all(torch.equal(built.state_dict()[k], v) for k, v in tensors(donor, neck=False).items())
    neck = built.classifier[0].weight
    assert 0.009 < neck.std() < 0.011 and not torch.equal(neck, donor.classifier[0].weight)


@pytest.mark.parametrize("change", [{"features.28.weight": None}, {"features.0.weight": torch.zeros(4, 1, 3, 3)}])
def test_other_networks_are_refused_by_key(narrow, donor, change):
    state = {k: v for k, v in {**tensors(donor, neck=False), **change}.items() if v is not None}
    torch.save(state, narrow / "other.pth")
    with pytest.raises(UserError, match=r"other\.pth.*" + next(iter(change))):
        Vgg16(weights=str(narrow / "other.pth"), preprocess="caffe").build()


def test_weights_of_another_architecture_are_refused(narrow, donor):
    weights = Weights("lite0", PREPROCESS["lite0"], {})
    with pytest.raises(UserError, match="mine: these are weights of lite0, not of vgg16"):
        load_vgg16(donor, weights, "mine")


def test_weights_must_be_named_and_files_must_state_their_preprocessing(narrow, donor):
    with pytest.raises(UserError, match=r"backbone\.weights.*weights get vgg16"):
        Vgg16().build()
    with pytest.raises(UserError, match="nowhere: no weights of this name"):
        Vgg16(weights="nowhere").build()
    path = narrow / "raw.safetensors"
    save_file(tensors(donor), path)
    with pytest.raises(UserError, match=r"raw\.safetensors.*backbone\.preprocess="):
        Vgg16(weights=str(path)).build()
    assert Vgg16(weights=str(path), preprocess="caffe").build().preprocess.order == "bgr"


def test_pixels_of_stored_weights_cannot_be_overruled(narrow, donor):
    kept("mine", donor, neck=True, pixels="caffe")
    with pytest.raises(UserError, match=r"backbone\.preprocess = torchvision, but mine"):
        Vgg16(weights="mine", preprocess="torchvision").build()


def test_the_pixels_travel_among_the_weights_to_a_machine_that_has_neither_name_nor_file(narrow, donor):
    kept("mine", donor, neck=True, pixels="caffe")
    settings = Vgg16(weights="mine")
    save_file(settings.build().state_dict(), narrow / "checkpoint.safetensors")
    shutil.rmtree(narrow / "home")
    loaded = settings.build(pretrained=False)
    assert loaded.preprocess == PREPROCESS["torchvision"]  # of no weights yet
    load_into(loaded, read_state_dict(narrow / "checkpoint.safetensors"), "checkpoint")
    assert loaded.preprocess == PREPROCESS["caffe"]
    image = torch.rand(1, 3, 16, 16) * 255
    first = F.conv2d(PREPROCESS["caffe"](image), *(donor.features[0].state_dict()[k] for k in ("weight", "bias")))
    torch.testing.assert_close(loaded.features[0](loaded.preprocess(image))[..., 1:-1, 1:-1], first)


def test_pixels_come_back_to_the_last_digit(small):
    for known in PREPROCESS.values():
        assert Preprocess.from_tensor(known.to_tensor()) == known
    with torch.device("meta"):
        assert Vgg16(preprocess="caffe").build(pretrained=False).preprocess.order == "bgr"
        assert Vgg16().build(pretrained=False).preprocess.order == "rgb"


# ---------------------------------------------------------------- a narrow neck


def neck_twin(maps, backbone):
    """One proposal and cell at a time: 1 x 1 convolution and ReLU, then two layers."""
    found = []
    for own in maps:
        cells = torch.zeros(backbone.reduce.out_channels, 7, 7)
        for y in range(7):
            for x in range(7):
                cells[:, y, x] = torch.relu(backbone.reduce.weight[:, :, 0, 0] @ own[:, y, x])
        vector = cells.flatten()
        for layer in (backbone.classifier[0], backbone.classifier[3]):
            vector = torch.relu(layer.weight @ vector + layer.bias)
        found.append(vector)
    return torch.stack(found)


def test_a_narrow_neck_matches_the_loop_and_commutes_with_factors_on_cells(narrow):
    backbone = Vgg16Backbone(Vgg16(dropout=0.0, neck_channels=3, neck_size=10))
    assert (backbone.vector_size, backbone.reduce.out_channels) == (10, 3)
    assert [layer.in_features for layer in (backbone.classifier[0], backbone.classifier[3])] == [3 * 49, 10]
    with torch.no_grad():
        maps, factors = 5 * torch.randn(4, 8, 7, 7), torch.rand(4, 7, 7)
        torch.testing.assert_close(backbone.neck(maps), neck_twin(maps, backbone), rtol=1e-4, atol=1e-5)
        dropped = backbone.neck_tail(backbone.neck_stem(maps), factors)
        torch.testing.assert_close(dropped, neck_twin(maps * factors[:, None], backbone), rtol=1e-4, atol=1e-5)
        assert backbone.neck(maps[:0]).shape == (0, 10)
    assert {p.shape for p in backbone.neck_parameters()} == {
        p.shape for part in (backbone.reduce, backbone.classifier) for p in part.parameters()
    }


def responses_with_loops(maps, backbone):
    """Cell after cell: the mean of f over channels, then that of the 1 x 1 convolution after its ReLU."""
    found = torch.zeros(len(maps), 2, 7, 7)
    for r, own in enumerate(maps):
        for y in range(7):
            for x in range(7):
                cell = own[:, y, x]
                outputs = [max(0.0, float(weights @ cell)) for weights in backbone.reduce.weight[:, :, 0, 0]]
                found[r, :, y, x] = torch.tensor([float(cell.sum()) / len(cell), sum(outputs) / len(outputs)])
    return found


@pytest.mark.parametrize("count", [0, 3])
def test_responses_of_a_narrow_neck_end_with_those_of_its_convolution(narrow, count):
    backbone = Vgg16Backbone(Vgg16(neck_channels=3, train_trunk=False), vector_size=16)
    maps = 5 * torch.randn(count, 8, 7, 7)
    found = backbone.responses(maps, backbone.neck_stem(maps))
    assert found.shape == (count, backbone.layers, 7, 7) and backbone.layers == 2
    with torch.no_grad():
        torch.testing.assert_close(found.detach(), responses_with_loops(maps, backbone), rtol=1e-4, atol=1e-5)
    if count:
        attention(found)[:, 1].square().sum().backward()  # as CASD's terms do; f is frozen
        assert backbone.reduce.weight.grad.any()


def test_responses_without_that_convolution_are_the_mean_of_f(small):
    maps = torch.randn(2, 512, 7, 7)
    assert torch.equal(small.responses(maps, small.neck_stem(maps)), maps.mean(dim=1, keepdim=True))
    assert small.layers == 1


@pytest.mark.parametrize(
    ("settings", "layers", "trains"),
    [
        ({}, 1, True), ({"train_trunk": False}, 1, False), ({"neck_channels": 3}, 2, True),
        ({"train_trunk": False, "neck_channels": 3}, 2, True), ({"train_trunk": False, "neck_size": 3}, 1, False),
    ],
)  # fmt: skip
def test_the_settings_know_the_layers_and_whether_one_is_trained(narrow, settings, layers, trains):
    made = Vgg16Backbone(Vgg16(**settings), vector_size=16)
    maps = made.roi_maps(made.trunk(torch.rand(1, 3, 16, 16)), Proposals(torch.tensor([[0.0, 0, 16, 16]]), (1,)))
    found = made.responses(maps, made.neck_stem(maps))
    assert (found.shape[1], found.requires_grad) == (layers, trains)
    assert (Vgg16(**settings).layers, Vgg16(**settings).trains_responses) == (layers, trains)


@pytest.mark.parametrize("neck", [True, False])
@pytest.mark.parametrize("settings", [{"neck_channels": 3}, {"neck_size": 10}, {"neck_channels": 3, "neck_size": 10}])
def test_a_neck_of_another_width_takes_the_convolutions_of_any_weights_without_a_warning(narrow, donor, settings, neck):
    kept("mine", donor, neck=neck, pixels="caffe")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        built = Vgg16(weights="mine", **settings).build()
    assert all(torch.equal(built.state_dict()[k], v) for k, v in tensors(donor, neck=False).items())
    assert built.preprocess == PREPROCESS["caffe"]
    again = Vgg16(weights="mine", **settings).build(pretrained=False)
    again.load_state_dict(built.state_dict())  # as a checkpoint does
