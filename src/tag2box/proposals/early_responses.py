"""Edges from what the early layers of a network respond to (WSRPN's first stage, Tang et al., ECCV 2018)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Literal

import cv2
import numpy as np
import torch
from jaxtyping import Float32, UInt8
from numpy import ndarray
from pydantic import Field
from torch.nn import functional as F

from tag2box.models.lite0 import Lite0, Lite0Backbone
from tag2box.proposals.base import FoundBoxes, ProposalMethod
from tag2box.proposals.edge_boxes import Finder, thinned

_FULL = 99.0  # percentile of a map that counts as its strongest response
_FAINT = 1e-6  # of a map that says the same everywhere


def edge_like(means: Sequence[Float32[ndarray, "_ _"]], size: tuple[int, int]) -> Float32[ndarray, "h w"]:
    """One map within 0 and 1: channel means of layers, each above its own median, resized and averaged.

    Below the median is what a layer says of anything. A map that is the same everywhere adds nothing.

    Args:
        size: width and height wanted.
    """
    above = [_above_median(np.asarray(cv2.resize(mean, size, interpolation=cv2.INTER_LINEAR))) for mean in means]
    return np.asarray(np.mean(above, axis=0), np.float32)


def _above_median(mean: Float32[ndarray, "h w"]) -> Float32[ndarray, "h w"]:
    low, high = np.percentile(mean, [50.0, _FULL])
    return np.asarray(((mean - low) / max(high - low, _FAINT)).clip(0, 1), np.float32)


def across_ridges(edges: Float32[ndarray, "h w"], smoothing: float) -> Float32[ndarray, "h w"]:
    """The direction in which a map of edges bends most, within 0 and pi.

    Edges are ridges of such a map: it bends across them, down at the crest and up at the foot, and hardly along them.
    """
    soft = cv2.GaussianBlur(edges, (0, 0), smoothing)
    xx, yy, xy = (np.asarray(cv2.Sobel(soft, cv2.CV_32F, *order)) for order in ((2, 0), (0, 2), (1, 1)))
    upwards = 0.5 * np.arctan2(
        2 * xy, xx - yy
    )  # the direction of the largest second derivative; the least is across it
    return np.asarray(np.mod(np.where(xx + yy < 0, upwards + np.pi / 2, upwards), np.pi), np.float32)


_LAST_BLOCKS = (0, 2, 4)  # of lite0's body, at a half, a quarter and an eighth of the photo's side

_PARTS = ("", ".expand", ".depthwise")


@dataclass(frozen=True, kw_only=True)
class Wsrpn(ProposalMethod):
    """Edge boxes on the mean responses of early layers of EfficientNet-lite0 (Tang et al., 2018). Boxes are ranked."""

    kind: Literal["wsrpn"] = "wsrpn"
    short_side: Annotated[int, Field(ge=32)] | None = 200
    """Side to which photos are resized for the search; None searches them as they are, and takes many times as long."""
    layers: Annotated[int, Field(ge=1, le=3)] = 3
    """Layers whose responses count, the finest first: at a half, a quarter and an eighth of the photo's side."""
    smoothing: Annotated[float, Field(gt=0)] = 2.0
    """Pixels (sigma) by which the responses are blurred before their direction is taken."""
    alpha: Annotated[float, Field(gt=0, lt=1)] = 0.65
    """Overlap of neighbouring boxes in the search: higher is denser and slower."""
    beta: Annotated[float, Field(gt=0, lt=1)] = 0.75
    """Overlap above which the weaker of two boxes is dropped."""

    def ready(self) -> None:
        """Raise unless the weights are there."""
        _network()

    def search(self, bgr: UInt8[ndarray, "h w 3"], min_side: float) -> FoundBoxes:
        """All boxes of a picture that enclose enough of what the layers respond to, with their scores."""
        edges = edge_like(channel_means(bgr)[: self.layers], (bgr.shape[1], bgr.shape[0]))
        normals = across_ridges(edges, self.smoothing)
        finder = Finder(alpha=self.alpha, beta=self.beta, most=self.max_boxes, min_side=min_side)
        return finder(thinned(edges, normals), normals)


def channel_means(bgr: UInt8[ndarray, "h w 3"]) -> tuple[Float32[ndarray, "_ _"], ...]:
    """Mean response of the filters of lite0's blocks 0, 2 and 4, each cut to the picture.

    Blocks of lite0 end in linear sums of either sign; the filters within them respond with 0 and more, as layers of
    VGG16 do in the paper.
    """
    network, stride = _network(), 2 ** len(_LAST_BLOCKS)
    height, width = bgr.shape[:2]
    rgb = torch.from_numpy(np.ascontiguousarray(bgr[..., ::-1])).permute(2, 0, 1)[None].float()
    padded = F.pad(rgb, (0, -width % stride, 0, -height % stride), mode="replicate")
    means = []
    with torch.no_grad():
        x = network.stem(network.preprocess(padded))
        for index in range(_LAST_BLOCKS[-1] + 1):
            block, expand, filters = (network.get_submodule(f"body.{index}{part}") for part in _PARTS)
            if index in _LAST_BLOCKS:
                means.append(filters(expand(x)).mean(dim=1)[0])
            x = block(x)
    cells = [2**power for power in range(1, len(_LAST_BLOCKS) + 1)]
    return tuple(
        mean[: -(-height // cell), : -(-width // cell)].contiguous().numpy()
        for mean, cell in zip(means, cells, strict=True)
    )


@lru_cache(maxsize=1)
def _network() -> Lite0Backbone:
    return Lite0().build().eval()
