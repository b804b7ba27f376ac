"""Graph-based superpixels, and superpixel straddling: how well boxes follow image boundaries.

Superpixels: Felzenszwalb and Huttenlocher, Efficient Graph-Based Image Segmentation, IJCV 2004. Straddling: Alexe,
Deselaers and Ferrari, Measuring the Objectness of Image Windows, PAMI 2012; WSOD2 uses it as bottom-up evidence.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import cv2
import numpy as np
from jaxtyping import Bool, Float, Float32, Int, Int32, UInt8
from pydantic import Field
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Superpixel:
    """One superpixel: its mask within its bounding box."""

    left: int
    top: int
    inside: Bool[np.ndarray, "h w"]


def straddling(labels: Int[np.ndarray, "H W"], boxes: Float[np.ndarray, "P 4"]) -> Float32[np.ndarray, " P"]:
    """bu(b) = 1 - sum over superpixels s of min(|s outside b|, |s inside b|) / |b|: 1 if b consists of superpixels.

    Counted in pixels: box edges are rounded to pixel lines; a box without pixels has 0. Each superpixel has an integral
    image of its bounding box only, which is read for all boxes at once, so that no array is larger than the photo.

    >>> halves = np.array([[0, 0, 1, 1]])
    >>> straddling(halves, np.array([[0.0, 0.0, 2.0, 1.0], [0.0, 0.0, 4.0, 1.0], [1.0, 0.0, 3.0, 1.0]])).tolist()
    [1.0, 1.0, 0.0]
    """
    height, width = labels.shape
    edges = np.rint(boxes).astype(np.int64).clip(0, [width, height, width, height])
    edges[:, 2:] = np.maximum(edges[:, 2:], edges[:, :2])
    area = (edges[:, 2] - edges[:, 0]) * (edges[:, 3] - edges[:, 1])
    straddled = np.zeros(len(boxes), np.int64)
    for superpixel in iter_superpixels(labels):
        shared = _shared(superpixel, edges)
        straddled += np.minimum(shared, np.count_nonzero(superpixel.inside) - shared)
    kept = 1 - straddled / np.maximum(area, 1)
    return np.where(area > 0, kept, 0).astype(np.float32)


def iter_superpixels(labels: Int[np.ndarray, "H W"]) -> Iterator[Superpixel]:
    """Yield the superpixel of every label, connected or not."""
    order = labels.argsort(axis=None, kind="stable")  # groups the pixels of a label, line by line
    ranked = labels.ravel()[order]
    begins = np.flatnonzero(np.append(np.ones(min(len(ranked), 1), bool), ranked[1:] != ranked[:-1]))
    if len(begins) == 0:
        return
    rows, columns = np.divmod(order, labels.shape[1])
    ends = np.append(begins[1:], len(order)) - 1
    lefts, rights = np.minimum.reduceat(columns, begins), np.maximum.reduceat(columns, begins)
    for label, top, bottom, left, right in zip(ranked[begins], rows[begins], rows[ends], lefts, rights, strict=True):
        yield Superpixel(int(left), int(top), labels[top : bottom + 1, left : right + 1] == label)


def _shared(superpixel: Superpixel, edges: Int[np.ndarray, "P 4"]) -> Int[np.ndarray, " P"]:
    """Number of pixels of one superpixel inside each box, by its integral image."""
    height, width = superpixel.inside.shape
    total = np.zeros((height + 1, width + 1), np.int64)
    total[1:, 1:] = superpixel.inside.cumsum(axis=0).cumsum(axis=1)
    left, right = ((edges[:, i] - superpixel.left).clip(0, width) for i in (0, 2))
    top, bottom = ((edges[:, i] - superpixel.top).clip(0, height) for i in (1, 3))
    shared: np.ndarray = total[bottom, right] - total[top, right] - total[bottom, left] + total[top, left]
    return shared


@dataclass(frozen=True, kw_only=True)
class Superpixels:
    """Graph segmentation. Used only if the criterion requires bottom-up evidence (WSOD2)."""

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
