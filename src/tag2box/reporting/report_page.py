"""The report of one or more runs as a single HTML file."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from markupsafe import Markup

from tag2box import errors, io
from tag2box.reporting import error_figures, formatting as fmt, gallery, interval_figures, run_figures, sections
from tag2box.reporting.records import ReportInputs, RunRecord
from tag2box.reporting.run_figures import Chart, NamedRun

STRIP_PHOTOS = 6
WARNINGS = 12  # most that are shown
OTHER_COLOURS = 5  # CSS classes run-1 .. run-5; the last run is always run-0


@dataclass(frozen=True, slots=True)
class Opening:
    """The head of the page."""

    title: str
    lede: str
    verdict: str
    warnings: tuple[str, ...]
    headlines: tuple[run_figures.Headline, ...]


@dataclass(frozen=True, slots=True)
class Results:
    """Results of the evaluation."""

    challenges: Markup
    ap_chart: Markup
    corloc_chart: Markup
    by_class: fmt.Table | None
    figures: fmt.Table | None


@dataclass(frozen=True, slots=True)
class Training:
    """Charts of the training."""

    losses: tuple[Chart, ...]
    counts: tuple[Chart, ...]
    thresholds: tuple[Chart, ...]
    class_counts: Markup


@dataclass(frozen=True, slots=True)
class Pictures:
    """The galleries, and how their photos were chosen."""

    strip: tuple[gallery.Tile, ...]
    strip_run: str
    detections: tuple[gallery.Comparison, ...]
    test_photos: int
    draw_score: float
    judged: bool  # the truth of the test photos is known, so boxes are right or wrong
    pseudo: tuple[gallery.Comparison, ...]
    true_boxes: bool  # the truth of the training photos is drawn
    own: tuple[gallery.Comparison, ...] = ()  # photos without ground truth
    floor: float = gallery.SLIDER_FLOOR  # of the score slider
    style: Markup = Markup("")
    unreadable: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ReachSection:
    """Recall of the proposals."""

    splits: tuple[str, ...]
    chart: Markup
    table: fmt.Table | None


@dataclass(frozen=True, slots=True)
class ReportPage:
    """Everything the template shows, in its order; sections of empty parts are left out."""

    opening: Opening
    runs: tuple[NamedRun, ...]
    pictures: Pictures
    results: Results
    baselines: error_figures.BaselineSection
    intervals: tuple[fmt.Table, ...]
    signs: fmt.Table | None  # of quality, without true boxes
    errors: error_figures.ErrorSection | None
    training: Training
    reach: ReachSection
    about: tuple[fmt.Table, ...]
    commands: tuple[str, ...]


def write_report(inputs: ReportInputs, out: Path) -> None:
    """Write the report of one or more runs as one self-contained HTML file."""
    io.write_text(out, render_report(build_report(inputs)))


def render_report(page: ReportPage) -> str:
    """The report as HTML."""
    return sections.fill_template("report.html.j2", page)


def build_report(inputs: ReportInputs) -> ReportPage:
    """Turn records into everything the template shows."""
    if not inputs.runs:
        raise errors.UserError("report: no run given; expected at least one run folder, train one first")
    runs = name_runs(inputs.runs)
    splits = tuple(inputs.proposal_recall.items())
    about = (run_figures.facts_table(runs), run_figures.machine_table(runs), run_figures.versions_table(runs))
    album = gallery.Album()
    pictures = _pictures(runs, inputs, album)
    errors_found = error_figures.error_section(runs, inputs, album)
    return ReportPage(
        opening=Opening(
            inputs.title, _lede(runs, inputs), _verdict(runs), _warnings(runs), run_figures.headlines(runs)
        ),
        runs=runs,
        pictures=replace(pictures, style=Markup(album.style), unreadable=album.unreadable),
        results=_results(runs),
        baselines=error_figures.baseline_section(runs),
        intervals=interval_figures.interval_tables(runs, inputs),
        signs=run_figures.signs_table(runs),
        errors=errors_found,
        training=_training(runs, inputs),
        reach=ReachSection(
            tuple(n for n, _ in splits), Markup(run_figures.recall_chart(splits)), run_figures.recall_table(splits)
        ),
        about=tuple(table for table in about if table),
        commands=tuple(inputs.commands),
    )


def name_runs(records: Sequence[RunRecord]) -> tuple[NamedRun, ...]:
    """Give each run a unique name and a colour, fixed for the last run.

    A name has the folder if two share it, and what the run uses beyond tags.
    """
    names = [record.name for record in records]
    out = []
    for index, record in enumerate(records):
        name = record.name if names.count(record.name) == 1 else f"{record.name} ({record.folder.name})"
        name += f" (uses {record.start.uses})" if record.start.uses else ""
        last = index == len(records) - 1
        out.append(NamedRun(name, "run-0" if last else f"run-{index % OTHER_COLOURS + 1}", record))
    return tuple(out)


def _pictures(runs: Sequence[NamedRun], inputs: ReportInputs, album: gallery.Album) -> Pictures:
    detections = gallery.compare_detections(runs, inputs, album)
    pseudo = gallery.compare_pseudo(runs, inputs, album)
    own = gallery.compare_own(runs, inputs, album)
    shown = detections or own
    return Pictures(
        strip=gallery.evenly_spaced([tile for photo in shown for tile in photo.columns[-1].tiles], STRIP_PHOTOS),
        strip_run=shown[0].columns[-1].name if shown else "",
        detections=detections,
        test_photos=len(gallery.list_test_photos(runs, inputs.test_truth)),
        draw_score=inputs.draw_score,
        judged=inputs.test_truth is not None and bool(detections),
        pseudo=pseudo,
        true_boxes=inputs.train_truth is not None,
        own=own,
    )


def _results(runs: Sequence[NamedRun]) -> Results:
    metrics = [run.record.metrics for run in runs]
    return Results(
        challenges=Markup(run_figures.challenge_chart(runs)),
        ap_chart=Markup(run_figures.class_chart([m.ap for m in metrics], runs, "AP50 of each class")),
        corloc_chart=Markup(run_figures.class_chart([m.corloc for m in metrics], runs, "CorLoc of each class")),
        by_class=error_figures.class_table(runs),
        figures=error_figures.figures_table(runs),
    )


def _training(runs: Sequence[NamedRun], inputs: ReportInputs) -> Training:
    true_numbers = (run.record.metrics.truth_boxes_per_class for run in runs)
    return Training(
        losses=run_figures.loss_charts(runs),
        counts=run_figures.count_charts(runs, next((value for value in true_numbers if fmt.known(value)), None)),
        thresholds=run_figures.threshold_charts(runs),
        class_counts=Markup(run_figures.class_count_chart(runs, inputs.train_truth)),
    )


def _lede(runs: Sequence[NamedRun], inputs: ReportInputs) -> str:
    start = runs[-1].record.start
    subject = f"{fmt.count_word(len(runs))} detectors" if len(runs) > 1 else runs[0].name
    taught = f" {fmt.plural(len(start.classes), 'class')} ({fmt.listed(start.classes)})" if start.classes else ""
    photos = f"{fmt.plural(start.train_photos, 'photo')} and their" if start.train_photos else "photos and their"
    boxed = [words for run in runs if (words := _boxes_seen(run))]
    alone = f". {' '.join(boxed)}" if boxed else " alone: no box was ever shown in training."
    words = f"{subject} learned{taught} from {photos} image-level tags{alone}"
    if inputs.test_truth is not None:
        objects = sum(int((~(o.difficult | o.crowd)).sum()) for o in inputs.test_truth.objects)
        words += f" Tested on {fmt.plural(len(inputs.test_truth), 'test photo')} with {fmt.plural(objects, 'object')}."
    return f"{words} {_seeds(runs)}".rstrip()


def _boxes_seen(run: NamedRun) -> str:
    """The boxes that a run was taught with, in a sentence; empty if it learned from tags alone."""
    start, parts = run.record.start, []
    if start.boxes or start.boxed_photos:
        boxes, photos = fmt.plural(start.boxes, "reviewed box"), fmt.plural(start.boxed_photos, "photo")
        parts.append(f"trained with {boxes} in {photos}")
    if start.warm_start_boxes:
        parts.append(f"started from a run trained with {fmt.plural(start.warm_start_boxes, 'reviewed box')}")
    return f"{run.name}: {', '.join(parts)}." if parts else ""


def _seeds(runs: Sequence[NamedRun]) -> str:
    """Number of seeds and the seeds of the runs in a sentence; empty if no seed is known."""
    seeds = {run.name: run.record.start.seed for run in runs if run.record.start.seed is not None}
    if not seeds:
        return ""
    chance = ": differences of a few points may be chance" if len(runs) > 1 else ""
    if len(set(seeds.values())) == 1 and len(seeds) == len(runs):
        return f"One seed ({next(iter(seeds.values()))}){' for all runs' if len(runs) > 1 else ''}{chance}."
    return f"One seed per run ({', '.join(f'{name} {seed}' for name, seed in seeds.items())}){chance}."


def _warnings(runs: Sequence[NamedRun]) -> tuple[str, ...]:
    """What training warned of; the same problem of a run once, with its iterations."""
    found: dict[str, list[int]] = {}
    for run in runs:
        for own in run.record.warnings:
            words = f"{run.name}: {own.problem}" if len(runs) > 1 else own.problem
            found.setdefault(words, []).append(own.iteration)
    lines = []
    for words, iterations in found.items():
        when = [str(number) for number in iterations if number]  # 0: before training
        lines.append(f"{words} (iteration {fmt.listed(when, 5)})" if when else words)
    return tuple(lines[:WARNINGS]) + ((f"and {len(lines) - WARNINGS} more",) if len(lines) > WARNINGS else ())


def _verdict(runs: Sequence[NamedRun]) -> str:
    first, last = runs[0].record.metrics.ap, runs[-1].record.metrics.ap
    if len(runs) < 2 or first is None or last is None or not (fmt.known(first.mean) and fmt.known(last.mean)):
        return ""
    difference = fmt.points(last.mean, first.mean)
    if difference.startswith("±"):
        return f"{runs[-1].name} and {runs[0].name} reach the same mAP50."
    side = "above" if difference.startswith("+") else "below"
    return f"{runs[-1].name} ends {difference[1:]} points of mAP50 {side} {runs[0].name}."
