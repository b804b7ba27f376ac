"""``tag2box data stats`` at the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from tag2box.cli.options import Classes, DataPath, PhotosFolder, Split, data_source

FIRST = 3  # lines about what was left out
EPILOG = "Example: `tag2box data stats VOC2007 --split trainval --out stats.html`"


def stats(
    data: DataPath,
    photos: PhotosFolder = None,
    split: Split = None,
    classes: Classes = None,
    out: Annotated[Path, typer.Option(help="HTML file to write.")] = Path("stats.html"),
    json: Annotated[Optional[Path], typer.Option(help="Also write the numbers.")] = None,  # noqa: UP045 - typer reads it
) -> None:
    """Draw a dataset: tags, balance, sizes; with boxes, the objects that one box a tag must miss."""
    from rich.console import Console

    from tag2box.commands import data_stats as command
    from tag2box.progress import TerminalProgress

    report = command.stats(data_source(data, photos, split, classes), out, json=json, progress=TerminalProgress())
    Console().print(command.table(report.stats))
    typer.echo(command.summary(report.stats))
    if report.left_out:
        typer.echo(f"left out, {len(report.left_out)} faults (all of them: tag2box data check {data}):", err=True)
        for line in report.left_out[:FIRST]:
            typer.echo(f"  {line}", err=True)
    typer.echo(f"page: {out}")
