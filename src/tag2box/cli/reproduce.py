"""``tag2box reproduce`` at the command line."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

from tag2box.cli.options import Classes, PhotosFolder, Split, data_source
from tag2box.cli.places import Brought, Recipe, TestBrought, TestData, TestPhotos, TestSplit, numbers, place_of

EPILOG = (
    "Example: `tag2box reproduce table3a --on scenes`, or `tag2box reproduce table3a --on VOC2007`. "
    "Broken off, the same command goes on; a second call is instant."
)


def reproduce(
    name: Annotated[
        Optional[str],  # noqa: UP045 - typer reads it
        typer.Argument(metavar="NAME", help="A table or figure: table3a, fig4, ...; --list shows all."),
    ] = None,
    on: Annotated[
        str, typer.Option("--on", metavar="DATA", help="`scenes`, or a VOC folder or COCO file with boxes.")
    ] = "scenes",
    row: Annotated[
        list[str],
        typer.Option("--row", metavar="LABEL", help="Run this row alone; may be repeated. Default: all rows."),
    ] = [],  # noqa: B006
    seeds: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="0,1,2", help="Seeds of training, and of scenes; default: the experiment's own."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of page, numbers and runs; shared by all studies.")] = Path(
        "runs/reproduce"
    ),
    photos: PhotosFolder = None,
    split: Split = None,
    classes: Classes = None,
    test: TestData = None,
    test_photos: TestPhotos = None,
    test_split: TestSplit = None,
    proposals: Brought = None,
    test_proposals: TestBrought = None,
    recipe: Recipe = None,
    override: Annotated[
        list[str], typer.Option("--set", metavar="a.b=c", help="Override one setting of all rows; may be repeated.")
    ] = [],  # noqa: B006
    list_: Annotated[bool, typer.Option("--list", help="List the tables and figures.")] = False,
) -> None:
    """Run a table or figure of the paper at the size you can afford, and write it beside the paper's."""
    from tag2box.experiments import reproduce as command
    from tag2box.experiments.summary import experiments_table
    from tag2box.progress import TerminalProgress

    if list_ or name is None:
        from rich.console import Console

        Console().print(experiments_table())
        return
    command.find_experiment(name)
    test_source = None if test is None else data_source(test, test_photos, None, classes)
    learn = data_source(Path(on), photos, split, classes)
    place = place_of(learn, test_source, test_split, proposals, test_proposals)
    written = command.reproduce(
        name,
        place,
        out,
        rows=row,
        seeds=numbers(seeds),
        recipe=recipe,
        overrides=override,
        commands=[shlex.join(["tag2box", *sys.argv[1:]])],
        progress=TerminalProgress(),
    )
    typer.echo(written.table, nl=False)
    typer.echo(f"page: {written.page}")
    typer.echo(f"numbers: {written.numbers}")
