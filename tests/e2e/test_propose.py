"""``tag2box propose`` as a user types it; killed at random moments, it still makes the store of an undisturbed run."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest
import torch

from tag2box.annotations import Photo
from tag2box.cli import main
from tag2box.proposals.store import ProposalStore
from tiny import tiny_photos
from tiny_world import COMMAND, Finished, call, environment, small_data, small_network

FLAGS = ["--short-side", "0", "--min-side", "4", "--max-boxes", "30"]
PHOTOS = 60

Propose = Callable[..., Finished]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photos that are there for all tests, and changed by none."""
    base = tmp_path_factory.mktemp("propose")
    tiny_photos(base, PHOTOS)
    return base / "photos"


@pytest.fixture
def propose(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Propose:
    def run(data: Path, out: Path, *more: str) -> Finished:
        return call(_argv(data, out, *more), monkeypatch, capsys)

    return run


def _argv(data: Path, out: Path, *more: str) -> list[str]:
    workers = () if "--workers" in more else ("--workers", "1")
    return ["propose", f"{data}", "--out", f"{out}", *FLAGS, *workers, *more]


def _content(path: Path) -> dict[str, bytes]:
    return {str(f.relative_to(path)): f.read_bytes() for f in path.rglob("*") if f.is_file()}


# ---------------------------------------------------------------- messages


def test_photos_become_a_store_and_the_next_command_is_printed(folder: Path, tmp_path: Path, propose: Propose) -> None:
    done = propose(folder, tmp_path / "s")
    assert done.code == 0 and all(line.startswith("warning: few proposals") for line in done.complaints)
    store = ProposalStore.open(tmp_path / "s")
    boxes = sum(len(store.boxes(name)) for name in store.sizes)
    first, where, hint = done.out.splitlines()
    assert first.startswith(f"selective search: 60 photos, {boxes:,} boxes, {boxes / 60:,.0f} per photo (")
    assert where == f"store: {tmp_path / 's'}"
    assert hint == f"next: tag2box detect RUN {folder} --proposals {tmp_path / 's'} --draw drawn"
    assert store.source == {
        "kind": "selective_search", "short_side": None, "max_boxes": 30, "min_side": 4, "mode": "fast", "seed": 0,
        "engine": "tag2box",
    }  # fmt: skip


def test_a_dataset_with_tags_is_trained_next(folder: Path, tmp_path: Path, propose: Propose) -> None:
    tags = tmp_path / "my tags.csv"
    tags.write_text("image,tags\nphoto3.jpg,disc\nphoto1.jpg,box\n")
    done = propose(tags, tmp_path / "s", "--photos", f"{folder}", "--classes", "disc,box", "--method", "edge_boxes")
    assert done.code == 0 and [*ProposalStore.open(tmp_path / "s").sizes] == ["photo3", "photo1"]
    assert done.out.startswith("edge boxes: 2 photos, ")
    words = shlex.split(done.out.splitlines()[-1].removeprefix("next: "))
    assert words == ["tag2box", "train", f"{tags}", "--photos", f"{folder}", "--classes", "disc,box", "--proposals",
                     f"{tmp_path / 's'}", "--out", "runs/mine"]  # fmt: skip


def test_options_and_overrides_reach_the_method(folder: Path, tmp_path: Path, propose: Propose) -> None:
    split = tmp_path / "list.txt"
    split.write_text("photo1\nphoto2\n")
    argv = (folder, tmp_path / "s", "--split", f"{split}", "--method", "edge_boxes", "--set", "beta=0.6")
    assert propose(*argv).code == 0
    source = ProposalStore.open(tmp_path / "s").source
    assert (source["kind"], source["beta"], source["short_side"], source["min_side"]) == ("edge_boxes", 0.6, None, 4)


def test_photos_that_fail_are_named_and_skipped_and_tried_again(tmp_path: Path, propose: Propose) -> None:
    photos: tuple[Photo, ...] = tiny_photos(tmp_path, 5).photos
    whole = photos[1].path.read_bytes()
    photos[1].path.write_bytes(whole[:-200])  # its header is whole
    photos[2].path.write_bytes(b"")
    photos[3].path.write_bytes(b"no photo")
    for _ in range(2):
        done = propose(tmp_path / "photos", tmp_path / "s")
        assert done.code == 1 and "left out: 3, listed below" in done.out.splitlines()
        assert len(done.complaints) == 3 and "Traceback" not in done.err
        for name in ("photo1.jpg: not readable", "photo2.jpg: the file is empty", "photo3.jpg: not readable"):
            assert any(line.startswith("left out: ") and name in line for line in done.complaints)
        assert [*ProposalStore.open(tmp_path / "s").sizes] == ["photo0", "photo4"]
    for photo in photos[1:4]:
        photo.path.write_bytes(whole)
    done = propose(tmp_path / "photos", tmp_path / "s")
    assert done.code == 0 and [*ProposalStore.open(tmp_path / "s").sizes] == [f"photo{i}" for i in range(5)]


MISTAKES: dict[str, tuple[list[str], str]] = {
    "a mode of another method": (["--method", "edge_boxes", "--mode", "fast"], "--mode: no setting of edge_boxes"),
    "a model of another method": (["--edge-model", "m.yml"], "--edge-model: no setting of selective_search"),
    "a model that is not there": (
        ["--method", "edge_boxes", "--edge-model", "none.yml.gz"], "none.yml.gz: not readable"
    ),
    "an unknown method": (["--method", "edgeboxes"], "--method edgeboxes: must be "),
    "a method that is not installed": (["--method", "my_boxes:Grid"], '--method my_boxes:Grid: "my_boxes:Grid" cannot'),
    "a class that is no method": (["--method", "tag2box.recipes:Config"], "expected a subclass of tag2box.proposals"),
    "too small a copy": (["--short-side", "10"], "--short-side 10: expected 32 or more, or 0 for full size"),
    "an unknown setting": (["--set", "sed=3"], "--set sed=3: unknown key sed; did you mean seed?"),
    "a setting out of bounds": (["--set", "seed=-1"], "--set seed=-1: must be greater than or equal to 0"),
}  # fmt: skip


@pytest.mark.parametrize(("more", "says"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line_and_nothing_is_written(
    folder: Path, tmp_path: Path, propose: Propose, more: list[str], says: str
) -> None:
    done = propose(folder, tmp_path / "s", *more)
    assert done.code == 2 and len(done.complaints) == 1 and says in done.complaints[0]
    assert not (tmp_path / "s").exists()


def test_no_photo_and_other_settings_are_reported(folder: Path, tmp_path: Path, propose: Propose) -> None:
    (tmp_path / "none").mkdir()
    assert propose(tmp_path / "none", tmp_path / "s").code == 2
    assert propose(tmp_path / "nowhere", tmp_path / "s").code == 2
    assert not (tmp_path / "s").exists()
    split = tmp_path / "list.txt"
    split.write_text("photo1\n")
    assert propose(folder, tmp_path / "s", "--split", f"{split}").code == 0
    done = propose(folder, tmp_path / "s", "--max-boxes", "31")
    assert done.code == 2 and "made with max_boxes 30, not 31; remove it, or name another folder" in done.err


# ---------------------------------------------------------------- the store of another dataset, a damaged store


SHORT = ["heads.embed_dim=6", "loader.batch_size=2", "loader.resize.scales=[48]", "inference.scales=[48]",
         "plan.iterations=2", "plan.checkpoint_every=2", "plan.gallery=0", "plan.schedule.warmup=1"]  # fmt: skip


def _train(folder: Path, store: Path, out: Path) -> list[str]:
    settings = [word for setting in SHORT for word in ("--set", setting)]
    tags = ["train", f"{folder / 'tags.csv'}", "--photos", f"{folder / 'photos'}"]
    return [*tags, "--proposals", f"{store}", "--out", f"{out}", *settings]


def test_train_and_detect_write_only_into_stores_of_their_photos(
    tmp_path: Path, propose: Propose, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small_network(monkeypatch)
    small_data(tmp_path)
    for number, photo in enumerate(tiny_photos(tmp_path / "other", 3).photos):
        photo.path.rename(photo.path.with_name(f"fruit{number}.jpg"))
    fruit, store, run = tmp_path / "other" / "photos", tmp_path / "s", tmp_path / "run"
    assert propose(fruit, store).code == 0
    before = _content(store)
    done = call(_train(tmp_path, store, run), monkeypatch, capsys)
    assert done.code == 2 and len(done.complaints) == 1 and not run.exists()
    assert f"{store}: holds proposals of 3 other photos and of none of these 4; name another store" in done.err
    assert call(_train(tmp_path, tmp_path / "own", run), monkeypatch, capsys).code == 0
    detect = ["detect", f"{run}", f"{tmp_path / 'photos'}", "--out", f"{tmp_path / 'd.json'}", "--proposals"]
    assert call([*detect, f"{tmp_path / 'own'}"], monkeypatch, capsys).code == 0
    own = _content(tmp_path / "own")
    done = call([*detect[:2], f"{fruit}", *detect[3:], f"{tmp_path / 'own'}"], monkeypatch, capsys)
    assert done.code == 2 and "holds proposals of 4 other photos and of none of these 3" in done.err
    assert _content(tmp_path / "own") == own and _content(store) == before
    assert propose(tmp_path / "photos", store).code == 0  # asked for it
    assert len(ProposalStore.open(store)) == 7


@pytest.mark.parametrize("file", ["index.json", "boxes.npy", "scores.npy"])
def test_a_damaged_store_is_one_line(tmp_path: Path, propose: Propose, file: str) -> None:
    tiny_photos(tmp_path, 2)
    assert propose(tmp_path / "photos", tmp_path / "s").code == 0
    path = tmp_path / "s" / file
    whole = path.read_bytes()
    path.write_bytes(whole[:90] + bytes([whole[90] ^ 8]) + whole[91:])  # in the padding of an array's header
    done = propose(tmp_path / "photos", tmp_path / "s")
    assert done.code == 2 and len(done.complaints) == 1 and f"{path}: " in done.complaints[0]
    assert "Traceback" not in done.err and "make the proposals again" in done.complaints[0]


# ---------------------------------------------------------------- killed


NURSERY = multiprocessing.get_context("forkserver")
NURSERY.set_forkserver_preload(["tag2box.cli", "tag2box.cli.propose"])  # spares every process seconds of imports


def _run(argv: list[str]) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    sys.argv = ["tag2box", *argv]
    main()


def _started(folder: Path, out: Path) -> ForkServerProcess:
    process = NURSERY.Process(target=_run, args=(_argv(folder, out),))
    process.start()
    return process


def _run_until(argv: list[str], write: int, is_before: bool) -> None:
    """The command, ended by SIGKILL before or after it puts a file into place for the n-th time."""
    put, writes = Path.replace, itertools.count()

    def replace(self: Path, target: Path) -> Path:
        is_last = next(writes) == write
        if is_last and is_before:
            os.kill(os.getpid(), signal.SIGKILL)
        moved = put(self, target)
        if is_last:
            os.kill(os.getpid(), signal.SIGKILL)
        return moved

    Path.replace = replace  # type: ignore[assignment, method-assign]
    _run(argv)


@pytest.fixture(scope="module")
def undisturbed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed") / "s"
    process = _started(folder, out)
    process.join()
    assert process.exitcode == 0
    return out


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300  # only a hang takes that long
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_killed_at_random_writes_the_same_command_resumes(
    folder: Path, tmp_path: Path, undisturbed: Path, propose: Propose, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, targets = Path.replace, []

    def counted(self: Path, target: Path) -> Path:
        targets.append(target)
        return put(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", counted)
        assert propose(folder, tmp_path / "counted").code == 0
    moments = random.Random(7)
    for number in range(8):
        out = tmp_path / f"{number}"
        write, is_before = moments.randrange(len(targets)), moments.random() < 0.5
        process = NURSERY.Process(target=_run_until, args=(_argv(folder, out), write, is_before))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert propose(folder, out).code == 0
        assert _content(out) == _content(undisturbed)


def _alive(group: int) -> bool:
    """Whether any process of a group is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("parts", [1, 3])
def test_killed_with_several_workers_none_stays_behind(
    folder: Path, tmp_path: Path, undisturbed: Path, propose: Propose, parts: int
) -> None:
    out = tmp_path / "s"
    command = [*COMMAND, *_argv(folder, out, "--workers", "2")]
    running = subprocess.Popen(
        command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    _wait_for(lambda: len([*out.glob("parts/*.npz")]) >= parts or running.poll() is not None)
    running.kill()
    running.wait()
    _wait_for(lambda: not _alive(running.pid))
    assert propose(folder, out).code == 0
    assert _content(out) == _content(undisturbed)


def test_ctrl_c_ends_it_with_a_line_and_the_same_command_resumes(
    folder: Path, tmp_path: Path, undisturbed: Path, propose: Propose
) -> None:
    out = tmp_path / "s"
    command = [*COMMAND, *_argv(folder, out, "--workers", "2")]
    running = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True, start_new_session=True)
    _wait_for(lambda: (out / "parts").exists() or running.poll() is not None)
    os.killpg(running.pid, signal.SIGINT)  # as a terminal does: all processes get it
    _, err = running.communicate(timeout=300)
    _wait_for(lambda: not _alive(running.pid))
    assert running.returncode == 130 and "Traceback" not in err
    assert "of 60 photos are done; rerun the same command to resume" in err.splitlines()[-1]
    assert not ProposalStore.exists(out)
    assert propose(folder, out).code == 0
    assert _content(out) == _content(undisturbed)


def test_the_store_of_many_workers_is_that_of_one(undisturbed: Path) -> None:
    """The workers' stores above are compared with this one, which is not empty."""
    store = ProposalStore.open(undisturbed)
    assert len(store) == PHOTOS and not store.failed
    assert all(len(store.boxes(name)) > 1 for name in store.sizes)
    assert torch.cat([store.boxes(name) for name in store.sizes]).isfinite().all()
    assert json.loads((undisturbed / "index.json").read_text())["generation"] == 1
