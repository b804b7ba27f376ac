"""Superpixels: a photo cut along its own borders by a graph of its pixels (Felzenszwalb and Huttenlocher, 2004)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import cv2
import numpy as np
from jaxtyping import Int32, UInt8
from numpy import ndarray
from pydantic import Field
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Superpixels:
    """OpenCV's graph segmentation. Read only where the objective asks for bottom-up evidence."""

    short_side: Annotated[int, Field(ge=32)] | None = 400
    """Side to which larger photos are reduced before they are cut up; None cuts them as they are."""
    sigma: Annotated[float, Field(gt=0)] = 0.5
    """Pixels by which the photo is blurred before."""
    scale: Annotated[float, Field(gt=0)] = 300.0
    """k: how unlike pixels may be within a superpixel; higher gives larger ones."""
    min_size: Annotated[int, Field(ge=1)] = 100
    """Superpixels of fewer pixels are joined to a neighbour."""

    def working_size(self, size: tuple[int, int]) -> tuple[int, int]:
        """Width and height at which a photo of this width and height is cut up; never larger."""
        factor = 1.0 if self.short_side is None else min(1.0, self.short_side / min(size))
        return max(1, round(size[0] * factor)), max(1, round(size[1] * factor))

    def __call__(self, image: UInt8[Tensor, "3 H W"], size: tuple[int, int] | None = None) -> Int32[ndarray, "h w"]:
        """The superpixel of each pixel of the working copy.

        Args:
            size: width and height of the photo, where ``image`` is a smaller copy of it.
        """
        working = self.working_size(size or (image.shape[2], image.shape[1]))
        bgr = np.ascontiguousarray(image.permute(1, 2, 0).numpy()[..., ::-1])
        if (bgr.shape[1], bgr.shape[0]) != working:
            bgr = np.asarray(cv2.resize(bgr, working, interpolation=cv2.INTER_AREA))
        cut = cv2.ximgproc.segmentation.createGraphSegmentation(self.sigma, self.scale, self.min_size)
        return np.asarray(cut.processImage(bgr), np.int32).reshape(working[1], working[0])
