"""The user's folder of weights: each a .safetensors file, its provenance beside it, verified whenever it is used."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from safetensors.torch import save_file

from tag2box.errors import UserError
from tag2box.files import read_json, replacing, write_json
from tag2box.model.weights.architectures import ARCHITECTURES, Weights, checked
from tag2box.model.weights.files import digest, read_state_dict
from tag2box.model.weights.provenance import Provenance, read_provenance

_REMEDY = "remove it, then `tag2box weights get` or `convert` again"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
FILE_ENDINGS = (".safetensors", ".pth", ".pt", ".pkl", ".pickle", ".ckpt", ".tar", ".json")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where weights about to be stored came from."""

    source: str
    licence: str
    sha256: str


def weights_folder() -> Path:
    """Where weights are kept: below ``$TAG2BOX_HOME``, or ``$XDG_CACHE_HOME/tag2box``, or ``~/.cache/tag2box``."""
    own, shared = os.environ.get("TAG2BOX_HOME"), os.environ.get("XDG_CACHE_HOME")
    home = Path(own) if own else (Path(shared) if shared else Path.home() / ".cache") / "tag2box"
    return home / "weights"


def stored_path(name: str) -> Path:
    """The file that holds, or would hold, the weights of this name."""
    if not _NAME.fullmatch(name) or name.endswith(FILE_ENDINGS):
        raise UserError(f"{name}: no name for weights; expected letters, digits, - and _, without a file's ending")
    return weights_folder() / f"{name}.safetensors"


def stored_names() -> list[str]:
    """The names of what is stored, sorted, sound or not."""
    return sorted(path.stem for path in weights_folder().glob("*.safetensors"))


def store(name: str, weights: Weights, origin: Origin) -> Provenance:
    """Keep weights under a name. Sound weights that are there already are never replaced by others."""
    path = stored_path(name)
    _make_room(path, origin)
    with replacing(path) as temporary:
        save_file(weights.tensors, temporary)
        provenance = Provenance(
            name=name,
            architecture=weights.architecture,
            source=origin.source,
            licence=origin.licence,
            original_sha256=origin.sha256,
            sha256=digest(temporary),
            preprocess=weights.preprocess,
            tag2box=version("tag2box"),
            date=datetime.now(UTC).isoformat(timespec="seconds"),
        )
    write_json(path.with_suffix(".json"), provenance.to_json())
    return provenance


def _make_room(path: Path, origin: Origin) -> None:
    if not path.exists():
        return
    try:
        old = verify(path)
    except UserError:
        return  # damaged: what comes now repairs it
    if old.original_sha256 != origin.sha256:
        raise UserError(
            f"{path}: already holds other weights (from {old.source}); choose another --name, or remove the file"
        )


def is_stored(path: Path) -> bool:
    """Whether a file has a provenance of ours beside it; other programs put JSON beside weights too."""
    beside = path.with_suffix(".json")
    if path.suffix != ".safetensors" or not beside.is_file():
        return False
    try:
        raw = read_json(beside, "a provenance")
    except UserError:
        return False
    return isinstance(raw, dict) and "original_sha256" in raw


def verify(path: Path) -> Provenance:
    """The provenance of a stored weight whose checksum is right, or one line that says what is wrong."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; expected stored weights, `tag2box weights list` shows what there is")
    beside = path.with_suffix(".json")
    if not beside.is_file():
        raise UserError(f"{path}: its provenance {beside.name} is missing; {_REMEDY}")
    provenance = read_provenance(beside, _REMEDY)
    if provenance.architecture not in ARCHITECTURES:
        raise UserError(f"{beside}: field architecture is {provenance.architecture}, which is unknown; {_REMEDY}")
    if digest(path) != provenance.sha256:
        raise UserError(f"{path}: its checksum is not that in {beside.name}, so it was damaged or changed; {_REMEDY}")
    return provenance


def open_stored(path: Path) -> Weights:
    """Stored weights, verified: checksum, every key, every shape."""
    provenance = verify(path)
    tensors = checked(read_state_dict(path), provenance.architecture, str(path))
    return Weights(provenance.architecture, provenance.preprocess, tensors)
