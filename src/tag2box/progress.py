"""Progress of long work: a bar on a terminal, plain lines anywhere else (nohup, CI, notebooks), nothing by default.

Long work takes a ``Progress`` and opens a bar:

    def work(photos, progress: Progress = silent):
        with progress("proposals", len(photos)) as bar:
            for photo in photos:
                ...
                bar.advance()
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from rich import progress as rich_progress
from rich.console import Console

from tag2box.errors import printable

_MIN_INTERVAL = 30.0  # seconds between two plain lines
_MAX_INTERVAL = 300.0  # seconds after which a plain line is due even without a step
_STEP = 0.1  # of the total: a plain line is due after each
_FIRST_ITEMS, _FIRST_SECONDS = 5, 5.0  # after these, long work is said to be long


class Bar(Protocol):
    """Counts finished items."""

    def advance(self, note: str = "") -> None:
        """Count one more item; ``note`` is shown behind the bar."""
        ...


class Progress(Protocol):
    """Opens a bar for ``total`` items, of which ``done`` are finished already."""

    def __call__(self, title: str, total: int, done: int = 0) -> AbstractContextManager[Bar]:
        """The bar, as a context manager."""
        ...


@contextmanager
def silent(title: str, total: int, done: int = 0) -> Iterator[Bar]:
    """No output: the default of the Python API."""
    yield _SilentBar()


class TerminalProgress:
    """Bars on standard error; plain lines if it is not a terminal."""

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console or Console(stderr=True)
        self._clock = clock

    @contextmanager
    def __call__(self, title: str, total: int, done: int = 0) -> Iterator[Bar]:
        """The bar, as a context manager."""
        title = printable(title)
        if not self._console.is_terminal:
            bar = _PlainBar(self._console, self._clock, title, total, done)
            yield bar
            bar.close()
            return
        columns = (
            rich_progress.TextColumn("{task.description}", markup=False),
            rich_progress.BarColumn(bar_width=24),
            rich_progress.MofNCompleteColumn(),
            rich_progress.TextColumn("{task.fields[speed]}"),
            rich_progress.TimeElapsedColumn(),
            rich_progress.TextColumn("left"),
            rich_progress.TimeRemainingColumn(),
            rich_progress.TextColumn("{task.fields[note]}", markup=False),
        )
        with rich_progress.Progress(*columns, console=self._console) as display:
            display.add_task(title, total=total, completed=done, note="", speed="")
            yield _RichBar(display, done)


class _SilentBar:
    def advance(self, note: str = "") -> None:
        """Ignore the item."""


class _RichBar:
    def __init__(self, display: rich_progress.Progress, done: int) -> None:
        self._display, self._start = display, done

    def advance(self, note: str = "") -> None:
        task = self._display.tasks[0]
        speed = (task.completed + 1 - self._start) / max(task.elapsed or 0.0, 1e-9)
        self._display.update(task.id, advance=1, note=printable(note), speed=f"{speed:.2f}/s")


class _PlainBar:
    """A line at the start, then one per 10 % of the total, at least every 5 minutes and at most every 30 seconds.

    Work that takes more than 30 seconds also has a line after its first items, with the time it will take, and one at
    its end.
    """

    def __init__(self, console: Console, clock: Callable[[], float], title: str, total: int, done: int) -> None:
        self._console, self._clock, self._title, self._total = console, clock, title, total
        self._start = self._done = self._printed_done = done
        self._begin = self._printed = clock()
        self._print(f"{title} ({total - done} to do)")

    def advance(self, note: str = "") -> None:
        self._done += 1
        now = self._clock()
        waited = now - self._printed
        is_step = self._done - self._printed_done >= _STEP * self._total
        if waited >= _MAX_INTERVAL or (waited >= _MIN_INTERVAL and is_step) or self._is_first_estimate(waited):
            self._print_status(now, note)

    def _is_first_estimate(self, waited: float) -> bool:
        """Whether enough is done to tell the time it all takes, nothing was said yet, and it is long."""
        done = self._done - self._start
        if self._printed_done != self._start or done < _FIRST_ITEMS or waited < _FIRST_SECONDS:
            return False
        return waited * (self._total - self._done) / done >= _MIN_INTERVAL

    def close(self) -> None:
        """Print the final state, unless the work was short or the last line showed it already."""
        now = self._clock()
        if self._done > self._printed_done and now - self._begin >= _MIN_INTERVAL:
            self._print_status(now, "")

    def _print_status(self, now: float, note: str) -> None:
        self._printed, self._printed_done = now, self._done
        elapsed = now - self._begin
        speed = (self._done - self._start) / elapsed
        remaining = max(self._total - self._done, 0)
        time_left = f"{_duration(remaining / speed)} left" if remaining else f"took {_duration(elapsed)}"
        share = self._done / max(self._total, 1)
        parts = (f"{self._title}: {self._done}/{self._total} ({share:.0%})", f"{speed:.2f}/s", time_left, note)
        self._print(", ".join(part for part in parts if part))

    def _print(self, line: str) -> None:
        self._console.print(printable(line), markup=False, highlight=False, emoji=False, soft_wrap=True)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
