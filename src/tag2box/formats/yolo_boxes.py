"""True objects of YOLO datasets, for evaluation only, and the YOLO export of detections.

Training reads tags through ``yolo_tags``. A line of a label file is ``class x y width height``, where x and y are the
centre, all as fractions of the photo's size; or ``class x1 y1 x2 y2 ...``, the outline of the object.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from tag2box import annotations, io, storage
from tag2box.formats import export, listing, yolo_tags
from tag2box.formats.listing import DataSource, Fault, Listing, OnFault, refuse
from tag2box.labels.labelled import LabelledPhoto, LabelledPhotos

_SLACK = 0.01  # by which a fraction may leave the photo: rounding is no error
_BOX_COLUMNS = (4, 5)  # the fifth is a score
_YOLO_SPLITS = {"training": "train", "valid": "val", "validation": "val", "testing": "test"}


class Yolo:
    """A YOLO dataset: a data.yaml, its folder, or a folder with images and labels."""

    what = "a YOLO folder"
    has_tags = True
    names_splits = True

    def recognises(self, path: Path) -> bool:
        """YAML files, folders with a data.yaml, and folders with images and labels."""
        return yolo_tags.is_yolo(path)

    def photos(self, source: DataSource, on_fault: OnFault) -> Listing:
        """The photos of a split; default: all."""
        return yolo_tags.list_yolo_photos(source, on_fault)

    def tags(self, source: DataSource, on_fault: OnFault) -> Listing:
        """The photos of a split, tagged with the classes in their label files."""
        return yolo_tags.list_yolo(source, on_fault)

    def splits(self, source: DataSource) -> tuple[str, ...]:
        """The names of its splits that are not the same folders."""
        found = yolo_tags.read_layout(source).splits
        return tuple(found) if len(set(found.values())) == len(found) else ()

    def has_boxes(self, source: DataSource) -> bool:
        """Whether any label file of the split has a box."""
        layout = yolo_tags.read_layout(source)
        listed = yolo_tags.list_yolo_photos(source, _ignore)
        labels = (layout.root / yolo_tags.label_file(entry.file) for entry in listed.entries)
        return any(line.columns for label in labels for line in yolo_tags.label_lines(layout, label, _ignore))

    def truth(self, source: DataSource, on_fault: OnFault) -> annotations.Truth:
        """The objects of a split."""
        return read_yolo_truth(source, on_fault)


def read_yolo_truth(source: DataSource, on_fault: OnFault = refuse) -> annotations.Truth:
    """True objects of one split of a YOLO dataset, in pixels; photo sizes are read from the photos."""
    layout = yolo_tags.read_layout(source)
    classes = listing.select_classes(layout.classes, source.classes, str(layout.where))
    index = {name: position for position, name in enumerate(classes)}
    photos, entries = listing.find_listed(yolo_tags.list_yolo_photos(source, on_fault, is_all=False), on_fault)
    objects = []
    for photo, entry in zip(photos, entries, strict=True):
        boxes, labels = [], []
        for line in yolo_tags.label_lines(layout, layout.root / yolo_tags.label_file(entry.file), on_fault):
            box = _read_box(line, photo, on_fault)
            if box is not None and layout.classes[line.number] in index:
                boxes.append(box)
                labels.append(index[layout.classes[line.number]])
        objects.append(_to_objects(boxes, labels))
    sizes = tuple((photo.width, photo.height) for photo in photos)
    return annotations.Truth(classes, tuple(photo.id for photo in photos), sizes, tuple(objects))


def _ignore(fault: Fault) -> None:
    """Error callback that skips."""


def _to_objects(boxes: Sequence[Sequence[float]], labels: Sequence[int]) -> annotations.Objects:
    none = torch.zeros(len(boxes), dtype=torch.bool)
    corners = torch.tensor(boxes, dtype=torch.float64).reshape(-1, 4)
    return annotations.Objects(corners, torch.tensor(labels, dtype=torch.long), none, none)


def _read_box(
    line: yolo_tags.YoloLine, photo: annotations.Photo, on_fault: OnFault
) -> tuple[float, float, float, float] | None:
    """The box of a line in pixels, or None after a fault."""
    try:
        values = [float(text) for text in line.columns]
    except ValueError:
        values = []
    points = values[:4] if len(values) in _BOX_COLUMNS else values
    is_outline = len(values) >= 6 and len(values) % 2 == 0
    if not (len(points) == 4 or is_outline) or not all(-_SLACK <= value <= 1 + _SLACK for value in points):
        fault = f"{line.where}: expected x, y, width and height from 0 to 1, got {' '.join(line.columns)[:60]!r}"
        on_fault(Fault("bad box", photo.id, f"{fault}; correct the line"))
        return None
    if is_outline:
        xs, ys = points[0::2], points[1::2]
        x1, y1, x2, y2 = min(xs), min(ys), max(xs), max(ys)
    else:
        x, y, width, height = points
        x1, y1, x2, y2 = x - width / 2, y - height / 2, x + width / 2, y + height / 2
    return x1 * photo.width, y1 * photo.height, x2 * photo.width, y2 * photo.height


# ---------------------------------------------------------------- export


class YoloExport(export.LabelExport):
    """A YOLO dataset: labels/*.txt, images/* and a data.yaml, as ultralytics trains from.

    ``images`` has links to the photos (copies if the system has no links). Boxes are cut at the edges of the photo.
    Without splits, ``train`` and ``val`` of the data.yaml are the same folder; a missing one of two is the other. YOLO
    has no ignore regions: doubtful boxes are left out.
    """

    what = "a YOLO folder"
    is_folder = True

    def write(self, out: Path, labels: LabelledPhotos) -> None:
        """Write one label file and one link per photo, and the data.yaml."""
        files = storage.distinct_file_names(photo.id for photo in labels.photos)
        names = {name: number for number, name in enumerate(labels.classes)}
        splits = storage.distinct_file_names(photo.split for photo in labels.photos if photo.split)
        for photo in labels.photos:
            place = Path(splits.get(photo.split, "")) / files[photo.id]
            lines = _label_lines(photo, names)
            io.write_text(out / "labels" / f"{place}.txt", "".join(f"{line}\n" for line in lines))
            export.place_photo(labels.path(photo), out / "images" / f"{place}{Path(photo.file).suffix}", self.placing)
        io.make_folder(out / "images")
        named = "".join(f"  {number}: {_quoted(name)}\n" for name, number in names.items())
        io.write_text(out / "data.yaml", f"{_split_lines(splits)}names:\n{named}")


def _split_lines(splits: Mapping[str, str]) -> str:
    """The lines of data.yaml that name the folders; ultralytics requires both train and val."""
    if not splits:
        return "train: images\nval: images\n"
    places = {_YOLO_SPLITS.get(name.lower(), name): f"images/{file}" for name, file in splits.items()}
    first = next(iter(places.values()))
    places = {"train": places.get("train", first), "val": places.get("val", places.get("test", first)), **places}
    return "".join(
        f"{name if name.isidentifier() else _quoted(name)}: {_quoted(place)}\n" for name, place in places.items()
    )


def _label_lines(photo: LabelledPhoto, names: Mapping[str, int]) -> list[str]:
    lines = []
    for label in photo.labels:
        x1, y1, x2, y2 = label.box
        left, right = (min(max(x / photo.width, 0.0), 1.0) for x in (x1, x2))
        top, bottom = (min(max(y / photo.height, 0.0), 1.0) for y in (y1, y2))
        if right > left and bottom > top:
            box = ((left + right) / 2, (top + bottom) / 2, right - left, bottom - top)
            lines.append(f"{names[label.name]} " + " ".join(f"{value:.9f}" for value in box))
    return lines


def _quoted(name: str) -> str:
    """A YAML string in double quotes."""
    return '"' + "".join(c if c.isprintable() and c not in '"\\' else _escaped(c) for c in name) + '"'


def _escaped(character: str) -> str:
    if character in '"\\':
        return f"\\{character}"
    return f"\\u{ord(character):04x}" if ord(character) < 0x10000 else f"\\U{ord(character):08x}"
