"""The run grid of a study: settings x dataset x seed, each trained and measured once, in a queue that can be resumed.

A run's folder is named by a digest of everything its figures depend on. Several commands may share a folder: each
takes runs that no other command has locked, and reads the results of all.
"""

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import MISSING, Field, asdict, dataclass, fields, is_dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import mean
from typing import Any

from tag2box import errors, identity, io, recipes, runs, settings
from tag2box.cli import evaluate, train
from tag2box.cli.label import label
from tag2box.cli.student import resume_student, train_student
from tag2box.experiments import outcomes, study_data
from tag2box.formats.detection_files import read_detections
from tag2box.labels.label_set import is_label_set
from tag2box.metrics.challenges import challenges
from tag2box.progress import Bar, Progress, silent
from tag2box.reporting import formatting as fmt, records, study_tables
from tag2box.student.student_training import StudentConfig
from tag2box.training.events import EVENTS_FILE, read_events

GRID_FORMAT = 1
"""Increase if the same settings would give other figures: older runs are then trained again."""

QUALITY_FILE = "quality.json"
OUTCOMES_FILE = "outcomes.json"
RUN_LOCK = "cell.lock"
LABELS_FOLDER = "labels"
"""In the run folder of a student: the labels that it learned from."""
OUTCOMES = "outcomes"
"""Key of the outcomes at equal numbers of boxes among a result's figures."""

QUEUE_PAUSE = 1.0  # seconds between two checks of runs that other commands have locked


@dataclass(frozen=True)
class GridRun:
    """One run of a study; ``config`` has its seed, but no paths."""

    config: recipes.Config
    data: study_data.StudyData
    student: StudentConfig | None = None
    """Settings of a student that is trained on the labels of the run; its figures are then those of the run."""

    @property
    def teacher(self) -> "GridRun":
        """The run whose labels a student learns from."""
        return replace(self, student=None)

    @cached_property
    def name(self) -> str:
        """A digest of settings and dataset, independent of names and paths.

        Settings at their defaults are left out, so that a setting added later changes no name; whether a folder's
        settings are the requested ones is checked when it is read.
        """
        parts = {
            "format": GRID_FORMAT,
            "data": self.data.fingerprint,
            "boxes": self.data.stores_digest(self.config),
            "settings": _non_default(identity.pathless(self.config)),
        }
        if self.student is not None:
            nameless = replace(self.student, name=StudentConfig().name, labels=None, photos=None)
            parts["student"] = _non_default(nameless)
        text = json.dumps(parts, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class RunResult:
    """A finished run and its figures, as fractions."""

    folder: Path
    figures: Mapping[str, Any]  # metrics.json, with "pseudo" (label quality) and "cost" (time and memory)
    moments: tuple[study_tables.LabelQuality, ...] = ()

    def figure(self, path: tuple[str, ...]) -> float | None:
        """One figure by its path, as ("test", "voc12", "mAP"); None if it is not known."""
        value: Any = self.figures
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        return float(value) if isinstance(value, int | float) else None

    def uses(self) -> str:
        """The boxes or masks that the proposal method was trained on; empty for most."""
        log = read_events(self.folder) if (self.folder / EVENTS_FILE).exists() else iter(())
        start: Mapping[str, object] = next(log, {})
        return str(start.get("uses") or "")

    def record(self, data: study_data.StudyData | None = None, *, name: str = "") -> records.RunRecord:
        """The contents of the run folder; with its dataset, including its detections."""
        found = None if data is None else read_detections(self.folder / evaluate.DETECTIONS_FILE, data.test)
        record = records.read_run(self.folder, test_detections=found)
        return replace(record, name=name or record.name)


# ---------------------------------------------------------------- one run


def is_finished(run: GridRun, grid: Path) -> bool:
    """Whether a run's figures are in the folder ``grid``."""
    return all((grid / run.name / file).exists() for file in (evaluate.METRICS_FILE, QUALITY_FILE))


def is_taken(run: GridRun, grid: Path) -> bool:
    """Whether another process has locked a run."""
    return io.is_locked(grid / run.name / RUN_LOCK)


def finish_run(run: GridRun, grid: Path, *, progress: Progress = silent) -> RunResult:
    """Train a run or resume it, measure it, and return its figures. Finished parts are not repeated.

    Raises ``Busy`` if another process has locked it.
    """
    folder = grid / run.name
    config = runs.with_paths(run.data.placed(run.config), folder)
    if run.student is None:
        _check_same(config, folder)
    elif not is_finished(run, grid):
        finish_run(run.teacher, grid, progress=progress)
    if not is_finished(run, grid):
        with io.locked(folder / RUN_LOCK, "finishes a run"):
            if run.student is None:
                _finish_run(config, folder, run.data, progress)
            else:
                _finish_student(run.student, config, folder, grid / run.teacher.name, run.data, progress)
    elif evaluate.lacks_figures(folder):
        with io.locked(folder / RUN_LOCK, "finishes a run"):
            _measure(config, folder, run.data, progress)
    return read_result(folder)


def _measure(config: recipes.Config, folder: Path, data: study_data.StudyData, progress: Progress) -> None:
    """Evaluate a run beside trivial rows; a run without class maps gets those of a probe of the frozen features."""
    if config.adaptation.epochs and not isinstance(runs.read_any_config(folder), StudentConfig):
        test, train = data.test_set(config), data.train_set(config)
    else:
        test, train = (data.with_probe(config, split, progress) for split in ("test", "train"))
    evaluate.measure_run(folder, test=test, train=train, progress=progress)


def _finish_run(config: recipes.Config, folder: Path, data: study_data.StudyData, progress: Progress) -> None:
    _train(config, folder, progress)
    _measure(config, folder, data, progress)
    quality = outcomes.label_quality(records.read_run(folder), data.train)
    io.write_json(folder / QUALITY_FILE, outcomes.quality_json(quality))


def _finish_student(
    student: StudentConfig,
    config: recipes.Config,
    folder: Path,
    teacher: Path,
    data: study_data.StudyData,
    progress: Progress,
) -> None:
    """Label the training photos with a finished run, and train and measure a student on these labels."""
    labels = (folder / LABELS_FOLDER).absolute()
    if not is_label_set(labels):
        label(teacher, config.data.source(), labels, proposals=data.train_set(config).proposals, progress=progress)
    reset_peak_memory()
    if runs.has_run(folder):
        resume_student(folder, progress=progress)
    else:
        train_student(labels, folder, config=replace(student, labels=labels), progress=progress)
    _measure(config, folder, data, progress)
    io.write_json(folder / QUALITY_FILE, [])  # a student has no pseudo labels that change in training


def _train(config: recipes.Config, folder: Path, progress: Progress) -> None:
    reset_peak_memory()
    if runs.has_run(folder) and not (folder / EVENTS_FILE).exists():
        (folder / runs.CONFIG_FILE).unlink(missing_ok=True)  # killed before training started
    if not runs.has_run(folder):
        train.train(config, folder, progress=progress)
        return
    io.write_text(folder / runs.CONFIG_FILE, settings.dump(config))  # the dataset may have moved
    train.resume(folder, progress=progress)


def reset_peak_memory() -> None:
    """Reset the peak memory of the process, so that a run does not report that of the run before it (Linux only)."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _check_same(config: recipes.Config, folder: Path) -> None:
    """Raise if a folder has a run with other settings, e.g. because a default has changed."""
    if not (folder / runs.CONFIG_FILE).exists():
        return
    before, after = (identity.pathless(c) for c in (runs.read_config(folder), config))
    if before != after:
        name = next(f.name for f in fields(recipes.Config) if getattr(before, f.name) != getattr(after, f.name))
        raise errors.UserError(
            f"{folder / runs.CONFIG_FILE}: {name} is not the requested setting; remove the folder to train it again"
        )


def read_result(folder: Path) -> RunResult:
    """The figures of a finished run."""
    metrics = io.read_json(folder / evaluate.METRICS_FILE, "the metrics of a run")
    quality = io.read_json(folder / QUALITY_FILE, "the quality of a run's pseudo labels")
    if not isinstance(metrics, dict) or not isinstance(quality, list):
        raise errors.UserError(
            f"{folder}: {evaluate.METRICS_FILE} or {QUALITY_FILE} was not written by a study; remove the folder"
        )
    ends = [event for event in read_events(folder) if event["event"] == "end"]
    figures = {**metrics, "pseudo": quality[-1] if quality else {}, "cost": _cost(ends[-1]) if ends else {}}
    return RunResult(folder, figures, outcomes.read_quality(quality, folder / QUALITY_FILE))


def _cost(end: Mapping[str, Any]) -> dict[str, Any]:
    seconds, iterations = end.get("seconds"), end.get("iteration")
    per_step = seconds / iterations if seconds is not None and iterations else None
    return {
        "seconds": seconds,
        "iterations": iterations,
        "step_seconds": per_step,
        "peak_memory_mb": end.get("peak_memory_mb"),
    }


def with_outcomes(result: RunResult, data: study_data.StudyData) -> RunResult:
    """A result with the shares of objects found, in part, grouped and missed, at equal numbers of boxes.

    They are stored in the run folder. (Those in ``metrics.json`` are of boxes above a score, and scores of different
    systems are not comparable.)
    """
    path = result.folder / OUTCOMES_FILE
    if not path.exists():
        found = result.record(data).test_detections or {}
        io.write_json(path, asdict(challenges(data.test, outcomes.best_of(found, data.test), min_score=0.0)))
    shares = io.read_json(path, "the outcomes of a run's objects")
    return replace(result, figures={**result.figures, OUTCOMES: shares})


# ---------------------------------------------------------------- what a run depends on


def _non_default(value: object) -> object:
    """Settings as JSON values, without those at their defaults."""
    if isinstance(value, tuple):
        return [_non_default(v) for v in value]
    if not is_dataclass(value) or isinstance(value, type):
        return value
    kept = {f.name: getattr(value, f.name) for f in fields(value)}
    return {
        f.name: _non_default(kept[f.name]) for f in fields(value) if f.name == "kind" or kept[f.name] != _default(f)
    }


def _default(field: Field[Any]) -> object:
    return field.default_factory() if field.default_factory is not MISSING else field.default


# ---------------------------------------------------------------- the queue


def finish_all(grid_runs: Sequence[GridRun], grid: Path, *, progress: Progress = silent) -> dict[str, RunResult]:
    """Results by run name, one after the other; equal runs are run once. Interrupted, the same call resumes."""
    queue = {run.name: run for run in grid_runs}
    open_ = _open(queue, grid)
    results: dict[str, RunResult] = {}
    spent: list[float] = []
    while left := [name for name in queue if name not in results]:
        for name in left:
            ahead, began = _open(queue, grid), time.monotonic()
            status = queue_status(open_, name, len(ahead), spent)
            with suppress(errors.Busy), _interruptible(status):
                results[name] = finish_run(queue[name], grid, progress=_titled(progress, status))
                if name in ahead:
                    spent.append(time.monotonic() - began)
        others = [queue[name] for name in left if name not in results]
        if others:
            _wait(others, grid, progress)
    return {name: results[name] for name in queue}


def _open(queue: Mapping[str, GridRun], grid: Path) -> list[str]:
    return [name for name, run in queue.items() if not is_finished(run, grid)]


def queue_status(open_: Sequence[str], name: str, ahead: int, spent: Sequence[float]) -> str:
    """The position in the queue, in words; time left for ``ahead`` runs is estimated from those this call finished.

    The first of them often makes what the others share, proposals and feature caches: it is left out of the estimate
    if there is another.
    """
    if name not in open_:
        return "a finished run"
    words = f"run {open_.index(name) + 1} of {len(open_)}"
    if not spent:
        return words
    return f"{words}, about {fmt.duration(ahead * mean(spent[1:] or spent))} left"


def _wait(grid_runs: Sequence[GridRun], grid: Path, progress: Progress) -> None:
    """Wait until a run is unlocked or finished."""
    status = "waiting for another command"
    with _interruptible(status), progress(f"{status}, runs left: {len(grid_runs)}", 1):
        time.sleep(QUEUE_PAUSE)
        while all(is_taken(run, grid) for run in grid_runs):
            time.sleep(QUEUE_PAUSE)


@contextmanager
def _interruptible(status: str) -> Iterator[None]:
    """Name the position in the queue if Ctrl-C ends the block."""
    try:
        yield
    except (errors.Interrupted, KeyboardInterrupt):
        raise errors.Interrupted(f"stopped in {status}; finished work is kept, and the same command resumes") from None


def _titled(progress: Progress, status: str) -> Progress:
    """Progress bars with the position in the queue in their titles."""

    @contextmanager
    def bars(title: str, total: int, done: int = 0) -> Iterator[Bar]:
        with progress(f"{status}: {title}", total, done) as bar:
            yield bar

    return bars
