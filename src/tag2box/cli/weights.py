"""``tag2box weights``: list pretrained weights, fetch them, or convert a weight file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich import table, text

from tag2box import io
from tag2box.cli import options
from tag2box.errors import UserError, printable
from tag2box.models.weights import convert, state_dict, weight_cache, zoo
from tag2box.progress import TerminalProgress

_NO_LICENCE = "not stated in the file; see its publisher"


@dataclass(frozen=True, slots=True)
class WeightsRow:
    """One line of ``tag2box weights list``."""

    name: str
    architecture: str
    holds: str
    licence: str
    size: str
    comes: str
    here: str  # "verified", "in the package", "not here" or "refused"
    problem: str = ""  # why it was refused, in one line


def list_weights() -> list[WeightsRow]:
    """The zoo, then other stored weights; every stored file is verified."""
    others = [name for name in weight_cache.stored_names() if name not in zoo.ZOO]
    return [_row(name) for name in (*zoo.ZOO, *others)]


def _row(name: str) -> WeightsRow:
    path, entry = weight_cache.weights_folder() / f"{name}.safetensors", zoo.ZOO.get(name)
    size = f"{path.stat().st_size / 2**20:.0f} MB" if path.exists() else f"{entry.megabytes if entry else 0} MB"
    provenance, here, problem = None, "not here", ""
    try:
        if path.exists():
            provenance, here = weight_cache.verify(path), "verified"
        elif name == "lite0" and _has_lite0_package():
            zoo.intact_lite0_file()
            here = "in the package"
    except UserError as error:
        here, problem = "refused", str(error)
    if entry is not None:
        licence = provenance.licence if provenance else entry.licence
        return WeightsRow(name, entry.architecture, entry.holds, licence, size, entry.source, here, problem)
    if provenance is not None:
        return WeightsRow(name, provenance.architecture, "", provenance.licence, size, provenance.source, here)
    return WeightsRow(name, "unknown", "", "unknown", size, "unknown", here, problem)


def _has_lite0_package() -> bool:
    try:
        return zoo.lite0_file().is_file()
    except UserError:
        return False


def weights_table(rows: list[WeightsRow]) -> table.Table:
    """The rows as a table for a terminal."""
    sheet = table.Table(
        "name", "architecture", "holds", "licence", "size", "from", "here", show_edge=False, pad_edge=False
    )
    for column in (0, 1, 4, 6):
        sheet.columns[column].no_wrap = True
    styles = {"refused": "bold red", "not here": "dim"}
    for row in rows:
        cells = (row.name, row.architecture, row.holds, row.licence, row.size, row.comes)
        words = (text.Text(printable(cell), overflow="fold") for cell in cells)
        sheet.add_row(*words, text.Text(row.here, styles.get(row.here, "green")))
    return sheet


def list_command() -> None:
    """List known weights, their source, and whether they verify.

    Example: `tag2box weights list`
    """
    rows = list_weights()
    options.print_rich(weights_table(rows))
    options.say(f"stored in {weight_cache.weights_folder()}")
    problems = [row.problem for row in rows if row.problem]
    for problem in problems:
        options.say(f"tag2box: {problem}", err=True)
    raise typer.Exit(int(bool(problems)))


def get_command(
    name: Annotated[str, typer.Argument(help="A name of `tag2box weights list`.")],
    file: Annotated[
        Path | None, typer.Option(help="The original file, if you have it already; its checksum is verified.")
    ] = None,
) -> None:
    """Store weights for later use: from a pip package or a file; a published URL is tried last.

    Example: `tag2box weights get vgg16-conv`
    """
    got = zoo.get_weights(name, file=file, progress=TerminalProgress())
    options.say(f"{name}: {'stored' if got.fresh else 'here already, verified'} ({got.provenance.source})")


@dataclass(frozen=True, slots=True)
class ConvertedWeights:
    """A stored weight file, and how it was recognised."""

    provenance: weight_cache.Provenance
    path: Path
    notes: tuple[str, ...]


def convert_file(
    file: Path, *, architecture: str | None = None, preprocess: str | None = None, name: str | None = None
) -> ConvertedWeights:
    """Recognise, check and store a weight file; ``name`` defaults to its architecture."""
    io.check_writable(weight_cache.weights_folder(), is_folder=True)
    if name is not None:
        weight_cache.stored_path(name)  # before the work: it may be no name for a file
    raw = state_dict.read_weight_file(file)
    conversion = convert.convert_weights(raw, convert.ConvertOptions(architecture=architecture, preprocess=preprocess))
    weights, known = conversion.weights, convert.known_file(raw.sha256)
    of_caffe = weights.architecture.startswith("vgg16") and weights.preprocess == state_dict.PREPROCESS["caffe"]
    chosen = name or (f"{weights.architecture}-caffe" if of_caffe else weights.architecture)
    source = f"{known.title if known else 'your file'} ({file.name})"
    origin = weight_cache.Origin(source, known.licence if known else _NO_LICENCE, raw.sha256)
    return ConvertedWeights(
        weight_cache.store(chosen, weights, origin), weight_cache.stored_path(chosen), conversion.notes
    )


def convert_command(
    file: Annotated[Path, typer.Argument(help="State dict (.pth, .safetensors), or Caffe2/Detectron pickle (.pkl).")],
    architecture: Annotated[
        str | None,
        typer.Option("--as", help="vgg16, vgg16-conv, r50-ws, r101-ws, lite0 or mobile-sam; default: recognised."),
    ] = None,
    preprocess: Annotated[
        str | None, typer.Option(help="torchvision or caffe: the pixels it was trained on, if the file does not say.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name to store it under; default: its architecture.")] = None,
) -> None:
    """Recognise and check a weight file, and store it with its preprocessing, provenance and checksum.

    Example: `tag2box weights convert VGG_ILSVRC_16_layers.pkl --name vgg16-caffe`
    """
    done = convert_file(file, architecture=architecture, preprocess=preprocess, name=name)
    for note in done.notes:
        options.say(note)
    options.say(f"stored: {done.path}")
    architecture = done.provenance.architecture
    depth = f" --set backbone.depth={architecture[1:-3]}" if architecture.endswith("-ws") else ""
    kind = "resnet_ws" if depth else architecture.removesuffix("-conv")
    if kind not in {"lite0", "mobile-sam"}:
        typer.echo(f"use it with `--set backbone.kind={kind}{depth} --set backbone.weights={done.provenance.name}`")
