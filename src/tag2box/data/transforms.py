"""Views: photos resized and flipped together with their boxes, and the random choice of a view per photo and epoch."""

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
    """A resized, possibly flipped version of a photo; ``short`` is the length of the short side (None: full size)."""

    short: int | None
    flip: bool = False
    long_max: int | None = None


@dataclass(frozen=True, kw_only=True)
class Resize:
    """Random scale and horizontal flip of training photos (paper, section 4.1)."""

    scales: Annotated[tuple[Side, ...], Field(min_length=1)] = (480, 576, 688, 864, 1000, 1200)
    """Short sides to draw from, in pixels."""
    long_max: Side = 2000
    """Largest long side, in pixels, at any scale."""
    flip: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Probability of a horizontal flip."""

    def view(self, seed: int, epoch: int, index: int) -> View:
        """The view of photo ``index`` in an epoch: depends on these numbers only, so it is the same in any worker."""
        rng = np.random.default_rng([seed, epoch, index])
        scale = self.scales[int(rng.integers(len(self.scales)))]
        return View(scale, bool(rng.random() < self.flip), self.long_max)

    def views(self) -> tuple[View, ...]:
        """Every view that can be drawn."""
        flips = [flip for flip, chance in ((False, 1 - self.flip), (True, self.flip)) if chance > 0]
        return tuple(View(scale, flip, self.long_max) for scale in self.scales for flip in flips)


def resized(size: tuple[int, int], short: int, long_max: int | None) -> tuple[int, int]:
    """Height and width with the short side at ``short``, or less if the long one would exceed ``long_max``."""
    scale = short / min(size)
    if long_max is not None:
        scale = min(scale, long_max / max(size))
    height, width = (max(1, round(side * scale)) for side in size)
    return height, width


def view_size(view: View, size: tuple[int, int]) -> tuple[int, int]:
    """Height and width of a view of a photo of ``size`` (height, width)."""
    return size if view.short is None else resized(size, view.short, view.long_max)


def boxes_in_view(view: View, boxes: Float[Tensor, "P 4"], size: tuple[int, int]) -> Float[Tensor, "P 4"]:
    """Boxes of a photo of ``size`` (height, width) in the pixels of a view, scaled by the exact ratio of the sides."""
    height, width = size
    target = view_size(view, size)
    scaled = boxes * boxes.new_tensor([target[1] / width, target[0] / height] * 2)
    return flip_boxes(scaled, target[1]) if view.flip else scaled


def flip_boxes(boxes: Float[Tensor, "P 4"], width: float) -> Float[Tensor, "P 4"]:
    """Boxes after a horizontal flip."""
    x1, y1, x2, y2 = boxes.unbind(1)
    return torch.stack([width - x2, y1, width - x1, y2], dim=1)


def render_view(view: View, image: Float[Tensor, "ch H W"], size: tuple[int, int]) -> Float[Tensor, "ch h w"]:
    """A view of a photo of ``size`` (height, width); ``image`` is the photo, or a copy of another size."""
    target = view_size(view, size)
    if target != tuple(image.shape[1:]):
        image = interpolate(image[None], target, mode="bilinear", align_corners=False, antialias=True)[0]
    return image.flip(2) if view.flip else image
