"""EfficientNet-lite0 (Liu, 2020; Tan and Le, "EfficientNet", 2019) as a RoI backbone: the one for a CPU.

Trunk: stem and blocks 0-10 (stride 16, 112 channels). RoI map f (320 channels): RoI pooling, then blocks 11-15. Neck:
the head convolution and the mean over cells. All of it is pretrained.

Batch norm always uses its stored statistics, so it is folded into the convolution before it: fewer passes over memory,
and no state that training mode could change.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, ClassVar, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from tag2box.errors import UserError
from tag2box.models.backbone import Backbone, BackboneSettings
from tag2box.models.rng import RowRng, dropout
from tag2box.models.runtime import depthwise_conv, run
from tag2box.models.weights import LITE0_PACKAGE, PREPROCESS, lite0_weights, load_into, state_dict
from tag2box.ops.roi import channel_mean, masked_mean, roi_align, roi_pool
from tag2box.types import Proposals

_TRUNK_BLOCKS = 11
_EARLY_BLOCKS = (0, 2, 4)  # at strides 2, 4 and 8
_PYRAMID_STAGES = (3, 5, 7)  # the last stages of strides 8, 16 and 32; the stem is 0
_BATCH_NORM_EPS = 1e-3
_CHUNK = 64  # proposals per pass through frozen tail blocks: their maps then stay in the CPU cache


@dataclass(frozen=True, kw_only=True)
class Lite0(BackboneSettings):
    """EfficientNet-lite0 with ImageNet weights from a pip package."""

    kind: Literal["lite0"] = "lite0"
    early_layers: ClassVar[int] = 2
    pooling: Literal["align", "max"] = "align"
    """RoI pooling: RoIAlign, whose values are like those the blocks were pretrained on, or max pooling (RoIPool)."""
    pool_size: Annotated[int, Field(ge=2, le=64, multiple_of=2)] = 14
    """Side of the pooled grid before blocks 11-15, which halve it: 14 gives the paper's 7 x 7 maps, 8 is cheaper."""
    train_tail: bool = False
    """Train blocks 11-15. The feature cache then holds maps of photos instead of RoI maps."""
    train_blocks: Annotated[int, Field(ge=1, le=5)] = 5
    """With ``train_tail``, only so many of the last blocks are trained: 1 is block 15, which makes the RoI map f."""
    train_trunk: bool = False
    """Train stem and blocks 0-10. Nothing is cached then, and photos are read in every iteration."""
    train_neck: bool = True
    """Train the head convolution."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout rate on the feature vector of a proposal."""
    pooled: bool = False
    """RoI maps of one cell, with the feature vector: a small cache and fast training, but no cells to drop or mask.

    Needs a frozen neck (``train_neck = false``), which is then part of the cached network.
    """

    @property
    def layers(self) -> int:
        """The RoI map and the head convolution, or the only one if ``pooled``."""
        return 1 if self.pooled else 2

    @property
    def trains_responses(self) -> bool:
        """Whether anything is trained at all; the head convolution is the last layer."""
        return self.train_trunk or self.train_tail or self.train_neck

    def build(self, *, pretrained: bool = True) -> "Lite0Backbone":
        """The network; without ``pretrained``, randomly initialized, to be loaded from a checkpoint."""
        if self.pooled and (self.train_neck or self.train_tail or self.train_trunk):
            raise UserError(
                "backbone.pooled: needs a frozen network; set train_neck=false, train_tail=false and train_trunk=false"
            )
        backbone = (PooledLite0Backbone if self.pooled else Lite0Backbone)(self)
        if pretrained:
            load_into(backbone, fold_weights(lite0_weights()), LITE0_PACKAGE)
        return backbone


class Lite0Backbone(Backbone):
    """EfficientNet-lite0 as trunk, RoI tail and neck."""

    preprocess = PREPROCESS["lite0"]
    stride = 16
    channels = state_dict.LITE0_STAGES[-1][2]
    vector_size = state_dict.LITE0_HEAD
    layers = 2
    early_layers = Lite0.early_layers

    def __init__(self, settings: Lite0) -> None:
        super().__init__()
        self.pool = roi_align if settings.pooling == "align" else roi_pool
        self.pool_size = settings.pool_size
        self.map_size = settings.pool_size // 2
        blocks = _blocks()
        self.stem = _Conv(3, state_dict.LITE0_STEM, kernel=3, stride=2)
        self.body = nn.Sequential(*blocks[:_TRUNK_BLOCKS])
        self.tail = nn.Sequential(*blocks[_TRUNK_BLOCKS:])
        self.head = _Conv(state_dict.LITE0_STAGES[-1][2], state_dict.LITE0_HEAD)
        self.dropout = settings.dropout
        self.stem.requires_grad_(settings.train_trunk)
        self.body.requires_grad_(settings.train_trunk)
        self.tail.requires_grad_(False)
        self.tail[-settings.train_blocks :].requires_grad_(settings.train_tail)
        self.head.requires_grad_(settings.train_neck)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def trunk(self, images: Float[Tensor, "N 3 H W"]) -> Float[Tensor, "N 112 h w"]:
        """Photo maps at stride 16. Photos are padded to a multiple of 16, so that every size halves evenly."""
        height, width = images.shape[-2:]
        pixels = nn.functional.pad(self.preprocess(images), (0, -width % self.stride, 0, -height % self.stride))
        pixels = pixels.contiguous(memory_format=torch.channels_last)
        return run(self, "trunk", lambda x: self.body(self.stem(x)), pixels)

    def roi_maps(self, features: Float[Tensor, "N 112 h w"], proposals: Proposals) -> Float[Tensor, "R 320 s s"]:
        """RoI pooling, then blocks 11-15; in chunks of proposals if these are frozen."""
        ids = proposals.image_ids()
        is_trained = features.requires_grad or any(p.requires_grad for p in self.tail.parameters())
        step = max(1, len(ids)) if is_trained else _CHUNK
        parts = [
            run(self, "tail", self.tail, self.pool(features, boxes, image, size=self.pool_size, scale=1 / self.stride))
            for boxes, image in zip(torch.split(proposals.boxes, step), torch.split(ids, step), strict=True)
        ]
        return torch.cat(parts)

    def layered_roi_maps(
        self, features: Float[Tensor, "N 112 h w"], means: Float[Tensor, "N 0 h w"], proposals: Proposals
    ) -> tuple[Float[Tensor, "R 320 s s"], Float[Tensor, "R 2 s s"]]:
        """RoI maps, and the channel means of the trunk (block 10) and of block 14, whose maps f is computed from."""
        ids, scale, made = proposals.image_ids(), 1 / self.stride, []
        step = max(1, len(ids)) if any(p.requires_grad for p in self.tail.parameters()) else _CHUNK
        *blocks, last = self.tail
        for boxes, image in zip(torch.split(proposals.boxes, step), torch.split(ids, step), strict=True):
            x = self.pool(features, boxes, image, size=self.pool_size, scale=scale)
            for block in blocks:
                x = block(x)
            made.append((last(x), x.mean(dim=1, keepdim=True)))
        trunk = roi_align(features.mean(dim=1, keepdim=True), proposals.boxes, ids, size=self.map_size, scale=scale)
        return torch.cat([maps for maps, _ in made]), torch.cat([trunk, torch.cat([mean for _, mean in made])], dim=1)

    def early_responses(self, images: Float[Tensor, "N 3 H W"]) -> tuple[Float[Tensor, "N h w"], ...]:
        """Of the depthwise filters in blocks 0, 2 and 4, which are non-negative; blocks end in a linear projection."""
        x, means = self.stem(self.preprocess(images)), []
        for index in range(_EARLY_BLOCKS[-1] + 1):
            block = self.body[index]
            assert isinstance(block, _Block)
            if index in _EARLY_BLOCKS:
                means.append(block.depthwise(block.expand(x)).mean(dim=1))
            x = block(x)
        return tuple(means)

    @property
    def photo_channels(self) -> int:
        """The channels of the head convolution."""
        return self.vector_size

    def photo_features(self, trunk: Float[Tensor, "N 112 h w"], *, dense: bool = False) -> Float[Tensor, "N 1280 h w"]:
        """Blocks 11-15 and the head convolution, at stride 32, or at stride 16 if ``dense``."""
        return run(self, "dense" if dense else "features", self._dense if dense else self._features, trunk)

    def _features(self, trunk: Float[Tensor, "N 112 h w"]) -> Float[Tensor, "N 1280 h1 w1"]:
        y: Tensor = self.head(self.tail(trunk))
        return y

    def _dense(self, trunk: Float[Tensor, "N 112 h w"]) -> Float[Tensor, "N 1280 h w"]:
        x = trunk
        for block in self.tail:
            assert isinstance(block, _Block)
            x = block.dilated(x)
        y: Tensor = self.head(x)
        return y

    def photo_modules(self) -> tuple[nn.Module, ...]:
        """All of it."""
        return (self.stem, self.body, self.tail, self.head)

    def pyramid(self, images: Float[Tensor, "N 3 H W"]) -> tuple[Float[Tensor, "N c h w"], ...]:
        """The last maps at strides 8, 16 and 32."""
        x, maps = self.preprocess(images).contiguous(memory_format=torch.channels_last), []
        for number, stage in enumerate(self.pyramid_modules()):
            x = stage(x)
            if number in _PYRAMID_STAGES:
                maps.append(x)
        return tuple(maps)

    @property
    def pyramid_levels(self) -> tuple[tuple[int, int], ...]:
        """40, 112 and 320 channels."""
        widths = [state_dict.LITE0_STAGES[number - 1][2] for number in _PYRAMID_STAGES]
        return tuple(zip((8, 16, 32), widths, strict=True))

    def pyramid_modules(self) -> tuple[nn.Module, ...]:
        """The stem, then stages 1 to 7."""
        blocks, ends = [*self.body, *self.tail], [0]
        for *_, count in state_dict.LITE0_STAGES:
            ends.append(ends[-1] + count)
        return (self.stem, *(nn.Sequential(*blocks[first:last]) for first, last in pairwise(ends)))

    def neck(self, maps: Float[Tensor, "R 320 s s"], row_rng: RowRng | None = None) -> Float[Tensor, "R 1280"]:
        """Head convolution, ReLU6, mean over cells, dropout."""
        return self.neck_tail(self.neck_stem(maps), maps.new_ones(len(maps), *maps.shape[2:]), row_rng)

    def neck_stem(self, maps: Float[Tensor, "R 320 s s"]) -> Float[Tensor, "R cells 1280"]:
        """The head convolution without its bias."""
        cells = maps.flatten(2).transpose(1, 2)  # (R, s * s, 320)
        # a 1 x 1 convolution as a matrix product: a quarter faster in torch on maps this small
        return nn.functional.linear(cells, self.head.weight.flatten(1))

    def neck_tail(
        self, stem: Float[Tensor, "R cells 1280"], factors: Float[Tensor, "R s s"], row_rng: RowRng | None = None
    ) -> Float[Tensor, "R 1280"]:
        """Bias, ReLU6, mean over cells, dropout."""
        assert self.head.bias is not None
        return dropout(masked_mean(stem, factors.flatten(1), self.head.bias), self.dropout, row_rng)

    def responses(
        self, maps: Float[Tensor, "R 320 s s"], stem: Float[Tensor, "R cells 1280"]
    ) -> Float[Tensor, "R 2 s s"]:
        """Of f, and of the head convolution after its ReLU6, which is trained even if f is frozen."""
        assert self.head.bias is not None
        head = channel_mean(stem, self.head.bias).view(len(maps), *maps.shape[2:])
        return torch.stack([maps.mean(dim=1), head], dim=1)

    def roi_map_key(self) -> str:
        """The base key and the RoI pooling."""
        return f"{super().roi_map_key()} {self.pool.__name__}"

    def roi_map_modules(self) -> tuple[nn.Module, ...]:
        """Stem, body and tail."""
        return (self.stem, self.body, self.tail)

    def trunk_modules(self) -> tuple[nn.Module, ...]:
        """Stem and body; the tail runs on proposals."""
        return (self.stem, self.body)


class PooledLite0Backbone(Lite0Backbone):
    """EfficientNet-lite0 whose RoI maps are the feature vectors themselves; the neck only drops out."""

    channels = state_dict.LITE0_HEAD
    layers = 1
    early_layers = 0

    def __init__(self, settings: Lite0) -> None:
        super().__init__(settings)
        self.map_size = 1

    def roi_maps(self, features: Float[Tensor, "N 112 h w"], proposals: Proposals) -> Float[Tensor, "R 1280 1 1"]:
        """The feature vector of each proposal."""
        maps = super().roi_maps(features, proposals)
        cells, ones = super().neck_stem(maps), maps.new_ones(len(maps), maps.shape[2] * maps.shape[3])
        assert self.head.bias is not None
        return masked_mean(cells, ones, self.head.bias)[:, :, None, None]

    def neck_stem(self, maps: Float[Tensor, "R 1280 1 1"]) -> Float[Tensor, "R 1280 1 1"]:
        """The identity."""
        return maps

    def neck_tail(
        self, stem: Float[Tensor, "R 1280 1 1"], factors: Float[Tensor, "R 1 1"], row_rng: RowRng | None = None
    ) -> Float[Tensor, "R 1280"]:
        """Dropout."""
        return dropout((stem * factors[:, None].to(stem.dtype)).flatten(1), self.dropout, row_rng)

    def responses(self, maps: Float[Tensor, "R 1280 1 1"], stem: Float[Tensor, "R ..."]) -> Float[Tensor, "R 1 1 1"]:
        """Of the only layer and cell."""
        return maps.mean(dim=1, keepdim=True)

    def roi_map_key(self) -> str:
        """The key, and the size of the grid that is averaged."""
        return f"{super().roi_map_key()} pooled {self.pool_size}"

    def roi_map_modules(self) -> tuple[nn.Module, ...]:
        """All of it."""
        return (self.stem, self.body, self.tail, self.head)


class _Conv(nn.Conv2d):
    """A convolution with its batch norm folded in, then ReLU6 unless ``linear``.

    A stride of 2 pads one cell less before than after, like TensorFlow on even sizes: the weights were trained so.
    """

    def __init__(
        self, inputs: int, outputs: int, *, kernel: int = 1, stride: int = 1, groups: int = 1, linear: bool = False
    ) -> None:
        super().__init__(inputs, outputs, kernel, stride, padding=kernel // 2 if stride == 1 else 0, groups=groups)
        self.before = (kernel // 2 - 1, kernel // 2) * 2 if stride == 2 else None
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        padded = x if self.before is None else nn.functional.pad(x, self.before)
        y = depthwise_conv(padded, self) if self.groups > 1 else super().forward(padded)
        return y if self.linear else nn.functional.relu6(y, inplace=True)

    def dilated(self, x: Tensor) -> Tensor:
        """Stride 1 for a stride of 2, dilation 2 for stride 1: with every second cell dropped, ``forward``."""
        half = self.kernel_size[0] // 2
        padded = nn.functional.pad(x, (half - 1, half + 1) * 2 if self.before else (2 * half,) * 4)
        dilation = 1 if self.before else 2
        y = nn.functional.conv2d(padded, self.weight, self.bias, dilation=dilation, groups=self.groups)
        return nn.functional.relu6(y, inplace=True)


class _Block(nn.Module):
    """Inverted residual: expand, filter each channel, project; added to its input if the shapes agree."""

    def __init__(self, inputs: int, outputs: int, *, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        inner = inputs * expansion
        self.expand = _Conv(inputs, inner) if expansion > 1 else nn.Identity()
        self.depthwise = _Conv(inner, inner, kernel=kernel, stride=stride, groups=inner)
        self.project = _Conv(inner, outputs, linear=True)
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.project(self.depthwise(self.expand(x)))
        return x + y if self.residual else y

    def dilated(self, x: Tensor) -> Tensor:
        """The block at twice the resolution: its own stride is skipped, and that of a block before it made up for."""
        y: Tensor = self.project(self.depthwise.dilated(self.expand(x)))
        return x + y if self.residual else y


def _blocks() -> list[_Block]:
    widths = [state_dict.LITE0_STEM] + [
        outputs for _, _, outputs, count in state_dict.LITE0_STAGES for _ in range(count)
    ]
    shapes = [
        (kernel, stride if i == 0 else 1) for kernel, stride, _, count in state_dict.LITE0_STAGES for i in range(count)
    ]
    return [
        _Block(inputs, outputs, kernel=kernel, stride=stride, expansion=1 if index == 0 else 6)
        for index, ((inputs, outputs), (kernel, stride)) in enumerate(zip(pairwise(widths), shapes, strict=True))
    ]


def fold_weights(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Fold the pip package's batch norms into its convolutions, under the names of ``Lite0Backbone``."""
    pairs = [("_conv_stem", "_bn0", "stem"), ("_conv_head", "_bn1", "head")]
    for index in range(sum(count for *_, count in state_dict.LITE0_STAGES)):
        ours = f"body.{index}" if index < _TRUNK_BLOCKS else f"tail.{index - _TRUNK_BLOCKS}"
        names = (
            ("_expand_conv", "_bn0", "expand"),
            ("_depthwise_conv", "_bn1", "depthwise"),
            ("_project_conv", "_bn2", "project"),
        )
        pairs += [
            (f"_blocks.{index}.{conv}", f"_blocks.{index}.{norm}", f"{ours}.{name}") for conv, norm, name in names
        ]
    folded: dict[str, Tensor] = {}
    for conv, norm, name in pairs:
        if f"{conv}.weight" not in state:
            continue  # the first block has no expansion
        scale = state[f"{norm}.weight"].double() / (state[f"{norm}.running_var"].double() + _BATCH_NORM_EPS).sqrt()
        weight = state[f"{conv}.weight"].double() * scale.view(-1, 1, 1, 1)
        bias = state[f"{norm}.bias"].double() - state[f"{norm}.running_mean"].double() * scale
        folded |= {f"{name}.weight": weight.float(), f"{name}.bias": bias.float()}
    return folded
