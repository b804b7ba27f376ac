"""Memory-mapped float32 arrays of any size: read in parts, verified block by block, digested while being written."""

import hashlib
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from jaxtyping import Float32

from tag2box import io, storage
from tag2box.errors import UserError

BLOCK = 1 << 18
"""Bytes that a digest covers: verifying them on the first read takes a fraction of a millisecond."""
# The kernel maps 64 kB around every page that is touched, so as much must be released again.
_READ_AROUND = max(64 * 1024, mmap.ALLOCATIONGRANULARITY)
_RELEASE: int | None = getattr(mmap, "MADV_DONTNEED", None)  # Windows has none, and trims by itself


@dataclass(frozen=True, slots=True)
class MappedArray:
    """Memory-mapped float32 .npy file. Pages are released after reading, so the resident memory does not grow."""

    values: Float32[np.ndarray, "total ..."]  # view of the mapping
    mapping: mmap.mmap
    start: int  # size of the header in bytes
    digests: storage.BlockDigests | None  # none in stores of format 2
    remedy: str

    @classmethod
    def open(
        cls, path: Path, shape: tuple[int, ...], digests: storage.BlockDigests | None, remedy: str
    ) -> "MappedArray":
        """Map a file that must contain a float32 array of this shape."""
        header, count = npy_header(shape), int(np.prod(shape, dtype=object))
        try:
            with io.open_file(path, f"an array; {remedy}") as file:
                found = file.read(len(header))
                mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise UserError(f"{path}: not readable as an array ({error}); {remedy}") from None
        size = len(header) + 4 * count
        if len(mapping) != size or (digests is not None and digests.size != size):
            raise UserError(f"{path}: cut short or overlong ({len(mapping)} bytes, expected {size}); {remedy}")
        if found != header:
            raise UserError(f"{path}: damaged, its header is not that of float32 {shape}; {remedy}")
        values = np.frombuffer(mapping, np.dtype("<f4"), count, len(header)).reshape(shape)
        return cls(values, mapping, len(header), digests, remedy)

    def copy(self, first: int, last: int) -> Float32[np.ndarray, "n ..."]:
        """Copy rows ``first`` to ``last`` (exclusive); raises if they are damaged."""
        if first == last:
            return np.array(self.values[:0], np.float32)
        begin, end = (self.start + row * self.values.strides[0] for row in (first, last))
        if self.digests is not None and len(self.digests.verified) < len(self.digests.digests):
            self.digests.verify(self._read, begin, end, self.remedy)
        rows = np.array(self.values[first:last], np.float32)
        self._release(begin, end)
        return rows

    def _read(self, begin: int, end: int) -> bytes:
        part = self.mapping[begin:end]
        self._release(begin, end)
        return part

    def _release(self, begin: int, end: int) -> None:
        if _RELEASE is not None:
            begin = begin // _READ_AROUND * _READ_AROUND
            end = min(-(-end // _READ_AROUND) * _READ_AROUND, len(self.mapping))
            self.mapping.madvise(_RELEASE, begin, end - begin)


def npy_header(shape: Sequence[int]) -> bytes:
    """The header of a float32 .npy file. NumPy pads it to a constant length as the first axis grows."""
    header = BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": tuple(shape)})
    return header.getvalue()


@dataclass(slots=True)
class ArrayWriter:
    """Writes the rows of an .npy file, whose number is known at the end, and digests its blocks on the way."""

    file: BinaryIO
    width: tuple[int, ...]  # of a row
    rows: int = 0
    first: bytes = b""  # the block with the header
    digests: list[str] = field(default_factory=list)
    pending: bytearray = field(default_factory=bytearray)  # written, but not digested yet

    def __post_init__(self) -> None:
        self._write(npy_header((0, *self.width)))

    def add(self, values: Float32[torch.Tensor, "n ..."]) -> None:
        """Append rows."""
        self.rows += len(values)
        self._write(values.contiguous().numpy().astype("<f4").tobytes())

    def _write(self, data: bytes) -> None:
        self.file.write(data)
        self.pending += data
        while len(self.pending) >= BLOCK:
            block = bytes(self.pending[:BLOCK])
            del self.pending[:BLOCK]
            self.first = self.first or block
            self.digests.append(hashlib.sha256(block).hexdigest())

    def finish(self, path: Path) -> storage.BlockDigests:
        """Write the header; returns the digests of the file, which will be ``path``."""
        size, header = self.file.tell(), npy_header((self.rows, *self.width))
        self.file.seek(0)
        self.file.write(header)
        if self.digests:
            self.digests[0] = hashlib.sha256(header + self.first[len(header) :]).hexdigest()
        else:
            self.pending[: len(header)] = header
        rest = [hashlib.sha256(self.pending).hexdigest()] if self.pending else []
        return storage.BlockDigests(path, size, (*self.digests, *rest), BLOCK)
