"""R50-WS and R101-WS: ResNets redesigned for weakly supervised detection (Shen et al., 2020, section 4).

The stem is three 3 x 3 convolutions and a max-pool. Later maps are halved by a max-pool at the end of a stage, not by a
strided convolution, which would drop three of four cells: here once, after res2. res4 and res5 are dilated by 2
instead, so that the trunk has stride 8. RoIPool 7 x 7 and two linear layers follow, as in VGG16.

Batch norm is frozen and always uses its stored statistics. It is a fixed scale and shift per channel, folded into the
convolution before it at each call: gradients are those of a convolution followed by the norm, and there is no state
that training mode could change.
"""

import warnings
from dataclasses import dataclass, replace
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

_BATCH_NORM_EPS = 1e-5
_DILATION = {2: 1, 3: 1, 4: 2, 5: 2}  # of the 3 x 3 convolutions of each stage
_BRANCH = 0.25  # initial scale of a block's residual branch: sums of many full-size branches would explode


@dataclass(frozen=True, kw_only=True)
class ResNetWs(BackboneSettings):
    """R50-WS or R101-WS with ImageNet weights, stored or from a file."""

    kind: Literal["resnet_ws"] = "resnet_ws"
    early_layers: ClassVar[int] = 2
    depth: Literal[50, 101] = 50
    """50 for R50-WS, 101 for R101-WS; must match the weights."""
    weights: str | None = None
    """Name of stored weights (``tag2box weights convert`` stores a file under a name), or a file."""
    preprocess: Literal["torchvision", "caffe"] | None = None
    """Preprocessing that a file was trained with, if the file leaves it open. Stored weights include their own."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Dropout rate after each of the two linear layers."""

    @property
    def architecture(self) -> str:
        """The name of its weights in ``tag2box weights list``."""
        return f"r{self.depth}-ws"

    @property
    def title(self) -> str:
        """The name in tables and error messages."""
        return self.architecture

    def with_absolute_paths(self) -> Self:
        """The same settings with an absolute path if ``weights`` is a file."""
        return replace(self, weights=absolute_weights(self.weights))

    def build(self, *, pretrained: bool = True) -> "ResNetWsBackbone":
        """The network; without ``pretrained``, randomly initialized, to be loaded from a checkpoint."""
        if not pretrained:
            return ResNetWsBackbone(self)
        if self.weights is None:
            name = self.architecture
            raise UserError(
                f"backbone.weights: {name} needs a file of weights, or the name that "
                f"`tag2box weights convert FILE --name {name}` stored one under"
            )
        weights = find_weights(self.weights, self.preprocess)
        backbone = ResNetWsBackbone(self)
        load_resnet_ws(backbone, weights, self.weights)
        return backbone


class ResNetWsBackbone(PreprocessBufferBackbone):
    """R-WS as trunk and fc neck; the stem and res2 are always frozen."""

    stride = 8
    early_layers = trunk_means = ResNetWs.early_layers
    map_size = 7

    def __init__(
        self, settings: ResNetWs, *, width: int = state_dict.WS_WIDTH, neck: tuple[int, int] = state_dict.WS_NECK
    ) -> None:
        super().__init__(PREPROCESS[settings.preprocess or "torchvision"])
        self.architecture = settings.architecture
        self.channels = 32 * width
        self.vector_size = neck[1]
        self.dropout = settings.dropout
        blocks = state_dict.WS_BLOCKS[settings.architecture]
        self.stem = _Stem(width)
        self.res2, self.res3, self.res4, self.res5 = (
            _stage(width, stage, count) for stage, count in enumerate(blocks, start=2)
        )
        self.fc6 = nn.Linear(self.channels * self.map_size**2, neck[0])
        self.fc7 = nn.Linear(*neck)
        for layer in (self.fc6, self.fc7):
            normal_init(layer, std=0.01)
        self.stem.requires_grad_(False)
        self.res2.requires_grad_(False)

    def trunk(self, images: Float[Tensor, "N 3 H W"]) -> Float[Tensor, "N c h w"]:
        """Photo maps at stride 8: stem and res2 to res5. Sizes are rounded up when halved, so that no edge is lost."""
        return self.layered_trunk(images)[0]

    def layered_trunk(
        self, images: Float[Tensor, "N 3 H W"]
    ) -> tuple[Float[Tensor, "N c h w"], Float[Tensor, "N 2 h w"]]:
        """Photo maps, and the channel means of res3 and res4."""
        third = self.res3(_halved(self.res2(_halved(self.stem(self.preprocess(images))))))
        fourth = self.res4(third)
        return self.res5(fourth), torch.stack([third.mean(dim=1), fourth.mean(dim=1)], dim=1)

    def early_responses(self, images: Float[Tensor, "N 3 H W"]) -> tuple[Float[Tensor, "N h w"], ...]:
        """Of the stem, res2 and res3."""
        stem = self.stem(self.preprocess(images))
        second = self.res2(_halved(stem))
        return tuple(x.mean(dim=1) for x in (stem, second, self.res3(_halved(second))))

    def roi_maps(self, features: Float[Tensor, "N c h w"], proposals: Proposals) -> Float[Tensor, "R c 7 7"]:
        """RoIPool 7 x 7."""
        scale = 1 / self.stride
        return roi_pool(features, proposals.boxes, proposals.image_ids(), size=self.map_size, scale=scale)

    def neck(self, maps: Float[Tensor, "R c 7 7"], row_rng: RowRng | None = None) -> Float[Tensor, "R F"]:
        """Two linear layers, each with ReLU and dropout."""
        hidden = dropout(nn.functional.relu(self.fc6(maps.flatten(1))), self.dropout, row_rng)
        return dropout(nn.functional.relu(self.fc7(hidden)), self.dropout, row_rng)

    def roi_map_modules(self) -> tuple[nn.Module, ...]:
        """The stem and the four stages."""
        return (self.stem, self.res2, self.res3, self.res4, self.res5)


class _Conv(nn.Conv2d):
    """A convolution followed by a fixed batch norm."""

    scale: Tensor
    shift: Tensor

    def __init__(self, inputs: int, outputs: int, *, kernel: int = 1, stride: int = 1, dilation: int = 1) -> None:
        padding = dilation * (kernel // 2)
        super().__init__(inputs, outputs, kernel, stride, padding=padding, dilation=dilation, bias=False)
        self.register_buffer("scale", torch.ones(outputs))
        self.register_buffer("shift", torch.zeros(outputs))
        nn.init.kaiming_normal_(self.weight, nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        # scaling the weights is almost free: they are far fewer than the values of a photo's map
        y: Tensor = self._conv_forward(x, self.weight * self.scale.view(-1, 1, 1, 1), self.shift)
        return y


class _Stem(nn.Module):
    """Three 3 x 3 convolutions, the first with a stride of 2."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = _Conv(3, width, kernel=3, stride=2)
        self.conv2 = _Conv(width, width, kernel=3)
        self.conv3 = _Conv(width, width, kernel=3)

    def forward(self, x: Tensor) -> Tensor:
        for conv in (self.conv1, self.conv2, self.conv3):
            x = nn.functional.relu(conv(x), inplace=True)
        return x


class _Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions, added to the input, or to a projection of it if widths differ."""

    def __init__(self, inputs: int, inner: int, *, dilation: int) -> None:
        super().__init__()
        outputs = 4 * inner
        self.conv1 = _Conv(inputs, inner)
        self.conv2 = _Conv(inner, inner, kernel=3, dilation=dilation)
        self.conv3 = _Conv(inner, outputs)
        self.shortcut = _Conv(inputs, outputs) if inputs != outputs else nn.Identity()
        with torch.no_grad():
            self.conv3.weight.mul_(_BRANCH)

    def forward(self, x: Tensor) -> Tensor:
        inner = nn.functional.relu(self.conv2(nn.functional.relu(self.conv1(x), inplace=True)), inplace=True)
        y: Tensor = self.conv3(inner)
        return nn.functional.relu(y.add_(self.shortcut(x)), inplace=True)


def _stage(width: int, stage: int, count: int) -> nn.Sequential:
    inner = width * 2 ** (stage - 2)
    inputs = width if stage == 2 else 2 * inner
    widths = [inputs] + [4 * inner] * (count - 1)
    return nn.Sequential(*(_Bottleneck(w, inner, dilation=_DILATION[stage]) for w in widths))


def _halved(x: Tensor) -> Tensor:
    return nn.functional.max_pool2d(x, 2, ceil_mode=True)


# ---------------------------------------------------------------- weights


def load_resnet_ws(backbone: ResNetWsBackbone, weights: Weights, where: str) -> None:
    """Load the trunk, its preprocessing and, if present, fc6 and fc7.

    Without fc6 and fc7 these stay randomly initialized, with a warning.
    """
    if weights.architecture != backbone.architecture:
        hint = (
            f"; set backbone.depth = {weights.architecture[1:-3]}"
            if weights.architecture in state_dict.WS_BLOCKS
            else ""
        )
        raise UserError(
            f"backbone.weights = {where}: these are weights of {weights.architecture}, not of {backbone.architecture}"
            + hint
        )
    own = {name: value for name, value in backbone.state_dict().items() if name.startswith(("fc6.", "fc7."))}
    has_neck = "fc6.weight" in weights.tensors
    given = {**fixed_norms(weights.tensors), PIXELS_BUFFER: weights.preprocess.to_tensor()}
    load_into(backbone, given if has_neck else {**own, **given}, where)
    if not has_neck:
        warnings.warn(
            f"{where}: holds the trunk alone, so the two linear layers after it start random, as in the paper; that "
            "needs thousands of photos, and with fewer tends to find parts of objects",
            stacklevel=2,
        )


def fixed_norms(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under canonical names with each batch norm replaced by its fixed scale and shift."""
    fixed = {name: value for name, value in tensors.items() if ".norm." not in name}
    for name in tensors:
        conv, norm, _ = name.partition(".norm.weight")
        if not norm:
            continue
        scale, shift = tensors[name].double(), tensors[f"{conv}.norm.bias"].double()
        if f"{conv}.norm.running_mean" in tensors:
            scale = scale / (tensors[f"{conv}.norm.running_var"].double() + _BATCH_NORM_EPS).sqrt()
            shift = shift - tensors[f"{conv}.norm.running_mean"].double() * scale
        fixed |= {f"{conv}.scale": scale.float(), f"{conv}.shift": shift.float()}
    return fixed
