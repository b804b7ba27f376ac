"""Selective search: boxes around regions grown by colour, texture, size and fill (Uijlings et al., IJCV 2013)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import cv2
import numpy as np
import torch
from jaxtyping import Float32, UInt8
from numpy import ndarray
from pydantic import Field
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class SelectiveSearch:
    """OpenCV's selective search, made repeatable, on a copy of the photo at a working resolution."""

    kind: Literal["selective_search"] = "selective_search"
    mode: Literal["fast", "quality"] = "fast"
    short_side: Annotated[int, Field(ge=32)] | None = None
    """Side to which photos are resized for the search; None searches them as they are."""
    max_boxes: Annotated[int, Field(ge=1)] | None = 2000
    min_side: Annotated[int, Field(ge=0)] = 20
    """Boxes with a shorter side, in pixels of the original photo, are left out."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Of the order of the boxes, and so of what ``max_boxes`` keeps."""

    def __call__(self, image: UInt8[Tensor, "3 H W"]) -> Float32[Tensor, "P 4"]:
        """Candidate boxes in pixels of the given image, without repeats, in an order that depends on the seed only."""
        height, width = image.shape[1:]
        small = self._working_copy(np.ascontiguousarray(image.permute(1, 2, 0).numpy()[..., ::-1]))
        rows, cols = small.shape[:2]
        found = self._search(small)
        # OpenCV gives (x, y, w, h) of whole pixels, so x + w is the exclusive right edge already.
        corners = np.concatenate([found[:, :2], found[:, :2] + found[:, 2:]], axis=1)
        boxes = corners * np.array([width / cols, height / rows] * 2)
        boxes = boxes.clip(0, [width, height, width, height]).astype(np.float32)
        is_big = ((boxes[:, 2:] - boxes[:, :2]) >= max(self.min_side, 1e-3)).all(1)
        return torch.from_numpy(self._ordered(np.unique(boxes[is_big], axis=0))[: self.max_boxes].copy())

    def _working_copy(self, bgr: UInt8[ndarray, "H W 3"]) -> UInt8[ndarray, "h w 3"]:
        height, width = bgr.shape[:2]
        scale = self.short_side / min(height, width) if self.short_side else 1.0
        if scale == 1.0:
            return bgr
        size = (max(1, round(width * scale)), max(1, round(height * scale)))
        return np.asarray(cv2.resize(bgr, size, interpolation=cv2.INTER_AREA if scale < 1 else cv2.INTER_LINEAR))

    def _search(self, bgr: UInt8[ndarray, "h w 3"]) -> ndarray:
        """(x, y, w, h) rows, in no order to rely on."""
        search = cv2.ximgproc.segmentation.createSelectiveSearchSegmentation()
        search.setBaseImage(bgr)
        if self.mode == "fast":
            search.switchToSelectiveSearchFast()
        else:
            search.switchToSelectiveSearchQuality()
        return np.asarray(search.process(), np.float64).reshape(-1, 4)

    def _ordered(self, boxes: Float32[ndarray, "n 4"]) -> Float32[ndarray, "n 4"]:
        """Shuffle the boxes by the seed.

        OpenCV returns them ordered by C's rand(), which cv2.setRNGSeed does not reach: the same boxes come in another
        order at every call. Measured at caps of 60 to 400, a plain shuffle also recalls more objects than its order.
        """
        return boxes[np.random.default_rng(self.seed).permutation(len(boxes))]
