"""The command line. Nothing heavy is imported before a command runs, so that help answers at once."""

from __future__ import annotations

import sys
import warnings

import typer

from tag2box.cli import data, data_stats, proposals_import, proposals_recall, propose, runs, weights
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


def _warn(message: Warning | str, *_: object, **__: object) -> None:
    """A warning as a line of ours, without the line of code that gave it."""
    typer.echo(f"tag2box: warning: {message}", err=True)


def main() -> None:
    """Entry point of the ``tag2box`` command: a user's mistake is one line on standard error and exit code 2."""
    warnings.showwarning = _warn
    try:
        app()
    except UserError as error:
        typer.echo(f"tag2box: {error}", err=True)
        sys.exit(2)
    except OSError as error:  # a full disk, a folder that may not be written
        typer.echo(f"tag2box: {error}", err=True)
        sys.exit(2)
    except Interrupted as stop:
        typer.echo(f"tag2box: {stop}", err=True)
        sys.exit(130)
