"""Files of proposals as other programs write them, for the tests of their readers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import scipy.io

from tag2box.annotations import Photo
from tag2box.proposals.importers.proposal_files import proposal_format
from tag2box.proposals.importers.validate import BoxConvention

BOXES = {
    "000005": np.array([[0, 0, 100, 50], [10, 20, 30, 40]], np.float64),
    "000007": np.zeros((0, 4)),
    "000009": np.array([[5, 6, 7, 8]], np.float64),
}
"""xyxy, from 0, right and bottom excluded: what every reader must give back."""
SCORES = {"000005": np.array([0.25, 0.5]), "000007": np.zeros(0), "000009": np.array([0.75])}


def cells(items: Sequence[object]) -> np.ndarray:
    """A row of cells."""
    row = np.empty((1, len(items)), object)
    for place, item in enumerate(items):
        row[0, place] = item
    return row


def matlab(boxes: np.ndarray) -> np.ndarray:
    """y1 x1 y2 x2 from 1, the last pixel included."""
    return np.stack([boxes[:, 1] + 1, boxes[:, 0] + 1, boxes[:, 3], boxes[:, 2]], axis=1)


def xywh(boxes: np.ndarray, first: int) -> np.ndarray:
    return np.concatenate([boxes[:, :2] + first, boxes[:, 2:] - boxes[:, :2]], axis=1)


def save_mat(path: Path, *, packed: bool = True, **variables: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    scipy.io.savemat(path, variables, do_compression=packed)
    return path


def selective_search_mat(path: Path, **more: object) -> Path:
    return save_mat(path, boxes=cells([matlab(b) for b in BOXES.values()]), images=cells(list(BOXES)), **more)


def mcg_folder(folder: Path) -> Path:
    for name, boxes in BOXES.items():
        save_mat(folder / f"{name}.mat", boxes=matlab(boxes), scores=SCORES[name].reshape(-1, 1))
    return folder


def photos(names: Sequence[str] = tuple(BOXES), size: tuple[int, int] = (100, 50)) -> tuple[Photo, ...]:
    return tuple(Photo(name, Path("photos") / f"{name}.jpg", *size) for name in names)


def everything(path: Path, form: str | None = None) -> dict[str, tuple[np.ndarray, np.ndarray | None]]:
    """All boxes of a file in our convention, and the scores, by id."""
    _, chosen = proposal_format(path, form)
    listing = chosen.open(path)
    rows = [listing.read(place) for place in range(len(listing.ids))]
    return {name: (chosen.convention.corners(r.boxes), r.scores) for name, r in zip(listing.ids, rows, strict=True)}


def assert_all(found: dict[str, tuple[np.ndarray, np.ndarray | None]], *, has_scores: bool) -> None:
    assert list(found) == list(BOXES)
    for name, (boxes, scores) in found.items():
        np.testing.assert_array_equal(boxes, BOXES[name])
        if len(boxes):
            assert (scores is not None) == has_scores
        if scores is not None:
            np.testing.assert_array_equal(scores, SCORES[name])


def in_convention(boxes: np.ndarray, convention: BoxConvention) -> np.ndarray:
    """Boxes of ours as a file of some convention writes them, number by number."""
    rows = []
    for x1, y1, x2, y2 in boxes.tolist():
        f, last = convention.first_pixel, int(convention.last_pixel == "included")
        rows.append({
            "xyxy": [x1 + f, y1 + f, x2 + f - last, y2 + f - last],
            "yxyx": [y1 + f, x1 + f, y2 + f - last, x2 + f - last],
            "xywh": [x1 + f, y1 + f, x2 - x1, y2 - y1],
        }[convention.boxes_are])  # fmt: skip
    return np.array(rows).reshape(-1, 4)
