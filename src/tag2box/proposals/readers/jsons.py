"""Proposals in JSON: a list as COCO results have it, or a plain object of boxes by image."""

from __future__ import annotations

import reprlib
from collections import defaultdict
from pathlib import Path
from typing import Any

from tag2box.errors import UserError
from tag2box.files import read_json
from tag2box.proposals.readers.listing import Listing, Rows, id_of, rows_of


def coco(path: Path) -> Listing:
    """``[{"image_id": 9, "bbox": [x, y, w, h], "score": 0.5}, ...]``; all have a score, or none has."""
    found = read_json(path, "boxes by image")
    if not isinstance(found, list):
        raise UserError(f"{path}: expected a list of boxes with image_id and bbox, got a {type(found).__name__}")
    grouped: dict[str, list[object]] = defaultdict(list)
    scores: dict[str, list[object]] = defaultdict(list)
    for row, entry in enumerate(found):
        where = f"{path}: [{row}]"
        if not isinstance(entry, dict) or "image_id" not in entry or not _is_box(entry.get("bbox")):
            raise UserError(f"{where}: expected image_id and bbox of four numbers, got {reprlib.repr(entry)}")
        name = id_of(f"{where}.image_id", entry["image_id"])
        grouped[name].append(entry["bbox"])
        if "score" in entry:
            scores[name].append(entry["score"])
    _all_or_none(path, len(found), sum(map(len, scores.values())))
    ids = tuple(grouped)

    def read(place: int) -> Rows:
        name = ids[place]
        return rows_of(f"{path}: image {name}", grouped[name], scores[name] if scores else None)

    return Listing(ids, read)


def boxes_by_image(path: Path) -> Listing:
    """``{"000009": [[x1, y1, x2, y2], ...], ...}``, or five numbers a box with its score last."""
    found = read_json(path, "boxes by image")
    if not isinstance(found, dict):
        raise UserError(f"{path}: expected an object of boxes by image, got a {type(found).__name__}")
    ids = tuple(id_of(f"{path}", name) for name in found)
    tables = tuple(found.values())
    return Listing(ids, lambda place: _rows(f"{path}: image {ids[place]}", tables[place]))


def recognise_json(path: Path) -> str:
    """The format of a JSON file, by how it begins."""
    with path.open("rb") as file:
        return "coco" if file.read(64).lstrip().startswith(b"[") else "json"


def _rows(where: str, table: Any) -> Rows:
    if not isinstance(table, list):
        raise UserError(f"{where}: expected a list of boxes, got {reprlib.repr(table)}")
    lengths = {len(row) if isinstance(row, list) else 0 for row in table}
    if not lengths <= {4} and not lengths <= {5}:
        raise UserError(f"{where}: expected four numbers a box, or five with the score, the same for all its boxes")
    return rows_of(where, table, None)


def _is_box(value: object) -> bool:
    return isinstance(value, list) and len(value) == 4


def _all_or_none(path: Path, boxes: int, scores: int) -> None:
    if scores not in {0, boxes}:
        raise UserError(f"{path}: {scores} of {boxes} boxes have a score; give it to all or to none")
