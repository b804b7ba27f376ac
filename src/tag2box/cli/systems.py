"""``tag2box systems``."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

EPILOG = "Example: `tag2box systems mist`, whose lines `tag2box train --set` takes one by one"


def systems(
    name: Annotated[
        Optional[str],  # noqa: UP045 - typer reads it
        typer.Argument(help="Print what this one changes of a recipe."),
    ] = None,
    recipe: Annotated[str, typer.Option(help="The recipe that is changed.")] = "photos",
) -> None:
    """List what `train --system` and `compare` know, with the paper's figures; or print what one changes."""
    from rich.console import Console

    from tag2box.commands import systems as command

    if name is not None:
        typer.echo(command.as_words(name, recipe), nl=False)
        return
    Console().print(command.table())
    typer.echo(command.NOTE)
