"""events.jsonl: the one truth about a run. Progress, curves and report all read it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

FILE = "events.jsonl"


class EventLog:
    """Appends one JSON object a line; each is on disk before the next begins."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / FILE
        self._mend_last_line()

    def write(self, event: str, fields: Mapping[str, object]) -> None:
        """Record what happened, with the time it did."""
        line = json.dumps({"event": event, "time": round(time.time(), 3), **fields}, allow_nan=False)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def _mend_last_line(self) -> None:
        """A run killed while writing leaves half a line; cut it, or the next event would be glued to it."""
        if not self._path.exists():
            return
        content = self._path.read_bytes()
        if content and not content.endswith(b"\n"):
            with self._path.open("r+b") as file:
                file.truncate(content.rfind(b"\n") + 1)


class Unheard:
    """Takes events and tells nobody: for processes that do not lead."""

    def write(self, event: str, fields: Mapping[str, object]) -> None:
        """Nothing."""


def read_events(folder: Path) -> Iterator[dict[str, object]]:
    """The events of a run in order; half a last line, left by a kill, is not an event."""
    for line in (folder / FILE).read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):
            yield json.loads(line)
