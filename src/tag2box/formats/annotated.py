"""Annotated images: rows of boxes that readers of annotation tools return, turned into true objects."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from tag2box.annotations import Objects, Truth
from tag2box.formats import listing

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
