from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tag2box.training.events import EVENTS_FILE, EventLog, read_events


def test_events_are_read_in_the_order_they_were_written(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "run")
    log.write("step", {"iteration": 1, "losses": {"mil": 0.5}})
    log.write("pseudo", {"threshold": [None, 0.25], "per_class": {"café": 1.0}})
    first, second = read_events(tmp_path / "run")
    assert first["event"] == "step"
    assert first["losses"] == {"mil": 0.5}
    assert second["per_class"] == {"café": 1.0}
    assert isinstance(first["time"], float)
    assert isinstance(second["time"], float)
    assert first["time"] <= second["time"]


def test_a_run_that_wrote_nothing_has_no_events(tmp_path: Path) -> None:
    EventLog(tmp_path)
    assert not (tmp_path / EVENTS_FILE).exists()
    (tmp_path / EVENTS_FILE).touch()
    EventLog(tmp_path)
    assert list(read_events(tmp_path)) == []


def test_each_event_is_on_disk_before_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (flushed.append(os.fstat(handle).st_size), fsync(handle)))
    log = EventLog(tmp_path)
    for count in (1, 2, 3):
        log.write("step", {"iteration": count})
        assert len(list(read_events(tmp_path))) == count == len(flushed)
        assert flushed[-1] == (tmp_path / EVENTS_FILE).stat().st_size  # the whole line


def test_a_log_opened_again_is_continued(tmp_path: Path) -> None:
    EventLog(tmp_path).write("step", {"iteration": 1})
    EventLog(tmp_path).write("resume", {"iteration": 1})
    assert [event["event"] for event in read_events(tmp_path)] == ["step", "resume"]


@pytest.mark.parametrize("kept", [0, 1, 2])
@pytest.mark.parametrize("half", ['{"eve', "{", '{"event": "step", "time": 1.0}', "é"])
def test_half_a_line_is_no_event_and_is_cut_before_the_next(tmp_path: Path, kept: int, half: str) -> None:
    whole = "".join(json.dumps({"event": "step", "iteration": i}) + "\n" for i in range(kept))
    (tmp_path / EVENTS_FILE).write_text(whole + half, encoding="utf-8")
    assert [event["iteration"] for event in read_events(tmp_path)] == list(range(kept))
    log = EventLog(tmp_path)
    assert (tmp_path / EVENTS_FILE).read_text(encoding="utf-8") == whole
    log.write("step", {"iteration": kept})
    assert [event["iteration"] for event in read_events(tmp_path)] == list(range(kept + 1))


def test_half_a_letter_is_cut_too(tmp_path: Path) -> None:
    (tmp_path / EVENTS_FILE).write_bytes(b'{"event": "step"}\n{"x": "' + "é".encode()[:1])
    EventLog(tmp_path).write("end", {})
    assert [event["event"] for event in read_events(tmp_path)] == ["step", "end"]


def test_nan_is_refused_and_leaves_no_trace(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    log.write("step", {"iteration": 1})
    with pytest.raises(ValueError, match="JSON"):
        log.write("step", {"loss": float("nan")})
    assert len(list(read_events(tmp_path))) == 1
