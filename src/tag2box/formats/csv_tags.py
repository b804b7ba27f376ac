"""Tags in a CSV table, in a form recognised by its header.

===================  ==============================================================================================
``image,tags``       one row per photo; tags separated by ``;`` or ``|``, empty for a photo without tags
``image,tag``        one row per photo and tag (or ``class``, ``label``, ``category``); a photo's rows are merged
``image,dog,cat``    one column per class: 1, yes, true or x; 0, no, false or empty; -1 or ? for unsure
===================  ==============================================================================================

A further column ``counts`` may give numbers of objects: ``dog:2;car:1``.

Tables of boxes (``image,class,x1,y1,x2,y2``) and of Open Images (``ImageID,LabelName``) give tags, too: the classes of
their rows. Their corners are read by ``table_boxes`` only.

Columns are separated by comma, semicolon or tab, whichever is most frequent in the header. The column of the photos may
also be called file, filename, file_name, path or photo.
"""

import csv
import io
import re
from _csv import Reader
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tag2box import annotations, errors, images
from tag2box.formats import datasets, listing, listing as listings
from tag2box.io import read_text, write_text

COLUMNS = ("image", "tags")
_IMAGE = ("image", "file", "filename", "file_name", "path", "photo")
_ONE_TAG = ("tag", "class", "label", "category")
_MISNAMED = ("labels", "classes", "categories")  # a column of tags, not a class of that name
_YES = frozenset({"1", "1.0", "yes", "y", "true", "x"})
_NO = frozenset({"", "0", "0.0", "no", "n", "false"})
_UNSURE = frozenset({"-1", "-1.0", "?"})


class CsvTable(datasets.TagsOnly):
    """A CSV file of tags."""

    what = "a CSV of tags"

    def recognises(self, path: Path) -> bool:
        """Any file that is no photo; the header decides the rest."""
        return path.is_file() and path.suffix.lower() not in images.SUFFIXES

    def tags(self, source: listing.DataSource, on_fault: listing.OnFault) -> listing.Listing:
        """The photos it names, with their tags."""
        return list_table(source, on_fault)


@dataclass(frozen=True, slots=True)
class _Form:
    """The layout of a table."""

    header: tuple[str, ...]
    image: int  # the column of the photos
    read: Callable[
        [Sequence[str], str, str], listing.TagRow
    ]  # (cells, image, where) to a row; ValueError on a bad cell
    merges: bool  # whether a photo may have several rows
    classes: tuple[str, ...] | None  # None: the tags seen
    counts: int | None = None  # the column of the counts
    unread: frozenset[str] = frozenset()  # columns of classes that are not wanted


def read_tags(
    table: Path, photos: Path, classes: Sequence[str] | None = None, on_fault: listing.OnFault = listing.refuse
) -> annotations.TaggedPhotos:
    """Read tags from a CSV file whose photos are named relative to ``photos``.

    A row without tags is a photo that shows none of the classes. Default classes: the class columns, or the tags seen,
    sorted.
    """
    source = listing.DataSource(path=table, photos=photos, classes=None if classes is None else tuple(classes))
    return listings.to_tagged_photos(list_table(source, on_fault), on_fault)


def list_table(source: listing.DataSource, on_fault: listing.OnFault = listing.refuse) -> listing.Listing:
    """The photos and tags of a CSV file; its photos are beside it, or in ``photos`` or ``images`` there.

    A tag outside the chosen classes is a fault, because it is more often misspelt than left out on purpose; of a table
    with one column per class, only the chosen columns are read.
    """
    header, reader = _opened(source.path)
    form = _recognise(source.path, header, source.classes)
    rows = list(_rows(source.path, reader, form, on_fault))
    if not rows:
        raise errors.UserError(f"{source.path}: no photos; expected at least one row below {','.join(header[:3])!r}")
    beside = source.path.parent
    places = (beside, beside / "photos", beside / "images")
    folder = listings.photos_folder(source.photos, places, (row.image for row in rows if row.image), source.path)
    return listings.list_rows(_merged(rows, folder) if form.merges else rows, folder, form.classes, on_fault)


def write_tags(table: Path, rows: Sequence[tuple[str, Sequence[str]]]) -> None:
    """Write (image, tags) rows as the CSV file that :func:`read_tags` reads."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows((image, ";".join(tags)) for image, tags in rows)
    write_text(table, text.getvalue())


# ---------------------------------------------------------------- header


def _opened(table: Path) -> tuple[tuple[str, ...], Reader]:
    """The cells of the first line, and a reader of the lines below it."""
    text = read_text(table, "a CSV file with the columns image,tags")
    first = re.sub(r'"[^"]*"', "", text.partition("\n")[0])
    delimiter = max(",;\t", key=first.count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, skipinitialspace=True)
    try:
        return tuple(cell.strip() for cell in next(reader, [])), reader
    except csv.Error as error:
        raise errors.UserError(f"{table}:1: not readable as CSV ({error}); check the quotes") from None


def _recognise(table: Path, header: tuple[str, ...], classes: Sequence[str] | None) -> _Form:
    """The layout that a header declares."""
    lower = [name.lower() for name in header]
    wanted = None if classes is None else listings.unique_classes(classes, "classes")
    image = next((lower.index(name) for name in _IMAGE if name in lower), None)
    if image is None:
        raise errors.UserError(f"{table}:1: no column 'image'; expected a first line 'image,tags'")
    counts = lower.index(listings.COUNTS_COLUMN) if listings.COUNTS_COLUMN in lower else None
    for name in ("tags", *_ONE_TAG):
        if name in lower:
            return _Form(header, image, _spelled(lower.index(name)), name != "tags", wanted, counts)
    misnamed = [name for name in lower if name in _MISNAMED]
    if misnamed or len(header) == 1 + (counts is not None):
        hint = f"; rename the column {misnamed[0]!r}" if misnamed else ""
        raise errors.UserError(f"{table}:1: no column 'tags'; expected a first line 'image,tags'{hint}")
    columns = _class_columns(table, header, {image, counts})
    names = listings.select_classes(tuple(columns), wanted, f"{table}:1")
    read = _ticked({name: columns[name] for name in names})
    return _Form(header, image, read, False, names, counts, frozenset(columns) - frozenset(names))


def _class_columns(table: Path, header: Sequence[str], others: set[int | None]) -> dict[str, int]:
    """The column of each class."""
    columns: dict[str, int] = {}
    for place, name in enumerate(header):
        if place in others:
            continue
        if not name:
            raise errors.UserError(f"{table}:1: column {place + 1} has no name; expected a class, or remove the column")
        if name in columns:
            raise errors.UserError(
                errors.printable(f"{table}:1: column {name!r} is there twice; name every class once")
            )
        columns[name] = place
    return columns


# ---------------------------------------------------------------- rows


def _spelled(column: int) -> Callable[[Sequence[str], str, str], listing.TagRow]:
    """Reader of rows with all tags in one column."""

    def read(cells: Sequence[str], image: str, where: str) -> listing.TagRow:
        return listing.TagRow(
            image, tuple(tag.strip() for tag in re.split(r"[;|]", cells[column]) if tag.strip()), where
        )

    return read


def _ticked(columns: dict[str, int]) -> Callable[[Sequence[str], str, str], listing.TagRow]:
    """Reader of rows with one column per class."""

    def read(cells: Sequence[str], image: str, where: str) -> listing.TagRow:
        words = {name: cells[place].strip().lower() for name, place in columns.items()}
        for name, word in words.items():
            if word not in _YES and word not in _NO and word not in _UNSURE:
                raise ValueError(
                    f"column {name!r}: expected 1, 0, yes, no, x, nothing, or ? for unsure, got {word[:40]!r}; "
                    "correct it, or choose the columns that are classes with --classes"
                )
        there = tuple(name for name, word in words.items() if word in _YES)
        return listing.TagRow(image, there, where, tuple(name for name, word in words.items() if word in _UNSURE))

    return read


def _rows(table: Path, reader: Reader, form: _Form, on_fault: listing.OnFault) -> Iterator[listing.TagRow]:
    """The rows of a CSV file; blank lines are skipped."""
    try:
        for cells in reader:
            where = f"{table}:{reader.line_num}"
            if not any(cell.strip() for cell in cells):
                continue
            try:
                yield _row(cells, form, where)
            except ValueError as error:
                on_fault(listing.Fault("bad row", f"{table.name}:{reader.line_num}", f"{where}: {error}"))
    except csv.Error as error:
        raise errors.UserError(f"{table}:{reader.line_num}: not readable as CSV ({error}); check the quotes") from None


def _row(cells: Sequence[str], form: _Form, where: str) -> listing.TagRow:
    if len(cells) != len(form.header):
        raise ValueError(
            f"{len(cells)} columns, but the header has {len(form.header)}; separate tags with ';', not ','"
        )
    row = form.read(cells, cells[form.image].strip(), where)
    if form.counts is None:
        return row
    counts = listings.parse_counts(cells[form.counts])
    return replace(row, counts=tuple(pair for pair in counts if pair[0] not in form.unread))


def _merged(rows: Sequence[listing.TagRow], folder: Path) -> list[listing.TagRow]:
    """One row per photo, with the tags and counts of all its rows, in the position of the first."""
    whole: dict[str, list[listing.TagRow]] = {}
    for row in rows:
        whole.setdefault(listings.path_below(folder, row.image) or row.image, []).append(row)
    return [_joined(of_photo) for of_photo in whole.values()]


def _joined(rows: Sequence[listing.TagRow]) -> listing.TagRow:
    tags, counts = (tag for row in rows for tag in row.tags), (pair for row in rows for pair in row.counts)
    return replace(rows[0], tags=tuple(dict.fromkeys(tags)), counts=tuple(dict.fromkeys(counts)))


# ---------------------------------------------------------------- tables of boxes, without the boxes

_OPEN_IMAGES = frozenset({"imageid", "labelname"})
_BOX_TABLE = frozenset({"x1", "y1", "x2", "y2"})
_PEEK = 1 << 14


@dataclass(frozen=True, slots=True)
class BoxRow:
    """A row of a table of boxes; the cells are text by column, in lower case."""

    image: str
    name: str  # class; empty for a photo without boxes
    cells: dict[str, str]
    where: str

    @property
    def is_doubtful(self) -> bool:
        """Whether the row is an ignore region (in Open Images, a group)."""
        return any(self.cells.get(field, "").lower() in _YES for field in ("doubtful", "isgroupof"))


@dataclass(frozen=True, slots=True)
class BoxRows:
    """A table of boxes."""

    columns: frozenset[str]
    rows: tuple[BoxRow, ...]
    declared: tuple[str, ...]  # classes, in order, as far as a file beside it names them


def is_box_table(path: Path) -> bool:
    """Whether a file begins with the header of a table of boxes."""
    if not path.is_file() or path.suffix.lower() not in {".csv", ".tsv", ".txt"}:
        return False
    with path.open("rb") as file:
        first = file.read(_PEEK).decode("utf-8-sig", errors="replace").partition("\n")[0]
    cells = {cell.strip().strip('"').lower() for cell in re.split(r"[,;\t]", first)}
    return cells >= _OPEN_IMAGES or (cells >= _BOX_TABLE and bool(cells & set(_IMAGE)) and bool(cells & set(_ONE_TAG)))


def read_box_table(path: Path, on_fault: listing.OnFault) -> BoxRows:
    """The rows of a table of boxes; Open Images' classes are named by ``class-descriptions*.csv`` beside it."""
    header, reader = _opened(path)
    lower = [name.lower() for name in header]
    is_open_images = set(lower) >= _OPEN_IMAGES
    image = "imageid" if is_open_images else next((name for name in _IMAGE if name in lower), "")
    name = "labelname" if is_open_images else next((name for name in _ONE_TAG if name in lower), "")
    if not (image and name):
        raise errors.UserError(f"{path}:1: no columns image and class; expected a first line 'image,class,x1,y1,x2,y2'")
    described = _descriptions(path) if is_open_images else {}
    rows = []
    for cells, where in _plain_rows(path, reader, len(header), on_fault):
        own = dict(zip(lower, cells, strict=True))
        label = described.get(own[name], own[name])
        if is_open_images and own.get("confidence", "") not in {
            "",
            *_YES,
        }:  # verified to be absent, or a machine's guess
            label = ""
        rows.append(BoxRow(_with_suffix(own[image]) if is_open_images else own[image], label, own, where))
    return BoxRows(frozenset(lower), tuple(rows), tuple(dict.fromkeys(described.values())))


def _plain_rows(path: Path, reader: Reader, columns: int, on_fault: listing.OnFault) -> Iterator[tuple[list[str], str]]:
    try:
        for cells in reader:
            where = f"{path}:{reader.line_num}"
            if len(cells) == columns:
                yield [cell.strip() for cell in cells], where
            elif any(cell.strip() for cell in cells):
                line = f"{where}: {len(cells)} columns, but the header has {columns}; correct the row"
                on_fault(listing.Fault("bad row", f"{path.name}:{reader.line_num}", line))
    except csv.Error as error:
        raise errors.UserError(f"{path}:{reader.line_num}: not readable as CSV ({error}); check the quotes") from None


def _with_suffix(name: str) -> str:
    return name if Path(name).suffix.lower() in images.SUFFIXES else f"{name}.jpg"


def _descriptions(path: Path) -> dict[str, str]:
    """Names of Open Images' classes by their codes (``/m/0k4j``)."""
    names: dict[str, str] = {}
    for table in sorted(path.parent.glob("*class-descriptions*.csv")):
        text = read_text(table, "class descriptions of Open Images")
        rows = [row for row in csv.reader(io.StringIO(text, newline="")) if len(row) == 2]
        names |= {code.strip(): name.strip() for code, name in rows if code.startswith("/")}
    return names


def list_box_table(source: listing.DataSource, on_fault: listing.OnFault = listing.refuse) -> listing.Listing:
    """The photos of a table of boxes, with the classes of their rows and the tags that it has beside them."""
    table = read_box_table(source.path, on_fault)
    if not table.rows:
        raise errors.UserError(f"{source.path}: no photos; expected at least one row below the header")
    mentions: dict[str, dict[str, bool]] = {}
    places: dict[str, str] = {}
    for row in table.rows:
        own = mentions.setdefault(row.image, {})
        places.setdefault(row.image, row.where)
        named = [(row.name, not row.is_doubtful), *((tag, True) for tag in _split_tags(row, "tags"))]
        for name, is_sure in (*named, *((tag, False) for tag in _split_tags(row, "unsure"))):
            if name:
                own[name] = own.get(name, False) or is_sure
    seen = {name for own in mentions.values() for name in own}
    known = tuple(name for name in table.declared if name in seen) or tuple(sorted(seen))
    classes = listings.select_classes((*known, *sorted(seen - set(known))), source.classes, str(source.path))
    rows = [
        listing.TagRow(
            image,
            tuple(name for name in classes if own.get(name) is True),
            places[image],
            tuple(name for name in classes if own.get(name) is False),
        )
        for image, own in mentions.items()
    ]
    beside = source.path.parent
    folders = (beside, beside / "photos", beside / "images", beside / "data")
    folder = listings.photos_folder(source.photos, folders, (row.image for row in rows if row.image), source.path)
    return listings.list_rows(rows, folder, classes, on_fault)


def _split_tags(row: BoxRow, column: str) -> list[str]:
    return [tag.strip() for tag in re.split(r"[;|]", row.cells.get(column, "")) if tag.strip()]
