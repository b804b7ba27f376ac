"""What every reader gives: image ids, and the rows of each image, read when they are asked for."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64
from numpy import ndarray

from tag2box.errors import UserError

_LARGEST = float(np.finfo(np.float32).max)  # stores are in single precision
_WIDEST = 5  # numbers of a row: a box and its score


@dataclass(frozen=True, slots=True)
class Rows:
    """The boxes of one image as the file writes them, and their scores where it has any."""

    boxes: Float64[ndarray, "P 4"]
    scores: Float64[ndarray, " P"] | None

    def __len__(self) -> int:
        return len(self.boxes)


@dataclass(frozen=True, slots=True)
class Listing:
    """A file or folder of proposals."""

    ids: tuple[str, ...]
    read: Callable[[int], Rows]  # of the image at this place in ids


def rows_of(where: str, boxes: object, scores: object | None) -> Rows:
    """Rows checked: four finite numbers a box, or five with the score last, and as many scores as boxes."""
    table = _numbers(where, "boxes", boxes)
    if table.size == 0:
        table = table.reshape(0, 4)
    if table.ndim != 2 or table.shape[1] not in ({4} if scores is not None else {4, 5}):
        raise UserError(
            f"{where}: boxes of shape {table.shape}, expected four numbers a box; check the file or --format"
        )
    if scores is None:
        column = table[:, 4] if table.shape[1] == 5 else None
        return Rows(table[:, :4], column)
    column = _numbers(where, "scores", scores).reshape(-1)
    if len(column) != len(table):
        raise UserError(f"{where}: {len(table)} boxes but {len(column)} scores; the file is damaged")
    return Rows(table, column)


def _numbers(where: str, what: str, value: object) -> Float64[ndarray, ...]:
    try:
        if not _is_table(value):
            raise TypeError("not a table")
        table = np.asarray(np.asarray(value), np.float64)
    except (ValueError, TypeError, OverflowError) as error:
        raise UserError(f"{where}: {what} are not numbers ({_short(error)}); expected a table of them") from None
    is_bad = ~(np.abs(table) <= _LARGEST)
    if is_bad.any():
        row = int(np.argwhere(is_bad)[0][0]) if table.ndim else 0
        raise UserError(f"{where}: {what}: row {row} has a number that is not finite; the file is damaged")
    return table


def _is_table(value: object) -> bool:
    """Numbers, or rows of a few. Checked before numpy looks: lists that share lists, 60 deep, would fill the memory."""
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "iuf" or (value.dtype.hasobject and all(map(_is_number, value.flat)))
    return isinstance(value, list | tuple) and all(_is_number(row) or _is_row(row) for row in value)


def _is_row(row: object) -> bool:
    if isinstance(row, np.ndarray):
        return row.ndim == 1 and len(row) <= _WIDEST and _is_table(row)
    return isinstance(row, list | tuple) and len(row) <= _WIDEST and all(map(_is_number, row))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def id_of(where: str, value: object) -> str:
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


def same_length(where: str, names: tuple[str, str], counts: tuple[int, int]) -> None:
    """Refuse lists that should go side by side but do not."""
    if counts[0] != counts[1]:
        raise UserError(f"{where}: {counts[0]} {names[0]} but {counts[1]} {names[1]}; the file is damaged")


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:80]
