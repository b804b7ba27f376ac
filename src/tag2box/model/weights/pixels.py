"""A preprocessing as a buffer among the weights: whatever loads these, loads it."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from tag2box.model.backbone import Preprocess

PIXELS_BUFFER = "pixels"
"""The name of that buffer."""


def to_numbers(preprocess: Preprocess) -> Float[Tensor, " 8"]:
    """A preprocessing as eight numbers, in double precision: they come back as they were."""
    numbers = [float(preprocess.order == "bgr"), preprocess.scale, *preprocess.mean, *preprocess.std]
    return torch.tensor(numbers, dtype=torch.float64, device="cpu")


def from_numbers(numbers: Float[Tensor, " 8"]) -> Preprocess:
    """The preprocessing that eight numbers stand for."""
    bgr, scale, *channels = numbers.tolist()
    mean, std = channels[:3], channels[3:]
    order: Literal["rgb", "bgr"] = "bgr" if bgr else "rgb"
    return Preprocess(order=order, scale=scale, mean=(mean[0], mean[1], mean[2]), std=(std[0], std[1], std[2]))
