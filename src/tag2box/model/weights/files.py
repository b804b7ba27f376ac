"""Weight files: read without running anything stored in them."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from tag2box.errors import UserError
from tag2box.pickles import read_pickle

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
