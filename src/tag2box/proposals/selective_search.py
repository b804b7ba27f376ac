"""Selective search: boxes around regions merged by color, texture, size and fill (Uijlings et al., IJCV 2013)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import cv2
import numpy as np
import torch
from jaxtyping import Float32, Int, UInt8
from pydantic import Field

from tag2box.ops.boxes import nms
from tag2box.proposals.base import FoundBoxes, ProposalMethod

SearchEngine = Literal["tag2box", "opencv"]
SearchMode = Literal["fast", "quality"]

OLD_ENGINE: Mapping[str, object] = {"engine": "opencv"}
"""What stores without the setting were made with."""

_SIGMA, _MIN_SIZE = 0.8, 100  # blur of the images that are segmented; pixels of a segment
_TOLERANCES: Mapping[SearchMode, tuple[float, ...]] = {
    "fast": (150.0, 300.0, 450.0),
    "quality": (150.0, 300.0, 450.0, 600.0, 750.0),
}
_GROUPINGS: Mapping[SearchMode, tuple[str, ...]] = {  # similarities that are added, by their first letters
    "fast": ("ctsf", "tsf"),
    "quality": ("ctsf", "tsf", "f", "s"),
}


@dataclass(frozen=True, kw_only=True)
class SelectiveSearch(ProposalMethod):
    """Selective search. Boxes are not ranked.

    Uijlings et al., "Selective Search for Object Recognition", IJCV 2013,
    https://doi.org/10.1007/s11263-013-0620-5
    """

    kind: Literal["selective_search"] = "selective_search"
    unrecorded: ClassVar[Mapping[str, object]] = {**OLD_ENGINE, "thinning": 1.0, "min_share": 0.0}
    mode: SearchMode = "fast"
    engine: SearchEngine = "tag2box"
    """Implementation: our own, or OpenCV's, which takes several times as long and finds nearly the same boxes."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the shuffle that decides which boxes ``max_boxes`` keeps."""
    thinning: Annotated[float, Field(gt=0, le=1)] = 1.0
    """NMS threshold: of boxes with a higher IoU than this one is kept; 1 keeps all. Fewer boxes, faster features."""
    min_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Boxes with a side below this share of the photo's short side are dropped, in addition to ``min_side``."""

    def smallest_side(self, size: tuple[int, int]) -> float:
        """The larger of ``min_side`` and ``min_share`` of the photo's short side."""
        return max(self.min_side, self.min_share * min(size))

    def search(self, bgr: UInt8[np.ndarray, "h w 3"], min_side: float) -> FoundBoxes:
        """Find all boxes of an image, in arbitrary order."""
        corners = (_opencv_boxes if self.engine == "opencv" else region_boxes)(bgr, self.mode).astype(np.float64)
        return FoundBoxes(corners, np.zeros(len(corners)))

    def order(self, boxes: Float32[np.ndarray, "n 4"], scores: Float32[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
        """A seeded shuffle, thinned in this order.

        OpenCV orders boxes by C's rand(), which cv2.setRNGSeed does not affect: every call returns the same boxes in
        another order. Measured at caps of 60 to 400, a plain shuffle also recalls more objects than OpenCV's order.
        """
        shuffled = np.random.default_rng(self.seed).permutation(len(boxes))
        if self.thinning == 1:
            return shuffled
        ranked = torch.from_numpy(boxes[shuffled])
        rows = nms(ranked, torch.arange(len(ranked), 0, -1, dtype=torch.float32), self.thinning)
        return np.asarray(shuffled[rows.numpy()])


def region_boxes(bgr: UInt8[np.ndarray, "h w 3"], mode: SearchMode) -> Int[np.ndarray, "n 4"]:
    """Boxes of all regions that graph segmentations in several color spaces and their grouping give, some repeatedly.

    Color spaces, tolerances k, blur and similarities are those of OpenCV.
    """
    from tag2box.ops import segmentation  # numba takes a while to load
    from tag2box.proposals import grouping

    similarities = [grouping.Similarities(*(letter in by for letter in "ctsf")) for by in _GROUPINGS[mode]]
    found = []
    for image in color_spaces(bgr, mode):
        blurred = cv2.GaussianBlur(image.astype(np.float32), (0, 0), _SIGMA).reshape(image.shape)
        # The paper's derivative of a Gaussian; blurring the image too recalled fewer objects of voc07-mini.
        across, down = (cv2.Scharr(image, cv2.CV_32F, *d).reshape(image.shape) for d in ((1, 0), (0, 1)))
        edges, bins = segmentation.grid_edges(blurred), grouping.pixel_bins(image, across, down)
        for k in _TOLERANCES[mode]:
            regions = grouping.regions_of(segmentation.segment(edges, k, _MIN_SIZE), bins)
            found += [grouping.group(regions, by) for by in similarities]
    return np.concatenate(found)


def color_spaces(bgr: UInt8[np.ndarray, "h w 3"], mode: SearchMode) -> list[UInt8[np.ndarray, "h w c"]]:
    """The images that are segmented: HSV and Lab; ``quality`` adds intensity, a single color, and two with intensity.

    As in OpenCV, whose single color is blue and whose last image is (R, G, intensity). The paper has hue and rgI, with
    normalized r and g, instead.
    """
    images = [cv2.cvtColor(bgr, cv2.COLOR_BGR2HSV), cv2.cvtColor(bgr, cv2.COLOR_BGR2LAB)]
    if mode == "quality":
        grey = cv2.cvtColor(bgr, cv2.COLOR_BGR2GRAY)
        images += [grey[..., None], bgr[..., :1], np.dstack([bgr[..., 2], bgr[..., 1], grey])]
    return [np.ascontiguousarray(image) for image in images]


def _opencv_boxes(bgr: UInt8[np.ndarray, "h w 3"], mode: SearchMode) -> Int[np.ndarray, "n 4"]:
    search = cv2.ximgproc.segmentation.createSelectiveSearchSegmentation()
    search.setBaseImage(bgr)
    if mode == "fast":
        search.switchToSelectiveSearchFast()
    else:
        search.switchToSelectiveSearchQuality()
    found = np.asarray(search.process()).reshape(-1, 4)
    # OpenCV returns (x, y, w, h) in whole pixels, so x + w is the exclusive right edge already.
    return np.concatenate([found[:, :2], found[:, :2] + found[:, 2:]], axis=1)
