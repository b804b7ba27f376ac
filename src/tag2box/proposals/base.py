"""Candidate boxes of one photo, as every source of them gives them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import cv2
import numpy as np
import torch
from jaxtyping import Float, Float32, Int, UInt8
from numpy import ndarray
from pydantic import Field
from torch import Tensor

from tag2box.errors import UserError
from tag2box.extend import Plugin


@dataclass(frozen=True, slots=True)
class Candidates:
    """Boxes that may hold an object, with a score each; zeros where the source does not rank its boxes."""

    boxes: Float32[Tensor, "P 4"]
    scores: Float32[Tensor, " P"]

    def __post_init__(self) -> None:
        if self.boxes.shape != (len(self.scores), 4) or self.scores.ndim != 1:
            raise ValueError(f"boxes {tuple(self.boxes.shape)} do not match scores {tuple(self.scores.shape)}")

    def __len__(self) -> int:
        return len(self.scores)

    @classmethod
    def unranked(cls, boxes: Float32[Tensor, "P 4"]) -> Candidates:
        """Boxes of a source that does not rank."""
        return cls(boxes, torch.zeros(len(boxes)))


_LONGEST = 8  # short sides that the long side of a working copy may have: a scroll as tall as a tower stays affordable

PhotoSource = Mapping[str, object]
"""Where boxes come from, as JSON: a ``kind``, and the settings that matter to the result."""


@dataclass(frozen=True, slots=True)
class FoundBoxes:
    """What a search found, in pixels of the picture it searched: xyxy, right and bottom excluded."""

    corners: Float[ndarray, "n 4"]
    scores: Float[ndarray, " n"]


@dataclass(frozen=True, kw_only=True)
class ProposalMethod:
    """A way to propose boxes: its fields are its settings, and a subclass says how to ``search``."""

    kind: str = ""
    short_side: Annotated[int, Field(ge=32)] | None = None
    """Side to which photos are resized for the search; None searches them as they are."""
    max_boxes: Annotated[int, Field(ge=1)] | None = 2000
    """At most so many boxes of a photo are kept."""
    min_side: Annotated[int, Field(ge=0)] = 20
    """Boxes with a shorter side, in pixels of the original photo, are left out."""

    def search(self, bgr: UInt8[ndarray, "h w 3"], min_side: float) -> FoundBoxes:
        """All boxes of a picture; those with a side below ``min_side`` pixels of it need not be among them."""
        raise NotImplementedError

    def order(self, boxes: Float32[ndarray, "n 4"], scores: Float32[ndarray, " n"]) -> Int[ndarray, " n"]:
        """The rows in the order they are kept: the best first, and of equals the leftmost."""
        return np.argsort(-scores, kind="stable")

    def ready(self) -> None:
        """Raise in one line if a file that the search needs is missing or broken."""

    def source(self) -> dict[str, object]:
        """The settings as a store records them; a file counts by its name and content, wherever it lies."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["kind"] = Plugin("proposal method").kind_of(self)
        return {name: _identity(v) if isinstance(v, Path) else v for name, v in values.items()}

    def working_size(self, size: tuple[int, int]) -> tuple[int, int]:
        """Width and height at which a photo of this width and height is searched."""
        if self.short_side is None:
            return size
        scale = min(self.short_side / min(size), _LONGEST * self.short_side / max(size))
        return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))

    def __call__(self, image: UInt8[Tensor, "3 H W"], size: tuple[int, int] | None = None) -> Candidates:
        """Candidate boxes of a photo, without repeats, in the order that the cap keeps.

        Args:
            size: width and height of the photo, in whose pixels boxes are given, where ``image`` is a smaller copy.
        """
        width, height = size or (image.shape[2], image.shape[1])
        cols, rows = self.working_size((width, height))
        bgr = np.ascontiguousarray(image.permute(1, 2, 0).numpy()[..., ::-1])
        found = self.search(_resized(bgr, cols, rows), self.min_side * cols / width)
        boxes = found.corners * np.array([width / cols, height / rows] * 2)
        boxes = boxes.clip(0, [width, height, width, height]).astype(np.float32)
        is_big = ((boxes[:, 2:] - boxes[:, :2]) >= max(self.min_side, 1e-3)).all(1)
        boxes, scores = _distinct(boxes[is_big], found.scores[is_big].astype(np.float32))
        kept = self.order(boxes, scores)[: self.max_boxes]
        return Candidates(torch.from_numpy(boxes[kept]), torch.from_numpy(scores[kept]))


def _resized(bgr: UInt8[ndarray, "H W 3"], cols: int, rows: int) -> UInt8[ndarray, "h w 3"]:
    if bgr.shape[:2] == (rows, cols):
        return bgr
    way = cv2.INTER_AREA if rows * cols < bgr.shape[0] * bgr.shape[1] else cv2.INTER_LINEAR
    return np.asarray(cv2.resize(bgr, (cols, rows), interpolation=way))


def _distinct(
    boxes: Float32[ndarray, "n 4"], scores: Float32[ndarray, " n"]
) -> tuple[Float32[ndarray, "m 4"], Float32[ndarray, " m"]]:
    """The boxes without exact repeats, sorted, each with the best of its scores."""
    single, owner = np.unique(boxes, axis=0, return_inverse=True)
    best = np.full(len(single), -np.inf, np.float32)
    np.maximum.at(best, owner.reshape(-1), scores)
    return single, best


def _identity(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return f"{path.name} sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
    except OSError as error:
        raise UserError(f"{path}: not readable ({error.strerror}); expected a file that proposals need") from None
