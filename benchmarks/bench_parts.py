"""The parts of ``make bench``: scripts, options, and the store of measured figures with its invalidation key."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tag2box.io import read_json, write_json

HERE = Path(__file__).resolve().parent
PACKAGE = HERE.parent / "src" / "tag2box"
MEASURED = ("ops", "methods", "models", "training", "metrics", "student", "types.py")  # sources that the parts execute


@dataclass(frozen=True)
class Part:
    """One script of the benchmark; ``minutes`` is its duration on a machine whose 2,048 GEMM runs at 140 GFLOPS."""

    name: str
    minutes: float
    helpers: tuple[str, ...] = ()
    options: tuple[str, ...] = ()

    @property
    def script(self) -> Path:
        """Path of the script."""
        return HERE / f"{self.name}.py"


_VGG = ("measuring", "vgg_world", "criterion", "criterion_twin")
PARTS = (
    Part("kernels_against_history", 3, ("measuring", "kernels", "criterion", "criterion_twin")),
    Part("frozen_network", 1, ("measuring",)),
    Part("coco_evaluation", 5, ("measuring",)),
    Part("kernels", 6, ("measuring",), ("--curves",)),
    Part("criterion", 12, ("measuring", "criterion_twin"), ("--curves",)),
    Part("memory_growth", 3, ("measuring",)),
    Part("steps", 38, _VGG),
    Part("processes", 40, _VGG),
    Part("precision", 23, (*_VGG, "step_profile")),
)


@dataclass(frozen=True)
class Settings:
    """Settings shared by all parts of a call."""

    small: bool
    threads: int
    repeats: int | None

    def options(self) -> list[str]:
        """Command-line options passed to each part."""
        repeats = [] if self.repeats is None else ["--repeats", str(self.repeats)]
        return ["--threads", str(self.threads), *(["--small"] if self.small else []), *repeats]


def key(part: Part, settings: Settings) -> str:
    """Digest of everything that a part's figures depend on: code, options and machine."""
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
class FigureStore:
    """Folder of the figures of finished parts; the keys are computed when the store is opened."""

    folder: Path
    settings: Settings
    keys: dict[str, str]

    @classmethod
    def open(cls, folder: Path, settings: Settings, parts: Sequence[Part]) -> FigureStore:
        """The store of some parts."""
        return cls(folder, settings, {part.name: key(part, settings) for part in parts})

    def load(self, part: Part) -> dict[str, Any] | None:
        """Figures of an earlier call with the same code and settings, if any."""
        path = self._path(part)
        stored = read_json(path, "figures of a benchmark") if path.exists() else {}
        is_current = isinstance(stored, dict) and stored.get("key") == self.keys[part.name]
        return stored if is_current else None

    def save(self, part: Part, figures: dict[str, Any], *, commit: str, seconds: float, when: str) -> None:
        """Write the figures of a part."""
        stored = {
            "key": self.keys[part.name],
            "commit": commit,
            "seconds": seconds,
            "when": when,
            "figures": figures,
        }
        write_json(self._path(part), stored)

    def _path(self, part: Part) -> Path:
        return self.folder / f"{part.name}{'-small' if self.settings.small else ''}.json"


def run_part(part: Part, settings: Settings, scratch: Path) -> dict[str, Any]:
    """Run a part's script, with its output on the terminal, and return its figures."""
    scratch.parent.mkdir(parents=True, exist_ok=True)
    scratch.unlink(missing_ok=True)
    options = [*part.options, *settings.options(), "--out", str(scratch)]
    subprocess.run([sys.executable, str(part.script), *options], check=True)
    figures: dict[str, Any] = read_json(scratch, f"the figures of {part.script.name}")
    scratch.unlink()
    return figures


def commit_of(folder: Path) -> str:
    """The checked-out commit, with a note if code differs from it."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(folder), *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    try:
        commit = git("rev-parse", "--short=10", "HEAD")
        changed = git("status", "--porcelain", "--", ":/src", ":/benchmarks")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit + (" and uncommitted changes" if changed else "")


def provenance(script: str, words: Sequence[str] | None = None) -> dict[str, str]:
    """The command and the commit of a script's figures; of absolute paths, which others lack, the last part.

    Args:
        words: the command line; default: that of this process.
    """
    given = sys.argv[1:] if words is None else words
    command = shlex.join(["python", f"benchmarks/{Path(script).name}", *map(_portable, given)])
    return {"command": command, "commit": commit_of(HERE)}


def _portable(word: str) -> str:
    head, sign, value = word.rpartition("=")
    return f"{head}{sign}{Path(value).name}" if Path(value).is_absolute() else word
