"""``tag2box propose`` at the command line."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Optional

import typer

from tag2box.cli.options import Address, Classes, DataPath, On, PhotosFolder, Split, Where, data_source, pool

EPILOG = "Example: `tag2box propose photos --out proposals`. Broken off, the same command goes on."
FIRST = 20  # photos left out that are named
CHUNK = 4  # photos of a task on a cluster: a second or two of work


class Method(StrEnum):
    """Ways to propose boxes."""

    selective_search = "selective_search"
    edge_boxes = "edge_boxes"
    wsrpn = "wsrpn"


class Mode(StrEnum):
    """How thorough selective search is."""

    fast = "fast"
    quality = "quality"


def propose(
    data: DataPath,
    out: Annotated[Path, typer.Option(help="Folder of the store to write, or to go on with.")],
    photos: PhotosFolder = None,
    split: Split = None,
    classes: Classes = None,
    method: Annotated[Method, typer.Option(help="How boxes are found.")] = Method.selective_search,
    mode: Annotated[Optional[Mode], typer.Option(help="Of selective search; default: fast.")] = None,  # noqa: UP045 - typer reads it
    short_side: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=0, help="Side to which photos are resized for the search; 0: as they are. Default: 200."),
    ] = None,
    max_boxes: Annotated[Optional[int], typer.Option(min=1, help="At most so many a photo; default: 2000.")] = None,  # noqa: UP045
    min_side: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=0, help="Shorter boxes are left out, in pixels of the photo; default: 20."),
    ] = None,
    edge_model: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Structured forest (.yml.gz) for edge_boxes; default: edges from the gradient."),
    ] = None,
    workers: Annotated[Optional[int], typer.Option(min=1, help="Processes; default: one per core.")] = None,  # noqa: UP045
    override: Annotated[
        list[str], typer.Option("--set", metavar="key=value", help="Any other setting of the method; may be repeated.")
    ] = [],  # noqa: B006
    on: On = Where.here,
    address: Address = None,
) -> None:
    """Propose boxes for photos, into a store that training and detection read."""
    from tag2box.commands import propose as command
    from tag2box.progress import TerminalProgress

    source = data_source(data, photos, split, classes)
    given = {
        "mode": mode.value if mode else None,
        "short_side": short_side,
        "max_boxes": max_boxes,
        "min_side": min_side,
        "model": edge_model.absolute() if edge_model else None,
    }
    built = command.build_method(method.value, given, override)
    where = pool(on, address, workers=workers, chunk=CHUNK)
    done = command.propose(source, built, out, workers=workers, pool=where, progress=TerminalProgress())
    for line in done.lines():
        typer.echo(line)
    typer.echo(f"next: {command.next_command(source, classes, out)}")
    for line in done.left_out[:FIRST]:
        typer.echo(f"left out: {line}", err=True)
    if len(done.left_out) > FIRST:
        typer.echo(f"left out: {len(done.left_out) - FIRST} more; `tag2box data check` names them all", err=True)
    if done.left_out:
        raise typer.Exit(1)
