"""Boxes of CVAT for images 1.1, for evaluation and review only, and the CVAT export of labels.

Training reads tags through ``tool_tags``. https://docs.cvat.ai/docs/dataset_management/formats/format-cvat/
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from tag2box import annotations, io, storage
from tag2box.formats import annotated, export, listing, tool_tags
from tag2box.labels.labelled import LabelBox, LabelledPhoto, LabelledPhotos

_CORNERS = ("xtl", "ytl", "xbr", "ybr")
_ATTRIBUTES = (
    {
        "name": tool_tags.DOUBTFUL,
        "mutable": False,
        "input_type": "checkbox",
        "default_value": "false",
        "values": ["false"],
    },
    {"name": "score", "mutable": False, "input_type": "text", "default_value": "", "values": [""]},
)


class Cvat:
    """An annotations.xml of CVAT for images 1.1, or a folder with it."""

    what = "a CVAT file"
    has_tags = True
    names_splits = False

    def recognises(self, path: Path) -> bool:
        """XML files with annotations, and folders with an annotations.xml."""
        return tool_tags.is_cvat(path)

    def photos(self, source: listing.DataSource, on_fault: listing.OnFault) -> listing.Listing:
        """Its images."""
        return tool_tags.list_cvat(source, on_fault)

    def tags(self, source: listing.DataSource, on_fault: listing.OnFault) -> listing.Listing:
        """Its images, with the labels of their tags and shapes."""
        return tool_tags.list_cvat(source, on_fault)

    def has_boxes(self, source: listing.DataSource) -> bool:
        """Whether any image has a box."""
        return tool_tags.read_cvat(source.path).find("image/box") is not None

    def truth(self, source: listing.DataSource, on_fault: listing.OnFault) -> annotations.Truth:
        """The boxes of its images; other shapes are left out."""
        root = tool_tags.read_cvat(source.path)
        rows = []
        for node, name, where in tool_tags.cvat_images(source.path, root, on_fault):
            boxes = _boxes(node, name, where, on_fault)
            rows.append(annotated.AnnotatedImage(name, lambda *_, found=boxes: found, _size(node)))
        return annotated.to_truth(source, tool_tags.list_cvat(source, on_fault), rows, on_fault)


def _boxes(node: ElementTree.Element, name: str, where: str, on_fault: listing.OnFault) -> Sequence[annotated.NamedBox]:
    found = []
    for number, box in enumerate(node.iterfind("box")):
        try:
            corners = annotated.corners_of([float(box.get(field, "nan")) for field in _CORNERS])
        except ValueError:
            corners = None
        if corners is None:
            line = f"{where}, box {number}: expected xtl <= xbr and ytl <= ybr, all numbers; correct the file"
            on_fault(listing.Fault("bad box", name, line))
        elif box.get("label"):
            found.append(annotated.NamedBox(box.get("label", ""), corners, tool_tags.cvat_is_doubtful(box)))
    return found


def _size(node: ElementTree.Element) -> tuple[int, int] | None:
    sides = [node.get(field, "") for field in ("width", "height")]
    is_known = all(side.isascii() and side.isdecimal() and 0 < len(side) < 8 and int(side) for side in sides)
    return (int(sides[0]), int(sides[1])) if is_known else None


# ---------------------------------------------------------------- export


class CvatExport(export.LabelExport):
    """A folder for CVAT: annotations.xml, labels.json and images.

    Create a task with the photos; paste labels.json into the "Raw" tab of its labels; upload annotations.xml as
    "CVAT 1.1". Tags are tags, ignore regions are boxes with the attribute ``doubtful``. Splits are subsets of a
    project, whose photos are in folders of their own.
    """

    what = "a CVAT folder"
    is_folder = True

    def write(self, out: Path, labels: LabelledPhotos) -> None:
        """Write both files, and link the photos."""
        root = ElementTree.Element("annotations")
        ElementTree.SubElement(root, "version").text = "1.1"
        _add_meta(ElementTree.SubElement(root, "meta"), labels)
        for number, photo in enumerate(labels.photos):
            _add_image(root, number, photo)
            export.place_photo(labels.path(photo), out / "images" / _subset(photo) / photo.file, self.placing)
        ElementTree.indent(root)
        text = ElementTree.tostring(root, encoding="unicode")
        io.write_text(out / "annotations.xml", f'<?xml version="1.0" encoding="utf-8"?>\n{text}\n')
        io.write_json(out / "labels.json", [{"name": name, "attributes": list(_ATTRIBUTES)} for name in labels.classes])

    def check(self, out: Path, photos: Sequence[annotations.Photo], classes: Sequence[str]) -> None:
        """Raise if XML cannot hold the name of a class or a photo."""
        export.check_xml_names("CVAT", photos, classes)


def _subset(photo: LabelledPhoto) -> str:
    """The subset of a photo, which is the name of a folder as well."""
    return storage.safe_file_name(photo.split) if photo.split else ""


def _add_meta(meta: ElementTree.Element, labels: LabelledPhotos) -> None:
    """Describe a task; with splits, a project with one task per subset."""
    sizes = Counter(_subset(photo) for photo in labels.photos)
    is_project = set(sizes) > {""} or (bool(sizes) and "" not in sizes)
    owner = ElementTree.SubElement(meta, "project" if is_project else "task")
    ElementTree.SubElement(owner, "name").text = "tag2box"
    declared = ElementTree.SubElement(owner, "labels")
    for name in labels.classes:
        _add_label(declared, name)
    tasks = ElementTree.SubElement(owner, "tasks") if is_project else None
    for split, size in sizes.items() if sizes else {"": 0}.items():
        task = owner if tasks is None else ElementTree.SubElement(tasks, "task")
        fields = {"size": str(size), "mode": "annotation", **({"subset": split} if tasks is not None else {})}
        for field, text in fields.items():
            ElementTree.SubElement(task, field).text = text


def _add_label(declared: ElementTree.Element, name: str) -> None:
    label = ElementTree.SubElement(declared, "label")
    ElementTree.SubElement(label, "name").text = name
    ElementTree.SubElement(label, "type").text = "any"
    attributes = ElementTree.SubElement(label, "attributes")
    for attribute in _ATTRIBUTES:
        node = ElementTree.SubElement(attributes, "attribute")
        for field in ("name", "mutable", "input_type", "default_value"):
            ElementTree.SubElement(node, field).text = str(attribute[field])
        ElementTree.SubElement(node, "values").text = "false" if attribute["input_type"] == "checkbox" else ""


def _add_image(root: ElementTree.Element, number: int, photo: LabelledPhoto) -> None:
    subset = {"subset": _subset(photo)} if photo.split else {}
    size = {"width": str(photo.width), "height": str(photo.height)}
    node = ElementTree.SubElement(root, "image", {"id": str(number), "name": photo.file, **subset, **size})
    for name in photo.tags:
        ElementTree.SubElement(node, "tag", {"label": name, "source": "manual"})
    for name in photo.unsure:
        _add_attribute(
            ElementTree.SubElement(node, "tag", {"label": name, "source": "manual"}), tool_tags.DOUBTFUL, "true"
        )
    for box in photo.boxes:
        _add_box(node, box)


def _add_box(node: ElementTree.Element, box: LabelBox) -> None:
    corners = {
        field: f"{value:.6g}" if value == 0 else repr(round(value, 4))
        for field, value in zip(_CORNERS, box.box, strict=True)
    }
    source = "auto" if box.source == "label" else "manual"
    made = ElementTree.SubElement(
        node, "box", {"label": box.name, "source": source, "occluded": "0", **corners, "z_order": "0"}
    )
    _add_attribute(made, tool_tags.DOUBTFUL, "true" if box.is_doubtful else "false")
    if box.score is not None:
        _add_attribute(made, "score", f"{box.score:.6g}")


def _add_attribute(node: ElementTree.Element, name: str, value: str) -> None:
    ElementTree.SubElement(node, "attribute", {"name": name}).text = value
