"""``tag2box recipes`` and ``tag2box systems``: the settings that runs can start from, beside the paper's figures."""

import difflib
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.table import Table

from tag2box import errors, paper_runs, recipes, settings, systems
from tag2box.cli import options
from tag2box.proposals.base import ProposalMethod
from tag2box.proposals.importers.proposal_files import Imported

RECIPE_COLUMNS = ("recipe", "backbone", "boxes", "batch", "lr", "iters", "lambda", "mAP50", "CorLoc", "AP")
_RECIPE_NOTE = (
    "mAP50, CorLoc and AP (COCO's; its AP50 is shown as mAP50) are the paper's, in per cent; - if it has none.\n"
    "boxes: SS is selective search, COMBI combined; MCG and COB are imported (`tag2box proposals import`)."
)
_PAPER_DATASETS = {"voc07": "VOC07", "voc12": "VOC12", "coco14": "COCO14"}
_SYSTEM_NOTE = (
    "VOC07, VOC12 and COCO14 are the paper's mAP50, in per cent; - if it has none.\n"
    "reduced: what a system lacks of its paper on this recipe; the others are whole.\n"
    "tag2box train DATA --system NAME --out RUN; tag2box compare --systems NAME,NAME."
)

# ---------------------------------------------------------------- recipes


@dataclass(frozen=True, slots=True)
class RecipeRow:
    """One recipe."""

    name: str
    backbone: str
    boxes: str
    batch: int
    lr: float
    iterations: int
    contrast_weight: float | None  # lambda; None if L_wscl is off
    figures: paper_runs.PaperFigures

    def cells(self) -> tuple[str, ...]:
        """The row as text, under ``RECIPE_COLUMNS``."""
        reported, weight = self.figures.reported(), self.contrast_weight
        map50 = reported.get("mAP50", reported.get("AP50"))
        figures = (map50, reported.get("CorLoc"), reported.get("AP"))
        return (
            self.name,
            self.backbone,
            self.boxes,
            str(self.batch),
            f"{self.lr:g}",
            f"{self.iterations:,}",
            "off" if weight is None else f"{weight:g}",
            *("-" if value is None else f"{value:.1f}" for value in figures),
        )


def list_recipes() -> list[RecipeRow]:
    """All recipes, in the order of ``RECIPES``."""
    return [_row(name, recipe()) for name, recipe in recipes.RECIPES.items()]


def _row(name: str, config: recipes.Config) -> RecipeRow:
    contrast = config.criterion.contrast
    return RecipeRow(
        name=name,
        backbone=config.backbone.title,
        boxes=_short_name(config.proposals),
        batch=config.loader.batch_size,
        lr=config.plan.optimizer.lr,
        iterations=config.plan.iterations,
        contrast_weight=contrast.weight if contrast.enabled else None,
        figures=paper_runs.PAPER_RUNS[name].figures if name in paper_runs.PAPER_RUNS else paper_runs.NOTHING,
    )


def _short_name(method: ProposalMethod) -> str:
    """Abbreviation of a proposal method: SS for selective_search, MCG for boxes imported from it."""
    if isinstance(method, Imported):
        return method.method.upper()
    words = method.kind.split("_")
    return (words[0][:5] if len(words) == 1 else "".join(word[0] for word in words)).upper()


def recipes_table(rows: list[RecipeRow]) -> Table:
    """The rows as a table for a terminal."""
    sheet = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for place, title in enumerate(RECIPE_COLUMNS):
        sheet.add_column(title, no_wrap=True, justify="left" if place < 3 else "right")
    for row in rows:
        sheet.add_row(*row.cells())
    return sheet


def recipe_toml(name: str) -> str:
    """A recipe as a settings file: the paper's figures as a comment, then every setting with its documentation."""
    if name not in recipes.RECIPES:
        near = difflib.get_close_matches(name, recipes.RECIPES, 1, 0.0)[0]
        raise errors.UserError(f"{name}: no recipe of this name; did you mean {near}? `tag2box recipes` lists all")
    figures = paper_runs.PAPER_RUNS[name].figures if name in paper_runs.PAPER_RUNS else paper_runs.NOTHING
    reported = ", ".join(f"{key} {value:.1f}" for key, value in figures.reported().items())
    head = f"# The paper reports ({figures.source}): {reported}\n\n" if reported else ""
    return head + settings.dump(recipes.RECIPES[name]())


def recipes_command(
    name: Annotated[str | None, typer.Argument(help="Print all settings of this recipe, as a TOML file.")] = None,
) -> None:
    """List the recipes of `train --recipe` with the paper's figures, or print one as a settings file.

    Example: `tag2box recipes voc07-ss-vgg16` prints a file for `tag2box train --config`.
    """
    if name is not None:
        typer.echo(recipe_toml(name), nl=False)
        return
    options.print_rich(recipes_table(list_recipes()))
    typer.echo(_RECIPE_NOTE)


# ---------------------------------------------------------------- systems


def _known(recipe: str) -> str:
    """The name of a recipe; raises if there is none."""
    if recipe not in recipes.RECIPES:
        near = difflib.get_close_matches(recipe, recipes.RECIPES, 1, 0.0)[0]
        raise errors.UserError(f"--recipe {recipe}: unknown; did you mean {near}? `tag2box recipes` lists all")
    return recipe


def systems_table(recipe: str = "photos") -> Table:
    """All systems, oldest first, as a table for a terminal; those that are reduced on a recipe have a mark."""
    base: recipes.Config = recipes.RECIPES[recipe]()
    sheet = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for title in ("system", "year", "what it does"):
        sheet.add_column(title, overflow="fold")
    for title in _PAPER_DATASETS.values():
        sheet.add_column(title, no_wrap=True, justify="right")
    for system in systems.SYSTEMS.values():
        figures = [system.reported(dataset) for dataset in _PAPER_DATASETS]
        cells = ("-" if figure is None else f"{figure:.1f}" for figure in figures)
        mark = f" ({state})" if (state := system.state(system(base))) != "whole" else ""
        sheet.add_row(system.name, str(system.year), f"{system.idea}{mark}", *cells)
    return sheet


def system_overrides(name: str, recipe: str = "photos") -> str:
    """The settings that a system changes in a recipe, one per line, as ``--set`` takes them."""
    system = systems.find_system(name)
    base: recipes.Config = recipes.RECIPES[_known(recipe)]()
    own = system(base)
    title = f"# {system.title} ({system.year}): {system.idea}; {system.state(own)} in {recipe}"
    lines = [title, *systems.changes(base, own)]
    return "".join(f"{line}\n" for line in lines)


def systems_command(
    name: Annotated[str | None, typer.Argument(help="Print the settings that this system changes.")] = None,
    recipe: Annotated[str, typer.Option(help="The recipe that a system changes.")] = "photos",
) -> None:
    """List the systems of `train --system` and `compare` with the paper's figures, or print one's settings.

    Example: `tag2box systems mist` prints lines that `tag2box train --set` takes one by one.
    """
    if name is not None:
        typer.echo(system_overrides(name, recipe), nl=False)
        return
    options.print_rich(systems_table(_known(recipe)))
    typer.echo(_SYSTEM_NOTE)
