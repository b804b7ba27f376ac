"""Arguments and options that several commands share, and the objects they stand for."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from tag2box import errors, extend
from tag2box.formats import datasets, listing
from tag2box.labels.labelled import LabelledPhotos
from tag2box.parallel.pool import Pool

# ---------------------------------------------------------------- output


class Terminal(Console):
    """A console that prints text of untrusted origin as it is: without markup, and as ``errors.printable`` shows it."""

    def __init__(self) -> None:
        super().__init__(markup=False, emoji=False)

    def render_str(self, text: str, **options: Any) -> Text:
        """The text of a cell, a heading or a line."""
        return super().render_str(errors.printable(text, errors.LONGEST_LINE), **options)


def print_rich(renderable: RenderableType) -> None:
    """Print a table on standard output."""
    Terminal().print(renderable)


def say(line: str, *, err: bool = False) -> None:
    """Print a line, which may have names of photos, classes or files in it, as ``errors.printable`` shows it."""
    typer.echo(errors.printable(line, errors.LONGEST_LINE), err=err)


def counts_table(content: LabelledPhotos) -> Table:
    """A table of what a label set has of each class, and of how sure it is: the mean score of the best boxes."""
    table, scores = Table(box=None, pad_edge=False), content.best_scores()
    for title in ("class", "photos", "boxes", "doubtful", "tags without box", "score"):
        table.add_column(title, justify="left" if title == "class" else "right")
    for name, own in content.counts().items():
        counted = map(str, (own.photos, own.boxes, own.doubtful, own.unboxed))
        table.add_row(name, *counted, score_text(scores[name]))
    return table


def score_text(score: float | None) -> str:
    """A mean score for a table."""
    return "-" if score is None else f"{score:.2f}"


# ---------------------------------------------------------------- a dataset

DataArgument = Annotated[
    Path,
    typer.Argument(
        metavar="DATA", help="CSV of tags, COCO JSON, VOC or YOLO folder, tree of class folders, or a folder of photos."
    ),
]
PhotosOption = Annotated[Path | None, typer.Option("--photos", help="Folder of the photos, if DATA does not name it.")]
SplitOption = Annotated[
    str | None,
    typer.Option("--split", help="A named split, such as an image list of a VOC folder, or a text file of ids."),
]
ClassesOption = Annotated[
    str | None,
    typer.Option("--classes", help="Comma-separated names, or a text file with one per line; default: all in DATA."),
]
SetOption = Annotated[
    list[str], typer.Option("--set", metavar="a.b=c", help="Override a setting, e.g. plan.iterations=500; repeatable.")
]


DataFormatOption = Annotated[
    str | None,
    typer.Option(
        "--data-format",
        metavar="NAME",
        help=f"{', '.join(extend.DATASET_FORMATS)}, or `package.module:Name` of your own; default: recognised.",
    ),
]


def data_source(
    path: Path, photos: Path | None, split: str | None, classes: str | None, form: str | None = None
) -> listing.DataSource:
    """The dataset that the options of a command name."""
    names = datasets.class_names(classes) if classes else None
    return listing.DataSource(path=path, photos=photos, split=split, classes=names, format=form)


# ---------------------------------------------------------------- where photos are processed

OnOption = Annotated[
    Literal["here", "ray"],
    typer.Option("--on", help="This machine, or a Ray cluster whose nodes all see the photos under the same path."),
]
AddressOption = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="HOST:PORT",
        help="Ray cluster; default: RAY_ADDRESS, else a local one is started and stopped at the end.",
    ),
]


def pool_of(on: str, address: str | None, *, workers: int | None = None, chunk: int) -> Pool | None:
    """The Ray cluster that --on and --address name, for tasks of ``chunk`` photos; None is this machine."""
    if on == "here":
        if address is not None:
            raise errors.UserError(f"--address {address}: belongs to --on ray; add it, or leave the address out")
        return None
    from tag2box.parallel.ray_data import RayPool, check_ray  # Ray is optional

    check_ray(address)
    return RayPool(address, workers, chunk)


# ---------------------------------------------------------------- scores


def check_score(score: float, least: float = 0.0, most: float = 1.0) -> None:
    """Raise unless --min-score is within these limits: NaN would silently drop every detection."""
    if not least <= score <= most:
        raise errors.UserError(f"--min-score {score:g}: expected a number from {least:g} to {most:g}, such as 0.3")


TrackOption = Annotated[
    list[str],
    typer.Option("--track", metavar="TRACKER", help="Pass events to tensorboard, mlflow or wandb; repeatable."),
]


# ---------------------------------------------------------------- the data of a study

TestOption = Annotated[
    Path | None,
    typer.Option("--test", metavar="DATA", help="Dataset to evaluate on, if it is not a split of the same one."),
]
TestPhotosOption = Annotated[Path | None, typer.Option("--test-photos", help="Folder of its photos.")]
TestSplitOption = Annotated[str | None, typer.Option("--test-split", help="Image list to evaluate on.")]
ProposalsOption = Annotated[
    Path | None,
    typer.Option("--proposals", metavar="STORE", help="Imported proposals of the training photos, e.g. MCG."),
]
TestProposalsOption = Annotated[
    Path | None,
    typer.Option("--test-proposals", metavar="STORE", help="Imported proposals of the test photos."),
]
RecipeOption = Annotated[
    str | None,
    typer.Option("--recipe", help="Base settings; default: scenes for generated scenes, else photos-frozen."),
]


def seed_list(text: str | None) -> tuple[int, ...]:
    """The seeds of --seeds; empty for the default of the study."""
    words = (text or "").replace(",", " ").split()
    if not all(word.isdecimal() for word in words):
        raise errors.UserError(f"--seeds {text}: expected whole numbers separated by commas, such as 0,1,2")
    return tuple(int(word) for word in words)
