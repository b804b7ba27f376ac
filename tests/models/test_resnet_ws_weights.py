"""Weights of R50-WS and R101-WS, and the pixels they bring."""

from __future__ import annotations

import functools
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import save_file

from fake_weights import foreign, random_weights, save, shrink
from tag2box.errors import UserError
from tag2box.models import resnet_ws
from tag2box.models.backbone import Preprocess
from tag2box.models.resnet_ws import ResNetWs, ResNetWsBackbone, fixed_norms, load_resnet_ws
from tag2box.models.weights.state_dict import PREPROCESS, Weights, load_into, read_state_dict
from tag2box.models.weights.weight_cache import Origin, store

WIDTH, NECK = 2, (3, 4)  # what fake_weights.shrink makes of the networks


def small(depth: int = 50, **settings: object) -> ResNetWsBackbone:
    """The real blocks with few channels."""
    return ResNetWsBackbone(ResNetWs(depth=depth, **settings), width=WIDTH, neck=NECK)  # type: ignore[arg-type]


@pytest.fixture
def narrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Few channels in networks and files, and a folder of stored weights."""
    shrink(monkeypatch)
    made = functools.partial(ResNetWsBackbone, width=WIDTH, neck=NECK)
    monkeypatch.setattr(resnet_ws, "ResNetWsBackbone", made)
    monkeypatch.setenv("TAG2BOX_HOME", str(tmp_path / "home"))
    return tmp_path


@given(
    st.lists(st.tuples(*[st.floats(-3, 3)] * 3, st.floats(0, 3)), min_size=1, max_size=5),
    st.booleans(),
)
def test_a_fixed_norm_is_the_norm(channels: list[tuple[float, ...]], statistics: bool) -> None:
    kinds = ("weight", "bias", "running_mean", "running_var")[: 4 if statistics else 2]
    columns = dict(zip(("weight", "bias", "running_mean", "running_var"), zip(*channels, strict=True), strict=True))
    tensors = {f"stem.conv1.norm.{kind}": torch.tensor(columns[kind]) for kind in kinds}
    tensors["stem.conv1.weight"] = torch.ones(len(channels), 3, 3, 3)
    fixed = fixed_norms(tensors)
    assert fixed.keys() == {"stem.conv1.weight", "stem.conv1.scale", "stem.conv1.shift"}
    for i, (weight, bias, mean, var) in enumerate(channels):
        for x in (-1.0, 0.0, 2.0):
            y = weight * (x - mean) / (var + 1e-5) ** 0.5 + bias if statistics else weight * x + bias
            ours = fixed["stem.conv1.scale"][i].item() * x + fixed["stem.conv1.shift"][i].item()
            assert ours == pytest.approx(y, rel=1e-4, abs=1e-3)


def kept(name: str, *, neck: bool, pixels: str, statistics: bool = False, architecture: str = "r50-ws") -> dict:
    tensors = random_weights(architecture, statistics=statistics, neck=neck)
    store(name, Weights(architecture, PREPROCESS[pixels], tensors), Origin("a test", "none", "00"))
    return tensors


@pytest.mark.parametrize("statistics", [False, True])
def test_a_stored_name_loads_everything_without_a_warning(narrow: Path, statistics: bool) -> None:
    tensors = kept("mine", neck=True, pixels="caffe", statistics=statistics)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        built = ResNetWs(weights="mine").build()
    state = built.state_dict()
    assert all(torch.equal(state[name], value) for name, value in fixed_norms(tensors).items())
    assert built.preprocess == PREPROCESS["caffe"]


def test_a_trunk_alone_loads_with_a_warning_and_a_random_neck(narrow: Path) -> None:
    kept("trunk", neck=False, pixels="torchvision")
    with pytest.warns(UserWarning, match="trunk: holds the trunk alone") as said:
        built = ResNetWs(weights="trunk").build()
    assert len(said) == 1 and "\n" not in str(said[0].message)
    assert 0.008 < built.fc6.weight.std() < 0.012 and not built.fc7.bias.any()


@pytest.mark.parametrize(("depth", "scheme", "ending"), [(50, "caffe2", ".pkl"), (101, "detectron2", ".pth")])
def test_a_users_file_is_read_as_it_is(narrow: Path, depth: int, scheme: str, ending: str) -> None:
    ours = random_weights(f"r{depth}-ws", neck=True)
    path = save(narrow / f"file{ending}", foreign(scheme, ours))
    preprocess = None if scheme == "caffe2" else "torchvision"
    built = ResNetWs(depth=depth, weights=str(path), preprocess=preprocess).build()  # type: ignore[arg-type]
    assert torch.equal(built.fc6.weight, ours["fc6.weight"])
    assert built.preprocess == PREPROCESS[preprocess or "caffe"]


MISTAKES = {
    "no weights": (ResNetWs(depth=101), ["backbone.weights", "weights convert FILE --name r101-ws"]),
    "no such name": (ResNetWs(weights="nowhere"), ["nowhere: no weights of this name"]),
    "no such file": (ResNetWs(weights="gone.pth"), ["gone.pth: no such file"]),
    "another depth": (ResNetWs(weights="deep"), ["these are weights of r101-ws", "set backbone.depth = 101"]),
    "other pixels": (ResNetWs(weights="mine", preprocess="torchvision"), ["backbone.preprocess = torchvision", "mine"]),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_one_line(narrow: Path, case: str) -> None:
    settings, words = MISTAKES[case]
    kept("mine", neck=True, pixels="caffe")
    kept("deep", neck=True, pixels="caffe", architecture="r101-ws")
    with pytest.raises(UserError) as error:
        settings.build()
    assert "\n" not in str(error.value) and all(word in str(error.value) for word in words)


def test_weights_of_another_network_are_refused() -> None:
    with pytest.raises(UserError, match=r"mine: these are weights of lite0, not of r50-ws$"):
        load_resnet_ws(small(), Weights("lite0", PREPROCESS["lite0"], {}), "mine")


def test_a_tensor_short_is_refused_by_name(narrow: Path) -> None:
    tensors = random_weights("r50-ws", neck=True)
    del tensors["res4.5.conv3.weight"]
    with pytest.raises(UserError, match=r"mine: lacks res4\.5\.conv3\.weight"):
        load_resnet_ws(small(), Weights("r50-ws", PREPROCESS["caffe"], tensors), "mine")


def test_the_pixels_travel_among_the_weights_to_a_machine_that_has_neither_name_nor_file(narrow: Path) -> None:
    kept("mine", neck=True, pixels="caffe")
    settings = ResNetWs(weights="mine")
    save_file(settings.build().state_dict(), narrow / "checkpoint.safetensors")
    shutil.rmtree(narrow / "home")
    loaded = settings.build(pretrained=False)
    assert loaded.preprocess == PREPROCESS["torchvision"]  # of no weights yet
    load_into(loaded, read_state_dict(narrow / "checkpoint.safetensors"), "checkpoint")
    assert loaded.preprocess == PREPROCESS["caffe"]


def test_pixels_come_back_to_the_last_digit() -> None:
    assert [Preprocess.from_tensor(known.to_tensor()) for known in PREPROCESS.values()] == list(PREPROCESS.values())
    assert small(preprocess="caffe").preprocess.order == "bgr"
