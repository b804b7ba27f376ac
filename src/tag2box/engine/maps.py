"""RoI maps of photos: computed as needed, or, where the network that makes them is frozen, once and kept on disk."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tag2box.data.batch import BoxSource
from tag2box.data.look import see
from tag2box.data.transforms import View, place
from tag2box.engine.progress import Progress, silent
from tag2box.errors import UserError
from tag2box.files import replacing
from tag2box.model.backbone import Backbone
from tag2box.types import Photo, Proposals


class RoiMaps(Protocol):
    """Where the maps f of a photo's proposals come from."""

    def maps(self, index: int, view: View) -> Float[Tensor, "P ch h w"]:
        """The maps of all proposals of photo ``index`` as ``view`` shows it, without a graph."""
        ...


@dataclass(frozen=True)
class LiveMaps:
    """Maps computed from the photo at every call."""

    backbone: Backbone
    photos: Sequence[Photo]
    store: BoxSource

    def maps(self, index: int, view: View) -> Float[Tensor, "P ch h w"]:
        """Read, resize, trunk, pool."""
        photo = self.photos[index]
        with torch.no_grad():
            boxes = place(view, self.store.boxes(photo.id), (photo.height, photo.width))
            trunk = self.backbone.trunk(see(photo, view)[None])
            return self.backbone.roi_maps(trunk, Proposals(boxes, (len(boxes),)))


class CachedMaps:
    """Maps of a frozen network, one half-precision file a view, named by all that they depend on.

    A change of weights, photos, proposals or view gives another name, so a stale file is never read. Files are read
    with plain reads at an offset: the process does not grow with the cache.
    """

    def __init__(self, live: LiveMaps, folder: Path) -> None:
        if not live.backbone.frozen_maps:
            raise ValueError("only maps of a frozen network can be kept")
        self._live, self._folder = live, folder
        counts = [len(live.store.boxes(photo.id)) for photo in live.photos]
        self._starts = list(accumulate(counts, initial=0))
        self._files: dict[View, int] = {}
        self._identity = _identity(live)

    def maps(self, index: int, view: View) -> Float[Tensor, "P ch h w"]:
        """Read from the file of the view, which is made on first use unless it was before."""
        self.make([view])
        rows = self._starts[index + 1] - self._starts[index]
        raw = os.pread(self._files[view], rows * self._row_bytes, self._starts[index] * self._row_bytes)
        return torch.from_numpy(np.frombuffer(bytearray(raw), np.float16).reshape(rows, *self._shape)).float()

    def make(self, views: Sequence[View], progress: Progress = silent) -> None:
        """Make the files of some views, where they are not there yet, and open them."""
        for view in views:
            if view not in self._files:
                self._files[view] = os.open(self._made(view, progress), os.O_RDONLY)

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    @property
    def _shape(self) -> tuple[int, int, int]:
        backbone = self._live.backbone
        return backbone.channels, backbone.map_size, backbone.map_size

    @property
    def _row_bytes(self) -> int:
        return map_bytes(self._live.backbone)

    def _made(self, view: View, progress: Progress) -> Path:
        name = hashlib.sha256(f"{self._identity} {view}".encode()).hexdigest()[:24]
        path = self._folder / f"{name}.f16"
        if path.exists() and path.stat().st_size == self._starts[-1] * self._row_bytes:
            return path
        photos = self._live.photos
        title = f"RoI maps at {view.short or 'full size'}{' mirrored' if view.flip else ''}"
        with replacing(path) as temporary, temporary.open("wb") as file, progress(title, len(photos)) as bar:
            for index in range(len(photos)):
                file.write(self._live.maps(index, view).half().contiguous().numpy().tobytes())
                bar.advance()
        return path


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise UserError(f"{path}: no such photo ({error.strerror}); put it back, or read the dataset anew") from None


def map_bytes(backbone: Backbone) -> int:
    """What one kept map takes on disk: two bytes a value."""
    return 2 * backbone.channels * backbone.map_size**2


def _identity(live: LiveMaps) -> str:
    """A digest of the frozen weights, the photos and the proposals."""
    digest = hashlib.sha256()
    digest.update(live.backbone.map_recipe().encode())
    for part in live.backbone.map_parts():
        for name, value in part.state_dict().items():
            digest.update(name.encode())
            digest.update(value.contiguous().numpy().tobytes())
    for photo in live.photos:
        stat = _stat(photo.path)
        digest.update(f"{photo.id} {stat.st_size} {stat.st_mtime_ns}".encode())
        digest.update(live.store.boxes(photo.id).numpy().tobytes())
    return digest.hexdigest()
