"""Rows of numbers in an .npy file, mapped into memory and copied out a few at a time."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from jaxtyping import Float32
from numpy import ndarray

from tag2box.errors import UserError

# The kernel maps 64 kB around every page that is touched, so as much must be let go again.
_AROUND = max(64 * 1024, mmap.ALLOCATIONGRANULARITY)
_LET_GO: int | None = getattr(mmap, "MADV_DONTNEED", None)  # Windows has none, and trims by itself


@dataclass(frozen=True, slots=True)
class Rows:
    """A float32 .npy file on disk. Reading from it does not make the process grow: read pages are let go at once."""

    values: Float32[ndarray, "total ..."]  # a view of the mapping
    mapping: mmap.mmap
    start: int  # bytes of the header

    @classmethod
    def open(cls, path: Path, shape: tuple[int, ...]) -> Rows:
        """Map a file that must hold float32 numbers of this shape."""
        try:
            with path.open("rb") as file:
                found, dtype, start = _read_header(file)
                mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError, EOFError) as error:
            raise UserError(f"{path}: not readable as proposals ({error}); make them anew") from None
        if found != shape or dtype != np.dtype("<f4"):
            raise UserError(f"{path}: {dtype} {found}, its index says float32 {shape}; make the proposals anew")
        count = int(np.prod(shape))
        if len(mapping) != start + 4 * count:
            raise UserError(f"{path}: cut short or overlong ({len(mapping)} bytes); make the proposals anew")
        values = np.frombuffer(mapping, np.dtype("<f4"), count, start).reshape(shape)
        return cls(values, mapping, start)

    def copy(self, first: int, last: int) -> Float32[ndarray, "n ..."]:
        """Rows ``first`` to ``last`` (excluded), as the reader's own."""
        rows = np.array(self.values[first:last], np.float32)
        if _LET_GO is not None and rows.size:
            width = self.values.strides[0]
            begin = (self.start + first * width) // _AROUND * _AROUND
            end = -(-(self.start + last * width) // _AROUND) * _AROUND
            self.mapping.madvise(_LET_GO, begin, min(end, len(self.mapping)) - begin)
        return rows


def write_header(file: BinaryIO, shape: Sequence[int]) -> None:
    """An .npy header. NumPy pads it so that it keeps its length as the first axis grows: it can be rewritten."""
    header = {"descr": "<f4", "fortran_order": False, "shape": tuple(shape)}
    np.lib.format.write_array_header_1_0(file, header)


def _read_header(file: BinaryIO) -> tuple[tuple[int, ...], np.dtype, int]:
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError("of an unknown version")
    shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(file)
    if is_fortran:
        raise ValueError("in column order")
    return shape, dtype, file.tell()
