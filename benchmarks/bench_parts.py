"""The parts of ``make bench``: what runs, and when a figure from an earlier call still stands."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tag2box.io import read_json, write_json

HERE = Path(__file__).resolve().parent
PACKAGE = HERE.parent / "src" / "tag2box"
MEASURED = ("maths", "labelers", "mil", "model", "engine", "objective", "types")  # of the package: what a step runs


@dataclass(frozen=True)
class Part:
    """One script of the benchmark; ``minutes`` is what it took where a 2,048 GEMM runs at 140 GFLOPS, about."""

    name: str
    minutes: float
    helpers: tuple[str, ...] = ()
    options: tuple[str, ...] = ()

    @property
    def script(self) -> Path:
        """Where it is."""
        return HERE / f"{self.name}.py"


_VGG = ("measuring", "vgg_world", "objective", "objective_twin")
PARTS = (
    Part("kernels", 6, ("measuring",), ("--curves",)),
    Part("objective", 12, ("measuring", "objective_twin"), ("--curves",)),
    Part("memory_growth", 3, ("measuring",)),
    Part("steps", 38, _VGG),
    Part("processes", 40, _VGG),
    Part("precision", 23, (*_VGG, "step_profile")),
)


@dataclass(frozen=True)
class Settings:
    """What every part of a call shares."""

    small: bool
    threads: int
    repeats: int | None

    def options(self) -> list[str]:
        """As the parts are told."""
        repeats = [] if self.repeats is None else ["--repeats", str(self.repeats)]
        return ["--threads", str(self.threads), *(["--small"] if self.small else []), *repeats]


def key(part: Part, settings: Settings) -> str:
    """A digest of all that a part's figures depend on: code, options and machine."""
    files = [path for name in MEASURED for path in _sources(PACKAGE / name)]
    files += [part.script, *(HERE / f"{name}.py" for name in part.helpers)]
    facts = [*part.options, *settings.options(), platform.node(), str(os.cpu_count())]
    facts.append(os.environ.get("OMP_NUM_THREADS", ""))
    digest = hashlib.sha256(json.dumps(facts).encode())
    for path in files:
        digest.update(f"{path.name}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _sources(path: Path) -> list[Path]:
    return sorted(path.rglob("*.py")) if path.is_dir() else [path]


@dataclass(frozen=True)
class Shelf:
    """The folder that keeps what each part found. A part's key is that of the code at its opening."""

    folder: Path
    settings: Settings
    keys: dict[str, str]

    @classmethod
    def open(cls, folder: Path, settings: Settings, parts: Sequence[Part]) -> Shelf:
        """The shelf for some parts."""
        return cls(folder, settings, {part.name: key(part, settings) for part in parts})

    def find(self, part: Part) -> dict[str, Any] | None:
        """What an earlier call found with the same code and settings."""
        path = self._path(part)
        kept = read_json(path, "figures of a benchmark") if path.exists() else {}
        same = isinstance(kept, dict) and kept.get("key") == self.keys[part.name]
        return kept if same else None

    def keep(self, part: Part, figures: dict[str, Any], *, commit: str, seconds: float, when: str) -> dict[str, Any]:
        """Put a part's figures down; as they will be found."""
        kept = {
            "key": self.keys[part.name],
            "commit": commit,
            "seconds": seconds,
            "when": when,
            "figures": figures,
        }
        write_json(self._path(part), kept)
        return kept

    def _path(self, part: Part) -> Path:
        return self.folder / f"{part.name}{'-small' if self.settings.small else ''}.json"


def measured(part: Part, settings: Settings, scratch: Path) -> dict[str, Any]:
    """Run a part's script; it talks on the terminal, and its figures come back."""
    scratch.parent.mkdir(parents=True, exist_ok=True)
    scratch.unlink(missing_ok=True)
    told = [*part.options, *settings.options(), "--out", str(scratch)]
    subprocess.run([sys.executable, str(part.script), *told], check=True)
    figures: dict[str, Any] = read_json(scratch, f"the figures of {part.script.name}")
    scratch.unlink()
    return figures


def commit_of(folder: Path) -> str:
    """The commit that is checked out, with a word if files differ from it."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(folder), *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    try:
        name, changed = git("rev-parse", "--short=10", "HEAD"), git("status", "--porcelain")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name + (" and uncommitted changes" if changed else "")
