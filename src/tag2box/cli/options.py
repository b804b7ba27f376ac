"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

if TYPE_CHECKING:
    from tag2box.data.datasets import DataSource

DataPath = Annotated[
    Path,
    typer.Argument(
        metavar="DATA",
        help="CSV of tags, COCO JSON, VOC folder, tree of class folders, or a folder of photos.",
    ),
]
PhotosFolder = Annotated[
    Optional[Path],  # noqa: UP045 - typer reads it
    typer.Option("--photos", help="Folder the photos are in, where it is not that of DATA."),
]
Split = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--split", help="Image list: a name in ImageSets/Main of a VOC folder, or any text file of ids."),
]
Classes = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--classes", help="Comma-separated names, or a text file with one a line; default: all there are."),
]


def data_source(path: Path, photos: Path | None, split: str | None, classes: str | None) -> DataSource:
    """The dataset a command line names."""
    from tag2box.data.datasets import DataSource, class_names

    return DataSource(path=path, photos=photos, split=split, classes=class_names(classes) if classes else None)
