"""Checkpoints: tensors in safetensors files, everything else in a small JSON state file that names them."""

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.optim import Optimizer

from tag2box import errors, io
from tag2box.models.detector import Detector
from tag2box.models.weights.state_dict import load_into
from tag2box.training.optim import AdversaryOptimizer

STATE = "state.json"
MODEL = "model.safetensors"
OPTIMIZER = "optimiser.safetensors"
ADVERSARY = "mask_net.safetensors"
ADVERSARY_OPTIMIZER = "mask_net_optimiser.safetensors"
_REMEDY = "restore the file, or remove the run folder and train again"


@dataclass(frozen=True, slots=True)
class State:
    """Content of ``state.json``."""

    iteration: int  # iterations done
    folder: str  # of the tensors, inside the run
    classes: tuple[str, ...]
    preprocess: dict[str, object]  # of the backbone, for programs that read the weights without tag2box
    seconds: float  # of training so far


def has_checkpoint(run: Path) -> bool:
    """Whether a run has a checkpoint to resume from or to detect with."""
    return (run / STATE).exists()


def read_state(run: Path) -> State:
    """The validated state file of a run."""
    path = run / STATE
    raw = io.read_json(path, "the state file of a tag2box run")
    try:
        return State(
            iteration=int(raw["iteration"]),
            folder=str(raw["folder"]),
            classes=tuple(str(c) for c in raw["classes"]),
            preprocess=dict(raw["preprocess"]),
            seconds=float(raw["seconds"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise errors.UserError(f"{path}: field {error} is missing or of the wrong type; {_REMEDY}") from None


def save(
    run: Path,
    detector: Detector,
    optimizer: Optimizer,
    *,
    iteration: int,
    classes: tuple[str, ...],
    seconds: float,
    adversary: AdversaryOptimizer | None = None,
) -> None:
    """Write tensors into a new folder, then point the state file to it; only then remove the old folder."""
    name = f"checkpoint-{iteration:06d}"
    temporary = run / f".{name}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    save_file(_contiguous(detector.state_dict()), temporary / MODEL, metadata={"classes": json.dumps(list(classes))})
    save_file(_optimizer_tensors(optimizer), temporary / OPTIMIZER)
    if adversary is not None:
        save_file(_contiguous(adversary.net.state_dict()), temporary / ADVERSARY)
        save_file(_optimizer_tensors(adversary.optimizer), temporary / ADVERSARY_OPTIMIZER)
    for file in list(temporary.iterdir()):
        io.apply_umask(file)
        io.sync(file)  # on disk before the state file names it
    io.sync(temporary)
    final = run / name
    shutil.rmtree(final, ignore_errors=True)
    temporary.rename(final)
    io.sync(run)
    io.write_json(run / STATE, asdict(State(iteration, name, classes, asdict(detector.backbone.preprocess), seconds)))
    for old in run.glob("checkpoint-*"):
        if old.name != name:
            shutil.rmtree(old, ignore_errors=True)


def load_model(run: Path, state: State, detector: Detector) -> None:
    """Load a checkpoint's weights into a detector of the same shape."""
    path = run / state.folder / MODEL
    load_into(detector, _tensors(path), str(path))


def load_adversary(run: Path, state: State, adversary: AdversaryOptimizer) -> None:
    """Restore a mask net and its optimizer state."""
    path = run / state.folder / ADVERSARY
    load_into(adversary.net, _tensors(path), str(path))
    _load_optimizer(run / state.folder / ADVERSARY_OPTIMIZER, adversary.optimizer)


def load_optimizer(run: Path, state: State, optimizer: Optimizer) -> None:
    """Restore the optimizer state, parameter by parameter."""
    _load_optimizer(run / state.folder / OPTIMIZER, optimizer)


def _load_optimizer(path: Path, optimizer: Optimizer) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for name, value in _tensors(path).items():
        index, _, key = name.partition(".")
        parameter = parameters[int(index)] if index.isdecimal() and int(index) < len(parameters) else None
        if parameter is None or (value.dim() and value.shape != parameter.shape):
            raise errors.UserError(
                f"{path}: {name} {tuple(value.shape)} belongs to no parameter of this model; {_REMEDY}"
            )
        optimizer.state[parameter][key] = value.to(parameter.device) if value.dim() else value


def _optimizer_tensors(optimizer: Optimizer) -> dict[str, torch.Tensor]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        f"{i}.{key}": torch.as_tensor(value).contiguous()
        for i, p in enumerate(parameters)
        for key, value in optimizer.state.get(p, {}).items()
        if value is not None
    }


def _contiguous(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.contiguous() for name, value in state.items()}


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    if not path.exists():
        raise errors.UserError(f"{path}: missing, though {STATE} names it; {_REMEDY}")
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError) as error:
        raise errors.UserError(f"{path}: damaged or cut short ({error}); {_REMEDY}") from None
