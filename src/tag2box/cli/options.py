"""Arguments and options that several commands share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from tag2box.errors import UserError

if TYPE_CHECKING:
    from tag2box.formats.listing import DataSource
    from tag2box.proposals.pool import Pool

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


class Where(StrEnum):
    """What does the work on photos."""

    here = "here"
    ray = "ray"


On = Annotated[
    Where,
    typer.Option(
        "--on", help="Where photos are worked on; all nodes of a Ray cluster must find them under the same path."
    ),
]
Address = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--address",
        metavar="HOST:PORT",
        help="Of the Ray cluster; default: that of RAY_ADDRESS, else one is started here and stopped in the end.",
    ),
]


def pool(on: Where, address: str | None, *, workers: int | None = None, chunk: int) -> Pool | None:
    """The cluster a command line names, for tasks of ``chunk`` photos; None is this machine."""
    if on is Where.here:
        if address is not None:
            raise UserError(f"--address {address}: belongs to --on ray; add it, or leave the address out")
        return None
    from tag2box.proposals.ray_pool import RayPool, check_ray

    check_ray(address)
    return RayPool(address, workers, chunk)


def data_source(path: Path, photos: Path | None, split: str | None, classes: str | None) -> DataSource:
    """The dataset a command line names."""
    from tag2box.formats.datasets import class_names
    from tag2box.formats.listing import DataSource

    return DataSource(path=path, photos=photos, split=split, classes=class_names(classes) if classes else None)
