"""Trunk maps of photos where the trunk is frozen: computed as needed, or once and kept on disk; the same to the bit."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from tag2box.data.look import see
from tag2box.data.transforms import View, seen_size
from tag2box.engine.kept import KeptViews, photos_digest, weights_digest
from tag2box.engine.progress import Progress, silent
from tag2box.model.backbone import Backbone
from tag2box.types import Photo


class Trunks(Protocol):
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
            (trunk,) = self.backbone.trunk(see(self.photos[index], view)[None].to(self.backbone.device))
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

        self._kept = KeptViews(
            folder, title="trunk maps", identity=_identity(live), count=len(live.photos), compute=compute
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
    sizes = [seen_size(view, (photo.height, photo.width)) for photo in photos for view in views]
    return 2 * channels * sum(-(-height // stride) * -(-width // stride) for height, width in sizes)


def _channels_last(trunk: Float[Tensor, "c h w"]) -> Float[Tensor, "h w c"]:
    """The order that pooling reads fastest, live or kept."""
    return trunk.permute(1, 2, 0).contiguous()


def _identity(live: LiveTrunks) -> str:
    """A digest of the frozen weights and the photos."""
    weights = weights_digest(f"trunk of {live.backbone.trunk_recipe()}", live.backbone.trunk_parts())
    return hashlib.sha256(f"{weights} {photos_digest(live.photos)}".encode()).hexdigest()
