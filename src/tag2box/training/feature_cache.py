"""The feature cache: RoI maps or trunk maps of photos from a frozen network, computed once per view and read from disk.

``RoiMaps`` and ``TrunkMaps`` compute features; ``FeatureCache`` stores those of either. Cached or not, the values are
the same: they are rounded to the precision of the cache (fp16 by default) in both cases.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import accumulate, chain, groupby, repeat
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from tag2box import errors, io, storage
from tag2box.annotations import BoxSource, Photo
from tag2box.images import DecodedImage, View, boxes_in_view, load_image, load_view, view_size
from tag2box.models.backbone import Backbone
from tag2box.models.runtime import STORED_TYPES
from tag2box.ops.losses import at_least_single
from tag2box.progress import Progress, silent
from tag2box.types import Proposals

CACHE_SUFFIXES = {".f16": torch.float16, ".bf16": torch.bfloat16, ".f32": torch.float32}
"""The dtype of cache files by their ending."""
PHOTO_DIGESTS = "photos.digests"  # in the folder of a cache
_DIMS = 4
_MAGIC = 0x3276_7865_6232_6774  # first number of every cache file, with its version
_OLDER_MAGIC = 0x3176_7865_6232_6774  # of files without digests, which are not read any more
_SHA = hashlib.sha256
_DIGEST = 32  # bytes
_REMEDY = "remove the file; it is built again"
_INT = np.dtype("<i8")
_BITS = {2: torch.int16, 4: torch.int32}  # by bytes: numpy has no bf16


@dataclass(frozen=True)
class RoiMaps:
    """RoI maps of a photo's proposals, computed from the photo at every call."""

    backbone: Backbone
    photos: Sequence[Photo]
    store: BoxSource
    title = "RoI maps"

    @property
    def is_frozen(self) -> bool:
        """Whether they never change in training, so that they can be cached."""
        return self.backbone.frozen_roi_maps

    def get(self, index: int, view: View) -> Float[Tensor, "P ch h w"]:
        """Decode, resize, trunk, pool."""
        (maps,) = self.passes(index, [view])
        return maps

    def passes(self, index: int, views: Sequence[View]) -> Iterator[Float[Tensor, "P ch h w"]]:
        """The maps of a photo in one view after another.

        The photo is decoded now and once (a thread may call this); the network runs when a view is consumed. Views of
        one size, such as a scale and its horizontal flip, share their pixels. Without proposals nothing is decoded.
        """
        boxes = self.store.boxes(self.photos[index].id)
        if not len(boxes):
            side = self.backbone.map_size
            return repeat(torch.zeros(0, self.backbone.channels, side, side), len(views))
        return self._computed(load_image(self.photos[index], views), boxes, views)

    def _computed(
        self, image: DecodedImage, boxes: Float[Tensor, "P 4"], views: Sequence[View]
    ) -> Iterator[Float[Tensor, "P ch h w"]]:
        size = (image.photo.height, image.photo.width)
        for _, group in groupby(views, lambda view: view_size(view, size)):
            same_size = list(group)
            upright = image.render(View(same_size[0].short, long_max=same_size[0].long_max))
            flips = sorted({view.flip for view in same_size})
            trunks = dict(zip(flips, self._trunks(upright, flips), strict=True))
            for view in same_size:
                seen, frame = boxes_in_view(view, boxes, size), view_size(view, size)[::-1]
                yield self._maps(trunks[view.flip], Proposals(seen, (len(seen),), (frame,)))

    def _trunks(self, upright: Float[Tensor, "3 h w"], flips: Sequence[bool]) -> tuple[Float[Tensor, "c h1 w1"], ...]:
        device = self.backbone.device
        images = torch.stack([upright.flip(2) if flip else upright for flip in flips]).to(device)
        with self.backbone.frozen():
            return tuple(trunk for some in images.split(trunk_batch(device)) for trunk in self.backbone.trunk(some))

    def _maps(self, trunk: Float[Tensor, "c h w"], proposals: Proposals) -> Float[Tensor, "P ch h1 w1"]:
        with self.backbone.frozen():
            maps = self.backbone.roi_maps(trunk[None], proposals.to(trunk.device))
        # rounded and laid out as the cache would return them, so that everything after gives the same bits
        return self.backbone.runtime.rounded(maps) if self.backbone.frozen_roi_maps else at_least_single(maps)

    def key(self, folder: Path | None = None) -> str:
        """A digest of the frozen weights, the photos and the proposals; ``folder`` is that of the cache."""
        key = self.backbone.roi_map_key() + self.backbone.runtime.key()
        digest = hashlib.sha256(weights_digest(key, self.backbone.roi_map_modules()).encode())
        digest.update(photos_digest(self.photos, folder).encode())
        for photo in self.photos:
            digest.update(self.store.boxes(photo.id).numpy().tobytes())
        return digest.hexdigest()

    def encode(self, features: Tensor) -> Float[Tensor, "P ch h w"]:
        """RoI maps are stored as they are."""
        return features

    def decode(self, stored: Float[Tensor, "P ch h w"]) -> Tensor:
        """RoI maps are stored as they are."""
        return stored

    def shapes(self, view: View) -> list[tuple[int, ...]]:
        """The shapes of what the cache stores of each photo."""
        own = (self.backbone.channels, self.backbone.map_size, self.backbone.map_size)
        return [(len(self.store.boxes(photo.id)), *own) for photo in self.photos]

    def cache_bytes(self, views: Sequence[View]) -> int:
        """Size of the cache files of some views."""
        boxes = sum(len(self.store.boxes(photo.id)) for photo in self.photos)
        size = STORED_TYPES[self.backbone.runtime.stored].itemsize
        return len(views) * boxes * size * self.backbone.channels * self.backbone.map_size**2


@dataclass(frozen=True)
class TrunkMaps:
    """Maps of a frozen trunk, computed from the photo at every call."""

    backbone: Backbone
    photos: Sequence[Photo]
    title = "trunk maps"

    @property
    def is_frozen(self) -> bool:
        """Whether they never change in training, so that they can be cached."""
        return self.backbone.frozen_trunk

    def get(self, index: int, view: View) -> Float[Tensor, "c h w"]:
        """Decode, resize, trunk, round to the precision of the cache; no padding."""
        with self.backbone.frozen():
            (trunk,) = self.backbone.trunk(load_view(self.photos[index], view)[None].to(self.backbone.device))
        return self.backbone.runtime.rounded(trunk.permute(1, 2, 0)).permute(2, 0, 1)

    def key(self, folder: Path | None = None) -> str:
        """A digest of the trunk's weights and the photos; proposals do not matter."""
        key = f"trunk of {self.backbone.trunk_key()}{self.backbone.runtime.key()}"
        weights = weights_digest(key, self.backbone.trunk_modules())
        return hashlib.sha256(f"{weights} {photos_digest(self.photos, folder)}".encode()).hexdigest()

    def encode(self, features: Tensor) -> Float[Tensor, "1 h w c"]:
        """Channels last, the layout that pooling reads fastest."""
        return _channels_last(features)[None]

    def decode(self, stored: Float[Tensor, "1 h w c"]) -> Tensor:
        """The inverse of ``encode``."""
        return stored[0].permute(2, 0, 1)

    def shapes(self, view: View) -> list[tuple[int, ...]]:
        """The shapes of what the cache stores of each photo, found with strips of zeros, one per length of a side."""
        stride, sizes = self.backbone.stride, [view_size(view, (photo.height, photo.width)) for photo in self.photos]
        rows = {height: self._strip(height, stride)[1] for height in {height for height, _ in sizes}}
        columns = {width: self._strip(stride, width)[2] for width in {width for _, width in sizes}}
        channels = self._strip(stride, stride)[0]
        return [(1, rows[height], columns[width], channels) for height, width in sizes]

    def cache_bytes(self, views: Sequence[View]) -> int:
        """An upper bound of the size of the cache files of some views."""
        stride = self.backbone.stride
        sizes = [view_size(view, (photo.height, photo.width)) for photo in self.photos for view in views]
        cells = sum(-(-height // stride) * -(-width // stride) for height, width in sizes)
        return STORED_TYPES[self.backbone.runtime.stored].itemsize * self._strip(stride, stride)[0] * cells

    def _strip(self, height: int, width: int) -> torch.Size:
        """The shape of the trunk's map of an image of zeros."""
        with torch.no_grad():
            return self.backbone.trunk(torch.zeros(1, 3, height, width, device=self.backbone.device)).shape[1:]


MakeFeatures = Callable[[View, Sequence[int]], Generator[tuple[int, bytes], None, None]]
"""Gives ``stored_bytes`` of some photos, named by their numbers, in any order: in this process, or in a pool."""


class FeatureCache:
    """Features on disk: one file per view with all photos, in the precision of ``Runtime.stored``.

    A file is named by a digest of everything its features depend on, so a stale file is never read. It is written
    beside its place, photo by photo, and renamed; of several processes one builds it while the others wait. It is read
    with plain reads at an offset, so resident memory does not grow with the cache. A file that is cut short is built
    again; one that is damaged is refused: the header when it is opened, the features of a photo when first read.

    Layout, little-endian: a magic number, the number of photos, four sizes per photo (all int64), the SHA-256 of each
    photo's features, the SHA-256 of all this, then the values.
    """

    def __init__(self, features: RoiMaps | TrunkMaps, folder: Path) -> None:
        if not features.is_frozen:
            raise ValueError("only features of a frozen network can be cached")
        self.features, self._folder, self._key = features, folder, features.key(folder)
        self._files: dict[View, _CacheFile] = {}
        self._dtype = STORED_TYPES[features.backbone.runtime.stored]
        self._suffix = next(suffix for suffix, dtype in CACHE_SUFFIXES.items() if dtype == self._dtype)

    def open(self, views: Sequence[View]) -> bool:
        """Open the files of some views, without building any; whether all are there."""
        for view in views:
            found = self._files.get(view) or _open_cache_file(self._path(view), len(self.features.photos))
            if found is None:
                self.close()
                return False
            self._files[view] = found
        return True

    def get(self, index: int, view: View) -> Float[Tensor, "*dims"]:
        """Read from the file of the view, which is built on first use."""
        self.build([view])
        return self.features.decode(self._files[view].read(index)).float()

    def passes(self, index: int, views: Sequence[View]) -> Iterator[Float[Tensor, "*dims"]]:
        """Read one view after another; the photo itself is not opened."""
        return (self.get(index, view) for view in views)

    def build(self, views: Sequence[View], progress: Progress = silent, compute: MakeFeatures | None = None) -> None:
        """Build the missing files of some views, from where a killed build ended, and open all of them."""
        for view in views:
            if view not in self._files:
                self._files[view] = self._open_or_build(view, progress, compute or self._compute)

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            os.close(file.handle)
        self._files.clear()

    def _path(self, view: View) -> Path:
        name = hashlib.sha256(f"{_MAGIC:x} {self._key} {view}".encode()).hexdigest()[:24]
        return self._folder / f"{name}{self._suffix}"

    def _open_or_build(self, view: View, progress: Progress, compute: MakeFeatures) -> _CacheFile:
        path, count = self._path(view), len(self.features.photos)
        existing = _open_cache_file(path, count)
        if existing is not None:
            return existing
        title = f"{self.features.title} at {view.short or 'full size'}{' flipped' if view.flip else ''}"
        waiting = f"{title}: another process builds them; waiting"
        remedy = "free some space, or set feature_cache to a folder on another disk"
        with (
            storage.writing(path, remedy),
            io.wait_for_lock(path.with_suffix(".lock"), lambda: progress(waiting, 1)),
        ):
            built = _open_cache_file(path, count) or self._build(path, view, title, progress, compute)
        if built is None:
            raise errors.UserError(f"{path}: changed while it was written; is another program writing here? try again")
        return built

    def _build(self, path: Path, view: View, title: str, progress: Progress, make: MakeFeatures) -> _CacheFile | None:
        io.sweep(path.parent)
        count, shapes = len(self.features.photos), self.features.shapes(view)
        sizes = (self._dtype.itemsize * math.prod(shape) for shape in shapes)
        with storage.unfinished_file(path, list(accumulate(sizes, initial=_header_bytes(count)))) as made:
            left = [index for index in range(count) if index not in made.digests]
            with progress(title, count, count - len(left)) as bar, closing(make(view, left)) as computed:
                for index, raw in computed:
                    made.add(index, raw)
                    bar.advance()
            header = np.array([_MAGIC, count, *chain(*shapes)], _INT).tobytes()
            header += b"".join(made.digests[index] for index in range(count))
            made.file.seek(0)
            made.file.write(header + _SHA(header).digest())
        return _open_cache_file(path, count)

    def _compute(self, view: View, indices: Sequence[int]) -> Generator[tuple[int, bytes], None, None]:
        return ((index, stored_bytes(self.features, index, view)) for index in indices)


def stored_bytes(features: RoiMaps | TrunkMaps, index: int, view: View) -> bytes:
    """The features of a photo as a cache file has them."""
    dtype = STORED_TYPES[features.backbone.runtime.stored]
    values = features.encode(features.get(index, view)).to(dtype).contiguous().cpu()
    return values.view(_BITS[values.itemsize]).numpy().astype(f"<i{values.itemsize}", copy=False).tobytes()


@dataclass(frozen=True)
class _CacheFile:
    """The open file of a view."""

    path: Path
    handle: int
    shapes: list[list[int]]
    starts: list[int]  # in bytes; the last is the size of the file
    digests: bytes  # of all photos, one after another
    verified: set[int] = field(default_factory=set)

    def read(self, index: int) -> Float[Tensor, "a b c d"]:
        """The features of a photo; verified when they are read for the first time."""
        start, stop = self.starts[index : index + 2]
        try:
            raw = storage.read_at(self.handle, stop - start, start)
        except OSError as error:
            raise errors.UserError(f"{self.path}: cannot be read ({error.strerror}); {_REMEDY}") from None
        if len(raw) != stop - start:
            raise errors.UserError(f"{self.path}: truncated while it was in use; rerun the command to build it again")
        if index not in self.verified:
            if _SHA(raw).digest() != self.digests[_DIGEST * index : _DIGEST * (index + 1)]:
                raise errors.UserError(f"{self.path}: damaged in the features of photo {index}; {_REMEDY}")
            self.verified.add(index)
        dtype = CACHE_SUFFIXES[self.path.suffix]
        bits = np.frombuffer(bytearray(raw), f"<i{dtype.itemsize}")  # a copy, because torch needs writable memory
        values = torch.from_numpy(bits.astype(f"i{dtype.itemsize}", copy=False)).view(dtype)
        return values.reshape(self.shapes[index])


def _header_bytes(count: int) -> int:
    return _INT.itemsize * (2 + _DIMS * count) + _DIGEST * (count + 1)


def _open_cache_file(path: Path, count: int) -> _CacheFile | None:
    """The file of a view; None if it does not exist or is cut short. Raises if it is damaged."""
    try:
        handle = os.open(path, os.O_RDONLY | io.BINARY)
    except FileNotFoundError:
        return None
    try:
        opened = _read_header(path, handle, count)
    except BaseException:
        os.close(handle)
        raise
    if opened is None:
        os.close(handle)
    return opened


def _read_header(path: Path, handle: int, count: int) -> _CacheFile | None:
    header = storage.read_at(handle, _header_bytes(count), 0)
    if len(header) < _header_bytes(count):
        return None
    known, digest = header[:-_DIGEST], header[-_DIGEST:]
    digests = known[len(known) - _DIGEST * count :]
    magic, photos, *sides = np.frombuffer(known[: len(known) - len(digests)], _INT).tolist()
    if _SHA(known).digest() != digest or (magic, photos) != (_MAGIC, count):
        raise errors.UserError(f"{path}: damaged in its header; {_REMEDY}")
    shapes = [sides[i : i + _DIMS] for i in range(0, len(sides), _DIMS)]
    itemsize = CACHE_SUFFIXES[path.suffix].itemsize
    sizes = (itemsize * a * b * c * d for a, b, c, d in shapes)
    starts = list(accumulate(sizes, initial=_header_bytes(count)))
    is_whole = starts[-1] == os.fstat(handle).st_size
    return _CacheFile(path, handle, shapes, starts, digests) if is_whole else None


def verify_cache_file(path: Path) -> bool:
    """Read a cache file, and raise if any of it is damaged; False if it is an older one, without digests."""
    with io.open_file(path, "cached features") as file:
        start = np.frombuffer(file.read(2 * _INT.itemsize).ljust(2 * _INT.itemsize, b"\0"), _INT)
        magic, count, size = int(start[0]), int(start[1]), os.fstat(file.fileno()).st_size
    if magic == _OLDER_MAGIC:
        return False
    opened = _open_cache_file(path, count) if count >= 0 and _header_bytes(count) <= size else None
    if opened is None:
        raise errors.UserError(f"{path}: damaged or cut short; {_REMEDY}")
    try:
        for index in range(count):
            opened.read(index)
    finally:
        os.close(opened.handle)
    return True


def weights_digest(key: str, modules: Iterable[nn.Module]) -> str:
    """A digest of frozen modules: how they are run, and their weights."""
    digest = hashlib.sha256(key.encode())
    for module in modules:
        for name, value in module.state_dict().items():
            digest.update(name.encode())
            digest.update(value.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def photos_digest(photos: Sequence[Photo], folder: Path | None = None) -> str:
    """A digest of photos: names, sizes and contents; ``folder`` is that of a cache, which remembers the contents."""
    digest = hashlib.sha256()
    contents = storage.content_digests([photo.path for photo in photos], folder / PHOTO_DIGESTS if folder else None)
    for photo, content in zip(photos, contents, strict=True):
        digest.update(f"{photo.id} {photo.width}x{photo.height} {content}\n".encode())
    return digest.hexdigest()


def trunk_batch(device: torch.device) -> int:
    """How many images of one size go through a trunk together.

    On a CPU two images in one batch gain nothing and evict each other's caches (benchmarks/inference.py, --pairs).
    """
    return 1 if device.type == "cpu" else 2


def _channels_last(trunk: Float[Tensor, "c h w"]) -> Float[Tensor, "h w c"]:
    return trunk.permute(1, 2, 0).contiguous()
