"""Edge boxes: boxes that wholly enclose contours (Zitnick and Dollar, ECCV 2014)."""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import cv2
import numpy as np
from jaxtyping import Float32, UInt8
from numpy import ndarray
from pydantic import Field

from tag2box.errors import UserError
from tag2box.proposals.base import FoundBoxes, ProposalMethod

_FULL = 99.0  # percentile of the gradient that counts as the strongest edge of a photo
_FAINT = 1.0  # gradient of a 32nd of a Lab unit a pixel: less is rounding, as in a photo of one colour
_MOST = 10_000  # boxes asked of OpenCV where there is no cap; its own default
_PATIENCE = 300  # seconds a structured forest may take to load


@dataclass(frozen=True, kw_only=True)
class EdgeBoxes(ProposalMethod):
    """OpenCV's edge boxes on the gradient of the photo, or on the edges of a structured forest. Boxes are ranked."""

    kind: Literal["edge_boxes"] = "edge_boxes"
    short_side: Annotated[int, Field(ge=32)] | None = 200
    """Side to which photos are resized for the search; None searches them as they are, and takes many times as long."""
    alpha: Annotated[float, Field(gt=0, lt=1)] = 0.65
    """Overlap of neighbouring boxes in the search: higher is denser and slower."""
    beta: Annotated[float, Field(gt=0, lt=1)] = 0.75
    """Overlap above which the weaker of two boxes is dropped: higher fits objects tighter, lower finds more of them."""
    smoothing: Annotated[float, Field(ge=0)] = 2.0
    """Pixels (sigma) by which the searched copy is blurred before its gradient is taken. Unused with a ``model``."""
    model: Path | None = None
    """Structured forest (.yml.gz, as OpenCV reads it) that finds the edges; without one, the gradient does."""

    def ready(self) -> None:
        """Raise unless the model, if there is one, can be used."""
        if self.model is not None:
            _try_model(self.model)

    def search(self, bgr: UInt8[ndarray, "h w 3"], min_side: float) -> FoundBoxes:
        """All boxes of a picture that enclose enough edges, with their scores."""
        edges, normals = self._edges(bgr)
        finder = Finder(alpha=self.alpha, beta=self.beta, most=self.max_boxes, min_side=min_side)
        return finder(edges, normals)

    def _edges(self, bgr: UInt8[ndarray, "h w 3"]) -> tuple[Float32[ndarray, "h w"], Float32[ndarray, "h w"]]:
        """Thin edges within 0 and 1, and the direction across them within 0 and pi."""
        if self.model is None:
            strength, normals = gradient(bgr, self.smoothing)
            return thinned(strength, normals), normals
        forest = _forest(self.model)
        thick = forest.detectEdges(np.ascontiguousarray(bgr[..., ::-1]).astype(np.float32) / 255)
        normals = forest.computeOrientation(thick)
        return np.asarray(forest.edgesNms(thick, normals)), np.asarray(normals)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finder:
    """Edges in, boxes that enclose enough of them out, with their scores: OpenCV's sliding windows and their NMS."""

    alpha: float
    beta: float
    most: int | None
    min_side: float

    def __call__(self, edges: Float32[ndarray, "h w"], normals: Float32[ndarray, "h w"]) -> FoundBoxes:
        """Boxes of thin edges within 0 and 1, and of the direction across them within 0 and pi."""
        finder = cv2.ximgproc.createEdgeBoxes(
            alpha=self.alpha, beta=self.beta, maxBoxes=self.most or _MOST, minBoxArea=max(self.min_side**2, 1.0)
        )
        boxes, scores = finder.getBoundingBoxes(edges, normals)
        found = np.asarray(boxes, np.float64).reshape(-1, 4)  # (x, y, w, h)
        corners = np.concatenate([found[:, :2], found[:, :2] + found[:, 2:]], axis=1)
        strength = np.asarray(scores, np.float64).reshape(-1)[: len(found)]  # of no boxes the scores are None
        encloses = np.isfinite(strength) & (strength > 0)  # without edges, OpenCV divides zero by zero
        return FoundBoxes(corners[encloses], strength[encloses])


def gradient(bgr: UInt8[ndarray, "h w 3"], smoothing: float) -> tuple[Float32[ndarray, "h w"], Float32[ndarray, "h w"]]:
    """How much colour changes at each pixel, within 0 and 1, and in which direction, within 0 and pi.

    The channel of Lab that changes most speaks for a pixel: edges between colours of equal brightness count as well.
    """
    lab = cv2.cvtColor(bgr.astype(np.float32) / 255, cv2.COLOR_BGR2LAB)
    soft = cv2.GaussianBlur(lab, (0, 0), smoothing) if smoothing else lab
    dx, dy = cv2.Scharr(soft, cv2.CV_32F, 1, 0), cv2.Scharr(soft, cv2.CV_32F, 0, 1)  # (h, w, 3)
    change = np.hypot(dx, dy)
    channel = change.argmax(2)[..., None]
    dx, dy, change = (np.take_along_axis(x, channel, 2)[..., 0] for x in (dx, dy, change))
    strongest = max(float(np.percentile(change, _FULL)), _FAINT)
    normals = np.mod(np.arctan2(dy, dx), np.pi)
    return (change / strongest).clip(0, 1).astype(np.float32), normals.astype(np.float32)


def thinned(strength: Float32[ndarray, "h w"], normals: Float32[ndarray, "h w"]) -> Float32[ndarray, "h w"]:
    """Edges one pixel wide: what is weaker than a neighbour across the edge becomes zero."""
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
    """Use a model in a process of its own, for OpenCV does not survive every file that is none."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; expected a structured forest for edge boxes (.yml.gz)")
    trial = multiprocessing.get_context("spawn").Process(target=_use_once, args=(path,), daemon=True)
    trial.start()
    trial.join(_PATIENCE)
    if trial.exitcode is None:
        trial.kill()
    if trial.exitcode != 0:
        raise UserError(f"{path}: not usable as a structured forest for edge boxes; expected OpenCV's model.yml.gz")


def _use_once(path: Path) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # OpenCV writes what it thinks of a file to the terminal itself
    card = np.random.default_rng(0).integers(0, 256, (64, 96, 3), np.uint8)
    try:
        EdgeBoxes(model=path).search(card, 40.0)
    except Exception:
        raise SystemExit(1) from None
