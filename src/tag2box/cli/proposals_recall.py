"""``tag2box proposals recall`` at the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from tag2box.cli.options import Classes, DataPath, PhotosFolder, Split, data_source

FIRST = 5  # missing photos that are named
EPILOG = "Example: `tag2box proposals recall VOC2007 ss-fast ss-quality --split test --out recall.html`"


def recall(
    data: DataPath,
    stores: Annotated[list[Path], typer.Argument(metavar="STORE...", help="Stores of proposals to compare.")],
    photos: PhotosFolder = None,
    split: Split = None,
    classes: Classes = None,
    out: Annotated[Path, typer.Option(help="HTML file to write.")] = Path("recall.html"),
    json: Annotated[Optional[Path], typer.Option(help="Also write the numbers.")] = None,  # noqa: UP045 - typer reads it
) -> None:
    """Measure what proposals reach of the true objects, by number of boxes; several sources on one plot."""
    from rich.console import Console

    from tag2box.commands import recall as command
    from tag2box.progress import TerminalProgress

    sources = command.recall(
        data_source(data, photos, split, classes), stores, out, json=json, progress=TerminalProgress()
    )
    Console().print(command.table(sources))
    for source in sources:
        if source.missing:
            first = ", ".join(source.missing[:FIRST])
            more = f" and {len(source.missing) - FIRST} more" if len(source.missing) > FIRST else ""
            typer.echo(f"{source.name}: no boxes for {len(source.missing)} photos: {first}{more}", err=True)
    typer.echo(f"page: {out}")
