from __future__ import annotations

import errno
import io
import json
import os
import stat
import zlib
from pathlib import Path

import pytest

from tag2box.errors import UserError
from tag2box.training.events import EVENTS_FILE, EventLog, read_events, verify_events


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
    flushed: list[int] = []
    named: list[int] = []
    fsync = os.fsync

    def watched(handle: int) -> None:
        info = os.fstat(handle)
        (named if stat.S_ISDIR(info.st_mode) else flushed).append(info.st_size)
        fsync(handle)

    log = EventLog(tmp_path / "run")
    monkeypatch.setattr(os, "fsync", watched)
    for count in (1, 2, 3):
        log.write("step", {"iteration": count})
        assert len(list(read_events(tmp_path / "run"))) == count == len(flushed)
        assert flushed[-1] == (tmp_path / "run" / EVENTS_FILE).stat().st_size  # the whole line
        assert len(named) == 1  # the name of the file, once


@pytest.mark.parametrize("fails", ["write", "fsync"])
@pytest.mark.parametrize("before", [0, 2])
def test_on_a_full_disk_nothing_of_an_event_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str, before: int
) -> None:
    log = EventLog(tmp_path)
    for count in range(before):
        log.write("step", {"iteration": count})
    content = (tmp_path / EVENTS_FILE).read_bytes() if before else b""

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    class Small(io.FileIO):
        def write(self, line: bytes) -> int:
            if len(line) > 5:
                return super().write(line[:5])
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        if fails == "write":
            patch.setattr(Path, "open", lambda path, mode, buffering: Small(path, mode))
        else:
            patch.setattr(os, "fsync", full)
        with pytest.raises(UserError, match=f"{EVENTS_FILE}: cannot be written .No space left on device.; free some"):
            log.write("step", {"iteration": 7, "more": "x" * 33})
    assert (tmp_path / EVENTS_FILE).read_bytes() == content
    log.write("step", {"iteration": 8})
    assert [event["iteration"] for event in read_events(tmp_path)] == [*range(before), 8]


LONG_NUMBER = b'{"event": "x", "n": ' + b"9" * 5000 + b"}"


@pytest.mark.parametrize(
    "line", [b"", b"{", b"3", b"null", b"[]", b"{}", b'{"event": 3}', b"\xff", LONG_NUMBER, b"[" * 100_000]
)
def test_a_line_that_is_no_event_is_named(tmp_path: Path, line: bytes) -> None:
    (tmp_path / EVENTS_FILE).write_bytes(b'{"event": "start"}\n' + line + b"\n")
    with pytest.raises(UserError, match=f"{EVENTS_FILE}:2: not an event of training; remove this line"):
        list(read_events(tmp_path))


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


# ---------------------------------------------------------------- checksums


def three_events(folder: Path) -> bytes:
    log = EventLog(folder)
    for count in range(3):
        log.write("step", {"iteration": count, "losses": {"mil": 0.25, "name": 'a "quoted" crc32 \u00e9'}})
    return (folder / EVENTS_FILE).read_bytes()


def test_a_checksum_is_that_of_the_line_without_it(tmp_path: Path) -> None:
    for line in three_events(tmp_path).splitlines():
        event = json.loads(line)
        checksum = event.pop("crc32")
        assert checksum == f"{zlib.crc32(json.dumps(event).encode()):08x}"
    assert verify_events(tmp_path)
    assert all("crc32" not in event for event in read_events(tmp_path))


def test_any_damage_to_a_line_is_noticed(tmp_path: Path) -> None:
    whole = three_events(tmp_path)
    first = whole.index(b"\n") + 1
    last = whole.index(b"\n", first)
    for position in range(first, last):
        for bit in (1, 4, 64):
            damaged = whole[:position] + bytes([whole[position] ^ bit]) + whole[position + 1 :]
            (tmp_path / EVENTS_FILE).write_bytes(damaged)
            with pytest.raises(UserError, match=f"{EVENTS_FILE}:[23]: "):
                list(read_events(tmp_path))


@pytest.mark.parametrize(("lines", "has_all"), [(0, True), (1, False), (3, False)])
def test_lines_of_version_0_1_have_no_checksum_and_are_read(tmp_path: Path, lines: int, has_all: bool) -> None:
    old = "".join(json.dumps({"event": "step", "iteration": i}) + "\n" for i in range(lines))
    (tmp_path / EVENTS_FILE).write_text(old)
    EventLog(tmp_path).write("resume", {"iteration": lines})
    assert [event["iteration"] for event in read_events(tmp_path)] == list(range(lines + 1))
    assert verify_events(tmp_path) is has_all


def test_a_line_without_checksum_after_one_that_has_it_is_damage(tmp_path: Path) -> None:
    with (tmp_path / EVENTS_FILE).open("wb") as file:
        file.write(three_events(tmp_path) + b'{"event": "end"}\n')
    with pytest.raises(UserError, match=f"{EVENTS_FILE}:4: damaged, its checksum is not that of its content"):
        verify_events(tmp_path)


def test_a_torn_last_line_is_no_damage(tmp_path: Path) -> None:
    whole = three_events(tmp_path)
    for cut in range(whole.rindex(b"\n", 0, -1) + 1, len(whole)):
        (tmp_path / EVENTS_FILE).write_bytes(whole[:cut])
        assert verify_events(tmp_path)
        assert len(list(read_events(tmp_path))) == 2
