"""CASD, comprehensive attention self-distillation (Huang et al., 2020): consistent attention over views and layers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field

from tag2box.types import BatchMeta, PseudoLabels, Requirements

_FLAT = 1e-6  # a map with a smaller range is constant


def attention(responses: Float[torch.Tensor, "*b s s2"]) -> Float[torch.Tensor, "*b s s2"]:
    """A = sigmoid(minmax(mean over channels)), given means over channels; 1/2, without gradient, if constant."""
    cells = responses.flatten(-2)
    low, high = (
        cells.min(dim=-1, keepdim=True).values,
        cells.max(dim=-1, keepdim=True).values,
    )  # on ties the gradient goes to one cell
    span = high - low
    is_flat = span < _FLAT
    spread = (cells - low) / torch.where(is_flat, torch.ones_like(span), span)
    return torch.where(is_flat, torch.zeros_like(spread), spread).sigmoid().view_as(responses)


def upright(
    maps: Float[torch.Tensor, "v m *l s s2"], flipped: Bool[torch.Tensor, " v"] | None
) -> Float[torch.Tensor, "v m *l s s2"]:
    """Maps of v views with the horizontal flip undone."""
    if flipped is None:
        return maps
    is_flipped = flipped.view(-1, *[1] * (maps.dim() - 1))
    return torch.where(is_flipped, maps.flip(-1), maps)


def disagreement(maps: Float[torch.Tensor, "v m s s2"]) -> Float[torch.Tensor, ""]:
    """Sum over v of ||A_v - max over v||^2, mean over proposals and cells; the maximum is a constant target."""
    if not maps.shape[1]:
        return maps.sum()
    target = maps.detach().amax(dim=0)  # the comprehensive attention
    return (maps - target).square().mean(dim=(1, 2, 3)).sum()


def stage_sum(
    terms: Sequence[Float[torch.Tensor, ""]], counts: Sequence[int], roi_divisor: Literal["once", "twice"] = "once"
) -> Float[torch.Tensor, ""]:
    """Sum of the terms of K stages, each a mean over its proposals; ``twice`` divides it by the last of ``counts``."""
    total = torch.stack(list(terms)).sum()
    return total / max(counts[-1], 1) if roi_divisor == "twice" else total


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Consistency of attention over views (``loader.views_per_image``) and over layers, on foreground proposals.

    Zeyi Huang, Yang Zou, B. V. K. Vijaya Kumar and Dong Huang: Comprehensive Attention Self-Distillation for
    Weakly-Supervised Object Detection, NeurIPS 2020. https://arxiv.org/abs/2010.12023

    Example:
        >>> from tag2box.recipes import Config
        >>> from tag2box.training.criterion import Criterion
        >>> config = Config(criterion=Criterion(attention=Attention(input_weight=0.1)))
        >>> config.criterion.requirements.views_per_image
        2
    """

    input_weight: Annotated[float, Field(ge=0)] = 0.0
    """Factor of the term over views; 0 turns it off. CASD's authors use 0.1."""
    layer_weight: Annotated[float, Field(ge=0)] = 0.0
    """Factor of the term over layers; 0 turns it off. CASD's authors use 0.1."""
    ramp: Annotated[float, Field(ge=0, le=1)] = 0.45
    """Fraction of the training over which both factors rise from 0; 45k of 100k iterations in the authors' code."""
    roi_divisor: Literal["once", "twice"] = "once"
    """Normaliser of a stage: its number of proposals, once (the paper), or twice, as in the published code, which
    divides the sum over stages by the number of proposals of the last one again."""

    @property
    def is_on(self) -> bool:
        """Whether any term has a weight."""
        return self.input_weight > 0 or self.layer_weight > 0

    @property
    def requirements(self) -> Requirements:
        """Responses if it is on; several views, or several layers, for the term over them."""
        return Requirements(
            responses=self.is_on,
            views_per_image=2 if self.input_weight > 0 else 1,
            layers=2 if self.layer_weight > 0 else 1,
        )

    def strength(self, fraction: float) -> float:
        """Ramp of both factors, from 0 to 1."""
        return min(1.0, fraction / self.ramp) if self.ramp > 0 else 1.0

    def __call__(
        self, responses: Float[torch.Tensor, "R L s s"], stages: Sequence[PseudoLabels], meta: BatchMeta
    ) -> Float[torch.Tensor, ""]:
        """Both terms by their factors, before the ramp: one per stage, on its foreground; mean over all images."""
        terms = [responses.new_zeros(())]
        is_object = [(labels.cls < meta.tags.shape[1]) & (labels.weight > 0) for labels in stages]
        for views, span in meta.view_groups():
            own = responses[span.start : span.stop].view(len(views), -1, *responses.shape[1:])
            flipped = None if meta.flipped is None else meta.flipped[views.start : views.stop]
            first = slice(span.start, span.start + own.shape[1])
            chosen = [mask[first].nonzero().flatten() for mask in is_object]
            needed, where = torch.cat(chosen).unique(return_inverse=True)
            maps = upright(attention(own[:, needed]), flipped)  # (v, m, L, s, s)
            rows = where.split([len(part) for part in chosen])
            of_views, of_layers = maps[:, :, -1], maps.permute(2, 1, 0, 3, 4).flatten(2, 3)  # (L, m, v * s, s)
            terms.append(self.input_weight / len(views) * self._over_stages(of_views, rows))
            terms.append(self.layer_weight * self._over_stages(of_layers, rows))
        return torch.stack(terms).sum() / max(len(meta.tags) // meta.views_per_image, 1)

    def _over_stages(
        self, maps: Float[torch.Tensor, "v m s s2"], rows: Sequence[Int[torch.Tensor, " n"]]
    ) -> Float[torch.Tensor, ""]:
        return stage_sum([disagreement(maps[:, part]) for part in rows], [len(part) for part in rows], self.roi_divisor)
