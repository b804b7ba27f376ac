"""Photos whose colour encodes their number of boxes, a method that finds those, and a progress bar that records."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image

from tag2box.annotations import Photo
from tag2box.images import read_photo
from tag2box.proposals.base import FoundBoxes, ProposalMethod
from tag2box.proposals.build import build_proposals
from tag2box.proposals.store import ProposalStore


@dataclass(frozen=True, kw_only=True)
class Corner(ProposalMethod):
    """A method for tests: as many boxes as the top left pixel is red. Colours of 200 and up bring trouble."""

    kind: Literal["corner"] = "corner"
    min_side: int = 0
    side: float = 5.0
    unused: tuple[int, ...] = (1, 2)

    def search(self, bgr: np.ndarray, min_side: float) -> FoundBoxes:
        count = int(bgr[0, 0, 2])
        if count == 200:
            raise ValueError("no such colour\nsecond line")
        if count == 201:
            os.kill(os.getpid(), signal.SIGKILL)
        return FoundBoxes(
            np.array([[0, 0, self.side + i, self.side] for i in range(count)]).reshape(-1, 4), np.arange(count)
        )


CORNER = Corner()
COUNTS = (3, 0, 1, 2, 5, 4)


def paint(folder: Path, name: str, count: int, size: tuple[int, int] = (30, 20)) -> Photo:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.png"
    Image.new("RGB", size, (count, 0, 0)).save(path)
    return Photo(name, path, *size)


class Seen:
    """A progress bar that records its calls and may run a function after a photo."""

    def __init__(self, at: int = 0, act: Callable[[], None] = lambda: None) -> None:
        self.opened: list[tuple[int, int]] = []
        self.done = 0
        self._at, self._act = at, act

    @contextmanager
    def __call__(self, title: str, total: int, done: int = 0) -> Iterator[Seen]:
        self.opened.append((total, done))
        yield self

    def advance(self, note: str = "") -> None:
        self.done += 1
        if self.done == self._at:
            self._act()


def make(photos: list[Photo], out: Path, method: Corner = CORNER, **options) -> ProposalStore:
    return build_proposals(photos, method, out, read=read_photo, **{"workers": 1, "skip_bad": True, **options})


def content(path: Path) -> dict[str, bytes]:
    return {str(f.relative_to(path)): f.read_bytes() for f in path.rglob("*") if f.is_file()}


def counts(store: ProposalStore) -> dict[str, int]:
    return {name: len(store.boxes(name)) for name in store.sizes}
