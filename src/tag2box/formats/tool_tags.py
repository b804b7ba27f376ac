"""Tags in the files of annotation tools: CVAT, Label Studio, X-AnyLabeling (and labelme), FiftyOne. No box is parsed.

=================  ============================================================================================
CVAT               ``annotations.xml`` of "CVAT for images 1.1": ``tag`` elements, and the labels of shapes
Label Studio       JSON list of tasks: ``choices``, and the labels of rectangles; of several annotations, the last
X-AnyLabeling      a JSON file beside each photo: ``flags`` that are true, and the labels of shapes
FiftyOne           JSON of image classification: ``classes`` and ``labels``, of one class or of several
=================  ============================================================================================

A class that a photo has only in shapes marked as doubtful or difficult is unsure: neither present nor absent.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree

from pydantic import Field, TypeAdapter, ValidationError

from tag2box import errors, images, io
from tag2box.formats import datasets, folders, listing, voc_tags

T = TypeVar("T")
DOUBTFUL = "doubtful"
"""Mark of an ignore region: an attribute of a CVAT box, a note on a region of Label Studio."""
_XML_LIMIT = 1 << 30
_PEEK = 1 << 16  # bytes that tell a format
_UPLOADED = re.compile(r"[0-9a-f]{8}-")  # what Label Studio puts before the name of an uploaded file
_PROBED = 50  # photos without a file beside them before a folder is taken for another format
_Name = Annotated[str, Field(min_length=1, max_length=1000)]


@dataclass(frozen=True, slots=True)
class _Mentions:
    """Class names of a photo, each with whether it is sure."""

    found: dict[str, bool] = field(default_factory=dict)

    def add(self, name: str, *, is_sure: bool = True) -> None:
        """Add a mention of a class."""
        self.found[name] = self.found.get(name, False) or is_sure

    def row(self, image: str, where: str) -> listing.TagRow:
        """The row of a photo."""
        present = tuple(name for name, is_sure in self.found.items() if is_sure)
        return listing.TagRow(image, present, where, tuple(name for name in self.found if name not in present))


def _list(
    source: listing.DataSource,
    rows: Sequence[listing.TagRow],
    declared: Sequence[str],
    places: Sequence[Path],
    on_fault: listing.OnFault,
) -> listing.Listing:
    """A listing of rows; the classes are those declared, then others that were seen."""
    folder = listing.photos_folder(source.photos, places, (row.image for row in rows), source.path)
    seen = {name for row in rows for name in (*row.tags, *row.unsure)}
    known = (*dict.fromkeys(declared), *sorted(seen - set(declared)))
    classes = listing.select_classes(known, source.classes, str(source.path))
    wanted = frozenset(classes)

    def only(names: Sequence[str]) -> tuple[str, ...]:
        return tuple(name for name in names if name in wanted)

    kept = [listing.TagRow(row.image, only(row.tags), row.where, only(row.unsure)) for row in rows]
    return listing.list_rows(kept, folder, classes, on_fault)


def peek(path: Path) -> str:
    """The beginning of a file, to recognise its format; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(_PEEK).decode("utf-8-sig", errors="replace")
    except OSError:
        return ""


def checked_row(adapter: TypeAdapter[T], row: object, where: str, on_fault: listing.OnFault) -> T | None:
    """A validated part of a JSON file, or None after a fault."""
    try:
        return adapter.validate_python(row)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
        line = f"{where}{place}: {first['msg'][0].lower()}{first['msg'][1:]}; correct the file"
        on_fault(listing.Fault("bad box" if ".points" in place or ".value" in place else "bad row", where, line))
        return None


# ---------------------------------------------------------------- CVAT


def cvat_file(path: Path) -> Path:
    """The XML file of a dataset: the path itself, or ``annotations.xml`` in the folder."""
    return path / "annotations.xml" if path.is_dir() else path


def is_cvat(path: Path) -> bool:
    """Whether a path is an XML file with ``annotations``, or a folder with such a file."""
    file = cvat_file(path)
    return file.suffix.lower() == ".xml" and listing.is_regular_file(file) and "<annotations" in peek(file)


def read_cvat(path: Path) -> ElementTree.Element:
    """The root of a CVAT file for images."""
    file = cvat_file(path)
    root = voc_tags.read_xml(file, "annotations.xml of CVAT for images 1.1", _XML_LIMIT, "a CVAT file")
    if root.tag != "annotations" or root.find("track") is not None:
        raise errors.UserError(f"{file}: expected CVAT for images 1.1, got another XML format or a video; export it so")
    return root


def cvat_classes(root: ElementTree.Element) -> tuple[str, ...]:
    """The labels that the task or project declares."""
    return tuple(dict.fromkeys(text for node in root.iterfind(".//labels/label/name") if (text := node.text)))


def cvat_images(
    path: Path, root: ElementTree.Element, on_fault: listing.OnFault
) -> Iterator[tuple[ElementTree.Element, str, str]]:
    """The images with a name: node, name (below its subset, if the photo is there), and place for messages."""
    file = cvat_file(path)
    for number, node in enumerate(root.iterfind("image")):
        where, name, subset = f"{file}: image {number}", node.get("name", ""), node.get("subset")
        if subset and name and listing.is_regular_file(file.parent / "images" / subset / name):
            name = f"{subset}/{name}"
        if name:
            yield node, name, where
        else:
            on_fault(listing.Fault("bad row", where, f"{where}: attribute name is missing; correct the file"))


def cvat_is_doubtful(node: ElementTree.Element) -> bool:
    """Whether a shape has the attribute ``doubtful`` (or ``difficult``) set."""
    return any(
        own.get("name") in {DOUBTFUL, "difficult"} and (own.text or "").strip().lower() == "true"
        for own in node.iterfind("attribute")
    )


def list_cvat(source: listing.DataSource, on_fault: listing.OnFault = listing.refuse) -> listing.Listing:
    """The images of a CVAT file, with the labels of their tags and shapes."""
    root, file = read_cvat(source.path), cvat_file(source.path)
    rows = []
    for node, name, where in cvat_images(source.path, root, on_fault):
        mentions = _Mentions()
        for child in node:
            label = child.get("label")
            if label:
                mentions.add(label, is_sure=not cvat_is_doubtful(child))
            elif child.tag in {"tag", "box"}:
                on_fault(listing.Fault("bad row", name, f"{where}: a {child.tag} has no label; correct the file"))
        rows.append(mentions.row(name, where))
    return _list(source, rows, cvat_classes(root), (file.parent / "images", file.parent), on_fault)


# ---------------------------------------------------------------- Label Studio


@dataclass(frozen=True, slots=True)
class _Labels:
    """The names in a region's value; nothing of its place."""

    choices: tuple[_Name, ...] = ()
    rectanglelabels: tuple[_Name, ...] = ()


@dataclass(frozen=True, slots=True)
class RegionNote:
    """The note of a reviewer, or of this program, on a region."""

    text: tuple[str, ...] | str = ()

    @property
    def is_doubtful(self) -> bool:
        """Whether it marks an ignore region."""
        return DOUBTFUL in ((self.text,) if isinstance(self.text, str) else self.text)


@dataclass(frozen=True, slots=True)
class _NamedRegion:
    value: _Labels = _Labels()
    meta: RegionNote = RegionNote()


_REGION = TypeAdapter(_NamedRegion)


def label_studio_file(path: Path) -> Path:
    """The JSON file of tasks: the path itself, or ``tasks.json`` in the folder."""
    return path / "tasks.json" if path.is_dir() else path


def is_label_studio(path: Path) -> bool:
    """Whether a path is a JSON list of tasks, or a folder with one."""
    file = label_studio_file(path)
    if file.suffix.lower() != ".json" or not listing.is_regular_file(file):
        return False
    start = peek(file).lstrip()
    return start.startswith("[") and '"data"' in start


@dataclass(frozen=True, slots=True)
class Task:
    """A task of Label Studio: the photo, the regions of its last annotation (else prediction), and its place."""

    image: str
    regions: tuple[object, ...]
    where: str


def label_studio_tasks(path: Path, on_fault: listing.OnFault) -> Iterator[Task]:
    """The tasks of a file; one without a photo is a fault and is skipped."""
    file = label_studio_file(path)
    content = io.read_json(file, "a JSON list of Label Studio tasks")
    if not isinstance(content, list):
        raise errors.UserError(f"{file}: expected a list of Label Studio tasks; export the project as JSON")
    for number, task in enumerate(content):
        where = f"{file}: task {number}"
        data = task.get("data") if isinstance(task, dict) else None
        image = _task_image(data) if isinstance(data, dict) else None
        if image is None:
            on_fault(listing.Fault("bad row", where, f"{where}: field data has no photo; expected data.image"))
        else:
            yield Task(image, tuple(_regions(task)), where)


def _regions(task: Mapping[str, Any]) -> Sequence[object]:
    for name in ("annotations", "completions", "predictions"):
        own = task.get(name)
        kept = (
            [one for one in own if isinstance(one, dict) and not one.get("was_cancelled")]
            if isinstance(own, list)
            else []
        )
        if kept:
            result = kept[-1].get("result")
            return result if isinstance(result, list) else []
    return []


def _task_image(data: Mapping[str, object]) -> str | None:
    """The photo of a task as a path: of a local file, an upload, or an address."""
    own = data.get("file")
    if isinstance(own, str) and own:
        return own
    texts = [value for value in (data.get("image"), *data.values()) if isinstance(value, str)]
    text = next((one for one in texts if Path(unquote(urlsplit(one).path)).suffix.lower() in images.SUFFIXES), None)
    local = next((one for one in texts if "local-files" in one), None)
    if local is not None and (found := parse_qs(urlsplit(local).query).get("d")):
        return found[0]
    if text is None:
        return None
    path = Path(unquote(urlsplit(text).path))
    if "/upload/" in path.as_posix():
        return _UPLOADED.sub("", path.name, count=1)
    return path.name if urlsplit(text).scheme or path.is_absolute() else path.as_posix()


def list_label_studio(source: listing.DataSource, on_fault: listing.OnFault = listing.refuse) -> listing.Listing:
    """The photos of Label Studio's tasks, with their choices and the labels of their rectangles."""
    rows = []
    for task in label_studio_tasks(source.path, on_fault):
        mentions = _Mentions()
        for number, region in enumerate(task.regions):
            found = checked_row(_REGION, region, f"{task.where}: region {number}", on_fault)
            if found is not None:
                for name in (*found.value.choices, *found.value.rectanglelabels):
                    mentions.add(name, is_sure=not found.meta.is_doubtful)
        rows.append(mentions.row(task.image, task.where))
    beside = label_studio_file(source.path).parent
    places = (beside, beside / "images", beside / "photos")
    return _list(source, rows, _declared(beside / "config.xml"), places, on_fault)


def _declared(config: Path) -> tuple[str, ...]:
    """The labels and choices of a labelling interface, if there is one."""
    if not listing.is_regular_file(config):
        return ()
    root = voc_tags.read_xml(config, "the labelling interface of Label Studio", kind="a labelling interface")
    named = (node.get("value") for node in root.iter() if node.tag in {"Label", "Choice"})
    return tuple(dict.fromkeys(name for name in named if name))


# ---------------------------------------------------------------- X-AnyLabeling


@dataclass(frozen=True, slots=True)
class _NamedShape:
    label: _Name
    difficult: bool = False


@dataclass(frozen=True, slots=True)
class _ShapeFile:
    flags: dict[str, object] | None = None
    shapes: tuple[_NamedShape, ...] = ()


_SHAPES = TypeAdapter(_ShapeFile)


def shape_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """The photos below a folder, each with the place of its JSON file, which may not exist."""
    for file in folders.photo_files(folder):
        yield file.as_posix(), folder / file.with_suffix(".json")


def is_xanylabeling(path: Path) -> bool:
    """Whether a folder has photos with JSON files of shapes beside them."""
    if not path.is_dir():
        return False
    for _, (_, beside) in zip(range(_PROBED), shape_files(path), strict=False):
        if listing.is_regular_file(beside):
            return '"shapes"' in peek(beside)
    return False


def read_shapes(path: Path, adapter: TypeAdapter[T], on_fault: listing.OnFault) -> T | None:
    """The content of a JSON file of shapes, or None if there is none or after a fault."""
    if not listing.is_regular_file(path):
        return None
    try:
        content = io.read_json(path, "a JSON file of X-AnyLabeling or labelme")
    except errors.UserError as error:
        on_fault(listing.Fault("unreadable annotation", path.stem, str(error)))
        return None
    return checked_row(adapter, content, str(path), on_fault)


def list_xanylabeling(source: listing.DataSource, on_fault: listing.OnFault = listing.refuse) -> listing.Listing:
    """All photos below a folder, with the flags and labels in the JSON files beside them."""
    rows = []
    for file, beside in shape_files(source.path):
        content, mentions = read_shapes(beside, _SHAPES, on_fault) or _ShapeFile(), _Mentions()
        for name in (name for name, is_set in (content.flags or {}).items() if is_set is True):
            mentions.add(name)
        for shape in content.shapes:
            mentions.add(shape.label, is_sure=not shape.difficult)
        rows.append(mentions.row(file, str(beside)))
    path = source.path / "classes.txt"
    declared = tuple(io.read_lines(path, "a list of class names").values()) if path.exists() else ()
    return _list(source, rows, declared, (source.path,), on_fault)


# ---------------------------------------------------------------- FiftyOne


class FiftyOneClassification(datasets.TagsOnly):
    """FiftyOne's JSON of image classification: tags without boxes. Its COCO and VOC exports are read as such."""

    what = "a FiftyOne classification file"

    def recognises(self, path: Path) -> bool:
        """JSON files with an object ``labels``."""
        is_json = path.suffix.lower() == ".json" and listing.is_regular_file(path)
        return is_json and re.search(r'"labels"\s*:\s*\{', peek(path)) is not None

    def tags(self, source: listing.DataSource, on_fault: listing.OnFault) -> listing.Listing:
        """The photos it names, with their classes."""
        return list_fiftyone(source, on_fault)


def list_fiftyone(source: listing.DataSource, on_fault: listing.OnFault = listing.refuse) -> listing.Listing:
    """The photos of a classification file, which are in ``data`` beside it."""
    content = io.read_json(source.path, "a FiftyOne classification file")
    labels: dict[str, object] | None = content.get("labels") if isinstance(content, dict) else None
    declared = (content.get("classes") or []) if isinstance(content, dict) else []
    if not isinstance(labels, dict) or not isinstance(declared, list):
        raise errors.UserError(f"{source.path}: expected an object with classes and labels; export it from FiftyOne")
    names, beside = [str(name) for name in declared], source.path.parent / "data"
    folder = source.photos or (beside if beside.is_dir() else source.path.parent)
    files = voc_tags.photos_by_id(folder)
    rows = []
    for uuid, target in labels.items():
        where, mentions = f"{source.path}: labels.{uuid}", _Mentions()
        for part in _targets(target):
            if isinstance(part, int) and not isinstance(part, bool) and 0 <= part < len(names):
                mentions.add(names[part])
            elif isinstance(part, str) and part:
                mentions.add(part)
            else:
                line = f"{where}: expected a class or a number below {len(names)}, got {part!r:.40}; correct the file"
                on_fault(listing.Fault("unknown class", str(part)[:100], line))
        rows.append(mentions.row(files.get(uuid) or uuid, where))
    return _list(source, rows, names, (folder,), on_fault)


def _targets(target: object) -> list[object]:
    """The classes of a target: a number, a name, an object with ``label``, or several of these."""
    if isinstance(target, list):
        return [one for part in target for one in _targets(part)]
    if isinstance(target, dict):
        several = target.get("classifications", target.get("labels"))
        return _targets(several) if several is not None else _targets(target.get("label"))
    return [] if target is None else [target]
