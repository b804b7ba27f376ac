"""Pascal VOC folders: true boxes for evaluation, never for training.

Layout: ``Annotations/ID.xml``, ``ImageSets/Main/SPLIT.txt``, ``JPEGImages/ID.*`` and, optionally, ``classes.txt``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import torch

from tag2box.data.photos import photo_size
from tag2box.errors import UserError
from tag2box.types import Objects, Truth

_FLAGS = {"-1", "0", "1"}  # the second column of VOC's per-class lists


@dataclass(frozen=True, slots=True)
class _Object:
    name: str
    box: tuple[float, float, float, float]
    difficult: bool


@dataclass(frozen=True, slots=True)
class _Annotation:
    size: tuple[int, int]
    objects: tuple[_Object, ...]


def read_voc_truth(folder: Path, *, split: str, classes: Sequence[str] | None = None) -> Truth:
    """True objects of one split of a VOC folder; boxes become 0-based with exclusive right and bottom edges.

    Classes are those given, else those of ``classes.txt``, else those the split's XML files name, sorted.
    Objects of other classes are left out. Coordinates are kept in double precision, as official evaluators do.
    """
    root = voc_root(folder)
    ids = read_voc_split(root, split)
    annotations = [_read_annotation(root, image_id) for image_id in ids]
    names = tuple(classes) if classes is not None else _listed_classes(root)
    if not names:
        names = tuple(sorted({o.name for annotation in annotations for o in annotation.objects}))
    if len(set(names)) != len(names):
        raise UserError(f"{root}: classes: expected each name once, got {', '.join(names)}; remove the repeated name")
    index = {name: position for position, name in enumerate(names)}
    objects = tuple(_to_objects(annotation, index) for annotation in annotations)
    return Truth(names, ids, tuple(annotation.size for annotation in annotations), objects)


def voc_root(folder: Path) -> Path:
    """The folder that holds ``Annotations``: the one named, or the only one inside it that does (VOCdevkit/VOC2007)."""
    if (folder / "Annotations").is_dir():
        return folder
    inside = sorted(p.parent for p in folder.glob("*/Annotations")) if folder.is_dir() else []
    if len(inside) == 1:
        return inside[0]
    hint = f"name one of {', '.join(p.name for p in inside)} in it" if inside else "name a VOC folder"
    raise UserError(f"{folder}: expected a folder with Annotations and ImageSets/Main inside; {hint}")


def read_voc_split(root: Path, split: str) -> tuple[str, ...]:
    """Image ids of ``ImageSets/Main/SPLIT.txt``, in the file's order."""
    path = root / "ImageSets" / "Main" / f"{split}.txt"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        known = ", ".join(sorted(p.stem for p in path.parent.glob("*.txt"))) or "none"
        raise UserError(f"{path}: no such split; splits found here: {known}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not readable as a list of image ids ({error})") from None
    ids: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        image_id = _image_id(root, line.strip())
        if image_id in ids:
            raise UserError(f"{path}: line {number}: image {image_id} is already on line {ids[image_id]}; remove one")
        ids[image_id] = number
    return tuple(ids)


def _image_id(root: Path, line: str) -> str:
    """The id of a line, without the -1/0/1 of per-class lists; an id may itself hold spaces."""
    parts = line.rsplit(maxsplit=1)
    if len(parts) == 2 and parts[1] in _FLAGS and not (root / "Annotations" / f"{line}.xml").exists():
        return parts[0]
    return line


def _listed_classes(root: Path) -> tuple[str, ...]:
    path = root / "classes.txt"
    if not path.exists():
        return ()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not readable as a list of class names ({error})") from None
    return tuple(line.strip() for line in lines if line.strip())


def _read_annotation(root: Path, image_id: str) -> _Annotation:
    path = root / "Annotations" / f"{image_id}.xml"
    try:
        tree = ElementTree.parse(path).getroot()
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; expected the annotation of image {image_id} of the split") from None
    except (OSError, ElementTree.ParseError, ValueError) as error:
        raise UserError(f"{path}: not readable as XML ({error}); expected a VOC annotation") from None
    objects = tuple(_read_object(path, number, node) for number, node in enumerate(tree.findall("object"), start=1))
    return _Annotation(_read_size(root, path, tree), objects)


def _read_object(path: Path, number: int, node: ElementTree.Element) -> _Object:
    name = (node.findtext("name") or "").strip()
    if not name:
        raise UserError(f"{path}: object {number}, field name: expected a class name, found none; add it")
    where = f"{path}: object {number} ({name})"
    corners = node.find("bndbox")
    if corners is None:
        raise UserError(f"{where}, field bndbox: missing; expected xmin, ymin, xmax and ymax")
    x1, y1, x2, y2 = (_number(corners, field, where) for field in ("xmin", "ymin", "xmax", "ymax"))
    if x2 < x1 or y2 < y1:
        raise UserError(
            f"{where}, field bndbox: expected xmin <= xmax and ymin <= ymax, got {x1:g} {y1:g} {x2:g} {y2:g}"
        )
    difficult = node.find("difficult") is not None and _number(node, "difficult", where) != 0
    # XML counts pixels from 1 and includes the last one; we count from 0 and exclude it.
    return _Object(name, (x1 - 1, y1 - 1, x2, y2), difficult)


def _number(node: ElementTree.Element, field: str, where: str) -> float:
    text = node.findtext(field)
    if text is None:
        raise UserError(f"{where}, field {field}: missing; expected a number")
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UserError(f"{where}, field {field}: expected a number, got {text.strip()!r}")
    return value


def _read_size(root: Path, path: Path, tree: ElementTree.Element) -> tuple[int, int]:
    """Width and height from the XML, or from the photo itself where a tool left them out or wrote zeros."""
    node = tree.find("size")
    if node is not None:
        width, height = (_number(node, field, f"{path}: size") for field in ("width", "height"))
        if width > 0 and height > 0:
            return int(width), int(height)
    for photo in sorted((root / "JPEGImages").glob(f"{_literal(path.stem)}.*")):
        return photo_size(photo)
    raise UserError(f"{path}: size: expected width and height above 0; write them, or put the photo into JPEGImages")


def _literal(stem: str) -> str:
    return "".join(f"[{c}]" if c in "[]*?" else c for c in stem)


def _to_objects(annotation: _Annotation, index: dict[str, int]) -> Objects:
    kept = [o for o in annotation.objects if o.name in index]
    return Objects(
        boxes=torch.tensor([o.box for o in kept], dtype=torch.float64).reshape(-1, 4),
        labels=torch.tensor([index[o.name] for o in kept], dtype=torch.long),
        difficult=torch.tensor([o.difficult for o in kept], dtype=torch.bool),
        crowd=torch.zeros(len(kept), dtype=torch.bool),
    )
