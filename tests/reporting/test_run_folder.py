"""Reading run folders: whole, partial, truncated, resumed, damaged."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tag2box.errors import UserError
from tag2box.reporting.records import read_run


def written(folder: Path, *lines: object) -> Path:
    folder.mkdir(exist_ok=True)
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    (folder / "events.jsonl").write_text(text)
    return folder


def step(iteration: int, total: float) -> dict[str, object]:
    return {"event": "step", "time": 1.0, "iteration": iteration, "losses": {"total": total}, "lr": 0.1, "seconds": 0.2}


def test_an_empty_folder_is_a_run_without_parts(tmp_path: Path) -> None:
    run = read_run(tmp_path)
    assert run.name == tmp_path.name
    assert (run.steps, run.pseudo, run.galleries, run.end, run.config) == ((), (), (), None, None)
    assert (run.metrics.ap, run.metrics.corloc, run.metrics.challenges) == (None, None, None)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere"):
        read_run(tmp_path / "nowhere")


def test_every_event_lands_in_its_place(tmp_path: Path) -> None:
    photo = {"id": 12, "boxes": [[1, 2, 3, 4]], "labels": [0], "scores": [0.5]}
    run = read_run(
        written(
            tmp_path,
            {"event": "start", "time": 0, "name": "X", "classes": ["a"], "machine": {"cores": 2}, "novelty": [1]},
            step(1, 2.0),
            {"event": "pseudo", "iteration": 1, "boxes_per_class": [1.5], "threshold": None, "per_class": {"a": 1.5}},
            {"event": "gallery", "iteration": 1, "photos": [photo]},
            {"event": "unknown kind", "iteration": 1},
            {"event": "end", "iteration": 1, "seconds": 3.5, "peak_memory_mb": 10},
        )
    )
    assert run.name == "X"
    assert run.start.machine == {"cores": "2"}
    assert run.steps[0].losses == {"total": 2.0}
    assert run.pseudo[0].threshold == ()
    assert run.galleries[0].photos[0].id == "12"
    assert run.end is not None
    assert run.end.seconds == 3.5


def test_a_resume_drops_what_was_repeated(tmp_path: Path) -> None:
    end = {"event": "end", "iteration": 3, "seconds": 1.0}
    lines = (step(1, 1.0), step(2, 2.0), step(3, 3.0), end, {"event": "resume", "iteration": 1}, step(2, 20.0))
    run = read_run(written(tmp_path, *lines))
    assert [(s.iteration, s.losses["total"]) for s in run.steps] == [(1, 1.0), (2, 20.0)]
    assert (run.resumed_at, run.end) == ((1,), None)


def test_the_later_of_two_lines_wins_without_a_resume_too(tmp_path: Path) -> None:
    run = read_run(written(tmp_path, step(1, 1.0), step(1, 5.0)))
    assert [s.losses["total"] for s in run.steps] == [5.0]


def test_a_last_line_cut_short_is_left_out(tmp_path: Path) -> None:
    run = read_run(written(tmp_path, step(1, 1.0), '{"event": "st'))
    assert len(run.steps) == 1


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ("{not json", "not a JSON event"),
        ([1, 2], '"event" name'),
        ({"time": 1}, '"event" name'),
        ({"event": "step", "iteration": "many"}, "iteration"),
        ({"event": "step", "iteration": -1}, "iteration"),
        ({"event": "step", "iteration": 10**4000}, "iteration"),
        ('{"event": "step", "iteration": ' + "9" * 9000 + "}", "not a JSON event"),
        ("[" * 100_000, "not a JSON event"),
        ('{"event": ' * 100_000, "not a JSON event"),
        ({"event": "step", "iteration": 1, "losses": {str(i): 1.0 for i in range(201)}}, "more than 200 different"),
        ({"event": "gallery", "iteration": 1, "photos": [{"id": "a", "boxes": [[1, 2, 3, 4]]}]}, "differ in length"),
    ],
)
def test_a_damaged_line_is_named_with_its_number(tmp_path: Path, bad: object, words: str) -> None:
    with pytest.raises(UserError) as caught:
        read_run(written(tmp_path, step(1, 1.0), bad, step(2, 1.0)))
    assert "events.jsonl:2: " in str(caught.value)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_hostile_last_lines_are_no_half_written_events(tmp_path: Path) -> None:
    for line in ("[" * 100_000, '{"event": "step", "iteration": ' + "9" * 9000 + "}"):
        with pytest.raises(UserError, match=r"events\.jsonl:2: not a JSON event"):
            read_run(written(tmp_path, step(1, 1.0), line))


def test_names_of_files_that_are_not_utf8_can_be_shown(tmp_path: Path) -> None:
    photo = {"id": "caf\udce9", "boxes": [], "labels": [], "scores": []}
    run = read_run(written(tmp_path, {"event": "gallery", "iteration": 1, "photos": [photo]}))
    assert run.galleries[0].photos[0].id == "caf?"


def test_a_pipe_in_place_of_the_events_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "events.jsonl")
    with pytest.raises(UserError, match=r"events\.jsonl: not readable \(a device or a pipe"):
        read_run(tmp_path)


def test_metrics_may_be_partial_and_nested(tmp_path: Path) -> None:
    figures = {"test": {"voc12": {"mAP": 0.4, "per_class": {"a": None}}, "coco": {"AP": 0.1, "per_class": {"a": 1}}}}
    (tmp_path / "metrics.json").write_text(json.dumps(figures))
    metrics = read_run(tmp_path).metrics
    assert metrics.ap is not None
    assert (metrics.ap.mean, metrics.ap.per_class) == (0.4, {"a": None})
    assert metrics.test is not None
    assert metrics.test.coco == {"AP": 0.1}
    assert metrics.corloc is None


@pytest.mark.parametrize("text", ["", "[]", '{"test": 3}', '{"truth_boxes_per_class": "two"}'])
def test_broken_metrics_are_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "metrics.json").write_text(text)
    with pytest.raises(UserError, match=r"metrics\.json"):
        read_run(tmp_path)
