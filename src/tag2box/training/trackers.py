"""Experiment trackers: TensorBoard, MLflow and Weights & Biases, fed from the events of a run.

During a run every event is passed on as it is written (``tracking``); afterwards ``feed`` reads events.jsonl. What was
passed on is recorded in the run, so that a resumed run continues its curves and nothing is passed on twice.
"""

import json
import math
import os
import re
import secrets
import time
import tomllib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from tag2box import errors, extend, io
from tag2box.training import events

TRACKERS_FILE = "trackers.json"
"""In a run: what each tracker has received."""
PROJECT = "tag2box"
"""Experiment of MLflow and project of Weights & Biases."""
_OTHER = re.compile(r"[^A-Za-z0-9_./-]")  # characters that TensorBoard or MLflow refuse in names


@dataclass(frozen=True)
class TrackedRun:
    """A run as a tracker receives it when it is opened."""

    folder: Path
    name: str
    settings: Mapping[str, str]
    """The settings by key, as ``plan.iterations``."""
    where: str | None = None
    """Folder or address of the tracker's store; None: its default."""
    id: str | None = None
    """The tracker's own name of the run, if it has received a part of it before."""


class Tracker(Protocol):
    """A store of experiments: built from a ``TrackedRun``, then given the values of one event after another."""

    id: str
    """The tracker's own name of the run, with which it is opened again."""
    place: str
    """Where to look, for the user."""

    def log(self, values: Mapping[str, float], step: int, seconds: float) -> None:
        """Add values at an iteration; ``seconds`` (since 1970) is when they were measured."""
        ...

    def close(self) -> None:
        """Pass on what is left, and end."""
        ...


# ---------------------------------------------------------------- the trackers


class TensorBoard:
    """Event files of TensorBoard, in the folder ``tensorboard`` of the run unless another is named."""

    def __init__(self, run: TrackedRun) -> None:
        self.id, self.place = run.name, str(Path(run.where) if run.where else run.folder / "tensorboard")
        own = f".{secrets.token_hex(4)}"  # files are named by the second, and a second one would replace the first
        self._writer = _package("tensorboardX").SummaryWriter(self.place, filename_suffix=own)
        if run.id is None:
            lines = "".join(f"    {key} = {value}\n" for key, value in run.settings.items())
            self._writer.add_text("settings", lines, 0)

    def log(self, values: Mapping[str, float], step: int, seconds: float) -> None:
        """Add scalars."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, walltime=seconds)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


class MlFlow:
    """A run of MLflow: the server of ``where`` or ``MLFLOW_TRACKING_URI``, else the folder ``mlruns``."""

    _BATCH = 100  # parameters per request; MLflow takes no more

    def __init__(self, run: TrackedRun) -> None:
        uri = run.where or os.environ.get("MLFLOW_TRACKING_URI") or "mlruns"
        if "://" not in uri:
            uri = Path(uri).absolute().as_uri()
        if uri.startswith("file:"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # newer versions require it
        self._mlflow = _package("mlflow")
        self._client = self._mlflow.MlflowClient(tracking_uri=uri)
        found = self._client.get_experiment_by_name(PROJECT)
        experiment = found.experiment_id if found else self._client.create_experiment(PROJECT)
        if run.id is None:
            self.id = str(self._client.create_run(experiment, run_name=run.name).info.run_id)
            settings = [self._mlflow.entities.Param(key, value[:500]) for key, value in run.settings.items() if value]
            for first in range(0, len(settings), self._BATCH):
                self._client.log_batch(self.id, params=settings[first : first + self._BATCH])
        else:
            self.id = run.id
            self._client.update_run(self.id, status="RUNNING")
        self.place = f"{uri}, run {self.id}"

    def log(self, values: Mapping[str, float], step: int, seconds: float) -> None:
        """Add metrics."""
        metric = self._mlflow.entities.Metric
        rows = [metric(name, value, int(seconds * 1000), step) for name, value in values.items()]
        for first in range(0, len(rows), self._BATCH):
            self._client.log_batch(self.id, metrics=rows[first : first + self._BATCH])

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self.id)


class WeightsAndBiases:
    """A run of Weights & Biases; ``WANDB_MODE=offline`` keeps it in the folder ``wandb`` of the run or of ``where``."""

    def __init__(self, run: TrackedRun) -> None:
        wandb = _package("wandb")
        folder = Path(run.where) if run.where else run.folder
        io.make_folder(folder)
        self._run = wandb.init(
            project=PROJECT,
            name=run.name,
            config=dict(run.settings),
            dir=str(folder),
            id=run.id,
            resume="allow",
            settings=wandb.Settings(silent=True, console="off"),
        )
        self.id, self.place = str(self._run.id), str(self._run.url or Path(self._run.dir).parent)

    def log(self, values: Mapping[str, float], step: int, seconds: float) -> None:
        """Add a row of the history."""
        self._run.log({**values, "time": seconds}, step=step)

    def close(self) -> None:
        """Pass on what is left."""
        self._run.finish()


def _package(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise errors.UserError(f"{name} is not installed; run `pip install tag2box[tracking]`") from None


# ---------------------------------------------------------------- from events to values


def values_of(event: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of an event by name; empty for events that have none to draw."""
    kind = event["event"]
    if kind == "step":
        losses = {f"loss/{name}": value for name, value in event["losses"].items()}
        return _finite({**losses, "lr": event.get("lr"), "seconds": event.get("seconds")})
    if kind == "pseudo":
        stages = {
            f"pseudo/{name}/stage_{number}": value
            for name in ("boxes_per_class", "threshold")
            for number, value in enumerate(event.get(name) or (), start=1)
        }
        classes = {f"pseudo/class/{name}": value for name, value in event.get("per_class", {}).items()}
        return _finite({**stages, **classes})
    if kind == "round":
        return _finite({"round/agreement": event.get("agreement"), "round/number": event.get("round")})
    if kind == "end":
        return _finite({"end/seconds": event.get("seconds"), "end/peak_memory_mb": event.get("peak_memory_mb")})
    return {}


def metric_values(metrics: object, name: str = "metrics") -> dict[str, float]:
    """The numbers in a metrics.json by their path in it, lists left out."""
    if isinstance(metrics, dict):
        return {key: v for part, value in metrics.items() for key, v in metric_values(value, f"{name}/{part}").items()}
    return _finite({name: metrics})


def _finite(values: Mapping[str, object]) -> dict[str, float]:
    return {
        _OTHER.sub("_", name): float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


# ---------------------------------------------------------------- feeding


@dataclass
class Feed:
    """Passes the events of a run on to a tracker, each once."""

    folder: Path
    kind: str
    where: str | None = None
    sent: dict[str, int] = field(default_factory=dict)  # last iteration of each kind of event
    count: int = 0
    tracker: Tracker | None = None

    def open(self) -> None:
        """Open the tracker, where it was left if it has a part of the run, and pass on what is on disk."""
        known = _read_state(self.folder).get(self.kind, {})
        self.sent = dict(known.get("sent", {}))
        past = list(events.read_events(self.folder)) if (self.folder / events.EVENTS_FILE).exists() else []
        name = next((str(event["name"]) for event in past if "name" in event), self.folder.name)
        run = TrackedRun(self.folder, name, _settings(self.folder), self.where or known.get("where"), known.get("id"))
        self.tracker = extend.find_part("tracker", self.kind)(run)
        self.where = run.where
        for event in past:
            self.take(event)
        self._save()

    def take(self, event: Mapping[str, Any]) -> None:
        """Pass on one event; an iteration that a resumed run repeats was passed on already."""
        kind = str(event["event"])
        try:
            values, iteration = values_of(event), int(event.get("iteration", 0))
        except (AttributeError, KeyError, TypeError, ValueError):
            raise errors.UserError(
                f"{self.folder / events.EVENTS_FILE}: holds an event {errors.printable(kind)} that tag2box did not "
                "write; remove this line"
            ) from None
        if self.tracker is None or not values or iteration <= self.sent.get(kind, -1):
            return
        self.tracker.log(values, iteration, float(event.get("time", time.time())))
        self.sent[kind] = iteration
        self.count += 1

    def take_metrics(self, path: Path) -> None:
        """Pass on the figures of a finished run."""
        iteration = max(self.sent.values(), default=0)
        if self.tracker is None or not path.exists() or iteration <= self.sent.get("metrics", -1):
            return
        self.tracker.log(metric_values(io.read_json(path, "metrics of a run")), iteration, path.stat().st_mtime)
        self.sent["metrics"] = iteration
        self.count += 1

    def close(self) -> None:
        """Close the tracker, and record what it has."""
        if self.tracker is not None:
            self.tracker.close()
            self._save()

    def _save(self) -> None:
        assert self.tracker is not None
        state = {**_read_state(self.folder), self.kind: {"id": self.tracker.id, "where": self.where, "sent": self.sent}}
        io.write_json(self.folder / TRACKERS_FILE, state)


def feed(run: Path, kind: str, where: str | None = None, metrics: Path | None = None) -> Feed:
    """Pass all events of a run on disk to a tracker; returns the closed feed, which says how many and where."""
    passed = Feed(run, kind, where)
    passed.open()
    try:
        if metrics is not None:
            passed.take_metrics(metrics)
    finally:
        passed.close()
    return passed


@contextmanager
def tracking(run: Path, kinds: Sequence[str]) -> Iterator[None]:
    """Pass the events of a run to trackers while the block trains it; a tracker that fails ends, training does not.

    Example:
        with tag2box.tracking(Path("runs/mine"), ["tensorboard"]):
            tag2box.train(config, Path("runs/mine"))
    """
    for kind in kinds:
        extend.find_part("tracker", kind)  # an unknown name is refused before anything is trained
    with ExitStack() as stack:
        for kind in dict.fromkeys(kinds):
            live = _LiveFeed(Feed(run, kind))
            stack.callback(live.guarded, "close")
            stack.enter_context(events.listening(run, live))
        yield


@dataclass
class _LiveFeed:
    """A feed that opens at the first event of a run, and whose failures are warnings."""

    feed: Feed
    has_failed: bool = False

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Pass on an event that was just written."""
        if self.feed.tracker is None:
            self.guarded("open")  # reads this event, too
        self.guarded("take", event)

    def guarded(self, action: str, *arguments: object) -> None:
        """Call a method of the feed unless an earlier call failed."""
        if self.has_failed:
            return
        try:
            getattr(self.feed, action)(*arguments)
        except Exception as error:
            self.has_failed = True
            line = errors.printable(f"{type(error).__name__}: {error}")
            warnings.warn(
                f"{self.feed.kind}: not tracked any more ({line}); training continues, and "
                f"`tag2box track {self.feed.folder} --to {self.feed.kind}` passes on the rest",
                stacklevel=2,
            )


def _read_state(folder: Path) -> dict[str, Any]:
    path = folder / TRACKERS_FILE
    state = io.read_json(path, "what trackers have received") if path.exists() else {}
    if not isinstance(state, dict) or not all(isinstance(part, dict) for part in state.values()):
        raise errors.UserError(f"{path}: damaged; remove it, and everything is passed on again, to new runs")
    return state


def _settings(folder: Path) -> dict[str, str]:
    """The settings of a run by dotted key."""
    path = folder / "config.toml"
    if not path.exists():
        return {}
    try:
        return dict(_flat(tomllib.loads(io.read_text(path, "the settings of a run"))))
    except tomllib.TOMLDecodeError as error:
        raise errors.UserError(f"{path}: not readable as TOML ({error}); restore it") from None


def _flat(table: Mapping[str, object], above: str = "") -> Iterator[tuple[str, str]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value if isinstance(value, str) else json.dumps(value, default=str)
