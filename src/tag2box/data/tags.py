"""Tags in a table: one row a photo, ``image,tags``, the tags of a photo separated by ``;`` or ``|``."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import torch

from tag2box.data.photos import distinct_names, photo_size
from tag2box.errors import UserError
from tag2box.files import write_text
from tag2box.types import Photo, TaggedPhotos

if TYPE_CHECKING:
    from _csv import Reader

COLUMNS = ("image", "tags")


@dataclass(frozen=True, slots=True)
class TagRow:
    """A photo's name and its tags, and where that was said."""

    image: str
    tags: tuple[str, ...]
    where: str  # "file:line", for messages


def read_tags(table: Path, photos: Path, classes: Sequence[str] | None = None) -> TaggedPhotos:
    """Read tags from a CSV file with the columns ``image`` (relative to ``photos``) and ``tags``.

    Tags are separated by ``;`` or ``|``, so names may hold spaces; a row without tags is a photo that shows none of
    the classes. Without ``classes``, the classes are the tags seen, sorted.
    """
    return tag_photos(_rows(table), photos, classes)


def tag_photos(rows: Sequence[TagRow], photos: Path, classes: Sequence[str] | None) -> TaggedPhotos:
    """Check rows of any origin against the photos folder and the classes, and make a dataset of them."""
    names = tuple(classes) if classes is not None else tuple(sorted({tag for row in rows for tag in row.tags}))
    column = {name: i for i, name in enumerate(names)}
    if len(column) != len(names):
        raise UserError(f"classes: {_repeated(names)} is listed twice; name every class once")
    tags = torch.zeros(len(rows), len(names), dtype=torch.bool)
    for i, row in enumerate(rows):
        for tag in row.tags:
            if tag not in column:
                raise UserError(f"{row.where}: unknown class {tag!r}; expected one of {', '.join(names)}")
            tags[i, column[tag]] = True
    return TaggedPhotos(names, _photos(rows, photos), tags)


def write_tags(table: Path, rows: Sequence[tuple[str, Sequence[str]]]) -> None:
    """Write (image, tags) rows as the CSV file that :func:`read_tags` reads."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows((image, ";".join(tags)) for image, tags in rows)
    write_text(table, text.getvalue())


def _rows(table: Path) -> list[TagRow]:
    """The rows of a CSV file; blank lines are passed over."""
    try:
        text = table.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{table}: no such file; expected a CSV file with the columns image,tags") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{table}: not readable as UTF-8 text ({error}); expected a CSV file") from None
    reader = csv.reader(io.StringIO(text, newline=""), skipinitialspace=True)
    try:
        return _parse(table, reader)
    except csv.Error as error:
        raise UserError(f"{table}:{reader.line_num}: not readable as CSV ({error}); check the quotes") from None


def _parse(table: Path, reader: Reader) -> list[TagRow]:
    """Rows below a header that names the columns."""
    header = [name.strip().lower() for name in next(reader, [])]
    for name in COLUMNS:
        if name not in header:
            raise UserError(f"{table}:1: no column {name!r}; expected a first line 'image,tags'")
    rows = []
    for cells in reader:
        if not any(cell.strip() for cell in cells):
            continue
        where = f"{table}:{reader.line_num}"
        if len(cells) != len(header):
            raise UserError(
                f"{where}: {len(cells)} columns where the header has {len(header)}; separate tags with ';', not ','"
            )
        row = dict(zip(header, cells, strict=True))
        tags = tuple(tag.strip() for tag in re.split(r"[;|]", row["tags"]) if tag.strip())
        rows.append(TagRow(row["image"].strip(), tags, where))
    if not rows:
        raise UserError(f"{table}: no photos; expected at least one row below 'image,tags'")
    return rows


def _photos(rows: Sequence[TagRow], folder: Path) -> tuple[Photo, ...]:
    """The photo of each row, named by its stem, or by its path without suffix where stems repeat."""
    relative = [PurePosixPath(row.image.replace("\\", "/")) for row in rows]
    first: dict[PurePosixPath, str] = {}
    for row, path in zip(rows, relative, strict=True):
        if not row.image:
            raise UserError(f"{row.where}: field image is empty; expected a file name")
        if not (folder / path).is_file():
            raise UserError(f"{row.where}: no photo {row.image} in {folder}; check the name or the photos folder")
        if path in first:
            raise UserError(f"{row.where}: {row.image} was already listed at {first[path]}; keep one row per photo")
        first[path] = row.where
    stems = distinct_names(relative)
    return tuple(
        Photo(stem, folder / path, *photo_size(folder / path)) for stem, path in zip(stems, relative, strict=True)
    )


def _repeated(names: Sequence[str]) -> str:
    return repr(Counter(names).most_common(1)[0][0])
