"""Optimisers and the learning-rate plan: warm-up, steps, bias rules, momentum correction (spec/method.md, step 11)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, Protocol

import torch
from pydantic import Field
from torch import nn
from torch.optim import Optimizer

from tag2box.models.drop_block import MaskNet


class OptimizerSettings(Protocol):
    """Settings of an optimizer."""

    @property
    def lr(self) -> float:
        """The learning rate that the schedule scales."""
        ...

    def build(self, module: nn.Module) -> Optimizer:
        """The optimizer over every parameter with ``requires_grad``."""
        ...


@dataclass(frozen=True, kw_only=True)
class Sgd:
    """SGD as the paper runs it."""

    kind: Literal["sgd"] = "sgd"
    lr: Annotated[float, Field(gt=0)] = 0.01
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    weight_decay: Annotated[float, Field(ge=0)] = 1e-4
    bias_lr: Annotated[float, Field(gt=0)] = 2.0
    """Biases learn this much faster, and are never decayed."""
    rescale_momentum: bool = True
    """Scale the momentum buffer with the learning rate when that steps."""

    def build(self, module: nn.Module) -> Optimizer:
        """The optimiser over every parameter that learns."""
        return torch.optim.SGD(_groups(module, self.weight_decay, self.bias_lr), lr=self.lr, momentum=self.momentum)


@dataclass(frozen=True, kw_only=True)
class Adam:
    """Adam, kinder to small data on frozen features."""

    kind: Literal["adam"] = "adam"
    lr: Annotated[float, Field(gt=0)] = 3e-4
    weight_decay: Annotated[float, Field(ge=0)] = 1e-4
    bias_lr: Annotated[float, Field(gt=0)] = 2.0
    """Biases learn this much faster, and are never decayed."""

    def build(self, module: nn.Module) -> Optimizer:
        """The optimiser over every parameter that learns."""
        return torch.optim.AdamW(_groups(module, self.weight_decay, self.bias_lr), lr=self.lr)


def _groups(module: nn.Module, weight_decay: float, bias_lr: float) -> list[dict[str, object]]:
    """Two groups: weights with decay, biases faster and without. ``scale`` multiplies the planned learning rate."""
    learning = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    weights = [p for name, p in learning if not name.endswith("bias")]
    biases = [p for name, p in learning if name.endswith("bias")]
    return [
        {"params": weights, "weight_decay": weight_decay, "scale": 1.0},
        {"params": biases, "weight_decay": 0.0, "scale": bias_lr},
    ]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How the learning rate moves over a run."""

    warmup: Annotated[int, Field(ge=0)] = 200
    """Iterations of linear warm-up."""
    warmup_from: Annotated[float, Field(gt=0, le=1)] = 1 / 3
    """Share of the learning rate at iteration 0."""
    steps: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = (2 / 3, 0.89)
    """Where the learning rate is cut, as shares of the run."""
    gamma: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """What it is cut by."""

    def cuts(self, iteration: int, iterations: int) -> int:
        """How many steps lie behind ``iteration``."""
        return sum(iteration >= round(share * iterations) for share in self.steps)

    def factor(self, iteration: int, iterations: int) -> float:
        """What the base learning rate is multiplied with at ``iteration``."""
        cut = self.gamma ** self.cuts(iteration, iterations)
        if iteration >= self.warmup:
            return cut
        return cut * (self.warmup_from + (1 - self.warmup_from) * iteration / self.warmup)


@dataclass(frozen=True)
class AdversaryOptimizer:
    """A mask net and the optimiser by which it learns against the detector."""

    net: MaskNet
    optimizer: Optimizer

    @classmethod
    def of(cls, net: MaskNet) -> AdversaryOptimizer:
        """SGD with the settings of the net."""
        settings = net.settings
        return cls(net, Sgd(lr=settings.lr, weight_decay=settings.weight_decay, bias_lr=1.0).build(net))

    def learn(self, cuts: int) -> None:
        """A step down the gradients it was left; ``cuts`` is how often the detector's learning rate was cut so far."""
        set_lr(self.optimizer, self.net.settings.lr * self.net.settings.lr_growth**cuts)
        self.optimizer.step()


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Set the planned learning rate; bias groups run at their multiple of it."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["scale"]


def scale_momentum(optimizer: Optimizer, ratio: float) -> None:
    """Multiply every momentum buffer, so that old gradients weigh as much as new ones after a step of the rate."""
    for state in optimizer.state.values():
        buffer = state.get("momentum_buffer")
        if buffer is not None:
            buffer.mul_(ratio)
