"""The weight cache: stored weights with their provenance and checksum, found by name; or the weights of a file.

Each is a ``NAME.safetensors`` with a ``NAME.json`` beside it.
"""

import contextlib
import difflib
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from tag2box import errors, io, storage
from tag2box.models.backbone import Preprocess
from tag2box.models.weights import convert, state_dict

FILE_ENDINGS = (".safetensors", ".pth", ".pt", ".pkl", ".pickle", ".ckpt", ".tar", ".json")
_REMEDY = "remove it, then `tag2box weights get` or `convert` again"
_PROVENANCE = "the provenance of stored weights"
_FORMAT = 2  # 1, without the key, had the fields at the top and no digest of its own
_MAX_PROVENANCE_BYTES = 1 << 20
_MARKS = ('"original_sha256"', '"architecture"', '"licence"')
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_OPTION = "backbone.preprocess"


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Provenance of stored weights: the content of the JSON file."""

    name: str
    architecture: str
    source: str  # package or file it was made from
    licence: str
    original_sha256: str  # of the file it was made from
    sha256: str  # of the .safetensors file
    preprocess: Preprocess
    tag2box: str  # the version that stored it
    date: str

    def to_json(self) -> dict[str, object]:
        """The provenance as JSON values."""
        return asdict(self)


def read_provenance(path: Path, remedy: str) -> Provenance:
    """Read and check a provenance file; ``remedy`` ends the error message."""
    return _provenances(path, remedy)[0]


def _provenances(path: Path, remedy: str) -> list[Provenance]:
    """The provenance in a file, and the one before it if the process was killed while it replaced the weights."""
    raw = io.read_json(path, _PROVENANCE)
    if not isinstance(raw, dict):
        raise errors.UserError(f"{path}: expected {_PROVENANCE}; {remedy}")
    if "format" not in raw and "original_sha256" in raw:
        return [_provenance(raw, path, remedy)]
    raw = storage.read_checked_json(path, _PROVENANCE, remedy)
    found = [raw.get("weights"), *([raw["previous"]] if "previous" in raw else [])]
    return [_provenance(table, path, remedy) for table in found]


def _provenance(raw: object, path: Path, remedy: str) -> Provenance:
    table = raw if isinstance(raw, dict) else {}
    words = [field.name for field in fields(Provenance) if field.name != "preprocess"]
    for name in words:
        if not isinstance(table.get(name), str):
            raise errors.UserError(f"{path}: field {name} is missing or not a string; {remedy}")
    preprocess = read_preprocess(table.get("preprocess"), f"{path}: field preprocess", remedy)
    return Provenance(preprocess=preprocess, **{name: table[name] for name in words})


def read_preprocess(raw: object, where: str, remedy: str) -> Preprocess:
    """A checked preprocessing from its JSON form; ``where`` and ``remedy`` begin and end the error message."""
    table = raw if isinstance(raw, dict) else {}
    order, scale = table.get("order"), table.get("scale")
    mean, std = _three(table.get("mean")), _three(table.get("std"))
    if order in ("rgb", "bgr") and isinstance(scale, int | float) and scale > 0 and mean and std and min(std) > 0:
        return Preprocess(order="rgb" if order == "rgb" else "bgr", scale=float(scale), mean=mean, std=std)
    raise errors.UserError(f"{where} is not order, scale, mean and std of three channels; {remedy}")


def _three(value: object) -> tuple[float, float, float] | None:
    if isinstance(value, list | tuple) and len(value) == 3 and all(isinstance(x, int | float) for x in value):
        return (float(value[0]), float(value[1]), float(value[2]))
    return None


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of weights to be stored."""

    source: str
    licence: str
    sha256: str


def weights_folder() -> Path:
    """Folder of the weight cache: below ``$TAG2BOX_HOME``, or ``$XDG_CACHE_HOME/tag2box``, or ``~/.cache/tag2box``."""
    own, shared = os.environ.get("TAG2BOX_HOME"), os.environ.get("XDG_CACHE_HOME")
    try:
        home = Path(own) if own else (Path(shared) if shared else Path.home() / ".cache") / "tag2box"
    except RuntimeError:  # no HOME, and the user has no entry in the password database
        raise errors.UserError(
            "weights: this user has no home folder to store them in; set TAG2BOX_HOME to a folder"
        ) from None
    return home / "weights"


def stored_path(name: str) -> Path:
    """The file of stored weights of this name, which need not exist."""
    if not _NAME.fullmatch(name) or name.endswith(FILE_ENDINGS):
        raise errors.UserError(
            f"{name}: no name for weights; expected letters, digits, - and _, without a file's ending"
        )
    return weights_folder() / f"{name}.safetensors"


def stored_names() -> list[str]:
    """Sorted names of all stored weights, verified or not."""
    return sorted(path.stem for path in weights_folder().glob("*.safetensors"))


def store(name: str, weights: state_dict.Weights, origin: Origin) -> Provenance:
    """Store weights under a name. Intact weights from another file are never overwritten.

    The provenance is written first, with the previous one in it: in between, the weights match the previous one.
    """
    path = stored_path(name)
    with storage.writing(path), io.wait_for_lock(path.with_name(io.LOCK), contextlib.nullcontext):
        previous = _replaceable(path, origin)
        with temporary_folder() as folder:
            file = folder / path.name
            _save(weights, file)
            provenance = Provenance(
                name=name,
                architecture=weights.architecture,
                source=origin.source,
                licence=origin.licence,
                original_sha256=origin.sha256,
                sha256=storage.file_digest(file),
                preprocess=weights.preprocess,
                tag2box=version("tag2box"),
                date=datetime.now(UTC).isoformat(timespec="seconds"),
            )
            _write_provenance(path, provenance, previous)
            file.replace(path)
            io.sync(path.parent)
        if previous is not None:
            _write_provenance(path, provenance, None)
    return provenance


def _save(weights: state_dict.Weights, file: Path) -> None:
    try:
        save_file(weights.tensors, file)  # writes a file of another name first, without the user's umask
    except SafetensorError as error:
        raise OSError(str(error)) from None
    io.apply_umask(file)
    io.sync(file)


def _write_provenance(path: Path, provenance: Provenance, previous: Provenance | None) -> None:
    before = {} if previous is None else {"previous": previous.to_json()}
    value = {"format": _FORMAT, "weights": provenance.to_json(), **before}
    storage.write_checked_json(path.with_suffix(".json"), value)


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder of this process in the weight cache. What killed processes left there is removed."""
    io.sweep(weights_folder())
    folder = io.temporary_path(weights_folder() / "new")
    io.make_folder(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _replaceable(path: Path, origin: Origin) -> Provenance | None:
    """The provenance of intact weights that may be replaced, since they are from the same file; None without any."""
    try:
        old = verify(path)
    except errors.UserError:
        return None  # missing or damaged: may be replaced
    if old.original_sha256 != origin.sha256:
        raise errors.UserError(
            f"{path}: already holds other weights (from {old.source}); choose another --name, or remove the file"
        )
    return old


def is_stored(path: Path) -> bool:
    """Whether a file has a provenance beside it, damaged or not; other programs write JSON files there, too."""
    beside = path.with_suffix(".json")
    if path.suffix != ".safetensors" or not beside.is_file():
        return False
    try:
        content = io.read_bytes(beside, "a provenance", _MAX_PROVENANCE_BYTES)
    except errors.UserError:
        return False
    return sum(mark.encode() in content for mark in _MARKS) > 1


def verify(path: Path) -> Provenance:
    """The provenance of stored weights, if their checksum is right; otherwise an error names the problem."""
    if not path.is_file():
        raise errors.UserError(
            f"{path}: no such file; expected stored weights, `tag2box weights list` shows what there is"
        )
    beside = path.with_suffix(".json")
    if not beside.is_file():
        raise errors.UserError(f"{path}: its provenance {beside.name} is missing; {_REMEDY}")
    known, digest = _provenances(beside, _REMEDY), storage.file_digest(path)
    provenance = next((provenance for provenance in known if provenance.sha256 == digest), None)
    if provenance is None:
        raise errors.UserError(
            f"{path}: its checksum is not that in {beside.name}, so it was damaged or changed; {_REMEDY}"
        )
    if provenance.architecture not in state_dict.ARCHITECTURES:
        raise errors.UserError(
            f"{beside}: field architecture is {provenance.architecture}, which is unknown; {_REMEDY}"
        )
    return provenance


def open_stored(path: Path) -> state_dict.Weights:
    """Read stored weights after verifying the checksum and every key and shape."""
    provenance = verify(path)
    tensors = state_dict.checked(state_dict.read_state_dict(path), provenance.architecture, str(path))
    return state_dict.Weights(provenance.architecture, provenance.preprocess, tensors)


def find_weights(given: str | Path, preprocess: str | None = None) -> state_dict.Weights:
    """Stored weights by name, or the weights of a file of a known architecture.

    Args:
        given: a name of ``tag2box weights list``, or a file; a ``Path`` is always a file.
        preprocess: the preprocessing if a file leaves it open; an error if it contradicts the weights.
    """
    is_file = is_weight_file(given)
    path = Path(given) if is_file else _stored(str(given))
    if is_file and not is_stored(path):
        options = convert.ConvertOptions(preprocess=preprocess, preprocess_option=_OPTION)
        return convert.convert_weights(state_dict.read_weight_file(path), options).weights
    weights = open_stored(path)
    own = state_dict.pixels_name(weights.preprocess)
    if preprocess not in {None, own}:
        raise errors.UserError(
            f"{_OPTION} = {preprocess}, but {given} was trained on {own} pixels; leave out {_OPTION}: "
            "stored weights include their preprocessing"
        )
    return weights


def is_weight_file(given: str | Path) -> bool:
    """Whether a setting names a file: a ``Path``, or a text with a folder or the suffix of a weight file."""
    return isinstance(given, Path) or "/" in given or "\\" in given or given.endswith(FILE_ENDINGS)


def absolute_weights(given: str | None) -> str | None:
    """The setting ``weights`` with an absolute path if it names a file; a name stays as it is."""
    return f"{Path(given).absolute()}" if given is not None and is_weight_file(given) else given


def _stored(name: str) -> Path:
    path = stored_path(name)
    if not path.exists():
        known = stored_names()
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]}?" if near else f"stored: {', '.join(known) or 'nothing'}"
        raise errors.UserError(
            f"{name}: no weights of this name ({hint}); try `tag2box weights get {name}`, or name a file"
        )
    return path
