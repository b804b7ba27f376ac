"""RoI maps of photos: computed as needed, or, where the network that makes them is frozen, once and kept on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, repeat
from pathlib import Path
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from tag2box.data.batch import BoxSource
from tag2box.data.look import Look, look
from tag2box.data.transforms import View, place, seen_size
from tag2box.engine.kept import KeptViews, photos_digest, weights_digest
from tag2box.engine.progress import Progress, silent
from tag2box.model.backbone import Backbone
from tag2box.types import Photo, Proposals

Passes = Iterator[Float[Tensor, "P ch h w"]]
"""The maps of a photo in one view after another."""


class RoiMaps(Protocol):
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
class LiveMaps:
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
        return self._computed(look(self.photos[index], views), boxes, views)

    def _computed(self, read: Look, boxes: Float[Tensor, "P 4"], views: Sequence[View]) -> Passes:
        size = (read.photo.height, read.photo.width)
        for _, group in groupby(views, lambda view: seen_size(view, size)):
            alike = list(group)
            upright = read.seen(View(alike[0].short, long_max=alike[0].long_max))
            flips = sorted({view.flip for view in alike})
            trunks = dict(zip(flips, self._trunks(upright, flips), strict=True))
            for view in alike:
                yield self._maps(trunks[view.flip], place(view, boxes, size))

    def _trunks(self, upright: Float[Tensor, "3 h w"], flips: Sequence[bool]) -> tuple[Float[Tensor, "c h1 w1"], ...]:
        device = self.backbone.device
        images = torch.stack([upright.flip(2) if flip else upright for flip in flips]).to(device)
        with torch.no_grad():
            return tuple(trunk for some in images.split(at_a_time(device)) for trunk in self.backbone.trunk(some))

    def _maps(self, trunk: Float[Tensor, "c h w"], boxes: Float[Tensor, "P 4"]) -> Float[Tensor, "P ch h1 w1"]:
        with torch.no_grad():
            maps = self.backbone.roi_maps(trunk[None], Proposals(boxes.to(trunk.device), (len(boxes),)))
        # the same numbers, in the same order, whether maps are kept or not: what follows then gives the same bits
        return maps.half().contiguous().float() if self.backbone.frozen_maps else maps


class CachedMaps:
    """Maps of a frozen network, computed once a view and kept (``engine/kept.py``).

    A change of weights, photos, proposals or view has them computed anew.
    """

    def __init__(self, live: LiveMaps, folder: Path) -> None:
        if not live.backbone.frozen_maps:
            raise ValueError("only maps of a frozen network can be kept")
        self._kept = KeptViews(
            folder, title="RoI maps", identity=_identity(live), count=len(live.photos), compute=live.maps
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


def _identity(live: LiveMaps) -> str:
    """A digest of the frozen weights, the photos and the proposals."""
    backbone = live.backbone
    digest = hashlib.sha256(weights_digest(backbone.map_recipe(), backbone.map_parts()).encode())
    digest.update(photos_digest(live.photos).encode())
    for photo in live.photos:
        digest.update(live.store.boxes(photo.id).numpy().tobytes())
    return digest.hexdigest()
