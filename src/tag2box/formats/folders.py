"""Folders of photos: a tree whose folders are the classes, or photos without tags.

In a tree, ``dogs/1.jpg`` is a photo tagged ``dogs``, at any depth below ``dogs``, and shows none of the other classes.
The folder ``_none`` holds photos that show no class at all.
"""

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from tag2box import errors, images
from tag2box.formats import datasets, listing

NO_TAGS = "_none"
_SPLITS = frozenset({"train", "training", "val", "valid", "validation", "test", "testing", "trainval"})
_TABLES = frozenset({".csv", ".tsv", ".json"})


class ClassFolders(datasets.TagsOnly):
    """A tree of folders named after classes."""

    what = "a tree of class folders"

    def recognises(self, path: Path) -> bool:
        """Folders with photos in subfolders and none beside them."""
        return path.is_dir() and is_class_tree(path)

    def photos(self, source: listing.DataSource, on_fault: listing.OnFault) -> listing.Listing:
        """All photos in the tree."""
        return list_folder(source, on_fault)

    def tags(self, source: listing.DataSource, on_fault: listing.OnFault) -> listing.Listing:
        """All photos in the tree, tagged with the folder each is in."""
        return list_class_folders(source, on_fault)


class PhotoFolder(datasets.TagsOnly):
    """A folder of photos without tags."""

    what = "a plain folder of photos"
    has_tags = False

    def recognises(self, path: Path) -> bool:
        """Any folder."""
        return path.is_dir()

    def photos(self, source: listing.DataSource, on_fault: listing.OnFault) -> listing.Listing:
        """All photos in it."""
        return list_folder(source, on_fault)

    def tags(self, source: listing.DataSource, on_fault: listing.OnFault) -> listing.Listing:
        """Raises a ``UserError``."""
        raise errors.UserError(
            f"{source.path}: a plain folder of photos has no tags; expected a CSV of tags, or every photo in a folder "
            f"named after its class ({NO_TAGS} for photos without)"
        )


def photo_files(folder: Path) -> Iterator[PurePosixPath]:
    """Photos below a folder, relative to it, sorted folder by folder; hidden files (and macOS metadata) are skipped."""
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not _is_hidden(name))
        relative = PurePosixPath(Path(place).relative_to(folder).as_posix())
        for name in sorted(files):
            if not _is_hidden(name) and Path(name).suffix.lower() in images.SUFFIXES:
                yield relative / name


def is_class_tree(folder: Path) -> bool:
    """Whether a folder has photos in its subfolders and none of its own."""
    first = next(photo_files(folder), None)  # a folder's own photos come before those of its subfolders
    return first is not None and len(first.parts) > 1


def list_folder(source: listing.DataSource, on_fault: listing.OnFault = listing.refuse) -> listing.Listing:
    """All photos below a folder, without tags."""
    rows = [listing.TagRow(file.as_posix(), (), str(source.path)) for file in photo_files(_root(source))]
    if not rows:
        raise errors.UserError(
            f"{source.path}: no photos in this folder; expected {', '.join(sorted(images.SUFFIXES))} files"
        )
    return listing.list_rows(rows, _root(source), (), on_fault)


def list_class_folders(source: listing.DataSource, on_fault: listing.OnFault = listing.refuse) -> listing.Listing:
    """All photos below a folder, tagged with the folder they are in; folders of other classes give no tag."""
    root = _root(source)
    _refuse_other_layouts(root)
    files = list(photo_files(root))
    found = sorted({file.parts[0] for file in files} - {NO_TAGS})
    classes = listing.select_classes(found, source.classes, str(source.path))
    known = frozenset(classes)
    rows = [
        listing.TagRow(file.as_posix(), (file.parts[0],) if file.parts[0] in known else (), str(root / file))
        for file in files
    ]
    return listing.list_rows(rows, root, classes, on_fault)


def _root(source: listing.DataSource) -> Path:
    if source.photos is not None and source.photos.resolve() != source.path.resolve():
        raise errors.UserError(
            f"--photos {source.photos}: {source.path} is a folder of photos itself; leave out --photos"
        )
    return source.path


def _refuse_other_layouts(root: Path) -> None:
    """Folder names are no tags if they are the splits of a dataset, or if a file beside them has the tags."""
    inside = sorted(root.iterdir())
    tables = [path.name for path in inside if path.suffix.lower() in _TABLES]
    tables += [f"{path.parent.name}/{path.name}" for path in sorted(root.glob("annotations/*.json"))]
    if tables:
        raise errors.UserError(
            f"{root}: holds {listing.shortlist(tables, 3)}; name that file, or move it away to take folders for tags"
        )
    parts = [path.name for path in inside if path.is_dir() and not _is_hidden(path.name)]
    if parts and _SPLITS.issuperset(name.lower() for name in parts):
        raise errors.UserError(
            f"{root}: {listing.shortlist(parts)} are parts of a dataset, not classes; name one of them"
        )


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"
