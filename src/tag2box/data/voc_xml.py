"""VOC annotation files, as far as tags go: the names of the objects, and which are marked difficult. No boxes here."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from tag2box.data.faults import Complain, Fault, plain
from tag2box.errors import UserError

_LARGEST = 1e9  # no coordinate is larger; beyond, arithmetic on them loses pixels and at last overflows


@dataclass(frozen=True, slots=True)
class Mention:
    """An object that an annotation names."""

    name: str
    difficult: bool


@dataclass(frozen=True, slots=True)
class Named:
    """An object, the XML it was read from, and its place for messages."""

    mention: Mention
    node: ElementTree.Element
    where: str


class _NoDoctype(ElementTree.TreeBuilder):
    """Entities can make a gigabyte of a line, or fetch files; only a DOCTYPE can define them."""

    def doctype(self, name: str, pubid: str | None, system: str | None) -> None:
        """Called at the declaration, before any entity in it is read."""
        raise ValueError("it has a DOCTYPE, which annotations do without; remove it")


def read_xml(path: Path, what: str) -> ElementTree.Element:
    """The root of an XML file; ``what`` says in the error what was expected."""
    try:
        return ElementTree.parse(path, ElementTree.XMLParser(target=_NoDoctype())).getroot()
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; expected {what}") from None
    except (OSError, ElementTree.ParseError, ValueError, LookupError) as error:
        raise UserError(f"{path}: not readable as XML ({plain(str(error))}); expected a VOC annotation") from None


def read_annotation(root: Path, image_id: str, complain: Complain) -> ElementTree.Element | None:
    """The annotation of an image, or None after a complaint."""
    path = annotation_path(root, image_id)
    try:
        return read_xml(path, f"the annotation of image {image_id} of the split")
    except UserError as error:
        complain(Fault("unreadable annotation" if path.exists() else "missing annotation", image_id, str(error)))
        return None


def annotation_path(root: Path, image_id: str) -> Path:
    """Where the annotation of an image is to be."""
    return root / "Annotations" / f"{image_id}.xml"


def each_object(tree: ElementTree.Element, path: Path, complain: Complain) -> Iterator[Named]:
    """The objects of an annotation, in order; one without a name is left out after a complaint."""
    for count, node in enumerate(tree.findall("object"), start=1):
        try:
            mention = _mention(node, f"{path}: object {count}")
        except UserError as error:
            complain(Fault("bad row", path.stem, str(error)))
        else:
            yield Named(mention, node, f"{path}: object {count} ({mention.name})")


def _mention(node: ElementTree.Element, where: str) -> Mention:
    """The class of an object, and whether it is difficult."""
    name = " ".join((node.findtext("name") or "").split())
    if not name:
        raise UserError(f"{where}, field name: expected a class name, found none; add it")
    difficult = node.find("difficult") is not None and number(node, "difficult", f"{where} ({name})") != 0
    return Mention(name, difficult)


def number(node: ElementTree.Element, field: str, where: str) -> float:
    """A number in a field of its own."""
    text = node.findtext(field)
    if text is None:
        raise UserError(f"{where}, field {field}: missing; expected a number")
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not abs(value) <= _LARGEST:
        raise UserError(plain(f"{where}, field {field}: expected a number, got {text.strip()[:40]!r}"))
    return value
