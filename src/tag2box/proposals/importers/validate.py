"""How a file writes a box: which four numbers, counted from where, and whether the last pixel belongs to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
from jaxtyping import Bool, Float64
from numpy import ndarray

from tag2box.annotations import Photo
from tag2box.errors import UserError
from tag2box.proposals.base import Candidates
from tag2box.proposals.importers.match_ids import ImageRows

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


_SLACK = 2.0  # pixels over the edge that rounding may explain
_MANY = 0.01  # of the boxes over the edge by more than that: the convention is wrong, or these are other photos
_EARLY, _VERY_MANY = 50, 0.1  # after so many photos, so large a share needs no further proof


@dataclass(frozen=True, kw_only=True)
class Keep:
    """Which boxes are kept: all but exact repeats, unless a side or a number is given."""

    min_side: float = 0.0
    """Boxes with a shorter side, in pixels, are left out."""
    max_boxes: int | None = None
    """At most so many a photo: those with the best scores, or the first where there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitCounts:
    """What became of the boxes of some photos."""

    photos: int = 0
    boxes: int = 0  # in the file
    kept: int = 0
    cut: int = 0  # a little over the edge of the photo
    misfits: Mapping[str, int]  # far over it, or turned inside out, if boxes were in this order
    empty: int = 0  # without area in the photo
    repeats: int = 0
    small: int = 0
    surplus: int = 0  # beyond max_boxes
    near: float = np.inf  # the least distance to the left or top edge, negative beyond it
    far: float = np.inf  # to the right or bottom edge

    def __add__(self, other: FitCounts) -> FitCounts:
        """Both together."""
        plain = [f.name for f in fields(self) if f.name not in {"misfits", "near", "far"}]
        return FitCounts(
            misfits={order: self.misfits[order] + other.misfits[order] for order in ORDERS},
            near=min(self.near, other.near),
            far=min(self.far, other.far),
            **{name: getattr(self, name) + getattr(other, name) for name in plain},
        )

    @classmethod
    def none(cls) -> FitCounts:
        """Of no photos."""
        return cls(misfits=dict.fromkeys(ORDERS, 0))


@dataclass(frozen=True, slots=True)
class Fitted:
    """The boxes of one photo as they are kept, and what was done to them."""

    candidates: Candidates
    counts: FitCounts


def fit_boxes(rows: ImageRows, photo: Photo, convention: Convention, keep: Keep) -> Fitted:
    """A photo's boxes in our convention, cut at its edges; the best first where they have scores."""
    best = slice(None) if rows.scores is None else np.argsort(-rows.scores, kind="stable")
    scores = np.zeros(len(rows)) if rows.scores is None else rows.scores[best]
    corners = convention.corners(rows.boxes[best])
    edge = np.array([photo.width, photo.height] * 2, np.float64)
    boxes = corners.clip(0, edge).astype(np.float32)
    sides = (boxes[:, 2:] - boxes[:, :2]).min(axis=1, initial=np.inf)
    has_area = sides > 0
    is_new = _first_of_each(boxes) & has_area
    is_big = is_new & (sides >= keep.min_side)
    chosen = np.flatnonzero(is_big)[: keep.max_boxes]
    counts = FitCounts(
        photos=1,
        boxes=len(rows),
        kept=len(chosen),
        cut=int((has_area & (_over(corners, edge) > 0)).sum()),
        misfits={order: _misfits(rows, edge, replace(convention, boxes_are=order)) for order in ORDERS},
        empty=int((~has_area).sum()),
        repeats=int((has_area & ~is_new).sum()),
        small=int((is_new & ~is_big).sum()),
        surplus=int(is_big.sum()) - len(chosen),
        near=float(corners[:, :2].min(initial=np.inf)),
        far=float((edge[2:] - corners[:, 2:]).min(initial=np.inf)),
    )
    kept = Candidates(torch.from_numpy(boxes[chosen]), torch.from_numpy(scores[chosen].astype(np.float32)))
    return Fitted(kept, counts)


def judge(file: Path, counts: FitCounts, convention: Convention, *, is_all: bool) -> None:
    """Refuse boxes that are not where the photos are, and say in which order they would be."""
    if not counts.boxes or (not is_all and counts.photos < _EARLY):
        return
    share = {order: count / counts.boxes for order, count in counts.misfits.items()}
    if share[convention.boxes_are] <= (_MANY if is_all else _VERY_MANY):
        return
    better = min(share, key=lambda order: share[order])
    hint = (
        f"with --boxes-are {better} it is {share[better]:.1%}"
        if share[better] <= _MANY
        else "are these boxes of these photos, at their size?"
    )
    raise UserError(
        f"{file}: {share[convention.boxes_are]:.1%} of {counts.boxes:,} boxes do not lie on their photos with "
        f"--boxes-are {convention.boxes_are}; {hint}"
    )


def notes(counts: FitCounts, convention: Convention) -> tuple[str, ...]:
    """What a user should know of boxes that were taken: what was left out, and signs of another convention."""
    found = (
        (counts.cut, f"{counts.cut:,} boxes reach over the edge of their photo; they were cut"),
        (counts.empty, f"{counts.empty:,} boxes without area in their photo left out"),
        (counts.repeats, f"{counts.repeats:,} exact repeats left out"),
        (counts.small, f"{counts.small:,} boxes with a side below --min-side left out"),
        (counts.surplus, f"{counts.surplus:,} boxes beyond --max-boxes left out"),
    )
    return (*(line for count, line in found if count), *_signs(counts, convention))


def _signs(counts: FitCounts, convention: Convention) -> tuple[str, ...]:
    """Boxes that all stay one pixel short of an edge, or reach one over it: the other convention would fit exactly."""
    first, last = 1 - convention.first_pixel, "excluded" if convention.last_pixel == "included" else "included"
    is_near = counts.near == (1 if first else -1)
    far = counts.far + (counts.near if is_near else 0)  # as it were from the other first pixel
    is_far = far == (1 if last == "included" else -1) and convention.boxes_are != "xywh"
    return (
        *((_sign("left and top", f"--first-pixel {first}"),) if is_near else ()),
        *((_sign("right and bottom", f"--last-pixel {last}"),) if is_far else ()),
    )


def _sign(edges: str, option: str) -> str:
    return f"the outermost boxes miss the {edges} edges by exactly one pixel; does the file need {option}?"


def _first_of_each(boxes: ndarray) -> Bool[ndarray, " P"]:
    is_first = np.zeros(len(boxes), bool)
    is_first[np.unique(boxes, axis=0, return_index=True)[1]] = True
    return is_first


def _over(corners: Float64[ndarray, "P 4"], edge: Float64[ndarray, " 4"]) -> Float64[ndarray, " P"]:
    return np.asarray(np.maximum(-corners, corners - edge).max(axis=1, initial=0))


def _beyond(corners: Float64[ndarray, "P 4"], edge: Float64[ndarray, " 4"]) -> Float64[ndarray, " P"]:
    """Pixels by which each box reaches over the edge of the photo, or its right edge lies left of its left one."""
    turned = (corners[:, :2] - corners[:, 2:]).max(axis=1, initial=0)
    return np.asarray(np.maximum(_over(corners, edge), turned))


def _misfits(rows: ImageRows, edge: Float64[ndarray, " 4"], convention: Convention) -> int:
    return int((_beyond(convention.corners(rows.boxes), edge) > _SLACK).sum())
