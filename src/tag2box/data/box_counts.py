"""Counts taken from boxes, for study: the one place where training learns anything from true boxes."""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Int
from torch import Tensor

from tag2box.data.datasets import DataSource, has_boxes, read_truth
from tag2box.errors import UserError
from tag2box.types import Objects, TaggedPhotos


def counted_from_boxes(photos: TaggedPhotos, source: DataSource) -> TaggedPhotos:
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
