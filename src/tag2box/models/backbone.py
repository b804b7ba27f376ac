"""Base classes of backbones: settings, network, and the preprocessing that belongs to the weights.

``docs/backbones.md`` shows a complete backbone in a file of your own.
"""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import ClassVar, Literal, Self

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tag2box.models.rng import RowRng
from tag2box.types import Proposals

PIXELS_BUFFER = "pixels"
"""Name of the buffer that holds a preprocessing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preprocess:
    """Input normalization of a network: ``(x * scale - mean) / std`` per channel, after ordering the channels.

    It belongs to the weights and is saved with them; there is no separate flag that could disagree.
    """

    order: Literal["rgb", "bgr"]
    scale: float
    mean: tuple[float, float, float]  # in the network's channel order
    std: tuple[float, float, float]

    def __call__(self, images: Float[Tensor, "N 3 H W"]) -> Float[Tensor, "N 3 H W"]:
        """Normalize raw RGB pixels 0 .. 255."""
        ordered = images.flip(1) if self.order == "bgr" else images
        mean = ordered.new_tensor(self.mean).view(1, 3, 1, 1)
        std = ordered.new_tensor(self.std).view(1, 3, 1, 1)
        return (ordered * self.scale - mean) / std

    def neutral(self) -> tuple[float, float, float]:
        """The raw RGB colour that becomes zero, for padding photos."""
        raw = tuple(m / self.scale for m in self.mean)
        r, g, b = raw if self.order == "rgb" else raw[::-1]
        return (r, g, b)

    def to_tensor(self) -> Float[Tensor, " 8"]:
        """Eight numbers in double precision, from which ``from_tensor`` restores an equal preprocessing."""
        numbers = [float(self.order == "bgr"), self.scale, *self.mean, *self.std]
        return torch.tensor(numbers, dtype=torch.float64, device="cpu")

    @classmethod
    def from_tensor(cls, numbers: Float[Tensor, " 8"]) -> Self:
        """The inverse of ``to_tensor``."""
        bgr, scale, *channels = numbers.tolist()
        mean, std = channels[:3], channels[3:]
        order: Literal["rgb", "bgr"] = "bgr" if bgr else "rgb"
        return cls(order=order, scale=scale, mean=(mean[0], mean[1], mean[2]), std=(std[0], std[1], std[2]))


class Backbone(nn.Module):
    """A pretrained network in three parts: ``trunk`` (photo map), ``roi_maps`` (RoI map f), ``neck`` (RoI vector, eta).

    DropBlock, masks and noise act between ``roi_maps`` and ``neck``. Frozen parts have no trainable parameter and no
    state that training mode could change.
    """

    preprocess: Preprocess
    stride: int  # photo pixels per cell of the trunk's map
    channels: int  # of the RoI map f
    map_size: int  # side of f
    vector_size: int  # F
    layers: int = 1  # L, the number of layers in ``responses``

    def trunk(self, images: Float[Tensor, "N 3 H W"]) -> Float[Tensor, "N c h w"]:
        """The map of each photo, from raw RGB pixels 0 .. 255: the preprocessing of the weights is applied here."""
        raise NotImplementedError

    def roi_maps(self, features: Float[Tensor, "N c h w"], proposals: Proposals) -> Float[Tensor, "R ch s s"]:
        """The RoI map f of each proposal, from the trunk's maps."""
        raise NotImplementedError

    def neck(self, maps: Float[Tensor, "R ch s s"], row_rng: RowRng | None = None) -> Float[Tensor, "R F"]:
        """The feature vector of each RoI map; dropout, if any, draws from ``row_rng``."""
        raise NotImplementedError

    def neck_stem(self, maps: Float[Tensor, "R ch s s"]) -> Float[Tensor, "R ..."]:
        """The first part of ``neck`` that commutes with factors on cells: shared by all augmented copies of a RoI.

        The identity, unless a neck begins with such a layer, for example a 1 x 1 convolution.
        """
        return maps

    def neck_tail(
        self, stem: Float[Tensor, "R ..."], factors: Float[Tensor, "R s s"], row_rng: RowRng | None = None
    ) -> Float[Tensor, "R F"]:
        """The rest of ``neck``, after multiplying the cells of the stem's output by factors."""
        return self.neck(stem * factors[:, None].to(stem.dtype), row_rng)

    def responses(self, maps: Float[Tensor, "R ch s s"], stem: Float[Tensor, "R ..."]) -> Float[Tensor, "R L s s"]:
        """Channel mean of each of L layers, per cell of a RoI (attention maps of CASD). The default is f alone."""
        return maps.mean(dim=1, keepdim=True)

    @property
    def photo_channels(self) -> int:
        """Channels of ``photo_features``."""
        return self.channels

    def photo_features(self, trunk: Float[Tensor, "N c h w"], *, dense: bool = False) -> Float[Tensor, "N F h1 w1"]:
        """Features of all cells of a photo, which an image classifier pools, from the trunk's map.

        The default is that map itself.

        Args:
            dense: at the stride of the trunk, if the layers behind it have strides of their own.
        """
        return trunk

    def photo_modules(self) -> tuple[nn.Module, ...]:
        """The modules that ``trunk`` and ``photo_features`` run: those that adaptation trains."""
        return self.trunk_modules()

    def pyramid(self, images: Float[Tensor, "N 3 H W"]) -> tuple[Float[Tensor, "N c h w"], ...]:
        """Maps at the strides of ``pyramid_levels``, finest first; the sides of photos are multiples of the last one.

        The default is the trunk's map alone.
        """
        return (self.trunk(images),)

    @property
    def pyramid_levels(self) -> tuple[tuple[int, int], ...]:
        """Stride and channels of each map of ``pyramid``."""
        return ((self.stride, self.channels),)

    def pyramid_modules(self) -> tuple[nn.Module, ...]:
        """The modules that ``pyramid`` runs, in order: the first ones are those to freeze."""
        return self.trunk_modules()

    def roi_map_modules(self) -> tuple[nn.Module, ...]:
        """The modules that ``trunk`` and ``roi_maps`` run."""
        raise NotImplementedError

    def neck_parameters(self) -> list[nn.Parameter]:
        """The trainable parameters of ``neck``, on which all losses act."""
        before = {id(p) for part in self.roi_map_modules() for p in part.parameters()}
        return [p for p in self.parameters() if p.requires_grad and id(p) not in before]

    def roi_map_key(self) -> str:
        """Everything that RoI maps depend on besides weights and pixels: part of the feature cache's key."""
        return f"{type(self).__name__} stride {self.stride} side {self.map_size} {self.preprocess}"

    def trunk_modules(self) -> tuple[nn.Module, ...]:
        """The modules that ``trunk`` runs: all of ``roi_map_modules``, unless ``roi_maps`` runs some of them."""
        return self.roi_map_modules()

    def trunk_key(self) -> str:
        """Everything that trunk maps depend on besides weights and pixels: part of the feature cache's key."""
        return f"{type(self).__name__} stride {self.stride} {self.preprocess}"

    @property
    def frozen_roi_maps(self) -> bool:
        """Whether RoI maps never change during training, so that the feature cache can hold them."""
        return not any(p.requires_grad for part in self.roi_map_modules() for p in part.parameters())

    @property
    def frozen_trunk(self) -> bool:
        """Whether trunk maps never change during training, so that the feature cache can hold them."""
        return not any(p.requires_grad for part in self.trunk_modules() for p in part.parameters())

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.parameters()).device


class PreprocessBufferBackbone(Backbone):
    """A backbone with weights of several preprocessings: a buffer among the weights holds the one that applies."""

    pixels: Tensor

    def __init__(self, preprocess: Preprocess) -> None:
        super().__init__()
        self.register_buffer(PIXELS_BUFFER, preprocess.to_tensor())

    @property  # only loading weights sets it
    def preprocess(self) -> Preprocess:  # type: ignore[override]
        """The preprocessing that the current weights were trained with."""
        return Preprocess.from_tensor(self.pixels)


@dataclass(frozen=True, kw_only=True)
class BackboneSettings:
    """Settings of a backbone: a subclass adds its fields and builds the network.

    Backbones of other packages subclass it too, and are named ``backbone.kind = "package.module:Name"``.
    """

    layers: ClassVar[int] = 1
    """L, the number of layers in the network's ``responses``."""

    @property
    def title(self) -> str:
        """The name in tables and error messages."""
        return str(getattr(self, "kind", type(self).__name__))

    def build(self, *, pretrained: bool = True) -> Backbone:
        """The network; without ``pretrained``, randomly initialized, to be loaded from a checkpoint."""
        raise NotImplementedError

    def with_absolute_paths(self) -> Self:
        """The same settings with every ``Path`` absolute, so that a run can be resumed from another folder."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.init}
        return replace(self, **{name: value.absolute() for name, value in values.items() if isinstance(value, Path)})


def normal_init(module: nn.Module, std: float) -> None:
    """Weights N(0, std) and biases 0, for every linear layer in ``module``."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=std)
            torch.nn.init.zeros_(layer.bias)
