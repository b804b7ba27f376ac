"""The page of a study: mean and spread, the paper's figures beside, nothing that a name could break."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from tag2box.reporting.formatting import UNKNOWN
from tag2box.reporting.study_page import build_study_page, sweep_figure, write_study_page
from tag2box.reporting.study_tables import (
    SeedFigures,
    StudyInputs,
    StudyRow,
    StudyTable,
    Sweep,
    markdown,
    reading,
    table_json,
)

NASTY = '<script>alert("x")</script> & | \\'


def table(*rows: StudyRow, against: str = "base") -> StudyTable:
    return StudyTable(("mAP50", "CorLoc"), ("mAP50", "other"), rows, against)


def row(name: str, *values: float, paper: tuple[float | None, ...] = (None, None), missing: str = "") -> StudyRow:
    figures = SeedFigures(dict(enumerate(values)))
    runs = {seed: f"cells/{name}{seed}" for seed in range(len(values))}
    return StudyRow(name, (figures, figures), paper, runs, ("plan.iterations=3",), missing)


@pytest.mark.parametrize(
    ("values", "words"),
    [((), UNKNOWN), ((41.26,), "41.3"), ((40.0, 42.0), "41.0 (40.0 to 42.0)"), ((1.0, 1.0, 1.0), "1.0 (1.0 to 1.0)")],
)
def test_figures_in_words(values, words):
    assert SeedFigures(dict(enumerate(values))).words() == words


@given(st.dictionaries(st.integers(0, 9), st.floats(0, 100), min_size=1))
def test_the_mean_lies_between_the_ends(by_seed):
    figures = SeedFigures(by_seed)
    low, high = figures.ends
    assert low - 1e-9 <= figures.mean <= high + 1e-9


def test_an_empty_table_has_no_summary():
    empty = table()
    assert markdown(empty).count("\n") == 2
    assert table_json(empty, empty.rows) == [] and reading(empty) == "" and empty.baseline() is None


def test_the_papers_figure_stands_beside_ours_of_that_name():
    lines = markdown(table(row("base", 40.0, paper=(52.3, 7.0)))).splitlines()
    assert lines[0] == "|  | mAP50 | paper: mAP50 | paper: other | CorLoc |"
    assert lines[2] == "| base | 40.0 | 52.3 | 7.0 | 40.0 |"


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([row("base", 40.0)], ""),
        ([row("base", 40.0, 41.0), row("ours", 44.0, 40.0)], "ours ends 1.5 points of mAP50 above base, on 1 of 2"),
        ([row("base", 40.0), row("ours", 39.0)], "No row is above base in mAP50."),
        ([row("base", 40.0), row("ours", 40.01)], "No row is above base in mAP50."),
        ([row("first", 40.0), row("ours", 39.0)], ""),
        ([row("base"), row("ours", 39.0)], ""),
    ],
)
def test_the_reading_is_computed(rows, words):
    found = reading(table(*rows))
    assert found.startswith(words) and bool(found) is bool(words)


def inputs(shown: StudyTable | None, **more: object) -> StudyInputs:
    words = {"kicker": "k", "title": "t", "shows": "s", "setting": "Run somewhere.", "origin": "table 9"}
    return StudyInputs(**words, table=shown, **more)  # type: ignore[arg-type]


def test_rows_that_were_not_run_are_apart_with_their_reason():
    theirs = [row(name, paper=(3.0, None), missing="no weights") for name in ("theirs", "others'")]
    third = row("third", paper=(None, None), missing="no weights")
    page = build_study_page(inputs(table(row("base", 1.0), *theirs, third)))
    main, absent = page.sections[0].tables
    assert [line.name for line in main.rows] == ["base"]
    assert [(line.name, line.cells) for line in absent.rows] == [
        (name, ("3.0", UNKNOWN)) for name in ("theirs", "others'")
    ]
    assert page.sections[0].warnings == ("theirs; others'; third: no weights",)


def test_differences_are_taken_seed_by_seed():
    page = build_study_page(inputs(table(row("base", 40.0, 50.0), row("ours", 41.0, 48.0))))
    difference = page.sections[0].tables[1]
    assert difference.rows[0].cells == ("+1.0", "-2.0", "-0.5")
    alone = build_study_page(inputs(table(row("a", 40.0), row("b", 41.0), against="")))
    assert len(alone.sections[0].tables) == 1


def test_names_are_escaped_and_runs_are_linked(tmp_path):
    shown = table(row(NASTY, 1.0), row("base", 2.0, missing=NASTY))
    write_study_page(inputs(shown, notes=(NASTY,)), tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "<script>alert" not in text
    assert '<a href="cells/base0/">0</a>' in text
    assert "<small>" not in text  # one seed has no spread
    assert r"&lt;script&gt;" in text
    assert markdown(shown).splitlines()[2].count(" | ") == 4


def test_a_study_without_a_table_has_its_notes(tmp_path):
    page = build_study_page(inputs(None, notes=("nothing is trained",)))
    assert [section.id for section in page.sections] == ["notes", "about"]


# ---------------------------------------------------------------- sweeps


def sweep(*figures: SeedFigures) -> Sweep:
    return Sweep("τ", "a.b", tuple(0.1 * (i + 1) for i in range(len(figures))), figures, 0.1)


@pytest.mark.parametrize("figures", [(), (SeedFigures({}),)])
def test_an_empty_sweep_is_stated(figures):
    assert sweep_figure(sweep(*figures)).reading == "Nothing was measured."


def test_a_sweep_shows_best_worst_and_spread():
    figure = sweep_figure(sweep(SeedFigures({0: 40.0, 1: 42.0}), SeedFigures({}), SeedFigures({0: 44.5})))
    assert "From 41.0 at 0.1 to 44.5 at 0.3: 3.5 points between the means" in figure.reading
    assert "differ by up to 2.0" in figure.reading
    assert str(figure.charts[0]).count("<circle") == 2


@given(st.lists(st.dictionaries(st.integers(0, 3), st.floats(0, 100)), min_size=1, max_size=6))
def test_any_sweep_is_drawn_within_its_frame(values):
    figure = sweep_figure(sweep(*(SeedFigures(v) for v in values)))
    assert "nan" not in "".join(map(str, figure.charts))
