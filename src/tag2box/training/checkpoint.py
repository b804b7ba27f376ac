"""Checkpoints: a folder of tensors with a manifest each, and a small state file that names the current one.

A new checkpoint is complete, on disk and verified before the state file names it, and only then are older ones removed.
Each folder has a copy of its state: if the newest is damaged and removed, training continues from the one before it.
"""

import json
import math
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from torch.optim import Optimizer

from tag2box import errors, io, storage
from tag2box.models.detector import Detector
from tag2box.models.weights.state_dict import load_into
from tag2box.training.optim import AdversaryOptimizer

STATE = "state.json"
STATE_FORMAT = 2
"""Version 0.1 wrote no format number, no digests and no manifests; its checkpoints are read unverified."""
MODEL = "model.safetensors"
OPTIMIZER = "optimiser.safetensors"
ADVERSARY = "mask_net.safetensors"
ADVERSARY_OPTIMIZER = "mask_net_optimiser.safetensors"
KEEP = 2
"""Checkpoints that are kept, unless ``plan.keep_checkpoints`` says otherwise."""

_FOLDER = re.compile(r"checkpoint-(\d{6,12})(-1)?")
_REMEDY = "restore it from a copy"
_START_OVER = "or remove the run folder and train again"

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class State:
    """Content of ``state.json``."""

    iteration: int  # iterations done
    folder: str  # of the tensors, inside the run
    classes: tuple[str, ...]
    preprocess: dict[str, object]  # of the backbone, for programs that read the weights without tag2box
    seconds: float  # of training so far
    manifest: str | None = None  # digest of the folder's manifest; None in a folder's own copy


# ---------------------------------------------------------------- state


def has_checkpoint(run: Path) -> bool:
    """Whether a run has a checkpoint to resume from or to detect with."""
    return (run / STATE).exists() or _newest_intact(run) is not None


def read_state(run: Path) -> State:
    """The verified state of a run: that in ``state.json``, or of the newest intact checkpoint if that one is gone."""
    path = run / STATE
    with _way_back(run, path):
        state = _read(path) if path.exists() else None
    if state is not None and (run / state.folder).is_dir():
        with _way_back(run, run / state.folder):
            _verify_small_files(run / state.folder, state)
        return state
    found = _newest_intact(run)
    if found is not None:
        if state is not None:
            warnings.warn(f"{run}: {state.folder}, the last checkpoint, is gone; {found.folder} is used", stacklevel=2)
        return found
    if state is None:
        raise errors.UserError(f"{path}: no such file; expected the state file of a tag2box run")
    raise errors.UserError(f"{run / state.folder}: missing, though {STATE} names it; {_REMEDY}; {_START_OVER}")


def _read(path: Path) -> State:
    raw = storage.read_checked_json(path, "the state file of a tag2box run", _REMEDY, since=STATE_FORMAT)
    try:
        state = State(
            iteration=int(raw["iteration"]),
            folder=str(raw["folder"]),
            classes=tuple(str(c) for c in raw["classes"]),
            preprocess=dict(raw["preprocess"]),
            seconds=float(raw["seconds"]),
            manifest=str(raw["manifest"]) if "manifest" in raw else None,
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise errors.UserError(f"{path}: field {error} is missing or of the wrong type; {_REMEDY}") from None
    if state.iteration < 0 or not math.isfinite(state.seconds) or not _FOLDER.fullmatch(state.folder):
        raise errors.UserError(f"{path}: field iteration, seconds or folder has no valid value; {_REMEDY}")
    return state


def _verify_small_files(folder: Path, state: State) -> None:
    """Verify the manifest of a checkpoint and its copy of the state; tensors are verified when they are loaded."""
    if state.manifest is None:
        return
    if storage.file_digest(folder / storage.MANIFEST) != state.manifest:
        raise errors.UserError(f"{folder / storage.MANIFEST}: damaged, {STATE} has another SHA-256 of it; {_REMEDY}")
    storage.verify_file(folder / STATE, _REMEDY)


def _folders(run: Path) -> list[Path]:
    """Folders of checkpoints, the newest first."""
    found = [(int(match[1]), path.name) for path in run.glob("checkpoint-*") if (match := _FOLDER.fullmatch(path.name))]
    return [run / name for _, name in sorted(found, reverse=True)]


def _newest_intact(run: Path, but: str = "") -> State | None:
    """The state of the newest checkpoint of which every file is intact, other than that in the folder ``but``."""
    for folder in _folders(run):
        try:
            if folder.name != but:
                storage.verify_folder(folder, _REMEDY)
                return replace(_read(folder / STATE), folder=folder.name)
        except errors.UserError:
            continue
    return None


@contextmanager
def _way_back(run: Path, damaged: Path) -> Iterator[None]:
    """Add to an error about a damaged file or folder how to go on: with another checkpoint, if one is intact."""
    try:
        yield
    except errors.UserError as error:
        other = _newest_intact(run, but=damaged.name)
        advice = _START_OVER if other is None else f"or remove {damaged}: then {other.folder}, which is intact, is used"
        raise errors.UserError(f"{error}; {advice}") from None


# ---------------------------------------------------------------- saving


def save(
    run: Path,
    detector: Detector,
    optimizer: Optimizer,
    *,
    iteration: int,
    classes: tuple[str, ...],
    seconds: float,
    adversary: AdversaryOptimizer | None = None,
    keep: int = KEEP,
) -> None:
    """Write tensors into a new folder, verify it, point the state file to it; only then remove all but ``keep``.

    Raises if a number is not finite, or if the disk is full: the last checkpoint then stays as it is.
    """
    files = {MODEL: contiguous(detector.state_dict()), OPTIMIZER: optimizer_tensors(optimizer)}
    if adversary is not None:
        files[ADVERSARY] = contiguous(adversary.net.state_dict())
        files[ADVERSARY_OPTIMIZER] = optimizer_tensors(adversary.optimizer)
    preprocess = asdict(detector.backbone.preprocess)
    save_files(run, files, iteration=iteration, classes=classes, preprocess=preprocess, seconds=seconds, keep=keep)


def save_files(
    run: Path,
    files: Mapping[str, dict[str, torch.Tensor]],
    *,
    iteration: int,
    classes: tuple[str, ...],
    preprocess: dict[str, object],
    seconds: float,
    keep: int = KEEP,
) -> None:
    """``save`` for tensors by file name, of which ``MODEL`` is the network that detects."""
    _check_finite(run, files, iteration)
    folder = _new_folder(run, iteration)
    state = State(iteration, folder.name, classes, preprocess, seconds)
    with _writing(folder):
        with io.replacing_folder(folder) as temporary:
            for name, tensors in files.items():
                about = {"classes": json.dumps(list(classes))} if name == MODEL else None
                save_file(tensors, temporary / name, metadata=about)
            storage.write_checked_json(temporary / STATE, _to_json(state))
            manifest = storage.write_manifest(temporary)
        storage.verify_folder(folder, "the disk or the memory of this machine is faulty")
        storage.write_checked_json(run / STATE, _to_json(replace(state, manifest=manifest)))
    _remove_old(run, folder, iteration, keep)


def last_checkpoint(run: Path) -> str:
    """The last checkpoint of a run in words, for messages."""
    folders = _folders(run) if (run / STATE).exists() else []
    return f"the last good checkpoint is {folders[0].name}" if folders else "no checkpoint was saved before"


def _to_json(state: State) -> dict[str, object]:
    fields = {name: value for name, value in asdict(state).items() if value is not None}
    return {"format": STATE_FORMAT, **fields}


def _check_finite(run: Path, files: Mapping[str, Tensors], iteration: int) -> None:
    """Raise if a tensor has a NaN or an infinity: such a checkpoint must not replace a good one."""
    for file, tensors in files.items():
        name = non_finite(tensors)
        if name is not None:
            raise errors.UserError(
                f"{run}: training diverged: {name} ({file}) is not finite after iteration {iteration}, so it was not "
                f"saved; train a new run with a lower plan.optimizer.lr; {last_checkpoint(run)}"
            )


def non_finite(tensors: Tensors) -> str | None:
    """The name of the first tensor with a NaN or an infinity."""
    for name, value in tensors.items():
        if value.numel() and value.is_floating_point():
            ends = torch.stack(torch.aminmax(value))  # NaN if there is one; many times faster than isfinite
            if not bool(ends.isfinite().all()):
                return name
    return None


def _new_folder(run: Path, iteration: int) -> Path:
    """A folder for a new checkpoint that does not exist, other than the one that the state file names."""
    folder = run / f"checkpoint-{iteration:06d}"
    if folder.exists() and (run / STATE).exists() and _read(run / STATE).folder == folder.name:
        folder = run / f"{folder.name}-1"
    if folder.exists():  # complete, but never named: the process was killed just then
        _remove(folder)
    return folder


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Remove a new checkpoint that cannot be completed, and say why in one line."""
    try:
        yield
    except (SafetensorError, OSError, errors.UserError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        cause = getattr(error, "strerror", None) or errors.printable(str(error))
        raise errors.UserError(
            f"{folder}: cannot be written ({cause}); free some space or repair the disk, then continue with --resume; "
            f"{last_checkpoint(folder.parent)}"
        ) from None


def _remove_old(run: Path, current: Path, iteration: int, keep: int) -> None:
    """Remove all checkpoints but the current one and ``keep`` - 1 before it."""
    older = [path for path in _folders(run) if path != current and int(path.name.split("-")[1]) < iteration]
    kept = {current, *older[: keep - 1]}
    for folder in _folders(run):
        if folder not in kept:
            _remove(folder)


def _remove(folder: Path) -> None:
    """Remove a checkpoint; killed meanwhile, it leaves a temporary folder, not half a checkpoint."""
    hidden = io.temporary_path(folder)
    folder.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


# ---------------------------------------------------------------- loading


def load_model(run: Path, state: State, detector: nn.Module, file: str = MODEL) -> None:
    """Load a checkpoint's weights into a detector of the same shape."""
    path = run / state.folder / file
    load_into(detector, read_tensors(path), str(path))


def load_adversary(run: Path, state: State, adversary: AdversaryOptimizer) -> None:
    """Restore a mask net and its optimizer state."""
    path = run / state.folder / ADVERSARY
    load_into(adversary.net, read_tensors(path), str(path))
    restore_optimizer(run / state.folder / ADVERSARY_OPTIMIZER, adversary.optimizer)


def load_optimizer(run: Path, state: State, optimizer: Optimizer) -> None:
    """Restore the optimizer state, parameter by parameter."""
    restore_optimizer(run / state.folder / OPTIMIZER, optimizer)


def restore_optimizer(path: Path, optimizer: Optimizer) -> None:
    """Load the state of an optimizer from a file of ``optimizer_tensors``."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for name, value in read_tensors(path).items():
        index, _, key = name.partition(".")
        parameter = parameters[int(index)] if index.isdecimal() and int(index) < len(parameters) else None
        if parameter is None or (value.dim() and value.shape != parameter.shape):
            raise errors.UserError(
                f"{path}: {name} {tuple(value.shape)} belongs to no parameter of this model; {_REMEDY}; {_START_OVER}"
            )
        optimizer.state[parameter][key] = value.to(parameter.device) if value.dim() else value


def optimizer_tensors(optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """The state of an optimizer, named by the number of the parameter."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        f"{i}.{key}": torch.as_tensor(value).contiguous()
        for i, p in enumerate(parameters)
        for key, value in optimizer.state.get(p, {}).items()
        if value is not None
    }


def contiguous(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of a module, as safetensors takes them."""
    return {name: value.contiguous() for name, value in state.items()}


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file of a checkpoint, verified."""
    with _way_back(path.parents[1], path.parent):
        if not path.exists():
            raise errors.UserError(f"{path}: missing, though {STATE} names its folder; {_REMEDY}")
        storage.verify_file(path, _REMEDY)
        try:
            with safe_open(path, framework="pt") as file:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        except (SafetensorError, OSError) as error:
            raise errors.UserError(f"{path}: damaged or cut short ({error}); {_REMEDY}") from None
