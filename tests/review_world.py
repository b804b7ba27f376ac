"""A label set of generated scenes for tests of reviews, and review servers in a thread or in a process of their own."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from PIL import Image

from tag2box.data.scenes import Scenes
from tag2box.labels.label_set import LabelSet
from tag2box.labels.labelled import LabelBox, LabelledPhoto, LabelledPhotos
from tag2box.review.server import Access, bind_port, create_app
from tag2box.review.session import ReviewSession
from tag2box.storage import FileStamp

CLASSES = ("balloon", "car", "clock", '<b>cup</b> & "x"')
SMALL = Scenes(train=1, test=0, width=160, height=120, classes=CLASSES[:3], smallest=24, largest=60)


def scene_labels(folder: Path, count: int = 6, scenes: Scenes = SMALL, classes: tuple[str, ...] = CLASSES) -> LabelSet:
    """A label set in ``folder/labels`` on photos in ``folder/photos``: nearly right boxes, alternatives, doubts."""
    entries = []
    for number in range(count):
        drawn = scenes.draw("train", number)
        path = folder / "photos" / f"scene_{number:04d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(drawn.image).save(path, quality=90)
        tags = tuple(dict.fromkeys(scenes.classes[label] for label in drawn.objects.labels.tolist()))
        boxes = tuple(
            _label(place, [float(x) for x in box], scenes.classes[label], number)
            for place, (box, label) in enumerate(
                zip(drawn.objects.boxes.tolist(), drawn.objects.labels.tolist(), strict=True)
            )
        )
        entries.append(
            LabelledPhoto(
                path.stem, path.name, scenes.width, scenes.height, tags, boxes, (), "", FileStamp.of(path)
            )
        )  # fmt: skip
    made = LabelSet(LabelledPhotos(folder / "photos", classes, tuple(entries)))
    made.write(folder / "labels")
    return LabelSet.open(folder / "labels")


def _label(place: int, box: list[float], name: str, photo: int) -> LabelBox:
    x1, y1, x2, y2 = box
    part = (x1, y1, x1 + 0.6 * (x2 - x1), y1 + 0.6 * (y2 - y1)) if (place + photo) % 3 == 0 else None
    is_doubtful = place % 4 == 3
    return LabelBox(
        (x1, y1, x2, y2), name, round(0.9 - 0.11 * place, 3) if place < 8 else 0.05, is_doubtful,
        why="doubtful" if is_doubtful else "further instance" if place else "best of its tag", rank=place + 1,
        margin=0.1, alternative=part, source="label",
    )  # fmt: skip


@contextlib.contextmanager
def serving(labels: Path, **options: Any) -> Iterator[tuple[ReviewSession, Access]]:
    """A review server in a thread."""
    session = ReviewSession(labels, reviewer="Ada", **options)
    bound = bind_port(0)
    access = Access(bound.getsockname()[1])
    app = create_app(session, access)
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_level="error", http="h11", ws="none"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    try:
        yield session, access
    finally:
        server.should_exit = True
        server.force_exit = True
        thread.join()
        bound.close()
        session.close()


@dataclass
class Running:
    """A review server in a process of its own."""

    process: subprocess.Popen[str]
    address: str

    @property
    def port(self) -> int:
        return int(self.address.split(":")[2].split("/")[0])

    @property
    def token(self) -> str:
        return self.address.partition("token=")[2]

    def kill(self) -> None:
        """End it without warning."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> tuple[int, str]:
        """End it as Ctrl-C does; returns the exit code and the rest of its output."""
        self.process.send_signal(signal.SIGINT)
        out, _ = self.process.communicate(timeout=60)
        return self.process.returncode, out


@contextlib.contextmanager
def review_server(labels: Path, *options: str) -> Iterator[Running]:
    """``tag2box review`` in a process of its own."""
    argv = [sys.executable, "-m", "tag2box", "review", str(labels), "--no-browser", "--reviewer", "Ada", *options]
    process = subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    try:
        assert process.stdout is not None
        seen = []
        for line in process.stdout:
            seen.append(line)
            if found := re.search(r"http://\S+", line):
                yield Running(process, found[0])
                break
        else:
            raise AssertionError(f"no address: {seen}")
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
