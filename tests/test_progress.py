"""Progress: a bar on a terminal, plain lines at sensible intervals elsewhere, nothing by default."""

from __future__ import annotations

import io
from collections.abc import Sequence

import pytest
from rich.console import Console

from tag2box.progress import Progress, TerminalProgress, silent


def watched(terminal: bool, total: int, done: int, notes: list[str]) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=160, color_system=None, _environ={"TERM": "xterm"})
    progress: Progress = TerminalProgress(console)
    with progress("training", total, done) as bar:
        for note in notes:
            bar.advance(note)
    return out.getvalue()


def timed(total: int, done: int, seconds: Sequence[float], title: str = "training") -> list[str]:
    """The plain lines of work whose items take these seconds."""
    out, now = io.StringIO(), [1000.0]
    console = Console(file=out, force_terminal=False, width=20, color_system=None)
    with TerminalProgress(console, clock=lambda: now[0])(title, total, done) as bar:
        for second in seconds:
            now[0] += second
            bar.advance(f"loss {second}" if second == 31 else "")
    return out.getvalue().splitlines()


# ---------------------------------------------------------------- without a terminal


@pytest.mark.parametrize(("total", "done", "notes"), [(0, 0, []), (3, 0, ["a", "b"]), (9, 4, [""])])
def test_short_work_prints_one_plain_line(total: int, done: int, notes: list[str]) -> None:
    assert watched(False, total, done, notes) == f"training ({total - done} to do)\n"


def test_plain_lines_come_after_the_first_items_and_at_steps_of_a_tenth_with_rate_and_time_left() -> None:
    assert timed(100, 0, [4.0] * 100) == [
        "training (100 to do)",
        *(f"training: {n}/100 ({n}%), 0.25/s, {_clock(400 - 4 * n)} left" for n in range(5, 100, 10)),
        "training: 100/100 (100%), 0.25/s, took 0:06:40",
    ]


def _clock(seconds: int) -> str:
    return f"0:{seconds // 60:02}:{seconds % 60:02}"


def test_plain_lines_are_at_least_thirty_seconds_apart() -> None:
    assert timed(10, 0, [7.0] * 10) == [
        "training (10 to do)",
        "training: 5/10 (50%), 0.14/s, 0:00:35 left",
        "training: 10/10 (100%), 0.14/s, took 0:01:10",
    ]


@pytest.mark.parametrize(
    ("seconds", "items"),
    [
        (0.5, [10]),  # the first item after 5 seconds
        (1.0, [5]),
        (0.1, []),  # 10 seconds in all: not worth a line
    ],
)
def test_the_time_that_long_work_takes_is_told_early(seconds: float, items: list[int]) -> None:
    assert timed(100, 0, [seconds] * 20) == [
        "training (100 to do)",
        *(f"training: {n}/100 ({n}%), {1 / seconds:.2f}/s, {_clock(round(seconds * (100 - n)))} left" for n in items),
    ]


def test_slow_work_prints_a_line_every_five_minutes() -> None:
    assert timed(1000, 0, [100.0] * 7) == [
        "training (1000 to do)",
        "training: 3/1000 (0%), 0.01/s, 27:41:40 left",
        "training: 6/1000 (1%), 0.01/s, 27:36:40 left",
        "training: 7/1000 (1%), 0.01/s, 27:35:00 left",  # where it ended
    ]


def test_items_finished_before_count_in_the_share_and_not_in_the_rate() -> None:
    assert timed(20, 10, [30.0, 31.0]) == [
        "training (10 to do)",
        "training: 12/20 (60%), 0.03/s, 0:04:04 left, loss 31.0",
    ]


def test_a_plain_line_is_neither_wrapped_nor_read_as_markup() -> None:
    assert timed(1, 0, [40.0], title="[bold]a long title that fills the line") == [
        "[bold]a long title that fills the line (1 to do)",
        "[bold]a long title that fills the line: 1/1 (100%), 0.03/s, took 0:00:40",
    ]


# ---------------------------------------------------------------- on a terminal


def test_on_a_terminal_there_are_counts_speed_and_the_last_note() -> None:
    text = watched(True, 5, 2, ["loss 0.9", "loss 0.1"])
    last = text[text.rindex("training") :]
    assert "4/5" in last
    assert "/s" in last
    assert "loss 0.1" in last
    assert "to do" not in text


def test_finished_work_and_work_of_no_items_draw_a_bar() -> None:
    assert "3/3" in watched(True, 3, 3, [])
    assert "0/0" in watched(True, 0, 0, [])


def test_an_error_inside_passes_through() -> None:
    with pytest.raises(RuntimeError, match="inside"), TerminalProgress(Console(file=io.StringIO()))("training", 3):
        raise RuntimeError("inside")


def test_silent_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    progress: Progress = silent
    with progress("training", 3, 1) as bar:
        bar.advance()
        bar.advance("loss 1")
    captured = capsys.readouterr()
    assert captured.out + captured.err == ""


def test_bars_are_drawn_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    with TerminalProgress()("training", 2) as bar:
        bar.advance()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "training (2 to do)" in captured.err


@pytest.mark.parametrize("name", ["[red]x[/red]", "[/]", ":smile:", "{task.total}"])
@pytest.mark.parametrize("terminal", [True, False])
def test_names_in_titles_and_notes_are_shown_as_they_are(name: str, terminal: bool) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=160, color_system=None, _environ={"TERM": "xterm"})
    with TerminalProgress(console)(f"photos of {name}", 2) as bar:
        bar.advance(f"note {name}")
    assert f"photos of {name}" in out.getvalue()
    assert not terminal or f"note {name}" in out.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_a_title_cannot_command_the_terminal(terminal: bool) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=160, color_system=None, _environ={"TERM": "xterm"})
    with TerminalProgress(console)("a\x1b]0;b\x07\nc", 1) as bar:
        bar.advance("d\x1b[2J")
    assert r"a\x1b]0;b\x07 c" in out.getvalue()
    assert "\x1b]" not in out.getvalue() and "\x1b[2J" not in out.getvalue()
