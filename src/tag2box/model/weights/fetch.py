"""A published file, over the network: streamed beside its place, checked, then renamed into it."""

from __future__ import annotations

import urllib.request
from contextlib import AbstractContextManager
from http.client import HTTPResponse
from pathlib import Path
from typing import Protocol

from tag2box.errors import UserError
from tag2box.files import replacing
from tag2box.model.weights.files import digest

_SECONDS = 10  # without a byte
_CHUNK = 1 << 20


class _Bar(Protocol):
    def advance(self) -> None:
        """One more."""
        ...


class Watch(Protocol):
    """Opens a bar for ``total`` items; the progress of the engine is one."""

    def __call__(self, title: str, total: int) -> AbstractContextManager[_Bar]:
        """The bar, for the length of a with block."""
        ...


def fetch(address: str, path: Path, *, sha256: str, watch: Watch) -> None:
    """Download a file whose sha256 begins with ``sha256``; the bar counts megabytes.

    Raises OSError where the network fails.
    """
    with replacing(path) as temporary:
        with urllib.request.urlopen(address, timeout=_SECONDS) as answer:
            _save(answer, temporary, path.name, watch)
        if not digest(temporary).startswith(sha256):
            raise UserError(f"{address}: what came has not the sha256 {sha256}...; try again, nothing was kept")


def _save(answer: HTTPResponse, path: Path, name: str, watch: Watch) -> None:
    megabytes = -(-int(answer.headers.get("Content-Length", 0)) // _CHUNK)
    with path.open("wb") as file, watch(f"downloading {name}, MB", megabytes) as bar:
        while chunk := answer.read(_CHUNK):
            file.write(chunk)
            bar.advance()
