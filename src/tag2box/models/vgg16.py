"""VGG16 (Simonyan and Zisserman, 2015) as weakly supervised detection uses it: stride 8, dilated conv5, fc6 and fc7.

Pool4 is removed and conv5 dilated by 2 in its place; no ReLU follows conv5_3 (its raw map is pooled); RoIPool 7 x 7
replaces pool5. Modules keep torchvision's numbers, so that its weight files load by name.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, Self

from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from tag2box.errors import UserError
from tag2box.models.backbone import (
    PIXELS_BUFFER,
    Backbone,
    BackboneSettings,
    Preprocess,
    from_numbers,
    normal_init,
    to_numbers,
)
from tag2box.models.drop_block import dropout
from tag2box.models.rng import RowRng
from tag2box.models.weights.architectures import PREPROCESS, VGG_BLOCKS, VGG_NECK, Weights
from tag2box.models.weights.state_dict import load_into
from tag2box.models.weights.weight_cache import find_weights, is_weight_file
from tag2box.ops.roi import roi_pool
from tag2box.types import Proposals

_FROZEN = 10  # modules of conv1 and conv2, pools included


@dataclass(frozen=True, kw_only=True)
class Vgg16(BackboneSettings):
    """VGG16 with ImageNet weights, stored or from a file."""

    kind: Literal["vgg16"] = "vgg16"
    weights: str | None = None
    """Name of stored weights (``tag2box weights list``), or a file. Best with fc6 and fc7 in it."""
    preprocess: Literal["torchvision", "caffe"] | None = None
    """The pixels a file was trained on, where it does not tell. Stored weights bring their own, and may not differ."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Dropout after fc6 and fc7."""
    train_trunk: bool = True
    """Let conv3 to conv5 learn. False: all convolutions are frozen, for small machines; their maps are kept on disk."""

    def with_absolute_paths(self) -> Self:
        """The same settings with the weight file, if there is one, named by its absolute path."""
        if self.weights is None or not is_weight_file(self.weights):
            return self
        return replace(self, weights=f"{Path(self.weights).absolute()}")

    def build(self, *, pretrained: bool = True) -> Vgg16Backbone:
        """The network; without ``pretrained`` its weights are random, to be loaded from a checkpoint."""
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


class Vgg16Backbone(Backbone):
    """VGG16 as trunk and fc neck; conv1 and conv2 never learn.

    Its preprocessing is a buffer among its weights: whatever loads these, loads it.
    """

    stride = 8
    channels = VGG_BLOCKS[-1][0]
    map_size = 7
    pixels: Tensor

    def __init__(self, settings: Vgg16, *, vector_size: int = VGG_NECK) -> None:
        super().__init__()
        self.register_buffer(PIXELS_BUFFER, to_numbers(PREPROCESS[settings.preprocess or "torchvision"]))
        self.vector_size = vector_size
        self.features = _convolutions()
        self.classifier = nn.Sequential(
            nn.Linear(self.channels * self.map_size**2, vector_size),
            nn.ReLU(inplace=True),
            nn.Identity(),  # keeps the place of dropout in the numbering
            nn.Linear(vector_size, vector_size),
            nn.ReLU(inplace=True),
        )
        self.dropout = settings.dropout
        normal_init(self.classifier, std=0.01)
        frozen = self.features[:_FROZEN] if settings.train_trunk else self.features
        frozen.requires_grad_(False)

    @property  # only weights that are loaded set it
    def preprocess(self) -> Preprocess:  # type: ignore[override]
        """The pixels that the weights now in this network learnt from."""
        return from_numbers(self.pixels)

    def trunk(self, images: Float[Tensor, "N 3 H W"]) -> Float[Tensor, "N 512 h w"]:
        """Photo maps at stride 8: conv1 to conv5_3, raw."""
        x: Tensor = self.features(self.preprocess(images))
        return x

    def roi_maps(self, features: Float[Tensor, "N 512 h w"], proposals: Proposals) -> Float[Tensor, "R 512 7 7"]:
        """RoIPool 7 x 7."""
        scale = 1 / self.stride
        return roi_pool(features, proposals.boxes, proposals.image_ids(), size=self.map_size, scale=scale)

    def neck(self, maps: Float[Tensor, "R 512 7 7"], row_rng: RowRng | None = None) -> Float[Tensor, "R F"]:
        """fc6 and fc7, each with ReLU and dropout."""
        fc6, fc7 = self.classifier[:3], self.classifier[3:]
        return dropout(fc7(dropout(fc6(maps.flatten(1)), self.dropout, row_rng)), self.dropout, row_rng)

    def roi_map_modules(self) -> tuple[nn.Module, ...]:
        """The convolutions."""
        return (self.features,)


def _convolutions() -> nn.Sequential:
    layers: list[nn.Module] = []
    inputs = 3
    for block, (outputs, count) in enumerate(VGG_BLOCKS, start=1):
        dilation = 2 if block == 5 else 1
        for _ in range(count):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=dilation, dilation=dilation), nn.ReLU(inplace=True)]
            inputs = outputs
        layers.append(nn.MaxPool2d(2) if block < 4 else nn.Identity())  # keeps the place of pool4 in the numbering
    return nn.Sequential(*layers[:-2])  # neither the ReLU after conv5_3 nor pool5


def load_vgg16(backbone: Vgg16Backbone, weights: Weights, where: str) -> None:
    """Load the convolutions, their preprocessing and, where there are any, fc6 and fc7.

    Warns where there are none: fc6 and fc7 then stay random.
    """
    if weights.architecture not in {"vgg16", "vgg16-conv"}:
        raise UserError(f"backbone.weights = {where}: these are weights of {weights.architecture}, not of vgg16")
    neck = {name: value for name, value in backbone.state_dict().items() if name.startswith("classifier.")}
    own = {} if weights.architecture == "vgg16" else neck
    load_into(backbone, {**own, **weights.tensors, PIXELS_BUFFER: to_numbers(weights.preprocess)}, where)
    if own:
        warnings.warn(
            f"{where}: holds the convolutions alone, so fc6 and fc7 start random and have but your photos to learn "
            "from; prefer weights with fc6 and fc7",
            stacklevel=2,
        )
