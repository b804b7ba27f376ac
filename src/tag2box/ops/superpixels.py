"""Graph-based superpixels, and superpixel straddling: how well boxes follow image boundaries.

Superpixels: Felzenszwalb and Huttenlocher, Efficient Graph-Based Image Segmentation, IJCV 2004. Straddling: Alexe,
Deselaers and Ferrari, Measuring the Objectness of Image Windows, PAMI 2012; WSOD2 uses it as bottom-up evidence.
"""

from dataclasses import dataclass
from typing import Annotated

import cv2
import numpy as np
from jaxtyping import Float, Float32, Int, Int32, UInt8
from pydantic import Field
from torch import Tensor


def straddling(labels: Int[np.ndarray, "H W"], boxes: Float[np.ndarray, "P 4"]) -> Float32[np.ndarray, " P"]:
    """bu(b) = 1 - sum over superpixels s of min(|s outside b|, |s inside b|) / |b|: 1 if b consists of superpixels.

    Counted in pixels: box edges are rounded to pixel lines; a box without pixels has 0. Boxes may be any, so regressed
    ones are scored in every training step.

    >>> halves = np.array([[0, 0, 1, 1]])
    >>> straddling(halves, np.array([[0.0, 0.0, 2.0, 1.0], [0.0, 0.0, 4.0, 1.0], [1.0, 0.0, 3.0, 1.0]])).tolist()
    [1.0, 1.0, 0.0]
    """
    from tag2box.ops import segmentation  # numba takes a while to load

    height, width = labels.shape
    edges = np.rint(boxes).clip(0, [width, height, width, height]).astype(np.int64)
    edges[:, 2:] = np.maximum(edges[:, 2:], edges[:, :2])
    area = (edges[:, 2] - edges[:, 0]) * (edges[:, 3] - edges[:, 1])
    if labels.size and not 0 <= labels.min() <= labels.max() < labels.size:
        labels = np.unique(labels, return_inverse=True)[1].reshape(labels.shape)
    straddled = segmentation.straddled_pixels(np.ascontiguousarray(labels, np.int32), edges)
    kept = 1 - straddled / np.maximum(area, 1)
    return np.where(area > 0, kept, 0).astype(np.float32)


def photo_straddling(
    labels: Int[np.ndarray, "H W"], boxes: Float[np.ndarray, "P 4"], size: tuple[int, int]
) -> Float32[np.ndarray, " P"]:
    """The scores of boxes in pixels of a photo of this width and height, whose superpixels may be of a smaller copy."""
    height, width = labels.shape
    return straddling(labels, boxes * np.array([width / size[0], height / size[1]] * 2, np.float32))


@dataclass(frozen=True, kw_only=True)
class Superpixels:
    """Graph segmentation. Used only by what requires bottom-up evidence: WSOD2, and a prior with ``straddling``."""

    short_side: Annotated[int, Field(ge=32, le=20_000)] | None = 400
    """Short side to which larger photos are reduced before segmentation; None segments them at full size."""
    sigma: Annotated[float, Field(gt=0)] = 0.5
    """Standard deviation of the Gaussian blur before segmentation, in pixels."""
    scale: Annotated[float, Field(gt=0)] = 300.0
    """k: tolerated difference of pixels within a superpixel; higher gives larger superpixels."""
    min_size: Annotated[int, Field(ge=1)] = 100
    """Superpixels of fewer pixels are merged into a neighbour."""

    def working_size(self, size: tuple[int, int]) -> tuple[int, int]:
        """Width and height at which a photo of this width and height is segmented; never larger."""
        factor = 1.0 if self.short_side is None else min(1.0, self.short_side / min(size))
        return max(1, round(size[0] * factor)), max(1, round(size[1] * factor))

    def __call__(self, image: UInt8[Tensor, "3 H W"], size: tuple[int, int] | None = None) -> Int32[np.ndarray, "h w"]:
        """Superpixel label of each pixel of the working copy.

        Args:
            size: width and height of the photo if ``image`` is a smaller copy of it.
        """
        from tag2box.ops import segmentation  # numba takes a while to load

        working = self.working_size(size or (image.shape[2], image.shape[1]))
        bgr = np.ascontiguousarray(image.permute(1, 2, 0).numpy()[..., ::-1])
        if (bgr.shape[1], bgr.shape[0]) != working:
            bgr = np.asarray(cv2.resize(bgr, working, interpolation=cv2.INTER_AREA))
        blurred = np.asarray(cv2.GaussianBlur(bgr.astype(np.float32), (0, 0), self.sigma))
        return segmentation.segment(segmentation.grid_edges(blurred), self.scale, self.min_size)


SUPERPIXELS = Superpixels()
"""The default segmentation."""
