"""``tag2box data check`` and ``tag2box data stats``: a dataset inspected before training."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich import console, table, text

from tag2box import errors, io
from tag2box.cli import options
from tag2box.data import check, stats as dataset_stats
from tag2box.formats import datasets, listing
from tag2box.formats.listing import DataSource
from tag2box.progress import Progress, TerminalProgress, silent
from tag2box.reporting.dataset_page import DataInputs, write_data_page

_STYLE = {"error": "bold red", "warning": "yellow", "note": "dim"}
_CODE = {"error": 2, "warning": 1, "note": 0}
_SHOWN_FAULTS = 20

# ---------------------------------------------------------------- check


def data_check(source: DataSource, *, json: Path | None = None, progress: Progress = silent) -> check.Survey:
    """Check every photo, tag and box of a dataset; also write the findings to ``json`` if given.

    Example:
        findings = tag2box.data_check(tag2box.DataSource(path=Path("tags.csv"), photos=Path("photos"))).findings
    """
    if json is not None:
        io.check_writable(json)
    found = check.survey(source, progress)
    if json is not None:
        io.write_json(json, {**asdict(found), "exit_code": check_exit_code(found)})
    return found


def check_exit_code(found: check.Survey) -> int:
    """0 for a dataset without faults, or with notes only; 1 with warnings; 2 with errors."""
    return max((_CODE[finding.severity] for finding in found.findings), default=0)


def findings_view(found: check.Survey) -> console.RenderableType:
    """The findings for a terminal: a headline, a table, and the first error of each kind in full."""
    parts: list[console.RenderableType] = [text.Text(_headline(found), style="bold")]
    if found.classes:
        parts.append(text.Text(errors.printable(f"classes: {listing.shortlist(found.classes)}", errors.LONGEST_LINE)))
    if found.findings:
        parts += [text.Text(), _findings_table(found.findings)]
    full = [finding.lines[0] for finding in found.findings if finding.lines]
    if full:
        parts += [text.Text("\nthe first of each, in full:"), *(text.Text(f"  {line}") for line in full)]
    parts.append(text.Text(f"\n{_verdict(found)}", style="bold"))
    return console.Group(*parts)


def _headline(found: check.Survey) -> str:
    classes = f", {_count(len(found.classes), 'class', 'classes')}" if found.classes else ""
    return f"{found.what}: {_count(found.photos, 'photo', 'photos')}{classes}"


def _findings_table(findings: tuple[check.Finding, ...]) -> table.Table:
    grid = table.Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    grid.add_column("")
    grid.add_column("what", no_wrap=True)
    grid.add_column("count", justify="right", no_wrap=True)
    grid.add_column("first", overflow="fold", ratio=3)
    grid.add_column("what to do", ratio=2)
    for finding in findings:
        more = ", ..." if finding.count > len(finding.names) == check.FIRST else ""
        grid.add_row(
            text.Text(finding.severity, style=_STYLE[finding.severity]),
            finding.kind,
            f"{finding.count:,}",
            text.Text(", ".join(finding.names) + more),
            finding.advice,
        )
    return grid


def _verdict(found: check.Survey) -> str:
    counts = [
        _count(count, severity, f"{severity}s")
        for severity in check.SEVERITIES
        if (count := sum(finding.severity == severity for finding in found.findings))
    ]
    return f"kinds of faults: {', '.join(counts)}" if counts else "no faults found"


def _count(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"


def check_command(
    path: options.DataArgument,
    photos: options.PhotosOption = None,
    split: options.SplitOption = None,
    classes: options.ClassesOption = None,
    data_format: options.DataFormatOption = None,
    json: Annotated[Path | None, typer.Option("--json", help="Also write the findings to this file.")] = None,
) -> None:
    """List the faults of a dataset. Exit code 0: none; 1: warnings; 2: errors.

    Example: `tag2box data check tags.csv --photos photos`
    """
    source = options.data_source(path, photos, split, classes, data_format)
    found = data_check(source, json=json, progress=TerminalProgress())
    options.print_rich(findings_view(found))
    raise typer.Exit(check_exit_code(found))


# ---------------------------------------------------------------- stats


@dataclass(frozen=True, slots=True)
class StatsReport:
    """The counts, and a line per fault that was skipped."""

    stats: dataset_stats.DataStats
    left_out: tuple[str, ...]


def stats(source: DataSource, out: Path, *, json: Path | None = None, progress: Progress = silent) -> StatsReport:
    """Write a page about a dataset: tags, photos, and objects if it has boxes. Faulty photos are skipped.

    Args:
        json: where to write the numbers.
    """
    for place in (out, *([json] if json is not None else [])):
        io.check_writable(place)
    whole = datasets.everything(source)
    faults: dict[str, listing.Fault] = {}  # by line: tags and boxes may have the same fault

    def note(fault: listing.Fault) -> None:
        faults.setdefault(fault.line, fault)

    with progress("data stats", 4) as bar:
        tagged = datasets.read_tagged(whole, note)
        bar.advance("tags read")
        same = replace(whole, classes=tagged.classes)  # also those of objects with bad boxes only
        truth = datasets.read_truth(same, note) if datasets.has_boxes(whole) else None
        bar.advance("boxes read")
        counted = dataset_stats.count_dataset(tagged, truth)
        bar.advance("counted")
        write_data_page(DataInputs(dataset_title(source), tagged, counted, tuple(faults)), out)
        bar.advance("plotted")
    if json is not None:
        io.write_json(json, dataset_stats.to_json(counted) | {"left_out": list(faults)})
    return StatsReport(counted, tuple(faults))


def dataset_title(source: DataSource) -> str:
    """Headline of a dataset: the name of its file or folder, and its split."""
    name = source.path.resolve().name
    return f"{name}, {Path(source.split).stem}" if source.split else name


def stats_table(stats: dataset_stats.DataStats) -> table.Table:
    """The counts per class, for a terminal."""
    tags, objects = stats.tags, stats.objects
    grid = table.Table("class", "photos", "unsure")
    columns = [tags.per_class, tags.unsure]
    if objects is not None:
        columns += [objects.objects, objects.missed]
        grid.add_column("objects")
        grid.add_column("missed by one box per tag")
    for column in grid.columns[1:]:
        column.justify = "right"
    for c, name in enumerate(tags.classes):
        grid.add_row(name, *(str(column[c]) for column in columns), end_section=c + 1 == len(tags.classes))
    grid.add_row("all", *(str(sum(column)) for column in columns))
    return grid


def stats_line(stats: dataset_stats.DataStats) -> str:
    """The dataset in one line."""
    tags, objects = stats.tags, stats.objects
    line = (
        f"{tags.photos} photos, {len(tags.untagged)} without tags; "
        f"{sum(tags.per_class)} tags of {len(tags.classes)} classes"
    )
    if objects is None or not any(objects.objects):
        return line
    return f"{line}; {sum(objects.objects)} objects, {100 * objects.missed_share:.1f} % missed by one box per tag"


def stats_command(
    data: options.DataArgument,
    photos: options.PhotosOption = None,
    split: options.SplitOption = None,
    classes: options.ClassesOption = None,
    data_format: options.DataFormatOption = None,
    out: Annotated[Path, typer.Option(help="HTML file to write.")] = Path("stats.html"),
    json: Annotated[Path | None, typer.Option(help="Also write the numbers.")] = None,
) -> None:
    """Plot the statistics of a dataset: tags, class balance, sizes, and objects if it has boxes.

    Of the objects, it counts those that a method with one box per tag must miss. Exit code 1: faulty photos, rows or
    boxes were left out.

    Example: `tag2box data stats VOC2007 --split trainval --out stats.html`
    """
    report = stats(
        options.data_source(data, photos, split, classes, data_format), out, json=json, progress=TerminalProgress()
    )
    options.print_rich(stats_table(report.stats))
    options.say(stats_line(report.stats))
    options.say(f"page: {out}")
    if report.left_out:
        options.say(f"left out, {len(report.left_out)} faults (all of them: tag2box data check {data}):", err=True)
        for line in report.left_out[:_SHOWN_FAULTS]:
            options.say(f"  {line}", err=True)
        raise typer.Exit(1)
