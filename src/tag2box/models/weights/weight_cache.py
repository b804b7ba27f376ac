"""Where stored weights come from: the small JSON file beside them, and its check."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from safetensors.torch import save_file

from tag2box.errors import UserError
from tag2box.io import read_json, replacing, write_json
from tag2box.models.backbone import Preprocess
from tag2box.models.weights.architectures import ARCHITECTURES, Weights, checked, pixels_name
from tag2box.models.weights.convert import Wishes, convert_weights
from tag2box.models.weights.state_dict import digest, read_state_dict, read_weight_file


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """All that is known about a stored weight."""

    name: str
    architecture: str
    source: str  # where it came from, in words
    licence: str
    original_sha256: str  # of the file it was made from
    sha256: str  # of the .safetensors beside
    preprocess: Preprocess
    tag2box: str  # the version that stored it
    date: str

    def to_json(self) -> dict[str, object]:
        """As plain values."""
        return asdict(self)


def read_provenance(path: Path, remedy: str) -> Provenance:
    """A provenance file, checked; ``remedy`` ends the error's line."""
    raw = read_json(path, "the provenance of stored weights")
    if not isinstance(raw, dict):
        raise UserError(f"{path}: expected the provenance of stored weights; {remedy}")
    words = [field.name for field in fields(Provenance) if field.name != "preprocess"]
    for name in words:
        if not isinstance(raw.get(name), str):
            raise UserError(f"{path}: field {name} is missing or not a string; {remedy}")
    preprocess = read_preprocess(raw.get("preprocess"), f"{path}: field preprocess", remedy)
    return Provenance(preprocess=preprocess, **{name: raw[name] for name in words})


def read_preprocess(raw: object, where: str, remedy: str) -> Preprocess:
    """A preprocessing from its JSON form, checked; ``where`` and ``remedy`` make the error's line."""
    table = raw if isinstance(raw, Mapping) else {}
    order, scale = table.get("order"), table.get("scale")
    mean, std = _three(table.get("mean")), _three(table.get("std"))
    if order in {"rgb", "bgr"} and isinstance(scale, int | float) and scale > 0 and mean and std and min(std) > 0:
        return Preprocess(order="rgb" if order == "rgb" else "bgr", scale=float(scale), mean=mean, std=std)
    raise UserError(f"{where} is not order, scale, mean and std of three channels; {remedy}")


def _three(value: object) -> tuple[float, float, float] | None:
    if isinstance(value, list | tuple) and len(value) == 3 and all(isinstance(x, int | float) for x in value):
        return (float(value[0]), float(value[1]), float(value[2]))
    return None


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


_OPTION = "backbone.preprocess"


def find_weights(given: str, preprocess: str | None) -> Weights:
    """Stored weights by name, or those of a file; ``preprocess`` may say what a file does not, and never disagree."""
    path = Path(given) if is_weight_file(given) else _stored(given)
    if not is_weight_file(given) or is_stored(path):
        weights = open_stored(path)
        own = pixels_name(weights.preprocess)
        if preprocess not in {None, own}:
            raise UserError(
                f"{_OPTION} = {preprocess}, but {given} was trained on {own} pixels; leave out {_OPTION}: "
                "the weights bring their own"
            )
        return weights
    wishes = Wishes(preprocess=preprocess, preprocess_option=_OPTION)
    return convert_weights(read_weight_file(path), wishes).weights


def is_weight_file(given: str) -> bool:
    """Whether a setting names a file: it has a folder in it, or a weight file's ending."""
    return "/" in given or "\\" in given or given.endswith(FILE_ENDINGS)


def _stored(name: str) -> Path:
    path = stored_path(name)
    if not path.exists():
        known = stored_names()
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]}?" if near else f"stored: {', '.join(known) or 'nothing'}"
        raise UserError(f"{name}: no weights of this name ({hint}); try `tag2box weights get {name}`, or name a file")
    return path
