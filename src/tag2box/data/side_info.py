"""Where the clues of photos come from: what is known beside tags and boxes, and asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float32, Int
from torch import Tensor

from tag2box.annotations import Objects, TaggedPhotos
from tag2box.errors import UserError
from tag2box.formats.datasets import has_boxes, read_truth
from tag2box.formats.listing import DataSource
from tag2box.types import SideInfo

OfProposals = Callable[[str], Float32[Tensor, " P"]]
"""A photo's id in, a number for each of its proposals out, in their order."""


@dataclass(frozen=True, slots=True)
class SideInfoLoader:
    """Clues by photo. What nothing asks for is None, and never read."""

    counts: Int[Tensor, "N C"] | None = None
    evidence: OfProposals | None = None
    objectness: OfProposals | None = None

    def of(self, index: int, photo_id: str, rows: Int[Tensor, " p"]) -> SideInfo:
        """The clues of one photo, and of the proposals that were drawn from it."""
        counts = None if self.counts is None else self.counts[index : index + 1]
        return SideInfo(counts, *(None if x is None else x(photo_id)[rows] for x in (self.evidence, self.objectness)))


NO_SIDE_INFO = SideInfoLoader()


def counts_from_boxes(photos: TaggedPhotos, source: DataSource) -> TaggedPhotos:
    """The same photos with counts of their tagged classes, as if somebody had counted.

    What leaks: of every tagged class of a photo, the number of its objects that are neither difficult nor a crowd. No
    coordinate, size or order of a box gets through, and nothing of a class that is not tagged.
    """
    if not has_boxes(source):
        raise UserError(
            f'data.counts = "boxes": {source.path} has no boxes to count; expected a COCO file or a VOC folder that '
            'has, or data.counts = "given" with counts in the dataset'
        )
    truth = read_truth(replace(source, classes=photos.classes))
    objects = dict(zip(truth.ids, truth.objects, strict=True))
    rows = [_numbers(objects.get(photo.id), len(photos.classes)) for photo in photos.photos]
    numbers = torch.stack([torch.zeros(len(photos.classes), dtype=torch.long), *rows])[1:]  # no photos, no rows
    return replace(photos, counts=torch.where(photos.tags & (numbers > 0), numbers, -1))


def _numbers(objects: Objects | None, num_classes: int) -> Int[Tensor, " C"]:
    if objects is None:
        return torch.zeros(num_classes, dtype=torch.long)
    return torch.bincount(objects.labels[~objects.difficult & ~objects.crowd], minlength=num_classes)
