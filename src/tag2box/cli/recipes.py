"""``tag2box recipes``."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

EPILOG = "Example: `tag2box recipes voc07-ss-vgg16`, whose output is a file for `tag2box train --config`"


def recipes(
    name: Annotated[
        Optional[str],  # noqa: UP045 - typer reads it
        typer.Argument(help="Print the whole of this one, as a settings file."),
    ] = None,
) -> None:
    """List what `train --recipe` may start from, with the paper's figures; or print one."""
    from rich.console import Console

    from tag2box.commands import recipes as command

    if name is not None:
        typer.echo(command.as_toml(name), nl=False)
        return
    Console().print(command.table(command.list_recipes()))
    typer.echo(command.NOTE)
