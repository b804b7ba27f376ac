"""The formats datasets come in. Each lists photos and tags for training and, where it has any, boxes for evaluation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Protocol

from tag2box.annotations import Photo, TaggedPhotos, Truth
from tag2box.data.images import SUFFIXES
from tag2box.errors import UserError
from tag2box.formats.coco_boxes import coco_has_boxes, read_coco_truth
from tag2box.formats.coco_tags import list_coco, list_coco_photos
from tag2box.formats.csv_tags import list_table
from tag2box.formats.folders import NO_TAGS, is_class_tree, list_class_folders, list_folder
from tag2box.formats.listing import (
    DataSource,
    Fault,
    Listing,
    OnFault,
    find_listed,
    is_regular_file,
    refuse,
    tagged,
    unique,
)
from tag2box.formats.voc_boxes import read_voc_truth
from tag2box.formats.voc_tags import ALL, is_voc, list_voc, list_voc_photos, voc_is_annotated
from tag2box.io import read_lines

_PEEK = 4096  # bytes within which a JSON file shows its first brace


class DatasetFormat(Protocol):
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

    def photos(self, source: DataSource, complain: OnFault) -> Listing:
        """The photos it names, without tags."""
        ...

    def tags(self, source: DataSource, complain: OnFault) -> Listing:
        """The photos it names, with tags: all that training may see."""
        ...

    def has_boxes(self, source: DataSource) -> bool:
        """Whether there is truth to evaluate against."""
        ...

    def truth(self, source: DataSource, complain: OnFault) -> Truth:
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

    def photos(self, source: DataSource, complain: OnFault) -> Listing:
        """The photos of a split; without one, all."""
        return list_voc_photos(source, complain)

    def tags(self, source: DataSource, complain: OnFault) -> Listing:
        """The photos of a split, tagged with the classes of their objects."""
        return list_voc(source, complain)

    def has_boxes(self, source: DataSource) -> bool:
        """Whether any image of the split is annotated; those of VOC's public test sets are not."""
        return voc_is_annotated(source)

    def truth(self, source: DataSource, complain: OnFault) -> Truth:
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

    def photos(self, source: DataSource, complain: OnFault) -> Listing:
        """Its images."""
        return list_coco_photos(source, complain)

    def tags(self, source: DataSource, complain: OnFault) -> Listing:
        """Its images, tagged with the categories of their annotations."""
        return list_coco(source, complain)

    def has_boxes(self, source: DataSource) -> bool:
        """Whether any annotation has a box."""
        return coco_has_boxes(source.path)

    def truth(self, source: DataSource, complain: OnFault) -> Truth:
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

    def truth(self, source: DataSource, complain: OnFault) -> Truth:
        """There is none."""
        raise UserError(f"{source.path}: {self.what} has no boxes; expected a COCO file or a VOC folder")


class CsvTable(_Boxless):
    """A CSV file of tags."""

    what = "a CSV of tags"

    def recognises(self, path: Path) -> bool:
        """Any file that is no photo: its header tells more."""
        return path.is_file() and path.suffix.lower() not in SUFFIXES

    def photos(self, source: DataSource, complain: OnFault) -> Listing:
        """The photos it names."""
        return list_table(source, complain)

    def tags(self, source: DataSource, complain: OnFault) -> Listing:
        """The photos it names, with their tags."""
        return list_table(source, complain)


class ClassFolders(_Boxless):
    """A tree of folders named after classes."""

    what = "a tree of class folders"

    def recognises(self, path: Path) -> bool:
        """By photos in its folders, and none beside them."""
        return path.is_dir() and is_class_tree(path)

    def photos(self, source: DataSource, complain: OnFault) -> Listing:
        """All photos in the tree."""
        return list_folder(source, complain)

    def tags(self, source: DataSource, complain: OnFault) -> Listing:
        """All photos in the tree, tagged with the folder each is in."""
        return list_class_folders(source, complain)


class Folder(_Boxless):
    """A folder of photos that nobody has tagged."""

    what = "a plain folder of photos"
    has_tags = False

    def recognises(self, path: Path) -> bool:
        """Any other folder."""
        return path.is_dir()

    def photos(self, source: DataSource, complain: OnFault) -> Listing:
        """All photos in it."""
        return list_folder(source, complain)

    def tags(self, source: DataSource, complain: OnFault) -> Listing:
        """There are none."""
        raise UserError(
            f"{source.path}: a plain folder of photos has no tags; expected a CSV of tags, or every photo in a folder "
            f"named after its class ({NO_TAGS} for photos without)"
        )


DATASET_FORMATS: dict[str, DatasetFormat] = {
    "voc": Voc(),
    "coco": Coco(),
    "csv": CsvTable(),
    "class-folders": ClassFolders(),
    "photos": Folder(),
}
"""Asked in this order whether they recognise a path."""


__all__ = [
    "DataSource", "class_names", "dataset_format", "everything", "has_boxes", "list_dataset", "list_photos",
    "read_photos", "read_tagged", "read_truth",
]  # fmt: skip


def class_names(text: str) -> tuple[str, ...]:
    """Class names from a comma-separated list, or from a text file with one a line."""
    if "," not in text and is_regular_file(Path(text)):
        names = tuple(read_lines(Path(text), "a list of class names").values())
    else:
        names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise UserError(f"classes {text!r}: no class named; expected names with commas between, or a text file of them")
    if len(names) == 1 and names[0] == text.strip() and text.endswith(".txt"):
        raise UserError(f"{text}: no such file; expected a text file with a class name a line")
    return unique(names, "classes")


def dataset_format(source: DataSource) -> DatasetFormat:
    """The format that recognises a dataset's path."""
    if not source.path.exists():
        raise UserError(f"{source.path}: no such file or folder; expected {_known()}")
    for form in DATASET_FORMATS.values():
        if form.recognises(source.path):
            return form
    raise UserError(f"{source.path}: this is no dataset; expected {_known()}")


def read_tagged(source: DataSource, complain: OnFault = refuse) -> TaggedPhotos:
    """Photos and tags: all that training may see."""
    return tagged(list_dataset(source, complain), complain)


def read_photos(source: DataSource, complain: OnFault = refuse) -> tuple[Photo, ...]:
    """The photos of any dataset, with or without tags; of a VOC folder without a split, all."""
    return find_listed(list_photos(source, complain), complain)[0]


def read_truth(source: DataSource, complain: OnFault = refuse) -> Truth:
    """The boxes of a dataset, for evaluation only."""
    form = dataset_format(source)
    truth = form.truth(source, complain)
    if form.names_splits or source.split is None:
        return truth
    wanted = _wanted(source, truth.ids, complain)
    rows = [row for row, name in enumerate(truth.ids) if name in wanted]
    return Truth(
        truth.classes,
        tuple(truth.ids[row] for row in rows),
        tuple(truth.sizes[row] for row in rows),
        tuple(truth.objects[row] for row in rows),
    )


def has_boxes(source: DataSource) -> bool:
    """Whether a dataset has boxes to evaluate against."""
    return dataset_format(source).has_boxes(source)


def list_dataset(source: DataSource, complain: OnFault = refuse) -> Listing:
    """The photos a dataset names and their tags, before any photo is looked for."""
    form = dataset_format(source)
    return _part(form, source, form.tags(source, complain), complain)


def list_photos(source: DataSource, complain: OnFault = refuse) -> Listing:
    """The photos a dataset names, without tags, before any is looked for."""
    form = dataset_format(source)
    return _part(form, source, form.photos(source, complain), complain)


def everything(source: DataSource) -> DataSource:
    """A source with no part left out where none was asked for."""
    is_open = source.split is None and dataset_format(source).names_splits
    return replace(source, split=ALL) if is_open else source


def _known() -> str:
    names = [form.what for form in DATASET_FORMATS.values()]
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _part(form: DatasetFormat, source: DataSource, listing: Listing, complain: OnFault) -> Listing:
    """The entries a list of ids names, in the dataset's own order."""
    if form.names_splits or source.split is None:
        return listing
    wanted = _wanted(source, [entry.id for entry in listing.entries], complain)
    return replace(listing, entries=tuple(entry for entry in listing.entries if entry.id in wanted))


def _wanted(source: DataSource, ids: Iterable[str], complain: OnFault) -> set[str]:
    """Ids that a text file names: by id, by file name, or by that without its suffix."""
    path = Path(source.split or "")
    known = set(ids)
    wanted: set[str] = set()
    for number, line in read_lines(path, "a text file of image ids, one a line").items():
        name = PurePosixPath(line.replace("\\", "/"))
        spellings = (line, name.with_suffix("").as_posix(), name.stem) if name.name else (line,)
        found = next((spelling for spelling in spellings if spelling in known), None)
        if found is None:
            what = f"{path}: line {number}: no photo {line} in {source.path}; remove the line or check the name"
            complain(Fault("missing photo", line, what))
        else:
            wanted.add(found)
    return wanted
