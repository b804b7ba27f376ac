"""``tag2box weights``: what pretrained weights there are, get one, or convert a file of your own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tag2box.errors import UserError
from tag2box.models.weights.architectures import PREPROCESS
from tag2box.models.weights.convert import KNOWN_FILES, Wishes
from tag2box.models.weights.convert import convert_weights as convert_file
from tag2box.models.weights.state_dict import read_weight_file
from tag2box.models.weights.weight_cache import (
    Origin,
    Provenance,
    store,
    stored_names,
    stored_path,
    verify,
    weights_folder,
)
from tag2box.models.weights.zoo import ZOO, Got, lite0_file
from tag2box.models.weights.zoo import get_weights as get_from_zoo
from tag2box.progress import Progress, silent

if TYPE_CHECKING:
    from rich.table import Table

_STATED_NOWHERE = "not stated in the file; see its publisher"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of ``tag2box weights list``."""

    name: str
    architecture: str
    holds: str
    licence: str
    size: str
    comes: str
    here: str  # "verified", "in the package", "not here" or "refused"
    problem: str = ""  # why it was refused, in one line


@dataclass(frozen=True, slots=True)
class Converted:
    """A file that is stored now, and how it was understood."""

    provenance: Provenance
    path: Path
    notes: tuple[str, ...]


def list_weights() -> list[Row]:
    """The zoo, then what else is stored; everything stored is verified."""
    return [_row(name) for name in ZOO] + [_row(name) for name in stored_names() if name not in ZOO]


def _row(name: str) -> Row:
    path, entry = weights_folder() / f"{name}.safetensors", ZOO.get(name)
    size = f"{path.stat().st_size / 2**20:.0f} MB" if path.exists() else f"{entry.megabytes if entry else 0} MB"
    provenance, here, problem = None, "not here", ""
    if path.exists():
        try:
            provenance, here = verify(path), "verified"
        except UserError as error:
            here, problem = "refused", str(error)
    elif name == "lite0" and _packaged():
        here = "in the package"
    if entry is not None:
        licence = provenance.licence if provenance else entry.licence
        return Row(name, entry.architecture, entry.holds, licence, size, entry.comes, here, problem)
    if provenance is not None:
        return Row(name, provenance.architecture, "", provenance.licence, size, provenance.source, here)
    return Row(name, "unknown", "", "unknown", size, "unknown", here, problem)


def _packaged() -> bool:
    try:
        return lite0_file().is_file()
    except UserError:
        return False


def table(rows: list[Row]) -> Table:
    """The rows as a table for a terminal."""
    from rich.table import Table  # here: only the command line needs it
    from rich.text import Text

    sheet = Table("name", "architecture", "holds", "licence", "size", "from", "here", show_edge=False, pad_edge=False)
    for column in (0, 1, 4, 6):
        sheet.columns[column].no_wrap = True
    styles = {"refused": "bold red", "not here": "dim"}
    for row in rows:
        cells = (row.name, row.architecture, row.holds, row.licence, row.size, row.comes)
        words = (Text(cell, overflow="fold") for cell in cells)
        sheet.add_row(*words, Text(row.here, styles.get(row.here, "green")))
    return sheet


def get(name: str, *, file: Path | None = None, progress: Progress = silent) -> Got:
    """Store weights of the zoo, from a pip package, the user's ``file`` or, last, a published address."""
    return get_from_zoo(name, file=file, watch=progress)


def convert(
    file: Path, *, architecture: str | None = None, preprocess: str | None = None, name: str | None = None
) -> Converted:
    """Recognise, check and store a weight file; its name is that of its architecture unless ``name`` is given."""
    raw = read_weight_file(file)
    conversion = convert_file(raw, Wishes(architecture=architecture, preprocess=preprocess))
    weights, known = conversion.weights, KNOWN_FILES.get(raw.sha256[:8])
    of_caffe = weights.architecture.startswith("vgg16") and weights.preprocess == PREPROCESS["caffe"]
    chosen = name or (f"{weights.architecture}-caffe" if of_caffe else weights.architecture)
    source = f"{known.title if known else 'your file'} ({file.name})"
    origin = Origin(source, known.licence if known else _STATED_NOWHERE, raw.sha256)
    return Converted(store(chosen, weights, origin), stored_path(chosen), conversion.notes)
