"""Draw the pseudo boxes of every system on the same four scenes, and write the cost of a step on its page.

    python docs/make_systems.py runs/compare
    python docs/make_systems.py --states        # only whether systems are whole or reduced; trains nothing

Runs of seed 0 that are missing are trained. Costs are of these runs, and of docs/results/labelers.json.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from tag2box.annotations import Objects
from tag2box.data.scenes import Scenes
from tag2box.experiments.comparison import plan_comparisons, run_comparisons
from tag2box.experiments.experiment import StudyResults
from tag2box.experiments.pictures import last_gallery, same_photos
from tag2box.io import read_json, replacing, write_text
from tag2box.paper_runs import PAPER_RUNS
from tag2box.progress import TerminalProgress
from tag2box.recipes import RECIPES
from tag2box.reporting.formatting import plural
from tag2box.reporting.records import RunRecord
from tag2box.systems import SYSTEMS, System
from tag2box.training.events import GalleryPhoto

DOCS = Path(__file__).parent
IMAGES, PAGES, LABELERS = DOCS / "images" / "systems", DOCS / "systems", DOCS / "results" / "labelers.json"
ON_PAGE = {"oicr-plus": "oicr"}  # systems described on another system's page
PHOTOS = 4
GAP = 6
COLOURS = 96  # palette size of a picture: boxes are visible, and files are under 100 kB
TRUTH, PSEUDO = (255, 255, 255), (230, 60, 30)


def main(
    out: Path, *overrides: str, world: Scenes | None = None, images: Path = IMAGES, pages: Path | None = None
) -> list[Path]:
    """Train missing runs of seed 0, write a picture per system, and fill the pages; returns the pictures."""
    sources = [world or Scenes()]
    plans = plan_comparisons((), sources, out, seeds=(0,), overrides=overrides, progress=TerminalProgress())
    (results,) = run_comparisons(plans, out, progress=TerminalProgress())
    if pages is not None:
        fill_pages(results, pages)
    return draw(results, images)


def fill(page: str, systems: Mapping[str, str], costs: Mapping[str, str]) -> str:
    """A page with pictures and costs of its systems (name -> title) at its marks."""
    pictures = [f"![Pseudo boxes of {title}](../images/systems/{name}.png)" for name, title in systems.items()]
    words = "Its pseudo boxes in the end (red), on training photos of the scenes, over the true objects (white):"
    page = _block(page, "picture", "\n\n".join([words, *pictures]))
    return _block(page, "cost", "\n\n".join(textwrap.fill(costs[name], 120) for name in systems))


def _block(page: str, name: str, text: str) -> str:
    mark = re.compile(rf"<!-- {name} -->(?:.*<!-- /{name} -->)?", re.DOTALL)
    return mark.sub(lambda _: f"<!-- {name} -->\n{text}\n<!-- /{name} -->", page)


def state_of(system: System) -> str:
    """Where a system is whole, and where it is reduced and why, in a sentence."""
    places: dict[str, list[str]] = {}
    for name, recipe in RECIPES.items():
        place = "the paper's recipes" if name in PAPER_RUNS else f"`{name}`"
        found = places.setdefault(system.state(system(recipe())), [])
        found += [] if place in found else [place]
    if len(places) == 1:
        places = {state: ["all recipes"] for state in places}
    parts = []
    for state, names in places.items():
        kind, _, reason = state.partition(": ")
        parts.append(f"{kind}{f' ({reason})' if reason else ''} in {', '.join(names)}")
    return f"{system.title} is {'; '.join(parts)}."


def fill_states(pages: Path) -> None:
    """Write on the page of each system whether it is whole or reduced."""
    for path in sorted(pages.glob("*.md")):
        own = [system for system in SYSTEMS.values() if ON_PAGE.get(system.name, system.name) == path.stem]
        if own:
            text = "\n\n".join(textwrap.fill(state_of(system), 120, break_on_hyphens=False) for system in own)
            write_text(path, _block(path.read_text(encoding="utf-8"), "state", text))


def costs_of(results: StudyResults, labelers: Mapping[str, Any]) -> dict[str, str]:
    """The cost of a step of each system, in a sentence."""
    seed, _ = results.first
    known = {name: system.title for name, system in SYSTEMS.items() if system.title in results.results}
    found = {name: results.results[title][seed] for name, title in known.items()}
    steps = {name: result.figure(("cost", "step_seconds")) or 0.0 for name, result in found.items()}
    labels = {row["system"]: row for row in labelers["rows"]}
    base, costs = steps["oicr-plus"], {}
    for name, title in known.items():
        own = labels[title]
        threads = plural(int(found[name].record(name=title).start.machine["threads"]), "thread")
        costs[name] = (
            f"{title}: on the scenes (lite0, 8 photos of 128 proposals, {threads}) a step takes "
            f"{1000 * steps[name]:.0f} ms, {steps[name] / base:.1f} times that of OICR+. At the paper's size (8 photos "
            f"of 2,000 proposals, 20 classes) its labels take {own['labeler_cpu']:.2f} CPU seconds, "
            f"{_share(own['share_of_step'])} of a step of VGG16."
        )
    return costs


def _share(part: float) -> str:
    return f"{100 * part:.2f} %" if part >= 0.0001 else "less than 0.01 %"


def fill_pages(results: StudyResults, pages: Path) -> None:
    """Write pictures and costs into the pages of all systems."""
    costs = costs_of(results, read_json(LABELERS, "costs of labelers"))
    for path in sorted(pages.glob("*.md")):
        own = {name: SYSTEMS[name].title for name in costs if ON_PAGE.get(name, name) == path.stem}
        if own:
            write_text(path, fill(path.read_text(encoding="utf-8"), own, costs))


def draw(results: StudyResults, images: Path) -> list[Path]:
    """A picture per system: the same photos side by side, true objects in white under its pseudo boxes."""
    seed, data = results.first
    records: dict[str, RunRecord] = {
        system.name: results.results[system.title][seed].record(name=system.title)
        for system in SYSTEMS.values()
        if system.title in results.results
    }
    chosen = same_photos(list(records.values()), PHOTOS)
    paths = {photo.id: photo.path for photo in data.tagged.photos}
    truth = dict(zip(data.train.ids, data.train.objects, strict=True))
    files = []
    for name, record in records.items():
        files.append(_save(images / f"{name}.png", _row(chosen, paths, truth, last_gallery(record))))
    return files


def _row(
    chosen: Sequence[str], paths: Mapping[str, Path], truth: Mapping[str, Objects], labels: Mapping[str, GalleryPhoto]
) -> Image.Image:
    tiles = [_tile(paths[photo], truth[photo], labels[photo]) for photo in chosen]
    width = sum(tile.width for tile in tiles) + GAP * (len(tiles) - 1)
    row = Image.new("RGB", (width, max(tile.height for tile in tiles)), "white")
    left = 0
    for tile in tiles:
        row.paste(tile, (left, 0))
        left += tile.width + GAP
    return row


def _tile(path: Path, objects: Objects, labels: GalleryPhoto) -> Image.Image:
    with Image.open(path) as photo:
        tile = photo.convert("RGB")
    pen = ImageDraw.Draw(tile)
    for box in objects.boxes.tolist():
        pen.rectangle(box, outline=TRUTH, width=1)
    for box in labels.boxes:
        pen.rectangle(tuple(box), outline=PSEUDO, width=2)
    return tile


def _save(path: Path, picture: Image.Image) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        picture.quantize(COLOURS).save(temporary, "PNG", optimize=True)
    return path


if __name__ == "__main__":
    fill_states(PAGES)
    if sys.argv[1] != "--states":
        main(Path(sys.argv[1]), *sys.argv[2:], pages=PAGES)
