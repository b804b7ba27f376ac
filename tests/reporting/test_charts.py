"""Charts are well-formed and complete, also without data and with odd values."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings, strategies as st

from tag2box.reporting import charts, plots
from tag2box.reporting.charts import (
    Bars,
    Key,
    Line,
    Reference,
    Stack,
    grouped_bars,
    line_chart,
    nice_ticks,
    shorten,
    spread_labels,
    stacked_bars,
)
from tag2box.reporting.run_figures import smooth, thin

NASTY = "<b>\"&'\x00\x07"


def hints(svg: str) -> list[str]:
    return [title.text or "" for title in ElementTree.fromstring(svg).iter("title")]


def test_line_chart_of_nothing_is_an_empty_frame() -> None:
    root = ElementTree.fromstring(line_chart([], label="nothing"))
    assert root.attrib["aria-label"] == "nothing"
    assert not list(root.iter("path"))


@pytest.mark.parametrize("points", [(), ((1.0, 0.5),), ((1.0, 0.0), (2.0, 0.0)), ((1.0, -3.0), (20000.0, 4.0))])
def test_line_chart_keeps_inside_its_frame(points: tuple[tuple[float, float], ...]) -> None:
    lines = [Line(NASTY, "run-0", points, points)]
    root = ElementTree.fromstring(line_chart(lines, label=NASTY, reference=Reference("true", 2.0)))
    for dot in root.iter("circle"):
        assert 40 <= float(dot.attrib["cx"]) <= 290
        assert 12 <= float(dot.attrib["cy"]) <= 182


def test_line_chart_has_its_numbers_in_tooltips() -> None:
    svg = line_chart([Line("OD", "run-0", ((10.0, 0.25), (20.0, 0.75)))], label="x", reference=Reference("true", 2.0))
    assert "OD, iteration 10: 0.25" in hints(svg)
    assert "OD: 0.75" in hints(svg)
    assert "true: 2" in hints(svg)


@pytest.mark.parametrize(
    ("names", "words"),
    [((), []), (("OD",), ["OD"]), (("+ both (OD-WSCL)", "x" * 30), ["+ both (OD-WSCL)", "x" * 17 + "…"])],
)
def test_names_of_lines_stand_whole_beside_them(names: tuple[str, ...], words: list[str]) -> None:
    lines = [Line(name, f"run-{i}", ((0.0, i), (1.0, i))) for i, name in enumerate(names)]
    root = ElementTree.fromstring(line_chart(lines, label="x"))
    beside = [text for text in root.iter("text") if text.attrib["class"].startswith("name")]
    assert [text.text for text in beside] == words
    assert all(float(text.attrib["x"]) + 6 * len(text.text or "") <= 360 for text in beside)


def test_a_long_line_has_few_tooltips() -> None:
    line = Line("a", "run-0", tuple((float(i), 1.0) for i in range(1000)))
    assert len(list(ElementTree.fromstring(line_chart([line], label="")).iter("circle"))) <= 41


@pytest.mark.parametrize("stacks", [[], [Stack("a", (0.0, 0.0))], [Stack(NASTY, (0.25, 0.75)), Stack("b", (1.0, 0.0))]])
def test_stacked_bars_fill_the_width(stacks: list[Stack]) -> None:
    root = ElementTree.fromstring(stacked_bars(stacks, ("found", "missed"), label=NASTY))
    widths = [float(bar.attrib["width"].rstrip("%")) for bar in root.iter("rect")]
    assert sum(widths) == pytest.approx(100 * sum(1 for stack in stacks if any(stack.shares)))


@pytest.mark.parametrize("groups", [[], [Bars(NASTY, (None, math.nan), math.nan)], [Bars("cat", (0.5, 1.5), 0.2)]])
def test_grouped_bars_have_one_bar_per_value(groups: list[Bars]) -> None:
    root = ElementTree.fromstring(grouped_bars(groups, [Key("a", "run-1"), Key(NASTY, "run-0")], label="x"))
    assert len(list(root.iter("rect"))) == 2 * len(groups)
    assert all(float(bar.attrib["width"].rstrip("%")) <= 62 for bar in root.iter("rect"))


def test_grouped_bars_have_tooltips_and_a_mark_of_the_truth() -> None:
    svg = grouped_bars([Bars("cat", (0.5, None), 0.25)], [Key("a", "run-1"), Key("b", "run-0")], label="x")
    assert hints(svg) == ["cat", "cat, a: 50.0", "cat, b: –", "cat, true number: 25.0"]  # noqa: RUF001


@settings(max_examples=500, deadline=None)
@given(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6))
def test_ticks_enclose_the_data_and_are_few(a: float, b: float) -> None:
    low, high = min(a, b), max(a, b)
    ticks = nice_ticks(low, high)
    slack = 1e-6 * max(1.0, abs(low), abs(high))
    assert ticks[0] <= low + slack
    assert ticks[-1] >= high - slack
    assert 2 <= len(ticks) <= 8


@settings(deadline=None)
@given(st.lists(st.floats(10, 180), max_size=8))
def test_names_beside_lines_never_touch(wanted: list[float]) -> None:
    placed = sorted(spread_labels(wanted, 13, low=12, high=182))
    assert all(b - a >= 13 - 1e-6 for a, b in pairwise(placed))


def test_shorten_keeps_short_words_and_cuts_long_ones() -> None:
    assert shorten("", 5) == ""
    assert shorten("short", 5) == "short"
    assert shorten("longer words", 6) == "longe…"


@pytest.mark.parametrize("count", [0, 1, 2, 239, 240, 241, 5000])
def test_thinning_keeps_the_mean_and_the_limit(count: int) -> None:
    points = tuple((float(i), float(i % 7)) for i in range(count))
    kept = thin(points)
    assert len(kept) <= 240
    assert bool(kept) == bool(points)
    if count and count % len(kept) == 0:
        assert sum(y for _, y in kept) / len(kept) == pytest.approx(sum(y for _, y in points) / count)


def test_smoothing_leaves_straight_lines_alone() -> None:
    points = tuple((float(i), 2.0 * i) for i in range(200))
    assert [y for _, y in smooth(points)] == pytest.approx([y for _, y in points])
    assert smooth(()) == ()


# ---------------------------------------------------------------- intervals and reliability


def test_intervals_without_rows_and_with_a_mark_per_known_share() -> None:
    assert len(ElementTree.fromstring(plots.interval_bars([], [], label="none"))) == 0
    rows = [
        plots.IntervalRow("<a>", 0.2, 0.4, 0.3, "3 of 10", "verdict-not"),
        plots.IntervalRow("b", 0.6, 0.9, 0.8, "8 of 10", "verdict-use"),
        plots.IntervalRow("c", 0.3, 0.8, 0.5, "5 of 10", "verdict-more"),
        plots.IntervalRow("d", 0.0, 1.0, None, "0 of 0", "verdict-more"),
    ]
    svg = plots.interval_bars(rows, [(0.5, "limit")], label="precision")
    ElementTree.fromstring(svg)
    assert svg.count('class="whisker"') == 4 and svg.count('class="point') == 3
    assert svg.count("<rect") == 1 and svg.count("hollow") == 1, "each verdict has a shape of its own"
    low, high = (float(end) for end in re.findall(r'class="whisker" x1="([\d.]+)%" x2="([\d.]+)%"', svg)[3])
    assert high - low == pytest.approx(plots.INTERVAL_ROOM)


def test_reliability_without_points_and_on_the_diagonal() -> None:
    key = charts.Key("scores", "run-0")
    ElementTree.fromstring(plots.reliability_chart([plots.Dots(key, ())], label="none"))
    svg = plots.reliability_chart([plots.Dots(key, ((0.0, 0.0, 1), (1.0, 1.0, 9)))], label="both ends")
    circles = [node for node in ElementTree.fromstring(svg).iter() if node.tag == "circle"]
    lines = [node for node in ElementTree.fromstring(svg).iter() if node.tag == "line"]
    (line,) = (node for node in lines if node.get("x1") != node.get("x2") and node.get("y1") != node.get("y2"))
    ends = [(line.get("x1"), line.get("y1")), (line.get("x2"), line.get("y2"))]
    assert [(node.get("cx"), node.get("cy")) for node in circles] == ends
    assert float(circles[1].get("r") or 0) > float(circles[0].get("r") or 0)
