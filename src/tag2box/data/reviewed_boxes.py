"""Reviewed boxes of a training set, and counts of boxes: the only place where training receives anything of boxes.

A file of any format with boxes is read, or a label set, of which only reviewed photos count. Classes are matched by
name, photos by id. ``tag2box train --boxes`` and ``tag2box label --reviewed`` call this. ``counts_from_boxes`` is for
experiments, and passes on nothing but the number of boxes.
"""

import difflib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Int

from tag2box import errors, storage
from tag2box.annotations import Objects, Photo, ReviewedBoxes, ReviewedObjects, TaggedPhotos
from tag2box.formats import datasets, listing
from tag2box.labels.journal import read_reviews
from tag2box.labels.label_set import LabelSet, is_label_set
from tag2box.labels.labelled import LabelBox, common_root
from tag2box.ops.boxes import areas, clip


@dataclass(frozen=True)
class ReviewedFile:
    """The reviewed photos of a file or label set, matched with those of a dataset."""

    path: Path
    boxes: Mapping[str, tuple[LabelBox, ...]]  # all boxes and ignore regions of each reviewed photo, by its id
    not_reviewed: tuple[str, ...] = ()  # tagged photos that the file lists without a box


def read_reviewed_file(path: Path, photos: TaggedPhotos, root: Path | None = None) -> ReviewedFile:
    """The reviewed photos of a file or label set; raises if one is not among ``photos``, or has another size.

    A file may list photos that are still to be reviewed: a tagged photo without any box counts as not reviewed.

    Args:
        photos: the dataset; its classes are the known ones.
        root: folder of the photos; default: the one that all of them are below.
    """
    if not path.exists():
        raise errors.UserError(
            f"{path}: no such file or folder; expected reviewed boxes: a COCO file, a label set or another format"
        )
    is_set = path.is_dir() and is_label_set(path)
    found = _of_label_set(path) if is_set else _of_file(path, photos, root)
    _check_photos(path, found, photos.photos)
    _check_classes(path, found, photos.classes)
    tagged = {p.id for p, tags in zip(photos.photos, photos.tags.tolist(), strict=True) if any(tags)}
    left = tuple(name for name, own in found.items() if not own and name in tagged and not is_set)
    boxes = {name: own for name, own in found.items() if name not in left}
    if not any(boxes.values()):
        raise errors.UserError(f"{path}: no reviewed photo has a box; expected at least one")
    return ReviewedFile(path, boxes, left)


def _of_label_set(folder: Path) -> dict[str, tuple[LabelBox, ...]]:
    """The photos of a label set that a reviewer has finished, or whose boxes were kept from an earlier review."""
    labels = LabelSet.open(folder)
    found = {
        photo.id: photo.boxes
        for photo in labels.content.photos
        if photo.is_reviewed or (photo.boxes and all(box.source == "review" for box in photo.boxes))
    }
    found |= {name: photo.boxes for name, photo in read_reviews(folder, labels).photos.items()}
    if not found:
        raise errors.UserError(f"{folder}: no photo of this label set is reviewed; review some, or name another file")
    return found


def _of_file(path: Path, photos: TaggedPhotos, root: Path | None) -> dict[str, tuple[LabelBox, ...]]:
    source = datasets.everything(listing.DataSource(path=path))
    if not datasets.dataset_format(source).names_splits:  # a VOC or YOLO folder has photos of its own
        source = replace(source, photos=root or common_root(photo.path for photo in photos.photos))
    truth, known = datasets.read_truth(source), {photo.id: photo for photo in photos.photos}
    for name, size in zip(truth.ids, truth.sizes, strict=True):
        if name in known and size != (known[name].width, known[name].height):
            raise errors.UserError(
                f"{path}: photo {name} is {size[0]} x {size[1]} pixels there, {known[name].width} x "
                f"{known[name].height} in the dataset; take the boxes of the same photos"
            )
    return {name: _label_boxes(own, truth.classes) for name, own in zip(truth.ids, truth.objects, strict=True)}


def _label_boxes(objects: Objects, classes: Sequence[str]) -> tuple[LabelBox, ...]:
    """Boxes of a file; difficult objects and crowds are ignore regions."""
    ignored = (objects.difficult | objects.crowd).tolist()
    rows = zip(objects.boxes.double().tolist(), objects.labels.tolist(), ignored, strict=True)
    return tuple(
        LabelBox((x1, y1, x2, y2), classes[label], is_doubtful=is_ignored, why="reviewed", source="review")
        for (x1, y1, x2, y2), label, is_ignored in rows
    )


def _check_photos(path: Path, names: Mapping[str, object], photos: Sequence[Photo]) -> None:
    known = {photo.id for photo in photos}
    others = [name for name in names if name not in known]
    if others:
        raise errors.UserError(
            errors.printable(
                f"{path}: photo {others[0]}{_more(others)} is not in the dataset; add it there, or remove it here"
            )
        )


def _check_classes(path: Path, boxes: Mapping[str, Sequence[LabelBox]], classes: Sequence[str]) -> None:
    for name in dict.fromkeys(box.name for own in boxes.values() for box in own):
        if name not in classes:
            near = difflib.get_close_matches(name[:100], classes, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "remove its boxes, or name it in --classes"
            raise errors.UserError(errors.printable(f"{path}: {name!r} is not a class of the dataset; {hint}"))


def _more(names: Sequence[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


# ---------------------------------------------------------------- as training takes them


def read_reviewed(path: Path, photos: TaggedPhotos, root: Path | None = None) -> tuple[TaggedPhotos, ReviewedBoxes]:
    """The photos with the tags of their reviewed boxes, too, and the boxes; warns where tags and boxes disagree."""
    file = read_reviewed_file(path, photos, root)
    reviewed = reviewed_boxes(file, photos)
    for concern in tag_concerns(file, photos):
        warnings.warn(concern, stacklevel=2)
    return with_box_tags(photos, reviewed), reviewed


def reviewed_boxes(file: ReviewedFile, photos: TaggedPhotos) -> ReviewedBoxes:
    """The boxes of reviewed photos, clipped to them; raises if one has no area there."""
    index = {name: number for number, name in enumerate(photos.classes)}
    sizes = {photo.id: (photo.width, photo.height) for photo in photos.photos}
    found = {name: _objects(file.path, name, own, index, sizes[name]) for name, own in file.boxes.items()}
    return ReviewedBoxes(photos.classes, found, storage.file_digest(file.path) if file.path.is_file() else "")


def _objects(
    path: Path, photo_id: str, boxes: Sequence[LabelBox], index: Mapping[str, int], size: tuple[int, int]
) -> ReviewedObjects:
    corners = clip(torch.tensor([box.box for box in boxes], dtype=torch.float32).reshape(-1, 4), *size)
    for box, area in zip(boxes, areas(corners).tolist(), strict=True):
        if area <= 0:
            problem = f"{path}: photo {photo_id}: a box of {box.name!r} has no area in the photo; correct or remove it"
            raise errors.UserError(errors.printable(problem))
    is_ignored = torch.tensor([box.is_doubtful for box in boxes], dtype=torch.bool)
    labels = torch.tensor([index[box.name] for box in boxes], dtype=torch.long)
    return ReviewedObjects(corners[~is_ignored], labels[~is_ignored], corners[is_ignored])


def with_box_tags(photos: TaggedPhotos, reviewed: ReviewedBoxes) -> TaggedPhotos:
    """The photos, each tagged with the classes of its boxes, too: a reviewer may find what no tag names."""
    tags = photos.tags.clone()
    for row, photo in enumerate(photos.photos):
        if photo.id in reviewed.photos:
            tags[row, reviewed.photos[photo.id].labels] = True
    unsure = None if photos.unsure is None else photos.unsure & ~tags
    return replace(photos, tags=tags, unsure=unsure)


def tag_concerns(file: ReviewedFile, photos: TaggedPhotos) -> list[str]:
    """Where boxes and the tags before them disagree, a line per kind."""
    added, unboxed = [], []
    for photo, row in zip(photos.photos, photos.tags.tolist(), strict=True):
        own = file.boxes.get(photo.id)
        if own is None:
            continue
        tags = {name for name, is_tag in zip(photos.classes, row, strict=True) if is_tag}
        added += [
            f"{photo.id}: {name}"
            for name in dict.fromkeys(b.name for b in own if not b.is_doubtful)
            if name not in tags
        ]
        unboxed += [f"{photo.id}: {name}" for name in sorted(tags - {box.name for box in own})]
    kinds = (
        (added, "boxed, but no tag of the photo; the tag is added"),
        (unboxed, "a tag of a reviewed photo, but not boxed; remove the tag if the object is not there"),
        (file.not_reviewed, "tagged, but without any box there; it counts as not reviewed"),
    )
    return [errors.printable(f"{file.path}: {names[0]}{_more(names)}: {words}") for names, words in kinds if names]


# ---------------------------------------------------------------- counts of boxes


def counts_from_boxes(photos: TaggedPhotos, source: listing.DataSource) -> TaggedPhotos:
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


def _numbers(objects: Objects | None, num_classes: int) -> Int[torch.Tensor, " C"]:
    if objects is None:
        return torch.zeros(num_classes, dtype=torch.long)
    return torch.bincount(objects.labels[~objects.difficult & ~objects.crowd], minlength=num_classes)
