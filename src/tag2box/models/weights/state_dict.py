"""State dicts of pretrained networks: read files safely, check names and shapes, load into a module.

Canonical names are torchvision's for VGG16, those of the pip package for lite0 and, for R50-WS and R101-WS (Shen et
al., 2020), ``stem.conv1 .. conv3``, ``resS.B.conv1 .. conv3`` and ``resS.B.shortcut`` (stage S is 2 .. 5, block B
counts from 0), each with ``.weight`` and ``.norm``; ``fc6`` and ``fc7`` if the file has a neck. A ``norm`` is a batch
norm (``weight bias running_mean running_var``, eps 1e-5), or ``weight`` and ``bias`` alone if the statistics were
merged into these.
"""

import hashlib
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tag2box.errors import UserError
from tag2box.models.backbone import Preprocess
from tag2box.safe_pickle import read_pickle

Shapes: TypeAlias = dict[str, tuple[int, ...]]

VGG_BLOCKS = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))  # channels and convolutions of conv1 .. conv5
VGG_NECK = 4096  # of fc6 and fc7
# (kernel, stride of the first block, channels out, blocks); every expansion is 6 but the first, which is 1
LITE0_STAGES = (
    (3, 1, 16, 1), (3, 2, 24, 2), (5, 2, 40, 2), (3, 2, 80, 3), (5, 1, 112, 3), (5, 2, 192, 4), (3, 1, 320, 1),
)  # fmt: skip
LITE0_STEM, LITE0_HEAD = 32, 1280
WS_WIDTH, WS_NECK = 64, (2048, 4096)  # channels of the stem; sizes of fc6 and fc7
WS_BLOCKS = {"r50-ws": (3, 4, 6, 3), "r101-ws": (3, 4, 23, 3)}  # of res2 .. res5
ARCHITECTURES = ("vgg16", "vgg16-conv", "lite0", *WS_BLOCKS)

PREPROCESS = {
    "torchvision": Preprocess(order="rgb", scale=1 / 255, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)),
    "caffe": Preprocess(order="bgr", scale=1.0, mean=(102.9801, 115.9465, 122.7717), std=(1.0, 1.0, 1.0)),
    "lite0": Preprocess(order="rgb", scale=1 / 255, mean=(0.498, 0.498, 0.498), std=(0.502, 0.502, 0.502)),
}
PIXELS = {
    "torchvision": "RGB 0 .. 1, less a mean, divided by a deviation",
    "caffe": "BGR 0 .. 255, less a mean",
    "lite0": "RGB 0 .. 1, less 0.498, divided by 0.502",
}

_STATE_DICT = "expected a .safetensors file, or a .pth/.pt state dict saved by torch.save"
_ANY = "expected .safetensors, a .pth/.pt state dict, or a .pkl of numpy arrays"
_PICKLES = (".pkl", ".pickle", ".ckpt")
_WRAPPERS = ("state_dict", "model", "blobs")  # keys under which training programs store the tensors


# ---------------------------------------------------------------- files


@dataclass(frozen=True, slots=True)
class WeightFile:
    """The tensors of a weight file, under the names in the file."""

    path: Path
    sha256: str
    tensors: dict[str, Tensor]
    author: str  # ``__author__`` of a Detectron2 pickle, else ""


def digest(path: Path) -> str:
    """The sha256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors or .pth file by name. Never unpickles objects: .pth is read as tensors only."""
    content = _content(path, _STATE_DICT, pickles=False)
    if isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping):
        content = content["state_dict"]
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise UserError(f"{path}: holds something other than named tensors; {_STATE_DICT}")
    return {str(name): value for name, value in content.items()}


def read_weight_file(path: Path) -> WeightFile:
    """The tensors of a weight file of any supported format, pickles of numpy arrays too; other entries are skipped."""
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
        with warnings.catch_warnings():  # torch warns about pickles that it then refuses
            warnings.simplefilter("ignore")
            content: object = torch.load(path, map_location="cpu", weights_only=True)
    except UserError:
        raise
    except Exception as error:  # torch's reader fails on damaged files in ways too many to list
        reason = (str(error).splitlines() or [type(error).__name__])[0][:120]
        raise UserError(f"{path}: not readable as weights ({reason}); {expected}") from None
    return content


def _is_zip(path: Path) -> bool:
    """Whether torch.save wrote the file, whatever its suffix."""
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
            native = value.astype(value.dtype.newbyteorder("="))  # torch supports the native byte order only
            yield name, torch.from_numpy(np.ascontiguousarray(native)).reshape(value.shape)


def load_into(module: nn.Module, state: Mapping[str, Tensor], where: str) -> None:
    """Copy ``state`` into ``module``; a missing key, an extra key or another shape is an error that names ``where``."""
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


# ---------------------------------------------------------------- architectures


@dataclass(frozen=True, slots=True)
class Weights:
    """Checked tensors of an architecture under canonical names, and the preprocessing they were trained with."""

    architecture: str
    preprocess: Preprocess
    tensors: dict[str, Tensor]


def pixels_name(preprocess: Preprocess) -> str:
    """The name of a preprocessing in ``PREPROCESS``, or its numbers if it has none."""
    return next((name for name, known in PREPROCESS.items() if known == preprocess), str(preprocess))


def shapes_of(architecture: str, names: Collection[str]) -> Shapes:
    """Shapes of all tensors of an architecture; ``names`` of a file decide which optional ones are included."""
    if architecture == "lite0":
        return lite0_shapes()
    if architecture in WS_BLOCKS:
        statistics = any(name.endswith(".running_mean") for name in names)
        neck = any(name.startswith(("fc6.", "fc7.")) for name in names)
        return resnet_ws_shapes(WS_BLOCKS[architecture], statistics=statistics, neck=neck)
    return vgg16_shapes(neck=architecture == "vgg16")


def vgg16_numbers() -> dict[tuple[int, int], int]:
    """Torchvision's index of each convolution, by block and position in it: conv3_2 is (3, 2)."""
    places = [(block, i) for block, (_, count) in enumerate(VGG_BLOCKS, start=1) for i in range(1, count + 1)]
    # each convolution is followed by a ReLU, each block by a pool
    return {(block, i): 2 * order + block - 1 for order, (block, i) in enumerate(places)}


def vgg16_shapes(*, neck: bool) -> Shapes:
    """The 13 convolutions, and fc6 and fc7 with a ``neck``."""
    shapes: Shapes = {}
    inputs = 3
    for (block, _), number in vgg16_numbers().items():
        outputs = VGG_BLOCKS[block - 1][0]
        shapes |= _layer(f"features.{number}", outputs, inputs, 3, 3)
        inputs = outputs
    if neck:
        shapes |= _layer("classifier.0", VGG_NECK, inputs * 49) | _layer("classifier.3", VGG_NECK, VGG_NECK)
    return shapes


def lite0_shapes() -> Shapes:
    """Convolutions and batch norms; not the ImageNet classifier."""
    shapes = _normed("_conv_stem", "_bn0", LITE0_STEM, 3, 3)
    widths = [LITE0_STEM] + [outputs for _, _, outputs, count in LITE0_STAGES for _ in range(count)]
    kernels = [kernel for kernel, _, _, count in LITE0_STAGES for _ in range(count)]
    for index, ((inputs, outputs), kernel) in enumerate(zip(pairwise(widths), kernels, strict=True)):
        block, inner = f"_blocks.{index}", inputs if index == 0 else 6 * inputs
        if index:
            shapes |= _normed(f"{block}._expand_conv", f"{block}._bn0", inner, inputs, 1)
        shapes |= _normed(f"{block}._depthwise_conv", f"{block}._bn1", inner, 1, kernel)
        shapes |= _normed(f"{block}._project_conv", f"{block}._bn2", outputs, inner, 1)
    return shapes | _normed("_conv_head", "_bn1", LITE0_HEAD, widths[-1], 1)


def resnet_ws_shapes(blocks: tuple[int, ...], *, statistics: bool, neck: bool) -> Shapes:
    """R-WS with ``blocks`` bottlenecks in res2 .. res5; its stem is three 3 x 3 convolutions."""
    norm = "norm" if statistics else "affine"
    shapes: Shapes = {}
    for i in (1, 2, 3):
        shapes |= _ws_conv(f"stem.conv{i}", WS_WIDTH, 3 if i == 1 else WS_WIDTH, 3, norm)
    inputs = WS_WIDTH
    for stage, count in enumerate(blocks, start=2):
        inner = WS_WIDTH * 2 ** (stage - 2)
        outputs = 4 * inner
        for block in range(count):
            at = f"res{stage}.{block}"
            shapes |= _ws_conv(f"{at}.conv1", inner, inputs, 1, norm) | _ws_conv(f"{at}.conv2", inner, inner, 3, norm)
            shapes |= _ws_conv(f"{at}.conv3", outputs, inner, 1, norm)
            shapes |= _ws_conv(f"{at}.shortcut", outputs, inputs, 1, norm) if block == 0 else {}
            inputs = outputs
    fc6, fc7 = WS_NECK
    return shapes | (_layer("fc6", fc6, inputs * 49) | _layer("fc7", fc7, fc6) if neck else {})


def _layer(name: str, outputs: int, *rest: int) -> Shapes:
    return {f"{name}.weight": (outputs, *rest), f"{name}.bias": (outputs,)}


def _normed(conv: str, norm: str, outputs: int, inputs: int, kernel: int) -> Shapes:
    statistics = ("weight", "bias", "running_mean", "running_var")
    return {f"{conv}.weight": (outputs, inputs, kernel, kernel)} | {f"{norm}.{s}": (outputs,) for s in statistics}


def _ws_conv(name: str, outputs: int, inputs: int, kernel: int, norm: str) -> Shapes:
    shapes = _normed(name, f"{name}.norm", outputs, inputs, kernel)
    return {key: shape for key, shape in shapes.items() if norm == "norm" or ".running_" not in key}


def checked(tensors: Mapping[str, Tensor], architecture: str, where: str) -> dict[str, Tensor]:
    """The tensors in single precision; an error names the first that is missing, unknown, misshapen or not finite.

    Args:
        where: the file, for the error.
    """
    shapes = shapes_of(architecture, tensors)
    missing = [name for name in shapes if name not in tensors]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(f"{where}: not {architecture}: it lacks {missing[0]} {shapes[missing[0]]}{more}")
    for name, value in tensors.items():
        problem = _problem(name, value, shapes.get(name))
        if problem:
            raise UserError(f"{where}: {name} {problem}, so these are no weights of {architecture}")
    return _apart({name: _single(tensors[name], f"{where}: {name}") for name in shapes})


def _problem(name: str, value: Tensor, shape: tuple[int, ...] | None) -> str:
    if shape is None:
        return f"{tuple(value.shape)} has no place in the network"
    if tuple(value.shape) != shape:
        return f"is {tuple(value.shape)}, expected {shape}"
    return "" if value.is_floating_point() else f"holds {str(value.dtype).removeprefix('torch.')} numbers"


def _single(value: Tensor, where: str) -> Tensor:
    single = value.detach().to(torch.float32).contiguous()
    if not torch.isfinite(single).all():
        raise UserError(f"{where} holds NaN or infinity; the file is damaged, or that part of it was never trained")
    return single


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors without shared memory: safetensors stores no views."""
    apart, taken = {}, set()
    for name, value in tensors.items():
        memory = value.untyped_storage().data_ptr()
        apart[name] = value.clone() if memory in taken else value
        taken.add(memory)
    return apart
