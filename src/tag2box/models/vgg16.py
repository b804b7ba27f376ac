"""VGG16 (Simonyan and Zisserman, 2015) as in weakly supervised detection: stride 8, dilated conv5, fc6 and fc7.

Pool4 is removed and conv5 dilated by 2 instead; no ReLU follows conv5_3 (its raw map is pooled); RoIPool 7 x 7 replaces
pool5. Modules keep torchvision's indices, so that its weight files load by name.
"""

import warnings
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Annotated, ClassVar, Literal, Self

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from tag2box.errors import UserError
from tag2box.models.backbone import PIXELS_BUFFER, BackboneSettings, PreprocessBufferBackbone, normal_init
from tag2box.models.rng import RowRng, dropout
from tag2box.models.weights import PREPROCESS, Weights, absolute_weights, find_weights, load_into, state_dict
from tag2box.ops.roi import roi_pool
from tag2box.types import Proposals

_FROZEN = 10  # modules of conv1 and conv2, pools included


@dataclass(frozen=True, kw_only=True)
class Vgg16(BackboneSettings):
    """VGG16 with ImageNet weights, stored or from a file."""

    kind: Literal["vgg16"] = "vgg16"
    early_layers: ClassVar[int] = 2
    weights: str | None = None
    """Name of stored weights (``tag2box weights list``), or a file; preferably with fc6 and fc7."""
    preprocess: Literal["torchvision", "caffe"] | None = None
    """Preprocessing that a file was trained with, if the file leaves it open. Stored weights include their own."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Dropout rate after fc6 and fc7."""
    train_trunk: bool = True
    """Train conv3 to conv5. False freezes all convolutions, for small machines: the feature cache holds their maps."""
    neck_channels: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Channels of a trained 1 x 1 convolution before fc6; None is none. 128 makes fc6 a quarter as large. fc6 and fc7
    are then initialized randomly, whatever the weights hold."""
    neck_size: Annotated[int, Field(ge=1, le=65_536)] | None = None
    """Width of fc6 and fc7; None is that of the pretrained ones, 4,096. Another width is initialized randomly."""

    @property
    def layers(self) -> int:
        """The RoI map, and the 1 x 1 convolution if there is one."""
        return 1 if self.neck_channels is None else 2

    @property
    def trains_responses(self) -> bool:
        """Whether conv3 to conv5 or the 1 x 1 convolution is trained."""
        return self.train_trunk or self.neck_channels is not None

    @property
    def has_pretrained_neck(self) -> bool:
        """Whether fc6 and fc7 have the shapes of the pretrained ones."""
        return self.neck_channels is None and self.neck_size is None

    def with_absolute_paths(self) -> Self:
        """The same settings with an absolute path if ``weights`` is a file."""
        return replace(self, weights=absolute_weights(self.weights))

    def build(self, *, pretrained: bool = True) -> "Vgg16Backbone":
        """The network; without ``pretrained``, randomly initialized, to be loaded from a checkpoint."""
        if not pretrained:
            return Vgg16Backbone(self)
        if self.weights is None:
            raise UserError(
                "backbone.weights: VGG16 needs a name (`tag2box weights get vgg16`, or vgg16-conv) or a file of weights"
            )
        weights = find_weights(self.weights, self.preprocess)
        backbone = Vgg16Backbone(self)
        load_vgg16(backbone, weights, self.weights)
        return backbone


class Vgg16Backbone(PreprocessBufferBackbone):
    """VGG16 as trunk and fc neck; conv1 and conv2 are always frozen."""

    stride = 8
    early_layers = trunk_means = Vgg16.early_layers
    channels = state_dict.VGG_BLOCKS[-1][0]
    map_size = 7

    def __init__(self, settings: Vgg16, *, vector_size: int = state_dict.VGG_NECK) -> None:
        super().__init__(PREPROCESS[settings.preprocess or "torchvision"])
        self.vector_size = vector_size = settings.neck_size or vector_size
        self.has_pretrained_neck, self.layers = settings.has_pretrained_neck, settings.layers
        self.features = _convolutions()
        width = settings.neck_channels
        self.reduce = None if width is None else nn.Conv2d(self.channels, width, 1, bias=False)
        self.classifier = nn.Sequential(
            nn.Linear((width or self.channels) * self.map_size**2, vector_size),
            nn.ReLU(inplace=True),
            nn.Identity(),  # index of torchvision's dropout
            nn.Linear(vector_size, vector_size),
            nn.ReLU(inplace=True),
        )
        self.dropout = settings.dropout
        normal_init(self.classifier, std=0.01)
        if self.reduce is not None:
            nn.init.kaiming_normal_(self.reduce.weight)
        frozen = self.features[:_FROZEN] if settings.train_trunk else self.features
        frozen.requires_grad_(False)

    def trunk(self, images: Float[Tensor, "N 3 H W"]) -> Float[Tensor, "N 512 h w"]:
        """Photo maps at stride 8: conv1 to conv5_3, raw."""
        x: Tensor = self.features(self.preprocess(images))
        return x

    def layered_trunk(
        self, images: Float[Tensor, "N 3 H W"]
    ) -> tuple[Float[Tensor, "N 512 h w"], Float[Tensor, "N 2 h w"]]:
        """Photo maps, and the channel means of conv3 (after its pool) and conv4."""
        *blocks, conv3, conv4, conv5 = self.pyramid_modules()
        third = conv3(nn.Sequential(*blocks)(self.preprocess(images)))
        fourth = conv4(third)
        # the first layers of a block are not in place, so the maps of the block before it are intact
        return conv5(fourth), torch.stack([third.mean(dim=1), fourth.mean(dim=1)], dim=1)

    def early_responses(self, images: Float[Tensor, "N 3 H W"]) -> tuple[Float[Tensor, "N h w"], ...]:
        """Of conv2, conv3 and conv4, before their pools."""
        conv1, *blocks, _ = self.pyramid_modules()
        x, means = conv1(self.preprocess(images)), []
        for block in blocks:
            *layers, pool = block.children()
            x = nn.Sequential(*layers)(x)
            means.append(x.mean(dim=1))
            x = pool(x)
        return tuple(means)

    def roi_maps(self, features: Float[Tensor, "N 512 h w"], proposals: Proposals) -> Float[Tensor, "R 512 7 7"]:
        """RoIPool 7 x 7."""
        scale = 1 / self.stride
        return roi_pool(features, proposals.boxes, proposals.image_ids(), size=self.map_size, scale=scale)

    def neck(self, maps: Float[Tensor, "R 512 7 7"], row_rng: RowRng | None = None) -> Float[Tensor, "R F"]:
        """The 1 x 1 convolution, if there is one, then fc6 and fc7, each with ReLU and dropout."""
        return self._linear(self.neck_stem(maps), row_rng)

    def neck_stem(self, maps: Float[Tensor, "R 512 7 7"]) -> Float[Tensor, "R c 7 7"]:
        """The 1 x 1 convolution without its ReLU."""
        return maps if self.reduce is None else self.reduce(maps)

    def neck_tail(
        self, stem: Float[Tensor, "R c 7 7"], factors: Float[Tensor, "R 7 7"], row_rng: RowRng | None = None
    ) -> Float[Tensor, "R F"]:
        """The rest of ``neck``, after multiplying the cells of the stem's output by factors."""
        return self._linear(stem * factors[:, None].to(stem.dtype), row_rng)

    def responses(self, maps: Float[Tensor, "R 512 7 7"], stem: Float[Tensor, "R c 7 7"]) -> Float[Tensor, "R L 7 7"]:
        """Of f, and of the 1 x 1 convolution after its ReLU if there is one, which is trained even if f is frozen."""
        own = maps.mean(dim=1)
        return own[:, None] if self.reduce is None else torch.stack([own, stem.relu().mean(dim=1)], dim=1)

    def _linear(self, stem: Float[Tensor, "R c 7 7"], row_rng: RowRng | None) -> Float[Tensor, "R F"]:
        fc6, fc7 = self.classifier[:3], self.classifier[3:]
        cells = (stem if self.reduce is None else stem.relu()).flatten(1)
        return dropout(fc7(dropout(fc6(cells), self.dropout, row_rng)), self.dropout, row_rng)

    def pyramid_modules(self) -> tuple[nn.Module, ...]:
        """conv1 to conv5."""
        ends = [0, *accumulate(2 * count + 1 for _, count in state_dict.VGG_BLOCKS)]
        return tuple(self.features[first:last] for first, last in pairwise(ends))

    def roi_map_modules(self) -> tuple[nn.Module, ...]:
        """The convolutions."""
        return (self.features,)


def _convolutions() -> nn.Sequential:
    layers: list[nn.Module] = []
    inputs = 3
    for block, (outputs, count) in enumerate(state_dict.VGG_BLOCKS, start=1):
        dilation = 2 if block == 5 else 1
        for _ in range(count):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=dilation, dilation=dilation), nn.ReLU(inplace=True)]
            inputs = outputs
        layers.append(nn.MaxPool2d(2) if block < 4 else nn.Identity())  # index of torchvision's pool4
    return nn.Sequential(*layers[:-2])  # neither the ReLU after conv5_3 nor pool5


def load_vgg16(backbone: Vgg16Backbone, weights: Weights, where: str) -> None:
    """Load the convolutions, their preprocessing and, if present and of the same shape, fc6 and fc7.

    Without fc6 and fc7 these stay randomly initialized, with a warning unless the settings have another neck.
    """
    if weights.architecture not in {"vgg16", "vgg16-conv"}:
        raise UserError(f"backbone.weights = {where}: these are weights of {weights.architecture}, not of vgg16")
    neck = {n: value for n, value in backbone.state_dict().items() if n.startswith(("classifier.", "reduce."))}
    own = {} if weights.architecture == "vgg16" and backbone.has_pretrained_neck else neck
    known = {n: value for n, value in weights.tensors.items() if not own or not n.startswith("classifier.")}
    load_into(backbone, {**own, **known, PIXELS_BUFFER: weights.preprocess.to_tensor()}, where)
    if own and backbone.has_pretrained_neck:
        warnings.warn(
            f"{where}: holds the convolutions alone, so fc6 and fc7 start random and learn from your photos alone; "
            "prefer weights with fc6 and fc7",
            stacklevel=2,
        )
