"""Cells in a queue: finished one after the other, with the time that is left; broken off, the same call goes on."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import mean

from tag2box.engine.progress import Bar, Progress, silent
from tag2box.errors import Interrupted
from tag2box.reporting.text import duration
from tag2box.studies.cells import Cell, Result, finish, is_finished


def finish_all(cells: Sequence[Cell], folder: Path, *, progress: Progress = silent) -> dict[str, Result]:
    """The results of cells by name; of cells that are the same, one is run."""
    queue = {cell.name: cell for cell in cells}
    open_ = [name for name, cell in queue.items() if not is_finished(cell, folder)]
    results: dict[str, Result] = {}
    spent: list[float] = []
    for name, cell in queue.items():
        began = time.monotonic()
        place = standing(open_, name, spent)
        try:
            results[name] = finish(cell, folder, progress=_titled(progress, place))
        except (Interrupted, KeyboardInterrupt):
            raise Interrupted(f"stopped in {place}; what is done is kept, and the same command goes on") from None
        if name in open_:
            spent.append(time.monotonic() - began)
    return results


def standing(open_: Sequence[str], name: str, spent: Sequence[float]) -> str:
    """Where the queue stands, in words; the time left is taken from the cells this call has finished.

    The first of them often makes what the others share, proposals and maps; it is left out once there is another.
    """
    if name not in open_:
        return "a finished cell"
    words = f"cell {open_.index(name) + 1} of {len(open_)}"
    if not spent:
        return words
    left = (len(open_) - len(spent)) * mean(spent[1:] or spent)
    return f"{words}, about {duration(left)} left"


def _titled(progress: Progress, place: str) -> Progress:
    """Bars whose titles say which cell they are about."""

    @contextmanager
    def bars(title: str, total: int, done: int = 0) -> Iterator[Bar]:
        with progress(f"{place}: {title}", total, done) as bar:
            yield bar

    return bars
