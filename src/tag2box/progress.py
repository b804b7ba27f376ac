"""Progress bars: loss, speed and time left, on the terminal only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress


class Bar(Protocol):
    """What long work tells about itself."""

    def advance(self, note: str = "") -> None:
        """One more item is done; ``note`` stands behind the bar."""
        ...


class Progress(Protocol):
    """Opens a bar for ``total`` items of which ``done`` are done already."""

    def __call__(self, title: str, total: int, done: int = 0) -> AbstractContextManager[Bar]:
        """The bar, for the length of a with block."""
        ...


class _Silent:
    def advance(self, note: str = "") -> None:
        """Nobody watches."""


@contextmanager
def silent(title: str, total: int, done: int = 0) -> Iterator[Bar]:
    """No bar: the default of the Python calls."""
    yield _Silent()


class _Rich:
    def __init__(self, progress: RichProgress, task: object, done: int) -> None:
        self._progress = progress
        self._task = progress.task_ids[-1]
        self._start = done

    def advance(self, note: str = "") -> None:
        task = self._progress.tasks[0]
        speed = (task.completed + 1 - self._start) / max(task.elapsed or 0.0, 1e-9)
        self._progress.update(self._task, advance=1, note=note, speed=f"{speed:.2f}/s")


class TerminalProgress:
    """Bars drawn by rich on standard error; a plain line where that is no terminal."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)

    @contextmanager
    def __call__(self, title: str, total: int, done: int = 0) -> Iterator[Bar]:
        """The bar, for the length of a with block."""
        if not self._console.is_terminal:
            self._console.print(f"{title} ({total - done} to do)")
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )
        with RichProgress(*columns, console=self._console, disable=not self._console.is_terminal) as progress:
            task = progress.add_task(title, total=total, completed=done, note="", speed="")
            yield _Rich(progress, task, done)
