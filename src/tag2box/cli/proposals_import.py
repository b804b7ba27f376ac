"""``tag2box proposals import``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Optional

import typer

from tag2box.cli.options import Classes, DataPath, PhotosFolder, Split, data_source

EPILOG = "Example: `tag2box proposals import voc.mat VOC2007 --split trainval --out proposals`"


class ProposalFormat(StrEnum):
    """The formats by name, as ``proposals.readers.formats`` has them; repeated so that help answers at once."""

    selective_search = "selective-search"
    mcg = "mcg"
    edge_boxes = "edge-boxes"
    pkl = "pkl"
    npz = "npz"
    coco = "coco"
    json = "json"


class BoxesAre(StrEnum):
    """Orders of the four numbers of a box."""

    xyxy = "xyxy"
    yxyx = "yxyx"
    xywh = "xywh"


class FirstPixel(StrEnum):
    """The number of the first pixel."""

    zero = "0"
    one = "1"


class LastPixel(StrEnum):
    """Whether right and bottom are the last pixel inside or the first outside."""

    included = "included"
    excluded = "excluded"


def import_(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Proposals: .mat, .pkl, .npz or .json, or a folder of .mat files.")
    ],
    data: DataPath,
    out: Annotated[Path, typer.Option(help="Folder of the store to write; must be new.")],
    photos: PhotosFolder = None,
    split: Split = None,
    classes: Classes = None,
    form: Annotated[
        Optional[ProposalFormat],  # noqa: UP045 - typer reads it
        typer.Option("--format", help="Where it is not to be recognised by its suffix and content."),
    ] = None,
    boxes_are: Annotated[
        Optional[BoxesAre],  # noqa: UP045
        typer.Option(
            help="The four numbers of a box; default: yxyx for selective-search and mcg, xywh for edge-boxes "
            "and coco, else xyxy."
        ),
    ] = None,
    first_pixel: Annotated[
        Optional[FirstPixel],  # noqa: UP045
        typer.Option(help="Pixels are counted from here; default: 1 for .mat, else 0."),
    ] = None,
    last_pixel: Annotated[
        Optional[LastPixel],  # noqa: UP045
        typer.Option(help="Whether x2 and y2 belong to the box; default: included for .mat and .pkl, else excluded."),
    ] = None,
    min_side: Annotated[float, typer.Option(min=0, help="Leave out boxes with a shorter side, in pixels.")] = 0.0,
    max_boxes: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="Keep at most so many a photo, the best by score; default: all."),
    ] = None,
    allow_missing: Annotated[
        bool, typer.Option("--allow-missing", help="Photos that FILE does not have get no boxes.")
    ] = False,
) -> None:
    """Bring proposals made elsewhere into a store: ids are matched to the photos, boxes checked against their sizes."""
    from tag2box.commands import import_proposals as command
    from tag2box.progress import TerminalProgress
    from tag2box.proposals.importers.validate import Keep, Said

    imported = command.import_proposals(
        file,
        data_source(data, photos, split, classes),
        out,
        form=form.value if form else None,
        said=Said(
            boxes_are=boxes_are.value if boxes_are else None,
            first_pixel=(1 if first_pixel is FirstPixel.one else 0) if first_pixel else None,
            last_pixel=last_pixel.value if last_pixel else None,
        ),
        keep=Keep(min_side=min_side, max_boxes=max_boxes),
        allow_missing=allow_missing,
        progress=TerminalProgress(),
    )
    for line in imported.lines():
        typer.echo(line)
    typer.echo(f"store: {out}")
