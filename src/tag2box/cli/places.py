"""Where studies take place, as the command line names it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from tag2box.errors import UserError

if TYPE_CHECKING:
    from tag2box.experiments.study_data import Place
    from tag2box.formats.listing import DataSource

TestData = Annotated[
    Optional[Path],  # noqa: UP045 - typer reads it
    typer.Option("--test", metavar="DATA", help="Dataset to be measured on, where DATA does not hold it too."),
]
TestPhotos = Annotated[Optional[Path], typer.Option("--test-photos", help="Folder of its photos.")]  # noqa: UP045
TestSplit = Annotated[Optional[str], typer.Option("--test-split", help="Image list of its photos.")]  # noqa: UP045
Brought = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--proposals", metavar="STORE", help="Imported proposals of the photos to learn from, as MCG's."),
]
TestBrought = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--test-proposals", metavar="STORE", help="Imported proposals of the photos to be measured on."),
]
Recipe = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--recipe", help="Settings to start from; default: scenes on scenes, else photos."),
]


def numbers(text: str | None) -> tuple[int, ...]:
    """Seeds as they are typed; none are the study's own."""
    words = (text or "").replace(",", " ").split()
    if not all(word.isdecimal() for word in words):
        raise UserError(f"--seeds {text}: expected whole numbers with commas between, as 0,1,2")
    return tuple(int(word) for word in words)


def place_of(
    learn: DataSource,
    test: DataSource | None,
    test_split: str | None,
    proposals: Path | None,
    test_proposals: Path | None,
) -> Place:
    """Where a study takes place: generated scenes, or the two parts of a dataset."""
    from dataclasses import replace

    from tag2box.data.scenes import Scenes
    from tag2box.experiments.study_data import SCENES, Boxes, splits_of

    if learn.path == Path(SCENES):
        rest = (learn.photos, learn.split, learn.classes, test, test_split, proposals, test_proposals)
        if any(value is not None for value in rest):
            raise UserError(
                "--on scenes: has photos, parts and classes of its own; leave out all but --seeds and --set"
            )
        return Scenes()
    if (proposals is None) != (test_proposals is None):
        raise UserError("--proposals and --test-proposals go together: both parts need boxes of the same making")
    boxes = None if proposals is None or test_proposals is None else Boxes(proposals, test_proposals)
    return replace(splits_of(learn, test, test_split), boxes=boxes)
