"""Draw the pseudo boxes of every system on the same four scenes: ``python docs/make_systems.py runs/compare``."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from PIL import Image, ImageDraw

from tag2box.data.scenes import Scenes
from tag2box.engine.progress import Terminal
from tag2box.files import replacing
from tag2box.reporting.data import GalleryPhoto, RunRecord
from tag2box.studies.compare import finish_contests, open_contests
from tag2box.studies.experiment import Findings
from tag2box.studies.side_by_side import last_look, same_photos
from tag2box.systems import SYSTEMS
from tag2box.types import Objects

IMAGES = Path(__file__).parent / "images" / "systems"
PHOTOS = 4
GAP = 6
COLOURS = 96  # of a picture's palette: enough to see boxes by, and under 100 kB
TRUTH, PSEUDO = (255, 255, 255), (230, 60, 30)


def main(out: Path, *overrides: str, world: Scenes | None = None, images: Path = IMAGES) -> list[Path]:
    """Train what is not there yet under seed 0, and write a picture a system; gives the files."""
    where = [world or Scenes()]
    contests = open_contests((), where, out, seeds=(0,), overrides=overrides, progress=Terminal())
    (findings,) = finish_contests(contests, out, progress=Terminal())
    return draw(findings, images)


def draw(findings: Findings, images: Path) -> list[Path]:
    """A picture for each system: the same photos side by side, true objects in white under its pseudo boxes."""
    seed, data = findings.first
    records: dict[str, RunRecord] = {
        system.name: findings.results[system.title][seed].record(name=system.title)
        for system in SYSTEMS.values()
        if system.title in findings.results
    }
    chosen = same_photos(list(records.values()), PHOTOS)
    paths = {photo.id: photo.path for photo in data.tagged.photos}
    truth = dict(zip(data.train.ids, data.train.objects, strict=True))
    files = []
    for name, record in records.items():
        look = last_look(record)
        files.append(_save(images / f"{name}.png", _row(chosen, paths, truth, look)))
    return files


def _row(
    chosen: Sequence[str], paths: Mapping[str, Path], truth: Mapping[str, Objects], look: Mapping[str, GalleryPhoto]
) -> Image.Image:
    tiles = [_tile(paths[photo], truth[photo], look[photo]) for photo in chosen]
    width = sum(tile.width for tile in tiles) + GAP * (len(tiles) - 1)
    row = Image.new("RGB", (width, max(tile.height for tile in tiles)), "white")
    left = 0
    for tile in tiles:
        row.paste(tile, (left, 0))
        left += tile.width + GAP
    return row


def _tile(path: Path, objects: Objects, look: GalleryPhoto) -> Image.Image:
    with Image.open(path) as photo:
        tile = photo.convert("RGB")
    pen = ImageDraw.Draw(tile)
    for box in objects.boxes.tolist():
        pen.rectangle(box, outline=TRUTH, width=1)
    for box in look.boxes:
        pen.rectangle(tuple(box), outline=PSEUDO, width=2)
    return tile


def _save(path: Path, picture: Image.Image) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        picture.quantize(COLOURS).save(temporary, "PNG", optimize=True)
    return path


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
