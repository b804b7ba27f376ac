"""``tag2box recipes``: what runs can start from, beside what the paper reports of them."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tag2box import settings
from tag2box.errors import UserError
from tag2box.paper_runs import NOTHING, PAPER_RUNS, PaperFigures
from tag2box.proposals.base import ProposalMethod
from tag2box.proposals.importers.proposal_files import Imported
from tag2box.recipes import RECIPES, Config

if TYPE_CHECKING:
    from rich.table import Table

HEADER = ("recipe", "backbone", "boxes", "batch", "lr", "iters", "lambda", "mAP50", "CorLoc", "AP")
NOTE = (
    "mAP50, CorLoc and AP (COCO's, whose AP50 stands under mAP50) are the paper's, in per cent; - where it has none.\n"
    "boxes: SS is selective search; MCG and COB are imported (`tag2box proposals import`)."
)


@dataclass(frozen=True, slots=True)
class Row:
    """One recipe."""

    name: str
    backbone: str
    boxes: str
    batch: int
    lr: float
    iterations: int
    contrast_weight: float | None  # lambda; None where L_wscl is off
    figures: PaperFigures

    def cells(self) -> tuple[str, ...]:
        """As words, under ``HEADER``."""
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


def list_recipes() -> list[Row]:
    """All recipes, in the order of ``RECIPES``."""
    return [_row(name, recipe()) for name, recipe in RECIPES.items()]


def _row(name: str, config: Config) -> Row:
    contrast = config.criterion.contrast
    return Row(
        name=name,
        backbone=_backbone(config),
        boxes=_boxes(config.proposals),
        batch=config.loader.batch_size,
        lr=config.plan.optimizer.lr,
        iterations=config.plan.iterations,
        contrast_weight=contrast.weight if contrast.enabled else None,
        figures=PAPER_RUNS[name].figures if name in PAPER_RUNS else NOTHING,
    )


def _backbone(config: Config) -> str:
    backbone = config.backbone
    return backbone.title


def _boxes(method: ProposalMethod) -> str:
    if isinstance(method, Imported):
        return method.method.upper()
    return {"selective_search": "SS", "edge_boxes": "EB", "wsrpn": "WSRPN"}[method.kind]


def table(rows: list[Row]) -> Table:
    """The rows as a table for a terminal."""
    from rich.table import Table  # here: only the command line needs it

    sheet = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for place, title in enumerate(HEADER):
        sheet.add_column(title, no_wrap=True, justify="left" if place < 3 else "right")
    for row in rows:
        sheet.add_row(*row.cells())
    return sheet


def as_toml(name: str) -> str:
    """A recipe as a settings file: the paper's figures as a comment, then every setting with its documentation."""
    if name not in RECIPES:
        near = difflib.get_close_matches(name, RECIPES, 1, 0.0)[0]
        raise UserError(f"{name}: no recipe of this name; did you mean {near}? `tag2box recipes` lists all")
    figures = PAPER_RUNS[name].figures if name in PAPER_RUNS else NOTHING
    reported = ", ".join(f"{key} {value:.1f}" for key, value in figures.reported().items())
    head = f"# The paper reports ({figures.source}): {reported}\n\n" if reported else ""
    return head + settings.dump(RECIPES[name]())
