"""Tensors of photos kept on disk: one half-precision file a view, named by all that they depend on."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, repeat
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
import torch
from jaxtyping import Float, Float16
from torch import Tensor, nn

from tag2box.annotations import BoxSource, Photo
from tag2box.data.images import DecodedImage, load_image, load_view
from tag2box.data.transforms import View, boxes_in_view, view_size
from tag2box.errors import UserError
from tag2box.io import replacing, wait_for_lock
from tag2box.models.backbone import Backbone
from tag2box.progress import Bar, Progress, silent
from tag2box.types import Proposals

ComputeFeatures = Callable[[int, View], Float[Tensor, "a b c d"]]
"""The tensor of a photo, by its number, in a view; its values are rounded to half precision already."""

_SIDES = 4
_MAGIC = 0x3176_7865_6232_6774  # first number of a file, so that nothing else is taken for one
_NUMBER = np.dtype("<i8")
_VALUE = np.dtype("<f2")


class CachedViews:
    """One tensor for each photo and view, computed once; a file holds all photos in one view.

    A file is named by a digest of all its tensors depend on, and a change of any gives another name: a stale file is
    never read. It is written beside its place and renamed, so that one is whole or not there; of several processes that
    want it, one makes it, and the others wait. It is read with plain reads at an offset: the process does not grow with
    what is kept.

    Layout, little-endian: a magic number, the number of photos, four sides for each photo's tensor (all int64), then
    the values.
    """

    def __init__(self, folder: Path, *, title: str, identity: str, count: int, compute: ComputeFeatures) -> None:
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
        title = f"{self._title} at {view.short or 'full size'}{' flipped' if view.flip else ''}"
        with wait_for_lock(
            path.with_suffix(".lock"), lambda: progress(f"{title}: another process makes them; waiting", 1)
        ):
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


Passes = Iterator[Float[Tensor, "P ch h w"]]
"""The maps of a photo in one view after another."""


class RoiMapSource(Protocol):
    """Where the maps f of a photo's proposals come from."""

    def maps(self, index: int, view: View) -> Float[Tensor, "P ch h w"]:
        """The maps of all proposals of photo ``index`` as ``view`` shows it, without a graph."""
        ...

    def passes(self, index: int, views: Sequence[View]) -> Passes:
        """The maps of a photo in one view after another. What has to be read is read now, and once; a thread may call.

        The rest is computed when a view is asked for, by whoever asks.
        """
        ...


@dataclass(frozen=True)
class LiveRoiMaps:
    """Maps computed from the photo at every call; those of a frozen network have the values that would be kept."""

    backbone: Backbone
    photos: Sequence[Photo]
    store: BoxSource

    def maps(self, index: int, view: View) -> Float[Tensor, "P ch h w"]:
        """Read, resize, trunk, pool."""
        (maps,) = self.passes(index, [view])
        return maps

    def passes(self, index: int, views: Sequence[View]) -> Passes:
        """Views of one size, as a scale and its mirror image, share their pixels. No proposals, no reading."""
        boxes = self.store.boxes(self.photos[index].id)
        if not len(boxes):
            side = self.backbone.map_size
            return repeat(torch.zeros(0, self.backbone.channels, side, side), len(views))
        return self._computed(load_image(self.photos[index], views), boxes, views)

    def _computed(self, read: DecodedImage, boxes: Float[Tensor, "P 4"], views: Sequence[View]) -> Passes:
        size = (read.photo.height, read.photo.width)
        for _, group in groupby(views, lambda view: view_size(view, size)):
            alike = list(group)
            upright = read.seen(View(alike[0].short, long_max=alike[0].long_max))
            flips = sorted({view.flip for view in alike})
            trunks = dict(zip(flips, self._trunks(upright, flips), strict=True))
            for view in alike:
                yield self._maps(trunks[view.flip], boxes_in_view(view, boxes, size))

    def _trunks(self, upright: Float[Tensor, "3 h w"], flips: Sequence[bool]) -> tuple[Float[Tensor, "c h1 w1"], ...]:
        device = self.backbone.device
        images = torch.stack([upright.flip(2) if flip else upright for flip in flips]).to(device)
        with torch.no_grad():
            return tuple(trunk for some in images.split(at_a_time(device)) for trunk in self.backbone.trunk(some))

    def _maps(self, trunk: Float[Tensor, "c h w"], boxes: Float[Tensor, "P 4"]) -> Float[Tensor, "P ch h1 w1"]:
        with torch.no_grad():
            maps = self.backbone.roi_maps(trunk[None], Proposals(boxes.to(trunk.device), (len(boxes),)))
        # the same numbers, in the same order, whether maps are kept or not: what follows then gives the same bits
        return maps.half().contiguous().float() if self.backbone.frozen_roi_maps else maps


class CachedRoiMaps:
    """Maps of a frozen network, computed once a view and kept (``engine/kept.py``).

    A change of weights, photos, proposals or view has them computed anew.
    """

    def __init__(self, live: LiveRoiMaps, folder: Path) -> None:
        if not live.backbone.frozen_roi_maps:
            raise ValueError("only maps of a frozen network can be kept")
        self._kept = CachedViews(
            folder, title="RoI maps", identity=_roi_map_key(live), count=len(live.photos), compute=live.maps
        )

    def maps(self, index: int, view: View) -> Float[Tensor, "P ch h w"]:
        """Read from the file of the view, which is made on first use unless it was before."""
        return self._kept.tensor(index, view).float()

    def passes(self, index: int, views: Sequence[View]) -> Passes:
        """Read view after view; the photo is not touched."""
        return (self.maps(index, view) for view in views)

    def make(self, views: Sequence[View], progress: Progress = silent) -> None:
        """Make the files of some views, where they are not there yet, and open them."""
        self._kept.make(views, progress)

    def close(self) -> None:
        """Close the files."""
        self._kept.close()


def at_a_time(device: torch.device) -> int:
    """How many images of one size go through a trunk together.

    On a CPU two that share a batch gain nothing and lose their place in its caches (benchmarks/inference.py, --pairs).
    """
    return 1 if device.type == "cpu" else 2


def map_bytes(backbone: Backbone) -> int:
    """What one kept map takes on disk: two bytes a value."""
    return 2 * backbone.channels * backbone.map_size**2


def _roi_map_key(live: LiveRoiMaps) -> str:
    """A digest of the frozen weights, the photos and the proposals."""
    backbone = live.backbone
    digest = hashlib.sha256(weights_digest(backbone.roi_map_key(), backbone.roi_map_modules()).encode())
    digest.update(photos_digest(live.photos).encode())
    for photo in live.photos:
        digest.update(live.store.boxes(photo.id).numpy().tobytes())
    return digest.hexdigest()


class TrunkSource(Protocol):
    """Where the trunk maps of photos come from."""

    def trunk(self, index: int, view: View) -> Float[Tensor, "c h w"]:
        """The trunk's map of photo ``index`` as ``view`` shows it: without padding, and without a graph."""
        ...


@dataclass(frozen=True)
class LiveTrunks:
    """Trunk maps computed from the photo at every call, with the values that would be kept."""

    backbone: Backbone
    photos: Sequence[Photo]

    def trunk(self, index: int, view: View) -> Float[Tensor, "c h w"]:
        """Read, resize, trunk, round to half precision."""
        with torch.no_grad():
            (trunk,) = self.backbone.trunk(load_view(self.photos[index], view)[None].to(self.backbone.device))
        return _channels_last(trunk.half()).permute(2, 0, 1).float()


class CachedTrunks:
    """Maps of a frozen trunk, computed once a view and kept (``engine/kept.py``).

    A change of the trunk's weights, of a photo or of the view has them computed anew; one of the proposals does not.
    """

    def __init__(self, live: LiveTrunks, folder: Path) -> None:
        if not live.backbone.frozen_trunk:
            raise ValueError("only maps of a frozen trunk can be kept")

        def compute(index: int, view: View) -> Float[Tensor, "1 h w c"]:
            return _channels_last(live.trunk(index, view))[None]

        self._kept = CachedViews(
            folder, title="trunk maps", identity=_trunk_key(live), count=len(live.photos), compute=compute
        )

    def trunk(self, index: int, view: View) -> Float[Tensor, "c h w"]:
        """Read from the file of the view, which is made on first use unless it was before."""
        return self._kept.tensor(index, view)[0].permute(2, 0, 1).float()

    def make(self, views: Sequence[View], progress: Progress = silent) -> None:
        """Make the files of some views, where they are not there yet, and open them."""
        self._kept.make(views, progress)

    def close(self) -> None:
        """Close the files."""
        self._kept.close()


def trunk_bytes(backbone: Backbone, photos: Sequence[Photo], views: Sequence[View]) -> int:
    """What the kept trunk maps of photos in some views take on disk at most: two bytes a value."""
    stride = backbone.stride
    with torch.no_grad():
        channels = backbone.trunk(torch.zeros(1, 3, stride, stride, device=backbone.device)).shape[1]
    sizes = [view_size(view, (photo.height, photo.width)) for photo in photos for view in views]
    return 2 * channels * sum(-(-height // stride) * -(-width // stride) for height, width in sizes)


def _channels_last(trunk: Float[Tensor, "c h w"]) -> Float[Tensor, "h w c"]:
    """The order that pooling reads fastest, live or kept."""
    return trunk.permute(1, 2, 0).contiguous()


def _trunk_key(live: LiveTrunks) -> str:
    """A digest of the frozen weights and the photos."""
    weights = weights_digest(f"trunk of {live.backbone.trunk_key()}", live.backbone.trunk_modules())
    return hashlib.sha256(f"{weights} {photos_digest(live.photos)}".encode()).hexdigest()
