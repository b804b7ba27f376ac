"""``tag2box proposals recall``: recall of several proposal sources, side by side."""

import json as jsonlib
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from tag2box import annotations, errors, io
from tag2box.cli import options
from tag2box.data.stats import SIZE_EDGES
from tag2box.formats import datasets, listing
from tag2box.progress import Progress, TerminalProgress, silent
from tag2box.proposals.base import ProposalSource, uses_of
from tag2box.proposals.recall import PhotoRecall, RecallMeter, counts_in_recall, find_misses
from tag2box.proposals.store import ProposalStore
from tag2box.reporting import recall_page

_WORST_PHOTOS = 12  # drawn on the page
_SHOWN_MISSING = 5


def recall(
    source: listing.DataSource,
    stores: Sequence[Path],
    out: Path,
    *,
    json: Path | None = None,
    progress: Progress = silent,
) -> tuple[recall_page.RecallSource, ...]:
    """Write a page that compares proposal stores on the photos that all of them have.

    Args:
        json: where to write the numbers.
    """
    for place in (out, *([json] if json is not None else [])):
        io.check_writable(place)
    whole = datasets.everything(source)
    opened = _open(stores)
    truth = datasets.read_truth(whole)
    if not any(bool(counts_in_recall(objects).any()) for objects in truth.objects):
        raise errors.UserError(f"{source.path}: no object of these classes to find; recall needs a dataset with boxes")
    photos = {photo.id: photo for photo in datasets.read_photos(whole)}
    rows = _common_rows(truth, opened, source.path)
    for store in opened:
        store.check(photos[truth.ids[row]] for row in rows if truth.ids[row] in photos)
    sources, worst = _measure(truth, opened, rows, progress)
    pictures = [_worst_photo(truth, row, opened, photos) for row in worst if truth.ids[row] in photos]
    name = source.path.resolve().name
    heading = f"Proposals for {name}, {Path(source.split).stem}" if source.split else f"Proposals for {name}"
    recall_page.write_recall_page(recall_page.RecallInputs(heading, truth.classes, sources, tuple(pictures)), out)
    if json is not None:
        io.write_json(json, {"classes": list(truth.classes), "sources": [_numbers(source) for source in sources]})
    return sources


def _open(paths: Sequence[Path]) -> list[ProposalStore]:
    twice = [path for path, count in Counter(path.resolve() for path in paths).items() if count > 1]
    if twice:
        raise errors.UserError(f"{twice[0]}: named twice; name each store once")
    return [ProposalStore.open(path) for path in paths]


def _common_rows(truth: annotations.Truth, stores: Sequence[ProposalStore], path: Path) -> list[int]:
    """Rows of the photos that every store has boxes for."""
    rows = [row for row, name in enumerate(truth.ids) if all(name in store.sizes for store in stores)]
    if not rows:
        poorest = min(stores, key=lambda store: sum(name in store.sizes for name in truth.ids))
        raise errors.UserError(
            f"{poorest.path}: no proposals for the photos of {path}; make the store for these photos"
        )
    return rows


def store_names(stores: Sequence[ProposalStore]) -> list[str]:
    """Unique names of stores: their kinds; their folders if several share a kind; their paths if folders repeat."""
    kinds = [str(store.source.get("kind", "boxes")).replace("_", " ") for store in stores]
    folders = [store.path.resolve().name for store in stores]
    names = kinds if len(set(kinds)) == len(kinds) else folders
    names = names if len(set(names)) == len(names) else [str(store.path) for store in stores]
    uses = [uses_of(store.source) for store in stores]
    return [f"{name} (uses {what})" if what else name for name, what in zip(names, uses, strict=True)]


def source_text(source: ProposalSource) -> str:
    """A proposal method and its settings as text."""
    settings = {key: value for key, value in source.items() if key != "kind"}
    words = [f"{key} {value if isinstance(value, str) else jsonlib.dumps(value)}" for key, value in settings.items()]
    return ", ".join([str(source.get("kind", "unknown")), *words])


def _measure(
    truth: annotations.Truth, stores: Sequence[ProposalStore], rows: Sequence[int], progress: Progress
) -> tuple[tuple[recall_page.RecallSource, ...], list[int]]:
    """The recall of every store, and the rows of the worst photos."""
    meters = [RecallMeter(len(truth.classes), SIZE_EDGES) for _ in stores]
    ranking: list[tuple[int, float, int]] = []
    with progress("recall", len(rows)) as bar:
        for row in rows:
            each = [
                meter.add(store.candidates(truth.ids[row]), truth.objects[row], truth.sizes[row])
                for meter, store in zip(meters, stores, strict=True)
            ]
            ranking.append(_sort_key(each, row))
            bar.advance()
    sources = [
        recall_page.RecallSource(
            name,
            source_text(store.source),
            meter.result(),
            tuple(photo for photo in truth.ids if photo not in store.sizes),
        )
        for name, store, meter in zip(store_names(stores), stores, meters, strict=True)
    ]
    return tuple(sources), [row for missed, _, row in sorted(ranking)[:_WORST_PHOTOS] if missed]


def _sort_key(each: Sequence[PhotoRecall], row: int) -> tuple[int, float, int]:
    """Sorts the photos with the most missed objects first."""
    return -sum(photo.missed for photo in each), -sum(photo.shortfall for photo in each), row


def _worst_photo(
    truth: annotations.Truth, row: int, stores: Sequence[ProposalStore], photos: dict[str, annotations.Photo]
) -> recall_page.WorstPhoto:
    lost = []
    for store in stores:
        candidates = store.candidates(truth.ids[row])
        found = find_misses(candidates, truth.objects[row])
        best = [None if miss.best is None else tuple(candidates.boxes[miss.best].tolist()) for miss in found]
        lost.append(recall_page.PhotoMisses(found, tuple(best)))
    return recall_page.WorstPhoto(photos[truth.ids[row]], truth.objects[row], tuple(lost))


def store_recall_table(sources: Sequence[recall_page.RecallSource]) -> Table:
    """Recall with all boxes, a row per source, for a terminal."""
    thresholds = [f"IoU {t:g}" for t in sources[0].reach.thresholds]
    grid = Table("source", "boxes per photo", *thresholds, "best overlap")
    for column in grid.columns[1:]:
        column.justify = "right"
    for source in sources:
        reach = source.reach
        shares = [*reach.recall()[:, -1].tolist(), float(reach.best_overlap()[-1])]
        grid.add_row(
            source.name, f"{float(reach.boxes_per_photo()[-1]):.0f}", *(f"{100 * share:.1f}" for share in shares)
        )
    return grid


def _numbers(source: recall_page.RecallSource) -> dict[str, object]:
    reach = source.reach
    return {
        "name": source.name,
        "made_by": source.origin,
        "photos": reach.photos,
        "missing": list(source.missing),
        "ranked": reach.ranked,
        "thresholds": list(reach.thresholds),
        "budgets": [*reach.budgets, None],
        "boxes_per_photo": _finite(reach.boxes_per_photo().tolist()),
        "recall": _finite(reach.recall().tolist()),
        "best_overlap": _finite(reach.best_overlap().tolist()),
        "objects_by_class_and_size": reach.objects.tolist(),
        "size_edges": list(SIZE_EDGES),
        "recall_by_class": _finite(reach.recall_by_class().tolist()),
        "recall_by_size": _finite(reach.recall_by_size().tolist()),
        "best_overlap_by_class": _finite(reach.best_overlap_by_class().tolist()),
    }


def _finite(value: object) -> object:
    """Replace NaN, which JSON lacks, by None."""
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def recall_command(
    data: options.DataArgument,
    stores: Annotated[list[Path], typer.Argument(metavar="STORE...", help="Proposal stores to compare.")],
    photos: options.PhotosOption = None,
    split: options.SplitOption = None,
    classes: options.ClassesOption = None,
    data_format: options.DataFormatOption = None,
    out: Annotated[Path, typer.Option(help="HTML file to write.")] = Path("recall.html"),
    json: Annotated[Path | None, typer.Option(help="Also write the numbers.")] = None,
) -> None:
    """Measure the recall of proposals by number of boxes, several sources in one plot.

    Example: `tag2box proposals recall VOC2007 ss-fast ss-quality --split test --out recall.html`
    """
    source = options.data_source(data, photos, split, classes, data_format)
    sources = recall(source, stores, out, json=json, progress=TerminalProgress())
    options.print_rich(store_recall_table(sources))
    for found in sources:
        if found.missing:
            first = ", ".join(found.missing[:_SHOWN_MISSING])
            more = f" and {len(found.missing) - _SHOWN_MISSING} more" if len(found.missing) > _SHOWN_MISSING else ""
            options.say(f"{found.name}: no boxes for {len(found.missing)} photos: {first}{more}", err=True)
    options.say(f"page: {out}")
