"""The whole report: complete, self-contained, escaped; sections without data are left out."""

from __future__ import annotations

import colorsys
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from demo_runs import write_demo

from tag2box.annotations import Detections, Objects, Truth
from tag2box.errors import UserError
from tag2box.labels.quality import ClassSigns, QualitySigns
from tag2box.metrics.error_analysis import ERROR_KINDS, top_boxes
from tag2box.reporting import report_page
from tag2box.reporting.formatting import duration, format_number, listed, percent, plural, points
from tag2box.reporting.records import (
    Challenges,
    ClassRecord,
    Metrics,
    OnTest,
    OnTrain,
    ReportInputs,
    RunRecord,
    StartInfo,
    StepRecord,
    read_run,
)
from tag2box.reporting.report_page import build_report, name_runs, render_report, write_report
from tag2box.reporting.run_figures import iteration_seconds
from tag2box.training.events import GalleryStage, TrainingWarning

SECTIONS = {
    "baselines", "errors", "challenges", "classes", "detections", "pseudo", "counts", "losses", "proposals", "about",
    "repeat", "intervals",
}  # fmt: skip
VOID = {"meta", "input", "br", "link", "img"}


class Reader(HTMLParser):
    """Collects ids and links, and checks that every element is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.sections: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.links += [given[name] for name in ("src", "href", "srcset", "action") if name in given]
        self.ids += [given["id"]] if "id" in given else []
        self.sections += [given["id"]] if tag == "section" else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def read(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    assert reader.open == []
    return reader


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> ReportInputs:
    return write_demo(tmp_path_factory.mktemp("demo"))


@pytest.fixture(scope="module")
def page(demo: ReportInputs, tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("out") / "deep" / "report.html"
    write_report(demo, out)
    return out.read_text(encoding="utf-8")


def test_no_run_is_an_error_in_one_line() -> None:
    with pytest.raises(UserError, match="no run given"):
        build_report(ReportInputs(title="x", runs=[]))


def test_a_bare_run_has_a_page_without_sections() -> None:
    html = render_report(build_report(ReportInputs(title="Bare", runs=[RunRecord("only", Path("only"))])))
    assert read(html).sections == []
    assert "<h1>Bare</h1>" in html
    assert "only learned" in html


def test_two_runs_fill_every_section(page: str) -> None:
    reader = read(page)
    assert set(reader.sections) == SECTIONS
    assert len(reader.ids) == len(set(reader.ids))
    assert {link.removeprefix("#") for link in reader.links} == SECTIONS
    assert len(page.encode()) < 6_000_000


def test_the_headline_compares_the_runs(page: str) -> None:
    assert "36.0<small>%" in page
    assert "48.0<small>%" in page
    assert "+12.0 points" in page
    assert "OD-WSCL ends 12.0 points of mAP50 above OICR+." in page
    assert "Two detectors learned 3 classes (mug, plate and spoon) from 40 photos" in page


def test_the_page_is_self_contained(page: str) -> None:
    assert not re.search(r"https?://|//cdn|@import|@font-face", page)
    assert all(link.startswith("#") for link in read(page).links)
    assert all(url.startswith('"data:image/jpeg') for url in re.findall(r"url\(([^)]{0,30})", page))


def test_charts_are_well_formed_and_named(page: str) -> None:
    charts = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    # top boxes (two splits, over training), challenges, classes, counts, tau, by class, losses, WSCL's share, proposals
    assert len(charts) == 3 + 1 + 2 + 3 + 3 + 1 + 5 + 1 + 1
    assert all(ElementTree.fromstring(chart).attrib["aria-label"] for chart in charts)


def test_the_share_of_wscl_is_drawn_for_the_run_that_has_it(page: str, demo: ReportInputs) -> None:
    label = 'aria-label="Share of the contrastive loss in the gradient at the neck"'
    assert page.count(label) == 1
    without = render_report(build_report(replace(demo, runs=demo.runs[:1])))
    assert label not in without


def test_each_photo_is_embedded_once_however_often_shown(page: str) -> None:
    embedded = re.findall(r"\.(photo-\d+)\{background-image:url\(\"data:image/jpeg;base64,([^\"]+)", page)
    assert len(embedded) == len(dict(embedded)) == page.count("data:image/jpeg")
    assert 12 + 6 < len(embedded) <= 12 + 6 + 4 * 6  # detections, pseudo boxes, at most four examples of each kind
    assert len(re.findall(r'class="photo photo-0"', page)) == 3  # the strip, and once a run


def test_one_run_compares_with_nothing(demo: ReportInputs) -> None:
    html = render_report(build_report(replace(demo, runs=demo.runs[-1:])))
    assert set(read(html).sections) == SECTIONS
    assert "difference" not in html.split("</style>")[1]
    assert "OD-WSCL learned 3 classes" in html


def test_without_truth_detections_are_plain(demo: ReportInputs) -> None:
    html = render_report(build_report(replace(demo, test_truth=None, train_truth=None))).split("</style>")[1]
    assert "box plain" in html
    assert not re.search(r'class="box (right|wrong|missed|truth)', html)
    assert "show-truth" not in html


@pytest.mark.parametrize(
    ("change", "gone"),
    [
        ({"test_photos": {}}, {"detections"}),
        ({"train_photos": {}}, {"pseudo"}),
        ({"proposal_recall": {}}, {"proposals"}),
        ({"commands": ()}, set()),  # the settings are still there to show
    ],
)
def test_a_section_without_its_data_is_left_out(demo: ReportInputs, change: dict[str, object], gone: set[str]) -> None:
    html = render_report(build_report(replace(demo, **change)))
    reader = read(html)
    assert set(reader.sections) == SECTIONS - gone
    assert {link.removeprefix("#") for link in reader.links} == SECTIONS - gone


def test_unreadable_photos_are_listed(demo: ReportInputs, tmp_path: Path) -> None:
    photos = dict(demo.test_photos) | {"test_000": tmp_path / "gone.jpg"}
    html = render_report(build_report(replace(demo, test_photos=photos)))
    assert "could not be read: gone.jpg" in html


def test_names_with_html_in_them_are_text(tmp_path: Path, demo: ReportInputs) -> None:
    evil = "<script>alert('1')</script>\"&"
    scores = ClassRecord(0.5, {evil: 0.5})
    start = StartInfo(evil, (evil,), 1, machine={evil: evil}, versions={evil: evil})
    metrics = Metrics(OnTest(scores, coco={evil: 0.1}, challenges=Challenges(1, 0, 0, 0, 0)), OnTrain(scores))
    found = {evil: Detections(torch.tensor([[0.0, 0, 9, 9]]), torch.ones(1), torch.zeros(1, dtype=torch.long))}
    run = RunRecord(evil, tmp_path, config=evil, start=start, metrics=metrics, test_detections=found)
    inputs = ReportInputs(
        title=evil,
        runs=[run, replace(run, folder=tmp_path / evil)],
        commands=[evil],
        test_photos={evil: demo.test_photos["test_001"]},
        test_truth=Truth((evil,), (evil,), ((400, 300),), (Objects.of([[50, 50, 90, 90]], [0]),)),
        proposal_recall={evil: demo.proposal_recall["test"]},
    )
    html = render_report(build_report(inputs))
    assert "<script>alert" not in html
    assert html.count("<script>") == 1
    assert "&lt;script&gt;alert" in html
    assert set(read(html).sections) == {
        "errors", "challenges", "classes", "detections", "proposals", "about", "repeat", "intervals",
    }  # fmt: skip


# ---------------------------------------------------------------- trivial boxes, and what top boxes are


def test_a_figure_that_is_not_above_a_trivial_box_is_called_so(page: str) -> None:
    head = page.split("<nav")[0]
    assert head.count("not above a centred box (40.0)") == 1  # OICR+ with 36.0; OD-WSCL has 48.0
    section = page.split('<section id="baselines">')[1].split("</section>")[0]
    assert "OICR+: mAP50 36.0 is not above a centred box (40.0)." in section
    assert "OD-WSCL: mAP50 48.0 is above a centred box (40.0)." in section
    assert "OICR+: CorLoc 56.0 is above a centred box (45.0)." in section
    assert re.findall(r'<th scope="row">([^<]*)</th>', section) == [
        "detections of the run", "centred box, same class scores", "whole photo, same class scores",
        "centred box, tags known", "detections of the run", "centred box, tags known",
    ]  # fmt: skip


def test_figures_have_intervals_and_differences_from_the_first_run(demo: ReportInputs) -> None:
    tops = [demo.train_truth and {n: Detections(o.boxes, torch.ones(len(o)), o.labels) for n, o in pairs(demo)}, None]
    runs = [replace(run, train_top_boxes=own) for run, own in zip(demo.runs, tops, strict=True)]
    ap, corloc, groups = build_report(replace(demo, runs=runs)).intervals
    assert [row.name for row in ap.rows] == ["OICR+", "OD-WSCL"]
    value, ends, *gap = ap.rows[1].cells
    low, high = map(float, ends.split(" to "))
    assert low <= float(value) <= high
    assert ap.rows[0].cells[2:] == ("–", "–", "–") and gap[0][0] in "+−±"  # noqa: RUF001 - signs of the page
    assert corloc.rows[0].cells[:2] == ("100.0", "100.0 to 100.0")
    assert set(corloc.rows[1].cells) == {"–"}  # noqa: RUF001 - nothing is stored of the second run
    assert [row.name for row in groups.rows][:1] == ["all"] and {"1 object", "2 or 3 objects"} <= {
        row.name for row in groups.rows
    }
    assert len({len(row.cells) for row in groups.rows} | {len(groups.heads)}) == 1


def pairs(demo: ReportInputs) -> list[tuple[str, Objects]]:
    assert demo.train_truth is not None
    return list(zip(demo.train_truth.ids, demo.train_truth.objects, strict=True))


def test_tables_mark_what_is_not_above_a_trivial_box(demo: ReportInputs) -> None:
    results = build_report(demo).results
    rows = {row.name: row.cells for row in results.figures.rows}
    assert rows["mAP50, VOC 2007 (11 points)"][:2] == ("36.0*", "48.0")
    assert rows["CorLoc, training photos"][0] == "56.0"
    assert "* not above the best trivial box" in results.figures.caption
    assert results.by_class.rows[-1].cells[:2] == ("36.0*", "48.0")


def test_errors_have_a_bar_per_run_and_trivial_box_a_legend_and_examples(demo: ReportInputs) -> None:
    errors = build_report(demo).errors
    assert errors is not None and errors.run == "OD-WSCL"
    assert [name for _, name, _ in errors.kinds] == [kind.replace("_", " ") for kind in ERROR_KINDS]
    test, train = (re.findall(r'class="bar-name"[^>]*>([^<]*)<', chart.svg) for chart in errors.bars)
    assert test == ["OICR+", "OD-WSCL"]
    assert train == ["OICR+", "OD-WSCL", "centred box"]
    tops = top_boxes(demo.test_truth, demo.runs[-1].test_detections)
    shown = {row.name.replace(" ", "_"): row for row in errors.examples}
    assert set(shown) == {top.kind for top in tops}
    for kind, row in shown.items():
        count = sum(top.kind == kind for top in tops)
        assert row.note == f"{min(count, 4)} of {count}"
        for tile in row.tiles:
            drawn = {box.kind for box in tile.boxes}
            assert drawn == {"truth", "right" if kind == "correct" else "wrong"} or tile.caption.endswith("no box")
    assert [table.caption for table in errors.tables] == [
        "Top boxes on test photos, in per cent",
        "Top boxes on training photos, in per cent",
        "The proposals and their scores, in per cent",
    ]
    by_row = {row.name: row.cells for row in errors.tables[0].rows}
    assert by_row["all"][0] == percent(sum(top.kind == "correct" for top in tops) / len(tops))
    assert by_row["all"][-1] == str(len(tops))
    assert set(demo.test_truth.classes) < set(by_row)


def test_the_example_of_another_class_names_it(demo: ReportInputs) -> None:
    photo = "test_001"
    objects = Objects.of([[50, 50, 90, 90], [200, 50, 290, 150], [10, 200, 60, 260]], [0, 1, 2])
    box = Detections(torch.tensor([[200.0, 50, 290, 150]]), torch.ones(1), torch.zeros(1, dtype=torch.long))
    truth = Truth(demo.test_truth.classes, (photo,), ((400, 300),), (objects,))
    run = replace(demo.runs[0], test_detections={photo: box}, metrics=Metrics())
    errors = build_report(replace(demo, runs=[run], test_truth=truth)).errors
    other, nowhere = errors.examples
    assert (other.name, other.tiles[0].caption) == ("other class", "mug: other class, plate")
    assert [(b.kind, b.label) for b in other.tiles[0].boxes] == [("truth", ""), ("wrong", "mug")]
    assert [tile.caption for tile in nowhere.tiles] == ["plate: no box", "spoon: no box"]


def test_errors_of_the_metrics_are_shown_without_truth(demo: ReportInputs) -> None:
    errors = build_report(replace(demo, test_truth=None, train_truth=None)).errors
    assert [chart.title for chart in errors.bars] == ["training photos"]
    assert errors.examples == () and errors.training == ()


def test_signs_of_quality_are_shown_where_a_run_has_them(demo: ReportInputs) -> None:
    assert build_report(demo).signs is None
    signs = QualitySigns({"mug": ClassSigns(5, 0.5, 0.25, 0.05), "plate": ClassSigns(5, 0.25, 0.01, 0.05)}, 0.5, None)
    page = build_report(replace(demo, runs=[*demo.runs[:-1], replace(demo.runs[-1], signs=signs)]))
    assert page.signs is not None
    rows = {row.name: row.cells for row in page.signs.rows}
    assert rows["mug"] == ("0.5", "0.25") and rows["plate"] == ("0.25", "0.01 (not recognised)")
    assert rows["mean"] == ("0.375", "0.13") and rows["overlap, last two stages"] == ("0.5", "")
    assert 'id="signs"' in render_report(page)


def test_kinds_over_training_are_shown_by_stage_where_the_run_recorded_stages(demo: ReportInputs) -> None:
    old = build_report(demo).errors
    assert [chart.title for chart in old.training] == ["Over training, the last stage"]
    first = GalleryStage(((0.0, 0.0, 9.0, 9.0),), (0,), (0.5,))
    galleries = tuple(
        replace(each, photos=tuple(replace(photo, earlier=(first, first)) for photo in each.photos))
        for each in demo.runs[-1].galleries
    )
    runs = [*demo.runs[:-1], replace(demo.runs[-1], galleries=galleries)]
    new = build_report(replace(demo, runs=runs)).errors
    assert [chart.title for chart in new.training] == [f"Over training, stage {k} of 3" for k in (1, 2, 3)]
    assert new.training[0].svg == new.training[1].svg.replace("stage 2", "stage 1") != new.training[2].svg
    assert new.training[2].svg.replace("stage 3 of 3", "the last stage") == old.training[0].svg


def test_colours_of_kinds_runs_and_outcomes_are_different() -> None:
    css = (Path(report_page.__file__).parent / "templates" / "report.css").read_text()
    for block in css.split("@media (prefers-color-scheme:dark)")[:2]:
        names = ("run-0", "run-1", "run-2", "run-3", "run-4", "run-5", "found", "part", "grouped", "missed", "other",
                 "too-large", "other-class")  # fmt: skip
        colours = [re.search(rf"--{name}:(#[0-9a-f]{{6}})", block).group(1) for name in names]
        assert len(set(colours)) == len(names)
    assert all(f".part-{kind}{{color:" in css for kind in ERROR_KINDS)


def hue(colour: str) -> float:
    red, green, blue = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return 360 * colorsys.rgb_to_hsv(red, green, blue)[0]


@pytest.mark.parametrize("theme", [0, 1])
def test_no_colour_means_a_run_and_also_right_or_wrong(theme: int) -> None:
    folder = Path(report_page.__file__).parent / "templates"
    css = (folder / "report.css").read_text()
    block = css.split("@media (prefers-color-scheme:dark)")[theme].split("}")[0]
    colours = dict(re.findall(r"--([a-z0-9-]+):(#[0-9a-f]{6})", block))
    judged = [colours[name] for name in ("found", "wrong", "right-box", "wrong-box") if name in colours]
    for number in range(6):
        for other in judged:
            gap = abs(hue(colours[f"run-{number}"]) - hue(other)) % 360
            assert min(gap, 360 - gap) >= 25, (number, other)
    rules = css + (folder / "sections.css").read_text()
    users = re.findall(r"([^{}\n]*)\{[^{}]*var\(--run-\d\)[^{}]*\}", rules)
    words = {word for user in users for word in re.findall(r"[a-z-]+", user)}
    assert not words & {"right", "wrong", "better", "warnings", "alert", "verdict-use", "verdict-not", "split"}, words
    assert '.box.right b::before{content:"✓ "}.box.wrong b::before{content:"✗ "}' in css, "not by colour alone"


def test_warnings_of_training_stand_at_the_top(demo: ReportInputs) -> None:
    told = (TrainingWarning(0, "tags <cannot> localise"), TrainingWarning(40, "spike"), TrainingWarning(90, "spike"))
    runs = [replace(demo.runs[0], warnings=told), demo.runs[1]]
    html = render_report(build_report(replace(demo, runs=runs)))
    top = html.split('<div class="alert"')[1].split("</div>")[0]
    assert html.index('<div class="alert"') < html.index('class="headlines"')
    assert "OICR+: tags &lt;cannot&gt; localise</li>" in top and "OICR+: spike (iteration 40 and 90)" in top
    assert '<div class="alert"' not in render_report(build_report(demo))
    many = tuple(TrainingWarning(1, f"problem {n}") for n in range(30))
    lines = build_report(replace(demo, runs=[replace(demo.runs[0], warnings=many)])).opening.warnings
    assert len(lines) == 13 and lines[-1] == "and 18 more"


def test_warnings_are_read_from_the_log_and_forgotten_with_what_was_resumed(tmp_path: Path) -> None:
    events = [
        {"event": "warning", "iteration": 0, "problem": "few proposals"},
        {"event": "warning", "iteration": 50, "problem": "spike"},
        {"event": "resume", "iteration": 40},
    ]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert read_run(tmp_path).warnings == (TrainingWarning(0, "few proposals"),)


def test_photos_without_truth_have_a_gallery_of_their_own(demo: ReportInputs) -> None:
    photos = dict(list(demo.test_photos.items())[:3])
    runs = [replace(run, own_detections=run.test_detections, test_detections=None) for run in demo.runs]
    given = replace(demo, runs=runs, own_photos=photos, test_truth=None, test_photos={})
    html = render_report(build_report(given)).split("</style>")[1]
    section = html.split('<section id="photos">')[1].split("</section>")[0]
    assert all(name in section for name in photos) and "box plain" in section and "OD-WSCL" in section
    assert "box right" not in html.split('id="pseudo"')[0] and 'href="#photos"' in html
    assert "on your photos. Not picked by hand" in html


def test_the_page_stays_small(page: str) -> None:
    assert len(page) < 1_500_000, "two runs, 12 test photos and 6 of training"


def test_runs_of_one_name_get_their_folder_and_the_last_run_keeps_its_colour() -> None:
    runs = [RunRecord("a", Path("x")), RunRecord("b", Path("y")), RunRecord("a", Path("z"))]
    assert [(r.name, r.css) for r in name_runs(runs)] == [("a (x)", "run-1"), ("b", "run-2"), ("a (z)", "run-0")]
    assert len({r.css for r in name_runs([RunRecord(str(i), Path(str(i))) for i in range(6)])}) == 6


@pytest.mark.parametrize(
    ("steps", "seconds"),
    [
        ((), None),
        ((StepRecord(10),), None),
        ((StepRecord(10, seconds=4.0),), 0.4),
        (tuple(StepRecord(i, seconds=0.4 * i) for i in range(10, 101, 10)), 0.4),
        ((StepRecord(10, seconds=9.0), StepRecord(20, seconds=13.0), StepRecord(25, seconds=15.0)), 0.4),
    ],
)
def test_time_per_iteration_is_a_difference_of_times_since_the_start(
    steps: tuple[StepRecord, ...], seconds: float | None
) -> None:
    found = iteration_seconds(RunRecord("a", Path("a"), steps=steps))
    assert found == (None if seconds is None else pytest.approx(seconds))


def test_the_report_shows_seconds_per_iteration_not_since_the_start(page: str) -> None:
    row = page.split("time per iteration (median)")[1].split("</tr>")[0]
    assert re.findall(r"<td>([^<]*)</td>", row) == ["0.4 s"]  # of both runs


def test_the_lede_states_the_seeds(demo: ReportInputs) -> None:
    def lede(*seeds: int | None) -> str:
        runs = [replace(run, start=replace(run.start, seed=seed)) for run, seed in zip(demo.runs, seeds, strict=False)]
        return build_report(replace(demo, runs=runs)).opening.lede

    assert lede(3).endswith("objects. One seed (3).")
    chance = ": differences of a few points may be chance."
    assert lede(3, 3).endswith(f"One seed (3) for all runs{chance}")
    assert lede(3, 4).endswith(f"One seed per run (OICR+ 3, OD-WSCL 4){chance}")
    assert lede(None, 4).endswith(f"One seed per run (OD-WSCL 4){chance}")
    assert "eed" not in lede(None, None)


def test_numbers_as_text() -> None:
    assert [percent(None), percent(float("nan")), percent(0.4132)] == ["–", "–", "41.3"]  # noqa: RUF001
    assert [points(0.5, 0.4), points(0.4, 0.5), points(0.4, 0.4), points(None, 0.1)] == [
        "+10.0",
        "−10.0",  # noqa: RUF001
        "±0.0",
        "–",  # noqa: RUF001
    ]
    assert [format_number(None), format_number(0.12345), format_number(12345.6)] == ["–", "0.123", "12 346"]  # noqa: RUF001
    assert [duration(None), duration(0.442), duration(168.3), duration(18420)] == [
        "–",  # noqa: RUF001
        "0.442 s",
        "2 min 48 s",
        "5 h 07 min",
    ]
    assert [plural(0, "box"), plural(1, "class"), plural(2, "class"), plural(3, "photo")] == [
        "0 boxes",
        "1 class",
        "2 classes",
        "3 photos",
    ]
    assert [listed(()), listed(("a",)), listed(("a", "b, c")), listed(("a", "b", "c"), 2)] == [
        "",
        "a",
        "a and b, c",
        "a, b and 1 more",
    ]
