"""Class maps and superpixels of photos: the evidence for their proposals, and the proposals worth looking at."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float, Float32, Int
from torch import Tensor
from torch.nn import functional

from tag2box import images
from tag2box.annotations import BoxSource, Photo
from tag2box.models.class_maps import CellMaps, ClassMaps, Prior, box_evidence
from tag2box.ops.boxes import areas
from tag2box.ops.superpixels import Superpixels, photo_straddling
from tag2box.types import PerProposalAndClass

_LONG = 2  # largest long side of photos for class maps, relative to their short side
_RANKING = Prior(evidence=1.0, area=0.3)  # of proposals that are kept
_RECENT = 256  # photos of which the kept proposals are remembered
_OTHERS = 0.25  # share of the kept proposals that are others: a detector also needs to see background
_MAX_ASPECT = 0.2  # log of the largest change of the aspect ratio of a crop
_MAX_SHIFT, _MAX_GAIN = 20.0, 0.25  # of brightness, in grey levels; of brightness and contrast, as a factor


def random_crop(
    photo: Float[Tensor, "3 H W"], side: int, min_share: float, rng: np.random.Generator
) -> Float[Tensor, "3 s s"]:
    """A random part of a photo, resized to a square, randomly flipped and changed in brightness and contrast."""
    height, width = photo.shape[1:]
    scale, aspect = math.sqrt(rng.uniform(min_share, 1)), math.exp(rng.uniform(-_MAX_ASPECT, _MAX_ASPECT))
    h, w = (max(1, min(whole, round(whole * s))) for whole, s in ((height, scale * aspect), (width, scale / aspect)))
    top, left = int(rng.integers(height - h + 1)), int(rng.integers(width - w + 1))
    part = photo[None, :, top : top + h, left : left + w]
    crop: Tensor = functional.interpolate(part, (side, side), mode="bilinear", align_corners=False, antialias=True)[0]
    crop = crop.flip(2) if rng.random() < 0.5 else crop
    gain, contrast = rng.uniform(1 - _MAX_GAIN, 1 + _MAX_GAIN, size=2).tolist()
    bright = crop * gain + rng.uniform(-_MAX_SHIFT, _MAX_SHIFT)
    mean = bright.mean(dim=(1, 2), keepdim=True)
    changed: Tensor = (bright - mean) * contrast + mean
    return changed.clamp(0, 255)


def photo_pixels(net: ClassMaps, photo: Photo) -> Float[Tensor, "1 3 h w"]:
    """A photo in the size that class maps are computed of; sides are rounded, so that cells of both flips agree."""
    upright = images.load_view(photo, images.View(net.side, long_max=_LONG * net.side))[None]
    height, width = (max(1, round(side / net.multiple)) * net.multiple for side in upright.shape[2:])
    pixels: Tensor = functional.interpolate(upright, (height, width), mode="bilinear", align_corners=False)
    return pixels


def photo_maps(net: ClassMaps, photo: Photo) -> Float[Tensor, "C h w"]:
    """The class maps of a photo, mean over the photo and its horizontal flip."""
    pixels = photo_pixels(net, photo)
    with net.backbone.frozen():
        own, flipped = (net.maps(one.to(net.backbone.device)).float() for one in (pixels, pixels.flip(3)))
        mean: Tensor = (own + flipped.flip(3))[0].cpu() / 2
    return mean


def photo_logits(net: CellMaps, photo: Photo) -> Float[Tensor, "C h w"]:
    """The logits of the cells of a photo, mean over the photo and its horizontal flip."""
    pixels = photo_pixels(net, photo)
    with torch.no_grad():
        own, flipped = (net.cell_logits(net.cells(one.to(net.backbone.device))) for one in (pixels, pixels.flip(3)))
        mean: Tensor = (own + flipped.flip(3))[0].cpu() / 2
    return mean


@dataclass(frozen=True)
class ClassEvidence:
    """Evidence of class maps for the proposals of photos, computed at every call."""

    class_maps: ClassMaps
    photos: Sequence[Photo]
    store: BoxSource

    def __call__(self, photo_id: str) -> Float[Tensor, "P C"]:
        """The evidence of each proposal of a photo per class, from the mean over the photo and its horizontal flip."""
        photo = self._by_id[photo_id]
        boxes = self.store.boxes(photo.id)
        if not len(boxes):
            return torch.zeros(0, self.class_maps.num_classes)
        return box_evidence(photo_maps(self.class_maps, photo), boxes, (photo.width, photo.height))

    @cached_property
    def _by_id(self) -> dict[str, Photo]:
        return {photo.id: photo for photo in self.photos}


@dataclass(frozen=True)
class StraddlingScores:
    """Superpixel straddling scores of the proposals of photos, computed at every call, as in the cache of training."""

    superpixels: Superpixels
    photos: Sequence[Photo]
    store: BoxSource

    def __call__(self, photo_id: str) -> Float[Tensor, " P"]:
        """The score of each proposal of a photo, 1 for a box that consists of whole superpixels."""
        photo, boxes = self._by_id[photo_id], self.store.boxes(photo_id)
        size = (photo.width, photo.height)
        if isinstance(photo, images.LoadedPhoto):
            pixels = photo.reduced(images.reduction(size, self.superpixels.working_size(size)))
        else:
            pixels = images.read_photo(photo.path, self.superpixels.working_size(size))
        return torch.from_numpy(photo_straddling(self.superpixels(pixels, size), boxes.numpy(), size))

    @cached_property
    def _by_id(self) -> dict[str, Photo]:
        return {photo.id: photo for photo in self.photos}


@dataclass(frozen=True)
class PreselectedBoxes:
    """The proposals of a store that have most evidence for any class, and some others: all that a detector sees."""

    store: BoxSource
    photos: Sequence[Photo]
    evidence: PerProposalAndClass  # of all proposals of a photo
    most: int
    recent: OrderedDict[str, Preselection] = field(default_factory=OrderedDict)

    def boxes(self, photo_id: str, /) -> Float32[Tensor, "p 4"]:
        """The kept proposals of a photo."""
        return self.store.boxes(photo_id)[self.preselection(photo_id).rows]

    def scores(self, photo_id: str, /) -> Float32[Tensor, " p"]:
        """Their objectness."""
        return self.store.scores(photo_id)[self.preselection(photo_id).rows]

    def class_evidence(self, photo_id: str) -> Float[Tensor, "p C"]:
        """Their evidence per class."""
        return self.preselection(photo_id).evidence

    def preselection(self, photo_id: str) -> Preselection:
        """The rows of a photo that are kept; of the last photos they are known."""
        if photo_id not in self.recent:
            photo, boxes, evidence = self._by_id[photo_id], self.store.boxes(photo_id), self.evidence(photo_id)
            shares = areas(boxes) / max(1, photo.width * photo.height)
            rank = _RANKING.factors(shares, evidence, evidence.shape[1])
            rows = kept_rows(rank.amax(dim=1) if evidence.shape[1] else shares, self.most)
            self.recent[photo_id] = Preselection(rows, evidence[rows])
            if len(self.recent) > _RECENT:
                self.recent.popitem(last=False)
        return self.recent[photo_id]

    @cached_property
    def _by_id(self) -> dict[str, Photo]:
        return {photo.id: photo for photo in self.photos}


def preselected(class_maps: ClassMaps | None, photos: Sequence[Photo], store: BoxSource, most: int | None) -> BoxSource:
    """The proposals that a detector with class maps sees: all, or the ``most`` with most evidence."""
    if class_maps is None or most is None:
        return store
    return PreselectedBoxes(store, photos, ClassEvidence(class_maps, photos, store), most)


@dataclass(frozen=True, slots=True)
class Preselection:
    """Rows of a photo's proposals, in order, and their evidence."""

    rows: Int[Tensor, " p"]
    evidence: Float[Tensor, "p C"]


def kept_rows(rank: Float[Tensor, " P"], most: int) -> Int[Tensor, " p"]:
    """The rows of highest rank, and a quarter of the others evenly spaced, in order.

    >>> kept_rows(torch.tensor([0.1, 0.9, 0.0, 0.8, 0.0, 0.7]), 4)
    tensor([0, 1, 3, 5])
    """
    if len(rank) <= most:
        return torch.arange(len(rank))
    order = rank.argsort(descending=True, stable=True)
    count = most - int(_OTHERS * most)
    best, rest = order[:count], order[count:].sort().values
    others = rest[torch.arange(most - count) * len(rest) // max(1, most - count)]
    return torch.cat([best, others]).sort().values
