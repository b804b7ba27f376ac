"""Build, check and tag a release.

python tools/release.py build dist            # sdist and wheel, built from the files of the checkout
python tools/release.py check                 # builds both, then checks names, versions, content and an installation
python tools/release.py check --demo          # ... and runs `tag2box demo --small` from the installed wheel
python tools/release.py tag                   # check, then `git tag v<version>`; nothing is pushed

`check` installs the wheel into a new virtual environment, without a download: the dependencies are those of the Python
that runs this file. To install those too, create an empty environment and `pip install dist/tag2box-*.whl` there.
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "src")
"""What a release is built from."""
HOOKS = """
import sys
from setuptools import build_meta
print(build_meta.build_sdist(sys.argv[1]))
"""
WHEEL_HOOK = HOOKS.replace("build_sdist", "build_wheel")


class ReleaseError(Exception):
    """A release that must not be published, and why."""


# ---------------------------------------------------------------- build


def build(out: Path, root: Path = ROOT) -> tuple[Path, Path]:
    """Build the sdist from the checkout and the wheel from the sdist; returns both paths."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        for name in SOURCES:
            source, copy = root / name, tree / name
            if source.is_dir():
                shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
            else:
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, copy)
        sdist = out / _call(HOOKS, tree, out)
        with tarfile.open(sdist) as archive:
            archive.extractall(folder, filter="data")
        unpacked = Path(folder) / sdist.name.removesuffix(".tar.gz")
        wheel = out / _call(WHEEL_HOOK, unpacked, out)
    return sdist, wheel


def _call(hook: str, folder: Path, out: Path) -> str:
    """Run a hook of the build backend in a folder; returns the name of the file it wrote."""
    command = [sys.executable, "-c", hook, str(out.resolve())]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ReleaseError(f"the build failed:\n{done.stdout}{done.stderr}")
    return done.stdout.split()[-1]


# ---------------------------------------------------------------- checks


def version(root: Path = ROOT) -> str:
    """The version in pyproject.toml; CHANGELOG.md and CITATION.cff must have the same."""
    found = str(tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"])
    headings = re.findall(r"^## \[([^\]]+)\]", (root / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    if headings[:1] != [found]:
        raise ReleaseError(f"CHANGELOG.md: its first heading is {headings[:1]}, the version is {found}")
    cited = re.findall(r"^version: (\S+)$", (root / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    if cited != [found]:
        raise ReleaseError(f"CITATION.cff: its version is {cited}, that of pyproject.toml is {found}")
    return found


def check_wheel(wheel: Path, root: Path = ROOT) -> None:
    """The wheel has every file of the package, byte for byte, no other, and the metadata of the project."""
    package = root / "src"
    wanted = {
        path.relative_to(package).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted((package / "tag2box").rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
        found = {name: hashlib.sha256(archive.read(name)).hexdigest() for name in names}
        metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(metadata).decode().split("\n\n")[0].splitlines()
    different = sorted(name for name in {*wanted, *found} if wanted.get(name) != found.get(name))
    if different:
        raise ReleaseError(f"{wheel.name}: missing, superfluous or changed: {', '.join(different[:5])}")
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {line.removeprefix("Provides-Extra: ") for line in lines if line.startswith("Provides-Extra: ")}
    if f"Version: {version(root)}" not in lines or extras != set(project["optional-dependencies"]):
        raise ReleaseError(f"{wheel.name}: its version or extras are not those of pyproject.toml")


def install(wheel: Path, folder: Path) -> Path:
    """Install a wheel into a new virtual environment that sees this Python's packages; returns its folder of programs.

    Packages are added as a path, so that an editable installation of tag2box among them is not seen.
    """
    venv.create(folder, with_pip=False, symlinks=os.name != "nt")
    scripts = folder / ("Scripts" if os.name == "nt" else "bin")
    paths = {"base": str(folder), "platbase": str(folder)}
    site = Path(sysconfig.get_path("purelib", scheme="venv", vars=paths))
    (site / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    command = [str(scripts / "python"), "-m", "pip", "--isolated", "--disable-pip-version-check", "install", "--quiet",
               "--no-deps", "--no-index", "--ignore-installed", str(wheel)]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    return scripts


def check_installed(scripts: Path, wanted: str) -> None:
    """The installed program is that of the wheel, says its version, and knows its recipes and templates."""
    where = "import tag2box, pathlib; print(pathlib.Path(tag2box.__file__).parent)"
    place = Path(run([scripts / "python", "-c", where]).strip())
    if scripts.parent.resolve() not in place.resolve().parents:
        raise ReleaseError(f"the installed package is {place}, outside {scripts.parent}")
    if (printed := run([scripts / "tag2box", "--version"]).strip()) != f"tag2box {wanted}":
        raise ReleaseError(f"tag2box --version prints {printed!r}; expected {wanted}")
    if "od-wscl" not in run([scripts / "tag2box", "recipes"]):
        raise ReleaseError("tag2box recipes does not list od-wscl")


def run(command: list[str | Path]) -> str:
    """Run a program of the new environment in a folder of its own, away from the checkout; returns what it prints."""
    clean = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            list(map(str, command)), cwd=folder, env=clean, capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise ReleaseError(f"{' '.join(map(str, command))}: exit code {done.returncode}\n{done.stderr}")
    return done.stdout


def check(out: Path, *, demo: bool = False) -> str:
    """All checks on newly built files, which stay in ``out``; returns the version."""
    wanted = version()
    sdist, wheel = build(out)
    check_wheel(wheel)
    with tempfile.TemporaryDirectory() as folder:
        scripts = install(wheel, Path(folder) / "venv")
        check_installed(scripts, wanted)
        if demo:
            run([scripts / "tag2box", "demo", "--small", "--out", Path(folder) / "demo"])
            if not (Path(folder) / "demo" / "report.html").stat().st_size:
                raise ReleaseError("tag2box demo --small wrote no report")
    for path in (sdist, wheel):
        print(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}")
    return wanted


def tag(name: str) -> None:
    """Tag the current commit; a changed checkout or an existing tag is refused. Nothing is pushed."""
    if _git("status", "--porcelain"):
        raise ReleaseError("the checkout has changes; commit them first")
    if _git("tag", "--list", name):
        raise ReleaseError(f"{name} exists already")
    _git("tag", "--annotate", name, "--message", f"tag2box {name}")
    print(f"tagged {name}; publish it with `git push origin {name}` and upload the files of dist/")


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def main() -> int:
    """Build, check or tag."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("build", "check", "tag"))
    parser.add_argument("out", type=Path, nargs="?", default=ROOT / "dist", help="folder of the built files")
    parser.add_argument("--demo", action="store_true", help="run the small demo from the installed wheel")
    args = parser.parse_args()
    try:
        if args.action == "build":
            print(*build(args.out), sep="\n")
        else:
            name = f"v{check(args.out, demo=args.demo or args.action == 'tag')}"
            if args.action == "tag":
                tag(name)
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
