"""``tag2box compare`` at the command line."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from tag2box.cli.options import Classes, PhotosFolder, Split, data_source
from tag2box.cli.places import Brought, Recipe, TestBrought, TestData, TestPhotos, TestSplit, numbers, place_of
from tag2box.errors import UserError

if TYPE_CHECKING:
    from tag2box.experiments.study_data import Place

EPILOG = (
    "Example: `tag2box compare --systems oicr,mist,od-wscl --on scenes --on VOC2007`. "
    "Broken off, the same command goes on; a second call is instant."
)
SCENES = "scenes"


def compare(
    systems: Annotated[
        Optional[str],  # noqa: UP045 - typer reads it
        typer.Option(metavar="A,B,C", help="Names of `tag2box systems`; default: all."),
    ] = None,
    on: Annotated[
        list[str],
        typer.Option(
            "--on", metavar="DATA", help="`scenes`, or a VOC folder or COCO file with boxes; may be repeated."
        ),
    ] = [SCENES],  # noqa: B006
    seeds: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="0,1,2", help="Seeds of training, and of scenes; default: 0,1,2."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of page, numbers and runs; `reproduce` may share it.")] = Path(
        "runs/compare"
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
        list[str], typer.Option("--set", metavar="a.b=c", help="Override one setting of all systems; may be repeated.")
    ] = [],  # noqa: B006
) -> None:
    """Train systems on the same terms, on any datasets and seeds, and compare them on one page."""
    from tag2box.experiments import compare as command
    from tag2box.progress import TerminalProgress

    test_source = None if test is None else data_source(test, test_photos, None, classes)
    companions = (photos, split, classes, test, test_photos, test_split, proposals, test_proposals)
    _check(on, any(value is not None for value in companions))
    places: list[Place] = []
    for data in dict.fromkeys(on):
        if data == SCENES and len(set(on)) > 1:  # the companions are the other dataset's
            places.append(place_of(data_source(Path(data), None, None, None), None, None, None, None))
        else:
            learn = data_source(Path(data), photos, split, classes)
            places.append(place_of(learn, test_source, test_split, proposals, test_proposals))
    written = command.compare(
        _names(systems),
        places,
        out,
        seeds=numbers(seeds),
        recipe=recipe,
        overrides=override,
        commands=[shlex.join(["tag2box", *sys.argv[1:]])],
        progress=TerminalProgress(),
    )
    typer.echo(written.table, nl=False)
    typer.echo(f"page: {written.page}")
    typer.echo(f"numbers: {written.numbers}")


def _check(on: list[str], has_companions: bool) -> None:
    others = [data for data in dict.fromkeys(on) if data != SCENES]
    if has_companions and len(others) > 1:
        raise UserError(
            f"--on {others[1]}: --split, --photos, --test and the like speak of one dataset; "
            "compare on one at a time into the same --out, and what is finished is kept"
        )


def _names(text: str | None) -> tuple[str, ...]:
    names = tuple((text or "").replace(",", " ").split())
    if text is not None and not names:
        raise UserError("--systems: names none; expected names with commas between, as oicr,mist; without it, all")
    return names
