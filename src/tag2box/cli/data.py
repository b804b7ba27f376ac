"""``tag2box data``: commands about datasets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from tag2box.cli.options import Classes, DataPath, PhotosFolder, Split, data_source

app = typer.Typer(help="Look at a dataset before training on it.", no_args_is_help=True)


@app.callback()
def data() -> None:
    """Look at a dataset before training on it."""


@app.command(epilog="Example: `tag2box data check tags.csv --photos photos`")
def check(
    path: DataPath,
    photos: PhotosFolder = None,
    split: Split = None,
    classes: Classes = None,
    json: Annotated[Optional[Path], typer.Option("--json", help="Also write the findings to this file.")] = None,  # noqa: UP045
) -> None:
    """List what is wrong with a dataset. Exit code 0: nothing to mend; 1: warnings; 2: errors."""
    from rich.console import Console

    from tag2box.commands import data_check as command
    from tag2box.progress import TerminalProgress

    found = command.data_check(data_source(path, photos, split, classes), json=json, progress=TerminalProgress())
    Console().print(command.page(found))
    raise typer.Exit(command.exit_code(found))
