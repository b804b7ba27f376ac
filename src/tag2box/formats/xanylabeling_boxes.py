"""Shapes of X-AnyLabeling and labelme, for evaluation and review only, and the X-AnyLabeling export of labels.

Training reads tags through ``tool_tags``. Each photo has a JSON file of the same name beside it.
https://github.com/CVHub520/X-AnyLabeling/blob/main/docs/en/user_guide.md
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter

from tag2box import annotations, errors, io, storage
from tag2box.formats import annotated, export, listing, tool_tags
from tag2box.labels.labelled import LabelBox, LabelledPhoto, LabelledPhotos

_Place = Annotated[float, Field(ge=-1e9, le=1e9, allow_inf_nan=False)]
_Side = Annotated[int, Field(gt=0, le=1_000_000)]
_VERSION = "2.4.4"  # of the files; the first releases with four points for a rectangle are older
_OUTLINES = {"rectangle", "polygon", "rotation"}


@dataclass(frozen=True, slots=True)
class _Shape:
    label: str
    points: tuple[tuple[_Place, _Place], ...] = ()
    shape_type: str = "polygon"
    difficult: bool = False


@dataclass(frozen=True, slots=True)
class _File:
    shapes: tuple[_Shape, ...] = ()
    imageWidth: _Side | None = None
    imageHeight: _Side | None = None


_CONTENT = TypeAdapter(_File)


class XAnyLabeling:
    """A folder of photos with JSON files of X-AnyLabeling or labelme beside them."""

    what = "an X-AnyLabeling folder"
    has_tags = True
    names_splits = False

    def recognises(self, path: Path) -> bool:
        """Folders in which a JSON file with shapes is beside a photo."""
        return tool_tags.is_xanylabeling(path)

    def photos(self, source: listing.DataSource, on_fault: listing.OnFault) -> listing.Listing:
        """All photos below the folder."""
        return tool_tags.list_xanylabeling(source, on_fault)

    def tags(self, source: listing.DataSource, on_fault: listing.OnFault) -> listing.Listing:
        """All photos below the folder, with their flags and the labels of their shapes."""
        return tool_tags.list_xanylabeling(source, on_fault)

    def has_boxes(self, source: listing.DataSource) -> bool:
        """Whether any photo has a rectangle or an outline."""
        files = (tool_tags.read_shapes(path, _CONTENT, _ignore) for _, path in tool_tags.shape_files(source.path))
        return any(_box(shape) is not None for file in files if file is not None for shape in file.shapes)

    def truth(self, source: listing.DataSource, on_fault: listing.OnFault) -> annotations.Truth:
        """The rectangles; of an outline, the box around it. Points and lines are left out."""
        rows = []
        for name, path in tool_tags.shape_files(source.path):
            file = tool_tags.read_shapes(path, _CONTENT, on_fault)
            boxes = [box for shape in (file.shapes if file is not None else ()) if (box := _box(shape)) is not None]
            size = None
            if file is not None and file.imageWidth is not None and file.imageHeight is not None:
                size = (file.imageWidth, file.imageHeight)
            rows.append(annotated.AnnotatedImage(name, lambda *_, found=boxes: found, size))
        return annotated.to_truth(source, tool_tags.list_xanylabeling(source, on_fault), rows, on_fault)


def _ignore(fault: listing.Fault) -> None:
    """Error callback that skips."""


def _box(shape: _Shape) -> annotated.NamedBox | None:
    if shape.shape_type not in _OUTLINES or len(shape.points) < 2:
        return None
    xs, ys = zip(*shape.points, strict=True)
    return annotated.NamedBox(shape.label, (min(xs), min(ys), max(xs), max(ys)), shape.difficult)


# ---------------------------------------------------------------- export


class XAnyLabelingExport(export.LabelExport):
    """A folder to open in X-AnyLabeling: photos with a JSON file beside each, and classes.txt.

    Tags are flags, ignore regions are difficult shapes.
    """

    what = "an X-AnyLabeling folder"
    is_folder = True

    def write(self, out: Path, labels: LabelledPhotos) -> None:
        """Write the JSON files, and link the photos beside them."""
        files = storage.distinct_file_names(photo.id for photo in labels.photos)
        for photo in labels.photos:
            name = f"{files[photo.id]}{Path(photo.file).suffix}"
            io.write_json(out / f"{files[photo.id]}.json", _content(photo, name, labels.classes))
            export.place_photo(labels.path(photo), out / name, self.placing)
        io.write_text(out / "classes.txt", "".join(f"{name}\n" for name in labels.classes))

    def check(self, out: Path, photos: Sequence[annotations.Photo], classes: Sequence[str]) -> None:
        """Raise if a class does not fit into a line of classes.txt."""
        for name in classes:
            if name.splitlines() != [name] or name != name.strip() or export.NOT_XML.search(name):
                raise errors.UserError(
                    f"class {name!r}: X-AnyLabeling takes printable names of one line; rename the class"
                )


def _content(photo: LabelledPhoto, name: str, classes: tuple[str, ...]) -> dict[str, object]:
    return {
        "version": _VERSION,
        "flags": {tag: tag in photo.tags for tag in classes if tag not in photo.unsure},
        "shapes": [_shape(box) for box in photo.boxes],
        "imagePath": name,
        "imageData": None,
        "imageHeight": photo.height,
        "imageWidth": photo.width,
    }


def _shape(box: LabelBox) -> dict[str, object]:
    x1, y1, x2, y2 = box.box
    return {
        "label": box.name,
        "score": box.score,
        "points": [[x1, y1], [x2, y1], [x2, y2], [x1, y2]],
        "group_id": None,
        "description": "" if box.why == "imported" else box.why,
        "difficult": box.is_doubtful,
        "shape_type": "rectangle",
        "flags": {},
        "attributes": {},
    }
