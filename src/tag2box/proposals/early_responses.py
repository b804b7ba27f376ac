"""WSRPN's first stage: edge boxes on the responses of a network's early layers (Tang et al., ECCV 2018)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Annotated, ClassVar, Literal

import cv2
import numpy as np
import torch
from jaxtyping import Float32, UInt8
from pydantic import Field
from torch.nn import functional as F

from tag2box.models.backbone import Backbone, BackboneSettings
from tag2box.models.lite0 import Lite0
from tag2box.models.resnet_ws import ResNetWs
from tag2box.models.vgg16 import Vgg16
from tag2box.proposals import base, edge_boxes

_STRONG_PERCENTILE = 99.0  # of a response map: mapped to an edge strength of 1
_MIN_RANGE = 1e-6  # of a constant map
_STRIDES = (2, 4, 8)


@dataclass(frozen=True, kw_only=True)
class Wsrpn(base.ProposalMethod):
    """Edge boxes on the mean responses of early layers of the backbone. Boxes are ranked.

    Tang et al., "Weakly Supervised Region Proposal Network and Object Detection", ECCV 2018,
    https://doi.org/10.1007/978-3-030-01252-6_22
    """

    kind: Literal["wsrpn"] = "wsrpn"
    unrecorded: ClassVar[Mapping[str, object]] = {"network": "lite0", "weights": None, "min_share": 0.0}
    short_side: Annotated[int, Field(ge=32, le=20_000)] | None = 200
    """Short side to which photos are resized for the search; None searches at full size and takes far longer."""
    network: Literal["lite0", "vgg16", "r50-ws", "r101-ws"] = "lite0"
    """The network: that of the backbone in the system ``wsrpn``."""
    weights: str | None = None
    """Its weights, as those of the backbone; lite0 has its own."""
    layers: Annotated[int, Field(ge=1, le=3)] = 3
    """Number of layers used, finest first: at strides 2, 4 and 8."""
    smoothing: Annotated[float, Field(gt=0)] = 2.0
    """Sigma, in pixels, of the blur applied to the responses before their direction is computed."""
    alpha: Annotated[float, Field(gt=0, lt=1)] = 0.65
    """IoU of neighboring windows in the search: higher is denser and slower."""
    beta: Annotated[float, Field(gt=0, lt=1)] = 0.75
    """NMS threshold of the search."""
    min_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Boxes with a side below this share of the photo's short side are dropped, in addition to ``min_side``."""

    def smallest_side(self, size: tuple[int, int]) -> float:
        """The larger of ``min_side`` and ``min_share`` of the photo's short side."""
        return max(self.min_side, self.min_share * min(size))

    def ready(self) -> None:
        """Raise a UserError unless the weights are installed."""
        _network(self.network, self.weights)

    def search(self, bgr: UInt8[np.ndarray, "h w 3"], min_side: float) -> base.FoundBoxes:
        """Find all boxes of an image that enclose enough of the layers' responses, with their scores."""
        edges = response_edges(
            channel_means(_network(self.network, self.weights), bgr)[: self.layers], (bgr.shape[1], bgr.shape[0])
        )
        normals = ridge_normals(edges, self.smoothing)
        return edge_boxes.boxes_from_edges(
            edge_boxes.thin_edges(edges, normals),
            normals,
            alpha=self.alpha,
            beta=self.beta,
            max_boxes=self.max_boxes,
            min_side=min_side,
        )


def channel_means(network: Backbone, bgr: UInt8[np.ndarray, "h w 3"]) -> tuple[Float32[np.ndarray, "_ _"], ...]:
    """Mean activation of a network's early layers at strides 2, 4 and 8, each cropped to the image."""
    height, width = bgr.shape[:2]
    rgb = torch.from_numpy(np.ascontiguousarray(bgr[..., ::-1])).permute(2, 0, 1)[None].float()
    padded = F.pad(rgb, (0, -width % _STRIDES[-1], 0, -height % _STRIDES[-1]), mode="replicate")
    with torch.no_grad():
        means = network.early_responses(padded)
    return tuple(
        mean[0, : -(-height // cell), : -(-width // cell)].contiguous().numpy()
        for mean, cell in zip(means, _STRIDES, strict=True)
    )


def response_edges(means: Sequence[Float32[np.ndarray, "_ _"]], size: tuple[int, int]) -> Float32[np.ndarray, "h w"]:
    """Edge map in [0, 1]: channel means resized, rescaled from their median to their 99th percentile, and averaged.

    The median is a layer's background response. A constant map adds nothing.

    Args:
        size: width and height of the result.
    """
    above = [_above_median(np.asarray(cv2.resize(mean, size, interpolation=cv2.INTER_LINEAR))) for mean in means]
    return np.asarray(np.mean(above, axis=0), np.float32)


def ridge_normals(edges: Float32[np.ndarray, "h w"], smoothing: float) -> Float32[np.ndarray, "h w"]:
    """Direction of the strongest curvature of an edge map, in [0, pi].

    Edges are ridges of the map: it curves across them, down at the crest and up at the foot, and hardly along them.
    """
    soft = cv2.GaussianBlur(edges, (0, 0), smoothing)
    xx, yy, xy = (np.asarray(cv2.Sobel(soft, cv2.CV_32F, *order)) for order in ((2, 0), (0, 2), (1, 1)))
    # Direction of the largest second derivative; the smallest is perpendicular to it.
    upwards = 0.5 * np.arctan2(2 * xy, xx - yy)
    return np.asarray(np.mod(np.where(xx + yy < 0, upwards + np.pi / 2, upwards), np.pi), np.float32)


def _above_median(mean: Float32[np.ndarray, "h w"]) -> Float32[np.ndarray, "h w"]:
    low, high = np.percentile(mean, [50.0, _STRONG_PERCENTILE])
    return np.asarray(((mean - low) / max(high - low, _MIN_RANGE)).clip(0, 1), np.float32)


NETWORKS: dict[str, type[BackboneSettings]] = {
    "lite0": Lite0,
    "vgg16": Vgg16,
    "r50-ws": ResNetWs,
    "r101-ws": partial(ResNetWs, depth=101),  # type: ignore[dict-item]
}
"""Networks whose early layers are read, by the titles of their settings."""


@lru_cache(maxsize=1)
def _network(name: str, weights: str | None) -> Backbone:
    """A network with its weights of before the training."""
    settings = NETWORKS[name]() if weights is None else NETWORKS[name](weights=weights)  # type: ignore[call-arg]
    return settings.build().eval()
