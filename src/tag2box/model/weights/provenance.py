"""Where stored weights come from: the small JSON file beside them, and its check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from tag2box.errors import UserError
from tag2box.files import read_json
from tag2box.model.backbone import Preprocess


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
