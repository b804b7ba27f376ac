"""``tag2box proposals recall``: what sources of boxes reach of the truth, side by side."""

from __future__ import annotations

import json as jsonlib
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from tag2box.annotations import Photo, Truth
from tag2box.data.stats import SIZE_EDGES
from tag2box.errors import UserError
from tag2box.formats.datasets import everything, read_photos, read_truth
from tag2box.formats.listing import DataSource
from tag2box.io import write_json
from tag2box.progress import Progress, silent
from tag2box.proposals.base import PhotoSource
from tag2box.proposals.recall import PhotoReach, ReachMeter, misses, plain_recall
from tag2box.proposals.store import ProposalStore
from tag2box.reporting.recall_page import Lost, RecallInputs, RecallSource, WorstPhoto, write_recall_page

WORST = 12  # photos that are drawn


def recall(
    source: DataSource, stores: Sequence[Path], out: Path, *, json: Path | None = None, progress: Progress = silent
) -> tuple[RecallSource, ...]:
    """Write a page that compares stores of proposals on the photos they all have.

    Args:
        json: where to write the numbers.
    """
    whole = everything(source)
    opened = _open(stores)
    truth = read_truth(whole)
    if not any(bool(plain_recall(objects).any()) for objects in truth.objects):
        raise UserError(f"{source.path}: no object of these classes to find; recall needs a dataset with boxes")
    photos = {photo.id: photo for photo in read_photos(whole)}
    rows = _common(truth, opened, source.path)
    for store in opened:
        store.check(photos[truth.ids[row]] for row in rows if truth.ids[row] in photos)
    sources, worst = _measure(truth, opened, rows, progress)
    views_per_image = [_look(truth, row, opened, photos) for row in worst if truth.ids[row] in photos]
    name = source.path.resolve().name
    heading = f"Proposals for {name}, {Path(source.split).stem}" if source.split else f"Proposals for {name}"
    write_recall_page(RecallInputs(heading, truth.classes, sources, tuple(views_per_image)), out)
    if json is not None:
        write_json(json, {"classes": list(truth.classes), "sources": [_numbers(source) for source in sources]})
    return sources


def _open(paths: Sequence[Path]) -> list[ProposalStore]:
    twice = [path for path, count in Counter(path.resolve() for path in paths).items() if count > 1]
    if twice:
        raise UserError(f"{twice[0]}: named twice; name each store once")
    return [ProposalStore.open(path) for path in paths]


def _common(truth: Truth, stores: Sequence[ProposalStore], where: Path) -> list[int]:
    """Rows of the photos that every store has boxes for."""
    rows = [row for row, name in enumerate(truth.ids) if all(name in store.sizes for store in stores)]
    if not rows:
        poorest = min(stores, key=lambda store: sum(name in store.sizes for name in truth.ids))
        raise UserError(f"{poorest.path}: no proposals for the photos of {where}; make the store for these photos")
    return rows


def names_of(stores: Sequence[ProposalStore]) -> list[str]:
    """What each store is called: its kind; its folder where several are of a kind; its path where these repeat."""
    kinds = [str(store.source.get("kind", "boxes")).replace("_", " ") for store in stores]
    folders = [store.path.resolve().name for store in stores]
    names = kinds if len(set(kinds)) == len(kinds) else folders
    return names if len(set(names)) == len(names) else [str(store.path) for store in stores]


def origin_of(source: PhotoSource) -> str:
    """The method and its settings as words."""
    settings = {key: value for key, value in source.items() if key != "kind"}
    words = [f"{key} {value if isinstance(value, str) else jsonlib.dumps(value)}" for key, value in settings.items()]
    return ", ".join([str(source.get("kind", "unknown")), *words])


def _measure(
    truth: Truth, stores: Sequence[ProposalStore], rows: Sequence[int], progress: Progress
) -> tuple[tuple[RecallSource, ...], list[int]]:
    """The reach of every store, and the rows of the worst photos."""
    meters = [ReachMeter(len(truth.classes), SIZE_EDGES) for _ in stores]
    seen: list[tuple[int, float, int]] = []
    with progress("recall", len(rows)) as bar:
        for row in rows:
            each = [
                meter.add(store.candidates(truth.ids[row]), truth.objects[row], truth.sizes[row])
                for meter, store in zip(meters, stores, strict=True)
            ]
            seen.append(_badness(each, row))
            bar.advance()
    sources = [
        RecallSource(
            name,
            origin_of(store.source),
            meter.result(),
            tuple(photo for photo in truth.ids if photo not in store.sizes),
        )
        for name, store, meter in zip(names_of(stores), stores, meters, strict=True)
    ]
    return tuple(sources), [row for missed, _, row in sorted(seen)[:WORST] if missed]


def _badness(each: Sequence[PhotoReach], row: int) -> tuple[int, float, int]:
    """A key that sorts the photos with most objects out of reach first."""
    return -sum(photo.missed for photo in each), -sum(photo.shortfall for photo in each), row


def _look(truth: Truth, row: int, stores: Sequence[ProposalStore], photos: dict[str, Photo]) -> WorstPhoto:
    lost = []
    for store in stores:
        candidates = store.candidates(truth.ids[row])
        found = misses(candidates, truth.objects[row])
        best = [None if miss.best is None else tuple(candidates.boxes[miss.best].tolist()) for miss in found]
        lost.append(Lost(found, tuple(best)))
    return WorstPhoto(photos[truth.ids[row]], truth.objects[row], tuple(lost))


# ---------------------------------------------------------------- numbers


def table(sources: Sequence[RecallSource]) -> Table:
    """Recall with all boxes, a row each source, for the terminal."""
    grid = Table("source", "boxes a photo", *(f"IoU {t:g}" for t in sources[0].reach.thresholds), "best overlap")
    for column in grid.columns[1:]:
        column.justify = "right"
    for source in sources:
        reach = source.reach
        shares = [*reach.recall()[:, -1].tolist(), float(reach.best_overlap()[-1])]
        grid.add_row(
            source.name, f"{float(reach.boxes_per_photo()[-1]):.0f}", *(f"{100 * share:.1f}" for share in shares)
        )
    return grid


def _numbers(source: RecallSource) -> dict[str, object]:
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
    """JSON has no NaN: None says that there is nothing to take a share of."""
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and math.isnan(value) else value
