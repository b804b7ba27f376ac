"""The formats datasets come in. Each lists photos and tags for training and, where it has any, boxes for evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from tag2box.data.coco import coco_has_boxes, read_coco_truth
from tag2box.data.coco_tags import list_coco, list_coco_photos
from tag2box.data.faults import Complain
from tag2box.data.folders import NO_TAGS, is_class_tree, list_class_folders, list_folder
from tag2box.data.listing import DataSource, Listing
from tag2box.data.photos import SUFFIXES
from tag2box.data.tags import list_table
from tag2box.data.voc import read_voc_truth
from tag2box.data.voc_tags import is_voc, list_voc, list_voc_photos, voc_is_annotated
from tag2box.errors import UserError
from tag2box.types import Truth

_PEEK = 4096  # bytes within which a JSON file shows its first brace


class Format(Protocol):
    """One way to keep a dataset on disk."""

    what: str
    """Its name in messages."""
    has_tags: bool
    """Whether it can be trained from."""
    names_splits: bool
    """Whether it knows parts of itself by name; of others, a part is a list of ids."""

    def recognises(self, path: Path) -> bool:
        """Whether an existing file or folder is one of these."""
        ...

    def photos(self, source: DataSource, complain: Complain) -> Listing:
        """The photos it names, without tags."""
        ...

    def tags(self, source: DataSource, complain: Complain) -> Listing:
        """The photos it names, with tags: all that training may see."""
        ...

    def has_boxes(self, source: DataSource) -> bool:
        """Whether there is truth to evaluate against."""
        ...

    def truth(self, source: DataSource, complain: Complain) -> Truth:
        """Its boxes, for evaluation."""
        ...


class Voc:
    """Pascal VOC's devkit."""

    what = "a VOC folder"
    has_tags = True
    names_splits = True

    def recognises(self, path: Path) -> bool:
        """By its folders Annotations, or JPEGImages and ImageSets."""
        return is_voc(path)

    def photos(self, source: DataSource, complain: Complain) -> Listing:
        """The photos of a split; without one, all."""
        return list_voc_photos(source, complain)

    def tags(self, source: DataSource, complain: Complain) -> Listing:
        """The photos of a split, tagged with the classes of their objects."""
        return list_voc(source, complain)

    def has_boxes(self, source: DataSource) -> bool:
        """Whether any image of the split is annotated; those of VOC's public test sets are not."""
        return voc_is_annotated(source)

    def truth(self, source: DataSource, complain: Complain) -> Truth:
        """The objects of a split."""
        return read_voc_truth(
            source.path, split=source.split, classes=source.classes, photos=source.photos, complain=complain
        )


class Coco:
    """A COCO annotation file, with boxes or with tags alone."""

    what = "a COCO file"
    has_tags = True
    names_splits = False

    def recognises(self, path: Path) -> bool:
        """By its suffix, or by its first character."""
        if not path.is_file() or path.suffix.lower() == ".json":
            return path.is_file()
        with path.open("rb") as file:
            return file.read(_PEEK).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"{"

    def photos(self, source: DataSource, complain: Complain) -> Listing:
        """Its images."""
        return list_coco_photos(source, complain)

    def tags(self, source: DataSource, complain: Complain) -> Listing:
        """Its images, tagged with the categories of their annotations."""
        return list_coco(source, complain)

    def has_boxes(self, source: DataSource) -> bool:
        """Whether any annotation has a box."""
        return coco_has_boxes(source.path)

    def truth(self, source: DataSource, complain: Complain) -> Truth:
        """Its annotations."""
        return read_coco_truth(source.path, source.classes, complain)


class _Boxless:
    """What formats of tags alone have in common."""

    what = "a dataset"
    has_tags = True
    names_splits = False

    def has_boxes(self, source: DataSource) -> bool:
        """Never."""
        return False

    def truth(self, source: DataSource, complain: Complain) -> Truth:
        """There is none."""
        raise UserError(f"{source.path}: {self.what} has no boxes; expected a COCO file or a VOC folder")


class Table(_Boxless):
    """A CSV file of tags."""

    what = "a CSV of tags"

    def recognises(self, path: Path) -> bool:
        """Any file that is no photo: its header tells more."""
        return path.is_file() and path.suffix.lower() not in SUFFIXES

    def photos(self, source: DataSource, complain: Complain) -> Listing:
        """The photos it names."""
        return list_table(source, complain)

    def tags(self, source: DataSource, complain: Complain) -> Listing:
        """The photos it names, with their tags."""
        return list_table(source, complain)


class ClassFolders(_Boxless):
    """A tree of folders named after classes."""

    what = "a tree of class folders"

    def recognises(self, path: Path) -> bool:
        """By photos in its folders, and none beside them."""
        return path.is_dir() and is_class_tree(path)

    def photos(self, source: DataSource, complain: Complain) -> Listing:
        """All photos in the tree."""
        return list_folder(source, complain)

    def tags(self, source: DataSource, complain: Complain) -> Listing:
        """All photos in the tree, tagged with the folder each is in."""
        return list_class_folders(source, complain)


class Folder(_Boxless):
    """A folder of photos that nobody has tagged."""

    what = "a plain folder of photos"
    has_tags = False

    def recognises(self, path: Path) -> bool:
        """Any other folder."""
        return path.is_dir()

    def photos(self, source: DataSource, complain: Complain) -> Listing:
        """All photos in it."""
        return list_folder(source, complain)

    def tags(self, source: DataSource, complain: Complain) -> Listing:
        """There are none."""
        raise UserError(
            f"{source.path}: a plain folder of photos has no tags; expected a CSV of tags, or every photo in a folder "
            f"named after its class ({NO_TAGS} for photos without)"
        )


FORMATS: dict[str, Format] = {
    "voc": Voc(),
    "coco": Coco(),
    "csv": Table(),
    "class-folders": ClassFolders(),
    "photos": Folder(),
}
"""Asked in this order whether they recognise a path."""
