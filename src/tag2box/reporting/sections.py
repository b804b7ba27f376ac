"""A page made of sections: words, figures each with a sentence that reads it, tables, rows of photos."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from tag2box.io import write_text
from tag2box.reporting.charts import Key
from tag2box.reporting.gallery import Tile
from tag2box.reporting.tables import Table


@dataclass(frozen=True, slots=True)
class Fact:
    """A figure at the head of the page."""

    name: str
    value: str
    unit: str
    note: str


@dataclass(frozen=True, slots=True)
class Figure:
    """A drawn chart, its legend, and a sentence computed from its numbers that says what it shows."""

    title: str
    note: str
    charts: tuple[Markup, ...]  # more than one: parts of a long one, side by side
    reading: str
    keys: tuple[Key, ...] = ()


@dataclass(frozen=True, slots=True)
class Shelf:
    """A row of photos under a name."""

    name: str
    note: str
    tiles: tuple[Tile, ...]


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page with a heading of its own; what is empty is not shown."""

    id: str
    title: str
    words: str
    wide: bool = False  # figures one below the other
    figures: tuple[Figure, ...] = ()
    warnings: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    prose: bool = False  # the tables' cells are words, and wrap
    boxes: tuple[tuple[str, str], ...] = ()  # kinds of boxes drawn on the photos, and their meaning
    shelves: tuple[Shelf, ...] = ()


@dataclass(frozen=True, slots=True)
class Leaf:
    """A whole page."""

    kicker: str
    title: str
    lede: str
    facts: tuple[Fact, ...]
    sections: tuple[Section, ...]
    style: Markup = Markup("")
    unreadable: tuple[str, ...] = ()


def write_leaf(page: Leaf, out: Path) -> None:
    """Write a page as one self-contained HTML file."""
    write_text(out, fill("leaf.html.j2", page))


def fill(template: str, page: object) -> str:
    """A template filled in; every value is escaped except the markup this package drew itself."""
    loader = PackageLoader("tag2box.reporting", "templates")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template(template).render(page=page)
