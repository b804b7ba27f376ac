"""State dicts of pretrained networks: read files safely, check names and shapes, load into a module.

Canonical names are torchvision's for VGG16, those of the pip package for lite0 and, for R50-WS and R101-WS (Shen et
al., 2020), ``stem.conv1 .. conv3``, ``resS.B.conv1 .. conv3`` and ``resS.B.shortcut`` (stage S is 2 .. 5, block B
counts from 0), each with ``.weight`` and ``.norm``; ``fc6`` and ``fc7`` if the file has a neck. A ``norm`` is a batch
norm (``weight bias running_mean running_var``, eps 1e-5), or ``weight`` and ``bias`` alone if the statistics were
merged into these.
"""

import warnings
import zipfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tag2box import storage
from tag2box.errors import UserError, printable
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
TINY_VIT_WIDTHS = (64, 128, 160, 320)  # of the stages of MobileSAM's image encoder
TINY_VIT_DEPTHS, TINY_VIT_HEADS, TINY_VIT_WINDOWS = (2, 2, 6, 2), (2, 4, 5, 10), (7, 7, 14, 7)  # the first: no windows
TINY_VIT_EXPANSION = 4
SAM_CHANNELS, SAM_HIDDEN, SAM_MASKS = 256, 2048, 4
ARCHITECTURES = ("vgg16", "vgg16-conv", "lite0", *WS_BLOCKS, "mobile-sam")

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
_MAX_BYTES = 8 << 30  # the largest file has 1 GB, a training checkpoint of it three
_MAX_DEPTH, _MAX_ENTRIES = 16, 100_000  # of dictionaries in each other; these may also share or contain each other


# ---------------------------------------------------------------- files


@dataclass(frozen=True, slots=True)
class WeightFile:
    """The tensors of a weight file, under the names in the file."""

    path: Path
    sha256: str
    tensors: dict[str, Tensor]
    author: str  # ``__author__`` of a Detectron2 pickle, else ""


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors or .pth file by name. Never unpickles objects: .pth is read as tensors only."""
    content = _content(path, _STATE_DICT, pickles=False)
    if isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping):
        content = content["state_dict"]
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise UserError(f"{path}: holds something other than named tensors; {_STATE_DICT}")
    return dict(_Entries(path, _STATE_DICT).of(content))


def read_weight_file(path: Path) -> WeightFile:
    """The tensors of a weight file of any supported format, pickles of numpy arrays too; other entries are skipped."""
    content = _content(path, _ANY, pickles=True)
    author = content.get("__author__") if isinstance(content, Mapping) else None
    for _ in range(_MAX_DEPTH):
        table = content if isinstance(content, Mapping) else {}
        content = next((table[key] for key in _WRAPPERS if isinstance(table.get(key), Mapping)), content)
    tensors = dict(_Entries(path, _ANY).of(content)) if isinstance(content, Mapping) else {}
    if not tensors:
        raise UserError(f"{path}: holds no named tensors; {_ANY}")
    return WeightFile(path, storage.file_digest(path), tensors, author if isinstance(author, str) else "")


def _content(path: Path, expected: str, *, pickles: bool) -> object:
    if not path.is_file():
        raise UserError(f"{path}: no such file; {expected}")
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise UserError(f"{path}: larger than {_MAX_BYTES >> 30} GB; {expected}")
        if path.suffix == ".safetensors":
            return load_file(path)
        if pickles and path.suffix in _PICKLES and not _is_zip(path):
            return read_pickle(path, "a pickle of numpy arrays by name")
        if _is_zip(path):
            _check_zip(path, expected)
        with warnings.catch_warnings():  # torch warns about pickles that it then refuses
            warnings.simplefilter("ignore")
            content: object = torch.load(path, map_location="cpu", weights_only=True)
    except UserError:
        raise
    except Exception as error:  # torch's reader fails on damaged files in ways too many to list
        reason = printable((str(error).splitlines() or [type(error).__name__])[0][:120])
        if reason.startswith("Weights only load failed"):  # torch then explains how to execute it
            reason = "damaged, or more than tensors and plain values; nothing was run"
        raise UserError(f"{path}: not readable as weights ({reason}); {expected}") from None
    return content


def _is_zip(path: Path) -> bool:
    """Whether torch.save wrote the file, whatever its suffix."""
    with path.open("rb") as file:
        return file.read(2) == b"PK"


def _check_zip(path: Path, expected: str) -> None:
    """Refuse an archive that expands: torch.save compresses nothing."""
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
    if any(m.compress_type for m in members) or sum(m.file_size for m in members) > path.stat().st_size:
        raise UserError(f"{path}: an archive that expands, which torch.save never writes; {expected}")


@dataclass(slots=True)
class _Entries:
    """Walks the dictionaries of a file, of which a hostile one may contain itself, or billions by sharing."""

    path: Path
    expected: str
    count: int = 0

    def of(self, table: Mapping[object, object], prefix: str = "", depth: int = 1) -> Iterator[tuple[str, Tensor]]:
        """The tensors of a dictionary and those in it, by their joined names."""
        for key, value in table.items():
            self.count += 1
            if depth > _MAX_DEPTH or self.count > _MAX_ENTRIES:
                why = f"nest more than {_MAX_DEPTH} deep" if depth > _MAX_DEPTH else f"hold over {_MAX_ENTRIES} entries"
                raise UserError(f"{self.path}: its dictionaries {why}, or contain themselves; {self.expected}")
            tensor = _tensor(value)
            if tensor is not None:
                yield self.name(prefix, key), tensor
            elif isinstance(value, Mapping):
                yield from self.of(value, f"{self.name(prefix, key)}.", depth + 1)

    def name(self, prefix: str, key: object) -> str:
        """The name of an entry, which must be fit to be printed."""
        text = f"{prefix}{key}" if isinstance(key, str) or (type(key) is int and abs(key) < 1 << 63) else ""
        if not text or printable(text) != text:
            why = printable(text, 60) or f"a {type(key).__name__}"
            raise UserError(f"{self.path}: a tensor is named {why}, not by plain text; {self.expected}")
        return text


def _tensor(value: object) -> Tensor | None:
    """A value of a file as a tensor, if it is one, or an array of numbers."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        native = value.astype(value.dtype.newbyteorder("="))  # torch supports the native byte order only
        return torch.from_numpy(np.ascontiguousarray(native)).reshape(value.shape)
    return None


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
    if architecture in {"lite0", "mobile-sam"}:
        return lite0_shapes() if architecture == "lite0" else tiny_vit_shapes() | sam_shapes()
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


def tiny_vit_shapes() -> Shapes:
    """MobileSAM's image encoder without the ImageNet classifier."""
    at, widths, channels = "image_encoder", TINY_VIT_WIDTHS, SAM_CHANNELS
    shapes = _folded(f"{at}.patch_embed.seq.0", widths[0] // 2, 3, 3)
    shapes |= _folded(f"{at}.patch_embed.seq.2", widths[0], widths[0] // 2, 3)
    for stage, width in enumerate(widths):
        for block in range(TINY_VIT_DEPTHS[stage]):
            shapes |= _tiny_vit_block(f"{at}.layers.{stage}.blocks.{block}", stage, width)
        if stage + 1 < len(widths):
            shapes |= _bottleneck(f"{at}.layers.{stage}.downsample", width, widths[stage + 1], widths[stage + 1])
    shapes |= {f"{at}.neck.0.weight": (channels, widths[-1], 1, 1), f"{at}.neck.2.weight": (channels, channels, 3, 3)}
    return shapes | _layer(f"{at}.neck.1", channels) | _layer(f"{at}.neck.3", channels)


def _tiny_vit_block(at: str, stage: int, width: int) -> Shapes:
    inner = TINY_VIT_EXPANSION * width
    if stage == 0:
        return _bottleneck(at, width, width, inner)
    shapes: Shapes = {f"{at}.attn.attention_biases": (TINY_VIT_HEADS[stage], TINY_VIT_WINDOWS[stage] ** 2)}
    shapes |= _layer(f"{at}.attn.norm", width) | _layer(f"{at}.mlp.norm", width)
    shapes |= _layer(f"{at}.attn.qkv", 3 * width, width) | _layer(f"{at}.attn.proj", width, width)
    shapes |= _layer(f"{at}.mlp.fc1", inner, width) | _layer(f"{at}.mlp.fc2", width, inner)
    return shapes | _folded(f"{at}.local_conv", width, 1, 3)


def _bottleneck(at: str, inputs: int, outputs: int, inner: int) -> Shapes:
    middle = _folded(f"{at}.conv2", inner, 1, 3)
    return _folded(f"{at}.conv1", inner, inputs, 1) | middle | _folded(f"{at}.conv3", outputs, inner, 1)


def _folded(at: str, outputs: int, inputs: int, kernel: int) -> Shapes:
    return _normed(f"{at}.c", f"{at}.bn", outputs, inputs, kernel)


def sam_shapes() -> Shapes:
    """SAM's prompt encoder, without its layers for masks as prompts, and its mask decoder."""
    width, at = SAM_CHANNELS, "mask_decoder"
    learnt = [*(f"point_embeddings.{kind}" for kind in range(4)), "not_a_point_embed", "no_mask_embed"]
    shapes: Shapes = {f"prompt_encoder.{name}.weight": (1, width) for name in learnt}
    shapes["prompt_encoder.pe_layer.positional_encoding_gaussian_matrix"] = (2, width // 2)
    layers: Shapes = {}  # those with a bias
    for layer in ("layers.0", "layers.1"):
        layers |= _attention(f"{layer}.self_attn", width, width)
        layers |= _attention(f"{layer}.cross_attn_token_to_image", width, width // 2)
        layers |= _attention(f"{layer}.cross_attn_image_to_token", width, width // 2)
        layers |= {f"{layer}.mlp.lin1": (SAM_HIDDEN, width), f"{layer}.mlp.lin2": (width, SAM_HIDDEN)}
        layers |= {f"{layer}.norm{number}": (width,) for number in range(1, 5)}
    layers |= _attention("final_attn_token_to_image", width, width // 2) | {"norm_final_attn": (width,)}
    layers = {f"transformer.{name}": shape for name, shape in layers.items()} | {"output_upscaling.1": (width // 4,)}
    stacks = {f"output_hypernetworks_mlps.{mask}": width // 8 for mask in range(SAM_MASKS)}
    for stack, outputs in (stacks | {"iou_prediction_head": SAM_MASKS}).items():
        layers |= {f"{stack}.layers.{row}": (outputs if row == 2 else width, width) for row in range(3)}
    for name, shape in layers.items():
        shapes |= _layer(f"{at}.{name}", *shape)
    shapes |= {f"{at}.iou_token.weight": (1, width), f"{at}.mask_tokens.weight": (SAM_MASKS, width)}
    for name, inputs, outputs in (("0", width, width // 4), ("3", width // 4, width // 8)):
        shapes[f"{at}.output_upscaling.{name}.weight"] = (inputs, outputs, 2, 2)
        shapes[f"{at}.output_upscaling.{name}.bias"] = (outputs,)
    return shapes


def _attention(at: str, width: int, inner: int) -> Shapes:
    shapes: Shapes = {f"{at}.{name}_proj": (inner, width) for name in "qkv"}
    return shapes | {f"{at}.out_proj": (width, inner)}


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
