"""The page: everything gathered, then one template filled in and written as a single HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from tag2box.errors import UserError
from tag2box.io import write_text
from tag2box.reporting import curves, tables
from tag2box.reporting.charts import known, listed, plural, points, spoken
from tag2box.reporting.curves import Chart, NamedRun
from tag2box.reporting.gallery import (
    Album,
    Comparison,
    Tile,
    compare_detections,
    compare_pseudo,
    evenly_spaced,
    list_test_photos,
)
from tag2box.reporting.records import ReportInputs, RunRecord
from tag2box.reporting.sections import fill

STRIP_PHOTOS = 6
OTHER_COLOURS = 5  # classes run-1 .. run-5 of the style sheet; the last run is always run-0


@dataclass(frozen=True, slots=True)
class Opening:
    """The head of the page."""

    title: str
    lede: str
    verdict: str
    headlines: tuple[tables.Headline, ...]


@dataclass(frozen=True, slots=True)
class Results:
    """What the evaluation found."""

    challenges: Markup
    ap_chart: Markup
    corloc_chart: Markup
    by_class: tables.Table | None
    figures: tables.Table | None


@dataclass(frozen=True, slots=True)
class Training:
    """What happened on the way."""

    losses: tuple[Chart, ...]
    counts: tuple[Chart, ...]
    thresholds: tuple[Chart, ...]
    class_counts: Markup


@dataclass(frozen=True, slots=True)
class Pictures:
    """The galleries, and the rules they were chosen by."""

    strip: tuple[Tile, ...]
    strip_run: str
    detections: tuple[Comparison, ...]
    test_photos: int
    draw_score: float
    judged: bool  # the truth of the test photos is known
    pseudo: tuple[Comparison, ...]
    true_boxes: bool  # the truth of the training photos is drawn
    style: Markup
    unreadable: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReachSection:
    """What the proposals made possible."""

    splits: tuple[str, ...]
    chart: Markup
    table: tables.Table | None


@dataclass(frozen=True, slots=True)
class Page:
    """All that the template shows, in its order; empty parts leave their section out."""

    opening: Opening
    runs: tuple[NamedRun, ...]
    pictures: Pictures
    results: Results
    training: Training
    reach: ReachSection
    about: tuple[tables.Table, ...]
    commands: tuple[str, ...]


def write_report(inputs: ReportInputs, out: Path) -> None:
    """Write the report of one or more runs as one self-contained HTML file."""
    write_text(out, render(build_page(inputs)))


def render(page: Page) -> str:
    """The page as HTML."""
    return fill("report.html.j2", page)


def build_page(inputs: ReportInputs) -> Page:
    """Choose, count, draw: from records to what the template shows."""
    if not inputs.runs:
        raise UserError("report: no run given; expected at least one run folder, train one first")
    runs = name_runs(inputs.runs)
    splits = tuple(inputs.proposal_recall.items())
    about = (tables.facts_table(runs), tables.machine_table(runs), tables.versions_table(runs))
    return Page(
        opening=Opening(inputs.title, _lede(runs, inputs), _verdict(runs), tables.headlines(runs)),
        runs=runs,
        pictures=_pictures(runs, inputs),
        results=_results(runs),
        training=_training(runs, inputs),
        reach=ReachSection(
            tuple(n for n, _ in splits), Markup(curves.recall_chart(splits)), tables.recall_table(splits)
        ),
        about=tuple(table for table in about if table),
        commands=tuple(inputs.commands),
    )


def name_runs(records: Sequence[RunRecord]) -> tuple[NamedRun, ...]:
    """Give each run a name of its own (its folder tells namesakes apart) and a colour; the last one's never changes."""
    names = [record.name for record in records]
    out = []
    for index, record in enumerate(records):
        name = record.name if names.count(record.name) == 1 else f"{record.name} ({record.folder.name})"
        last = index == len(records) - 1
        out.append(NamedRun(name, "run-0" if last else f"run-{index % OTHER_COLOURS + 1}", record))
    return tuple(out)


def _pictures(runs: Sequence[NamedRun], inputs: ReportInputs) -> Pictures:
    album = Album()
    detections = compare_detections(runs, inputs, album)
    pseudo = compare_pseudo(runs, inputs, album)
    return Pictures(
        strip=evenly_spaced([tile for photo in detections for tile in photo.columns[-1].tiles], STRIP_PHOTOS),
        strip_run=detections[0].columns[-1].name if detections else "",
        detections=detections,
        test_photos=len(list_test_photos(runs, inputs.test_truth)),
        draw_score=inputs.draw_score,
        judged=inputs.test_truth is not None,
        pseudo=pseudo,
        true_boxes=inputs.train_truth is not None,
        style=Markup(album.style),
        unreadable=album.unreadable,
    )


def _results(runs: Sequence[NamedRun]) -> Results:
    metrics = [run.record.metrics for run in runs]
    return Results(
        challenges=Markup(curves.challenge_chart(runs)),
        ap_chart=Markup(curves.class_chart([m.ap for m in metrics], runs, "AP50 of each class")),
        corloc_chart=Markup(curves.class_chart([m.corloc for m in metrics], runs, "CorLoc of each class")),
        by_class=tables.class_table(runs),
        figures=tables.figures_table(runs),
    )


def _training(runs: Sequence[NamedRun], inputs: ReportInputs) -> Training:
    true_numbers = (run.record.metrics.truth_boxes_per_class for run in runs)
    return Training(
        losses=curves.loss_charts(runs),
        counts=curves.count_charts(runs, next((value for value in true_numbers if known(value)), None)),
        thresholds=curves.threshold_charts(runs),
        class_counts=Markup(curves.class_count_chart(runs, inputs.train_truth)),
    )


def _lede(runs: Sequence[NamedRun], inputs: ReportInputs) -> str:
    start = runs[-1].record.start
    subject = f"{spoken(len(runs))} detectors" if len(runs) > 1 else runs[0].name
    taught = f" {plural(len(start.classes), 'class')} ({listed(start.classes)})" if start.classes else ""
    photos = f"{plural(start.train_photos, 'photo')} and their" if start.train_photos else "photos and their"
    words = f"{subject} learned{taught} from {photos} image-level tags alone: no box was ever shown in training."
    if inputs.test_truth is not None:
        objects = sum(int((~(o.difficult | o.crowd)).sum()) for o in inputs.test_truth.objects)
        words += f" Tested on {plural(len(inputs.test_truth), 'test photo')} with {plural(objects, 'object')}."
    return words


def _verdict(runs: Sequence[NamedRun]) -> str:
    first, last = runs[0].record.metrics.ap, runs[-1].record.metrics.ap
    if len(runs) < 2 or first is None or last is None or not (known(first.mean) and known(last.mean)):
        return ""
    difference = points(last.mean, first.mean)
    if difference.startswith("±"):
        return f"{runs[-1].name} and {runs[0].name} reach the same mAP50."
    side = "above" if difference.startswith("+") else "below"
    return f"{runs[-1].name} ends {difference[1:]} points of mAP50 {side} {runs[0].name}."
