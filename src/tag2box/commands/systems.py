"""``tag2box systems``: the systems the paper compares with, beside what it reports of them."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from tag2box.errors import UserError
from tag2box.recipes import RECIPES, Config
from tag2box.systems import SYSTEMS, changes, find_system

if TYPE_CHECKING:
    from rich.table import Table

DATASETS = {"voc07": "VOC07", "voc12": "VOC12", "coco14": "COCO14"}
NOTE = (
    "VOC07, VOC12 and COCO14 are the paper's mAP50, in per cent; - where it has none.\n"
    "tag2box train DATA --system NAME --out RUN; tag2box compare --systems NAME,NAME."
)


def table() -> Table:
    """All systems, oldest first, as a table for a terminal."""
    from rich.table import Table  # here: only the command line needs it

    sheet = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for title in ("system", "year", "what it does"):
        sheet.add_column(title, overflow="fold")
    for title in DATASETS.values():
        sheet.add_column(title, no_wrap=True, justify="right")
    for system in SYSTEMS.values():
        figures = [system.reported(dataset) for dataset in DATASETS]
        cells = ("-" if figure is None else f"{figure:.1f}" for figure in figures)
        sheet.add_row(system.name, str(system.year), system.idea, *cells)
    return sheet


def as_words(name: str, recipe: str = "photos") -> str:
    """What a system changes of a recipe, a line a setting."""
    system = find_system(name)
    if recipe not in RECIPES:
        near = difflib.get_close_matches(recipe, RECIPES, 1, 0.0)[0]
        raise UserError(f"--recipe {recipe}: unknown; did you mean {near}? `tag2box recipes` lists all")
    base: Config = RECIPES[recipe]()
    lines = [f"# {system.title} ({system.year}): {system.idea}", *changes(base, system(base))]
    return "".join(f"{line}\n" for line in lines)
