"""The student's network: a backbone, a feature pyramid and one anchor-free head for all of its levels.

The pyramid adds coarser maps to finer ones (FPN, Lin et al., CVPR 2017). Per cell, the head gives a logit per class and
the distances from the cell's centre to the four sides of a box (FCOS, Tian et al., ICCV 2019); a class probability also
says how well the box fits (GFL, Li et al., NeurIPS 2020), so there is no further score. Convolutions are depthwise and
pointwise, followed by GroupNorm, which does not depend on the batch.

``forward`` and ``decode_levels`` are tensor operations alone, without control flow on values: both can be exported.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from tag2box.errors import UserError
from tag2box.models.backbone import Backbone
from tag2box.ops.losses import at_least_single

STRIDES = (8, 16, 32)
"""Pixels per cell of the built-in network's levels."""
_GROUPS = 8  # of GroupNorm
_PRIOR = 0.02  # initial probability of each class: background dominates, so that early losses are small
_INITIAL_DISTANCE = 4.0  # cells: initial boxes are squares of eight, like the anchors of detectors that have some

Levels = tuple[Float[Tensor, "N c h w"], ...]
"""Output per level: C class logits, then the distances left, top, right, bottom in cells, which are positive."""


@runtime_checkable
class StudentModule(Protocol):
    """What training, inference and export need of a network. It is an ``nn.Module``, too."""

    strides: tuple[int, ...]
    num_classes: int

    @property
    def backbone(self) -> Backbone:
        """Its backbone, whose preprocessing ``forward`` applies."""
        ...

    def forward(self, images: Float[Tensor, "N 3 H W"]) -> Levels:
        """Maps per level, from raw RGB pixels 0 .. 255; sides are multiples of the last stride."""
        ...


@dataclass(frozen=True, kw_only=True)
class StudentSettings:
    """Settings of a student's network: a subclass adds its fields and builds the network.

    Networks of other packages subclass it too, and are named ``network.kind = "package.module:Name"``.
    """

    def build(self, backbone: Backbone, num_classes: int) -> nn.Module:
        """The network, a ``StudentModule``; the heads are initialised from torch's global seed."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class AnchorFree(StudentSettings):
    """Feature pyramid and anchor-free head."""

    kind: Literal["anchor_free"] = "anchor_free"
    width: Annotated[int, Field(ge=8, le=1024, multiple_of=_GROUPS)] = 96
    """Channels of the feature pyramid and of the head."""
    depth: Annotated[int, Field(ge=1, le=8)] = 2
    """Convolutions of the head before the last one, for classes and for boxes."""
    frozen_stages: Annotated[int, Field(ge=0, le=100)] = 3
    """First stages of the backbone that stay as they are: of lite0's eight, the stem and the stages of stride 2 and 4.

    Their maps are the largest: training them, too, takes a quarter more time.
    """

    def build(self, backbone: Backbone, num_classes: int) -> "StudentNetwork":
        """The network."""
        return StudentNetwork(backbone, num_classes, self)


class StudentNetwork(nn.Module):
    """Backbone, feature pyramid, head."""

    strides = STRIDES

    def __init__(self, backbone: Backbone, num_classes: int, settings: AnchorFree) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.backbone = backbone
        self.pyramid = FeaturePyramid(backbone.pyramid_levels, settings.width)
        self.head = DistanceHead(settings.width, num_classes, settings.depth)
        used = backbone.pyramid_modules()
        backbone.requires_grad_(False)
        for module in used[settings.frozen_stages :]:
            module.requires_grad_(True)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, images: Float[Tensor, "N 3 H W"]) -> Levels:
        """Class logits and distances per level, from raw RGB pixels; sides are multiples of 32."""
        maps = self.pyramid(self.backbone.pyramid(images))
        return tuple(self.head(x, level) for level, x in enumerate(maps))


class FeaturePyramid(nn.Module):
    """Maps of one width at strides 8, 16 and 32, each with what coarser ones know.

    Strides that the backbone lacks are made of its last map by convolutions of stride 2.
    """

    def __init__(self, levels: Sequence[tuple[int, int]], width: int) -> None:
        super().__init__()
        known = {stride: channels for stride, channels in levels if stride in STRIDES}
        if not known or set(known) != set(STRIDES[: len(known)]):
            strides = ", ".join(str(stride) for stride, _ in levels)
            raise UserError(f"backbone: its maps have strides {strides}; a student needs 8, 8 and 16, or 8, 16 and 32")
        self.inputs = nn.ModuleList(nn.Conv2d(channels, width, 1) for channels in known.values())
        self.coarser = nn.ModuleList(_conv(width, stride=2) for _ in STRIDES[len(known) :])
        self.smooth = nn.ModuleList(_conv(width) for _ in STRIDES)

    def forward(self, maps: Sequence[Float[Tensor, "N c h w"]]) -> list[Float[Tensor, "N d h w"]]:
        """The pyramid, finest map first."""
        own = [layer(x) for layer, x in zip(self.inputs, maps, strict=True)]
        for layer in self.coarser:
            own.append(layer(own[-1]))
        for level in reversed(range(len(own) - 1)):
            own[level] = own[level] + functional.interpolate(own[level + 1], scale_factor=2.0, mode="nearest")
        return [layer(x) for layer, x in zip(self.smooth, own, strict=True)]


class DistanceHead(nn.Module):
    """Class logits and distances of every cell; all levels share the weights but for a scale of distances each."""

    def __init__(self, width: int, num_classes: int, depth: int) -> None:
        super().__init__()
        self.classes = nn.Sequential(*(_conv(width) for _ in range(depth)))
        self.sides = nn.Sequential(*(_conv(width) for _ in range(depth)))
        self.class_logits = nn.Conv2d(width, num_classes, 1)
        self.distances = nn.Conv2d(width, 4, 1)
        self.scales = nn.Parameter(torch.ones(len(STRIDES)))
        for layer in (self.class_logits, self.distances):
            nn.init.normal_(layer.weight, std=0.01)
        nn.init.constant_(self.class_logits.bias, math.log(_PRIOR / (1 - _PRIOR)))  # type: ignore[arg-type]
        nn.init.constant_(self.distances.bias, math.log(math.expm1(_INITIAL_DISTANCE)))  # type: ignore[arg-type]

    def forward(self, x: Float[Tensor, "N d h w"], level: int) -> Float[Tensor, "N c h w"]:
        """C class logits, then four distances in cells."""
        logits = self.class_logits(self.classes(x))
        distances = functional.softplus(at_least_single(self.distances(self.sides(x))) * self.scales[level])
        return torch.cat([at_least_single(logits), distances], dim=1)


def _conv(width: int, *, kernel: int = 5, stride: int = 1) -> nn.Sequential:
    """A depthwise and a pointwise convolution, GroupNorm, SiLU."""
    return nn.Sequential(
        nn.Conv2d(width, width, kernel, stride, padding=kernel // 2, groups=width, bias=False),
        nn.Conv2d(width, width, 1, bias=False),
        nn.GroupNorm(_GROUPS, width),
        nn.SiLU(inplace=True),
    )


# ---------------------------------------------------------------- decoding


def cell_centres(levels: Levels, strides: Sequence[int]) -> Float[Tensor, "A 3"]:
    """Centre (x, y) in pixels and stride of every cell: level after level, row after row.

    >>> cell_centres((torch.zeros(1, 5, 1, 2),), strides=(8,))
    tensor([[ 4.,  4.,  8.],
            [12.,  4.,  8.]])
    """
    parts = []
    for x, stride in zip(levels, strides, strict=True):
        rows, columns = (torch.arange(side, dtype=torch.float32, device=x.device) + 0.5 for side in x.shape[-2:])
        y, across = torch.meshgrid(rows * stride, columns * stride, indexing="ij")
        parts.append(torch.stack([across, y, torch.full_like(y, stride)], dim=2).reshape(-1, 3))
    return torch.cat(parts)


def decode_levels(
    levels: Levels, strides: Sequence[int]
) -> tuple[Float[Tensor, "N A C"], Float[Tensor, "N A 4"], Float[Tensor, "A 3"]]:
    """Class logits and boxes (xyxy, pixels of the network's input) of all cells, and the cells themselves."""
    cells = cell_centres(levels, strides)
    flat = torch.cat([x.flatten(2).transpose(1, 2) for x in levels], dim=1)  # (N, A, C + 4)
    logits, distances = flat[..., :-4], flat[..., -4:] * cells[:, 2:]
    centres = cells[:, :2]
    return logits, torch.cat([centres - distances[..., :2], centres + distances[..., 2:]], dim=2), cells
