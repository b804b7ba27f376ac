"""Cells in a queue: finished one after the other, with the time that is left; broken off, the same call goes on.

Several commands may share the cells of a folder: each takes those that no other is at, and has the results of all.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import mean

from tag2box.errors import Busy, Interrupted
from tag2box.experiments.grid import GridRun, RunResult, finish_run, is_finished, is_taken
from tag2box.progress import Bar, Progress, silent
from tag2box.reporting.charts import duration

QUEUE_PAUSE = 1.0  # seconds between two looks at cells that others are at


def finish_all(cells: Sequence[GridRun], folder: Path, *, progress: Progress = silent) -> dict[str, RunResult]:
    """The results of cells by name; of cells that are the same, one is run."""
    queue = {cell.name: cell for cell in cells}
    open_ = _open(queue, folder)
    results: dict[str, RunResult] = {}
    spent: list[float] = []
    while left := [name for name in queue if name not in results]:
        for name in left:
            ahead, began = _open(queue, folder), time.monotonic()
            place = standing(open_, name, len(ahead), spent)
            with suppress(Busy), _kept(place):
                results[name] = finish_run(queue[name], folder, progress=_titled(progress, place))
                if name in ahead:
                    spent.append(time.monotonic() - began)
        others = [queue[name] for name in left if name not in results]
        if others:
            _wait(others, folder, progress)
    return {name: results[name] for name in queue}


def _open(queue: Mapping[str, GridRun], folder: Path) -> list[str]:
    return [name for name, cell in queue.items() if not is_finished(cell, folder)]


def standing(open_: Sequence[str], name: str, ahead: int, spent: Sequence[float]) -> str:
    """Where the queue stands, in words; the time for the ``ahead`` cells is taken from those this call has finished.

    The first of them often makes what the others share, proposals and maps; it is left out once there is another.
    """
    if name not in open_:
        return "a finished cell"
    words = f"cell {open_.index(name) + 1} of {len(open_)}"
    if not spent:
        return words
    return f"{words}, about {duration(ahead * mean(spent[1:] or spent))} left"


def _wait(cells: Sequence[GridRun], folder: Path, progress: Progress) -> None:
    """Until a cell is nobody's, or done."""
    place = "waiting for another command"
    with _kept(place), progress(f"{place}, cells left: {len(cells)}", 1):
        time.sleep(QUEUE_PAUSE)
        while all(is_taken(cell, folder) for cell in cells):
            time.sleep(QUEUE_PAUSE)


@contextmanager
def _kept(place: str) -> Iterator[None]:
    """Say where Ctrl-C ended the block."""
    try:
        yield
    except (Interrupted, KeyboardInterrupt):
        raise Interrupted(f"stopped in {place}; what is done is kept, and the same command goes on") from None


def _titled(progress: Progress, place: str) -> Progress:
    """Bars whose titles say which cell they are about."""

    @contextmanager
    def bars(title: str, total: int, done: int = 0) -> Iterator[Bar]:
        with progress(f"{place}: {title}", total, done) as bar:
            yield bar

    return bars
