"""docs/adding-a-proposal-method.md, end to end: its code proposes, trains, resumes, detects and imports."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pages import DOCS, blocks, load
from tag2box.cli.train import resume, train
from tag2box.errors import Interrupted
from tag2box.extend import load_part
from tag2box.progress import Bar, Progress
from tag2box.proposals.base import method_from_source
from tag2box.proposals.store import ProposalStore
from tag2box.run_inputs import match_store_method
from tag2box.runs import read_config
from tiny_world import Finished, call, same, small_config, small_data, small_network, weights

GUIDE = DOCS / "adding-a-proposal-method.md"
GRID = "my_proposals:Grid"

Run = Callable[..., Finished]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The files of the guide, on Python's path, beside a tiny dataset."""
    code = {name: text for text in blocks(GUIDE, "python") for name in _file_of(text)}
    assert sorted(code) == ["my_format.py", "my_proposals.py", "my_script.py"]
    for name, text in code.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    small_data(tmp_path)
    yield tmp_path
    load_part.cache_clear()
    for name in code:
        sys.modules.pop(name.removesuffix(".py"), None)


def _file_of(text: str) -> list[str]:
    names = {"class Grid(": "my_proposals.py", "TEXT = ": "my_format.py", "def main(": "my_script.py"}
    return [name for mark, name in names.items() if mark in text]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def type_(*argv: object) -> Finished:
        done = call([f"{word}" for word in argv], monkeypatch, capsys)
        assert done.code == 0, done.err
        return done

    return type_


def test_its_method_proposes_and_the_store_can_be_completed_later(folder: Path, run: Run) -> None:
    words = ["propose", "photos", "--method", GRID, "--set", "step=0.25", "--min-side", "4", "--out", "s"]
    assert "4 photos" in run(*words).out
    store = ProposalStore.open(folder / "s")
    assert store.ranked and store.source["kind"] == GRID and store.source["sizes"] == [0.25, 0.5, 0.75]
    assert method_from_source(store.source) == load_part(GRID)(step=0.25, min_side=4, short_side=200)
    small_data(folder, 6)
    run(*words, "--workers", "2")  # other processes import the class by its name
    assert len(ProposalStore.open(folder / "s")) == 6


def test_its_method_trains_resumes_and_proposes_for_new_photos_in_detect(
    folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_network(monkeypatch)
    config = small_config(folder, f"proposals.kind={GRID}", "proposals.step=0.25")
    train(config, folder / "whole")
    with pytest.raises(Interrupted):
        train(config, folder / "run", progress=ctrl_c_after(3))
    resume(folder / "run")
    assert same(weights(folder / "whole"), weights(folder / "run"))
    assert read_config(folder / "run").proposals == config.proposals
    (folder / "new").mkdir()
    for photo in sorted((folder / "photos").iterdir())[:2]:
        (folder / "new" / f"new-{photo.name}").write_bytes(photo.read_bytes())
    run("detect", "run", "new", "--out", "boxes.json", "--min-score", "0", "--proposals", "new-boxes")
    assert ProposalStore.open(folder / "new-boxes").source == ProposalStore.open(folder / "run" / "proposals").source
    assert (folder / "boxes.json").stat().st_size > 100


def ctrl_c_after(iterations: int) -> Progress:
    @contextmanager
    def progress(title: str, total: int, done: int = 0) -> Iterator[Bar]:
        yield Pressing(iterations if title == "training" else -1)

    return progress


class Pressing:
    """Presses Ctrl-C after some items."""

    def __init__(self, left: int) -> None:
        self.left = left

    def advance(self, note: str = "") -> None:
        self.left -= 1
        if self.left == 0:
            signal.raise_signal(signal.SIGINT)


def test_a_run_with_a_store_of_its_method_detects_with_the_method(
    folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_network(monkeypatch)
    run("propose", "photos", "--method", GRID, "--min-side", "6", "--max-boxes", "12", "--out", "s")
    config = match_store_method(small_config(folder, f"data.proposals={folder / 's'}"), folder / "s")
    train(config, folder / "run")
    assert read_config(folder / "run").proposals.source()["kind"] == GRID
    run("detect", "run", "photos", "--out", "boxes.json", "--min-score", "0", "--proposals", "again")
    assert ProposalStore.open(folder / "again").source["kind"] == GRID


def test_its_script_builds_a_store(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load(folder / "my_script.py").main(folder / "tags.csv", folder / "photos", folder / "s")
    assert len(capsys.readouterr().out.splitlines()) == len(ProposalStore.open(folder / "s")) == 4


def test_its_file_format_is_imported(folder: Path, run: Run) -> None:
    names = sorted(photo.stem for photo in (folder / "photos").iterdir())
    (folder / "boxes.txt").write_text("".join(f"{name} 1 2 {9 + i} 12\n" for i, name in enumerate(names)))
    out = run("proposals", "import", "boxes.txt", "photos", "--format", "my_format:TEXT", "--out", "imported").out
    assert "read as my_format:TEXT: boxes xyxy, first pixel 0, last pixel excluded" in out
    store = ProposalStore.open(folder / "imported")
    assert store.source["format"] == "my_format:TEXT"
    assert [store.boxes(name).tolist() for name in names] == [[[1, 2, 9 + i, 12]] for i in range(len(names))]
