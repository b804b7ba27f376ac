"""``tag2box data stats``: a dataset counted and drawn."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from tag2box.data.stats import DataStats, count_dataset, to_json
from tag2box.formats.datasets import everything, has_boxes, read_tagged, read_truth
from tag2box.formats.listing import DataSource, Fault
from tag2box.io import write_json
from tag2box.progress import Progress, silent
from tag2box.reporting.dataset_page import DataInputs, write_data_page


@dataclass(frozen=True, slots=True)
class StatsReport:
    """What was counted, and the lines about what had to be left out."""

    stats: DataStats
    left_out: tuple[str, ...]


def stats(source: DataSource, out: Path, *, json: Path | None = None, progress: Progress = silent) -> StatsReport:
    """Write a page about a dataset: tags and photos, and objects where it has boxes. Faulty photos are left out.

    Args:
        json: where to write the numbers.
    """
    whole = everything(source)
    faults: dict[str, Fault] = {}  # by line: tags and boxes may complain of the same thing

    def note(fault: Fault) -> None:
        faults.setdefault(fault.line, fault)

    with progress("data stats", 4) as bar:
        tagged = read_tagged(whole, note)
        bar.advance("tags read")
        truth = read_truth(whole, note) if has_boxes(whole) else None
        bar.advance("boxes read")
        counted = count_dataset(tagged, truth)
        bar.advance("counted")
        write_data_page(DataInputs(title(source), tagged, counted, tuple(faults)), out)
        bar.advance("drawn")
    if json is not None:
        write_json(json, to_json(counted) | {"left_out": list(faults)})
    return StatsReport(counted, tuple(faults))


def title(source: DataSource) -> str:
    """A dataset as a headline: the name of its file or folder, and its split."""
    name = source.path.resolve().name
    return f"{name}, {Path(source.split).stem}" if source.split else name


def table(stats: DataStats) -> Table:
    """The counts by class, for the terminal."""
    tags, objects = stats.tags, stats.objects
    grid = Table("class", "photos", "unsure")
    columns = [tags.per_class, tags.unsure]
    if objects is not None:
        columns += [objects.objects, objects.missed]
        grid.add_column("objects")
        grid.add_column("missed by one box a tag")
    for column in grid.columns[1:]:
        column.justify = "right"
    for c, name in enumerate(tags.classes):
        grid.add_row(name, *(str(column[c]) for column in columns), end_section=c + 1 == len(tags.classes))
    grid.add_row("all", *(str(sum(column)) for column in columns))
    return grid


def summary(stats: DataStats) -> str:
    """The dataset in one line."""
    tags, objects = stats.tags, stats.objects
    words = (
        f"{tags.photos} photos, {len(tags.untagged)} without tags; {sum(tags.per_class)} tags of {len(tags.classes)}"
    )
    words += " classes"
    if objects is None or not any(objects.objects):
        return words
    return f"{words}; {sum(objects.objects)} objects, {100 * objects.missed_share:.1f} % missed by one box a tag"
