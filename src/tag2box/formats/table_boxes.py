"""Boxes in CSV tables, for evaluation and review only: a plain table, and Open Images. And the CSV export of labels.

Training reads tags through ``csv_tags``. The plain table has one row per box, in pixels: ``image,class,x1,y1,x2,y2``,
with further columns as ``CsvExport`` writes them; a photo without boxes has one row without class and corners. Tables
of Open Images have ``ImageID,LabelName,XMin,XMax,YMin,YMax`` as fractions of the photo's size.
"""

import csv
import io as text_io
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tag2box import annotations, errors, io
from tag2box.formats import annotated, csv_tags, export, listing
from tag2box.labels.labelled import LabelledPhotos

_COLUMNS = ("image", "width", "height", "split", "tags", "unsure", "class", "x1", "y1", "x2", "y2", "score", "doubtful")
_CORNERS = ("x1", "y1", "x2", "y2")
_FRACTIONS = ("xmin", "ymin", "xmax", "ymax")


class BoxTable:
    """A CSV table of boxes, in pixels or as in Open Images; tables of Open Images may have labels alone."""

    what = "a CSV of boxes"
    has_tags = True
    names_splits = False

    def recognises(self, path: Path) -> bool:
        """Tables with columns image and x1, y1, x2, y2, or ImageID and LabelName."""
        return csv_tags.is_box_table(path)

    def photos(self, source: listing.DataSource, on_fault: listing.OnFault) -> listing.Listing:
        """The photos of its rows."""
        return csv_tags.list_box_table(source, on_fault)

    def tags(self, source: listing.DataSource, on_fault: listing.OnFault) -> listing.Listing:
        """The photos of its rows, with their classes."""
        return csv_tags.list_box_table(source, on_fault)

    def has_boxes(self, source: listing.DataSource) -> bool:
        """Whether it has the columns of boxes, and a row with one."""
        table = csv_tags.read_box_table(source.path, lambda _: None)
        columns = _box_columns(table)
        return bool(columns) and any(row.cells.get(columns[0]) for row in table.rows)

    def truth(self, source: listing.DataSource, on_fault: listing.OnFault) -> annotations.Truth:
        """The boxes of its rows."""
        table = csv_tags.read_box_table(source.path, on_fault)
        by_photo: dict[str, list[csv_tags.BoxRow]] = {}
        for row in table.rows:
            by_photo.setdefault(row.image, []).append(row)
        columns = _box_columns(table)
        if not columns:
            raise errors.UserError(f"{source.path}: no columns of boxes; expected {', '.join(_CORNERS)}")
        rows = []
        for name, own in by_photo.items():
            boxes = [box for row in own if (box := _read_box(row, columns, on_fault)) is not None]
            placed = partial(_scaled, boxes, columns == _FRACTIONS)
            rows.append(annotated.AnnotatedImage(name, placed, _size(own[0])))
        return annotated.to_truth(source, csv_tags.list_box_table(source, on_fault), rows, on_fault)


def _box_columns(table: csv_tags.BoxRows) -> tuple[str, ...]:
    return next((names for names in (_CORNERS, _FRACTIONS) if set(names) <= table.columns), ())


def _size(row: csv_tags.BoxRow) -> tuple[int, int] | None:
    sides = [row.cells.get(field, "") for field in ("width", "height")]
    is_known = all(side.isascii() and side.isdecimal() and 0 < len(side) < 8 and int(side) for side in sides)
    return (int(sides[0]), int(sides[1])) if is_known else None


def _read_box(row: csv_tags.BoxRow, columns: Sequence[str], on_fault: listing.OnFault) -> annotated.NamedBox | None:
    """The box of a row; None if it has none, or after a fault."""
    texts = [row.cells.get(name, "") for name in columns]
    if not row.name or not any(texts):
        return None
    try:
        corners = annotated.corners_of([float(text) for text in texts])
    except ValueError:
        corners = None
    if corners is None:
        line = (
            f"{row.where}: expected numbers {columns[0]} <= {columns[2]} and {columns[1]} <= {columns[3]}, got {texts}"
        )
        on_fault(listing.Fault("bad box", row.image, f"{line}; correct the row"))
        return None
    return annotated.NamedBox(row.name, corners, row.is_doubtful)


def _scaled(
    boxes: Sequence[annotated.NamedBox], is_fraction: bool, width: int, height: int
) -> Sequence[annotated.NamedBox]:
    """Boxes in pixels."""
    if not is_fraction:
        return boxes
    return [
        annotated.NamedBox(
            own.name,
            (own.box[0] * width, own.box[1] * height, own.box[2] * width, own.box[3] * height),
            own.is_doubtful,
        )
        for own in boxes
    ]


# ---------------------------------------------------------------- export


class CsvExport(export.LabelExport):
    """A CSV table with one row per box, in pixels; a photo without boxes has one row, too.

    Columns: image, width, height, split, tags and unsure (separated by ``;``), class, x1, y1, x2, y2, score, doubtful.
    """

    what = "a CSV of boxes"

    def write(self, out: Path, labels: LabelledPhotos) -> None:
        """Write the table."""
        text = text_io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        table.writerow(_COLUMNS)
        for photo in labels.photos:
            tags, unsure = ";".join(photo.tags), ";".join(photo.unsure)
            start = [photo.file, photo.width, photo.height, photo.split, tags, unsure]
            for box in photo.boxes:
                score = "" if box.score is None else repr(box.score)
                table.writerow([*start, box.name, *map(repr, box.box), score, int(box.is_doubtful)])
            if not photo.boxes:
                table.writerow([*start, *[""] * 7])
        io.write_text(out, text.getvalue())

    def check(self, out: Path, photos: Sequence[annotations.Photo], classes: Sequence[str]) -> None:
        """Raise if a name cannot stand in a table."""
        for what, names in (("class", classes), ("photo", [photo.path.as_posix() for photo in photos])):
            for name in names:
                bad = ";|\0\r\n" if what == "class" else "\0\r\n"
                if not name or name != name.strip() or set(name) & set(bad) or not _is_text(name):
                    raise errors.UserError(f"{what} {name!r}: a CSV takes names of one line without ; or |; rename it")


def _is_text(name: str) -> bool:
    return name.encode(errors="ignore").decode() == name
