"""Concrete DropBlock: a small network that learns where dropping hurts the detector most (Ren et al., 2020, MIST)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor, nn

from tag2box.maths.numbers import at_least_single
from tag2box.model.luck import Luck, Purpose
from tag2box.model.regularise import concrete_centres, keep_mask, rescaled_by_photo


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

    def draw(self, luck: Luck, images: Int[Tensor, " R"], side: int) -> Float[Tensor, "R h w"]:
        """The numbers of the Gumbel-softmax."""
        return luck.dice(Purpose.CONCRETE, images).uniform(side, side)

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
