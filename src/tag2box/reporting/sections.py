"""A page made of sections: text, figures each with a sentence that reads it, tables, rows of photos."""

from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from tag2box.io import write_text
from tag2box.reporting import formatting as fmt, gallery
from tag2box.reporting.charts import Key


@dataclass(frozen=True, slots=True)
class Figure:
    """A drawn chart, its legend, and a sentence computed from its numbers."""

    title: str
    note: str
    charts: tuple[Markup, ...]  # more than one: parts of a long chart, side by side
    reading: str
    keys: tuple[Key, ...] = ()


@dataclass(frozen=True, slots=True)
class TileRow:
    """A row of photos under a name."""

    name: str
    note: str
    tiles: tuple[gallery.Tile, ...]


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page with its own heading; empty parts are not shown."""

    id: str
    title: str
    words: str
    wide: bool = False  # figures one below the other
    figures: tuple[Figure, ...] = ()
    warnings: tuple[str, ...] = ()
    tables: tuple[fmt.Table, ...] = ()
    prose: bool = False  # cells of the tables are text and wrap
    boxes: tuple[tuple[str, str], ...] = ()  # legend of the boxes on the photos: kind, meaning
    shelves: tuple[TileRow, ...] = ()


@dataclass(frozen=True, slots=True)
class SectionPage:
    """A whole page."""

    kicker: str
    title: str
    lede: str
    facts: tuple[fmt.Fact, ...]
    sections: tuple[Section, ...]
    style: Markup = Markup("")
    unreadable: tuple[str, ...] = ()


def write_page(page: SectionPage, out: Path) -> None:
    """Write a page as one self-contained HTML file."""
    write_text(out, render_page(page))


def render_page(page: SectionPage) -> str:
    """A page as HTML."""
    return fill_template("sections.html.j2", page)


def fill_template(template: str, page: object) -> str:
    """A rendered template; every value is escaped except markup drawn by this package."""
    loader = PackageLoader("tag2box.reporting", "templates")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template(template).render(page=page)
