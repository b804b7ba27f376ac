"""The page about proposals: curves end at the number of boxes, sentences follow the numbers, worst photos are drawn."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from test_report_page import read

from tag2box.annotations import Objects, TaggedPhotos
from tag2box.data.stats import SIZE_EDGES
from tag2box.proposals.base import Candidates
from tag2box.proposals.recall import RecallMeter, find_misses
from tag2box.reporting.recall_page import (
    PhotoMisses,
    RecallInputs,
    RecallSource,
    WorstPhoto,
    build_recall_page,
    write_recall_page,
)
from tag2box.reporting.sections import SectionPage, render_page
from tiny import tiny_photos

OBJECTS = Objects.of([[0, 0, 20, 20], [24, 4, 40, 24]], [0, 1])
GOOD = torch.tensor([[24.0, 4, 40, 24], [0, 0, 20, 20], [1, 1, 9, 9]])
POOR = torch.tensor([[0.0, 0, 20, 6]])
NASTY = "<b>\"&'"
SECTIONS = ["curves", "sources", "sizes", "classes"]


def source(name: str, boxes: torch.Tensor, missing: tuple[str, ...] = (), photos: int = 2) -> RecallSource:
    meter = RecallMeter(3, SIZE_EDGES)
    for _ in range(photos):
        meter.add(Candidates.unranked(boxes), OBJECTS, (48, 40))
    return RecallSource(name, "made by hand", meter.result(), missing)


def lost(boxes: torch.Tensor) -> PhotoMisses:
    found = find_misses(Candidates.unranked(boxes), OBJECTS)
    return PhotoMisses(found, tuple(None if miss.best is None else tuple(boxes[miss.best].tolist()) for miss in found))


def page(*sources: RecallSource, worst: tuple[WorstPhoto, ...] = ()) -> SectionPage:
    return build_recall_page(RecallInputs("Proposals", ("cat", "dog", "eel"), sources, worst))


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> TaggedPhotos:
    return tiny_photos(tmp_path_factory.mktemp("recall"), 4)


def readings(leaf: SectionPage, section: str) -> list[str]:
    return [figure.reading for s in leaf.sections if s.id == section for figure in s.figures]


def test_no_boxes_at_all_have_a_page() -> None:
    leaf = page(source("none", torch.zeros(0, 4)))
    assert [section.id for section in leaf.sections] == SECTIONS
    assert readings(leaf, "curves")[0] == "All boxes: 0.0 % of the objects."
    assert read(render_page(leaf)).sections == SECTIONS


def test_one_source_is_read_alone() -> None:
    leaf = page(source("good", GOOD))
    assert readings(leaf, "curves") == ["All boxes: 100.0 % of the objects."] * 3 + [
        "All boxes: 100.0 % overlap on average."
    ]
    assert "reaches every object of every class" in next(s.words for s in leaf.sections if s.id == "classes")


def test_few_boxes_are_read_where_there_are_more() -> None:
    many = torch.cat([torch.tensor([[40.0, 30, 44, 34]]).expand(150, 4), GOOD])
    first = readings(page(source("late", many)), "curves")[0]
    assert first == "All boxes: 100.0 % of the objects. The first 100 of each photo: 0.0 % of the objects."


def test_several_sources_are_compared() -> None:
    leaf = page(source("poor", POOR), source("good", GOOD))
    assert readings(leaf, "curves")[0] == (
        "All boxes: 100.0 % of the objects with good, the best, and 0.0 % with poor, the last."
    )
    assert next(fact.note for fact in leaf.facts) == "good, all boxes"
    heads = next(s.tables[0].heads for s in leaf.sections if s.id == "classes")
    assert heads[:3] == ("objects", "IoU 0.5\npoor", "IoU 0.5\ngood")
    rows = next(s.tables[0].rows for s in leaf.sections if s.id == "classes")
    assert rows[0].cells[:3] == ("2", "0.0", "100.0")
    assert set(rows[2].cells[1:]) == {"–"}  # noqa: RUF001 - no eel anywhere
    assert readings(leaf, "sizes")[0] == "good reaches 100.0 % of 4 large objects."


def test_equal_sources_are_not_ranked() -> None:
    first = readings(page(source("a", GOOD), source("b", GOOD)), "curves")[0]
    assert first == "All boxes: 100.0 % of the objects, whatever the source."


def test_a_line_ends_where_the_boxes_do() -> None:
    leaf = page(source("good", GOOD))
    chart = ElementTree.fromstring(leaf.sections[0].figures[0].charts[0])
    tips = [title.text for title in chart.iter("title")]
    assert "all boxes, boxes per photo 1: 50" in tips
    assert "all boxes, boxes per photo 3: 100" in tips
    assert not [tip for tip in tips if tip and "photo 5:" in tip]


def test_missing_photos_are_named() -> None:
    leaf = page(source("half", GOOD, ("p7", "p8")))
    assert "half has no boxes for 2 photos: p7 and p8." in next(
        s.warnings[0] for s in leaf.sections if s.id == "sources"
    )


@pytest.mark.parametrize("sources", [1, 2])
def test_the_worst_photos_show_object_and_best_box(photos: TaggedPhotos, tmp_path: Path, sources: int) -> None:
    kinds = [source("poor", POOR), source(NASTY, torch.zeros(0, 4))][:sources]
    missed = [lost(POOR), lost(torch.zeros(0, 4))][:sources]
    worst = tuple(WorstPhoto(photo, OBJECTS, tuple(missed)) for photo in photos.photos)
    out = tmp_path / "recall.html"
    write_recall_page(RecallInputs("Proposals", ("cat", "dog", "eel"), tuple(kinds), worst), out)
    html = out.read_text(encoding="utf-8")
    assert read(html).sections == [*SECTIONS, "worst"]
    body = html.split("</style>")[1]
    assert body.count('class="box missed') == 4 * 2 * sources
    assert body.count('class="box pseudo') == 4 * 2  # the second source has no box to show
    assert 'title="best box for cat: overlap 0.30"' in body
    assert "2 of 2 objects out of reach" in body
    assert html.count("data:image/jpeg") == 4
    assert "<b>&#34;" not in body and not re.search(r"https?://", html)


def test_photos_that_are_gone_are_left_out(photos: TaggedPhotos, tmp_path: Path) -> None:
    gone = tiny_photos(tmp_path, 1).photos[0]
    gone.path.unlink()
    leaf = page(source("poor", POOR), worst=(WorstPhoto(gone, OBJECTS, (lost(POOR),)),))
    assert [section.id for section in leaf.sections] == SECTIONS
    assert leaf.unreadable == ("photo0.jpg",)


def test_crowded_photos_have_no_labels(photos: TaggedPhotos) -> None:
    crowd = Objects.of([[4 * i, 0, 4 * i + 3, 3] for i in range(5)], [0] * 5)
    found = find_misses(Candidates.unranked(POOR), crowd)
    misses = PhotoMisses(found, tuple(tuple(POOR[0].tolist()) for _ in found))
    leaf = page(source("poor", POOR), worst=(WorstPhoto(photos.photos[0], crowd, (misses,)),))
    boxes = leaf.sections[-1].shelves[0].tiles[0].boxes
    assert len(boxes) == 10 and not any(box.label for box in boxes) and all(box.hint for box in boxes)
