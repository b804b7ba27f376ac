"""Reviewed photos in training: their boxes among the proposals, and the labels that they give to every stage.

A reviewed photo is taught by its boxes, whatever the labeler: they are proposals themselves, marked by a code in
``SideInfo.reviewed``, so that views, caches, subsets and processes treat them like all others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float, Float32, Int
from torch import Tensor

from tag2box.annotations import BoxSource, Photo, ReviewedBoxes, ReviewedObjects
from tag2box.images import View
from tag2box.ops.boxes import areas, clip, intersections
from tag2box.ops.losses import assign
from tag2box.training.feature_cache import FeatureCache
from tag2box.types import (
    CANDIDATE,
    IGNORED,
    TAGS_ONLY,
    Labeling,
    PerProposalAndClass,
    Proposals,
    PseudoBoxes,
    PseudoLabels,
)

FOREGROUND_IOU = 0.5
"""A proposal with at least this IoU to a reviewed box is foreground of its class."""
IGNORED_SHARE = 0.5
"""Background of which at least this share lies in an ignore region has no weight, as in COCO's rule for crowds."""
_MAX_SHIFT, _MAX_LOG_SCALE = 0.15, 0.2  # of jittered copies, relative to the sides of a box: most have an IoU above 0.5


# ---------------------------------------------------------------- proposals


@dataclass(frozen=True)
class ReviewedSource:
    """Proposals of photos; those of a reviewed one are followed by its boxes, copies of them, and ignore regions."""

    store: BoxSource
    photos: Sequence[Photo]
    reviewed: ReviewedBoxes
    copies: int  # jittered, of every box

    def boxes(self, photo_id: str, /) -> Float32[Tensor, "P 4"]:
        """The proposals of a photo."""
        own = self.store.boxes(photo_id)
        return torch.cat([own, self.added.boxes(photo_id)]) if photo_id in self.reviewed.photos else own

    def scores(self, photo_id: str, /) -> Float32[Tensor, " P"]:
        """Objectness of each proposal; of the boxes and their copies it is the highest of the photo."""
        own = self.store.scores(photo_id)
        count = len(self.added.boxes(photo_id))
        highest = own.max() if len(own) else own.new_zeros(())
        return torch.cat([own, highest.expand(count)]) if count else own

    def codes(self, photo_id: str) -> Int[Tensor, " P"]:
        """What each proposal is: the codes of ``SideInfo.reviewed``."""
        count = len(self.store.boxes(photo_id))
        if photo_id not in self.reviewed.photos:
            return torch.full((count,), TAGS_ONLY)
        own = self.reviewed.photos[photo_id]
        ordinary, copies, ignored = (
            torch.full((number,), code)
            for number, code in (
                (count, CANDIDATE),
                (self.copies * len(own.boxes), CANDIDATE),
                (len(own.ignore), IGNORED),
            )
        )
        return torch.cat([ordinary, own.labels, copies, ignored])

    @cached_property
    def added(self) -> AddedBoxes:
        """What follows the proposals."""
        sizes = {photo.id: (photo.width, photo.height) for photo in self.photos}
        return AddedBoxes(
            {
                name: torch.cat([own.boxes, jittered(name, own, self.copies, sizes[name]), own.ignore])
                for name, own in self.reviewed.photos.items()
                if name in sizes
            }
        )


@dataclass(frozen=True)
class AddedBoxes:
    """A box source of some photos that is in memory; the others have no boxes."""

    by_photo: Mapping[str, Float32[Tensor, "P 4"]]

    def boxes(self, photo_id: str, /) -> Float32[Tensor, "P 4"]:
        """The boxes of a photo."""
        return self.by_photo.get(photo_id, torch.zeros(0, 4))

    def scores(self, photo_id: str, /) -> Float32[Tensor, " P"]:
        """Zeros."""
        return torch.zeros(len(self.boxes(photo_id)))


@dataclass(frozen=True)
class JoinedEvidence:
    """The evidence of class maps for proposals, followed by that of added boxes."""

    proposals: PerProposalAndClass
    added: PerProposalAndClass
    photos: frozenset[str]  # that have added boxes

    def __call__(self, photo_id: str) -> Float32[Tensor, "P C"]:
        """The evidence of each proposal of a photo per class."""
        own = self.proposals(photo_id)
        return torch.cat([own, self.added(photo_id)]) if photo_id in self.photos else own


@dataclass(frozen=True)
class JoinedMaps:
    """RoI maps of proposals, followed by those of added boxes; the first cache serves runs without boxes, too."""

    proposals: FeatureCache
    added: FeatureCache
    numbers: Mapping[int, int]  # of the photos with added boxes, among all photos and among those of ``added``

    def get(self, index: int, view: View) -> Float[Tensor, "P ch h w"]:
        """The maps of a photo in a view."""
        own = self.proposals.get(index, view)
        return torch.cat([own, self.added.get(self.numbers[index], view)]) if index in self.numbers else own


def jittered(photo_id: str, own: ReviewedObjects, copies: int, size: tuple[int, int]) -> Float32[Tensor, "J 4"]:
    """Copies of each box with a centre and sides that differ a little, within the photo; a function of the photo's id.

    No proposal may fit an object: box regression then learns from these where the object ends.
    """
    seed = hashlib.sha256(photo_id.encode(errors="surrogatepass")).digest()[:8]
    rng = np.random.default_rng(list(seed))
    shift = torch.from_numpy(rng.uniform(-_MAX_SHIFT, _MAX_SHIFT, (len(own.boxes), copies, 2)).astype(np.float32))
    scale = torch.from_numpy(rng.uniform(-_MAX_LOG_SCALE, _MAX_LOG_SCALE, (len(own.boxes), copies, 2)))
    low, high = own.boxes[:, None, :2], own.boxes[:, None, 2:]
    centre = (low + high) / 2 + shift * (high - low)
    half = (high - low) / 2 * scale.exp().float()
    return clip(torch.cat([centre - half, centre + half], dim=2).reshape(-1, 4), *size)


# ---------------------------------------------------------------- labels


def reviewed_labels(
    proposals: Proposals, codes: Int[Tensor, " R"], num_classes: int, weight: float = 1.0
) -> PseudoLabels:
    """Labels of the proposals of reviewed photos, which are those of every stage; of other photos, weight zero.

    The nearest box decides: foreground of its class from an IoU of ``FOREGROUND_IOU`` on, else background, except in
    ignore regions. All have the same weight, and a photo without boxes is background.

    Args:
        codes: ``SideInfo.reviewed``.
        weight: ``criterion.reviewed_weight``.
    """
    rows = (codes >= 0).nonzero().flatten()
    boxes = PseudoBoxes(rows, codes[rows], proposals.boxes.new_ones(len(rows)))
    labels = assign(proposals, boxes, num_classes, FOREGROUND_IOU, or_equal=True)
    is_weighted = (codes != TAGS_ONLY) & ((labels.cls < num_classes) | ~_is_ignored(proposals, codes))
    return replace(labels, weight=torch.where(is_weighted, weight, torch.zeros_like(labels.weight)))


def _is_ignored(proposals: Proposals, codes: Int[Tensor, " R"]) -> Tensor:
    """Which proposals lie in an ignore region of their photo, by ``IGNORED_SHARE`` of their own area."""
    ignored = torch.zeros_like(codes, dtype=torch.bool)
    if not bool((codes == IGNORED).any()):
        return ignored
    for span in proposals.spans():
        rows = slice(span.start, span.stop)
        own = proposals.boxes[rows]
        shared = intersections(own, own[codes[rows] == IGNORED])
        ignored[rows] = (shared >= IGNORED_SHARE * areas(own)[:, None]).any(dim=1)
    return ignored


def with_reviewed(
    labeling: Labeling, proposals: Proposals, codes: Int[Tensor, " R"], num_classes: int, weight: float = 1.0
) -> Labeling:
    """The labels of a batch with those of reviewed photos, in every stage, taken from their boxes."""
    taught = reviewed_labels(proposals, codes, num_classes, weight)
    return replace(labeling, stages=tuple(_merged(own, taught, codes, proposals) for own in labeling.stages))


def _merged(own: PseudoLabels, taught: PseudoLabels, codes: Int[Tensor, " R"], proposals: Proposals) -> PseudoLabels:
    """One stage: the labeler's labels of photos without boxes, then those of reviewed photos."""
    is_taught = codes != TAGS_ONLY
    is_left = ~is_taught[own.pseudo_boxes.rows]
    numbers = torch.cat([is_left.cumsum(dim=0) - 1, codes.new_tensor([-1])])  # the last is that of no owner
    shifted = torch.where(taught.owner >= 0, taught.owner + is_left.sum(), -1)
    return PseudoLabels(
        torch.where(is_taught, taught.cls, own.cls),
        torch.where(is_taught, taught.weight.to(own.weight), own.weight),
        torch.where(is_taught[:, None], taught.boxes.to(own.boxes), own.boxes),
        _joined(own.pseudo_boxes, is_left, taught.pseudo_boxes, proposals),
        torch.where(is_taught, shifted, numbers[own.owner]),
    )


def _joined(own: PseudoBoxes, is_left: Tensor, taught: PseudoBoxes, proposals: Proposals) -> PseudoBoxes:
    boxes: Float[Tensor, "S 4"] | None = None
    if own.boxes is not None:
        boxes = torch.cat([own.boxes[is_left], taught.placed(proposals).to(own.boxes)])
    return PseudoBoxes(
        torch.cat([own.rows[is_left], taught.rows]),
        torch.cat([own.cls[is_left], taught.cls]),
        torch.cat([own.score[is_left], taught.score.to(own.score)]),
        boxes,
    )
