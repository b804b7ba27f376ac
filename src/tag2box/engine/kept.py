"""Tensors of photos kept on disk: one half-precision file a view, named by all that they depend on."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from jaxtyping import Float, Float16
from torch import Tensor, nn

from tag2box.data.transforms import View
from tag2box.engine.progress import Bar, Progress, silent
from tag2box.errors import UserError
from tag2box.files import replacing
from tag2box.lock import in_turn
from tag2box.types import Photo

Compute = Callable[[int, View], Float[Tensor, "a b c d"]]
"""The tensor of a photo, by its number, in a view; its values are rounded to half precision already."""

_SIDES = 4
_MAGIC = 0x3176_7865_6232_6774  # first number of a file, so that nothing else is taken for one
_NUMBER = np.dtype("<i8")
_VALUE = np.dtype("<f2")


class KeptViews:
    """One tensor for each photo and view, computed once; a file holds all photos in one view.

    A file is named by a digest of all its tensors depend on, and a change of any gives another name: a stale file is
    never read. It is written beside its place and renamed, so that one is whole or not there; of several processes that
    want it, one makes it, and the others wait. It is read with plain reads at an offset: the process does not grow with
    what is kept.

    Layout, little-endian: a magic number, the number of photos, four sides for each photo's tensor (all int64), then
    the values.
    """

    def __init__(self, folder: Path, *, title: str, identity: str, count: int, compute: Compute) -> None:
        self._folder, self._title, self._identity = folder, title, identity
        self._count, self._compute = count, compute
        self._files: dict[View, _File] = {}

    def tensor(self, index: int, view: View) -> Float16[Tensor, "a b c d"]:
        """Read from the file of the view, which is made on first use unless it was before."""
        self.make([view])
        return self._files[view].tensor(index)

    def make(self, views: Sequence[View], progress: Progress = silent) -> None:
        """Make the files of some views, where they are not there yet, and open them."""
        for view in views:
            if view not in self._files:
                self._files[view] = self._made(view, progress)

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            os.close(file.handle)
        self._files.clear()

    def _made(self, view: View, progress: Progress) -> _File:
        name = hashlib.sha256(f"{self._identity} {view}".encode()).hexdigest()[:24]
        path = self._folder / f"{name}.f16"
        before = _opened(path, self._count)
        if before is not None:
            return before
        title = f"{self._title} at {view.short or 'full size'}{' mirrored' if view.flip else ''}"
        with in_turn(path.with_suffix(".lock"), lambda: progress(f"{title}: another process makes them; waiting", 1)):
            made = _opened(path, self._count) or self._make(path, view, title, progress)
        if made is None:
            raise UserError(f"{path}: changed while it was made; is another program writing here? try again")
        return made

    def _make(self, path: Path, view: View, title: str, progress: Progress) -> _File | None:
        for left in path.parent.glob(f".{path.name}.*"):  # what a killed process was writing
            left.unlink()
        with replacing(path) as temporary, temporary.open("wb") as file, progress(title, self._count) as bar:
            self._write(file, view, bar)
        return _opened(path, self._count)

    def _write(self, file: BinaryIO, view: View, bar: Bar) -> None:
        shapes = np.zeros((self._count, _SIDES), _NUMBER)
        file.seek(_head_bytes(self._count))
        for index in range(self._count):
            values = self._compute(index, view).half().contiguous().cpu()
            shapes[index] = values.shape
            file.write(values.numpy().astype(_VALUE, copy=False).tobytes())
            bar.advance()
        file.seek(0)
        file.write(np.array([_MAGIC, self._count], _NUMBER).tobytes() + shapes.tobytes())


@dataclass(frozen=True)
class _File:
    """The open file of a view."""

    path: Path
    handle: int
    shapes: list[list[int]]
    starts: list[int]  # in bytes; the last is the size of the file

    def tensor(self, index: int) -> Float16[Tensor, "a b c d"]:
        start, stop = self.starts[index : index + 2]
        raw = os.pread(self.handle, stop - start, start)
        if len(raw) != stop - start:
            raise UserError(f"{self.path}: cut short while it was in use; start again, it is then made anew")
        values = np.frombuffer(bytearray(raw), _VALUE)  # a copy, as torch wants to be able to write
        return torch.from_numpy(values.astype(np.float16, copy=False).reshape(self.shapes[index]))


def _head_bytes(count: int) -> int:
    return _NUMBER.itemsize * (2 + _SIDES * count)


def _opened(path: Path, count: int) -> _File | None:
    """The file of a view; None where it is not there, or not whole."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    head = os.pread(handle, _head_bytes(count), 0)
    if len(head) == _head_bytes(count):
        magic, photos, *sides = np.frombuffer(head, _NUMBER).tolist()
        shapes = [sides[i : i + _SIDES] for i in range(0, len(sides), _SIDES)]
        sizes = (_VALUE.itemsize * a * b * c * d for a, b, c, d in shapes)
        starts = list(accumulate(sizes, initial=_head_bytes(count)))
        if (magic, photos, starts[-1]) == (_MAGIC, count, os.fstat(handle).st_size):
            return _File(path, handle, shapes, starts)
    os.close(handle)
    return None


def weights_digest(recipe: str, parts: Iterable[nn.Module]) -> str:
    """A digest of frozen modules: how they are run, and their weights."""
    digest = hashlib.sha256(recipe.encode())
    for part in parts:
        for name, value in part.state_dict().items():
            digest.update(name.encode())
            digest.update(value.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def photos_digest(photos: Iterable[Photo]) -> str:
    """A digest of photos: names, sizes and times of their files."""
    digest = hashlib.sha256()
    for photo in photos:
        stat = _stat(photo.path)
        digest.update(f"{photo.id} {photo.width}x{photo.height} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise UserError(f"{path}: no such photo ({error.strerror}); put it back, or read the dataset anew") from None
