"""Concrete DropBlock: a mask net places the dropped squares as an adversary of the detector.

Ren et al., "Instance-aware, Context-focused, and Memory-efficient Weakly Supervised Object Detection" (MIST), CVPR
2020, https://arxiv.org/abs/2004.04725. The mask net ascends the loss that the detector descends; its optimizer and its
step are in ``tag2box.training``.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor, nn

from tag2box.models.drop_block import keep_mask
from tag2box.models.rng import StepRng, Stream
from tag2box.ops.losses import at_least_single


@dataclass(frozen=True, kw_only=True)
class ConcreteDropBlock:
    """DropBlock whose squares are placed by an adversary; training only. Kept cells are rescaled per photo."""

    kind: Literal["concrete"] = "concrete"
    block: Annotated[int, Field(ge=1)] = 3
    """Side of a dropped square, in cells."""
    drop: Annotated[float, Field(ge=0, le=1)] = 0.3
    """tau: a cell is the centre of a dropped square with rate tau / block^2 at most, if the mask net outputs 1."""
    hidden: Annotated[int, Field(ge=1, le=65_536)] = 512
    """Hidden channels of the mask net; 32 or 64 avoid most of its cost on a CPU."""
    norm: Literal["group", "batch"] = "group"
    """Normalization of the mask net: per proposal, or batch norm as in the published code.

    Batch norm has the statistics of the proposals that are computed together: of the whole batch, of one photo if
    ``compute.memory`` is exact, of a rank's photos. These modes then differ.
    """
    temperature: Annotated[float, Field(gt=0)] = 0.01
    """Temperature of the Gumbel-softmax."""
    weight: Annotated[float, Field(ge=0)] = 0.01
    """The mask net minimizes minus this factor times the detector's loss."""
    lr: Annotated[float, Field(gt=0, le=1000)] = 1e-4
    """Learning rate of the mask net, which has an SGD optimizer of its own."""
    weight_decay: Annotated[float, Field(ge=0, le=1000)] = 1e-4
    """Weight decay of the mask net."""
    lr_growth: Annotated[float, Field(gt=0, le=1000)] = 3.0
    """Factor on the mask net's learning rate at each step at which the detector's is decayed."""

    def build(self, channels: int, seed: int) -> "MaskNet":
        """The mask net for maps of ``channels`` channels, initialized with ``seed``."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return MaskNet(self, channels)


class BatchStatNorm(nn.Module):
    """Batch norm with the statistics of its input in every mode: no running averages, so that it is a pure function."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Float[Tensor, "R ch h w"]) -> Float[Tensor, "R ch h w"]:
        """(x - mean) / std of each channel over proposals and cells, scaled and shifted."""
        variance, mean = torch.var_mean(x, dim=(0, 2, 3), correction=0, keepdim=True)
        spread = (x - mean) / (variance + 1e-5).sqrt()
        return spread * self.weight[:, None, None] + self.bias[:, None, None]


class MaskNet(nn.Module):
    """The adversary: predicts from RoI maps which cells to hide from the detector.

    Unless batch norm is chosen, its norms are per proposal, so the output for a photo does not depend on the batch.
    """

    def __init__(self, settings: ConcreteDropBlock, channels: int) -> None:
        super().__init__()
        self.settings = settings
        self.inner = nn.Sequential(
            nn.Conv2d(channels, settings.hidden, 3, padding=1, bias=False),
            _norm(settings, settings.hidden),
            nn.ReLU(inplace=True),
            nn.Conv2d(settings.hidden, 1, 3, padding=1, bias=False),
            _norm(settings, 1),
        )
        self.shortcut = nn.Conv2d(channels, 1, 1)

    def forward(self, maps: Float[Tensor, "R ch h w"]) -> Float[Tensor, "R h w"]:
        """Drop logit of each cell."""
        logits: Tensor = self.inner(maps) + self.shortcut(maps)
        return logits[:, 0]

    def draw(self, rng: StepRng, images: Int[Tensor, " R"], side: int) -> Float[Tensor, "R h w"]:
        """Uniform random numbers of the Gumbel-softmax."""
        return rng.row_rng(Stream.CONCRETE, images).uniform(side, side)

    def factors(
        self, drawn: Float[Tensor, "r h w"], maps: Float[Tensor, "r ch h w"], images: Int[Tensor, " r"]
    ) -> Float[Tensor, "r h w"]:
        """0 for dropped cells, cells / kept of the photo for the others. No gradient flows into the maps."""
        if not len(maps):
            return drawn
        s = self.settings
        logits = at_least_single(self(maps.detach()))
        centres = concrete_centres(logits, drawn, gamma=s.drop / s.block**2, temperature=s.temperature)
        return rescaled_by_photo(keep_mask(centres, s.block), images)


def _norm(settings: ConcreteDropBlock, channels: int) -> nn.Module:
    return nn.GroupNorm(1, channels) if settings.norm == "group" else BatchStatNorm(channels)


def concrete_centres(
    logits: Float[Tensor, "R h w"], rand: Float[Tensor, "R h w"], *, gamma: float, temperature: float
) -> Float[Tensor, "R h w"]:
    """Drop centres by a Gumbel-softmax over (p, 1 - p), p = gamma sigmoid(logits): hard 0 or 1, with soft gradients.

    The difference of two Gumbel numbers is logistic, so one uniform number per cell is enough.
    """
    chance = (gamma * logits.sigmoid()).logit(eps=1e-6)
    soft = ((chance + rand.logit()) / temperature).sigmoid()
    return (soft > 0.5).to(soft.dtype) + (soft - soft.detach())  # straight-through: exactly 0 and 1 in forward


def rescaled_by_photo(mask: Float[Tensor, "R h w"], images: Int[Tensor, " R"]) -> Float[Tensor, "R h w"]:
    """A mask scaled by cells / kept of each photo, so that a photo's factors do not depend on the batch."""
    photos, photo = images.unique(return_inverse=True)
    kept = mask.new_zeros(len(photos)).index_add(0, photo, mask.sum(dim=(1, 2)))
    cells = torch.bincount(photo, minlength=len(photos)) * mask.shape[1] * mask.shape[2]
    return mask * (cells / kept.clamp(min=1))[photo, None, None]
