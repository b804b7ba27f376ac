"""CASD: where a network looks within a proposal, and how far looks, or layers, disagree (Huang et al., 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from jaxtyping import Bool, Float
from pydantic import Field
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import relu6

from tag2box.types import BatchMeta, PseudoLabels, Requirements

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


def upright(maps: Float[Tensor, "v m *l s s2"], flipped: Bool[Tensor, " v"] | None) -> Float[Tensor, "v m *l s s2"]:
    """Maps of v looks with mirrors undone."""
    if flipped is None:
        return maps
    is_mirrored = flipped.view(-1, *[1] * (maps.dim() - 1))
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


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Consistency of attention over looks (``loader.views_per_image``) and over layers, on proposals taken for objects."""

    input_weight: Annotated[float, Field(ge=0)] = 0.0
    """Factor of the term over looks; 0 leaves it out. CASD's authors take 0.1."""
    layer_weight: Annotated[float, Field(ge=0)] = 0.0
    """Factor of the term over layers; 0 leaves it out. CASD's authors take 0.1."""
    ramp: Annotated[float, Field(ge=0, le=1)] = 0.45
    """Share of the training over which both factors rise from 0; the authors' code means 45k of 100k iterations."""

    @property
    def is_on(self) -> bool:
        """Whether any term counts."""
        return self.input_weight > 0 or self.layer_weight > 0

    @property
    def requirements(self) -> Requirements:
        """Responses where it is on, several looks for the term over looks, several layers for that over layers."""
        return Requirements(
            responses=self.is_on,
            views_per_image=2 if self.input_weight > 0 else 1,
            layers=2 if self.layer_weight > 0 else 1,
        )

    def strength(self, fraction: float) -> float:
        """How far both factors have risen."""
        return min(1.0, fraction / self.ramp) if self.ramp > 0 else 1.0

    def __call__(self, responses: Float[Tensor, "R L s s"], labels: PseudoLabels, meta: BatchMeta) -> Float[Tensor, ""]:
        """Both terms by their factors, before the ramp: mean over the foreground of a photo, then over photos."""
        terms = [responses.new_zeros(())]
        is_object = (labels.cls < meta.tags.shape[1]) & (labels.weight > 0)
        for views_per_image, span in meta.view_groups():
            shape = (len(views_per_image), -1, *responses.shape[1:])
            own = responses[span.start : span.stop].view(shape)
            chosen = is_object[span.start : span.stop].view(len(views_per_image), -1)[0]
            flipped = None if meta.flipped is None else meta.flipped[views_per_image.start : views_per_image.stop]
            maps = upright(attention(own[:, chosen]), flipped)  # (v, m, L, s, s)
            terms.append(self.input_weight * disagreement(maps[:, :, -1]))
            terms.append(self.layer_weight * disagreement(maps.flatten(0, 1).transpose(0, 1)))
        return torch.stack(terms).sum() / max(len(meta.tags) // meta.views_per_image, 1)
