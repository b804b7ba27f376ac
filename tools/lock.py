"""Lock files with the SHA-256 of every package that `make setup` installs, for all platforms and Python versions.

python tools/lock.py                # resolve pyproject.toml at the versions of constraints.txt, on PyPI
python tools/lock.py --minimum      # print the oldest versions that pyproject.toml allows, for `make test-minimum`

Written are requirements.lock (everything but torch) and requirements-torch.lock (torch of PyPI, and on Linux the CUDA
libraries that this build needs). requirements-cpu.lock, torch's build for Linux without CUDA, is kept by hand: it is
not on PyPI. To update a package, change its version in constraints.txt, run this, then `make setup`.
"""

import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REST, TORCH, CPU = (ROOT / name for name in ("requirements.lock", "requirements-torch.lock", "requirements-cpu.lock"))
UV = "uv==0.13.7"
_OF_TORCH = re.compile(r"(?:torch|triton|nvidia-[a-z0-9-]+|cuda-[a-z0-9-]+)==")
_PINNED = re.compile(r"^([a-z0-9-]+)==(\S+)", re.MULTILINE)
_HEAD = "# Made by `make lock` from pyproject.toml and constraints.txt: {}, with the SHA-256 of every file.\n"


def versions(text: str) -> dict[str, str]:
    """The pinned version of each package in a lock or constraints file."""
    return dict(_PINNED.findall(text))


def split(text: str) -> tuple[str, str]:
    """The entries of a resolved lock without torch and its CUDA libraries, and these; each has its hashes below it."""
    entries = re.split(r"^(?=[a-z0-9])", text, flags=re.MULTILINE)[1:]
    rest = "".join(entry for entry in entries if not _OF_TORCH.match(entry))
    torch = "".join(entry for entry in entries if _OF_TORCH.match(entry))
    return _HEAD.format("all packages but torch") + rest, _HEAD.format("torch and, on Linux, CUDA") + torch


def resolve(folder: Path) -> str:
    """All packages of the project and its extra ``dev``, resolved by uv in a temporary environment."""
    venv.create(folder, with_pip=True)
    tools = folder / ("Scripts" if sys.platform == "win32" else "bin")
    subprocess.run([str(tools / "pip"), "install", "--quiet", UV], check=True)
    command = [str(tools / "uv"), "pip", "compile", "--quiet", "--universal", "--python-version", "3.11",
               "--native-tls",
               "--generate-hashes", "--no-emit-index-url", "--no-annotate", "--no-header", "--extra", "dev",
               "--constraint", "constraints.txt", "pyproject.toml"]  # fmt: skip
    return subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True).stdout


def minimum(pyproject: str) -> str:
    """Constraints for the oldest allowed version of each dependency, in its newest patch release."""
    project = tomllib.loads(pyproject)["project"]
    texts = {*project["dependencies"], *(text for extra in project["optional-dependencies"].values() for text in extra)}
    found = (re.fullmatch(r"([A-Za-z0-9_-]+)(?:\[[a-z0-9]+\])?>=([0-9.]+)", text) for text in sorted(texts))
    return "".join(f"{match[1]}=={match[2]}.*\n" for match in found if match)


def main() -> None:
    """Write both lock files, or print the oldest versions."""
    if sys.argv[1:] == ["--minimum"]:
        print(minimum((ROOT / "pyproject.toml").read_text(encoding="utf-8")), end="")
        return
    with tempfile.TemporaryDirectory() as folder:
        text = resolve(Path(folder))
    wanted = versions((ROOT / "constraints.txt").read_text(encoding="utf-8"))
    loose = sorted(name for name in versions(text) if name not in wanted and not _OF_TORCH.match(f"{name}=="))
    if versions(text)["torch"] != versions(CPU.read_text(encoding="utf-8"))["torch"].removesuffix("+cpu"):
        sys.exit(f"{CPU.name}: not torch {versions(text)['torch']}; take its hashes from PyTorch's index of CPU builds")
    for path, content in zip((REST, TORCH), split(text), strict=True):
        path.write_text(content, encoding="utf-8")
    print(f"{len(versions(text))} packages" + (f"; not in constraints.txt: {', '.join(loose)}" if loose else ""))


if __name__ == "__main__":
    main()
