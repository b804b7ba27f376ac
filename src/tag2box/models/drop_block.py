"""Random changes of proposal maps: DropBlock and dropout for the heads, masking and noise for the exemplars' views.

All are pure functions of the map and of the random numbers they are handed, so that a step can be replayed exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, Protocol

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from tag2box.models.rng import RowRng, StepRng, Stream
from tag2box.ops.boxes import at_least_single


class Regulariser(Protocol):
    """What multiplies the cells of proposal maps in training, and nothing at test."""

    def draw(self, rng: StepRng, images: Int[Tensor, " R"], side: int) -> Float[Tensor, "R h w"]:
        """What is drawn for the proposals of a whole batch, before any map is seen."""
        ...

    def factors(
        self, drawn: Float[Tensor, "r h w"], maps: Float[Tensor, "r ch h w"], images: Int[Tensor, " r"]
    ) -> Float[Tensor, "r h w"]:
        """What the cells of some proposals, of whole photos, are multiplied with."""
        ...


class RegularizerSettings(Protocol):
    """Settings of a regularizer."""

    def build(self, channels: int, seed: int) -> Regulariser:
        """The regularizer for maps of so many channels; weights, if it has any, are seeded with ``seed``."""
        ...


@dataclass(frozen=True, kw_only=True)
class DropBlock:
    """DropBlock (Ghiasi et al., 2018) as MIST and OD-WSCL use it on proposal maps; training only."""

    kind: Literal["plain"] = "plain"
    block: Annotated[int, Field(ge=1)] = 3
    """Side of a dropped square, in cells."""
    drop: Annotated[float, Field(ge=0, le=1)] = 0.3
    """Share of cells to drop, roughly: squares start at a rate of drop / block^2."""

    def build(self, channels: int, seed: int) -> DropBlock:
        """Itself: there is nothing to learn."""
        return self

    def draw(self, rng: StepRng, images: Int[Tensor, " R"], side: int) -> Float[Tensor, "R h w"]:
        """The factors themselves; all images share one rescaling."""
        row_rng = rng.row_rng(Stream.DROP_BLOCK, images)
        return block_factors(row_rng.uniform(side, side), block=self.block, drop=self.drop)

    def factors(
        self, drawn: Float[Tensor, "r h w"], maps: Float[Tensor, "r ch h w"], images: Int[Tensor, " r"]
    ) -> Float[Tensor, "r h w"]:
        """As drawn, whatever the maps show."""
        return drawn


def drop_block(
    x: Float[Tensor, "R ch h w"], rand: Float[Tensor, "R h w"], *, block: int, drop: float
) -> Float[Tensor, "R ch h w"]:
    """Proposal maps with squares set to zero, one mask per proposal; kept values grow by cells / kept of the batch."""
    return x * block_factors(rand, block=block, drop=drop)[:, None].to(x.dtype)


def block_factors(rand: Float[Tensor, "R h w"], *, block: int, drop: float) -> Float[Tensor, "R h w"]:
    """0 where ``drop_block`` drops a cell, cells / kept of the batch where it keeps one."""
    return _rescaled(block_mask(rand, block=block, gamma=drop / block**2))


def block_mask(rand: Float[Tensor, "R h w"], *, block: int, gamma: float) -> Float[Tensor, "R h w"]:
    """1 where a cell is kept, 0 in the block x block square around every cell whose number is below ``gamma``."""
    return keep_mask((rand < gamma).to(rand.dtype), block)


def keep_mask(centres: Float[Tensor, "R h w"], block: int) -> Float[Tensor, "R h w"]:
    """0 in the block x block square around every centre (1), else 1."""
    if not len(centres):
        return 1 - centres  # max_pool2d refuses an empty batch
    dropped = F.max_pool2d(centres[:, None], kernel_size=block, stride=1, padding=block // 2)[:, 0]
    # an even block reaches one cell further after its centre than before, and its pooling yields a row too many
    return 1 - dropped[:, : centres.shape[1], : centres.shape[2]]


def concrete_centres(
    logits: Float[Tensor, "R h w"], rand: Float[Tensor, "R h w"], *, gamma: float, temperature: float
) -> Float[Tensor, "R h w"]:
    """Drop centres by a Gumbel-softmax over (p, 1 - p), p = gamma sigmoid(logits): 0 or 1, yet with its gradient.

    The difference of two Gumbel numbers is logistic, so one uniform number a cell does for both.
    """
    chance = (gamma * logits.sigmoid()).logit(eps=1e-6)
    soft = ((chance + rand.logit()) / temperature).sigmoid()
    return (soft > 0.5).to(soft.dtype) + (soft - soft.detach())  # straight through: exact 0 and 1 on the way there


def rescaled_by_photo(mask: Float[Tensor, "R h w"], images: Int[Tensor, " R"]) -> Float[Tensor, "R h w"]:
    """What is kept grows by cells / kept of its photo, so that a photo alone is what it is in company."""
    photos, photo = images.unique(return_inverse=True)
    kept = mask.new_zeros(len(photos)).index_add(0, photo, mask.sum(dim=(1, 2)))
    cells = torch.bincount(photo, minlength=len(photos)) * mask.shape[1] * mask.shape[2]
    return mask * (cells / kept.clamp(min=1))[photo, None, None]


def mask_factors(rand: Float[Tensor, "R 1 h w"], drop: float, *, rescale: bool = False) -> Float[Tensor, "R 1 h w"]:
    """What the masked view (eq. 6) multiplies a map with: 0 in cells whose number is below ``drop``, else 1.

    ``drop`` is tau_drop. ``rescale`` is the published code's variant: what is kept grows by cells / kept of the batch.
    """
    mask = (rand >= drop).to(rand.dtype)
    return _rescaled(mask) if rescale else mask


def noise_factors(rand: Float[Tensor, "R c h w"]) -> Float[Tensor, "R c h w"]:
    """What the noised view, f + f * N(0, 1) (eq. 7), multiplies a map with.

    c = 1, one number per cell (paper), or c = ch (published code).
    """
    return 1 + rand


def dropout(x: Float[Tensor, "R F"], rate: float, row_rng: RowRng | None) -> Float[Tensor, "R F"]:
    """Values set to zero at ``rate``, the others grown to make up for it; without dice (inference) nothing happens."""
    if row_rng is None or rate == 0:
        return x
    return x * (row_rng.uniform(*x.shape[1:]) >= rate).to(x.dtype) / (1 - rate)


def _rescaled(mask: Tensor) -> Tensor:
    # at least one kept cell in the divisor: a batch that lost every cell is zero, not NaN
    return mask * (mask.numel() / mask.sum().clamp(min=1))


@dataclass(frozen=True, kw_only=True)
class ConcreteDropBlock:
    """DropBlock whose squares are placed by an adversary; training only. Kept cells are rescaled photo by photo."""

    kind: Literal["concrete"] = "concrete"
    block: Annotated[int, Field(ge=1)] = 3
    """Side of a dropped square, in cells."""
    drop: Annotated[float, Field(ge=0, le=1)] = 0.3
    """tau: where the mask net is sure, squares start at a rate of tau / block^2."""
    hidden: Annotated[int, Field(ge=1)] = 512
    """Channels inside the mask net; 32 or 64 spare a CPU most of its cost."""
    temperature: Annotated[float, Field(gt=0)] = 0.01
    """Of the Gumbel-softmax."""
    weight: Annotated[float, Field(ge=0)] = 0.01
    """The mask net descends on minus this share of the detector's loss."""
    lr: Annotated[float, Field(gt=0)] = 1e-4
    """Learning rate of the mask net, which has SGD of its own."""
    weight_decay: Annotated[float, Field(ge=0)] = 1e-4
    lr_growth: Annotated[float, Field(gt=0)] = 3.0
    """What the mask net's learning rate is multiplied with where that of the detector is cut."""

    def build(self, channels: int, seed: int) -> MaskNet:
        """The mask net for maps of so many channels, its weights by ``seed``."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return MaskNet(self, channels)


class MaskNet(nn.Module):
    """The adversary: looks at proposal maps, decides which cells the detector must do without.

    Its norms see one proposal at a time, so what it says of a photo does not depend on the photo's company.
    """

    def __init__(self, settings: ConcreteDropBlock, channels: int) -> None:
        super().__init__()
        self.settings = settings
        self.inner = nn.Sequential(
            nn.Conv2d(channels, settings.hidden, 3, padding=1, bias=False),
            nn.GroupNorm(1, settings.hidden),
            nn.ReLU(inplace=True),
            nn.Conv2d(settings.hidden, 1, 3, padding=1, bias=False),
            nn.GroupNorm(1, 1),
        )
        self.shortcut = nn.Conv2d(channels, 1, 1)

    def forward(self, maps: Float[Tensor, "R ch h w"]) -> Float[Tensor, "R h w"]:
        """How much it wants each cell gone, before the sigmoid."""
        wanted: Tensor = self.inner(maps) + self.shortcut(maps)
        return wanted[:, 0]

    def draw(self, rng: StepRng, images: Int[Tensor, " R"], side: int) -> Float[Tensor, "R h w"]:
        """The numbers of the Gumbel-softmax."""
        return rng.row_rng(Stream.CONCRETE, images).uniform(side, side)

    def factors(
        self, drawn: Float[Tensor, "r h w"], maps: Float[Tensor, "r ch h w"], images: Int[Tensor, " r"]
    ) -> Float[Tensor, "r h w"]:
        """0 in dropped cells, cells / kept of the photo in others. No gradient reaches the maps."""
        if not len(maps):
            return drawn
        s = self.settings
        wanted = at_least_single(self(maps.detach()))
        centres = concrete_centres(wanted, drawn, gamma=s.drop / s.block**2, temperature=s.temperature)
        return rescaled_by_photo(keep_mask(centres, s.block), images)
