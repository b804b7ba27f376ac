"""Scaling of gradients for fp16, whose smallest numbers are too large for many of them.

The scale is a power of two that brings the largest gradient of the network's outputs near 1. It follows from the batch
alone, so a resumed run, or another number of processes, scales alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from torch import Tensor, nn


def scale_of(grads: Sequence[Tensor]) -> float:
    """What to multiply the gradients of the outputs with."""
    largest = max((float(g.abs().max()) for g in grads if g.numel()), default=0.0)
    return 2.0 ** -math.frexp(largest)[1] if 0 < largest < math.inf else 1.0


def unscale(parameters: Iterable[nn.Parameter], scale: float) -> None:
    """Divide what came back, in place; where something overflowed, all gradients go, and the optimiser stands still."""
    if scale == 1:
        return
    learning = [p for p in parameters if p.grad is not None]
    is_finite = all(bool(p.grad.isfinite().all()) for p in learning if p.grad is not None)
    for p in learning:
        p.grad = p.grad / scale if is_finite and p.grad is not None else None
