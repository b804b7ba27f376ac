"""A preprocessing as a buffer among the weights: whatever loads these, loads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tag2box.models.rng import RowRng
from tag2box.types import Proposals

PIXELS_BUFFER = "pixels"
"""The name of that buffer."""


def to_numbers(preprocess: Preprocess) -> Float[Tensor, " 8"]:
    """A preprocessing as eight numbers, in double precision: they come back as they were."""
    numbers = [float(preprocess.order == "bgr"), preprocess.scale, *preprocess.mean, *preprocess.std]
    return torch.tensor(numbers, dtype=torch.float64, device="cpu")


def from_numbers(numbers: Float[Tensor, " 8"]) -> Preprocess:
    """The preprocessing that eight numbers stand for."""
    bgr, scale, *channels = numbers.tolist()
    mean, std = channels[:3], channels[3:]
    order: Literal["rgb", "bgr"] = "bgr" if bgr else "rgb"
    return Preprocess(order=order, scale=scale, mean=(mean[0], mean[1], mean[2]), std=(std[0], std[1], std[2]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Preprocess:
    """How a network wants its pixels: ``(x * scale - mean) / std`` per channel, after ordering the channels.

    It belongs to the weights and is saved with them; there is no separate flag that could disagree.
    """

    order: Literal["rgb", "bgr"]
    scale: float
    mean: tuple[float, float, float]  # in the network's channel order
    std: tuple[float, float, float]

    def __call__(self, images: Float[Tensor, "N 3 H W"]) -> Float[Tensor, "N 3 H W"]:
        """Raw RGB pixels 0 .. 255 in, the network's input out."""
        ordered = images.flip(1) if self.order == "bgr" else images
        mean = ordered.new_tensor(self.mean).view(1, 3, 1, 1)
        std = ordered.new_tensor(self.std).view(1, 3, 1, 1)
        return (ordered * self.scale - mean) / std

    def neutral(self) -> tuple[float, float, float]:
        """The raw RGB colour that becomes zero: what to pad photos with."""
        raw = tuple(m / self.scale for m in self.mean)
        r, g, b = raw if self.order == "rgb" else raw[::-1]
        return (r, g, b)


@dataclass(frozen=True, kw_only=True)
class BackboneSettings:
    """Settings of a backbone: a subclass adds its fields and builds the network.

    Backbones of other packages subclass it too, and are named ``backbone.kind = "package.module:Name"``.
    """

    layers: ClassVar[int] = 1
    """L, the layers whose ``responses`` the network gives."""

    @property
    def title(self) -> str:
        """The name in tables."""
        return str(getattr(self, "kind", type(self).__name__))

    def build(self, *, pretrained: bool = True) -> Backbone:
        """The network; without ``pretrained`` its weights are random, to be loaded from a checkpoint."""
        raise NotImplementedError

    def with_absolute_paths(self) -> Self:
        """The same settings with every path absolute, so that a run can be resumed from another folder."""
        return self


class Backbone(nn.Module):
    """A pretrained network cut in three: ``trunk`` (photo), ``roi_maps`` (proposal map f), ``neck`` (vector, eta).

    DropBlock, masking and noise act between ``roi_maps`` and ``neck``. Parts that do not learn have no trainable
    parameter and no state that training mode could change.
    """

    preprocess: Preprocess
    stride: int  # photo pixels per cell of the trunk's map
    channels: int  # of the proposal map f
    map_size: int  # side of f
    vector_size: int  # F
    layers: int = 1  # L, of which ``responses`` tells

    def trunk(self, images: Float[Tensor, "N 3 H W"]) -> Float[Tensor, "N c h w"]:
        """The map of each photo. Takes raw RGB 0 .. 255: the preprocessing of the weights is applied here."""
        raise NotImplementedError

    def roi_maps(self, features: Float[Tensor, "N c h w"], proposals: Proposals) -> Float[Tensor, "R ch s s"]:
        """The map f of each proposal, from the trunk's maps."""
        raise NotImplementedError

    def neck(self, maps: Float[Tensor, "R ch s s"], row_rng: RowRng | None = None) -> Float[Tensor, "R F"]:
        """The feature vector of each proposal map; dropout, where there is any, draws from ``dice``."""
        raise NotImplementedError

    def neck_stem(self, maps: Float[Tensor, "R ch s s"]) -> Float[Tensor, "R ..."]:
        """The first part of ``neck``, as far as factors of cells pass through it: shared by all copies of a proposal.

        Nothing, unless a backbone begins with something that commutes with them, as a 1 x 1 convolution does.
        """
        return maps

    def neck_tail(
        self, stem: Float[Tensor, "R ..."], factors: Float[Tensor, "R s s"], row_rng: RowRng | None = None
    ) -> Float[Tensor, "R F"]:
        """The rest of ``neck``, for a copy whose cells are multiplied by factors."""
        return self.neck(stem * factors[:, None].to(stem.dtype), row_rng)

    def responses(self, maps: Float[Tensor, "R ch s s"], stem: Float[Tensor, "R ..."]) -> Float[Tensor, "R L s s"]:
        """How strongly each of L layers answers to a proposal's cells: the mean over its channels. Here: f alone."""
        return maps.mean(dim=1, keepdim=True)

    def roi_map_modules(self) -> tuple[nn.Module, ...]:
        """The modules that ``trunk`` and ``roi_maps`` run."""
        raise NotImplementedError

    def roi_map_key(self) -> str:
        """All that the maps depend on besides weights and pixels; kept maps are named by it."""
        return f"{type(self).__name__} stride {self.stride} side {self.map_size} {self.preprocess}"

    def trunk_modules(self) -> tuple[nn.Module, ...]:
        """The modules that ``trunk`` runs: all of ``map_parts``, unless ``roi_maps`` runs some of them."""
        return self.roi_map_modules()

    def trunk_key(self) -> str:
        """All that trunk maps depend on besides weights and pixels."""
        return f"{type(self).__name__} stride {self.stride} {self.preprocess}"

    @property
    def frozen_roi_maps(self) -> bool:
        """Whether f of a proposal never changes, so that it can be computed once and kept."""
        return not any(p.requires_grad for part in self.roi_map_modules() for p in part.parameters())

    @property
    def frozen_trunk(self) -> bool:
        """Whether the map of a photo never changes, so that it can be computed once and kept."""
        return not any(p.requires_grad for part in self.trunk_modules() for p in part.parameters())

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device


def normal_init(module: nn.Module, std: float) -> None:
    """Weights N(0, std) and biases 0, for every linear layer in ``module``."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=std)
            torch.nn.init.zeros_(layer.bias)
