"""The mean over a map's cells of ReLU6(factor * x + bias), in one pass over memory, for copies that share x.

A 1 x 1 convolution commutes with a factor of each cell. So DropBlock, masks and noise, which multiply cells, need no
convolution of their own: x = W f is computed once, and every copy is this function of it with other factors.

On a CPU large jobs go to the compiled kernel in ``cells_cpu``; plain torch does the rest, on any device.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

_WORTH_COMPILING = 1 << 20  # fewer values are there before a compiled kernel is loaded


def cell_mean(
    x: Float[Tensor, "R n F"], factors: Float[Tensor, "R n"], bias: Float[Tensor, " F"]
) -> Float[Tensor, "R F"]:
    """The mean over n cells of ReLU6(factor * x + bias)."""
    if not _is_compiled(x):
        return cell_mean_with_torch(x, factors, bias)
    result: Tensor = _CellMean.apply(x, factors, bias)  # type: ignore[no-untyped-call]
    return result


def cell_mean_with_torch(
    x: Float[Tensor, "R n F"], factors: Float[Tensor, "R n"], bias: Float[Tensor, " F"]
) -> Float[Tensor, "R F"]:
    """The same on any device, in any precision."""
    return functional.relu6(x * factors[:, :, None].to(x.dtype) + bias).mean(dim=1)


class _CellMean(torch.autograd.Function):
    """Only x, which all copies share, is kept for the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factors: Tensor, bias: Tensor) -> Tensor:
        from tag2box.maths import cells_cpu

        ctx.save_for_backward(x, factors, bias)
        return cells_cpu.forward(x, factors, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        from tag2box.maths import cells_cpu

        x, factors, bias = ctx.saved_tensors
        wanted, grad = ctx.needs_input_grad, grads[0]
        of_x, of_bias = cells_cpu.backward(x, factors, bias, grad) if wanted[0] or wanted[2] else (None, None)
        return of_x, cells_cpu.factor_gradient(x, factors, bias, grad) if wanted[1] else None, of_bias


def _is_compiled(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype == torch.float32 and x.numel() >= _WORTH_COMPILING
