"""Datasets in any format: find the format of a path, then read its photos, tags or true boxes.

Built-in formats are listed in ``tag2box.extend.DATASET_FORMATS``, in the order in which they are tried. Each has a
reader of tags in a module that cannot parse boxes (``voc_tags``, ``coco_tags``, ``yolo_tags``, ``csv_tags``,
``folders``) and, if it has boxes, a reader of true objects in another (``voc_boxes``, ``coco_boxes``, ``yolo_boxes``).
"""

import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from tag2box import annotations, errors, extend, io
from tag2box.formats import listing as listings
from tag2box.formats.listing import DataSource, Listing, OnFault, refuse

_MAX_WARNINGS = 3  # of each kind; `tag2box data check` lists all
ALL = "all"
"""The split that every dataset with named splits has: all its photos."""


class DatasetFormat(Protocol):
    """A dataset format; its class is called without arguments."""

    what: str
    """Its name in messages, such as "a VOC folder"."""
    has_tags: bool
    """Whether it can be trained from."""
    names_splits: bool
    """Whether it has named splits, which its methods then select; of other formats, a split is a text file of ids."""

    def recognises(self, path: Path) -> bool:
        """Whether an existing file or folder is of this format."""
        ...

    def photos(self, source: DataSource, on_fault: OnFault) -> Listing:
        """The photos it names, without tags."""
        ...

    def tags(self, source: DataSource, on_fault: OnFault) -> Listing:
        """The photos it names, with tags: all that training receives."""
        ...

    def has_boxes(self, source: DataSource) -> bool:
        """Whether it has true boxes to evaluate against."""
        ...

    def truth(self, source: DataSource, on_fault: OnFault) -> annotations.Truth:
        """Its true objects, for evaluation."""
        ...


class TagsOnly:
    """Base class of formats without boxes: define ``what``, ``recognises`` and ``tags``."""

    what = "a dataset"
    has_tags = True
    names_splits = False

    def tags(self, source: DataSource, on_fault: OnFault) -> Listing:
        """The photos it names, with tags."""
        raise NotImplementedError

    def photos(self, source: DataSource, on_fault: OnFault) -> Listing:
        """The photos it names; their tags are ignored."""
        return self.tags(source, on_fault)

    def has_boxes(self, source: DataSource) -> bool:
        """False."""
        return False

    def truth(self, source: DataSource, on_fault: OnFault) -> annotations.Truth:
        """Raises a ``UserError``."""
        raise errors.UserError(
            f"{source.path}: {self.what} has no boxes; expected a COCO file, a VOC folder or a YOLO folder"
        )


def dataset_format(source: DataSource) -> DatasetFormat:
    """The format that a source names, else the first that recognises its path."""
    if not source.path.exists():
        raise errors.UserError(f"{source.path}: no such file or folder; expected {_known()}")
    if source.format is not None:
        return _named_format(source.format)
    for form in _built_in():
        if form.recognises(source.path):
            return form
    raise errors.UserError(f"{source.path}: this is no dataset; expected {_known()}")


def read_tagged(source: DataSource, on_fault: OnFault = refuse) -> annotations.TaggedPhotos:
    """Photos and tags: all that training receives. Class names that look like mistakes are warned about."""
    listing = list_dataset(source, on_fault)
    for group in listings.spelled_alike(listing.classes)[:_MAX_WARNINGS]:
        names = " and ".join(map(repr, group[:3]))
        warnings.warn(
            f"{source.path}: classes {names} are spelled alike; if they are one, spell it in one way", stacklevel=2
        )
    for name in [name for name in listing.classes if "," in name][:_MAX_WARNINGS]:
        warnings.warn(f"{source.path}: class {name!r} has a comma; separate tags with ; or |", stacklevel=2)
    return listings.to_tagged_photos(listing, on_fault)


def read_photos(source: DataSource, on_fault: OnFault = refuse) -> tuple[annotations.Photo, ...]:
    """The photos of any dataset, with or without tags; without a split, all photos of a VOC or YOLO folder."""
    return listings.find_listed(list_photos(source, on_fault), on_fault)[0]


def read_truth(source: DataSource, on_fault: OnFault = refuse) -> annotations.Truth:
    """The true objects of a dataset, for evaluation only."""
    form = dataset_format(source)
    truth = form.truth(source, on_fault)
    if form.names_splits or source.split is None:
        return truth
    wanted = listings.wanted_ids(source, truth.ids, on_fault)
    rows = [row for row, name in enumerate(truth.ids) if name in wanted]
    return annotations.Truth(
        truth.classes,
        tuple(truth.ids[row] for row in rows),
        tuple(truth.sizes[row] for row in rows),
        tuple(truth.objects[row] for row in rows),
    )


def has_boxes(source: DataSource) -> bool:
    """Whether a dataset has true boxes to evaluate against."""
    return dataset_format(source).has_boxes(source)


def list_dataset(source: DataSource, on_fault: OnFault = refuse) -> Listing:
    """The photos a dataset names and their tags; no photo is opened."""
    form = dataset_format(source)
    return _select(form, source, form.tags(source, on_fault), on_fault)


def list_photos(source: DataSource, on_fault: OnFault = refuse) -> Listing:
    """The photos a dataset names, without tags; no photo is opened."""
    form = dataset_format(source)
    return _select(form, source, form.photos(source, on_fault), on_fault)


def everything(source: DataSource) -> DataSource:
    """The source with all its splits, unless it names one."""
    is_open = source.split is None and dataset_format(source).names_splits
    return replace(source, split=ALL) if is_open else source


def class_names(text: str) -> tuple[str, ...]:
    """Class names from a comma-separated list, or from a text file with one per line."""
    if "," not in text and listings.is_regular_file(Path(text)):
        names = tuple(io.read_lines(Path(text), "a list of class names").values())
    else:
        names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise errors.UserError(
            f"classes {text!r}: no class named; expected names with commas between, or a text file of them"
        )
    if len(names) == 1 and names[0] == text.strip() and text.endswith(".txt"):
        raise errors.UserError(f"{text}: no such file; expected a text file with one class name per line")
    return listings.unique_classes(names, "classes")


def _named_format(name: str) -> DatasetFormat:
    try:
        form: DatasetFormat = extend.find_part("dataset format", name)()
    except errors.UserError as error:
        raise errors.UserError(f"dataset format {name}: {error}") from None
    return form


def _built_in() -> Iterator[DatasetFormat]:
    return (_named_format(name) for name in extend.DATASET_FORMATS)


def _known() -> str:
    names = [form.what for form in _built_in()]
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _select(form: DatasetFormat, source: DataSource, listing: Listing, on_fault: OnFault) -> Listing:
    """The entries of a text file of ids, in the dataset's own order."""
    if form.names_splits or source.split is None:
        return listing
    wanted = listings.wanted_ids(source, [entry.id for entry in listing.entries], on_fault)
    return replace(listing, entries=tuple(entry for entry in listing.entries if entry.id in wanted))
