"""Precision of numbers."""

from __future__ import annotations

import torch
from torch import Tensor


def at_least_single(x: Tensor) -> Tensor:
    """Half-precision numbers in single precision, others as they are: for sums, softmaxes and logarithms."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
