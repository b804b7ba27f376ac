"""Side information of training photos beyond tags and proposals: object counts, superpixel evidence and objectness."""

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
"""From a photo id to one number per proposal, in their order."""


@dataclass(frozen=True, slots=True)
class SideInfoLoader:
    """Side information by photo. What no loss requires is None, and is never read."""

    counts: Int[Tensor, "N C"] | None = None
    evidence: OfProposals | None = None
    objectness: OfProposals | None = None

    def of(self, index: int, photo_id: str, rows: Int[Tensor, " p"]) -> SideInfo:
        """The side information of one photo and of its sampled proposals."""
        counts = None if self.counts is None else self.counts[index : index + 1]
        return SideInfo(counts, *(None if x is None else x(photo_id)[rows] for x in (self.evidence, self.objectness)))


NO_SIDE_INFO = SideInfoLoader()


def counts_from_boxes(photos: TaggedPhotos, source: DataSource) -> TaggedPhotos:
    """The same photos with counts of their tagged classes, taken from boxes.

    What leaks: per tagged class of a photo, the number of objects that are neither difficult nor a crowd. No
    coordinate, size or order of a box is passed on, and nothing of a class that is not tagged.
    """
    if not has_boxes(source):
        raise UserError(
            f'data.counts = "boxes": {source.path} has no boxes to count; expected a COCO file, a VOC folder or a '
            'YOLO folder that has, or data.counts = "given" with counts in the dataset'
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
