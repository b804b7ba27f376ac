"""Cells: settings, a dataset and a seed, trained and measured once, in a folder named by all the figures depend on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from tag2box import settings
from tag2box.commands.assess import DETECTIONS, METRICS, assess
from tag2box.commands.runs import CONFIG, has_run, read_config, with_paths
from tag2box.commands.train import resume, train
from tag2box.errors import UserError
from tag2box.experiments.label_quality import moments_of, quality, quality_json
from tag2box.experiments.study_data import StudyData
from tag2box.formats.detection_files import read_detections
from tag2box.io import is_locked, locked, read_json, write_json, write_text
from tag2box.progress import Progress, silent
from tag2box.recipes import Config, Data
from tag2box.reporting.records import RunRecord, read_run
from tag2box.reporting.study_figures import Moment
from tag2box.training.events import EVENTS_FILE as EVENTS
from tag2box.training.events import read_events

GRID_FORMAT = 1
"""Raise when the same settings would give other figures: cells of before are then trained anew."""

QUALITY_FILE = "quality.json"
RUN_LOCK = "cell.lock"


@dataclass(frozen=True)
class GridRun:
    """One run of a study; ``config`` has its seed, but no paths."""

    config: Config
    data: StudyData

    @cached_property
    def name(self) -> str:
        """A digest of settings and dataset, whatever they are called and wherever they lie.

        Settings at their defaults are left out, so that a setting that tag2box learns later changes no name; that the
        run has the settings that are wanted is checked when it is found.
        """
        told = {
            "format": GRID_FORMAT,
            "data": self.data.fingerprint,
            "boxes": self.data.boxes_of(self.config),
            "settings": _told(pathless(self.config)),
        }
        text = json.dumps(told, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class RunResult:
    """A finished cell: the run and all its figures, as fractions."""

    folder: Path
    figures: Mapping[str, Any]  # metrics.json, and below "pseudo" and "cost" the quality of labels and what it took
    moments: tuple[Moment, ...] = ()  # of its pseudo labels

    def figure(self, path: tuple[str, ...]) -> float | None:
        """One figure by its path, as ("test", "voc12", "mAP"); None where it is not known."""
        value: Any = self.figures
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        return float(value) if isinstance(value, int | float) else None

    def record(self, data: StudyData | None = None, *, name: str = "") -> RunRecord:
        """What the run left on disk; with its dataset, its detections too."""
        found = None if data is None else read_detections(self.folder / DETECTIONS, data.test)
        record = read_run(self.folder, test_detections=found)
        return replace(record, name=name or record.name)


def is_finished(cell: GridRun, cells: Path) -> bool:
    """Whether a cell's figures are there."""
    return all((cells / cell.name / file).exists() for file in (METRICS, QUALITY_FILE))


def is_taken(cell: GridRun, cells: Path) -> bool:
    """Whether another process is at a cell."""
    return is_locked(cells / cell.name / RUN_LOCK)


def finish_run(cell: GridRun, cells: Path, *, progress: Progress = silent) -> RunResult:
    """Train a cell or go on training it, measure it, and give its figures. What is done already is not done again.

    Raises ``Busy`` where another process is at it.
    """
    folder = cells / cell.name
    config = with_paths(cell.data.placed(cell.config), folder)
    _check_same(config, folder)
    if not is_finished(cell, cells):
        with locked(folder / RUN_LOCK, "finishes a cell"):
            _finish_run(config, folder, cell.data, progress)
    return read_result(folder)


def _finish_run(config: Config, folder: Path, data: StudyData, progress: Progress) -> None:
    _train(config, folder, progress)
    if not (folder / METRICS).exists():
        assess(folder, test=data.exam(config), train=data.train_exam(config), progress=progress)
    write_json(folder / QUALITY_FILE, quality_json(quality(read_run(folder), data.train)))


def read_result(folder: Path) -> RunResult:
    """The figures of a finished cell."""
    metrics = read_json(folder / METRICS, "the metrics of a cell")
    moments = read_json(folder / QUALITY_FILE, "the quality of a cell's pseudo labels")
    if not isinstance(metrics, dict) or not isinstance(moments, list):
        raise UserError(f"{folder}: {METRICS} or {QUALITY_FILE} is not what a study wrote; remove the folder")
    ends = [event for event in read_events(folder) if event["event"] == "end"]
    cost = _cost(ends[-1]) if ends else {}
    pseudo = moments[-1] if moments else {}
    return RunResult(folder, {**metrics, "pseudo": pseudo, "cost": cost}, moments_of(moments, folder / QUALITY_FILE))


def _cost(end: Mapping[str, Any]) -> dict[str, Any]:
    seconds, iterations = end.get("seconds"), end.get("iteration")
    a_step = seconds / iterations if seconds is not None and iterations else None
    return {
        "seconds": seconds,
        "iterations": iterations,
        "step_seconds": a_step,
        "peak_memory_mb": end.get("peak_memory_mb"),
    }


def forget_peak() -> None:
    """Let the most memory be counted anew, so that a run is not told the peak of the one before it (Linux only)."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _train(config: Config, folder: Path, progress: Progress) -> None:
    forget_peak()
    if has_run(folder) and not (folder / EVENTS).exists():
        (folder / CONFIG).unlink(missing_ok=True)  # killed before it began
    if not has_run(folder):
        train(config, folder, progress=progress)
        return
    write_text(folder / CONFIG, settings.dump(config))  # the dataset may have moved
    resume(folder, progress=progress)


def _check_same(config: Config, folder: Path) -> None:
    """Raise where a folder holds a run whose settings are others, as when a default has changed since."""
    if not (folder / CONFIG).exists():
        return
    before, after = (pathless(c) for c in (read_config(folder), config))
    if before != after:
        name = next(f.name for f in fields(Config) if getattr(before, f.name) != getattr(after, f.name))
        raise UserError(f"{folder / CONFIG}: {name} is not what is wanted now; remove the folder, it is trained anew")


# ---------------------------------------------------------------- what a cell depends on


def pathless(config: Config) -> Config:
    """Settings without their name and without places; a file of weights counts by its content."""
    weights = getattr(config.backbone, "weights", None)
    backbone = config.backbone
    if isinstance(weights, str) and Path(weights).is_file():
        path = Path(weights)
        stamp = path.stat()
        named = f"sha256:{_content(path, stamp.st_size, stamp.st_mtime_ns)}"
        backbone = replace(config.backbone, weights=named)  # type: ignore[call-arg]  # a backbone with a field of that name
    return replace(config, name="", data=Data(skip_bad=config.data.skip_bad), feature_cache=None, backbone=backbone)


@lru_cache
def _content(path: Path, _size: int, _time: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _told(value: object) -> object:
    """Settings as JSON, those at their defaults left out."""
    if isinstance(value, tuple):
        return [_told(v) for v in value]
    if not is_dataclass(value) or isinstance(value, type):
        return value
    kept = {f.name: getattr(value, f.name) for f in fields(value)}
    return {f.name: _told(kept[f.name]) for f in fields(value) if f.name == "kind" or kept[f.name] != _default(f)}


def _default(field: Field[Any]) -> object:
    return field.default_factory() if field.default_factory is not MISSING else field.default
