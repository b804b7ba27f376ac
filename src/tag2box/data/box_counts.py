"""Object counts taken from boxes, for experiments: the only place where training reads anything of true boxes."""

from dataclasses import replace

import torch
from jaxtyping import Int

from tag2box import annotations, errors
from tag2box.formats import datasets, listing


def counts_from_boxes(photos: annotations.TaggedPhotos, source: listing.DataSource) -> annotations.TaggedPhotos:
    """The same photos with counts of their tagged classes, taken from boxes.

    What leaks: per tagged class of a photo, the number of objects that are neither difficult nor a crowd. No
    coordinate, size or order of a box is passed on, and nothing of a class that is not tagged.
    """
    if not datasets.has_boxes(source):
        raise errors.UserError(
            f'data.counts = "boxes": {source.path} has no boxes to count; expected a COCO file, a VOC folder or a '
            'YOLO folder that has, or data.counts = "given" with counts in the dataset'
        )
    truth = datasets.read_truth(replace(source, classes=photos.classes))
    objects = dict(zip(truth.ids, truth.objects, strict=True))
    rows = [_numbers(objects.get(photo.id), len(photos.classes)) for photo in photos.photos]
    numbers = torch.stack([torch.zeros(len(photos.classes), dtype=torch.long), *rows])[1:]  # no photos, no rows
    return replace(photos, counts=torch.where(photos.tags & (numbers > 0), numbers, -1))


def _numbers(objects: annotations.Objects | None, num_classes: int) -> Int[torch.Tensor, " C"]:
    if objects is None:
        return torch.zeros(num_classes, dtype=torch.long)
    return torch.bincount(objects.labels[~objects.difficult & ~objects.crowd], minlength=num_classes)
