"""VGG16 (Simonyan and Zisserman, 2015) as weakly supervised detection uses it: stride 8, dilated conv5, fc6 and fc7.

Pool4 is removed and conv5 dilated by 2 in its place; no ReLU follows conv5_3 (its raw map is pooled); RoIPool 7 x 7
replaces pool5. Modules keep torchvision's numbers, so that its weight files load by name.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from tag2box.errors import UserError
from tag2box.maths.roi import roi_pool
from tag2box.model.backbone import Backbone, Preprocess, normal_init
from tag2box.model.weights import load_into, read_state_dict
from tag2box.types import Proposals

PREPROCESS = {
    "torchvision": Preprocess(order="rgb", scale=1 / 255, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)),
    "caffe": Preprocess(order="bgr", scale=1.0, mean=(102.9801, 115.9465, 122.7717), std=(1.0, 1.0, 1.0)),
}
_BLOCKS = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))  # channels and convolutions of conv1 .. conv5
_FROZEN = 10  # modules of conv1 and conv2, pools included


@dataclass(frozen=True, kw_only=True)
class Vgg16:
    """VGG16 with ImageNet weights from a file."""

    kind: Literal["vgg16"] = "vgg16"
    weights: Path | None = None
    """State dict with torchvision's names: ``features.N`` and, wanted but not required, ``classifier.0`` and ``.3``."""
    preprocess: Literal["torchvision", "caffe"] = "torchvision"
    """What the weights were trained on: RGB 0 .. 1 with mean and deviation, or BGR 0 .. 255 less the mean."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Dropout after fc6 and fc7."""

    def build(self, *, pretrained: bool = True) -> Vgg16Backbone:
        """The network; without ``pretrained`` its weights are random, to be loaded from a checkpoint."""
        if pretrained and self.weights is None:
            raise UserError("vgg16.weights: no file given; expected a VGG16 state dict (.safetensors or .pth)")
        backbone = Vgg16Backbone(self)
        if pretrained and self.weights is not None:
            load_vgg16(backbone, self.weights)
        return backbone


class Vgg16Backbone(Backbone):
    """VGG16 as trunk and fc neck; conv1 and conv2 do not learn."""

    stride = 8
    channels = _BLOCKS[-1][0]
    map_size = 7

    def __init__(self, settings: Vgg16, *, vector_size: int = 4096) -> None:
        super().__init__()
        self.preprocess = PREPROCESS[settings.preprocess]
        self.vector_size = vector_size
        self.features = _convolutions()
        self.classifier = nn.Sequential(
            nn.Linear(self.channels * self.map_size**2, vector_size),
            nn.ReLU(inplace=True),
            nn.Dropout(settings.dropout),
            nn.Linear(vector_size, vector_size),
            nn.ReLU(inplace=True),
            nn.Dropout(settings.dropout),
        )
        normal_init(self.classifier, std=0.01)
        self.features[:_FROZEN].requires_grad_(False)

    def trunk(self, images: Float[Tensor, "N 3 H W"]) -> Float[Tensor, "N 512 h w"]:
        """Photo maps at stride 8: conv1 to conv5_3, raw."""
        x: Tensor = self.features(self.preprocess(images))
        return x

    def roi_maps(self, features: Float[Tensor, "N 512 h w"], proposals: Proposals) -> Float[Tensor, "R 512 7 7"]:
        """RoIPool 7 x 7."""
        scale = 1 / self.stride
        return roi_pool(features, proposals.boxes, proposals.image_ids(), size=self.map_size, scale=scale)

    def neck(self, maps: Float[Tensor, "R 512 7 7"]) -> Float[Tensor, "R F"]:
        """fc6 and fc7, each with ReLU and dropout."""
        x: Tensor = self.classifier(maps.flatten(1))
        return x

    def map_parts(self) -> tuple[nn.Module, ...]:
        """The convolutions."""
        return (self.features,)


def _convolutions() -> nn.Sequential:
    layers: list[nn.Module] = []
    inputs = 3
    for block, (outputs, count) in enumerate(_BLOCKS, start=1):
        dilation = 2 if block == 5 else 1
        for _ in range(count):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=dilation, dilation=dilation), nn.ReLU(inplace=True)]
            inputs = outputs
        layers.append(nn.MaxPool2d(2) if block < 4 else nn.Identity())  # keeps the place of pool4 in the numbering
    return nn.Sequential(*layers[:-2])  # neither the ReLU after conv5_3 nor pool5


def load_vgg16(backbone: Vgg16Backbone, path: Path) -> None:
    """Load torchvision-named weights: the convolutions, and fc6 and fc7 where the file has them.

    Warns where it has not: fc6 and fc7 then stay random.
    """
    state = {name: value for name, value in read_state_dict(path).items() if not name.startswith("classifier.6.")}
    if any(name.startswith("classifier.") for name in state):
        load_into(backbone, state, str(path))
        return
    prefix = "features."
    load_into(
        backbone.features,
        {name.removeprefix(prefix): value for name, value in state.items()},
        f"{path} (without {prefix!r})",
    )
    warnings.warn(
        f"{path}: holds the convolutions alone, so fc6 and fc7 start random; a trunk without a pretrained neck "
        "needs far more photos, and tends to find parts of objects; prefer weights with classifier.0 and classifier.3",
        stacklevel=2,
    )
