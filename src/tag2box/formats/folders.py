"""Folders of photos: a tree whose folders are the classes, or photos without tags.

In a tree, ``dogs/1.jpg`` is a photo tagged ``dogs``, at any depth below ``dogs``, and counts as showing none of the
other classes. The folder ``_none`` holds photos that show no class at all.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from tag2box.data.images import SUFFIXES
from tag2box.errors import UserError
from tag2box.formats.listing import DataSource, Listing, OnFault, TagRow, chosen, list_rows, refuse, some

NO_TAGS = "_none"
_PARTS = frozenset({"train", "training", "val", "valid", "validation", "test", "testing", "trainval"})
_TABLES = frozenset({".csv", ".tsv", ".json"})


def photo_files(folder: Path) -> Iterator[PurePosixPath]:
    """Photos below a folder, relative to it, sorted folder by folder; hidden ones (and macOS leftovers) are not."""
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not _is_hidden(name))
        relative = PurePosixPath(Path(place).relative_to(folder).as_posix())
        for name in sorted(files):
            if not _is_hidden(name) and Path(name).suffix.lower() in SUFFIXES:
                yield relative / name


def is_class_tree(folder: Path) -> bool:
    """Whether photos are in folders within this one, and none beside those."""
    first = next(photo_files(folder), None)  # a folder's own photos come before those of its folders
    return first is not None and len(first.parts) > 1


def list_folder(source: DataSource, complain: OnFault = refuse) -> Listing:
    """All photos below a folder, without tags."""
    rows = [TagRow(file.as_posix(), (), str(source.path)) for file in photo_files(_root(source))]
    if not rows:
        raise UserError(f"{source.path}: no photos in this folder; expected {', '.join(sorted(SUFFIXES))} files")
    return list_rows(rows, _root(source), (), complain)


def list_class_folders(source: DataSource, complain: OnFault = refuse) -> Listing:
    """All photos below a folder, tagged with the folder they are in; of chosen classes, others give no tag."""
    root = _root(source)
    _refuse_other_layouts(root)
    files = list(photo_files(root))
    found = sorted({file.parts[0] for file in files} - {NO_TAGS})
    classes = chosen(found, source.classes, str(source.path))
    known = frozenset(classes)
    rows = [
        TagRow(file.as_posix(), (file.parts[0],) if file.parts[0] in known else (), str(root / file)) for file in files
    ]
    return list_rows(rows, root, classes, complain)


def _root(source: DataSource) -> Path:
    if source.photos is not None and source.photos.resolve() != source.path.resolve():
        raise UserError(f"--photos {source.photos}: {source.path} is a folder of photos itself; leave out --photos")
    return source.path


def _refuse_other_layouts(root: Path) -> None:
    """Folder names are no tags where they tell parts of a dataset apart, or where a file beside them has the tags."""
    inside = sorted(root.iterdir())
    tables = [path.name for path in inside if path.suffix.lower() in _TABLES]
    tables += [f"{path.parent.name}/{path.name}" for path in sorted(root.glob("annotations/*.json"))]
    if tables:
        raise UserError(f"{root}: holds {some(tables, 3)}; name that file, or move it away to take folders for tags")
    parts = [path.name for path in inside if path.is_dir() and not _is_hidden(path.name)]
    if parts and _PARTS.issuperset(name.lower() for name in parts):
        raise UserError(f"{root}: {some(parts)} are parts of a dataset, not classes; name one of them")


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"
