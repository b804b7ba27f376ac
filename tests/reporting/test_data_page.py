"""The page of a dataset, and its charts: complete, self-contained, escaped, and true to the numbers."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given, settings, strategies as st
from test_report_page import read

from tag2box.annotations import Objects, Photo, TaggedPhotos, Truth
from tag2box.data.stats import count_dataset, count_objects, count_sizes, count_tags
from tag2box.reporting import dataset_figures
from tag2box.reporting.charts import Key, Line
from tag2box.reporting.dataset_page import DataInputs, build_data_page, write_data_page
from tag2box.reporting.plots import (
    Bubble,
    PlotColumn,
    Shares,
    bubble_chart,
    budget_chart,
    columns,
    gather_bubbles,
    matrix,
    share_bars,
    short,
)
from tag2box.reporting.sections import render_page
from tiny import tiny_photos

NASTY = "<b>\"&'\x00\x07"
BOXED = {"missed", "numbers", "boxes"}


def hints(svg: str) -> list[str]:
    return [title.text or "" for title in ElementTree.fromstring(svg).iter("title")]


def words(inputs: DataInputs) -> str:
    return render_page(build_data_page(inputs)).split("</style>")[1]


def boxed(tagged: TaggedPhotos, per_tag: int = 2) -> Truth:
    """A truth with ``per_tag`` objects side by side for every tag."""
    objects = []
    for row in tagged.tags:
        labels = row.nonzero().flatten().tolist()
        boxes = [[10 * i, 4 * c, 10 * i + 9, 4 * c + 3] for c in labels for i in range(per_tag)]
        objects.append(Objects.of(boxes, [c for c in labels for _ in range(per_tag)]))
    sizes = tuple((p.width, p.height) for p in tagged.photos)
    return Truth(tagged.classes, tuple(p.id for p in tagged.photos), sizes, tuple(objects))


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> TaggedPhotos:
    return tiny_photos(tmp_path_factory.mktemp("stats"), 7)


# ---------------------------------------------------------------- charts


@pytest.mark.parametrize("bars", [[], [PlotColumn("0", 0.0)], [PlotColumn(NASTY, 3.0), PlotColumn("b", 120_000.0)]])
def test_columns_stand_on_the_axis(bars: list[PlotColumn]) -> None:
    root = ElementTree.fromstring(columns(bars, label=NASTY, x_label="x", y_label="y"))
    rects = list(root.iter("rect"))
    assert len(rects) == len(bars)
    assert all(float(r.attrib["y"]) + float(r.attrib["height"]) == pytest.approx(182, abs=0.1) for r in rects)
    assert {"x", "y"} <= {text.text for text in root.iter("text")}


@pytest.mark.parametrize(("value", "text"), [(0, "0"), (9999, "9 999"), (10_000, "10k"), (16_290, "16.3k")])
def test_short_counts(value: float, text: str) -> None:
    assert short(value) == text


@pytest.mark.parametrize("points", [(), ((1.0, 0.0),), ((1.0, 5.0), (2000.0, 100.0)), ((1.0, 1.0), (9.0, 2.0))])
def test_budget_chart_keeps_inside_its_frame(points: tuple[tuple[float, float], ...]) -> None:
    svg = budget_chart([Line(NASTY, "run-0", points)], label=NASTY, x_label="boxes", y_label="per cent")
    root = ElementTree.fromstring(svg)
    for dot in root.iter("circle"):
        assert 39.9 <= float(dot.attrib["cx"]) <= 290.1
        assert 11.9 <= float(dot.attrib["cy"]) <= 182.1


def test_a_logarithmic_axis_gives_each_decade_as_much_room() -> None:
    line = Line("a", "run-0", ((1.0, 0.0), (10.0, 0.0), (100.0, 0.0), (1000.0, 0.0)))
    root = ElementTree.fromstring(budget_chart([line], label="", x_label="boxes", y_label=""))
    at = sorted({float(dot.attrib["cx"]) for dot in root.iter("circle")})
    assert [b - a for a, b in itertools.pairwise(at)] == pytest.approx([250 / 3] * 3, abs=0.02)


@pytest.mark.parametrize("rows", [[], [Shares("empty", (0, 0))], [Shares(NASTY, (1, 3), "x"), Shares("b", (2, 0))]])
def test_shares_fill_their_room(rows: list[Shares]) -> None:
    svg = share_bars(rows, [Key("one", "level-0"), Key("two", "level-1")], label=NASTY)
    bars = list(ElementTree.fromstring(svg).iter("rect"))
    assert sum(float(bar.attrib["width"].rstrip("%")) for bar in bars) == pytest.approx(
        61 * sum(1 for row in rows if any(row.counts)), abs=0.01
    )
    assert [h for h in hints(svg) if "two" in h] == [f"{NASTY[:-2]}, two: 3 (75.0 %)"] * bool(rows and rows[0].figure)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 9)), max_size=60))
def test_gathered_bubbles_are_few_and_lose_no_photo(sizes: list[tuple[int, int, int]]) -> None:
    bubbles = [Bubble(float(x), float(y), n) for x, y, n in sizes]
    kept = gather_bubbles(bubbles, limit=10)
    assert sum(b.count for b in kept) == sum(n for _, _, n in sizes)
    assert len(kept) <= len(bubbles)
    if len(bubbles) <= 10:
        assert kept == tuple(bubbles)
    else:
        assert sum(b.x * b.count for b in kept) == pytest.approx(sum(x * n for x, _, n in sizes))


@pytest.mark.parametrize("bubbles", [[], [Bubble(640.0, 480.0, 1)], [Bubble(9.0, 30000.0, 5), Bubble(30000.0, 9.0, 2)]])
def test_bubbles_keep_inside_their_frame(bubbles: list[Bubble]) -> None:
    root = ElementTree.fromstring(bubble_chart(bubbles, label="x", x_label="w", y_label="h"))
    drawn = list(root.iter("circle"))
    assert len(drawn) == len(bubbles)
    assert all(40 <= float(c.attrib["cx"]) <= 346 and 12 <= float(c.attrib["cy"]) <= 182 for c in drawn)


@pytest.mark.parametrize("count", [0, 1, 14, 15, 41, 80])
def test_a_matrix_has_a_cell_for_every_share(count: int) -> None:
    values = [[(i + j) % 3 / 2 for j in range(count)] for i in range(count)]
    svg = matrix([NASTY] * count, values, label="m", tip=lambda a, b: f"{a},{b}")
    cells = list(ElementTree.fromstring(svg).iter("rect"))
    filled = sum(value > 0 for row in values for value in row)
    assert len(cells) == (count**2 if count <= 40 else filled)
    assert len(hints(svg)) == (count**2 if count <= 40 else 0)
    assert len(svg) < 1_000_000


# ---------------------------------------------------------------- sentences


def test_the_reading_of_figure_1c_counts() -> None:
    known = Truth(("cat", "dog"), ("a", "b"), ((50, 50),) * 2,
                  (Objects.of([[0, 0, 5, 5]] * 3, [0, 0, 1]), Objects.of([[0, 0, 5, 5]], [0])))  # fmt: skip
    figure = dataset_figures.missed_figure(count_objects(known))
    assert figure.reading == (
        "One box per class and photo finds at most 3 of 4 objects: 1 (25.0 %) are left out; most of all cat (33.3 %)."
    )
    assert {"cat, objects: 3", "dog, objects: 1"} <= set(hints(figure.charts[0]))
    number = dataset_figures.objects_per_photo_figure(count_objects(known))
    assert "has 1.33 objects there on average, and a single one on 66.7 % of the photos" in number.reading
    assert "cat has the most (1.5 per photo), dog the fewest (1.0)" in number.reading


def test_readings_when_nothing_is_missed() -> None:
    known = Truth(("cat",), ("a",), ((50, 50),), (Objects.of([[0, 0, 5, 5]], [0]),))
    counted = count_objects(known)
    assert dataset_figures.missed_figure(counted).reading.endswith("every photo shows its classes once.")
    assert dataset_figures.neighbour_figure(counted).reading == "0.0 % of the objects touch another of their class."
    assert dataset_figures.objects_per_photo_figure(counted).reading.endswith("a single one on 100.0 % of the photos.")


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([], "No photo has a tag."),
        ([[1, 0]], "The only class, a, is on 1 photo."),
        ([[1, 1]], "All classes are on the same number of photos: 1."),
        ([[1, 1]] * 9 + [[1, 0]], "Well balanced: from 9 photos (b) to 10 (a)."),
        ([[1, 1], [1, 0], [1, 0]], "a is on 3 photos, 3.0 times as many as b (1)."),
    ],
)
def test_the_reading_of_the_balance(rows: list[list[int]], expected: str) -> None:
    photos = tuple(Photo(str(i), Path("x"), 4, 3) for i in range(len(rows)))
    tags = torch.tensor(rows, dtype=torch.bool).reshape(-1, 2)
    assert dataset_figures.balance_figure(count_tags(TaggedPhotos(("a", "b"), photos, tags))).reading == expected


def test_tags_that_make_learning_hard_are_listed() -> None:
    rows = [[1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [0, 0, 0, 0, 0]]
    doubt = torch.tensor([[0, 0, 0, 0, 1]] * 3, dtype=torch.bool)
    photos = tuple(Photo(f"p{i}", Path("x"), 4, 3) for i in range(3))
    stats = count_tags(TaggedPhotos(("a", "b", "c", "d", "e"), photos, torch.tensor(rows, dtype=torch.bool), doubt))
    twins, bound, unused, untagged, unsure = dataset_figures.tag_warnings(stats)
    assert twins.startswith("Never apart: a and b.")
    assert bound.startswith("Never without another class: c (with a) and c (with b).")
    assert unused == "No photo has these tags: d and e."
    assert untagged.startswith("1 photo without any tag: p2.")
    assert unsure == "3 unsure tags, neither positive nor negative: e (3)."


def test_the_reading_of_sizes_and_shapes() -> None:
    sizes = count_sizes([Photo(str(i), Path("x"), w, h) for i, (w, h) in enumerate([(40, 30), (40, 30), (10, 90)])])
    assert (
        "2 different sizes in 3 photos; the most frequent is 40 x 30 (66.7 %)"
        in dataset_figures.photo_size_figure(sizes).reading
    )
    assert (
        "Short sides range from 10 to 30 pixels, with a median of 30."
        in dataset_figures.photo_size_figure(sizes).reading
    )
    shape = dataset_figures.shape_figure(sizes)
    assert shape.reading.startswith("66.7 % of the photos are landscape, 33.3 % portrait and 0.0 % square")
    assert {"4:3: 2", "1:2: 1"} <= set(hints(shape.charts[0]))
    assert dataset_figures.photo_size_figure(count_sizes([])).reading == "There is no photo."


# ---------------------------------------------------------------- the page


def test_nothing_at_all_has_a_page() -> None:
    none = TaggedPhotos((), (), torch.zeros(0, 0, dtype=torch.bool))
    html = render_page(build_data_page(DataInputs("Nothing", none, count_dataset(none))))
    assert set(read(html).sections) == {"tags", "photos", "counts"}


def test_tags_alone_leave_objects_out(photos: TaggedPhotos) -> None:
    html = words(DataInputs("Tags", photos, count_dataset(photos)))
    assert not {f'id="{name}"' for name in BOXED if f'id="{name}"' in html}
    assert "There are tags, but no boxes" in html


def test_a_dataset_with_boxes_fills_every_section(photos: TaggedPhotos, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "stats.html"
    write_data_page(DataInputs(NASTY, photos, count_dataset(photos, boxed(photos))), out)
    html = out.read_text(encoding="utf-8")
    reader = read(html)
    assert set(reader.sections) == BOXED | {"tags", "together", "photos", "sheet", "counts"}
    assert {link.removeprefix("#") for link in reader.links} == set(reader.sections)
    assert len(reader.ids) == len(set(reader.ids))
    assert "<b>" not in html.split("</style>")[1].split("</h1>")[0]
    assert not re.search(r"https?://|//cdn|@import|@font-face", html)
    assert html.count("data:image/jpeg") == len(photos)
    charts = re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL)
    assert len(charts) == 9
    assert all(ElementTree.fromstring(chart).attrib["aria-label"] for chart in charts)
    assert len(re.findall(r'<p class="reading">[^<]+\.</p>', html)) == 9


def test_no_objects_in_a_dataset_that_has_boxes(photos: TaggedPhotos) -> None:
    html = words(DataInputs("x", photos, count_dataset(photos, boxed(photos, per_tag=0))))
    assert "has no object of these classes" in html
    assert 'id="missed"' not in html


def test_photos_that_cannot_be_shown_are_named(tmp_path: Path) -> None:
    tagged = tiny_photos(tmp_path, 3)
    tagged.photos[1].path.write_bytes(b"broken")
    html = words(DataInputs("x", tagged, count_dataset(tagged), ("photo9: no such photo",)))
    assert "could not be read: photo1.jpg" in html
    assert "Left out, 1 fault" in html and "photo9: no such photo" in html


def test_eighty_classes_keep_the_page_small(photos: TaggedPhotos) -> None:
    generator = torch.Generator().manual_seed(0)
    many = tuple(Photo(f"x{i}", photos.photos[i % 7].path, 40 + i, 30) for i in range(600))
    tags = torch.rand(600, 90, generator=generator) < 0.05
    tagged = TaggedPhotos(tuple(f"class {i}" for i in range(90)), many, tags)
    html = words(DataInputs("x", tagged, count_dataset(tagged, boxed(tagged))))
    assert "The 10 rarest classes are not shown." in html
    assert len(html) < 1_500_000
    assert 'class="shelves many"' in html
