"""COCO annotation files: true boxes for evaluation, never for training. What training may see is in ``coco_tags``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from jaxtyping import Float
from pydantic import Field, TypeAdapter
from torch import Tensor

from tag2box.annotations import Objects, Truth
from tag2box.errors import UserError
from tag2box.formats.coco_file import CocoFile, each_row, parse, refers
from tag2box.formats.listing import Fault, OnFault, chosen, refuse
from tag2box.io import write_json

_Place = Annotated[float, Field(ge=-1e9, le=1e9, allow_inf_nan=False)]
# Zero is allowed: a few boxes of train2017 have no height, and the official evaluator counts them as objects.
_Length = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
_Area = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class _Annotation:
    image_id: int
    category_id: int
    bbox: tuple[_Place, _Place, _Length, _Length]
    id: int | None = None
    area: _Area | None = None
    iscrowd: bool = False
    ignore: bool = False
    difficult: bool = False


class _Found(Exception):
    """A box was met: the rest of the file need not be read."""


_ANNOTATION = TypeAdapter(_Annotation)


@dataclass(frozen=True, slots=True)
class CocoTruth:
    """A COCO file's truth, and what is needed to read and score other people's COCO results against it."""

    truth: Truth
    images: dict[int, str]  # COCO image id -> image id of the truth
    categories: dict[int, str]  # COCO category id -> class name
    areas: dict[str, Float[Tensor, " B"]]  # per image, the file's area of each object: COCO's small, medium and large


def read_coco_truth(path: Path, classes: Sequence[str] | None = None, complain: OnFault = refuse) -> Truth:
    """True objects of a COCO annotation file; see ``read_coco``."""
    return read_coco(path, classes, complain).truth


def read_coco(path: Path, classes: Sequence[str] | None = None, complain: OnFault = refuse) -> CocoTruth:
    """True objects of a COCO annotation file, with its image ids, category ids and object areas.

    Images come in the order of their COCO ids, and classes in that of their category ids: official evaluators break
    ties so. With ``classes``, objects of other categories are left out. Coordinates are kept in double precision.
    Objects marked ``ignore`` become difficult ones: like crowds they neither reward nor punish.
    """
    content = parse(path, _ANNOTATION, complain)
    if content.annotations is None:
        raise UserError(f"{path}: annotations: field required; this file has no boxes to compare with")
    names = chosen(tuple(content.categories.values()), classes, f"{path}: categories")
    index = {name: position for position, name in enumerate(names)}
    label = {number: index[name] for number, name in content.categories.items() if name in index}
    grouped = _group(content, complain)
    sizes = _sizes(content, complain)
    kept = {number: [a for a in grouped[number] if a.category_id in label] for number in sizes}
    truth = Truth(
        classes=names,
        ids=tuple(content.names[number] for number in sizes),
        sizes=tuple(sizes.values()),
        objects=tuple(_to_objects(rows, label) for rows in kept.values()),
    )
    areas = {content.names[number]: _areas(rows) for number, rows in kept.items()}
    return CocoTruth(truth, {number: content.names[number] for number in sizes}, content.categories, areas)


def coco_has_boxes(path: Path) -> bool:
    """Whether any annotation of a COCO file has a box."""

    def probe(row: object) -> None:
        if isinstance(row, dict) and row.get("bbox") is not None:
            raise _Found

    try:
        each_row(path, "a COCO annotation file", {"annotations": probe})
    except _Found:
        return True
    return False


def write_coco_truth(path: Path, truth: Truth, file_names: Mapping[str, str]) -> None:
    """Write a truth as a COCO annotation file; ``file_names`` gives each image id's file. Numbers count from 1."""
    images = [
        {"id": number, "file_name": file_names[name], "width": width, "height": height}
        for number, (name, (width, height)) in enumerate(zip(truth.ids, truth.sizes, strict=True), start=1)
    ]
    annotations: list[dict[str, object]] = []
    for number, objects in enumerate(truth.objects, start=1):
        for box, label, difficult, crowd in zip(
            objects.boxes.double().tolist(),
            objects.labels.tolist(),
            objects.difficult.tolist(),
            objects.crowd.tolist(),
            strict=True,
        ):
            width, height = box[2] - box[0], box[3] - box[1]
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": number,
                    "category_id": label + 1,
                    "bbox": [box[0], box[1], width, height],
                    "area": width * height,
                    "iscrowd": int(crowd),
                    "difficult": int(difficult),
                }
            )
    categories = [{"id": number, "name": name} for number, name in enumerate(truth.classes, start=1)]
    write_json(path, {"images": images, "categories": categories, "annotations": annotations})


def _group(content: CocoFile[_Annotation], complain: OnFault) -> defaultdict[int, list[_Annotation]]:
    """Annotations by image; of several with one id, the first."""
    grouped: defaultdict[int, list[_Annotation]] = defaultdict(list)
    seen: set[int] = set()
    for row in content.annotations or ():
        annotation = row.value
        if annotation.id is not None and annotation.id in seen:
            line = f"{content.path}: annotations: id {annotation.id} is used twice; every id must be different"
            complain(Fault("bad row", f"annotations[{row.number}]", line))
        elif refers(content, row.number, annotation.image_id, annotation.category_id, complain):
            grouped[annotation.image_id].append(annotation)
        if annotation.id is not None:
            seen.add(annotation.id)
    return grouped


def _sizes(content: CocoFile[_Annotation], complain: OnFault) -> dict[int, tuple[int, int]]:
    """Width and height of the images that have them."""
    sizes = {}
    for number, row in content.images.items():
        width, height = row.value.width, row.value.height
        if width is None or height is None:
            field = "width" if width is None else "height"
            where = f"images[{row.number}]"
            line = f"{content.path}: {where}.{field}: field required; correct the file"
            complain(Fault("bad row", content.names[number], line))
        else:
            sizes[number] = (width, height)
    return sizes


def _to_objects(rows: list[_Annotation], label: Mapping[int, int]) -> Objects:
    xywh = torch.tensor([row.bbox for row in rows], dtype=torch.float64).reshape(-1, 4)
    return Objects(
        boxes=torch.cat([xywh[:, :2], xywh[:, :2] + xywh[:, 2:]], dim=1),
        labels=torch.tensor([label[row.category_id] for row in rows], dtype=torch.long),
        difficult=torch.tensor([row.difficult or row.ignore for row in rows], dtype=torch.bool),
        crowd=torch.tensor([row.iscrowd for row in rows], dtype=torch.bool),
    )


def _areas(rows: list[_Annotation]) -> Float[Tensor, " B"]:
    sizes = [row.bbox[2] * row.bbox[3] if row.area is None else row.area for row in rows]
    return torch.tensor(sizes, dtype=torch.float64)
