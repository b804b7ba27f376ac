"""How a file writes a box: which four numbers, counted from where, and whether the last pixel belongs to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from jaxtyping import Float64
from numpy import ndarray

from tag2box.errors import UserError

BoxOrder = Literal["xyxy", "yxyx", "xywh"]
LastPixel = Literal["included", "excluded"]

ORDERS: tuple[BoxOrder, ...] = get_args(BoxOrder)


@dataclass(frozen=True, kw_only=True)
class Convention:
    """What the four numbers of a box mean. Widths and heights count pixels, so ``last_pixel`` concerns corners only."""

    boxes_are: BoxOrder
    first_pixel: Literal[0, 1]
    last_pixel: LastPixel

    def corners(self, rows: Float64[ndarray, "P 4"]) -> Float64[ndarray, "P 4"]:
        """Boxes as they are everywhere in tag2box: xyxy, from 0, right and bottom edge excluded."""
        a, b, c, d = rows.T - self.first_pixel
        if self.boxes_are == "xywh":
            return np.stack([a, b, a + rows[:, 2], b + rows[:, 3]], axis=1)
        beyond = int(self.last_pixel == "included")
        if self.boxes_are == "xyxy":
            return np.stack([a, b, c + beyond, d + beyond], axis=1)
        return np.stack([b, a, d + beyond, c + beyond], axis=1)

    def __str__(self) -> str:
        last = "" if self.boxes_are == "xywh" else f", last pixel {self.last_pixel}"
        return f"boxes {self.boxes_are}, first pixel {self.first_pixel}{last}"

    def as_source(self) -> Mapping[str, object]:
        """As a store records it."""
        last = {} if self.boxes_are == "xywh" else {"last_pixel": self.last_pixel}
        return {"boxes_are": self.boxes_are, "first_pixel": self.first_pixel, **last}


@dataclass(frozen=True, kw_only=True)
class Said:
    """What the user says of a file's convention; None leaves it to the format."""

    boxes_are: BoxOrder | None = None
    first_pixel: Literal[0, 1] | None = None
    last_pixel: LastPixel | None = None

    def over(self, usual: Convention) -> Convention:
        """The format's convention with the user's word put over it."""
        chosen = Convention(
            boxes_are=self.boxes_are or usual.boxes_are,
            first_pixel=usual.first_pixel if self.first_pixel is None else self.first_pixel,
            last_pixel=self.last_pixel or usual.last_pixel,
        )
        if chosen.boxes_are == "xywh" and self.last_pixel:
            raise UserError(
                "--last-pixel has no meaning for boxes that are xywh: width and height count pixels; leave it out"
            )
        return chosen
