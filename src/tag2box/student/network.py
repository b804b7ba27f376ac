"""The student's network: a backbone, a feature pyramid and one anchor-free head; and the detector made of it.

The pyramid adds coarser maps to finer ones (FPN, Lin et al., CVPR 2017). Per cell, the head gives a logit per class and
the distances from the cell's centre to the four sides of a box (FCOS, Tian et al., ICCV 2019); a class probability also
says how well the box fits (GFL, Li et al., NeurIPS 2020), so there is no further score. Convolutions are depthwise and
pointwise, followed by GroupNorm, which does not depend on the batch.

The head is the same for all levels. ``StudentDetector`` takes photos and returns detections; there are no proposals.
``forward`` and ``decode_levels`` are tensor operations alone, without control flow on values: both can be exported.
"""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float, UInt8
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from tag2box import errors, images
from tag2box.annotations import Detections, Photo
from tag2box.errors import UserError
from tag2box.inference.predict import Inference, OnPhoto, Select
from tag2box.models.backbone import Backbone
from tag2box.models.class_maps import NO_PRIOR
from tag2box.models.runtime import autocast, depthwise_conv
from tag2box.ops.boxes import areas, clip
from tag2box.ops.losses import at_least_single
from tag2box.progress import Progress, silent
from tag2box.training import batches
from tag2box.training.dist import SINGLE_PROCESS, DistContext

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


class _Depthwise(nn.Conv2d):
    """A depthwise convolution that is trained fast in bf16, too."""

    def forward(self, x: Tensor) -> Tensor:
        return depthwise_conv(x, self)


def _conv(width: int, *, kernel: int = 5, stride: int = 1) -> nn.Sequential:
    """A depthwise and a pointwise convolution, GroupNorm, SiLU."""
    return nn.Sequential(
        _Depthwise(width, width, kernel, stride, padding=kernel // 2, groups=width, bias=False),
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


# ---------------------------------------------------------------- a trained student

CANDIDATES = 200
"""Cells per class and view before NMS, so that every class of a photo has boxes, whatever their scores."""


@dataclass(frozen=True)
class StudentDetector:
    """A student's network, its classes and its views of photos.

    Example:
        found = StudentDetector(network, classes, inference).predict([pixels])  # uint8 (3, H, W)
    """

    network: nn.Module
    classes: tuple[str, ...]
    inference: Inference
    precision: str = "fp32"

    def __post_init__(self) -> None:
        if self.inference.prior != NO_PRIOR:
            raise errors.UserError(
                "inference.prior: a student has no proposals and no class maps; leave its settings at 0"
            )
        if self.inference.regression != 1 or self.inference.predict.vote_iou is not None:
            raise errors.UserError(
                "inference.regression, inference.predict.vote_iou: of detectors with proposals; a student has neither"
            )

    def predict(self, photos: Sequence[Photo | UInt8[Tensor, "3 H W"]]) -> list[Detections]:
        """Detections of any score in photos, files or decoded ones, in their own pixels."""
        found = []
        for photo in photos:
            if isinstance(photo, Photo):
                views, size = self._views(photo), (photo.height, photo.width)
            else:
                size, shown = (photo.shape[1], photo.shape[2]), photo.float()
                views = [(view, images.render_view(view, shown, size)) for view in self.inference.views()]
            if isinstance(views, errors.UserError):
                raise views
            found.append(self._merged(views, size))
        return found

    def detect(
        self,
        photos: Sequence[Photo],
        *,
        progress: Progress = silent,
        dist: DistContext = SINGLE_PROCESS,
        on_photo: OnPhoto | None = None,
        select: Select | None = None,
    ) -> dict[str, Detections]:
        """Detections by photo id, in the photo's own pixels; ``on_photo`` and ``select`` are those of ``run_detector``.

        Each rank detects on its shard of the photos; all ranks return all detections.
        """
        mine, found = dist.shard(len(photos)), {}
        with (
            progress("detecting", len(mine)) as bar,
            ThreadPoolExecutor(1, thread_name_prefix="tag2box-photos") as pool,
        ):
            for index, views in zip(mine, batches.prefetch(pool, lambda i: self._views(photos[i]), mine), strict=True):
                photo = photos[index]
                if isinstance(views, errors.UserError):
                    if on_photo is None:
                        raise views
                    on_photo(photo, views)
                else:
                    own = self._merged(views, (photo.height, photo.width))
                    own = own if select is None else select(photo, own)
                    if on_photo is None:
                        found[photo.id] = own
                    else:
                        on_photo(photo, own)
                bar.advance()
        return {name: own for share in dist.all_gather_object(found) for name, own in share.items()}

    def _views(self, photo: Photo) -> list[tuple[images.View, Float[Tensor, "3 h w"]]] | errors.UserError:
        views = self.inference.views()
        try:
            decoded = images.load_image(photo, views)
        except errors.UserError as error:
            return error
        return [(view, decoded.render(view)) for view in views]

    def _merged(self, views: Sequence[tuple[images.View, Float[Tensor, "3 h w"]]], size: tuple[int, int]) -> Detections:
        """NMS over the candidates of all views."""
        parts = [self._candidates(view, pixels, size) for view, pixels in views]
        how = self.inference.predict
        boxes, scores, labels = (torch.cat(column) for column in zip(*parts, strict=True))
        boxes = clip(boxes, size[1], size[0])
        is_kept = (scores > how.score_threshold) & (areas(boxes) > 0)
        return how.merge(Detections(boxes, scores, labels)[is_kept]).to(torch.device("cpu"))

    @torch.no_grad()
    def _candidates(
        self, view: images.View, pixels: Float[Tensor, "3 h w"], size: tuple[int, int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The best boxes of each class in a view, in the photo's own pixels, with scores and classes."""
        assert isinstance(self.network, StudentModule)
        device = self.network.backbone.device
        height, width = pixels.shape[1:]
        with autocast(device, self.precision):
            levels = self.network.forward(padded(pixels, self.network)[None].to(device))
        logits, boxes, _ = decode_levels(levels, self.network.strides)
        scores, rows = logits[0].sigmoid().topk(min(CANDIDATES, logits.shape[1]), dim=0)  # (k, C)
        labels = torch.arange(len(self.classes), device=device).expand_as(rows).flatten()
        found = boxes[0][rows.flatten()]
        found = images.flip_boxes(found, width) if view.flip else found
        return found * found.new_tensor([size[1] / width, size[0] / height] * 2), scores.flatten(), labels


def padded(pixels: Float[Tensor, "3 h w"], network: StudentModule) -> Float[Tensor, "3 S S"]:
    """A picture in a square, as in training: at its top left, with space of a neutral colour around it.

    Its side is a multiple of the coarsest stride. Scores depend on that space: GroupNorm averages over it.
    """
    multiple, (height, width) = network.strides[-1], pixels.shape[1:]
    side = -(-max(height, width) // multiple) * multiple
    canvas = pixels.new_tensor(network.backbone.preprocess.neutral()).view(3, 1, 1).expand(3, side, side).clone()
    canvas[:, :height, :width] = pixels
    return canvas
