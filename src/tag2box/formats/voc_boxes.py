"""True objects of Pascal VOC folders, for evaluation only, and the VOC exports of detections.

Training reads tags through ``voc_tags``. VOC counts pixels from 1 and includes the last; tag2box counts from 0 and
excludes it.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import torch

from tag2box import annotations, errors, images, io, storage
from tag2box.formats import export, listing, voc_tags
from tag2box.labels import labelled
from tag2box.metrics.voc_ap import to_voc_pixels

_SURROGATE = re.compile("[\ud800-\udfff]")  # of file names that are not UTF-8
_Box = tuple[float, float, float, float]
_PHOTOS_IN_MEMORY = 1000  # of result files while they are written


class Voc:
    """A folder in the layout of Pascal VOC's devkit."""

    what = "a VOC folder"
    has_tags = True
    names_splits = True

    def recognises(self, path: Path) -> bool:
        """Folders with a folder Annotations, or with JPEGImages and ImageSets."""
        return voc_tags.is_voc(path)

    def photos(self, source: listing.DataSource, on_fault: listing.OnFault) -> listing.Listing:
        """The photos of a split; default: all."""
        return voc_tags.list_voc_photos(source, on_fault)

    def tags(self, source: listing.DataSource, on_fault: listing.OnFault) -> listing.Listing:
        """The photos of a split, tagged with the classes of their objects."""
        return voc_tags.list_voc(source, on_fault)

    def splits(self, source: listing.DataSource) -> tuple[str, ...]:
        """The names of its image lists."""
        return tuple(voc_tags.split_names(voc_tags.voc_root(source.path)))

    def has_boxes(self, source: listing.DataSource) -> bool:
        """Whether any image of the split is annotated; those of VOC's public test sets are not."""
        return voc_tags.voc_is_annotated(source)

    def truth(self, source: listing.DataSource, on_fault: listing.OnFault) -> annotations.Truth:
        """The objects of a split."""
        return read_voc_truth(
            source.path, split=source.split, classes=source.classes, photos=source.photos, on_fault=on_fault
        )


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
    on_fault: listing.OnFault = listing.refuse,
) -> annotations.Truth:
    """True objects of one split of a VOC folder; boxes become 0-based with exclusive right and bottom edges.

    Default classes: those of ``classes.txt``, else those named in the XML files of the split, sorted. Objects of other
    classes are left out. Coordinates are kept in double precision, as in official evaluators.
    """
    root = voc_tags.voc_root(folder)
    ids = voc_tags.voc_ids(root, split, on_fault)
    voc_tags.refuse_bare(root, ids, split)
    at = photos or root / "JPEGImages"
    files = voc_tags.photos_by_id(at)
    read = {
        name: annotation
        for name in ids
        if (annotation := _read(root, name, at / files[name] if name in files else None, on_fault)) is not None
    }
    names = voc_tags.voc_classes(root, classes, {o.name for annotation in read.values() for o in annotation.objects})
    index = {name: position for position, name in enumerate(names)}
    objects = tuple(_to_objects(annotation, index) for annotation in read.values())
    return annotations.Truth(names, tuple(read), tuple(annotation.size for annotation in read.values()), objects)


def _read(root: Path, image_id: str, photo: Path | None, on_fault: listing.OnFault) -> _Annotation | None:
    """Size and objects of an image, or None after a fault."""
    path = voc_tags.annotation_path(root, image_id)
    tree = voc_tags.read_annotation(root, image_id, on_fault)
    if tree is None:
        return None
    objects = []
    for found in voc_tags.each_object(tree, path, on_fault):
        try:
            objects.append(_Object(found.named.name, _read_box(found.node, found.where), found.named.difficult))
        except errors.UserError as error:
            on_fault(listing.Fault("bad box", image_id, str(error)))
    try:
        return _Annotation(_read_size(path, tree, photo), tuple(objects))
    except errors.UserError as error:
        on_fault(listing.Fault("bad row", image_id, str(error)))
        return None


def _read_box(node: ElementTree.Element, where: str) -> _Box:
    corners = node.find("bndbox")
    if corners is None:
        raise errors.UserError(f"{where}, field bndbox: missing; expected xmin, ymin, xmax and ymax")
    x1, y1, x2, y2 = (voc_tags.xml_number(corners, field, where) for field in ("xmin", "ymin", "xmax", "ymax"))
    if x2 < x1 or y2 < y1:
        raise errors.UserError(
            f"{where}, field bndbox: expected xmin <= xmax and ymin <= ymax, got {x1:g} {y1:g} {x2:g} {y2:g}"
        )
    return x1 - 1, y1 - 1, x2, y2


def _read_size(path: Path, tree: ElementTree.Element, photo: Path | None) -> tuple[int, int]:
    """Width and height from the XML, or from the photo itself if they are missing or zero."""
    node = tree.find("size")
    if node is not None:
        width, height = (voc_tags.xml_number(node, field, f"{path}: size") for field in ("width", "height"))
        if width >= 1 and height >= 1:
            return int(width), int(height)
    if photo is None:
        raise errors.UserError(
            f"{path}: size: expected width and height above 0; write them, or put the photo into JPEGImages"
        )
    return images.photo_size(photo)


def _to_objects(annotation: _Annotation, index: dict[str, int]) -> annotations.Objects:
    kept = [o for o in annotation.objects if o.name in index]
    return annotations.Objects(
        boxes=torch.tensor([o.box for o in kept], dtype=torch.float64).reshape(-1, 4),
        labels=torch.tensor([index[o.name] for o in kept], dtype=torch.long),
        difficult=torch.tensor([o.difficult for o in kept], dtype=torch.bool),
        crowd=torch.zeros(len(kept), dtype=torch.bool),
    )


# ---------------------------------------------------------------- export


class VocExport(export.LabelExport):
    """A VOC folder: Annotations/*.xml, ImageSets/Main/*.txt (default.txt without splits) and classes.txt.

    Coordinates are whole pixels within the photo, counted from 1, the last included. A box that reaches the edge of its
    photo is marked truncated, a doubtful one difficult. Of labels, JPEGImages has links to the photos.
    """

    what = "a VOC folder"
    is_folder = True

    def __call__(
        self,
        out: Path,
        photos: Sequence[annotations.Photo],
        classes: Sequence[str],
        detections: Mapping[str, annotations.Detections],
    ) -> None:
        """Write detections, without the photos."""
        self.placing = "none"
        self.write(out, labelled.from_detections(photos, classes, detections))

    def write(self, out: Path, labels: labelled.LabelledPhotos) -> None:
        """Write one XML file per photo, the image lists and the classes, and link the photos."""
        ids = _voc_ids([photo.id for photo in labels.photos])
        lists: dict[str, list[str]] = {} if labels.photos else {"default": []}
        for name, photo in zip(ids, labels.photos, strict=True):
            tree = _annotation_tree(photo, labels.path(photo))
            ElementTree.indent(tree)
            text = ElementTree.tostring(tree, encoding="unicode")
            io.write_text(voc_tags.annotation_path(out, name), f"{text}\n")
            export.place_photo(
                labels.path(photo), out / "JPEGImages" / f"{name}{Path(photo.file).suffix}", self.placing
            )
            lists.setdefault(photo.split or "default", []).append(name)
        files = storage.distinct_file_names(lists)
        for split, names in lists.items():
            io.write_text(out / "ImageSets" / "Main" / f"{files[split]}.txt", "".join(f"{name}\n" for name in names))
        io.write_text(out / "classes.txt", "".join(f"{name}\n" for name in labels.classes))

    def check(self, out: Path, photos: Sequence[annotations.Photo], classes: Sequence[str]) -> None:
        """Raise if XML cannot hold the name of a class."""
        for name in classes:
            if not name or name != " ".join(name.split()) or export.NOT_XML.search(name):
                raise errors.UserError(
                    f"class {name!r}: VOC takes printable names with single spaces; rename the class"
                )


def _voc_ids(photo_ids: Sequence[str]) -> list[str]:
    """Ids that are file names below Annotations: in folders, as the photos' own ids are."""
    files = storage.distinct_file_names(photo_ids)
    marks = {name: file.removeprefix(storage.safe_file_name(name)) for name, file in files.items()}
    return ["/".join(map(storage.safe_file_name, name.split("/"))) + marks[name] for name in photo_ids]


def _annotation_tree(photo: labelled.LabelledPhoto, path: Path) -> ElementTree.Element:
    tree = ElementTree.Element("annotation")
    for field, text in (("folder", path.parent.name), ("filename", path.name)):
        ElementTree.SubElement(tree, field).text = export.NOT_XML.sub("\ufffd", text)
    _add_fields(ElementTree.SubElement(tree, "source"), {"database": "tag2box"})
    _add_fields(ElementTree.SubElement(tree, "size"), {"width": photo.width, "height": photo.height, "depth": 3})
    _add_fields(tree, {"segmented": 0})
    for box in photo.boxes:
        x1, y1, x2, y2 = _voc_box(box.box, (photo.width, photo.height))
        is_cut = int(x1 == 1 or y1 == 1 or x2 == photo.width or y2 == photo.height)
        node = ElementTree.SubElement(tree, "object")
        difficult = int(box.is_doubtful)
        _add_fields(node, {"name": box.name, "pose": "Unspecified", "truncated": is_cut, "difficult": difficult})
        _add_fields(ElementTree.SubElement(node, "bndbox"), {"xmin": x1, "ymin": y1, "xmax": x2, "ymax": y2})
    return tree


def _voc_box(box: Sequence[float], size: tuple[int, int]) -> tuple[int, ...]:
    """Whole 1-based inclusive pixels, at least one, within the photo."""
    first = [min(max(round(edge) + 1, 1), side) for edge, side in zip(box[:2], size, strict=True)]
    last = [min(max(round(edge), low), side) for edge, low, side in zip(box[2:], first, size, strict=True)]
    return (*first, *last)


def _add_fields(node: ElementTree.Element, fields: Mapping[str, str | int]) -> None:
    for name, value in fields.items():
        ElementTree.SubElement(node, name).text = str(value)


class VocResultsExport:
    """The files that VOC's evaluation server takes, one per class, with boxes of all scores."""

    what = "a folder of VOC result files"
    is_folder = True
    all_scores = True

    def __init__(self, split: str = "test") -> None:
        self.split = split

    def __call__(
        self,
        out: Path,
        photos: Sequence[annotations.Photo],
        classes: Sequence[str],
        detections: Mapping[str, annotations.Detections],
    ) -> None:
        """Write the files."""
        write_voc_results(out, export.DetectionsOf(photos, detections), classes, split=self.split)

    def check(self, out: Path, photos: Sequence[annotations.Photo], classes: Sequence[str]) -> None:
        """Raise if a photo's id does not fit into a line, or a class into a file name."""
        for photo in photos:
            if photo.id.splitlines() != [photo.id] or photo.id != photo.id.strip() or _SURROGATE.search(photo.id):
                raise errors.UserError(f"photo {photo.id!r}: VOC result files have one line per box; rename the photo")
        io.check_writable(out / max(_result_files(classes, self.split), key=len, default="none.txt"))


def _result_files(classes: Sequence[str], split: str) -> list[str]:
    files = storage.distinct_file_names(classes)
    return [f"comp4_det_{storage.safe_file_name(split)}_{files[name]}.txt" for name in classes]


def write_voc_results(
    folder: Path, detections: Mapping[str, annotations.Detections], classes: Sequence[str], *, split: str
) -> None:
    """Write ``comp4_det_SPLIT_CLASS.txt`` for each class, as VOC's evaluation server takes them."""
    files = _result_files(classes, split)
    with ExitStack() as stack:
        parts = [stack.enter_context(io.replacing(folder / name)) for name in files]
        rows: list[list[str]] = [[] for _ in parts]
        for number, (image_id, found) in enumerate(detections.items(), start=1):
            pixels = to_voc_pixels(found.boxes.double()).tolist()
            for box, score, label in zip(pixels, found.scores.double().tolist(), found.labels.tolist(), strict=True):
                rows[label].append(f"{image_id} {score:.9g} " + " ".join(f"{edge:.3f}" for edge in box) + "\n")
            if number % _PHOTOS_IN_MEMORY == 0:
                _append(parts, rows)
        _append(parts, rows)


def _append(parts: Sequence[Path], rows: Sequence[list[str]]) -> None:
    """Move the lines of each class to the end of its file."""
    for part, lines in zip(parts, rows, strict=True):
        with part.open("a", encoding="utf-8") as file:
            file.writelines(lines)
        lines.clear()
