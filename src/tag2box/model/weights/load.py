"""Tensors into a network, only when every key and shape fits."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from tag2box.errors import UserError


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
