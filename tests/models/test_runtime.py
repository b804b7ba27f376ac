"""Precision and engine of networks: fp32 by torch is unchanged to the bit, the others are near it."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn

from tag2box.errors import UserError
from tag2box.models import runtime
from tag2box.models.backbone import Backbone, set_runtime
from tag2box.models.class_maps import CellMaps, ClassMaps
from tag2box.models.context import ContextBackbone
from tag2box.models.lite0 import Lite0
from tag2box.models.runtime import DEFAULT_RUNTIME, Runtime, depthwise_conv
from tag2box.types import Proposals

needs_openvino = pytest.mark.skipif(not runtime.has_openvino(), reason="OpenVINO is not installed")
BOXES = torch.tensor([[0.0, 0.0, 64.0, 48.0], [10.0, 20.0, 90.0, 60.0], [5.0, 5.0, 20.0, 20.0]])


@pytest.fixture(scope="module")
def lite0() -> Backbone:
    return Lite0(pool_size=4).build().requires_grad_(False)


def photo(height: int = 80, width: int = 96) -> torch.Tensor:
    return torch.rand(1, 3, height, width, generator=torch.Generator().manual_seed(0)) * 255


def features(backbone: Backbone, pixels: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Trunk map, RoI maps, and features of cells at both strides, in the backbone's runtime."""
    with backbone.frozen():
        trunk = backbone.trunk(pixels)
        maps = backbone.roi_maps(trunk, Proposals(BOXES, (len(BOXES),), ((96, 80),)))
        return trunk, maps, backbone.photo_features(trunk), backbone.photo_features(trunk, dense=True)


def distance(ours: torch.Tensor, twin: torch.Tensor) -> float:
    return float((ours.float() - twin).norm() / twin.norm())


def test_the_default_is_plain_torch_to_the_bit(lite0: Backbone) -> None:
    with torch.no_grad():
        trunk = lite0.body(lite0.stem(lite0.preprocess(photo()).contiguous(memory_format=torch.channels_last)))
        dense = trunk
        for block in lite0.tail:
            dense = block.dilated(dense)
        expected = (trunk, lite0.head(lite0.tail(trunk)), lite0.head(dense))
    found = features(lite0, photo())
    assert all(torch.equal(ours, twin) for ours, twin in zip((found[0], *found[2:]), expected, strict=True))


def test_a_block_has_no_gradients_and_ends_with_the_precision_before_it(lite0: Backbone) -> None:
    own = copy.copy(lite0)
    own.runtime = Runtime(precision="bf16")
    with own.frozen():
        assert not torch.is_grad_enabled() and torch.is_autocast_enabled("cpu")
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")


def test_bf16_reaches_every_part_and_stays_near(lite0: Backbone) -> None:
    expected = features(lite0, photo())
    half = copy.deepcopy(lite0)
    set_runtime(half, Runtime(precision="bf16"))
    for ours, twin in zip(features(half, photo()), expected, strict=True):
        assert ours.dtype == torch.bfloat16 and 0 < distance(ours, twin) < 0.15


@needs_openvino
def test_openvino_gives_the_numbers_of_torch(lite0: Backbone) -> None:
    other = copy.deepcopy(lite0)
    set_runtime(other, Runtime(engine="openvino"))
    for size in ((80, 96), (64, 64), (33, 70)):  # maps of any size, by one compiled network
        for ours, twin in zip(features(other, photo(*size)), features(lite0, photo(*size)), strict=True):
            assert ours.dtype == torch.float32 and distance(ours, twin) < 1e-4


@needs_openvino
def test_openvino_in_bf16_is_another_rounding(lite0: Backbone) -> None:
    if not runtime.has_bf16():
        pytest.skip("this processor has no bf16 instructions")
    other = copy.deepcopy(lite0)
    set_runtime(other, Runtime(precision="bf16", engine="openvino"))
    for ours, twin in zip(features(other, photo()), features(lite0, photo()), strict=True):
        assert 0 < distance(ours, twin) < 0.15


@needs_openvino
def test_a_network_whose_weights_change_is_compiled_again(lite0: Backbone) -> None:
    other = copy.deepcopy(lite0)
    set_runtime(other, Runtime(engine="openvino"))
    before = features(other, photo())[0]
    with torch.no_grad():
        other.stem.weight.mul_(0.5)
    after = features(other, photo())[0]
    set_runtime(other, DEFAULT_RUNTIME)
    assert not torch.equal(before, after) and distance(after, features(other, photo())[0]) < 1e-4


@needs_openvino
def test_no_proposals_need_no_engine(lite0: Backbone) -> None:
    other = copy.deepcopy(lite0)
    set_runtime(other, Runtime(engine="openvino"))
    with other.frozen():
        assert other.roi_maps(torch.zeros(1, 112, 4, 4), Proposals(torch.zeros(0, 4), (0,))).shape == (0, 320, 2, 2)


def test_the_engine_is_not_used_outside_of_a_block(lite0: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exact step runs without gradients, too: its passes must be those of torch."""
    monkeypatch.setattr(runtime, "load_openvino", lambda: pytest.fail("compiled"))
    other = copy.deepcopy(lite0)
    set_runtime(other, Runtime(engine="openvino"))
    with torch.no_grad():
        other.trunk(photo())


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(runtime, "import_module", missing)
    with pytest.raises(UserError, match=r"compute\.engine = openvino: OpenVINO is not installed; pip install"):
        runtime.load_openvino()


def test_all_backbones_of_a_network_get_the_runtime() -> None:
    backbone = ContextBackbone(Lite0(pool_size=4).build(pretrained=False), 1.8)
    wanted = Runtime(precision="bf16")
    set_runtime(nn.Sequential(backbone), wanted)
    assert backbone.runtime == backbone.inner.runtime == wanted
    assert Lite0(pool_size=4).build(pretrained=False).runtime == DEFAULT_RUNTIME


@needs_openvino
def test_keys_of_caches_differ_and_the_default_has_none() -> None:
    kinds = (
        Runtime(),
        Runtime(precision="bf16"),
        Runtime(engine="openvino"),
        Runtime(stored="bf16"),
        Runtime(stored="fp32"),
        Runtime(precision="bf16", stored="bf16"),
    )
    assert kinds[0].key() == "" and len({one.key() for one in kinds}) == len(kinds)


@pytest.mark.parametrize("kind", [ClassMaps, CellMaps])
def test_class_maps_in_bf16_are_near(lite0: Backbone, kind: type[ClassMaps]) -> None:
    torch.manual_seed(0)
    net = kind(copy.deepcopy(lite0), 3, 64).eval()
    with torch.no_grad():
        expected = net.maps(photo(64, 64))
    set_runtime(net, Runtime(precision="bf16"))
    with net.backbone.frozen():
        assert distance(net.maps(photo(64, 64)), expected) < 0.05
        logits = net(photo(64, 64))
    assert logits.dtype == torch.float32


# ---------------------------------------------------------------- depthwise convolutions


@pytest.mark.parametrize(("stride", "bias"), [(1, True), (2, False)])
def test_a_depthwise_convolution_in_bf16_has_gradients_near_those_in_fp32(stride: int, bias: bool) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(6, 6, 3, stride, padding=1, groups=6, bias=bias)
    x = torch.randn(2, 6, 9, 7)
    results = []
    for half in (False, True):
        own = x.clone().requires_grad_()
        conv.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            y = depthwise_conv(own, conv)
        y.float().square().sum().backward()
        assert y.dtype == (torch.bfloat16 if half else torch.float32)
        results.append([own.grad, *(p.grad for p in conv.parameters())])
    for ours, twin in zip(results[1], results[0], strict=True):
        assert ours is not None and twin is not None and ours.dtype == torch.float32 and distance(ours, twin) < 0.02


def test_in_fp32_it_is_the_convolution_itself() -> None:
    conv, x = nn.Conv2d(4, 4, 3, groups=4), torch.randn(1, 4, 5, 5)
    assert torch.equal(depthwise_conv(x, conv), conv(x))


@needs_openvino
def test_a_signal_after_openvino_was_used_is_handled() -> None:
    script = """
import gc, signal, sys, threading, torch
from torch import nn
from tag2box.models.runtime import Runtime, run

nets = [nn.Conv2d(3, 4, 3)]
with Runtime(engine="openvino").frozen(torch.device("cpu")):
    run(nets[0], "whole", nets[0], torch.rand(1, 3, 8, 8))
released = threading.Thread(target=lambda: (nets.clear(), gc.collect()))  # a collection may run in any thread
released.start()
released.join()
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    sys.exit(7)
"""
    assert subprocess.run([sys.executable, "-X", "faulthandler", "-c", script], check=False).returncode == 7
