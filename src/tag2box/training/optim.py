"""Optimizers: SGD as in the paper, Adam for small data, and the optimizer of the adversary."""

from dataclasses import dataclass
from typing import Annotated, Literal, Protocol, Self

import torch
from pydantic import Field
from torch import nn
from torch.optim import Optimizer

from tag2box.models.adversary import MaskNet


class OptimizerSettings(Protocol):
    """Settings of an optimizer."""

    @property
    def lr(self) -> float:
        """The learning rate that the schedule scales."""
        ...

    def build(self, module: nn.Module) -> Optimizer:
        """The optimizer over every trainable parameter; a group's ``scale`` multiplies its learning rate."""
        ...


@dataclass(frozen=True, kw_only=True)
class Sgd:
    """SGD with momentum, as in the paper."""

    kind: Literal["sgd"] = "sgd"
    lr: Annotated[float, Field(gt=0, le=1000)] = 0.01
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    weight_decay: Annotated[float, Field(ge=0, le=1000)] = 1e-4
    bias_lr: Annotated[float, Field(gt=0, le=1000)] = 2.0
    """Learning rate of biases relative to weights; biases are never decayed."""
    rescale_momentum: bool = True
    """Scale the momentum buffer with the learning rate when that steps."""

    def build(self, module: nn.Module) -> Optimizer:
        """The optimizer over every trainable parameter."""
        return torch.optim.SGD(_groups(module, self.weight_decay, self.bias_lr), lr=self.lr, momentum=self.momentum)


@dataclass(frozen=True, kw_only=True)
class Adam:
    """AdamW, better suited to small data on frozen features."""

    kind: Literal["adam"] = "adam"
    lr: Annotated[float, Field(gt=0, le=1000)] = 3e-4
    weight_decay: Annotated[float, Field(ge=0, le=1000)] = 1e-4
    bias_lr: Annotated[float, Field(gt=0, le=1000)] = 2.0
    """Learning rate of biases relative to weights; biases are never decayed."""

    def build(self, module: nn.Module) -> Optimizer:
        """The optimizer over every trainable parameter."""
        return torch.optim.AdamW(_groups(module, self.weight_decay, self.bias_lr), lr=self.lr)


def _groups(module: nn.Module, weight_decay: float, bias_lr: float) -> list[dict[str, object]]:
    """Two parameter groups: weights with decay, biases faster and without."""
    trainable = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    weights = [p for name, p in trainable if not name.endswith("bias")]
    biases = [p for name, p in trainable if name.endswith("bias")]
    return [
        {"params": weights, "weight_decay": weight_decay, "scale": 1.0},
        {"params": biases, "weight_decay": 0.0, "scale": bias_lr},
    ]


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Set the scheduled learning rate; groups with a ``scale`` get that multiple of it."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("scale", 1.0)


def scale_momentum(optimizer: Optimizer, ratio: float) -> None:
    """Multiply every momentum buffer, so that old gradients weigh as much as new ones after a step of the rate."""
    for state in optimizer.state.values():
        buffer = state.get("momentum_buffer")
        if buffer is not None:
            buffer.mul_(ratio)


@dataclass(frozen=True)
class AdversaryOptimizer:
    """A mask net and the optimizer that trains it against the detector."""

    net: MaskNet
    optimizer: Optimizer

    @classmethod
    def of(cls, net: MaskNet) -> Self:
        """SGD with the settings of the net."""
        settings = net.settings
        return cls(net, Sgd(lr=settings.lr, weight_decay=settings.weight_decay, bias_lr=1.0).build(net))

    def step(self, cuts: int) -> None:
        """An optimizer step on its gradients; ``cuts`` is how often the detector's learning rate was cut so far."""
        set_lr(self.optimizer, self.net.settings.lr * self.net.settings.lr_growth**cuts)
        self.optimizer.step()
