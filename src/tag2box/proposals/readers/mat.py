"""Proposals in MATLAB files: selective search, MCG and COB, EdgeBoxes.

Three layouts, the same for all: a file with a cell array of boxes and a cell array ``images`` of ids; a folder with a
file for each image, whose name is the id; a single file of the latter kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tag2box.errors import UserError
from tag2box.proposals.readers.listing import Listing, Rows, id_of, rows_of, same_length
from tag2box.proposals.readers.matfile import Matrix, read_mat

IDS = ("images", "ids", "image_ids")


@dataclass(frozen=True, slots=True)
class MatNames:
    """The names under which a program saves its boxes and scores."""

    boxes: tuple[str, ...]
    scores: tuple[str, ...]

    def __call__(self, path: Path) -> Listing:
        """The proposals in a file or in the files of a folder, which are opened one by one."""
        if path.is_dir():
            files = mat_files(path)
            return Listing(tuple(file.stem for file in files), lambda place: self._image(files[place]))
        found = read_mat(path)
        boxes = _required(path, found, self.boxes)
        if not boxes.is_cells:
            return Listing((path.stem,), lambda place: self._image(path))
        return self._cells(path, boxes, found)

    def _image(self, path: Path) -> Rows:
        found = read_mat(path)
        scores = _one_of(found, self.scores)
        boxes = _required(path, found, self.boxes).numbers()
        return rows_of(f"{path}", boxes, None if scores is None else scores.numbers())

    def _cells(self, path: Path, boxes: Matrix, found: dict[str, Matrix]) -> Listing:
        ids = tuple(id_of(f"{path}: images", text) for text in _required(path, found, IDS).texts())
        cells, scores = boxes.cells(), _one_of(found, self.scores)
        same_length(f"{path}", ("cells of boxes", "images"), (len(cells), len(ids)))
        columns = None if scores is None else scores.cells()
        if columns is not None:
            same_length(f"{path}", ("cells of boxes", "cells of scores"), (len(cells), len(columns)))

        def read(place: int) -> Rows:
            column = None if columns is None else columns[place].numbers()
            return rows_of(f"{path}: image {ids[place]}", cells[place].numbers(), column)

        return Listing(ids, read)


selective_search = MatNames(boxes=("boxes",), scores=("boxScores", "scores"))
mcg = MatNames(boxes=("boxes", "bboxes"), scores=("scores", "bboxes_scores"))
edge_boxes = MatNames(boxes=("bbs", "boxes"), scores=("boxScores", "scores"))


def mat_files(folder: Path) -> tuple[Path, ...]:
    """The MATLAB files of a folder, by name."""
    files = tuple(sorted(folder.glob("*.mat")))
    if not files:
        raise UserError(f"{folder}: no .mat files in this folder; name the file, or the folder that has them")
    return files


def recognise_mat(path: Path) -> str:
    """The format of a MATLAB file or of a folder of them, by the names and kinds of its variables."""
    sample = mat_files(path)[0] if path.is_dir() else path
    found = read_mat(sample)
    if "bbs" in found:
        return "edge-boxes"
    boxes = _required(sample, found, ("boxes", "bboxes"))
    return "selective-search" if boxes.is_cells else "mcg"


def _one_of(found: dict[str, Matrix], names: tuple[str, ...]) -> Matrix | None:
    return next((found[name] for name in names if name in found), None)


def _required(path: Path, found: dict[str, Matrix], names: tuple[str, ...]) -> Matrix:
    matrix = _one_of(found, names)
    if matrix is None:
        there = ", ".join(ascii(name)[1:-1][:40] for name in sorted(found)[:8]) or "none"
        raise UserError(f"{path}: no variable {' or '.join(names)} (there is: {there}); check the file or --format")
    return matrix
