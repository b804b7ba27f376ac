"""Work on photos that tests, and the processes of a cluster, import from here."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

from tag2box.formats.addresses import FetchedPhoto
from tag2box.images import photo_size


class Header:
    """A box as large as the photo; every photo is noted in a file, if there is one."""

    def __init__(self, notes: Path | None = None) -> None:
        self.notes = notes

    def __call__(self, photo: FetchedPhoto) -> dict[str, object]:
        width, height = photo_size(photo.path)
        if self.notes is not None:
            with self.notes.open("a") as file:
                file.write(f"{photo.address}\n")
        return {"width": width, "height": height, "boxes": [[0.0, 0.0, width, height]], "scores": [0.5]}


class Deadly(Header):
    """Ends the process at photos whose name has "deadly" in it."""

    def __call__(self, photo: FetchedPhoto) -> dict[str, object]:
        if "deadly" in photo.address:
            assert multiprocessing.parent_process() is not None, "the process of the tests itself"
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(photo)


class Faulty(Header):
    """Fails as libraries do at photos whose name has "faulty" in it."""

    def __call__(self, photo: FetchedPhoto) -> dict[str, object]:
        if "faulty" in photo.address:
            raise ValueError("first line\nsecond line")
        return super().__call__(photo)
