"""Annotated images: label sets, and rows of boxes that readers of annotation tools return, as true objects."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tag2box.annotations import Objects, Truth
from tag2box.formats import coco_boxes, coco_tags, listing
from tag2box.labels import label_set
from tag2box.labels.journal import read_reviews
from tag2box.labels.labelled import boxes_to_objects
from tag2box.labels.reviews import apply_reviews

Corners = tuple[float, float, float, float]
_LARGEST = 1e9


@dataclass(frozen=True, slots=True)
class NamedBox:
    """A box of a file: class, corners in pixels, whether it is an ignore region."""

    name: str
    box: Corners
    is_doubtful: bool = False


@dataclass(frozen=True, slots=True)
class AnnotatedImage:
    """The boxes of a photo; its size as far as the file has it. Boxes may be made from the size of the photo."""

    file: str  # as the file names it
    boxes: Callable[[int, int], Sequence[NamedBox]]
    size: tuple[int, int] | None = None


def to_truth(
    source: listing.DataSource, listed: listing.Listing, rows: Sequence[AnnotatedImage], on_fault: listing.OnFault
) -> Truth:
    """True objects of the photos of a listing; boxes of classes that are not selected are left out."""
    by_file = {listing.path_below(listed.folder, row.file): row for row in rows}
    index = {name: number for number, name in enumerate(listed.classes)}
    ids, sizes, objects = [], [], []
    for entry in listed.entries:
        row = by_file.get(entry.file)
        size = row.size if row is not None else None
        if size is None:
            photos, _ = listing.find_listed(listing.Listing(listed.folder, (), (entry,)), on_fault)
            if not photos:
                continue
            size = (photos[0].width, photos[0].height)
        found = row.boxes(*size) if row is not None else ()
        ids.append(entry.id)
        sizes.append(size)
        objects.append(_objects([box for box in found if box.name in index], index))
    return Truth(listed.classes, tuple(ids), tuple(sizes), tuple(objects))


def _objects(boxes: Sequence[NamedBox], index: Mapping[str, int]) -> Objects:
    return Objects(
        boxes=torch.tensor([box.box for box in boxes], dtype=torch.float64).reshape(-1, 4),
        labels=torch.tensor([index[box.name] for box in boxes], dtype=torch.long),
        difficult=torch.zeros(len(boxes), dtype=torch.bool),
        crowd=torch.tensor([box.is_doubtful for box in boxes], dtype=torch.bool),
    )


def corners_of(values: Sequence[float]) -> Corners | None:
    """Left, top, right, bottom in order; None if a number is not finite, or a side is negative."""
    x1, y1, x2, y2 = values
    is_good = all(abs(value) <= _LARGEST for value in values) and x1 <= x2 and y1 <= y2
    return (x1, y1, x2, y2) if is_good else None


# ---------------------------------------------------------------- label sets


class LabelSetFolder:
    """A label set of ``tag2box label``: its labels.json, with the root of the photos that the manifest names."""

    what = "a label set"
    has_tags = True
    names_splits = False

    def recognises(self, path: Path) -> bool:
        """Folders with labels.json and manifest.json."""
        return path.is_dir() and label_set.is_label_set(path)

    def photos(self, source: listing.DataSource, on_fault: listing.OnFault) -> listing.Listing:
        """Its photos."""
        return coco_tags.list_coco_photos(_opened(source), on_fault)

    def tags(self, source: listing.DataSource, on_fault: listing.OnFault) -> listing.Listing:
        """Its photos, with their tags."""
        return coco_tags.list_coco(_opened(source), on_fault)

    def has_boxes(self, source: listing.DataSource) -> bool:
        """Whether any photo has a box."""
        return coco_boxes.coco_has_boxes(_opened(source).path)

    def truth(self, source: listing.DataSource, on_fault: listing.OnFault) -> Truth:
        """Its labels, with the boxes of reviews where there are any; ignore regions are crowds."""
        own = coco_boxes.read_coco(_opened(source).path, source.classes, on_fault)
        labels = label_set.LabelSet.open(source.path, source.photos)
        photos = apply_reviews(labels, read_reviews(source.path, labels)).photos
        index = {name: label for label, name in enumerate(own.truth.classes)}
        reviewed = {
            own.images[number]: boxes_to_objects([box for box in photo.boxes if box.name in index], index)
            for number, photo in enumerate(photos, start=1)  # as labels.json numbers them
            if photo.is_reviewed and number in own.images
        }
        if 0 < len(reviewed) < len(photos):
            warnings.warn(
                f"{source.path}: {len(photos) - len(reviewed)} of {len(photos)} photos are not reviewed; their labels "
                "count as true as they are",
                stacklevel=2,
            )
        objects = zip(own.truth.ids, own.truth.objects, strict=True)
        return replace(own.truth, objects=tuple(reviewed.get(name, before) for name, before in objects))


def _opened(source: listing.DataSource) -> listing.DataSource:
    """The COCO file of a label set, verified, with the root of its photos."""
    path = source.path / label_set.LABELS_FILE
    return replace(source, path=path, photos=source.photos or label_set.verified_root(source.path))
