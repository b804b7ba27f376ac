"""CASD: where a network looks within a proposal, and how far looks, or layers, disagree (Huang et al., 2020)."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import relu6

_FLAT = 1e-6  # a map whose values span less shows no preference
_ROWS = 8  # proposals at a time: what is computed on the way then stays in the cache


def attention(responses: Float[Tensor, "*b s s2"]) -> Float[Tensor, "*b s s2"]:
    """A = sigmoid(minmax(mean over channels)), of means over channels; 1/2 everywhere, without gradient, where flat."""
    cells = responses.flatten(-2)
    low, high = cells.min(dim=-1, keepdim=True).values, cells.max(dim=-1, keepdim=True).values  # ties: one cell pays
    span = high - low
    is_flat = span < _FLAT
    spread = (cells - low) / torch.where(is_flat, torch.ones_like(span), span)
    return torch.where(is_flat, torch.zeros_like(spread), spread).sigmoid().view_as(responses)


def upright(maps: Float[Tensor, "v m *l s s2"], mirrored: Bool[Tensor, " v"] | None) -> Float[Tensor, "v m *l s s2"]:
    """Maps of v looks with mirrors undone."""
    if mirrored is None:
        return maps
    is_mirrored = mirrored.view(-1, *[1] * (maps.dim() - 1))
    return torch.where(is_mirrored, maps.flip(-1), maps)


def disagreement(maps: Float[Tensor, "v m s s2"]) -> Float[Tensor, ""]:
    """The sum over v of ||A_v - max over v||^2, mean over proposals and cells; the maximum is a fixed target."""
    if not maps.shape[1]:
        return maps.sum()
    together = maps.detach().amax(dim=0)  # the comprehensive attention
    return (maps - together).square().mean(dim=(1, 2, 3)).sum()


def channel_mean(x: Float[Tensor, "R n F"], bias: Float[Tensor, " F"]) -> Float[Tensor, "R n"]:
    """The mean over channels of ReLU6(x + bias), without a second tensor of the size of x on the way there."""
    result: Tensor = _ChannelMean.apply(x, bias)  # type: ignore[no-untyped-call]
    return result


class _ChannelMean(torch.autograd.Function):
    """Only x, which the neck keeps anyway, is kept for the way back; proposals nobody asks about cost nothing there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, bias)
        return torch.cat([x.new_zeros(0, x.shape[1]), *(relu6(rows + bias).mean(dim=2) for rows in x.split(_ROWS))])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, bias = ctx.saved_tensors
        share = grads[0] / x.shape[2]
        of_x, of_bias = torch.zeros_like(x), torch.zeros_like(bias)
        for rows in share.any(dim=1).nonzero().flatten().split(_ROWS):
            inner = x[rows] + bias
            passed = ((inner > 0) & (inner < 6)).to(x.dtype) * share[rows, :, None]
            of_x[rows] = passed
            of_bias += passed.sum(dim=(0, 1))
        return of_x, of_bias
