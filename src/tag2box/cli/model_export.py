"""``tag2box export`` of a student run: an ONNX file with what is needed to run it, or a program of ``torch.export``."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

import typer

from tag2box import errors, hub, io, runs
from tag2box.cli import inputs, options
from tag2box.errors import printable
from tag2box.progress import Progress, silent
from tag2box.student.network import StudentDetector
from tag2box.student.onnx_export import Difference, write_int8, write_onnx, write_program
from tag2box.student.onnx_graph import ExportOutputs, InputCanvas, canvas_of, need_onnx

ModelFormat = Literal["onnx", "torch-export"]
MODEL_SUFFIXES: dict[str, str] = {"onnx": ".onnx", "torch-export": ".pt2"}
"""Formats of networks, and how their files are named."""
SCRIPT = "run_onnx.py"
"""The script beside an ONNX file that runs it without tag2box."""
_SHOWN_SCORE = 0.3  # from which X-AnyLabeling shows a box


@dataclass(frozen=True, slots=True)
class ExportedFiles:
    """The files that an export wrote, the network first, and how much it differs from torch."""

    files: tuple[Path, ...]
    difference: Difference


def export_model(
    run: Path | StudentDetector,
    out: Path,
    *,
    export: ModelFormat = "onnx",
    size: tuple[int, int] | None = None,
    is_dynamic: bool = False,
    outputs: ExportOutputs | None = None,
    calibrate: Sequence[Path] = (),
    progress: Progress = silent,
) -> ExportedFiles:
    """Write the network of a student run for other runtimes; returns the files and how much it differs from torch.

    Beside an ONNX file with ``detections``, a script that runs it is written (``run_onnx.py``); beside one of a fixed
    size with ``yolov8``, a configuration for X-AnyLabeling.

    Args:
        run: a student run, or a network with its classes.
        out: file to write; nothing may be there.
        size: height and width of the input; default: a square for photos as the student sees them.
        is_dynamic: the input has any size and number of photos.
        outputs: ``detections``, after NMS (the default of ONNX); ``raw`` boxes and scores of all cells (that of
            ``torch-export``, which has no NMS); or ``yolov8``, what readers of YOLOv8 files expect.
        calibrate: photos, or folders of them; if there are any, the network computes in eight bits (ONNX only).

    Example:
        tag2box.export_model(Path("runs/student"), Path("model.onnx"))
    """
    shown: ExportOutputs = outputs or ("raw" if export == "torch-export" else "detections")
    _check(out, export, shown, size, is_dynamic=is_dynamic, is_int8=bool(calibrate))
    student = run if isinstance(run, StudentDetector) else load_student(run)
    canvas = canvas_of(student, size=size, is_dynamic=is_dynamic)
    if export == "torch-export":
        return ExportedFiles((out,), write_program(student, out, canvas, shown))
    if calibrate:
        photos = inputs.find_photos(calibrate)
        difference = write_int8(student, out, canvas, photos, shown, progress=progress)
    else:
        difference = write_onnx(student, out, canvas, shown)
    return ExportedFiles((out, *_write_companions(student, out, canvas, shown)), difference)


def _check(
    out: Path, export: str, outputs: str, size: tuple[int, int] | None, *, is_dynamic: bool, is_int8: bool
) -> None:
    """Raise before anything is loaded, if it could not be written."""
    if export not in MODEL_SUFFIXES:
        raise errors.UserError(f"--format {printable(export)}: of a run, expected {' or '.join(MODEL_SUFFIXES)}")
    suffix = MODEL_SUFFIXES[export]
    if out.suffix != suffix:
        raise errors.UserError(f"{out}: expected a file that ends in {suffix}; rename it")
    if out.exists():
        raise errors.UserError(f"{out}: exists; remove it, or name another file")
    io.check_writable(out)
    if size is not None and is_dynamic:
        raise errors.UserError("--size fixes the input, --dynamic leaves it open; give one of them")
    if export == "torch-export":
        if outputs == "detections" or is_int8:
            raise errors.UserError(
                "--format torch-export: has neither NMS nor eight bits; leave out --outputs and --int8"
            )
        return
    need_onnx()


def load_student(run: Path) -> StudentDetector:
    """The network of a student run; other runs cannot be exported, because their proposals are made outside of it."""
    loaded = runs.open_run(run)
    if not isinstance(loaded, runs.StudentRun):
        raise errors.UserError(
            f"{run}: needs proposals, which no exported network can make; train a student with `tag2box student` on "
            "labels of this run, and export that"
        )
    return StudentDetector(loaded.detector, loaded.classes, loaded.config.inference)


def parse_size(text: str | None) -> tuple[int, int] | None:
    """Height and width that --size names: ``384``, or ``384x640``.

    >>> parse_size("384"), parse_size("384x640")
    ((384, 384), (384, 640))
    """
    if text is None:
        return None
    words = text.lower().split("x")
    if len(words) > 2 or not all(word.isascii() and word.isdecimal() and len(word) < 6 for word in words):
        raise errors.UserError(f"--size {printable(text)}: expected pixels such as 384, or height x width as 384x640")
    return int(words[0]), int(words[-1])


# ---------------------------------------------------------------- files beside an ONNX file


def _write_companions(student: StudentDetector, out: Path, canvas: InputCanvas, outputs: ExportOutputs) -> list[Path]:
    script, config = out.with_name(SCRIPT), out.with_suffix(".yaml")
    if outputs == "detections" and not script.exists():  # it serves all files of a folder, and may have been changed
        io.write_text(script, run_script())
        return [script]
    if outputs == "yolov8" and canvas.size is not None:
        io.write_text(config, xanylabeling_config(student, out.name))
        return [config]
    return []


def run_script() -> str:
    """A Python script that runs an ONNX file with ONNX Runtime and OpenCV alone."""
    return resources.files("tag2box.student").joinpath("templates/run_onnx.txt").read_text(encoding="utf-8")


def xanylabeling_config(student: StudentDetector, model: str) -> str:
    """The configuration of X-AnyLabeling for a model of type ``yolov8``, in YAML.

    Older versions of the program name both thresholds differently, so that each is there twice.
    """
    iou, score = student.inference.predict.nms_iou, _SHOWN_SCORE
    name = model.removesuffix(".onnx")
    lines = [
        "type: yolov8",
        f"name: {_quoted(name)}",
        "provider: tag2box",
        f"display_name: {_quoted(name)}",
        f"model_path: {_quoted(model)}",
        f"iou_threshold: {iou:g}",
        f"conf_threshold: {score:g}",
        f"nms_threshold: {iou:g}",
        f"confidence_threshold: {score:g}",
        "classes:",
        *(f"  - {_quoted(one)}" for one in student.classes),
    ]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """A text as YAML in double quotes, whose escapes are those of Python."""
    safe = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in safe) + '"'


# ---------------------------------------------------------------- the hub


def push_command(
    run: Annotated[Path, typer.Argument(help="Run folder, also of a student.")],
    repository: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="Repository on the Hugging Face Hub.")],
    upload: Annotated[
        bool, typer.Option("--upload", help="Upload the files; without it nothing leaves this machine.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="New folder to write the files to, to look at them.")] = None,
    public: Annotated[bool, typer.Option("--public", help="Make a new repository public; default: private.")] = False,
    licence: Annotated[str | None, typer.Option(help="Licence of the model, such as apache-2.0.")] = None,
    trust: Annotated[
        Path | None, typer.Option(help="trust.json of labels of this run: precision with intervals on the card.")
    ] = None,
) -> None:
    """Write the files of a run for the Hugging Face Hub with a model card, and upload them if --upload is given.

    Example: `tag2box push runs/mine owner/name --out upload`. In Python, `tag2box.load("owner/name")` loads it.
    """
    done = hub.push_to_hub(run, repository, upload=upload, out=out, private=not public, licence=licence, trust=trust)
    if out is not None:
        options.say(f"{len(done.names)} files: {done.folder}; read {hub.CARD} before you publish it")
    options.say(f"uploaded: {done.address}" if done.address else "nothing was uploaded; --upload does it")
