"""Rectangles of Label Studio tasks, for evaluation and review only, and the Label Studio export of labels.

Training reads tags through ``tool_tags``. Rectangles are in per cent of the photo's size.
https://labelstud.io/guide/predictions
"""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated
from urllib.parse import quote
from xml.sax.saxutils import quoteattr

from pydantic import Field, TypeAdapter

from tag2box import annotations, io
from tag2box.formats import annotated, export, listing, tool_tags
from tag2box.labels.labelled import LabelBox, LabelledPhoto, LabelledPhotos

_Percent = Annotated[float, Field(ge=-1000, le=1000, allow_inf_nan=False)]
_Side = Annotated[float, Field(ge=0, le=1000, allow_inf_nan=False)]
_LOCAL = "/data/local-files/?d="


@dataclass(frozen=True, slots=True)
class _Rectangle:
    rectanglelabels: tuple[str, ...]
    x: _Percent
    y: _Percent
    width: _Side
    height: _Side
    rotation: Annotated[float, Field(allow_inf_nan=False)] = 0.0


@dataclass(frozen=True, slots=True)
class _Region:
    value: _Rectangle
    original_width: Annotated[int, Field(gt=0, le=1_000_000)] | None = None
    original_height: Annotated[int, Field(gt=0, le=1_000_000)] | None = None
    meta: tool_tags.RegionNote = tool_tags.RegionNote()


_REGION = TypeAdapter(_Region)


class LabelStudio:
    """Tasks of Label Studio: a JSON file as it exports, or a folder with tasks.json."""

    what = "a Label Studio file"
    has_tags = True
    names_splits = False

    def recognises(self, path: Path) -> bool:
        """JSON lists of tasks, and folders with a tasks.json."""
        return tool_tags.is_label_studio(path)

    def photos(self, source: listing.DataSource, on_fault: listing.OnFault) -> listing.Listing:
        """The photos of its tasks."""
        return tool_tags.list_label_studio(source, on_fault)

    def tags(self, source: listing.DataSource, on_fault: listing.OnFault) -> listing.Listing:
        """The photos of its tasks, with their choices and the labels of rectangles."""
        return tool_tags.list_label_studio(source, on_fault)

    def has_boxes(self, source: listing.DataSource) -> bool:
        """Whether any task has a rectangle."""
        tasks = tool_tags.label_studio_tasks(source.path, lambda _: None)
        return any(_is_rectangle(region) for task in tasks for region in task.regions)

    def truth(self, source: listing.DataSource, on_fault: listing.OnFault) -> annotations.Truth:
        """The rectangles of its tasks; of a rotated one, the upright box around it."""
        rows = []
        for task in tool_tags.label_studio_tasks(source.path, on_fault):
            regions = [
                found
                for number, region in enumerate(task.regions)
                if _is_rectangle(region)
                and (found := tool_tags.checked_row(_REGION, region, f"{task.where}: region {number}", on_fault))
                is not None
            ]
            sizes = [(one.original_width, one.original_height) for one in regions]
            width, height = sizes[0] if sizes else (None, None)
            size = (width, height) if width is not None and height is not None else None
            rows.append(annotated.AnnotatedImage(task.image, partial(_boxes, regions), size))
        return annotated.to_truth(source, tool_tags.list_label_studio(source, on_fault), rows, on_fault)


def _is_rectangle(region: object) -> bool:
    value = region.get("value") if isinstance(region, dict) else None
    return isinstance(value, dict) and "rectanglelabels" in value


def _boxes(regions: Sequence[_Region], width: int, height: int) -> list[annotated.NamedBox]:
    found = []
    for region in regions:
        corners = _corners(region.value, width, height)
        for name in region.value.rectanglelabels:
            found.append(annotated.NamedBox(name, corners, region.meta.is_doubtful))
    return found


def _corners(value: _Rectangle, width: int, height: int) -> annotated.Corners:
    """The upright box around a rectangle, which may be rotated about its upper left corner."""
    x, y = value.x / 100 * width, value.y / 100 * height
    across, down = value.width / 100 * width, value.height / 100 * height
    if value.rotation % 360 == 0:
        return x, y, x + across, y + down
    cos, sin = math.cos(math.radians(value.rotation)), math.sin(math.radians(value.rotation))
    points = [(a * cos - b * sin, a * sin + b * cos) for a in (0, across) for b in (0, down)]
    xs, ys = [x + a for a, _ in points], [y + b for _, b in points]
    return min(xs), min(ys), max(xs), max(ys)


# ---------------------------------------------------------------- export


class LabelStudioExport(export.LabelExport):
    """A folder for Label Studio: tasks.json and config.xml.

    Create a project with config.xml as its labelling interface, and import tasks.json. Photos are served from disk:
    start Label Studio with LABEL_STUDIO_LOCAL_FILES_SERVING_ENABLED=true, and with the root of the photos as
    LABEL_STUDIO_LOCAL_FILES_DOCUMENT_ROOT. Labels are predictions, reviewed boxes are annotations; tags are choices;
    ignore regions are rectangles with the note "doubtful".
    """

    what = "a Label Studio folder"
    is_folder = True

    def write(self, out: Path, labels: LabelledPhotos) -> None:
        """Write both files."""
        tasks = [_task(number, photo) for number, photo in enumerate(labels.photos, start=1)]
        rows = ",\n".join(json.dumps(task, allow_nan=False) for task in tasks)
        io.write_text(out / "tasks.json", f"[{rows}]\n")
        io.write_text(out / "config.xml", _config(labels.classes))

    def check(self, out: Path, photos: Sequence[annotations.Photo], classes: Sequence[str]) -> None:
        """Raise if config.xml cannot hold the name of a class."""
        export.check_xml_names("Label Studio", (), classes)


def _config(classes: Sequence[str]) -> str:
    rectangles, choices = (
        "".join(f"    <{tag} value={quoteattr(name)}/>\n" for name in classes) for tag in ("Label", "Choice")
    )
    return (
        '<View>\n  <Image name="image" value="$image" zoom="true"/>\n'
        f'  <RectangleLabels name="label" toName="image">\n{rectangles}  </RectangleLabels>\n'
        f'  <Choices name="tags" toName="image" choice="multiple">\n{choices}  </Choices>\n</View>\n'
    )


def _task(number: int, photo: LabelledPhoto) -> dict[str, object]:
    regions = [_rectangle(photo, place, box) for place, box in enumerate(photo.boxes)]
    shared = {"from_name": "tags", "to_name": "image", "type": "choices"}
    if photo.tags:
        regions.append({"id": _region_id(photo, "tags"), **shared, "value": {"choices": list(photo.tags)}})
    if photo.unsure:
        note = {"meta": {"text": [tool_tags.DOUBTFUL]}}
        regions.append({"id": _region_id(photo, "unsure"), **shared, **note, "value": {"choices": list(photo.unsure)}})
    is_predicted = any(box.source == "label" for box in photo.boxes)
    scores = [box.score for box in photo.labels if box.score is not None]
    task: dict[str, object] = {
        "id": number,
        "data": {"image": _LOCAL + quote(photo.file, errors="surrogatepass"), "file": photo.file, "split": photo.split},
    }
    if is_predicted:
        task["predictions"] = [{"model_version": "tag2box", "score": min(scores, default=0.0), "result": regions}]
    else:
        task["annotations"] = [{"result": regions}]
    return task


def _rectangle(photo: LabelledPhoto, place: int, box: LabelBox) -> dict[str, object]:
    x1, y1, x2, y2 = box.box
    value = {
        "x": 100 * x1 / photo.width,
        "y": 100 * y1 / photo.height,
        "width": 100 * (x2 - x1) / photo.width,
        "height": 100 * (y2 - y1) / photo.height,
        "rotation": 0,
        "rectanglelabels": [box.name],
    }
    more: dict[str, object] = {} if box.score is None else {"score": box.score}
    if box.is_doubtful:
        more["meta"] = {"text": [tool_tags.DOUBTFUL]}
    return {
        "id": _region_id(photo, str(place)),
        "from_name": "label",
        "to_name": "image",
        "type": "rectanglelabels",
        "original_width": photo.width,
        "original_height": photo.height,
        "image_rotation": 0,
        "value": value,
        **more,
    }


def _region_id(photo: LabelledPhoto, name: str) -> str:
    """Ten characters that are the same at every export."""
    return hashlib.sha256(f"{photo.file}\n{name}".encode(errors="surrogatepass")).hexdigest()[:10]
