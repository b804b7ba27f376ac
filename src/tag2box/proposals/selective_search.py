"""Selective search: boxes around regions grown by colour, texture, size and fill (Uijlings et al., IJCV 2013)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import cv2
import numpy as np
from jaxtyping import Float32, Int, UInt8
from numpy import ndarray
from pydantic import Field

from tag2box.proposals.base import FoundBoxes, ProposalMethod


@dataclass(frozen=True, kw_only=True)
class SelectiveSearch(ProposalMethod):
    """OpenCV's selective search, made repeatable. It does not rank its boxes."""

    kind: Literal["selective_search"] = "selective_search"
    mode: Literal["fast", "quality"] = "fast"
    seed: Annotated[int, Field(ge=0)] = 0
    """Of the order of the boxes, and so of what ``max_boxes`` keeps."""

    def search(self, bgr: UInt8[ndarray, "h w 3"], min_side: float) -> FoundBoxes:
        """All boxes of a picture, in no order to rely on."""
        search = cv2.ximgproc.segmentation.createSelectiveSearchSegmentation()
        search.setBaseImage(bgr)
        if self.mode == "fast":
            search.switchToSelectiveSearchFast()
        else:
            search.switchToSelectiveSearchQuality()
        found = np.asarray(search.process(), np.float64).reshape(-1, 4)
        # OpenCV gives (x, y, w, h) of whole pixels, so x + w is the exclusive right edge already.
        corners = np.concatenate([found[:, :2], found[:, :2] + found[:, 2:]], axis=1)
        return FoundBoxes(corners, np.zeros(len(corners)))

    def order(self, boxes: Float32[ndarray, "n 4"], scores: Float32[ndarray, " n"]) -> Int[ndarray, " n"]:
        """A shuffle by the seed.

        OpenCV returns boxes ordered by C's rand(), which cv2.setRNGSeed does not reach: the same boxes come in another
        order at every call. Measured at caps of 60 to 400, a plain shuffle also recalls more objects than its order.
        """
        return np.random.default_rng(self.seed).permutation(len(boxes))
