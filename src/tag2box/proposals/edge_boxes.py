"""Edge boxes: boxes that enclose whole contours (Zitnick and Dollar, ECCV 2014)."""

import multiprocessing
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import cv2
import numpy as np
from jaxtyping import Float32, UInt8
from pydantic import Field

from tag2box.errors import UserError
from tag2box.proposals.base import FoundBoxes, ProposalMethod

_STRONG_PERCENTILE = 99.0  # of the gradient magnitude: mapped to an edge strength of 1
_MIN_STRENGTH = 1.0  # gradient of 1/32 Lab unit per pixel: anything less is rounding, as in a photo of one color
_OPENCV_MAX_BOXES = 10_000  # OpenCV's own default, used without a cap
_OPENCV_MIN_AREA = 4.0  # pixels of a window; with smaller ones its search may end without a single box
_LOAD_TIMEOUT = 300  # seconds for loading a structured forest


@dataclass(frozen=True, kw_only=True)
class EdgeBoxes(ProposalMethod):
    """OpenCV's edge boxes on the image gradient, or on the edges of a structured forest. Boxes are ranked.

    Zitnick and Dollar, "Edge Boxes: Locating Object Proposals from Edges", ECCV 2014,
    https://doi.org/10.1007/978-3-319-10602-1_26
    """

    kind: Literal["edge_boxes"] = "edge_boxes"
    unrecorded: ClassVar[Mapping[str, object]] = {"min_share": 0.0}
    short_side: Annotated[int, Field(ge=32, le=20_000)] | None = 200
    """Short side to which photos are resized for the search; None searches at full size and takes far longer."""
    alpha: Annotated[float, Field(gt=0, lt=1)] = 0.65
    """IoU of neighboring windows in the search: higher is denser and slower."""
    beta: Annotated[float, Field(gt=0, lt=1)] = 0.75
    """NMS threshold of the search: higher fits objects tighter, lower finds more of them."""
    smoothing: Annotated[float, Field(ge=0)] = 2.0
    """Sigma, in pixels, of the blur applied to the searched copy before its gradient. Unused with a ``model``."""
    model: Path | None = None
    """Structured forest (.yml.gz in OpenCV's format) that detects the edges; default: the image gradient."""
    min_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Boxes with a side below this share of the photo's short side are dropped, in addition to ``min_side``."""

    def smallest_side(self, size: tuple[int, int]) -> float:
        """The larger of ``min_side`` and ``min_share`` of the photo's short side."""
        return max(self.min_side, self.min_share * min(size))

    def ready(self) -> None:
        """Raise a UserError unless the model, if any, can be used."""
        if self.model is not None:
            _try_model(self.model)

    def search(self, bgr: UInt8[np.ndarray, "h w 3"], min_side: float) -> FoundBoxes:
        """Find all boxes of an image that enclose enough edges, with their scores."""
        edges, normals = self._edges(bgr)
        return boxes_from_edges(
            edges, normals, alpha=self.alpha, beta=self.beta, max_boxes=self.max_boxes, min_side=min_side
        )

    def _edges(self, bgr: UInt8[np.ndarray, "h w 3"]) -> tuple[Float32[np.ndarray, "h w"], Float32[np.ndarray, "h w"]]:
        """Thin edges in [0, 1], and their normals in [0, pi]."""
        if self.model is None:
            strength, normals = color_gradient(bgr, self.smoothing)
            return thin_edges(strength, normals), normals
        forest = _forest(self.model)
        thick = forest.detectEdges(np.ascontiguousarray(bgr[..., ::-1]).astype(np.float32) / 255)
        normals = forest.computeOrientation(thick)
        return np.asarray(forest.edgesNms(thick, normals)), np.asarray(normals)


def boxes_from_edges(
    edges: Float32[np.ndarray, "h w"],
    normals: Float32[np.ndarray, "h w"],
    *,
    alpha: float,
    beta: float,
    max_boxes: int | None,
    min_side: float,
) -> FoundBoxes:
    """OpenCV's sliding-window search and NMS over thin edges in [0, 1] with normals in [0, pi]."""
    search = cv2.ximgproc.createEdgeBoxes(
        alpha=alpha,
        beta=beta,
        maxBoxes=max_boxes or _OPENCV_MAX_BOXES,
        minBoxArea=max(min_side**2, _OPENCV_MIN_AREA),
    )
    boxes, scores = search.getBoundingBoxes(edges, normals)
    found = np.asarray(boxes, np.float64).reshape(-1, 4)  # (x, y, w, h)
    corners = np.concatenate([found[:, :2], found[:, :2] + found[:, 2:]], axis=1)
    strength = np.asarray(scores, np.float64).reshape(-1)[: len(found)]  # the scores of no boxes are None
    encloses = np.isfinite(strength) & (strength > 0)  # without edges, OpenCV divides zero by zero
    return FoundBoxes(corners[encloses], strength[encloses])


def color_gradient(
    bgr: UInt8[np.ndarray, "h w 3"], smoothing: float
) -> tuple[Float32[np.ndarray, "h w"], Float32[np.ndarray, "h w"]]:
    """Gradient magnitude in [0, 1] and direction in [0, pi] of every pixel.

    Taken from the Lab channel with the largest change, so that edges between colors of equal brightness count as well.
    """
    lab = cv2.cvtColor(bgr.astype(np.float32) / 255, cv2.COLOR_BGR2LAB)
    soft = cv2.GaussianBlur(lab, (0, 0), smoothing) if smoothing else lab
    dx, dy = cv2.Scharr(soft, cv2.CV_32F, 1, 0), cv2.Scharr(soft, cv2.CV_32F, 0, 1)  # (h, w, 3)
    change = np.hypot(dx, dy)
    channel = change.argmax(2)[..., None]
    dx, dy, change = (np.take_along_axis(x, channel, 2)[..., 0] for x in (dx, dy, change))
    strongest = max(float(np.percentile(change, _STRONG_PERCENTILE)), _MIN_STRENGTH)
    normals = np.mod(np.arctan2(dy, dx), np.pi)
    return (change / strongest).clip(0, 1).astype(np.float32), normals.astype(np.float32)


def thin_edges(strength: Float32[np.ndarray, "h w"], normals: Float32[np.ndarray, "h w"]) -> Float32[np.ndarray, "h w"]:
    """Edges one pixel wide: non-maximum suppression along the normals."""
    height, width = strength.shape
    y, x = np.mgrid[:height, :width].astype(np.float32)
    across, down = np.cos(normals), np.sin(normals)
    sides = [
        cv2.remap(strength, x + s * across, y + s * down, cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE)
        for s in (1, -1)
    ]
    return np.where((strength >= sides[0]) & (strength >= sides[1]), strength, np.float32(0))


@lru_cache(maxsize=1)
def _forest(path: Path) -> Any:
    return cv2.ximgproc.createStructuredEdgeDetection(str(path))


def _try_model(path: Path) -> None:
    """Load and run a model in a process of its own, because OpenCV crashes on some files that are not models."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; expected a structured forest for edge boxes (.yml.gz)")
    trial = multiprocessing.get_context("spawn").Process(target=_run_once, args=(path,), daemon=True)
    trial.start()
    trial.join(_LOAD_TIMEOUT)
    if trial.exitcode is None:
        trial.kill()
    if trial.exitcode != 0:
        raise UserError(f"{path}: not usable as a structured forest for edge boxes; expected OpenCV's model.yml.gz")


def _run_once(path: Path) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # OpenCV writes its messages directly to the terminal
    noise = np.random.default_rng(0).integers(0, 256, (64, 96, 3), np.uint8)
    try:
        EdgeBoxes(model=path).search(noise, 40.0)
    except Exception:
        raise SystemExit(1) from None
