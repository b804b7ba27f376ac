"""Resizing and mirroring of photos with their boxes, and the choice of both, the same however work is divided."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor
from torch.nn.functional import interpolate

Side = Annotated[int, Field(ge=16)]


@dataclass(frozen=True, slots=True)
class View:
    """How a photo is to be seen: resized to a short side (None: as it is), and mirrored or not."""

    short: int | None
    flip: bool = False
    long_max: int | None = None


@dataclass(frozen=True, kw_only=True)
class Resize:
    """Sizes photos are seen in: one scale and perhaps a mirror image at random in training (paper, section 4.1)."""

    scales: Annotated[tuple[Side, ...], Field(min_length=1)] = (480, 576, 688, 864, 1000, 1200)
    """Short sides to draw from."""
    long_max: Side = 2000
    """The long side never exceeds this, whatever the scale."""
    flip: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Chance of a mirror image."""

    def view(self, seed: int, epoch: int, index: int) -> View:
        """The view of photo ``index`` in an epoch: a function of these numbers, not of any worker's past."""
        rng = np.random.default_rng([seed, epoch, index])
        scale = self.scales[int(rng.integers(len(self.scales)))]
        return View(scale, bool(rng.random() < self.flip), self.long_max)

    def views(self) -> tuple[View, ...]:
        """Every view that can be drawn."""
        flips = [flip for flip, chance in ((False, 1 - self.flip), (True, self.flip)) if chance > 0]
        return tuple(View(scale, flip, self.long_max) for scale in self.scales for flip in flips)


def resized(size: tuple[int, int], short: int, long_max: int | None) -> tuple[int, int]:
    """Height and width with the short side at ``short``, or less where the long one would pass ``long_max``."""
    scale = short / min(size)
    if long_max is not None:
        scale = min(scale, long_max / max(size))
    height, width = (max(1, round(side * scale)) for side in size)
    return height, width


def place(view: View, boxes: Float[Tensor, "P 4"], size: tuple[int, int]) -> Float[Tensor, "P 4"]:
    """Boxes of a photo of ``size`` (height, width), as a view shows them: scaled by the exact ratio of the sides."""
    height, width = size
    seen = size if view.short is None else resized(size, view.short, view.long_max)
    scaled = boxes * boxes.new_tensor([seen[1] / width, seen[0] / height] * 2)
    return mirror(scaled, seen[1]) if view.flip else scaled


def mirror(boxes: Float[Tensor, "P 4"], width: float) -> Float[Tensor, "P 4"]:
    """Boxes of the mirror image."""
    x1, y1, x2, y2 = boxes.unbind(1)
    return torch.stack([width - x2, y1, width - x1, y2], dim=1)


def resize_short(
    image: Float[Tensor, "ch H W"], boxes: Float[Tensor, "P 4"], short: int, long_max: int | None = None
) -> tuple[Float[Tensor, "ch h w"], Float[Tensor, "P 4"]]:
    """Resize a photo, and its boxes by the exact ratio of the sides, which rounding makes differ a little."""
    height, width = image.shape[1:]
    size = resized((height, width), short, long_max)
    if size == (height, width):
        return image, boxes
    small = interpolate(image[None], size, mode="bilinear", align_corners=False, antialias=True)[0]
    ratio = boxes.new_tensor([size[1] / width, size[0] / height] * 2)
    return small, boxes * ratio


def flip(
    image: Float[Tensor, "ch H W"], boxes: Float[Tensor, "P 4"]
) -> tuple[Float[Tensor, "ch H W"], Float[Tensor, "P 4"]]:
    """Mirror a photo left to right, and its boxes."""
    return image.flip(2), mirror(boxes, image.shape[2])


def apply(
    view: View, image: Float[Tensor, "ch H W"], boxes: Float[Tensor, "P 4"]
) -> tuple[Float[Tensor, "ch h w"], Float[Tensor, "P 4"]]:
    """See a photo and its boxes in a view."""
    if view.short is not None:
        image, boxes = resize_short(image, boxes, view.short, view.long_max)
    return flip(image, boxes) if view.flip else (image, boxes)
