"""The command line: its commands and options, help without heavy imports, warnings, and what options become."""

from __future__ import annotations

import errno
import importlib
import inspect
import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import click
import pytest
import typer

import tag2box.cli as cli
from tag2box.errors import Interrupted, Terminated, UserError
from tag2box.recipes import RECIPES
from tiny_world import call

SURFACE = {
    "demo": ["--out", "--seed", "--small", "--keep-maps", "--no-keep-maps", "--set"],
    "train": ["--out", "data", "--photos", "--split", "--classes", "--data-format", "--proposals", "--boxes",
              "--warm-start", "--config", "--recipe", "--system", "--resume", "--tags", "--track", "--set", "--seeds",
              "--workers", "--on", "--address"],
    "push": ["run", "repository", "--upload", "--out", "--public", "--licence", "--trust"],
    "track": ["run", "--to", "--where"],
    "student": ["--out", "labels", "--photos", "--config", "--resume", "--track", "--set"],
    "detect": ["run", "photos", "--out", "--split", "--every", "--proposals", "--draw", "--voc", "--format",
               "--min-score", "--trust", "--set", "--skip-bad", "--on", "--address"],
    "label": ["run", "photos", "--out", "--photos", "--split", "--classes", "--data-format", "--rule",
              "--boxes-of-other-classes", "--proposals", "--reviewed", "--trust", "--snap", "--set", "--skip-bad",
              "--on", "--address"],
    "merge": ["labels", "--out", "--photos"],
    "review": ["labels", "--photos", "--port", "--reviewer", "--order", "--seed", "--browser", "--no-browser"],
    "export": [
        "source", "--format", "--out", "--photos", "--splits", "--copy", "--only-reviewed", "--size", "--dynamic",
        "--outputs", "--int8", "--calibrate",
    ],
    "convert": ["source", "out", "--to", "--photos", "--split", "--classes", "--data-format", "--splits", "--copy",
                "--skip-bad"],
    "trust": ["labels", "--reviewed", "--photos", "--split", "--data-format", "--precision", "--out", "--set"],
    "evaluate": ["--truth", "--detections", "--metrics", "--split", "--classes", "--min-score", "--json",
                 "--baselines", "--no-baselines", "--iou", "--against", "--resamples"],
    "report": ["runs", "--out", "--title", "--test-photos", "--test-truth", "--train-truth", "--split",
               "--train-split", "--photos"],
    "doctor": ["paths"],
    "propose": ["data", "--out", "--photos", "--split", "--classes", "--data-format", "--method", "--mode",
                "--short-side", "--max-boxes", "--min-side", "--edge-model", "--snap", "--proposals", "--snap-top",
                "--format", "--workers", "--set", "--on", "--address"],
    "proposals import": ["file", "data", "--out", "--photos", "--split", "--classes", "--data-format", "--format",
                         "--boxes-are", "--first-pixel", "--last-pixel", "--min-side", "--max-boxes",
                         "--allow-missing"],
    "proposals recall": ["data", "stores", "--photos", "--split", "--classes", "--data-format", "--out", "--json"],
    "data check": ["path", "--photos", "--split", "--classes", "--data-format", "--json"],
    "data stats": ["data", "--photos", "--split", "--classes", "--data-format", "--out", "--json"],
    "recipes": ["name"],
    "reproduce": [
        "name", "--on", "--row", "--seeds", "--out", "--photos", "--split", "--classes", "--test", "--test-photos",
        "--test-split", "--proposals", "--test-proposals", "--recipe", "--set", "--list",
    ],
    "compare": [
        "--systems", "--on", "--seeds", "--out", "--photos", "--split", "--classes", "--test", "--test-photos",
        "--test-split", "--proposals", "--test-proposals", "--recipe", "--backbone", "--set",
        "--students",
    ],
    "systems": ["name", "--recipe"],
    "weights list": [],
    "weights get": ["name", "--file"],
    "weights convert": ["file", "--as", "--preprocess", "--name"],
}  # fmt: skip
"""Every command with its arguments and options, in order; changing this list changes the public interface."""
HIDDEN = {"--tags"}  # accepted, not in the help


def names(parameter) -> list[str]:
    if parameter.param_type_name == "argument":
        return [parameter.name]
    return [*parameter.opts, *parameter.secondary_opts]


def test_commands_and_options_are_pinned():
    found = {" ".join(path): [n for p in command.params for n in names(p)] for path, command in commands(cli.app)}
    assert found == SURFACE


def commands(app: typer.Typer) -> Iterator[tuple[list[str], click.Command]]:
    """Every command with the words that call it, also those of groups."""
    left = [([], typer.main.get_command(app))]
    while left:
        path, command = left.pop()
        inner = getattr(command, "commands", None)
        if inner is None:
            yield path, command
        else:
            left += [([*path, name], below) for name, below in inner.items()]


@pytest.fixture(scope="module")
def helps() -> tuple[dict[str, str], set[str]]:
    """The help of the program, its groups and commands; and the modules imported for program and groups."""
    script = """
import json, sys
from typer.testing import CliRunner
from tag2box.cli import COMMAND_GROUPS, app
def help(name):
    return CliRunner().invoke(app, [*name.split(), "--help"], prog_name="tag2box").output
groups = {name: help(name) for name in ("", *COMMAND_GROUPS)}
modules = sorted(sys.modules)
print(json.dumps([groups | {name: help(name) for name in sys.argv[1:]}, modules]))
"""
    done = subprocess.run([sys.executable, "-c", script, *SURFACE], capture_output=True, text=True, check=True)
    texts, modules = json.loads(done.stdout)
    return texts, set(modules)


def test_help_of_program_and_groups_imports_no_command_and_nothing_heavy(helps):
    heavy = {"torch", "numpy", "cv2", "PIL", "safetensors", "jinja2", "jaxtyping"}
    assert not helps[1] & heavy
    assert {name for name in helps[1] if name.startswith("tag2box.")} == {"tag2box.cli", "tag2box.errors"}


def test_version_needs_no_command_either():
    script = "import sys; sys.argv[1:] = ['--version']; from tag2box.cli import app\ntry: app()\n"
    script += "finally: assert not {'torch', 'numpy'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == f"tag2box {metadata.version('tag2box')}\n"


@pytest.mark.parametrize("words", cli.COMMANDS)
def test_the_short_help_of_a_command_is_the_first_line_of_its_docstring(words):
    path, text = cli.COMMANDS[words]
    module, _, name = path.partition(":")
    assert inspect.getdoc(getattr(importlib.import_module(module), name)).splitlines()[0] == text


def test_the_shell_can_complete_commands_and_options(monkeypatch, capsys):
    for words, expected in (
        ("tag2box pro", "propose"),
        ("tag2box data ", "check"),
        ("tag2box detect --fo", "--format"),
    ):
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(len(words.split(" ")) - 1))
        monkeypatch.setenv("_TAG2BOX_COMPLETE", "complete_bash")
        monkeypatch.setattr(sys, "argv", ["tag2box"])
        with pytest.raises(SystemExit):
            cli.app(prog_name="tag2box")
        assert expected in capsys.readouterr().out.split()


@pytest.mark.parametrize("command", SURFACE)
def test_every_command_explains_itself_with_an_example(helps, command):
    text = helps[0][command]
    assert f"Usage: tag2box {command}" in text
    assert f"tag2box {command}" in text.partition("Example:")[2]
    shown = [option for option in SURFACE[command] if option.startswith("--") and option not in HIDDEN]
    assert all(option in text for option in shown if len(option) < 12)


def test_the_first_help_lists_the_commands(helps):
    assert all(name.split()[0] in helps[0][""] for name in SURFACE)
    assert all(name.split()[1] in helps[0][name.split()[0]] for name in SURFACE if " " in name)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("tag2box de", {"demo", "detect"}),
        ("tag2box data ", {"check", "stats"}),
        ("tag2box detect --min", {"--min-score"}),
    ],
)
def test_shells_complete_commands_and_options(words, expected):
    """As the script of ``tag2box --install-completion bash`` asks for them."""
    typed = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" ")), "_TAG2BOX_COMPLETE": "complete_bash"}
    script = "import sys; sys.argv = ['tag2box']; from tag2box.cli import app; app(prog_name='tag2box')"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, env={**os.environ, **typed}
    )
    assert set(done.stdout.split()) == expected, done.stderr


# ---------------------------------------------------------------- how commands end


class SafetensorError(Exception):
    """As the package safetensors has it; it is known by its name, because that package is not imported for help."""


def os_error(number: int, *names: str) -> OSError:
    return OSError(number, os.strerror(number), *(names[:1] + (None,) * (len(names) > 1) + names[1:]))


def saved_after(error: KeyboardInterrupt) -> Interrupted:
    """What a command raises that saves its work when it is stopped."""
    try:
        try:
            raise error
        except KeyboardInterrupt:
            raise Interrupted("run: saved; go on with --resume") from None
    except Interrupted as saved:
        return saved


def failing(error: BaseException) -> typer.Typer:
    """A program with a single command, which fails; like ours in all else."""
    app = typer.Typer(cls=cli._LazyGroup, pretty_exceptions_enable=False)

    @app.command("fail")
    def fail() -> None:
        raise error

    @app.callback()
    def root() -> None:
        pass

    return app


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UserError(""), 2, ""),
        (UserError("photo.jpg: broken; mend it"), 2, "photo.jpg: broken; mend it"),
        (UserError("a\x1b[31m\nb\u202e"), 2, "a\\x1b[31m b\\u202e"),
        (Interrupted("run: saved; go on with --resume"), 130, "run: saved; go on with --resume"),
        (KeyboardInterrupt(), 130, "stopped"),
        (Terminated(), 143, "stopped"),
        (saved_after(KeyboardInterrupt()), 130, "run: saved; go on with --resume"),
        (saved_after(Terminated()), 143, "run: saved; go on with --resume"),
        (os_error(errno.ENOSPC), 2, "No space left on device; free some disk space, or"),
        (os_error(errno.EACCES, "run/a"), 2, "run/a: Permission denied; choose another folder, or"),
        (os_error(errno.EXDEV, "a", "b"), 2, "a -> b: Invalid cross-device link; correct this, and repeat the command"),
        (os_error(errno.EMFILE, "a"), 2, "a: Too many open files; close other programs, or"),
        (os_error(errno.ENAMETOOLONG, "a\x07"), 2, "a\\x07: File name too long; choose a shorter name"),
        (TimeoutError("no answer"), 2, "no answer; correct this, and repeat the command"),
        (MemoryError(), 2, "not enough memory (MemoryError); close other programs, or"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried"), 2,
         "not enough memory ([enforce fail"),
        (RuntimeError("CUDA out of memory. Tried to allocate 9 GiB"), 2, "not enough memory (CUDA"),
        (SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"), 2,
         "a file of weights could not be read or written (Error while serializing: I/O error: No space left on device "
         "(os error 28)); free some disk space"),
        (SafetensorError("Error while deserializing header: HeaderTooLarge"), 2, "HeaderTooLarge); the file"),
        (RecursionError("maximum recursion depth exceeded"), 2, "input nested too deeply (maximum recursion"),
        (ZeroDivisionError("division by zero"), 3, "ZeroDivisionError: division by zero; internal error"),
        (EOFError("Ran out of input"), 3, "RuntimeError: EOFError: Ran out of input; internal error"),
    ],
    ids=lambda value: f"{type(value).__name__}" if isinstance(value, BaseException) else None,
)  # fmt: skip
def test_errors_become_a_line_and_an_exit_code(error, code, said, monkeypatch, capsys):
    monkeypatch.setattr(cli, "app", failing(error))
    done = call(["fail"], monkeypatch, capsys)
    assert done.code == code
    assert done.err.count("\n") == 1 and done.err.startswith("tag2box: ") and said in done.err


@pytest.mark.parametrize("raised", [True, False])
def test_ctrl_c_before_the_command_begins_is_one_line(raised, monkeypatch, capsys):
    def parse(**_: object) -> int:
        if raised:
            raise KeyboardInterrupt
        return 130  # as typer reports it

    monkeypatch.setattr(cli, "app", parse)
    done = call([], monkeypatch, capsys)
    assert (done.code, done.err) == (130, "tag2box: stopped\n")


def test_a_bug_shows_its_traceback_on_request(monkeypatch, capsys):
    monkeypatch.setattr(cli, "app", failing(ZeroDivisionError("division by zero")))
    monkeypatch.setenv(cli.TRACEBACK_VARIABLE, "1")
    done = call(["fail"], monkeypatch, capsys)
    assert done.code == 3
    assert "Traceback" in done.err and "in fail" in done.err


def test_a_reader_that_closes_the_pipe_is_no_error(monkeypatch, capsys):
    monkeypatch.setattr(cli, "app", failing(BrokenPipeError(errno.EPIPE, "Broken pipe")))
    done = call(["fail"], monkeypatch, capsys)
    assert (done.code, done.err) == (1, "")


def test_a_warning_is_one_line(monkeypatch, capsys):
    def warn(**_: object) -> None:
        warnings.warn("maps is now called\nfeature_cache", FutureWarning, 1)

    monkeypatch.setattr(cli, "app", warn)
    done = call([], monkeypatch, capsys)
    assert (done.code, done.err) == (0, "tag2box: warning: maps is now called feature_cache\n")


def test_control_characters_of_an_option_do_not_reach_the_terminal(monkeypatch, capsys):
    for argv in (["x\x1b[31m"], ["train", "--x\x1b[31m"], ["demo", "--seed", "\x1b[31m"], ["systems", "a", "\x1b[31m"]):
        done = call(argv, monkeypatch, capsys)
        assert done.code == 2 and "\x1b" not in done.err + done.out and "Usage:" in done.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_command_with_one_line(number, monkeypatch, capsys):
    """Batch systems send SIGTERM; it must do what Ctrl-C does, with its own code, and be as before afterwards."""
    app = typer.Typer(cls=cli._LazyGroup)
    cleaned = []

    @app.command("fail")
    def wait() -> None:
        try:
            signal.raise_signal(number)
        finally:
            cleaned.append(True)

    @app.callback()
    def root() -> None:
        pass

    monkeypatch.setattr(cli, "app", app)
    before = signal.getsignal(signal.SIGTERM)
    done = call(["fail"], monkeypatch, capsys)
    assert (done.code, done.err, cleaned) == (128 + number, "tag2box: stopped\n", [True])
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("module", ["typer", "torch"])
@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
def test_a_signal_during_the_imports_ends_with_one_line(module, number, tmp_path):
    """The import itself sends the signal, so that it always comes at that moment."""
    if (module, number) == ("typer", "SIGTERM"):
        pytest.skip("before the program is imported, SIGTERM has its usual effect")
    kill = f"import os, signal\nos.kill(os.getpid(), signal.{number})\nraise ImportError('still here')\n"
    (tmp_path / f"{module}.py").write_text(kill)
    command = [sys.executable, "-m", "tag2box", "train", "--out", "run"]
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    code = 128 + getattr(signal, number)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "tag2box: stopped\n")


@pytest.mark.parametrize(
    "argv",
    [["train"], ["detect", "run"], ["evaluate"], ["unheard-of"], ["demo", "--seed", "-1"], ["train", "--ot", "x"]],
)
def test_wrong_usage_is_exit_code_2(argv, monkeypatch, capsys):
    done = call(argv, monkeypatch, capsys)
    assert done.code == 2
    assert "Usage:" in done.err
    assert "Traceback" not in done.err


# ---------------------------------------------------------------- what options become


@pytest.fixture
def asked(monkeypatch) -> list[tuple[tuple, dict]]:
    """Calls that would have reached ``train``."""
    calls: list[tuple[tuple, dict]] = []
    monkeypatch.setattr("tag2box.cli.train.train", lambda *args, **more: calls.append((args, more)))
    return calls


def test_train_starts_from_the_recipe_for_photos(asked, monkeypatch, capsys):
    assert call(["train", "--out", "run"], monkeypatch, capsys).code == 0
    assert asked[0][0] == (RECIPES["photos"](), Path("run"))


def test_train_takes_a_dataset_and_its_part(asked, monkeypatch, capsys):
    argv = ["train", "VOC", "--split", "trainval", "--classes", "cat, dog", "--proposals", "store", "--out", "run"]
    assert call(argv, monkeypatch, capsys).code == 0
    data = asked[0][0][0].data
    assert (data.tags, data.split, data.classes) == (Path("VOC"), "trainval", ("cat", "dog"))
    assert (data.proposals, data.photos) == (Path("store"), None)


def test_later_files_win_over_earlier_ones_and_options_over_all(asked, tmp_path, monkeypatch, capsys):
    (tmp_path / "a.toml").write_text('name = "a"\n[plan]\niterations = 1\nseed = 1\n[data]\ntags = "a.csv"\n')
    (tmp_path / "b.toml").write_text("[plan]\niterations = 2\nlog_every = 2\n")
    files = ["--config", f"{tmp_path / 'a.toml'}", "--config", f"{tmp_path / 'b.toml'}"]
    argv = ["train", "--out", "run", *files, "--set", "plan.log_every=3", "--tags", "mine.csv"]
    assert call([*argv, "--recipe", "oicr-plus"], monkeypatch, capsys).code == 0
    config = asked[0][0][0]
    assert (config.name, config.plan.iterations, config.plan.seed, config.plan.log_every) == ("a", 2, 1, 3)
    assert config.data.tags == Path("mine.csv")
    assert config.criterion == RECIPES["oicr-plus"]().criterion


def test_evaluate_reads_lists(monkeypatch, capsys):
    seen = {}

    def evaluate(truth, detections, **more):
        seen.update(more, truth=truth)
        raise UserError("enough")

    monkeypatch.setattr("tag2box.cli.evaluate.evaluate", evaluate)
    argv = ["evaluate", "--truth", "VOC", "--detections", "d", "--metrics", "voc07, coco,", "--classes", "cat, dog"]
    assert call(argv, monkeypatch, capsys).code == 2
    assert (seen["metrics"], seen["classes"], seen["split"]) == (["voc07", "coco"], ("cat", "dog"), "test")


def test_doctor_prints_a_table_and_a_verdict(monkeypatch, capsys):
    done = call(["doctor"], monkeypatch, capsys)
    assert done.code == 0
    assert all(word in done.out for word in ("torch", "OpenCV", "lite0 weights"))
