from __future__ import annotations

import io

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


@pytest.mark.parametrize(("total", "done", "notes"), [(0, 0, []), (3, 0, ["a", "b"]), (9, 4, [""])])
def test_where_nobody_watches_there_is_one_plain_line(total: int, done: int, notes: list[str]) -> None:
    assert watched(False, total, done, notes) == f"training ({total - done} to do)\n"


def test_on_a_terminal_there_are_counts_speed_and_the_last_note() -> None:
    text = watched(True, 5, 2, ["loss 0.9", "loss 0.1"])
    last = text[text.rindex("training") :]
    assert "4/5" in last
    assert "/s" in last
    assert "loss 0.1" in last
    assert "to do" not in text


def test_work_that_was_all_done_and_work_of_no_items_draw_a_bar() -> None:
    assert "3/3" in watched(True, 3, 3, [])
    assert "0/0" in watched(True, 0, 0, [])


def test_an_error_inside_passes_through() -> None:
    with pytest.raises(RuntimeError, match="inside"), TerminalProgress(Console(file=io.StringIO()))("training", 3):
        raise RuntimeError("inside")


def test_silence_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
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
