"""The formats by name, the convention each one follows, and how they are recognised."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tag2box.errors import UserError
from tag2box.proposals.readers import jsons, mat, npz, pkl
from tag2box.proposals.readers.conventions import Convention
from tag2box.proposals.readers.listing import Listing

_MATLAB = Convention(boxes_are="yxyx", first_pixel=1, last_pixel="included")
_OURS = Convention(boxes_are="xyxy", first_pixel=0, last_pixel="excluded")


@dataclass(frozen=True, slots=True)
class Format:
    """A way in which proposals come, and what its boxes usually mean."""

    read: Callable[[Path], Listing]
    usual: Convention


FORMATS: dict[str, Format] = {
    "selective-search": Format(mat.selective_search, _MATLAB),
    "mcg": Format(mat.mcg, _MATLAB),
    "edge-boxes": Format(mat.edge_boxes, Convention(boxes_are="xywh", first_pixel=1, last_pixel="included")),
    "pkl": Format(pkl.pkl, Convention(boxes_are="xyxy", first_pixel=0, last_pixel="included")),
    "npz": Format(npz.npz, _OURS),
    "coco": Format(jsons.coco, Convention(boxes_are="xywh", first_pixel=0, last_pixel="excluded")),
    "json": Format(jsons.boxes_by_image, _OURS),
}
_BY_SUFFIX: dict[str, Callable[[Path], str]] = {
    ".mat": mat.recognise_mat,
    ".pkl": lambda path: "pkl",
    ".pickle": lambda path: "pkl",
    ".npz": lambda path: "npz",
    ".json": jsons.recognise_json,
}


def format_of(path: Path, name: str | None) -> str:
    """The name of a file's format: the one given, or what its suffix and content show."""
    if not path.exists():
        raise UserError(f"{path}: no such file or folder; expected proposals ({', '.join(_BY_SUFFIX)})")
    if name is not None:
        if name not in FORMATS:
            near = difflib.get_close_matches(name, FORMATS, 1, 0.0)[0]
            raise UserError(f"--format {name}: unknown; did you mean {near}? There are {', '.join(FORMATS)}")
        return name
    if path.is_dir():
        return mat.recognise_mat(path)
    recognise = _BY_SUFFIX.get(path.suffix.lower())
    if recognise is None:
        raise UserError(f"{path}: format not known by its suffix; name it with --format ({', '.join(FORMATS)})")
    return recognise(path)
