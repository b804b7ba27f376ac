"""Validation of imported proposals: rows and ids of a file, its box convention, the fit of boxes to the photos."""

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
from jaxtyping import Bool, Float32, Float64

from tag2box.annotations import Photo
from tag2box.errors import UserError
from tag2box.proposals.base import Candidates

BoxOrder = Literal["xyxy", "yxyx", "xywh"]
LastPixel = Literal["included", "excluded"]
ORDERS: tuple[BoxOrder, ...] = get_args(BoxOrder)

_LARGEST = float(np.finfo(np.float32).max)  # stores are in single precision
_MAX_COLUMNS = 5  # a box and its score
_MAX_BOXES = 200_000  # of one image
_MAX_RATIO, _MAX_EXTRA = 100, 64 << 20  # limits of decompression: ratio, plus 64 MB for scores that are all 0
_MAX_IMAGES, _BYTES_PER_IMAGE = 100_000, 16
_TOLERANCE = 2.0  # pixels beyond the edge of a photo that rounding may explain
_MAX_MISFITS = 0.01  # fraction of boxes beyond the tolerance; more means another convention, or other photos
_EARLY_PHOTOS, _EARLY_MISFITS = 50, 0.1  # after this many photos, this fraction is already conclusive


# ---------------------------------------------------------------- what a file contains


@dataclass(frozen=True, slots=True)
class RawBoxes:
    """Boxes of one image in the file's own convention, and their scores, if any."""

    boxes: Float64[np.ndarray, "P 4"]
    scores: Float64[np.ndarray, " P"] | None

    def __len__(self) -> int:
        return len(self.boxes)


@dataclass(frozen=True, slots=True)
class ProposalFile:
    """An opened file or folder of proposals: its image ids, and the boxes of each, read on demand."""

    ids: tuple[str, ...]
    read: Callable[[int], RawBoxes]  # of the image at this index of ids


def parse_boxes(where: str, boxes: object, scores: object | None) -> RawBoxes:
    """Check rows: four finite numbers per box, or five with the score last, and as many scores as boxes."""
    table = _numbers(where, "boxes", boxes)
    if table.size == 0:
        table = table.reshape(0, 4)
    if table.ndim != 2 or table.shape[1] not in ({4} if scores is not None else {4, 5}):
        raise UserError(
            f"{where}: boxes of shape {table.shape}, expected four numbers per box; check the file or --format"
        )
    if scores is None:
        column = table[:, 4] if table.shape[1] == 5 else None
        return RawBoxes(table[:, :4], column)
    column = _numbers(where, "scores", scores).reshape(-1)
    if len(column) != len(table):
        raise UserError(f"{where}: {len(table)} boxes but {len(column)} scores; the file is damaged")
    return RawBoxes(table, column)


def parse_id(where: str, value: object) -> str:
    """An image id as text: from text, a whole number, or a one-element array of either."""
    while isinstance(value, np.ndarray) and value.size == 1 and value.ndim:
        value = value.reshape(-1)[0]
    if isinstance(value, np.generic | np.ndarray) and not value.shape:
        value = value.item()
    if isinstance(value, bytes):
        value = value.decode("latin-1")
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63:
        return str(value)
    if isinstance(value, str) and value.strip() and value.strip().isprintable():
        return value.strip()
    got = reprlib.repr(value)
    raise UserError(f"{where}: {type(value).__name__} {got} where an image id was expected; use text or whole numbers")


def unpacked_limit(size: int) -> int:
    """Most bytes that a compressed file of ``size`` bytes may unpack to; beyond, it is made to fill memory."""
    return _MAX_RATIO * size + _MAX_EXTRA


def image_limit(size: int) -> int:
    """Most images that a file of ``size`` bytes may name."""
    return _MAX_IMAGES + size // _BYTES_PER_IMAGE


def check_lengths(where: str, names: tuple[str, str], counts: tuple[int, int]) -> None:
    """Raise unless two parallel lists have the same length."""
    if counts[0] != counts[1]:
        raise UserError(f"{where}: {counts[0]} {names[0]} but {counts[1]} {names[1]}; the file is damaged")


def _numbers(where: str, what: str, value: object) -> Float64[np.ndarray, "*dims"]:
    try:
        if not _is_table(value):
            raise TypeError("not a table")
        table = np.asarray(value)
        if table.size > _MAX_COLUMNS * _MAX_BOXES:
            raise ValueError(f"more than {_MAX_BOXES:,} boxes in one image")
        table = np.asarray(table, np.float64)
    except (ValueError, TypeError, OverflowError) as error:
        reason = " ".join(str(error).split())[:80]
        raise UserError(f"{where}: {what} are not numbers ({reason}); expected a table of them") from None
    is_bad = ~(np.abs(table) <= _LARGEST)
    if is_bad.any():
        row = int(np.argwhere(is_bad)[0][0]) if table.ndim else 0
        raise UserError(f"{where}: {what}: row {row} has a number that is not finite; the file is damaged")
    return table


def _is_table(value: object) -> bool:
    """Numbers, or short rows of numbers. Checked before NumPy: lists that share lists, 60 deep, would fill memory."""
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "iuf" or (value.dtype.hasobject and all(map(_is_number, value.flat)))
    return isinstance(value, list | tuple) and all(_is_number(row) or _is_row(row) for row in value)


def _is_row(row: object) -> bool:
    if isinstance(row, np.ndarray):
        return row.ndim == 1 and len(row) <= _MAX_COLUMNS and _is_table(row)
    return isinstance(row, list | tuple) and len(row) <= _MAX_COLUMNS and all(map(_is_number, row))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


# ---------------------------------------------------------------- what its boxes mean


@dataclass(frozen=True, kw_only=True)
class BoxConvention:
    """Meaning of a box's four numbers. Widths and heights count pixels, so ``last_pixel`` concerns corners only."""

    boxes_are: BoxOrder
    first_pixel: Literal[0, 1]
    last_pixel: LastPixel

    def corners(self, rows: Float64[np.ndarray, "P 4"]) -> Float64[np.ndarray, "P 4"]:
        """Convert to tag2box's convention: xyxy, from 0, right and bottom exclusive."""
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
        """The convention as a store records it."""
        last = {} if self.boxes_are == "xywh" else {"last_pixel": self.last_pixel}
        return {"boxes_are": self.boxes_are, "first_pixel": self.first_pixel, **last}


@dataclass(frozen=True, kw_only=True)
class ConventionOverride:
    """The user's options about a file's convention; None leaves the format's default."""

    boxes_are: BoxOrder | None = None
    first_pixel: Literal[0, 1] | None = None
    last_pixel: LastPixel | None = None

    def over(self, default: BoxConvention) -> BoxConvention:
        """The format's convention with these options applied."""
        chosen = BoxConvention(
            boxes_are=self.boxes_are or default.boxes_are,
            first_pixel=default.first_pixel if self.first_pixel is None else self.first_pixel,
            last_pixel=self.last_pixel or default.last_pixel,
        )
        if chosen.boxes_are == "xywh" and self.last_pixel:
            raise UserError(
                "--last-pixel has no meaning for boxes that are xywh: width and height count pixels; leave it out"
            )
        return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposalFormat:
    """A format of proposal files: how to open one, and the usual convention of its boxes."""

    open: Callable[[Path], ProposalFile]
    convention: BoxConvention


# ---------------------------------------------------------------- fit to the photos


@dataclass(frozen=True, kw_only=True)
class BoxFilter:
    """Which boxes to keep: all but exact duplicates, unless a limit is set."""

    min_side: float = 0.0
    """Boxes with a shorter side, in pixels, are dropped."""
    max_boxes: int | None = None
    """Maximum number per photo: those with the highest scores, or the first ones without scores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportCounts:
    """Statistics of the boxes of some photos."""

    photos: int = 0
    boxes: int = 0  # in the file
    kept: int = 0
    cut: int = 0  # beyond the edge of the photo, clipped
    misfits: Mapping[str, int]  # far beyond the edge, or with negative size, if boxes were in this order
    empty: int = 0  # without area inside the photo
    repeats: int = 0
    small: int = 0
    surplus: int = 0  # beyond max_boxes
    near: float = np.inf  # smallest distance to the left or top edge, negative beyond it
    far: float = np.inf  # to the right or bottom edge

    def __add__(self, other: "ImportCounts") -> "ImportCounts":
        plain = [f.name for f in fields(self) if f.name not in {"misfits", "near", "far"}]
        return ImportCounts(
            misfits={order: self.misfits[order] + other.misfits[order] for order in ORDERS},
            near=min(self.near, other.near),
            far=min(self.far, other.far),
            **{name: getattr(self, name) + getattr(other, name) for name in plain},
        )

    @classmethod
    def none(cls) -> "ImportCounts":
        """The counts of no photos."""
        return cls(misfits=dict.fromkeys(ORDERS, 0))


@dataclass(frozen=True, slots=True)
class FittedBoxes:
    """The kept boxes of one photo, and the statistics of its import."""

    candidates: Candidates
    counts: ImportCounts


def fit_boxes(raw: RawBoxes, photo: Photo, convention: BoxConvention, keep: BoxFilter) -> FittedBoxes:
    """Convert a photo's boxes to tag2box's convention, clipped to the photo; highest scores first, if there are any."""
    best = slice(None) if raw.scores is None else np.argsort(-raw.scores, kind="stable")
    scores = np.zeros(len(raw)) if raw.scores is None else raw.scores[best]
    corners = convention.corners(raw.boxes[best])
    edge = np.array([photo.width, photo.height] * 2, np.float64)
    boxes = corners.clip(0, edge).astype(np.float32)
    sides = (boxes[:, 2:] - boxes[:, :2]).min(axis=1, initial=np.inf)
    has_area = sides > 0
    is_new = _is_first(boxes) & has_area
    is_big = is_new & (sides >= keep.min_side)
    chosen = np.flatnonzero(is_big)[: keep.max_boxes]
    counts = ImportCounts(
        photos=1,
        boxes=len(raw),
        kept=len(chosen),
        cut=int((has_area & (_excess(corners, edge) > 0)).sum()),
        misfits={order: _misfits(raw, edge, replace(convention, boxes_are=order)) for order in ORDERS},
        empty=int((~has_area).sum()),
        repeats=int((has_area & ~is_new).sum()),
        small=int((is_new & ~is_big).sum()),
        surplus=int(is_big.sum()) - len(chosen),
        near=float(corners[:, :2].min(initial=np.inf)),
        far=float((edge[2:] - corners[:, 2:]).min(initial=np.inf)),
    )
    kept = Candidates(torch.from_numpy(boxes[chosen]), torch.from_numpy(scores[chosen].astype(np.float32)))
    return FittedBoxes(kept, counts)


def check_fit(file: Path, counts: ImportCounts, convention: BoxConvention, *, is_all: bool) -> None:
    """Raise if too many boxes lie outside their photos, and name the order in which they would fit."""
    if not counts.boxes or (not is_all and counts.photos < _EARLY_PHOTOS):
        return
    share = {order: count / counts.boxes for order, count in counts.misfits.items()}
    if share[convention.boxes_are] <= (_MAX_MISFITS if is_all else _EARLY_MISFITS):
        return
    better = min(share, key=lambda order: share[order])
    hint = (
        f"with --boxes-are {better} it is {share[better]:.1%}"
        if share[better] <= _MAX_MISFITS
        else "are these boxes of these photos, at their size?"
    )
    raise UserError(
        f"{file}: {share[convention.boxes_are]:.1%} of {counts.boxes:,} boxes do not lie on their photos with "
        f"--boxes-are {convention.boxes_are}; {hint}"
    )


def import_notes(counts: ImportCounts, convention: BoxConvention) -> tuple[str, ...]:
    """Remarks about imported boxes: what was dropped, and signs of another convention."""
    found = (
        (counts.cut, f"{counts.cut:,} boxes reach over the edge of their photo; they were cut"),
        (counts.empty, f"{counts.empty:,} boxes without area in their photo left out"),
        (counts.repeats, f"{counts.repeats:,} exact repeats left out"),
        (counts.small, f"{counts.small:,} boxes with a side below --min-side left out"),
        (counts.surplus, f"{counts.surplus:,} boxes beyond --max-boxes left out"),
    )
    return (*(line for count, line in found if count), *_convention_hints(counts, convention))


def _convention_hints(counts: ImportCounts, convention: BoxConvention) -> tuple[str, ...]:
    """Hints if the outermost boxes miss an edge by exactly one pixel: the other convention would fit exactly."""
    first, last = 1 - convention.first_pixel, "excluded" if convention.last_pixel == "included" else "included"
    is_near = counts.near == (1 if first else -1)
    far = counts.far + (counts.near if is_near else 0)  # with the other first pixel
    is_far = far == (1 if last == "included" else -1) and convention.boxes_are != "xywh"
    hints = (("left and top", f"--first-pixel {first}", is_near), ("right and bottom", f"--last-pixel {last}", is_far))
    return tuple(
        f"the outermost boxes miss the {edges} edges by exactly one pixel; does the file need {option}?"
        for edges, option, is_meant in hints
        if is_meant
    )


def _is_first(boxes: Float32[np.ndarray, "P 4"]) -> Bool[np.ndarray, " P"]:
    """Mask of the boxes that repeat no earlier one."""
    bits = np.ascontiguousarray(boxes + np.float32(0)).view(np.uint64)  # (P, 2); -0 becomes 0
    order = np.lexsort(bits.T)
    is_first = np.ones(len(boxes), bool)
    is_first[order[1:][(bits[order[1:]] == bits[order[:-1]]).all(axis=1)]] = False
    return is_first


def _excess(corners: Float64[np.ndarray, "P 4"], edge: Float64[np.ndarray, " 4"]) -> Float64[np.ndarray, " P"]:
    """Pixels by which each box exceeds its photo."""
    return np.asarray(np.maximum(-corners, corners - edge).max(axis=1, initial=0))


def _misfits(raw: RawBoxes, edge: Float64[np.ndarray, " 4"], convention: BoxConvention) -> int:
    """Number of boxes that exceed their photo, or have a negative side, by more than the tolerance."""
    corners = convention.corners(raw.boxes)
    negative = (corners[:, :2] - corners[:, 2:]).max(axis=1, initial=0)
    return int((np.maximum(_excess(corners, edge), negative) > _TOLERANCE).sum())
