"""Values of a comparison's page: ranks, agreement with the paper, comparable boxes, photos that all runs share."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tag2box.annotations import Detections, Objects, Truth
from tag2box.experiments.comparison import agreement, ranking
from tag2box.experiments.outcomes import best_of
from tag2box.experiments.pictures import best_boxes, last_gallery, same_photos
from tag2box.reporting.study_tables import SeedFigures, StudyRow, StudyTable
from tag2box.training.events import Gallery, GalleryPhoto


def row_of(name: str, *by_seed: float, paper: float | None = None) -> StudyRow:
    return StudyRow(name, (SeedFigures(dict(enumerate(by_seed))),), (paper,), runs={0: "cells/x"})


ROWS = (row_of("a", 10, 12, paper=30.0), row_of("b", 11, 9, paper=20.0), row_of("c", 1, 2, paper=40.0))


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ((), "Of 0 pairs of systems, 0 are in the paper's order on VOC07. All seeds agree on 0 of these pairs, "
             "and of those 0 are in the paper's order."),
        (ROWS[:1], "Of 0 pairs"),
        (ROWS[:2], "Of 1 pair of systems, 1 are in the paper's order on VOC07. All seeds agree on 0"),
        (ROWS, "Of 3 pairs of systems, 1 are in the paper's order on VOC07. All seeds agree on 2 of these pairs, "
               "and of those 0 are"),
        ((*ROWS[:2], row_of("no figure", 5, 5)), "Of 1 pair of"),
    ],
)  # fmt: skip
def test_agreement_counts_pairs(rows, words) -> None:
    assert agreement(rows, {row.name: row.paper[0] for row in rows}).startswith(words)


def test_the_ranking_has_ranks_here_and_in_the_paper() -> None:
    section = ranking(StudyTable(("mAP50",), ("VOC07",), (*ROWS, row_of("d"))))
    assert [(line.name, *line.cells) for line in section.tables[0].rows] == [
        ("a", "11.0", "1", "2", "30.0"), ("b", "10.0", "2", "3", "20.0"), ("c", "1.5", "3", "1", "40.0"),
        ("d", "–", "–", "–", "–"),  # noqa: RUF001
    ]  # fmt: skip


def boxes(*scores: float, label: int = 0) -> Detections:
    count = len(scores)
    corners = torch.tensor([[0.0, 0, 10, 10]]).repeat(count, 1)
    return Detections(corners, torch.tensor(scores), torch.full((count,), label, dtype=torch.long))


def truth_of(*counts: int) -> Truth:
    objects = tuple(Objects.of([[0, 0, 10, 10]] * n, [0] * n) for n in counts)
    return Truth(("cat", "dog"), tuple(f"{i}" for i in range(len(counts))), ((20, 20),) * len(counts), objects)


@pytest.mark.parametrize(
    ("found", "counts", "kept"),
    [
        ({}, (), {}),
        ({}, (2,), {}),
        ({"0": boxes()}, (1,), {"0": []}),
        ({"0": boxes(0.1, 0.3)}, (0,), {"0": []}),
        ({"0": boxes(0.1, 0.3, 0.2), "1": boxes(0.9)}, (1, 1), {"0": [0.3], "1": [0.9]}),
        ({"0": boxes(0.1, 0.1), "1": boxes(0.1)}, (1, 1), {"0": [0.1, 0.1], "1": []}),
        ({"0": boxes(0.5, label=1)}, (1,), {"0": []}),
    ],
)
def test_as_many_boxes_of_a_class_are_kept_as_it_has_objects(found, counts, kept) -> None:
    got = best_of(found, truth_of(*counts))
    expected = {photo: torch.tensor(scores).tolist() for photo, scores in kept.items()}
    assert {photo: each.scores.tolist() for photo, each in got.items()} == expected


def test_a_photo_shows_as_many_of_the_best_boxes_as_it_has_objects() -> None:
    objects = replace(Objects.of([[0, 0, 5, 5], [5, 5, 9, 9]], [0, 0]), difficult=torch.tensor([False, True]))
    assert best_boxes(boxes(0.1, 0.7, 0.3), objects).scores.tolist() == boxes(0.7).scores.tolist()
    assert len(best_boxes(boxes(), objects)) == len(best_boxes(boxes(0.4), Objects.of([], []))) == 0


def test_photos_in_the_galleries_of_all_runs() -> None:
    class Record:
        def __init__(self, *ids: str) -> None:
            self.galleries = [Gallery(1, tuple(GalleryPhoto(i, (), (), ()) for i in ids))] if ids else []

    assert same_photos([], 2) == ()
    assert same_photos([Record("a", "b"), Record()], 2) == ()
    assert same_photos([Record("a", "b", "c", "d"), Record("d", "c", "b")], 2) == ("b", "d")
    assert last_gallery(Record()) == {}
