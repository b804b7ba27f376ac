"""Tags of Pascal VOC folders: image lists, and the names and difficult flags of objects. Boxes are not parsed here."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from tag2box import errors, images, io
from tag2box.formats import datasets, folders, listing, listing as listings

_MAX_BYTES = 16 << 20  # of an annotation
_LARGEST = 1e9  # of a coordinate; arithmetic on larger ones loses pixels and finally overflows
_FLAGS = {"-1", "0", "1"}  # the second column of VOC's per-class lists


@dataclass(frozen=True, slots=True)
class NamedObject:
    """Class and difficult flag of an annotated object."""

    name: str
    difficult: bool


@dataclass(frozen=True, slots=True)
class ObjectNode:
    """An object, its XML node, and its place for messages."""

    named: NamedObject
    node: ElementTree.Element
    where: str


class _NoDoctype(ElementTree.TreeBuilder):
    """Refuses a DOCTYPE: only there can entities be defined, which may expand to gigabytes or fetch files."""

    def doctype(self, name: str, pubid: str | None, system: str | None) -> None:
        """Called at the declaration, before any entity in it is read."""
        raise ValueError("it has a DOCTYPE, which annotations do without; remove it")


def read_xml(path: Path, what: str, limit: int = _MAX_BYTES, kind: str = "a VOC annotation") -> ElementTree.Element:
    """The root of an XML file; error messages say that ``what`` was expected, of this ``kind``."""
    content = io.read_bytes(path, what, limit)
    try:
        return ElementTree.fromstring(content, ElementTree.XMLParser(target=_NoDoctype()))
    except (ElementTree.ParseError, ValueError, LookupError) as error:
        raise errors.UserError(
            f"{path}: not readable as XML ({errors.printable(str(error))}); expected {kind}"
        ) from None


def read_annotation(root: Path, image_id: str, on_fault: listing.OnFault) -> ElementTree.Element | None:
    """The annotation of an image, or None after a fault."""
    path = annotation_path(root, image_id)
    try:
        return read_xml(path, f"the annotation of image {image_id} of the split")
    except errors.UserError as error:
        on_fault(
            listing.Fault(
                "unreadable annotation" if listings.exists(path) else "missing annotation", image_id, str(error)
            )
        )
        return None


def annotation_path(root: Path, image_id: str) -> Path:
    """The path of an image's annotation."""
    return root / "Annotations" / f"{image_id}.xml"


def each_object(tree: ElementTree.Element, path: Path, on_fault: listing.OnFault) -> Iterator[ObjectNode]:
    """The objects of an annotation, in order; one without a name is a fault and is skipped."""
    for count, node in enumerate(tree.findall("object"), start=1):
        try:
            named = _named(node, f"{path}: object {count}")
        except errors.UserError as error:
            on_fault(listing.Fault("bad row", path.stem, str(error)))
        else:
            yield ObjectNode(named, node, f"{path}: object {count} ({named.name})")


def _named(node: ElementTree.Element, where: str) -> NamedObject:
    """The class of an object, and whether it is difficult."""
    name = " ".join((node.findtext("name") or "").split())
    if not name:
        raise errors.UserError(f"{where}, field name: expected a class name, found none; add it")
    difficult = node.find("difficult") is not None and xml_number(node, "difficult", f"{where} ({name})") != 0
    return NamedObject(name, difficult)


def xml_number(node: ElementTree.Element, field: str, where: str) -> float:
    """The number in a child element."""
    text = node.findtext(field)
    if text is None:
        raise errors.UserError(f"{where}, field {field}: missing; expected a number")
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not abs(value) <= _LARGEST:
        raise errors.UserError(
            errors.printable(f"{where}, field {field}: expected a number, got {text.strip()[:40]!r}")
        )
    return value


# ---------------------------------------------------------------- folders


def is_voc(folder: Path) -> bool:
    """Whether a folder is a VOC folder, or contains one or several (VOCdevkit)."""
    return folder.is_dir() and bool(_roots(folder))


def voc_root(folder: Path) -> Path:
    """The folder with ``Annotations``: the given one, or the only such folder inside it (VOCdevkit/VOC2007)."""
    roots = _roots(folder) if folder.is_dir() else []
    if len(roots) == 1:
        return roots[0]
    hint = f"name one of {', '.join(p.name for p in roots)} in it" if roots else "name a VOC folder"
    raise errors.UserError(f"{folder}: expected a folder with Annotations and ImageSets/Main inside; {hint}")


def _roots(folder: Path) -> list[Path]:
    if _is_root(folder):
        return [folder]
    return [inside for inside in sorted(folder.iterdir()) if inside.is_dir() and _is_root(inside)]


def _is_root(folder: Path) -> bool:
    # Names are compared as spelled: if the file system ignores case, COCO's `annotations` would pass for VOC's.
    names = {path.name for path in folder.iterdir() if path.is_dir()}
    return "Annotations" in names or {"JPEGImages", "ImageSets"} <= names


# ---------------------------------------------------------------- image lists


def read_voc_split(root: Path, split: str, on_fault: listing.OnFault = listing.refuse) -> tuple[str, ...]:
    """Image ids of ``ImageSets/Main/SPLIT.txt``, or of a text file of that name, in the file's order."""
    path = root / "ImageSets" / "Main" / f"{split}.txt"
    if not listings.is_regular_file(path):
        known = ", ".join([*split_names(root), datasets.ALL])
        if not listings.is_regular_file(Path(split)):
            raise errors.UserError(f"{path}: no such split; splits found here: {known}")
        path = Path(split)
    ids: dict[str, int] = {}
    for number, line in io.read_lines(path, "a list of image ids").items():
        image_id = _image_id(root, line)
        where = f"{path}: line {number}"
        if listings.path_below(root, f"Annotations/{image_id}") != f"Annotations/{image_id}":
            on_fault(
                listing.Fault("outside the folder", line, f"{where}: {line} is no image of {root}; expected an id")
            )
        elif image_id in ids:
            again = f"{where}: image {image_id} is already on line {ids[image_id]}; remove one"
            on_fault(listing.Fault("listed twice", image_id, again))
        else:
            ids[image_id] = number
    return tuple(ids)


def voc_ids(root: Path, split: str | None, on_fault: listing.OnFault = listing.refuse) -> tuple[str, ...]:
    """Image ids of a split; default: those of the only image list, or of all images if there is no list."""
    lists = split_names(root)
    if split is None and len(lists) > 1:
        raise errors.UserError(
            f"{root}: has several image lists; name one with --split: {', '.join([*lists, datasets.ALL])}"
        )
    if (split == datasets.ALL and datasets.ALL not in lists) or (split is None and not lists):
        return all_ids(root)
    return read_voc_split(root, lists[0] if split is None else split, on_fault)


def all_ids(root: Path) -> tuple[str, ...]:
    """Ids of all annotated images, sorted; of all photos if no image is annotated."""
    folder = root / "Annotations"
    annotated = sorted(path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.xml"))
    return tuple(annotated or sorted(photos_by_id(root / "JPEGImages")))


def split_names(root: Path) -> list[str]:
    """Names of the image lists, without VOC's per-class ones (``dog_train`` beside ``train``)."""
    names = {path.stem for path in (root / "ImageSets" / "Main").glob("*.txt")}
    return sorted(name for name in names if "_" not in name or name.rsplit("_", 1)[1] not in names)


def _image_id(root: Path, line: str) -> str:
    """The id on a line, without the -1/0/1 of per-class lists and the suffix of a photo; ids may contain spaces."""
    if listings.exists(annotation_path(root, line)):
        return line
    parts = line.rsplit(maxsplit=1)
    bare = parts[0] if len(parts) == 2 and parts[1] in _FLAGS else line
    name = Path(bare)
    return name.with_suffix("").as_posix() if name.suffix.lower() in images.SUFFIXES else bare


# ---------------------------------------------------------------- photos and tags


def photos_by_id(folder: Path) -> dict[str, str]:
    """The file of each photo below a folder, by its path without suffix."""
    return {file.with_suffix("").as_posix(): file.as_posix() for file in folders.photo_files(folder)}


def voc_classes(root: Path, given: Sequence[str] | None, seen: set[str]) -> tuple[str, ...]:
    """Classes given, else those of ``classes.txt``, else those seen, sorted."""
    if given is not None:
        return listings.unique_classes(given, f"{root}: classes")
    path = root / "classes.txt"
    listed = tuple(io.read_lines(path, "a list of class names").values()) if path.exists() else ()
    return listings.unique_classes(listed, str(path)) or tuple(sorted(seen))


def list_voc(source: listing.DataSource, on_fault: listing.OnFault = listing.refuse) -> listing.Listing:
    """The images of a split, tagged with the classes of their objects; objects of other classes are skipped.

    A class of difficult objects only is unsure, as in VOC's per-class lists (label 0).
    """
    root = voc_root(source.path)
    ids = voc_ids(root, source.split, on_fault)
    refuse_bare(root, ids, source.split)
    objects = {name: found for name in ids if (found := _objects(root, name, on_fault)) is not None}
    classes = voc_classes(root, source.classes, {o.name for found in objects.values() for o in found})
    folder, files = _photos(root, source, tuple(objects))
    entries = []
    for name, found in objects.items():
        tags = {o.name for o in found if not o.difficult}
        unsure = {o.name for o in found} - tags
        where = str(annotation_path(root, name))
        entries.append(listing.PhotoEntry(name, files[name], _kept(classes, tags), _kept(classes, unsure), where))
    return listing.Listing(folder, classes, tuple(entries))


def list_voc_photos(source: listing.DataSource, on_fault: listing.OnFault = listing.refuse) -> listing.Listing:
    """The images of a split (default: all photos), without tags: annotations are not read."""
    root = voc_root(source.path)
    anything = source.split is None or (source.split == datasets.ALL and datasets.ALL not in split_names(root))
    ids = tuple(sorted(photos_by_id(_folder(root, source)))) if anything else voc_ids(root, source.split, on_fault)
    folder, files = _photos(root, source, ids)
    where = str(root) if anything else f"{root}: split {source.split}"
    return listing.Listing(folder, (), tuple(listing.PhotoEntry(name, files[name], (), (), where) for name in ids))


def refuse_bare(root: Path, ids: Sequence[str], split: str | None) -> None:
    """Raise a ``UserError`` if no image of a split is annotated."""
    if ids and not any(listings.exists(annotation_path(root, name)) for name in ids):
        raise errors.UserError(
            f"{annotation_path(root, ids[0])}: no such file; no image {f'of {split} ' if split else ''}is annotated, "
            "as in VOC's public test sets: take another split, or score on VOC's own server"
        )


def voc_is_annotated(source: listing.DataSource) -> bool:
    """Whether any image of the split (default: of the folder) has an annotation."""
    root = voc_root(source.path)
    ids = all_ids(root) if source.split is None else voc_ids(root, source.split, lambda _: None)
    return any(listings.exists(annotation_path(root, name)) for name in ids)


def _objects(root: Path, image_id: str, on_fault: listing.OnFault) -> tuple[NamedObject, ...] | None:
    tree = read_annotation(root, image_id, on_fault)
    if tree is None:
        return None
    return tuple(found.named for found in each_object(tree, annotation_path(root, image_id), on_fault))


def _folder(root: Path, source: listing.DataSource) -> Path:
    return listings.photos_folder(source.photos, [root / "JPEGImages"], (), root)


def _photos(root: Path, source: listing.DataSource, ids: Sequence[str]) -> tuple[Path, dict[str, str]]:
    """The photos folder and each image's file in it, of any suffix; the usual name if there is none."""
    folder = _folder(root, source)
    known = photos_by_id(folder)
    return folder, {name: known.get(name, f"{name}.jpg") for name in ids}


def _kept(classes: Sequence[str], names: set[str]) -> tuple[str, ...]:
    return tuple(name for name in classes if name in names)
