"""DropBlock (Ghiasi et al., 2018, https://arxiv.org/abs/1810.12890) on RoI maps, and the regularizer protocol.

The learned variant, Concrete DropBlock, is in ``adversary.py``; masks and noise of augmented RoIs in ``augment.py``.
All are pure functions of the map and of random numbers that are passed in, so that a step can be recomputed exactly.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol, Self

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor, nn

from tag2box.models.rng import StepRng, Stream


class Regularizer(Protocol):
    """Factors that multiply the cells of RoI maps in training; inference does not use them."""

    def draw(self, rng: StepRng, images: Int[Tensor, " R"], side: int) -> Float[Tensor, "R h w"]:
        """Random numbers for the proposals of a whole batch, drawn before any map is computed."""
        ...

    def factors(
        self, drawn: Float[Tensor, "r h w"], maps: Float[Tensor, "r ch h w"], images: Int[Tensor, " r"]
    ) -> Float[Tensor, "r h w"]:
        """Factors for the cells of r proposals: those of one or more whole photos."""
        ...


class RegularizerSettings(Protocol):
    """Settings of a regularizer."""

    def build(self, channels: int, seed: int) -> Regularizer:
        """The regularizer for maps of ``channels`` channels; its weights, if any, are initialized with ``seed``."""
        ...


@dataclass(frozen=True, kw_only=True)
class DropBlock:
    """DropBlock as MIST and OD-WSCL use it on RoI maps; training only."""

    kind: Literal["plain"] = "plain"
    block: Annotated[int, Field(ge=1)] = 3
    """Side of a dropped square, in cells."""
    drop: Annotated[float, Field(ge=0, le=1)] = 0.3
    """Approximate fraction of cells to drop: a cell is the centre of a dropped square with rate drop / block^2."""

    def build(self, channels: int, seed: int) -> Self:
        """The settings themselves: there are no weights."""
        return self

    def draw(self, rng: StepRng, images: Int[Tensor, " R"], side: int) -> Float[Tensor, "R h w"]:
        """The factors; all images of the batch share one rescaling."""
        row_rng = rng.row_rng(Stream.DROP_BLOCK, images)
        return block_factors(row_rng.uniform(side, side), block=self.block, drop=self.drop)

    def factors(
        self, drawn: Float[Tensor, "r h w"], maps: Float[Tensor, "r ch h w"], images: Int[Tensor, " r"]
    ) -> Float[Tensor, "r h w"]:
        """The factors as drawn; they do not depend on the maps."""
        return drawn


@dataclass(frozen=True, kw_only=True)
class InvertedAttention:
    """Inverted attention (Huang et al., WACV 2020): drops cells that a hard proposal is recognised by; training only.

    CASD's base uses it. The step runs the batch twice: the first pass gives losses and the gradients of cells, the
    second one is trained with the cells dropped. https://arxiv.org/abs/1903.12255
    """

    kind: Literal["inverted"] = "inverted"
    hardest: Annotated[float, Field(gt=0, le=1)] = 1 / 6
    """Share of a photo's foreground proposals, those with the largest loss, of which cells are dropped."""
    top: Annotated[float, Field(gt=0, le=1)] = 25 / 49
    """Share of cells from which the dropped ones are drawn: those that lower the loss the most."""
    drop: Annotated[float, Field(ge=0, le=1)] = 16 / 49
    """Share of cells to drop."""
    late: Annotated[float, Field(ge=0, le=1)] = 0.6
    """Fraction of the training from which ``late_top`` and ``late_drop`` apply; 60k of 100k iterations."""
    late_top: Annotated[float, Field(gt=0, le=1)] = 29 / 49
    """``top`` later on."""
    late_drop: Annotated[float, Field(ge=0, le=1)] = 20 / 49
    """``drop`` later on."""

    def build(self, channels: int, seed: int) -> Self:
        """The settings themselves: there are no weights."""
        return self

    def draw(self, rng: StepRng, images: Int[Tensor, " R"], side: int) -> Float[Tensor, "R h w"]:
        """Ones: in the first pass, and in previews, nothing is dropped."""
        return torch.ones(len(images), side, side, device=images.device)

    def factors(
        self, drawn: Float[Tensor, "r h w"], maps: Float[Tensor, "r ch h w"], images: Int[Tensor, " r"]
    ) -> Float[Tensor, "r h w"]:
        """The factors as drawn."""
        return drawn

    def invert(
        self, gradient: Float[Tensor, "R h w"], rand: Float[Tensor, "R h w"], is_hard: Bool[Tensor, " R"], late: bool
    ) -> Float[Tensor, "R h w"]:
        """Factors of the second pass, given the gradients of the loss with respect to those of the first, all 1."""
        cells = gradient.shape[1] * gradient.shape[2]
        top, drop = (self.late_top, self.late_drop) if late else (self.top, self.drop)
        mask = inverted_mask(-gradient, rand, top=round(top * cells), drop=round(drop * cells))
        return torch.where(is_hard[:, None, None], mask, torch.ones_like(mask))


@dataclass(frozen=True)
class FixedFactors:
    """A regularizer with given factors for the proposals of one batch."""

    values: Float[Tensor, "R h w"]

    def draw(self, rng: StepRng, images: Int[Tensor, " R"], side: int) -> Float[Tensor, "R h w"]:
        """The factors."""
        return self.values

    def factors(
        self, drawn: Float[Tensor, "r h w"], maps: Float[Tensor, "r ch h w"], images: Int[Tensor, " r"]
    ) -> Float[Tensor, "r h w"]:
        """The factors as drawn."""
        return drawn


def inverted_mask(
    attention: Float[Tensor, "R h w"], rand: Float[Tensor, "R h w"], *, top: int, drop: int
) -> Float[Tensor, "R h w"]:
    """0 in the ``drop`` cells with the lowest random number among the ``top`` cells with most attention, else 1."""
    flat, numbers = attention.flatten(1), rand.flatten(1)
    chosen = flat.argsort(dim=1, descending=True, stable=True)[:, :top]
    order = numbers.gather(1, chosen).argsort(dim=1, stable=True)[:, :drop]
    return torch.ones_like(numbers).scatter(1, chosen.gather(1, order), 0).view_as(rand)


def hardest_rows(
    losses: Float[Tensor, " R"], is_object: Bool[Tensor, " R"], sizes: Sequence[int], share: float
) -> Bool[Tensor, " R"]:
    """The share of each image's objects with the largest losses, rounded up; the first one on ties."""
    is_hard, start = torch.zeros_like(is_object), 0
    for size in sizes:
        rows = start + is_object[start : start + size].nonzero().flatten()
        order = losses[rows].argsort(descending=True, stable=True)
        is_hard[rows[order[: math.ceil(share * len(rows))]]] = True
        start += size
    return is_hard


def drop_block(
    x: Float[Tensor, "R ch h w"], rand: Float[Tensor, "R h w"], *, block: int, drop: float
) -> Float[Tensor, "R ch h w"]:
    """RoI maps with squares set to zero, one mask per proposal; kept cells are scaled by cells / kept of the batch."""
    return x * block_factors(rand, block=block, drop=drop)[:, None].to(x.dtype)


def block_factors(rand: Float[Tensor, "R h w"], *, block: int, drop: float) -> Float[Tensor, "R h w"]:
    """0 for a dropped cell, cells / kept of the batch for a kept one."""
    return rescale_kept(block_mask(rand, block=block, gamma=drop / block**2))


def block_mask(rand: Float[Tensor, "R h w"], *, block: int, gamma: float) -> Float[Tensor, "R h w"]:
    """0 in the block x block square around every cell whose random number is below ``gamma``, else 1."""
    return keep_mask((rand < gamma).to(rand.dtype), block)


def keep_mask(centres: Float[Tensor, "R h w"], block: int) -> Float[Tensor, "R h w"]:
    """0 in the block x block square around every centre (1), else 1."""
    if not len(centres):
        return 1 - centres  # max_pool2d refuses an empty batch
    dropped = nn.functional.max_pool2d(centres[:, None], kernel_size=block, stride=1, padding=block // 2)[:, 0]
    # an even block extends one cell further after its centre than before, and its pooling yields a row too many
    return 1 - dropped[:, : centres.shape[1], : centres.shape[2]]


def rescale_kept(mask: Float[Tensor, "R ..."]) -> Float[Tensor, "R ..."]:
    """A 0/1 mask scaled by cells / kept of the batch, so that the expected sum is unchanged."""
    # at least one kept cell in the divisor: a batch that lost every cell is zero, not NaN
    return mask * (mask.numel() / mask.sum().clamp(min=1))
