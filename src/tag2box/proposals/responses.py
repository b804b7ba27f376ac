"""Edges from what the early layers of a network respond to (WSRPN's first stage, Tang et al., ECCV 2018)."""

from __future__ import annotations

from collections.abc import Sequence

import cv2
import numpy as np
from jaxtyping import Float32
from numpy import ndarray

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
