"""COCO annotation files: true boxes for evaluation, never for training."""

from __future__ import annotations

import difflib
import reprlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated

import torch
from jaxtyping import Float
from pydantic import BaseModel, Field, FiniteFloat, PositiveInt, ValidationError
from torch import Tensor

from tag2box.data.photos import distinct_names
from tag2box.errors import UserError
from tag2box.files import read_json, write_json
from tag2box.types import Objects, Truth

_Length = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Area = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Image(BaseModel):
    id: int
    width: PositiveInt
    height: PositiveInt
    file_name: Annotated[str, Field(min_length=1)] | None = None


class _Category(BaseModel):
    id: int
    name: str


class _Annotation(BaseModel):
    id: int
    image_id: int
    category_id: int
    bbox: tuple[FiniteFloat, FiniteFloat, _Length, _Length]
    area: _Area | None = None
    iscrowd: bool = False
    difficult: bool = False


class _File(BaseModel):
    images: list[_Image]
    categories: list[_Category]
    annotations: list[_Annotation]


@dataclass(frozen=True, slots=True)
class CocoTruth:
    """A COCO file's truth, and what is needed to read and score other people's COCO results against it."""

    truth: Truth
    images: dict[int, str]  # COCO image id -> image id of the truth
    categories: dict[int, str]  # COCO category id -> class name
    areas: dict[str, Float[Tensor, " B"]]  # per image, the file's area of each object: COCO's small, medium and large


def read_coco_truth(path: Path, classes: Sequence[str] | None = None) -> Truth:
    """True objects of a COCO annotation file; see ``read_coco``."""
    return read_coco(path, classes).truth


def read_coco(path: Path, classes: Sequence[str] | None = None) -> CocoTruth:
    """True objects of a COCO annotation file, with its image ids, category ids and object areas.

    Images are known by the stems of their file names, as photos are elsewhere; where two share a stem, by their paths
    without suffix, or with it where that is what sets them apart; without file names, by their numbers. They come in
    the order of their COCO ids, and classes in that of their category ids: official evaluators break ties so. With
    ``classes``, objects of other categories are left out. Coordinates are kept in double precision.
    """
    content = _parse(path)
    categories = _categories(path, content.categories)
    names = _chosen_classes(path, tuple(categories.values()), classes)
    _refuse_repeats(path, "images", [image.id for image in content.images])
    _refuse_repeats(path, "annotations", [annotation.id for annotation in content.annotations])
    images = sorted(content.images, key=lambda image: image.id)
    ids = _image_names(path, images)
    grouped = _group(path, content.annotations, ids, categories)
    index = {name: position for position, name in enumerate(names)}
    label = {number: index[name] for number, name in categories.items() if name in index}
    kept = [[a for a in grouped[image.id] if a.category_id in label] for image in images]
    truth = Truth(
        classes=names,
        ids=tuple(ids.values()),
        sizes=tuple((image.width, image.height) for image in images),
        objects=tuple(_to_objects(rows, label) for rows in kept),
    )
    areas = {name: _areas(rows) for name, rows in zip(truth.ids, kept, strict=True)}
    return CocoTruth(truth, ids, categories, areas)


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


def _parse(path: Path) -> _File:
    document = read_json(path, "a COCO annotation file")
    if not isinstance(document, dict):
        raise UserError(
            f"{path}: expected an object with images, categories and annotations, got a {type(document).__name__}"
        )
    try:
        return _File.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
        got = "" if first["type"] == "missing" else f", got {reprlib.repr(first['input'])}"
        raise UserError(
            f"{path}: {where}: {first['msg'][0].lower()}{first['msg'][1:]}{got}; correct the file"
        ) from None


def _categories(path: Path, categories: list[_Category]) -> dict[int, str]:
    _refuse_repeats(path, "categories", [category.id for category in categories])
    by_id = {category.id: category.name for category in sorted(categories, key=lambda category: category.id)}
    for name, count in Counter(by_id.values()).items():
        if count > 1:
            raise UserError(f"{path}: categories: name {name!r} is used {count} times; give each category its own name")
    return by_id


def _chosen_classes(path: Path, known: tuple[str, ...], classes: Sequence[str] | None) -> tuple[str, ...]:
    if classes is None:
        return known
    for name in classes:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise UserError(
                f"{path}: categories: no class {name!r}; "
                + (f"did you mean {near[0]!r}?" if near else "check its name")
            )
    if len(set(classes)) != len(classes):
        raise UserError(f"{path}: classes: expected each name once, got {', '.join(classes)}; remove the repeated name")
    return tuple(classes)


def _refuse_repeats(path: Path, field: str, numbers: list[int]) -> None:
    if len(set(numbers)) == len(numbers):
        return
    number = next(number for number, count in Counter(numbers).items() if count > 1)
    raise UserError(f"{path}: {field}: id {number} is used twice; every id must be different")


def _image_names(path: Path, images: list[_Image]) -> dict[int, str]:
    files = [PurePosixPath((image.file_name or str(image.id)).replace("\\", "/")) for image in images]
    name, count = Counter(file.as_posix() for file in files).most_common(1)[0] if files else ("", 0)
    if count > 1:
        raise UserError(f"{path}: images: file_name {name!r} is used {count} times; every image needs its own")
    names = distinct_names(files)
    return {image.id: name for image, name in zip(images, names, strict=True)}


def _group(
    path: Path, annotations: list[_Annotation], images: Mapping[int, str], categories: Mapping[int, str]
) -> defaultdict[int, list[_Annotation]]:
    grouped: defaultdict[int, list[_Annotation]] = defaultdict(list)
    for row, annotation in enumerate(annotations):
        if annotation.image_id not in images:
            raise UserError(
                f"{path}: annotations[{row}].image_id: no image has id {annotation.image_id}; add the image"
            )
        if annotation.category_id not in categories:
            raise UserError(
                f"{path}: annotations[{row}].category_id: no category has id {annotation.category_id}; add the category"
            )
        grouped[annotation.image_id].append(annotation)
    return grouped


def _to_objects(rows: list[_Annotation], label: Mapping[int, int]) -> Objects:
    xywh = torch.tensor([row.bbox for row in rows], dtype=torch.float64).reshape(-1, 4)
    return Objects(
        boxes=torch.cat([xywh[:, :2], xywh[:, :2] + xywh[:, 2:]], dim=1),
        labels=torch.tensor([label[row.category_id] for row in rows], dtype=torch.long),
        difficult=torch.tensor([row.difficult for row in rows], dtype=torch.bool),
        crowd=torch.tensor([row.iscrowd for row in rows], dtype=torch.bool),
    )


def _areas(rows: list[_Annotation]) -> Float[Tensor, " B"]:
    sizes = [row.bbox[2] * row.bbox[3] if row.area is None else row.area for row in rows]
    return torch.tensor(sizes, dtype=torch.float64)
