"""A dataset by its path: which format it is, and what it says of tags (for training) and boxes (for evaluation).

Training calls ``read_tagged``, whose answer has no room for boxes; the readers behind it never parse any.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path, PurePosixPath

from tag2box.data.faults import Complain, Fault, refuse
from tag2box.data.formats import FORMATS, Format
from tag2box.data.lines import read_lines
from tag2box.data.listing import DataSource, Listing, find_listed, is_file, tagged, unique
from tag2box.data.voc_tags import ALL
from tag2box.errors import UserError
from tag2box.types import Photo, TaggedPhotos, Truth

__all__ = [
    "DataSource", "class_names", "everything", "format_of", "has_boxes", "list_dataset", "list_photos", "read_photos",
    "read_tagged", "read_truth",
]  # fmt: skip


def class_names(text: str) -> tuple[str, ...]:
    """Class names from a comma-separated list, or from a text file with one a line."""
    if "," not in text and is_file(Path(text)):
        names = tuple(read_lines(Path(text), "a list of class names").values())
    else:
        names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise UserError(f"classes {text!r}: no class named; expected names with commas between, or a text file of them")
    if len(names) == 1 and names[0] == text.strip() and text.endswith(".txt"):
        raise UserError(f"{text}: no such file; expected a text file with a class name a line")
    return unique(names, "classes")


def format_of(source: DataSource) -> Format:
    """The format that recognises a dataset's path."""
    if not source.path.exists():
        raise UserError(f"{source.path}: no such file or folder; expected {_known()}")
    for form in FORMATS.values():
        if form.recognises(source.path):
            return form
    raise UserError(f"{source.path}: this is no dataset; expected {_known()}")


def read_tagged(source: DataSource, complain: Complain = refuse) -> TaggedPhotos:
    """Photos and tags: all that training may see."""
    return tagged(list_dataset(source, complain), complain)


def read_photos(source: DataSource, complain: Complain = refuse) -> tuple[Photo, ...]:
    """The photos of any dataset, with or without tags; of a VOC folder without a split, all."""
    return find_listed(list_photos(source, complain), complain)[0]


def read_truth(source: DataSource, complain: Complain = refuse) -> Truth:
    """The boxes of a dataset, for evaluation only."""
    form = format_of(source)
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
    return format_of(source).has_boxes(source)


def list_dataset(source: DataSource, complain: Complain = refuse) -> Listing:
    """The photos a dataset names and their tags, before any photo is looked for."""
    form = format_of(source)
    return _part(form, source, form.tags(source, complain), complain)


def list_photos(source: DataSource, complain: Complain = refuse) -> Listing:
    """The photos a dataset names, without tags, before any is looked for."""
    form = format_of(source)
    return _part(form, source, form.photos(source, complain), complain)


def everything(source: DataSource) -> DataSource:
    """A source with no part left out where none was asked for."""
    is_open = source.split is None and format_of(source).names_splits
    return replace(source, split=ALL) if is_open else source


def _known() -> str:
    names = [form.what for form in FORMATS.values()]
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _part(form: Format, source: DataSource, listing: Listing, complain: Complain) -> Listing:
    """The entries a list of ids names, in the dataset's own order."""
    if form.names_splits or source.split is None:
        return listing
    wanted = _wanted(source, [entry.id for entry in listing.entries], complain)
    return replace(listing, entries=tuple(entry for entry in listing.entries if entry.id in wanted))


def _wanted(source: DataSource, ids: Iterable[str], complain: Complain) -> set[str]:
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
