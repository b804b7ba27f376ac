"""Proposals in the pickled dictionaries that repositories of weakly supervised detectors share."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tag2box.errors import UserError
from tag2box.pickles import read_pickle
from tag2box.proposals.readers.listing import Listing, Rows, id_of, rows_of, same_length

IDS = ("indexes", "ids", "image_ids")
WHAT = "a dictionary with boxes, and indexes or ids"


def pkl(path: Path) -> Listing:
    """``boxes`` and ``scores``, a table each image, and ``indexes`` or ``ids``; it is read whole."""
    found = read_pickle(path, WHAT)
    if not isinstance(found, dict):
        raise UserError(f"{path}: a {type(found).__name__}; expected {WHAT}")
    named = {key.decode("latin-1") if isinstance(key, bytes) else key: value for key, value in found.items()}
    ids = tuple(id_of(f"{path}: ids", value) for value in _images(path, named, IDS))
    boxes = _images(path, named, ("boxes",))
    same_length(f"{path}", ("tables of boxes", "ids"), (len(boxes), len(ids)))
    scores = _images(path, named, ("scores",)) if named.get("scores") is not None else None
    if scores is not None:
        same_length(f"{path}", ("tables of boxes", "tables of scores"), (len(boxes), len(scores)))

    def read(place: int) -> Rows:
        return rows_of(f"{path}: image {ids[place]}", boxes[place], None if scores is None else scores[place])

    return Listing(ids, read)


def _images(path: Path, found: dict[object, object], names: tuple[str, ...]) -> Sequence[object]:
    """The list under one of some names."""
    value = next((found[name] for name in names if name in found), None)
    if value is None:
        there = ", ".join(reprlib.repr(key) for key in list(found)[:8]) or "nothing"
        raise UserError(f"{path}: no {' or '.join(names)} in it (there is: {there}); expected {WHAT}")
    if isinstance(value, np.ndarray):
        flat = value.reshape(-1) if value.dtype.hasobject or names == IDS else value
        return list(flat) if flat.ndim else []
    if not isinstance(value, list | tuple):
        raise UserError(f"{path}: {names[0]}: a {type(value).__name__} where a list was expected; expected {WHAT}")
    return value
