"""A study of a second: tiny scenes, a tiny network, and progress that can kill the work at any step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from tag2box.annotations import Truth
from tag2box.experiments.reproduction import StudyFiles, reproduce
from tag2box.formats.voc_tags import voc_root
from tag2box.progress import Bar
from tiny_world import SCENES, TINY

WORLD = replace(SCENES, train=6, test=3)


def study(name: str, out: Path, *overrides: str, seeds: tuple[int, ...] = (0,), **more: object) -> StudyFiles:
    return reproduce(name, WORLD, out, seeds=seeds, overrides=(*TINY, *overrides), **more)  # type: ignore[arg-type]


class Killed(BaseException):
    """An exception that no code catches, like a kill."""


class Mortal:
    """Progress that kills the work at its nth step, and counts them."""

    def __init__(self, dies_at: int | None = None) -> None:
        self.dies_at = dies_at
        self.steps = 0
        self.titles: list[str] = []

    @contextmanager
    def __call__(self, title: str, total: int, done: int = 0) -> Iterator[Bar]:
        self.titles.append(title)
        yield self

    def advance(self, note: str = "") -> None:
        self.steps += 1
        if self.steps == self.dies_at:
            raise Killed


def write_voc(folder: Path, truth: Truth, photos: dict[str, Path], lists: dict[str, list[str]]) -> Path:
    """A VOC folder with the given objects and image lists."""
    for part in ("Annotations", "ImageSets/Main", "JPEGImages"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    for name, ids in lists.items():
        (folder / "ImageSets" / "Main" / f"{name}.txt").write_text("".join(f"{i}\n" for i in ids))
    for photo, (width, height), objects in zip(truth.ids, truth.sizes, truth.objects, strict=True):
        (folder / "JPEGImages" / f"{photo}.jpg").write_bytes(photos[photo].read_bytes())
        objects_xml = ""
        for box, label in zip(objects.boxes.int().tolist(), objects.labels.tolist(), strict=True):
            sides = (f"<{k}>{v}</{k}>" for k, v in zip(("xmin", "ymin", "xmax", "ymax"), box, strict=True))
            objects_xml += f"<object><name>{truth.classes[label]}</name><bndbox>{''.join(sides)}</bndbox></object>"
        size = f"<size><width>{width}</width><height>{height}</height><depth>3</depth></size>"
        (folder / "Annotations" / f"{photo}.xml").write_text(f"<annotation>{size}{objects_xml}</annotation>")
    assert voc_root(folder) == folder
    return folder
