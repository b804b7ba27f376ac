"""Base classes of backbones: settings, network, and the preprocessing that belongs to the weights.

``docs/backbones.md`` shows a complete backbone in a file of your own.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import ClassVar, Literal, Self

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tag2box.models.rng import RowRng
from tag2box.models.runtime import DEFAULT_RUNTIME, Runtime
from tag2box.ops.roi import roi_align
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
    early_layers: int = 0  # layers before f whose responses ``LayeredBackbone`` can add
    trunk_means: int = 0  # those of them that ``layered_trunk`` computes
    dropout: float = 0.0  # rate of the neck's dropout
    runtime: Runtime = DEFAULT_RUNTIME  # of passes without gradients

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

    def layered_trunk(
        self, images: Float[Tensor, "N 3 H W"]
    ) -> tuple[Float[Tensor, "N c h w"], Float[Tensor, "N e h w"]]:
        """The map of each photo, and the channel means of e stages before its last one, earliest first.

        The default has none.
        """
        trunk = self.trunk(images)
        return trunk, trunk[:, :0]

    def layered_roi_maps(
        self, features: Float[Tensor, "N c h w"], means: Float[Tensor, "N e h w"], proposals: Proposals
    ) -> tuple[Float[Tensor, "R ch s s"], Float[Tensor, "R E s s"]]:
        """The RoI map f of each proposal, and the channel means of E layers before f, earliest first.

        The default pools the means of the trunk by RoIAlign. It is linear, so the channel mean of a pooled layer is the
        pooled channel mean.
        """
        ids, scale = proposals.image_ids(), 1 / self.stride
        pooled = roi_align(means, proposals.boxes, ids, size=self.map_size, scale=scale)
        return self.roi_maps(features, proposals), pooled

    def early_responses(self, images: Float[Tensor, "N 3 H W"]) -> tuple[Float[Tensor, "N h w"], ...]:
        """Channel means of early, non-negative layers at strides 2, 4 and 8, in which WSRPN finds edges.

        The sides of photos are multiples of 8. The default has none.
        """
        return ()

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

    def frozen(self) -> AbstractContextManager[None]:
        """A block in which the network runs without gradients, in the precision and by the engine of ``runtime``."""
        return self.runtime.frozen(self.device)


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


class WrappedBackbone(Backbone):
    """A backbone around another one, whose RoI maps it extends; everything about whole photos is that of the inner."""

    def __init__(self, inner: Backbone) -> None:
        super().__init__()
        self.inner = inner
        self.stride, self.map_size, self.layers = inner.stride, inner.map_size, inner.layers
        self.channels, self.vector_size = inner.channels, inner.vector_size

    @property
    def preprocess(self) -> Preprocess:  # type: ignore[override]
        """The preprocessing of the inner backbone."""
        return self.inner.preprocess

    def trunk(self, images: Float[Tensor, "N 3 H W"]) -> Float[Tensor, "N c h w"]:
        """The map of each photo."""
        return self.inner.trunk(images)

    @property
    def photo_channels(self) -> int:
        """Those of the inner backbone."""
        return self.inner.photo_channels

    def photo_features(self, trunk: Float[Tensor, "N c h w"], *, dense: bool = False) -> Float[Tensor, "N F h1 w1"]:
        """Those of the inner backbone."""
        return self.inner.photo_features(trunk, dense=dense)

    def photo_modules(self) -> tuple[nn.Module, ...]:
        """Those of the inner backbone."""
        return self.inner.photo_modules()

    def pyramid_modules(self) -> tuple[nn.Module, ...]:
        """Those of the inner backbone."""
        return self.inner.pyramid_modules()

    def roi_map_modules(self) -> tuple[nn.Module, ...]:
        """Those of the inner backbone."""
        return self.inner.roi_map_modules()

    def trunk_modules(self) -> tuple[nn.Module, ...]:
        """Those of the inner backbone."""
        return self.inner.trunk_modules()

    def trunk_key(self) -> str:
        """The inner key."""
        return self.inner.trunk_key()


def set_runtime(network: nn.Module, runtime: Runtime) -> None:
    """Set the runtime of all backbones in a network."""
    for module in network.modules():
        if isinstance(module, Backbone):
            module.runtime = runtime


def innermost(backbone: Backbone) -> Backbone:
    """The backbone without wrappers."""
    while isinstance(backbone, WrappedBackbone):
        backbone = backbone.inner
    return backbone


class LayeredBackbone(WrappedBackbone):
    """A backbone whose ``responses`` begin with those of ``count`` layers before f (layer-wise attention of CASD).

    Their channel means are further channels of trunk maps and RoI maps, which the neck does not read: so the feature
    cache, exact steps and several processes work as without them.
    """

    def __init__(self, inner: Backbone, count: int) -> None:
        super().__init__(inner)
        self.count, self.channels, self.layers = count, inner.channels + count, inner.layers + count

    def trunk(self, images: Float[Tensor, "N 3 H W"]) -> Float[Tensor, "N c h w"]:
        """The map of each photo, then the channel means of earlier stages."""
        trunk, means = self.inner.layered_trunk(images)
        return torch.cat([trunk, means], dim=1)

    def roi_maps(self, features: Float[Tensor, "N c h w"], proposals: Proposals) -> Float[Tensor, "R ch s s"]:
        """RoI maps, then the channel means of the ``count`` layers before them."""
        split = features.shape[1] - self.inner.trunk_means
        maps, means = self.inner.layered_roi_maps(features[:, :split], features[:, split:], proposals)
        return torch.cat([maps, means[:, means.shape[1] - self.count :]], dim=1)

    def neck(self, maps: Float[Tensor, "R ch s s"], row_rng: RowRng | None = None) -> Float[Tensor, "R F"]:
        """The neck of the inner backbone, on its own channels."""
        return self.inner.neck(maps[:, : self.inner.channels], row_rng)

    def neck_stem(self, maps: Float[Tensor, "R ch s s"]) -> Float[Tensor, "R ..."]:
        """The first part of the inner neck."""
        return self.inner.neck_stem(maps[:, : self.inner.channels])

    def neck_tail(
        self, stem: Float[Tensor, "R ..."], factors: Float[Tensor, "R s s"], row_rng: RowRng | None = None
    ) -> Float[Tensor, "R F"]:
        """The rest of the inner neck."""
        return self.inner.neck_tail(stem, factors, row_rng)

    def responses(self, maps: Float[Tensor, "R ch s s"], stem: Float[Tensor, "R ..."]) -> Float[Tensor, "R L s s"]:
        """Of the early layers, then those of the inner backbone."""
        own, early = maps.split([self.inner.channels, self.count], dim=1)
        return torch.cat([early, self.inner.responses(own, stem)], dim=1)

    def roi_map_key(self) -> str:
        """The inner key and the number of layers."""
        return f"{self.inner.roi_map_key()} early layers {self.count}"

    def trunk_key(self) -> str:
        """The inner key, and the number of means if there are any."""
        means = self.inner.trunk_means
        return f"{self.inner.trunk_key()} means {means}" if means else self.inner.trunk_key()


@dataclass(frozen=True, kw_only=True)
class BackboneSettings:
    """Settings of a backbone: a subclass adds its fields and builds the network.

    Backbones of other packages subclass it too, and are named ``backbone.kind = "package.module:Name"``.
    """

    early_layers: ClassVar[int] = 0
    """The largest ``heads.early_layers``: layers before the RoI map whose responses the network can give."""

    @property
    def layers(self) -> int:
        """L, the number of layers in the network's ``responses``."""
        return 1

    @property
    def trains_responses(self) -> bool:
        """Whether a layer in ``responses``, or one before it, is trained; without, attention terms have no gradient."""
        return True

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
