"""Precision and length of numbers."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

_SHORTEST = 1e-6  # rows that are no longer have no direction


def at_least_single(x: Tensor) -> Tensor:
    """Half-precision numbers in single precision, others as they are: for sums, softmaxes and logarithms."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def unit_rows(x: Float[Tensor, "R D"]) -> Float[Tensor, "R D"]:
    """Each row over its length. A row of length zero stays, and teaches nothing: which way it should turn is unknown.

    (Divided by a tiny number instead, as is common, its gradient would outweigh all others by orders of magnitude.)
    """
    length = x.norm(dim=1, keepdim=True)
    return torch.where(length > _SHORTEST, x / length.clamp(min=_SHORTEST), torch.zeros_like(x))
