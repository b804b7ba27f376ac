"""Trackers receive every event once, during a run and afterwards: stores of real packages are read back."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import pytest

import tag2box
from tag2box.cli.report import track
from tag2box.cli.train import resume, train
from tag2box.errors import Interrupted, UserError
from tag2box.training import events, trackers
from tag2box.training.trackers import metric_values, tracking, values_of
from tiny_world import call, small_config, small_data, small_network, stopping_at


class Memory:
    """A tracker of one's own: what it receives, by the name of the run."""

    told: list[tuple[str, int, dict[str, float]]] = []  # noqa: RUF012
    opened: list[tag2box.TrackedRun] = []  # noqa: RUF012
    fails = False

    def __init__(self, run: tag2box.TrackedRun) -> None:
        self.id, self.place = run.id or "first", "memory"
        self.opened.append(run)

    def log(self, values: dict[str, float], step: int, seconds: float) -> None:
        if self.fails:
            raise ConnectionError("the server is gone")
        self.told.append((next(iter(values)), step, values))

    def close(self) -> None:
        self.told.append(("closed", 0, {}))


OWN = f"{__name__}:Memory"


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> type[Memory]:
    monkeypatch.setattr(Memory, "told", [])
    monkeypatch.setattr(Memory, "opened", [])
    return Memory


def log_run(folder: Path) -> Path:
    log = events.EventLog(folder)
    (folder / "config.toml").write_text('name = "x"\n[plan]\niterations = 2\nscales = [1, 2]\n')
    log.write("start", {"name": "OD-WSCL", "classes": ["a"]})
    for iteration in (1, 2):
        log.write(
            "step", {"iteration": iteration, "losses": {"mil": 0.5 / iteration, "total": 1.0}, "lr": 0.1, "seconds": 3}
        )
        log.write("pseudo", {"iteration": iteration, "boxes_per_class": [1.5, None], "threshold": [None, None],
                             "per_class": {"a b": 2.0}})  # fmt: skip
    log.write("end", {"iteration": 2, "seconds": 6.0, "peak_memory_mb": None})
    return folder


# ---------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("event", "wanted"),
    [
        ({"event": "start", "name": "x"}, {}),
        ({"event": "step", "losses": {}}, {}),
        ({"event": "step", "losses": {"mil": 1, "x:y": float("nan")}, "lr": 0.1}, {"loss/mil": 1.0, "lr": 0.1}),
        ({"event": "pseudo", "boxes_per_class": [1.0, None], "threshold": [None], "per_class": {"t-shirt, red": 2}},
         {"pseudo/boxes_per_class/stage_1": 1.0, "pseudo/class/t-shirt__red": 2.0}),
        ({"event": "round", "round": 2, "agreement": 0.5}, {"round/number": 2.0, "round/agreement": 0.5}),
        ({"event": "end", "seconds": 9.0, "peak_memory_mb": None}, {"end/seconds": 9.0}),
        ({"event": "gallery", "photos": []}, {}),
    ],
)  # fmt: skip
def test_the_numbers_of_an_event_have_names(event, wanted):
    assert values_of(event) == wanted


@pytest.mark.parametrize(
    ("metrics", "wanted"),
    [({}, {}), ({"test": {"voc07": {"mean": 0.5, "ok": True, "curve": [1]}}}, {"metrics/test/voc07/mean": 0.5})],
)
def test_the_numbers_of_metrics_have_their_path(metrics, wanted):
    assert metric_values(metrics) == wanted


# ---------------------------------------------------------------- real stores


def read_tensorboard(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Scalars in the event files of TensorBoard, whose records are a length, a checksum, a message and a checksum."""
    from tensorboardX.proto import event_pb2

    found: dict[str, list[tuple[int, float]]] = {}
    for path in sorted(folder.glob("events.out.tfevents.*")):
        content = path.read_bytes()
        while content:
            size = struct.unpack("<Q", content[:8])[0]
            event = event_pb2.Event.FromString(content[12 : 12 + size])
            content = content[16 + size :]
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return found


def test_tensorboard_files_hold_the_curves(tmp_path: Path) -> None:
    run = log_run(tmp_path / "run")
    assert track(run, "tensorboard").count == 5
    found = read_tensorboard(run / "tensorboard")
    assert found["loss/mil"] == [(1, 0.5), (2, 0.25)]
    assert found["pseudo/class/a_b"] == [(1, 2.0), (2, 2.0)]
    assert found["end/seconds"] == [(2, 6.0)]
    assert track(run, "tensorboard").count == 0  # nothing twice
    assert read_tensorboard(run / "tensorboard") == found


def test_an_mlflow_store_holds_settings_curves_and_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    import mlflow

    run, where = log_run(tmp_path / "run"), str(tmp_path / "store")
    track(run, "mlflow", where=where)
    (run / "metrics.json").write_text(json.dumps({"test": {"voc07": {"mean": 0.5}}}))
    passed = track(run, "mlflow")  # where it was before
    assert passed.count == 1
    client = mlflow.MlflowClient(tracking_uri=Path(where).as_uri())
    (kept,) = client.search_runs([client.get_experiment_by_name("tag2box").experiment_id])
    assert kept.info.status == "FINISHED" and kept.info.run_name == "OD-WSCL"
    assert kept.data.params == {"name": "x", "plan.iterations": "2", "plan.scales": "[1, 2]"}
    assert kept.data.metrics["metrics/test/voc07/mean"] == 0.5
    history = client.get_metric_history(kept.info.run_id, "loss/mil")
    assert [(row.step, row.value) for row in history] == [(1, 0.5), (2, 0.25)]
    times = [event["time"] for event in events.read_events(run) if event["event"] == "step"]
    assert [row.timestamp for row in history] == [int(time * 1000) for time in times]


@pytest.mark.slow
def logged_bytes(file: Path) -> bytes:
    """The records of a .wandb file, a LevelDB log: a record is split wherever a block of 32 KB ends."""
    content, at, parts = file.read_bytes(), 7, []  # after the header of the file
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:  # too little room for a header: filled with zeros
            at += 32768 - at % 32768
            continue
        size = int.from_bytes(content[at + 4 : at + 6], "little")
        parts.append(content[at + 7 : at + 7 + size])
        at += 7 + size
    return b"".join(parts)


def test_weights_and_biases_keeps_an_offline_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "wandb"))
    run = log_run(tmp_path / "run")
    passed = track(run, "wandb")
    assert passed.count == 5 and passed.tracker is not None
    (file,) = run.glob("wandb/offline-run-*/run-*.wandb")
    content = logged_bytes(file)
    assert all(name in content for name in (b"loss/mil", b"pseudo/class/a_b", b"end/seconds", b"plan.iterations"))
    assert json.loads((run / "trackers.json").read_text())["wandb"]["id"] == passed.tracker.id


# ---------------------------------------------------------------- during a run


def test_a_run_that_is_stopped_and_resumed_has_one_curve_in_its_tracker(tmp_path, monkeypatch, alone, memory) -> None:
    small_network(monkeypatch)
    small_data(tmp_path)
    config = small_config(tmp_path, "plan.iterations=4", "plan.log_every=1", "plan.checkpoint_every=4")
    run = tmp_path / "run"
    with pytest.raises(Interrupted), tracking(run, [OWN]):
        train(config, run, progress=stopping_at(2))
    with tracking(run, [OWN]):
        resume(run)
    steps = [step for name, step, _ in memory.told if name.startswith("loss/")]
    assert steps == [1, 2, 3, 4]
    logged = [event for event in events.read_events(run) if event["event"] == "step"]
    assert [values for name, _, values in memory.told if name.startswith("loss/")] == [values_of(e) for e in logged]
    assert [opened.id for opened in memory.opened] == [None, "first"]
    assert memory.opened[0].settings["plan.iterations"] == "4"
    assert sum(name == "closed" for name, *_ in memory.told) == 2


def test_iterations_that_are_repeated_after_a_crash_are_passed_on_once(tmp_path: Path, memory) -> None:
    log = events.EventLog(tmp_path)
    with tracking(tmp_path, [OWN]):
        for iteration in (1, 2, 3, 2, 3, 4):  # from a checkpoint at 1
            log.write("step", {"iteration": iteration, "losses": {"total": 1.0}})
    log.write("step", {"iteration": 5, "losses": {"total": 1.0}})  # not tracked
    assert [step for _, step, _ in memory.told] == [1, 2, 3, 4, 0]


def test_training_continues_without_its_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory) -> None:
    monkeypatch.setattr(memory, "fails", True)
    log = events.EventLog(tmp_path)
    with (
        pytest.warns(UserWarning, match="not tracked any more .*the server is gone") as told,
        tracking(tmp_path, [OWN]),
    ):
        for iteration in (1, 2):
            log.write("step", {"iteration": iteration, "losses": {"total": 1.0}})
    assert len(told) == 1 and len(list(events.read_events(tmp_path))) == 2
    monkeypatch.setattr(memory, "fails", False)
    assert track(tmp_path, OWN).count == 2  # the rest, afterwards


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["track", "none", "--to", "mlflow"], "none: no events.jsonl here; expected the folder of a run"),
        (["track", "run", "--to", "mlfow"], "did you mean mlflow?"),
        (["train", "x.csv", "--out", "new", "--track", "tensorbord"], "did you mean tensorboard?"),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(tmp_path, monkeypatch, capsys, argv, said) -> None:
    log_run(tmp_path / "run")
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path)
    done = call(argv, monkeypatch, capsys)
    assert done.code == 2 and said in done.err and done.err.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("kind", ["tensorboard", "mlflow", "wandb"])
def test_a_missing_package_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    for name in ("tensorboardX", "mlflow", "wandb"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=r"pip install tag2box\[tracking\]"):
        track(log_run(tmp_path), kind)


@pytest.mark.parametrize(
    "fields", [{}, {"losses": 1}, {"losses": {}, "iteration": "x"}, {"losses": {}, "iteration": []}]
)
def test_an_event_of_another_program_is_refused(tmp_path: Path, memory, fields: dict[str, object]) -> None:
    events.EventLog(tmp_path).write("step", fields)
    with pytest.raises(UserError, match="an event step that tag2box did not write"):
        track(tmp_path, OWN)


def test_a_damaged_record_says_what_to_do(tmp_path: Path) -> None:
    (log_run(tmp_path) / trackers.TRACKERS_FILE).write_text("[]")
    with pytest.raises(UserError, match="remove it"):
        track(tmp_path, OWN)


def test_the_command_says_where_to_look(tmp_path, monkeypatch, capsys) -> None:
    done = call(["track", str(log_run(tmp_path)), "--to", "tensorboard"], monkeypatch, capsys)
    assert done.code == 0 and f"5 events passed on to tensorboard: {tmp_path / 'tensorboard'}" in done.out + done.err
