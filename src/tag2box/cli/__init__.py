"""The command line. Nothing heavy is imported before a command runs, so that help answers at once."""

from __future__ import annotations

import os
import sys
import warnings

import typer

from tag2box.cli import (
    compare,
    data,
    data_stats,
    proposals_import,
    proposals_recall,
    propose,
    recipes,
    reproduce,
    runs,
    systems,
    weights,
)
from tag2box.errors import Interrupted, UserError

app = typer.Typer(
    help="Object detectors from image-level tags alone: tags in, boxes out.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
proposals = typer.Typer(
    help="Proposals from elsewhere, and what proposals reach.", no_args_is_help=True, rich_markup_mode="markdown"
)

app.add_typer(runs.app)
app.command(epilog=propose.EPILOG)(propose.propose)
app.add_typer(proposals, name="proposals")
proposals.command("import", epilog=proposals_import.EPILOG)(proposals_import.import_)
proposals.command(epilog=proposals_recall.EPILOG)(proposals_recall.recall)
app.add_typer(data.app, name="data")
data.app.command(epilog=data_stats.EPILOG)(data_stats.stats)
app.add_typer(weights.app, name="weights")
app.command(epilog=reproduce.EPILOG)(reproduce.reproduce)
app.command(epilog=compare.EPILOG)(compare.compare)
app.command(epilog=systems.EPILOG)(systems.systems)
app.command(epilog=recipes.EPILOG)(recipes.recipes)


def _warn(message: Warning | str, *_: object, **__: object) -> None:
    """A warning as a line of ours, without the line of code that gave it."""
    if os.environ.get("RANK", "0") == "0":
        typer.echo(f"tag2box: warning: {message}", err=True)


def main() -> None:
    """Entry point of the ``tag2box`` command: a user's mistake is one line on standard error and exit code 2."""
    warnings.showwarning = _warn
    try:
        app()
    except (UserError, OSError) as error:  # OSError: a full disk, a folder that may not be written
        _say(error)
        sys.exit(2)
    except Interrupted as stop:
        _say(stop)
        sys.exit(130)


def _say(error: Exception) -> None:
    """One line on standard error; of processes that torchrun started, the first speaks for all."""
    if os.environ.get("RANK", "0") == "0":
        typer.echo(f"tag2box: {error}", err=True)
