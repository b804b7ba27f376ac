"""Tags of YOLO datasets: the class numbers in label files. Boxes are not parsed here.

Two layouts are read: a ``data.yaml`` with ``names`` and the places of ``train``, ``val`` and ``test``, and folders
``images`` and ``labels`` with a ``classes.txt`` in ``labels`` or beside it. The labels of ``images/train/1.jpg`` are in
``labels/train/1.txt``, or beside the photo if no folder of its path is called ``images``. A photo without a label file
shows none of the classes.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from tag2box import errors, io
from tag2box.formats import datasets, listing as listings
from tag2box.formats.folders import photo_files
from tag2box.formats.listing import DataSource, Fault, Listing, OnFault, TagRow, refuse

_YAML = (".yaml", ".yml")
_DATA_FILES = ("data.yaml", "data.yml", "dataset.yaml")
_SPLITS = ("train", "val", "test")
_MAX_PLACES = 1000  # folders and lists of a split

_YamlField = str | list[str] | dict[str, str]


@dataclass(frozen=True, slots=True)
class YoloLayout:
    """Where the parts of a YOLO dataset are."""

    root: Path
    classes: tuple[str, ...]  # by class number
    splits: Mapping[str, tuple[str, ...]]  # folders or lists of photos, relative to the root
    where: Path  # the file with the class names, for messages


@dataclass(frozen=True, slots=True)
class YoloLine:
    """A line of a label file: its class number, the other columns as text, and its place for messages."""

    number: int
    columns: tuple[str, ...]
    where: str


# ---------------------------------------------------------------- photos and tags


def is_yolo(path: Path) -> bool:
    """Whether a path is a YAML file, a folder with a data.yaml, or one with images and labels."""
    if path.is_file():
        return path.suffix.lower() in _YAML
    if not path.is_dir():
        return False
    if _data_file(path) is not None:
        return True
    return (path / "images").is_dir() and next((path / "labels").rglob("*.txt"), None) is not None


def list_yolo(source: DataSource, on_fault: OnFault = refuse) -> Listing:
    """The photos of a split, tagged with the classes in their label files; unselected classes are left out."""
    layout = read_layout(source)
    files = list(_files(layout, source, on_fault, is_all=False))
    labels = [layout.root / label_file(file) for file in files]
    if files and not any(listings.is_regular_file(label) for label in labels):
        raise errors.UserError(
            errors.printable(f"{labels[0]}: no such file; expected the labels of {files[0]}: no photo has any")
        )
    classes = listings.select_classes(layout.classes, source.classes, str(layout.where))
    known = frozenset(classes)
    rows = []
    for file, label in zip(files, labels, strict=True):
        names = (layout.classes[line.number] for line in label_lines(layout, label, on_fault))
        rows.append(TagRow(file, tuple(dict.fromkeys(name for name in names if name in known)), str(label)))
    return _select(listings.list_rows(rows, layout.root, classes, on_fault), layout, source, on_fault)


def list_yolo_photos(source: DataSource, on_fault: OnFault = refuse, *, is_all: bool = True) -> Listing:
    """The photos of a split, without tags; ``is_all``: of all splits if none is named."""
    layout = read_layout(source)
    rows = [TagRow(file, (), str(layout.where)) for file in _files(layout, source, on_fault, is_all=is_all)]
    return _select(listings.list_rows(rows, layout.root, (), on_fault), layout, source, on_fault)


def label_file(file: str) -> str:
    """The label file of a photo, both relative to the root."""
    parts = list(PurePosixPath(file).with_suffix(".txt").parts)
    folders = [place for place, part in enumerate(parts[:-1]) if part == "images"]
    if folders:
        parts[folders[-1]] = "labels"
    return "/".join(parts)


def label_lines(layout: YoloLayout, label: Path, on_fault: OnFault) -> Iterator[YoloLine]:
    """The lines of a label file, if it exists; one without a known class number is a fault and is skipped."""
    if not listings.is_regular_file(label):
        return
    try:
        lines = io.read_lines(label, "a YOLO label file")
    except errors.UserError as error:
        on_fault(Fault("unreadable annotation", label.stem, str(error)))
        return
    for count, line in lines.items():
        first, *others = line.split()
        where = f"{label}: line {count}"
        number = _class_number(first)
        if number is None:
            fault = f"{where}: expected a class number and a box, got {line[:40]!r}; correct the line"
            on_fault(Fault("bad row", label.stem, fault))
        elif number >= len(layout.classes):
            fault = f"{where}: no class {number} in {layout.where}, which names {len(layout.classes)}; add its name"
            on_fault(Fault("unknown class", str(number), fault))
        else:
            yield YoloLine(number, tuple(others), where)


def _class_number(text: str) -> int | None:
    found = re.fullmatch(r"([0-9]{1,6})(?:\.0*)?", text, re.ASCII)
    return int(found[1]) if found else None


def _select(listing: Listing, layout: YoloLayout, source: DataSource, on_fault: OnFault) -> Listing:
    """The entries of a text file of ids, if the split is one."""
    if source.split is None or source.split == datasets.ALL or source.split in layout.splits:
        return listing
    wanted = listings.wanted_ids(source, [entry.id for entry in listing.entries], on_fault)
    return replace(listing, entries=tuple(entry for entry in listing.entries if entry.id in wanted))


def _files(layout: YoloLayout, source: DataSource, on_fault: OnFault, *, is_all: bool) -> Iterator[str]:
    """The photos of a split, relative to the root, each once."""
    splits = layout.splits
    if source.split is None and not is_all and len(set(splits.values())) > 1:
        raise errors.UserError(
            f"{layout.where}: has several splits; name one with --split: {', '.join([*splits, datasets.ALL])}"
        )
    if source.split is not None and source.split in splits:
        places: Sequence[str] = splits[source.split]
    elif source.split in {None, datasets.ALL} or listings.is_regular_file(Path(source.split or "")):
        places = [place for places in splits.values() for place in places]
    else:
        raise errors.UserError(
            f"{layout.where}: no split {source.split}; splits found here: {', '.join([*splits, datasets.ALL])}"
        )
    files = (file for place in dict.fromkeys(places) for file in _files_of(layout, place, on_fault))
    yield from dict.fromkeys(files)


def _files_of(layout: YoloLayout, place: str, on_fault: OnFault) -> Iterator[str]:
    """The photos in a folder, or those that a text file lists."""
    if listings.exists(layout.root / place) and (layout.root / place).is_dir():
        yield from ((PurePosixPath(place) / file).as_posix() for file in photo_files(layout.root / place))
        return
    path = layout.root / place
    for count, line in io.read_lines(path, "a folder of photos, or a text file with one photo per line").items():
        base = PurePosixPath(place).parent if line.startswith("./") else PurePosixPath()
        file = listings.path_below(layout.root, (base / line).as_posix())
        if file is None:
            fault = f"{path}: line {count}: {listings.outside_message(line, layout.root)}"
            on_fault(Fault("outside the folder", line, fault))
        else:
            yield file


# ---------------------------------------------------------------- layout


def read_layout(source: DataSource) -> YoloLayout:
    """The class names, splits and root of a YOLO dataset."""
    path = source.path
    data = path if path.is_file() else _data_file(path)
    if data is None:
        names = next((file for file in (path / "classes.txt", path / "labels" / "classes.txt") if file.exists()), None)
        if names is None:
            raise errors.UserError(f"{path}: no class names; expected a data.yaml with names, or a classes.txt")
        classes = listings.unique_classes(tuple(io.read_lines(names, "a list of class names").values()), str(names))
        return YoloLayout(_given_root(source) or path, classes, {"train": ("images",)}, names)
    fields = parse_yaml(io.read_text(data, "the data.yaml of a YOLO dataset"))
    places = {split: _texts(fields[split]) for split in _SPLITS if fields.get(split)}
    if not places:
        raise errors.UserError(f"{data}: train: field required; expected the folder of the photos")
    if max(map(len, places.values())) > _MAX_PLACES:
        raise errors.UserError(
            f"{data}: train, val and test: at most {_MAX_PLACES} folders each; list photos in a file"
        )
    root = _root(source, data, fields.get("path", ""), places)
    found = {split: tuple(_place(root, text, data) for text in texts) for split, texts in places.items()}
    return YoloLayout(root, _class_names(data, fields), found, data)


def _data_file(folder: Path) -> Path | None:
    return next((folder / name for name in _DATA_FILES if (folder / name).is_file()), None)


def _given_root(source: DataSource) -> Path | None:
    if source.photos is not None and not source.photos.is_dir():
        raise errors.UserError(f"{source.photos}: no such folder; expected the photos of {source.path}")
    return source.photos


def _root(source: DataSource, data: Path, path: _YamlField, places: Mapping[str, tuple[str, ...]]) -> Path:
    """The folder that places are relative to: the one given, else the ``path`` of the file or the file's own folder."""
    given = _given_root(source)
    if given is not None:
        return given
    inside = listings.path_below(data.parent, path) if isinstance(path, str) and path else None
    roots = [data.parent / inside, data.parent] if inside is not None else [data.parent]
    tried = [text for texts in places.values() for text in texts]
    for root in roots:
        if any(listings.exists(root / place) for text in tried if (place := _below(root, text)) is not None):
            return root
    raise errors.UserError(
        errors.printable(f"{data}: no {tried[0]} in {roots[0]}; name the folder that it is relative to with --photos")
    )


def _place(root: Path, text: str, data: Path) -> str:
    place = _below(root, text)
    if place is None:
        raise errors.UserError(errors.printable(f"{data}: {listings.outside_message(text, root)}"))
    return place


def _below(root: Path, text: str) -> str | None:
    """A place relative to the root; Roboflow writes ``../train/images`` for ``train/images``."""
    if Path(text) == Path():
        return "."
    place = listings.path_below(root, text)
    return listings.path_below(root, text.removeprefix("../")) if place is None else place


def _class_names(data: Path, fields: Mapping[str, _YamlField]) -> tuple[str, ...]:
    names = fields.get("names", "")
    if isinstance(names, dict):
        numbers = [str(number) for number in range(len(names))]
        if sorted(names) != sorted(numbers):
            raise errors.UserError(
                errors.printable(f"{data}: names: expected the numbers 0 to {len(names) - 1}, got {list(names)}")
            )
        names = [names[number] for number in numbers]
    if isinstance(names, str) or not names:
        raise errors.UserError(f"{data}: names: field required; expected the names of the classes")
    return listings.unique_classes(names, f"{data}: names")


def _texts(field: _YamlField) -> tuple[str, ...]:
    texts = (field,) if isinstance(field, str) else field if isinstance(field, list) else field.values()
    return tuple(dict.fromkeys(texts))


# ---------------------------------------------------------------- YAML, as far as data.yaml files use it

# Possessive, and up to the end of the line if a quote is not closed: no text takes more than linear time.
_QUOTED = r'(?<![^\s\[{,:-])(?:"(?:[^"\\]|\\.)*+(?:"|$)|' + r"'(?:[^']|'')*+(?:'|$))"
_COMMENT = re.compile(rf"({_QUOTED})|(?:^|(?<=\s))#.*")
_FIELD = re.compile(rf"({_QUOTED}\s*|[^\s:\"'][^:]*):(?:\s+(.*)|$)")
_ITEMS = re.compile(rf"(?:{_QUOTED}|[^,])++")
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)")
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "0": "\0"}


def parse_yaml(text: str) -> dict[str, _YamlField]:
    """The top-level fields of a YAML document that are text, lists of text or mappings of text; others are skipped."""
    blocks: dict[str, list[str]] = {}
    key = None
    for line in text.splitlines():
        bare = _COMMENT.sub(lambda found: found[1] or "", line).rstrip()
        field = _FIELD.fullmatch(bare) if bare[:1] not in {" ", "\t", "-", "]", "}", ""} else None
        if field:
            key = _scalar(field[1])
            blocks[key] = [(field[2] or "").strip()]
        elif bare and key is not None:
            blocks[key].append(bare.strip())
    return {name: value for name, lines in blocks.items() if (value := _yaml_value(lines)) is not None}


def _yaml_value(lines: Sequence[str]) -> _YamlField | None:
    whole = " ".join(lines).strip()
    if whole[:1] == "[" and whole[-1:] == "]":
        return [_scalar(item) for item in _ITEMS.findall(whole[1:-1]) if item.strip()]
    if whole[:1] == "{" and whole[-1:] == "}":
        return _mapping([item for item in _ITEMS.findall(whole[1:-1]) if item.strip()])
    if lines[0] or len(lines) == 1:
        return _scalar(whole)
    if all(line.startswith("-") for line in lines[1:]):
        return [_scalar(line[1:]) for line in lines[1:]]
    return _mapping(lines[1:])


def _mapping(items: Sequence[str]) -> dict[str, str] | None:
    found = [_FIELD.fullmatch(item.strip()) for item in items]
    return {_scalar(field[1]): _scalar(field[2] or "") for field in found if field} if all(found) else None


def _scalar(text: str) -> str:
    text = text.strip()
    if len(text) > 1 and text[0] == text[-1] == "'":
        return text[1:-1].replace("''", "'")
    if len(text) > 1 and text[0] == text[-1] == '"':
        return _ESCAPE.sub(_unescape, text[1:-1])
    return text


def _unescape(found: re.Match[str]) -> str:
    code = found[1]
    if len(code) == 1:
        return _ESCAPED.get(code, code)
    value = int(code[1:], 16)
    return chr(value) if value < 0x110000 else "\ufffd"
