"""True objects of COCO annotation files, for evaluation only, and the COCO exports of detections.

Training reads tags through ``coco_tags``.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
from jaxtyping import Float
from pydantic import Field, TypeAdapter

from tag2box import errors, io, storage
from tag2box.annotations import Detections, Objects, Photo, Truth
from tag2box.formats import coco_file, coco_tags, export, listing
from tag2box.labels import label_set
from tag2box.labels.labelled import LabelledPhotos

_Entry = dict[str, int | float | str | list[float]]
_PEEK = 4096  # bytes within which a JSON file has its first brace
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
    """Raised at the first box, to skip the rest of the file."""


_ANNOTATION = TypeAdapter(_Annotation)


class Coco:
    """A COCO annotation file, with boxes or with tags alone."""

    what = "a COCO file"
    has_tags = True
    names_splits = False

    def recognises(self, path: Path) -> bool:
        """Files with the suffix .json, or whose first character is a brace."""
        if not path.is_file() or path.suffix.lower() == ".json":
            return path.is_file()
        with path.open("rb") as file:
            return file.read(_PEEK).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"{"

    def photos(self, source: listing.DataSource, on_fault: listing.OnFault) -> listing.Listing:
        """Its images."""
        return coco_tags.list_coco_photos(source, on_fault)

    def tags(self, source: listing.DataSource, on_fault: listing.OnFault) -> listing.Listing:
        """Its images, tagged with the categories of their annotations."""
        return coco_tags.list_coco(source, on_fault)

    def has_boxes(self, source: listing.DataSource) -> bool:
        """Whether any annotation has a box."""
        return coco_has_boxes(source.path)

    def truth(self, source: listing.DataSource, on_fault: listing.OnFault) -> Truth:
        """Its annotations."""
        return read_coco_truth(source.path, source.classes, on_fault)


@dataclass(frozen=True, slots=True)
class CocoTruth:
    """The truth of a COCO file, with the ids and areas needed to score COCO results against it."""

    truth: Truth
    images: dict[int, str]  # COCO image id -> photo id
    categories: dict[int, str]  # COCO category id -> class name
    areas: dict[
        str, Float[torch.Tensor, " B"]
    ]  # per photo id, the area of each object as annotated: COCO's small, medium and large


def read_coco_truth(
    path: Path, classes: Sequence[str] | None = None, on_fault: listing.OnFault = listing.refuse
) -> Truth:
    """True objects of a COCO annotation file; see ``read_coco``."""
    return read_coco(path, classes, on_fault).truth


def read_coco(
    path: Path, classes: Sequence[str] | None = None, on_fault: listing.OnFault = listing.refuse
) -> CocoTruth:
    """True objects of a COCO annotation file, with its image ids, category ids and object areas.

    Images are sorted by COCO id and classes by category id, because official evaluators break ties in this order. If
    ``classes`` are given, objects of other categories are left out. Coordinates are kept in double precision. Objects
    marked ``ignore`` become difficult: like crowds, they count neither as found nor as missed.
    """
    content = coco_file.parse_coco(path, _ANNOTATION, on_fault)
    if content.annotations is None:
        raise errors.UserError(f"{path}: annotations: field required; this file has no boxes to compare with")
    names = listing.select_classes(tuple(content.categories.values()), classes, f"{path}: categories")
    index = {name: position for position, name in enumerate(names)}
    label = {number: index[name] for number, name in content.categories.items() if name in index}
    grouped = _group(content, on_fault)
    sizes = _sizes(content, on_fault)
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
        coco_file.each_row(path, "a COCO annotation file", {"annotations": probe})
    except _Found:
        return True
    return False


def write_coco_truth(path: Path, truth: Truth, file_names: Mapping[str, str]) -> None:
    """Write a truth as a COCO annotation file; ``file_names`` are by photo id. COCO ids count from 1."""
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
    io.write_json(path, {"images": images, "categories": categories, "annotations": annotations})


def _group(content: coco_file.CocoFile[_Annotation], on_fault: listing.OnFault) -> defaultdict[int, list[_Annotation]]:
    """Annotations by image; of several with the same id, the first."""
    grouped: defaultdict[int, list[_Annotation]] = defaultdict(list)
    seen: set[int] = set()
    for row in content.annotations or ():
        annotation = row.value
        if annotation.id is not None and annotation.id in seen:
            line = f"{content.path}: annotations: id {annotation.id} is used twice; every id must be different"
            on_fault(listing.Fault("bad row", f"annotations[{row.number}]", line))
        elif coco_file.refers(content, row.number, annotation.image_id, annotation.category_id, on_fault):
            grouped[annotation.image_id].append(annotation)
        if annotation.id is not None:
            seen.add(annotation.id)
    return grouped


def _sizes(content: coco_file.CocoFile[_Annotation], on_fault: listing.OnFault) -> dict[int, tuple[int, int]]:
    """Width and height of the images that have both."""
    sizes = {}
    for number, row in content.images.items():
        width, height = row.value.width, row.value.height
        if width is None or height is None:
            field = "width" if width is None else "height"
            where = f"images[{row.number}]"
            line = f"{content.path}: {where}.{field}: field required; correct the file"
            on_fault(listing.Fault("bad row", content.names[number], line))
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


def _areas(rows: list[_Annotation]) -> Float[torch.Tensor, " B"]:
    sizes = [row.bbox[2] * row.bbox[3] if row.area is None else row.area for row in rows]
    return torch.tensor(sizes, dtype=torch.float64)


# ---------------------------------------------------------------- export


class CocoExport(export.LabelExport):
    """One COCO annotation file: photos, categories, and boxes as annotations with a score.

    pycocotools loads it as ground truth; ``tag2box evaluate`` reads it as detections. Of labels, it is the labels.json
    of a label set: with tags, provenance, and doubtful boxes as crowds. ``file_name`` is relative to their root.
    """

    what = "a COCO file"

    def __call__(
        self, out: Path, photos: Sequence[Photo], classes: Sequence[str], detections: Mapping[str, Detections]
    ) -> None:
        """Write detections."""
        write_coco_detections(out, detections, classes, photos)

    def write(self, out: Path, labels: LabelledPhotos) -> None:
        """Write labels."""
        io.write_text(out, label_set.labels_text(labels))


class FiftyOneExport(export.LabelExport):
    """A folder that FiftyOne imports as ``COCODetectionDataset``: data/* (links) and labels.json.

    ``classifications.json`` has the tags, in FiftyOne's format of (multilabel) image classification.
    """

    what = "a FiftyOne folder"
    is_folder = True

    def write(self, out: Path, labels: LabelledPhotos) -> None:
        """Write both files, and link the photos."""
        files = storage.distinct_file_names(photo.id for photo in labels.photos)
        photos = tuple(replace(own, file=f"{files[own.id]}{Path(own.file).suffix}") for own in labels.photos)
        for before, photo in zip(labels.photos, photos, strict=True):
            export.place_photo(labels.path(before), out / "data" / photo.file, self.placing)
        io.make_folder(out / "data")
        io.write_text(out / "labels.json", label_set.labels_text(replace(labels, photos=photos)))
        numbers = {name: number for number, name in enumerate(labels.classes)}
        tags = {files[photo.id]: [numbers[tag] for tag in photo.tags] for photo in photos}
        io.write_json(out / "classifications.json", {"classes": list(labels.classes), "labels": tags})


class CocoResultsExport:
    """A COCO results list. Images and categories are numbered from 1, as in ``CocoExport``, and named as well."""

    what = "a COCO results file"
    is_folder = False
    all_scores = True

    def __call__(
        self, out: Path, photos: Sequence[Photo], classes: Sequence[str], detections: Mapping[str, Detections]
    ) -> None:
        """Write the file."""
        found = export.DetectionsOf(photos, detections)
        write_coco_results(out, found, classes, file_names={photo.id: _file_name(photo) for photo in photos})


def write_coco_results(
    path: Path,
    detections: Mapping[str, Detections],
    classes: Sequence[str],
    *,
    file_names: Mapping[str, str] | None = None,
    image_ids: Mapping[str, int] | None = None,
    category_ids: Mapping[str, int] | None = None,
) -> None:
    """Write a COCO results list; every entry has file and category names beside the numbers that official tools read.

    Args:
        file_names: file of each photo; default: its id.
        image_ids: COCO id of each photo; default: 1, 2, ... in the order of ``detections``.
        category_ids: COCO id of each class; default: 1, 2, ...
    """
    numbers = image_ids or {image_id: number for number, image_id in enumerate(detections, start=1)}
    categories = category_ids or {name: number for number, name in enumerate(classes, start=1)}
    rows: Iterator[_Entry] = (
        {"image_id": numbers[image_id], "file_name": file_names[image_id] if file_names else image_id, **entry}
        for image_id, found in detections.items()
        for entry in coco_entries(found, classes, categories)
    )
    io.write_parts(path, _joined("[", rows, "]\n"))


def write_coco_detections(
    path: Path, detections: Mapping[str, Detections], classes: Sequence[str], photos: Sequence[Photo]
) -> None:
    """Write one self-contained COCO file: photos, categories, and detections as scored annotations."""
    categories = {name: number for number, name in enumerate(classes, start=1)}
    images: Iterator[_Entry] = (
        {"id": number, "file_name": _file_name(photo), "width": photo.width, "height": photo.height}
        for number, photo in enumerate(photos, start=1)
    )
    named: Iterator[_Entry] = ({"id": number, "name": name} for name, number in categories.items())
    found = (
        (number, entry)
        for number, photo in enumerate(photos, start=1)
        for entry in coco_entries(detections.get(photo.id, Detections.empty()), classes, categories)
    )
    entries: Iterator[_Entry] = (
        {"id": count, "image_id": number, **entry, "iscrowd": 0} for count, (number, entry) in enumerate(found, start=1)
    )
    head, middle, last = '{"images": [', '],\n"categories": [', '],\n"annotations": ['
    io.write_parts(path, _joined(head, images, middle, named, last, entries, "]}\n"))


def coco_entries(found: Detections, classes: Sequence[str], categories: Mapping[str, int]) -> Iterator[_Entry]:
    """The detections of a photo as entries of COCO, without numbers of their own and of their photo."""
    columns = (found.boxes.double().tolist(), found.scores.double().tolist(), found.labels.tolist())
    for (x1, y1, x2, y2), score, label in zip(*columns, strict=True):
        width, height = x2 - x1, y2 - y1
        yield {
            "category_id": categories[classes[label]],
            "category_name": classes[label],
            "bbox": [x1, y1, width, height],
            "area": width * height,
            "score": score,
        }


def _file_name(photo: Photo) -> str:
    """The photo's file, relative to what the user named; else its id, which is distinct among the photos."""
    return photo.file or (photo.id if photo.id.endswith(photo.path.suffix) else photo.id + photo.path.suffix)


def _joined(*parts: str | Iterator[_Entry]) -> Iterator[str]:
    """Texts, and rows with one entry per line: legible, and twice as fast as JSON with every number on its own line."""
    for part in parts:
        if isinstance(part, str):
            yield part
            continue
        for number, row in enumerate(part):
            yield (",\n" if number else "") + json.dumps(row, allow_nan=False)
