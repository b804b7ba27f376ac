"""Pascal VOC folders: true boxes for evaluation, never for training. What training may see is in ``voc_tags``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import torch

from tag2box.annotations import Objects, Truth
from tag2box.data.images import photo_size
from tag2box.errors import UserError
from tag2box.formats.listing import Fault, OnFault, refuse
from tag2box.formats.voc_tags import (
    annotation_path,
    each_object,
    photos_by_id,
    read_annotation,
    refuse_bare,
    voc_classes,
    voc_ids,
    voc_root,
    xml_number,
)

_Box = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True)
class _Object:
    name: str
    box: _Box
    difficult: bool


@dataclass(frozen=True, slots=True)
class _Annotation:
    size: tuple[int, int]
    objects: tuple[_Object, ...]


def read_voc_truth(
    folder: Path,
    *,
    split: str | None,
    classes: Sequence[str] | None = None,
    photos: Path | None = None,
    complain: OnFault = refuse,
) -> Truth:
    """True objects of one split of a VOC folder; boxes become 0-based with exclusive right and bottom edges.

    Classes are those given, else those of ``classes.txt``, else those the split's XML files name, sorted.
    Objects of other classes are left out. Coordinates are kept in double precision, as official evaluators do.
    """
    root = voc_root(folder)
    ids = voc_ids(root, split, complain)
    refuse_bare(root, ids, split)
    at = photos or root / "JPEGImages"
    files = photos_by_id(at)
    read = {
        name: annotation
        for name in ids
        if (annotation := _read(root, name, at / files[name] if name in files else None, complain)) is not None
    }
    names = voc_classes(root, classes, {o.name for annotation in read.values() for o in annotation.objects})
    index = {name: position for position, name in enumerate(names)}
    objects = tuple(_to_objects(annotation, index) for annotation in read.values())
    return Truth(names, tuple(read), tuple(annotation.size for annotation in read.values()), objects)


def _read(root: Path, image_id: str, photo: Path | None, complain: OnFault) -> _Annotation | None:
    """Size and objects of an image, or None after a complaint."""
    path = annotation_path(root, image_id)
    tree = read_annotation(root, image_id, complain)
    if tree is None:
        return None
    objects = []
    for found in each_object(tree, path, complain):
        try:
            objects.append(_Object(found.mention.name, _read_box(found.node, found.where), found.mention.difficult))
        except UserError as error:
            complain(Fault("bad box", image_id, str(error)))
    try:
        return _Annotation(_read_size(path, tree, photo), tuple(objects))
    except UserError as error:
        complain(Fault("bad row", image_id, str(error)))
        return None


def _read_box(node: ElementTree.Element, where: str) -> _Box:
    corners = node.find("bndbox")
    if corners is None:
        raise UserError(f"{where}, field bndbox: missing; expected xmin, ymin, xmax and ymax")
    x1, y1, x2, y2 = (xml_number(corners, field, where) for field in ("xmin", "ymin", "xmax", "ymax"))
    if x2 < x1 or y2 < y1:
        raise UserError(
            f"{where}, field bndbox: expected xmin <= xmax and ymin <= ymax, got {x1:g} {y1:g} {x2:g} {y2:g}"
        )
    return x1 - 1, y1 - 1, x2, y2  # XML counts pixels from 1 and includes the last; we count from 0 and exclude it


def _read_size(path: Path, tree: ElementTree.Element, photo: Path | None) -> tuple[int, int]:
    """Width and height from the XML, or from the photo itself where a tool left them out or wrote zeros."""
    node = tree.find("size")
    if node is not None:
        width, height = (xml_number(node, field, f"{path}: size") for field in ("width", "height"))
        if width >= 1 and height >= 1:
            return int(width), int(height)
    if photo is None:
        raise UserError(
            f"{path}: size: expected width and height above 0; write them, or put the photo into JPEGImages"
        )
    return photo_size(photo)


def _to_objects(annotation: _Annotation, index: dict[str, int]) -> Objects:
    kept = [o for o in annotation.objects if o.name in index]
    return Objects(
        boxes=torch.tensor([o.box for o in kept], dtype=torch.float64).reshape(-1, 4),
        labels=torch.tensor([index[o.name] for o in kept], dtype=torch.long),
        difficult=torch.tensor([o.difficult for o in kept], dtype=torch.bool),
        crowd=torch.zeros(len(kept), dtype=torch.bool),
    )
