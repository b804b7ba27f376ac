"""Detections written to files that other evaluators read too."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tag2box.files import write_text
from tag2box.metrics.voc import to_voc_pixels
from tag2box.types import Detections, Photo

_Entry = dict[str, int | float | str | list[float]]


def write_coco_results(
    path: Path,
    detections: Mapping[str, Detections],
    classes: Sequence[str],
    *,
    file_names: Mapping[str, str] | None = None,
    image_ids: Mapping[str, int] | None = None,
    category_ids: Mapping[str, int] | None = None,
) -> None:
    """Write a COCO results list, every entry carrying file and category name beside the numbers official tools read.

    Args:
        file_names: file of each image; the image's id where not given.
        image_ids: COCO number of each image; 1, 2, ... in the mapping's order where not given.
        category_ids: COCO number of each class; 1, 2, ... where not given.
    """
    numbers = image_ids or {image_id: number for number, image_id in enumerate(detections, start=1)}
    categories = category_ids or {name: number for number, name in enumerate(classes, start=1)}
    rows: list[_Entry] = []
    for image_id, found in detections.items():
        file_name = file_names[image_id] if file_names else image_id
        for entry in _entries(found, classes, categories):
            rows.append({"image_id": numbers[image_id], "file_name": file_name, **entry})
    write_text(path, f"[{_lines(rows)}]\n")


def write_coco_detections(
    path: Path, detections: Mapping[str, Detections], classes: Sequence[str], photos: Sequence[Photo]
) -> None:
    """Write one self-contained COCO file: the photos, the categories, and the detections as scored annotations."""
    categories = {name: number for number, name in enumerate(classes, start=1)}
    annotations: list[_Entry] = []
    for number, photo in enumerate(photos, start=1):
        for entry in _entries(detections.get(photo.id, Detections.empty()), classes, categories):
            annotations.append({"id": len(annotations) + 1, "image_id": number, **entry})
    images: list[_Entry] = [
        {"id": number, "file_name": _file_name(photo), "width": photo.width, "height": photo.height}
        for number, photo in enumerate(photos, start=1)
    ]
    named: list[_Entry] = [{"id": number, "name": name} for name, number in categories.items()]
    head = f'{{"images": [{_lines(images)}],\n"categories": [{_lines(named)}],\n"annotations": '
    write_text(path, f"{head}[{_lines(annotations)}]}}\n")


def write_voc_results(
    folder: Path, detections: Mapping[str, Detections], classes: Sequence[str], *, split: str
) -> None:
    """Write the files VOC's evaluation server takes: ``comp4_det_SPLIT_CLASS.txt``, one for each class."""
    lines: list[list[str]] = [[] for _ in classes]
    for image_id, found in detections.items():
        columns = (to_voc_pixels(found.boxes.double()).tolist(), found.scores.double().tolist(), found.labels.tolist())
        for box, score, label in zip(*columns, strict=True):
            lines[label].append(f"{image_id} {score:.9g} " + " ".join(f"{edge:.3f}" for edge in box) + "\n")
    for name, rows in zip(classes, lines, strict=True):
        write_text(folder / f"comp4_det_{split}_{name}.txt", "".join(rows))


def _entries(found: Detections, classes: Sequence[str], categories: Mapping[str, int]) -> Iterator[_Entry]:
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
    """The photo's file, with its folder where the id needed one: photos of one name must stay apart."""
    return photo.id if photo.id.endswith(photo.path.suffix) else photo.id + photo.path.suffix


def _lines(rows: list[_Entry]) -> str:
    """One entry a line: legible, and twice as fast as JSON with every number on its own line."""
    return ",\n".join(json.dumps(row, allow_nan=False) for row in rows)
