from __future__ import annotations

import errno
import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch.optim import Optimizer

from tag2box import io, storage
from tag2box.errors import UserError
from tag2box.models.detector import Detector, Heads
from tag2box.training import checkpoint
from tag2box.training.optim import Adam, Sgd, set_lr
from tiny import TinyBackbone, tiny_detector
from tiny_world import sign_again

CLASSES = ("disc", "box")


def learn(detector: Detector, optimizer: Optimizer, steps: range) -> None:
    """A few steps on made-up vectors, the same for the same numbers."""
    for step in steps:
        vector = torch.randn(4, TinyBackbone.vector_size, generator=torch.Generator().manual_seed(step))
        scores = detector.score(vector)
        set_lr(optimizer, 0.01)
        optimizer.zero_grad()
        torch.stack([x.pow(2).mean() for x in (*scores.refine, *scores.deltas, scores.mil_cls)]).sum().backward()
        optimizer.step()


def save(run: Path, detector: Detector, optimizer: Optimizer, iteration: int, keep: int = checkpoint.KEEP) -> None:
    checkpoint.save(run, detector, optimizer, iteration=iteration, classes=CLASSES, seconds=1.5, keep=keep)


def saved_run(run: Path, settings: Sgd | Adam | None = None, iteration: int = 3, keep: int = checkpoint.KEEP) -> Path:
    detector = tiny_detector(2)
    optimizer = (settings or Sgd()).build(detector)
    learn(detector, optimizer, range(3))
    save(run, detector, optimizer, iteration, keep)
    return run


def folders(run: Path) -> list[str]:
    return sorted(path.name for path in run.iterdir() if path.is_dir())


def one_line(error: pytest.ExceptionInfo[UserError], *words: str) -> bool:
    text = str(error.value)
    return "\n" not in text and all(word in text for word in words)


@pytest.mark.parametrize("settings", [Sgd(), Sgd(momentum=0.0), Adam()])
def test_a_resumed_run_continues_as_the_unbroken_one(tmp_path: Path, settings: Sgd | Adam) -> None:
    unbroken = tiny_detector(2)
    optimizer = settings.build(unbroken)
    learn(unbroken, optimizer, range(3))
    save(tmp_path, unbroken, optimizer, 3)
    learn(unbroken, optimizer, range(3, 6))

    resumed = tiny_detector(2, seed=9)
    again = settings.build(resumed)
    state = checkpoint.read_state(tmp_path)
    checkpoint.load_model(tmp_path, state, resumed)
    checkpoint.load_optimizer(tmp_path, state, again)
    learn(resumed, again, range(3, 6))
    for name, value in unbroken.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


def test_momentum_matters_to_that(tmp_path: Path) -> None:
    run = saved_run(tmp_path)
    stored = load_file(run / "checkpoint-000003" / checkpoint.OPTIMIZER)
    learned = {name for name in stored if stored[name].any()}
    assert learned
    assert all(name.endswith(".momentum_buffer") for name in stored)


def test_the_state_file_describes_the_model(tmp_path: Path) -> None:
    assert not checkpoint.has_checkpoint(tmp_path)
    saved_run(tmp_path)
    assert checkpoint.has_checkpoint(tmp_path)
    state = checkpoint.read_state(tmp_path)
    assert (state.iteration, state.folder, state.classes, state.seconds) == (3, "checkpoint-000003", CLASSES, 1.5)
    assert state.preprocess == json.loads(json.dumps(asdict(TinyBackbone.preprocess)))
    with safe_open(tmp_path / state.folder / checkpoint.MODEL, framework="pt") as file:
        assert json.loads(file.metadata()["classes"]) == list(CLASSES)


def test_before_the_first_step_there_is_no_optimizer_state(tmp_path: Path) -> None:
    detector = tiny_detector(2)
    save(tmp_path, detector, Sgd().build(detector), 0)
    fresh = Sgd().build(tiny_detector(2))
    checkpoint.load_optimizer(tmp_path, checkpoint.read_state(tmp_path), fresh)
    assert not fresh.state


@pytest.mark.parametrize(("keep", "kept"), [(1, [10]), (2, [2, 10]), (3, [1, 2, 10]), (9, [1, 2, 10])])
def test_the_last_checkpoints_are_kept(tmp_path: Path, keep: int, kept: list[int]) -> None:
    for iteration in (1, 2, 10):
        saved_run(tmp_path, iteration=iteration, keep=keep)
    assert folders(tmp_path) == [f"checkpoint-{iteration:06d}" for iteration in kept]
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == {checkpoint.STATE}
    assert checkpoint.read_state(tmp_path).iteration == 10


def test_files_have_the_permissions_of_the_umask(tmp_path: Path) -> None:
    saved_run(tmp_path)
    (tmp_path / "probe").touch()
    modes = {path.stat().st_mode for path in tmp_path.rglob("*") if path.is_file()}
    assert modes == {(tmp_path / "probe").stat().st_mode}


def test_saving_the_same_iteration_again_replaces_it(tmp_path: Path) -> None:
    saved_run(tmp_path)
    detector = tiny_detector(2, seed=4)
    save(tmp_path, detector, Sgd().build(detector), 3)
    read = tiny_detector(2)
    checkpoint.load_model(tmp_path, checkpoint.read_state(tmp_path), read)
    assert torch.equal(read.mil.cls.weight, detector.mil.cls.weight)


def test_saving_the_same_iteration_again_never_leaves_the_run_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_run(tmp_path, keep=1)
    for name in ("checkpoint-000003-1", "checkpoint-000003"):
        before, rename, seen = checkpoint.read_state(tmp_path), Path.rename, []

        def watched(self: Path, target: Path, before=before, rename=rename, seen=seen) -> Path:
            seen.append((tmp_path / before.folder).is_dir())
            return rename(self, target)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", watched)
            saved_run(tmp_path, keep=1)
        assert all(seen) and len(seen) == 2  # the new one appears, the old one is removed
        assert checkpoint.read_state(tmp_path).folder == name
        assert folders(tmp_path) == [name]


def test_tensors_are_on_disk_and_verified_before_the_state_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    sync, verify, write_json = io.sync, storage.verify_folder, storage.write_checked_json

    def written(path: Path, value: dict[str, object]) -> None:
        done.append(f"write {path.parent.name}/{path.name}")
        write_json(path, value)

    monkeypatch.setattr(io, "sync", lambda path: (done.append(f"sync {path.name}"), sync(path)))
    monkeypatch.setattr(storage, "verify_folder", lambda path, remedy: (done.append("verify"), verify(path, remedy)))
    monkeypatch.setattr(storage, "write_checked_json", written)
    saved_run(tmp_path, iteration=3)
    before = done[: done.index(f"write {tmp_path.name}/{checkpoint.STATE}")]
    assert before[-2:] == [f"sync {tmp_path.name}", "verify"]  # the rename of the folder
    assert {f"sync {name}" for name in (checkpoint.MODEL, checkpoint.OPTIMIZER, checkpoint.STATE)} <= set(before)
    assert f"sync {storage.MANIFEST}" in before


def test_the_old_checkpoint_stays_until_the_new_one_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved_run(tmp_path, iteration=1)
    seen: list[list[str]] = []
    write_json = storage.write_checked_json

    def broken(path: Path, value: dict[str, object]) -> None:
        if path != tmp_path / checkpoint.STATE:
            return write_json(path, value)
        seen.append(folders(tmp_path))
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(storage, "write_checked_json", broken)
    with pytest.raises(UserError) as error:
        saved_run(tmp_path, iteration=2, keep=1)
    assert one_line(error, "checkpoint-000002: cannot be written (No space left on device)", "--resume")
    assert one_line(error, "the last good checkpoint is checkpoint-000001")
    assert seen == [["checkpoint-000001", "checkpoint-000002"]]
    assert folders(tmp_path) == ["checkpoint-000001"]  # what filled the disk is gone
    load_both(tmp_path, checkpoint.read_state(tmp_path))


@pytest.mark.parametrize("error", [SafetensorError("I/O error: No space left on device"), OSError(28, "No space left")])
@pytest.mark.parametrize("file", [0, 1])
def test_a_full_disk_leaves_the_old_checkpoint_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, file: int
) -> None:
    saved_run(tmp_path, iteration=1)
    before, calls, real = sorted(tmp_path.rglob("*")), [], checkpoint.save_file

    def full(tensors: object, path: Path, metadata: object) -> None:
        calls.append(path)
        if len(calls) > file:
            path.write_bytes(b"half a file")
            raise error
        real(tensors, path, metadata)

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(UserError) as caught:
        saved_run(tmp_path, iteration=2)
    assert one_line(caught, "checkpoint-000002", "No space left", "the last good checkpoint is checkpoint-000001")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_checkpoint_that_is_read_back_differently_does_not_replace_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_run(tmp_path, iteration=1, keep=1)
    write = storage.write_manifest

    def faulty(folder: Path) -> str:
        digest = write(folder)
        flip(folder / checkpoint.MODEL, 100)
        return digest

    monkeypatch.setattr(storage, "write_manifest", faulty)
    with pytest.raises(UserError) as error:
        saved_run(tmp_path, iteration=2, keep=1)
    assert one_line(error, checkpoint.MODEL, "damaged", "the last good checkpoint is checkpoint-000001")
    assert folders(tmp_path) == ["checkpoint-000001"]
    load_both(tmp_path, checkpoint.read_state(tmp_path))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("settings", [Sgd(), Adam()])
def test_numbers_that_are_not_finite_are_never_saved(tmp_path: Path, value: float, settings: Sgd | Adam) -> None:
    saved_run(tmp_path, iteration=1)
    before = sorted(tmp_path.rglob("*"))
    for spoil in ("weight", "optimizer"):
        detector = tiny_detector(2)
        optimizer = settings.build(detector)
        learn(detector, optimizer, range(1))
        tensors = (
            [detector.mil.cls.weight] if spoil == "weight" else list(optimizer.state[detector.mil.cls.weight].values())
        )
        with torch.no_grad():
            tensors[-1].view(-1)[0] = value
        with pytest.raises(UserError) as error:
            save(tmp_path, detector, optimizer, 2)
        name = "mil.cls.weight" if spoil == "weight" else checkpoint.OPTIMIZER
        assert one_line(error, name, "not finite after iteration 2", "lower plan.optimizer.lr", "checkpoint-000001")
        assert sorted(tmp_path.rglob("*")) == before


def test_a_save_that_breaks_off_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved_run(tmp_path, iteration=1)
    before = sorted(tmp_path.rglob("*"))

    def broken(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "save_file", broken)
    with pytest.raises(KeyboardInterrupt):
        saved_run(tmp_path, iteration=2)
    assert sorted(tmp_path.rglob("*")) == before
    load_both(tmp_path, checkpoint.read_state(tmp_path))


# ---------------------------------------------------------------- damage


def flip(path: Path, position: int, bit: int = 0) -> None:
    """Flip one bit of a file; a negative position counts from its end."""
    content = bytearray(path.read_bytes())
    content[position % len(content)] ^= 1 << bit
    path.write_bytes(content)


FILES = (checkpoint.MODEL, checkpoint.OPTIMIZER, checkpoint.STATE, storage.MANIFEST)


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_run(tmp_path_factory.mktemp("run"))


@pytest.mark.parametrize("name", [*FILES, f"../{checkpoint.STATE}"])
@given(position=st.integers(min_value=0, max_value=10**6), bit=st.integers(min_value=0, max_value=7))
def test_a_flipped_bit_is_refused_by_name(intact: Path, name: str, position: int, bit: int) -> None:
    path = (intact / "checkpoint-000003" / name).resolve()
    whole = path.read_bytes()
    flip(path, position, bit)
    try:
        if path.parent == intact and json_or_none(path.read_bytes()) == json.loads(whole):
            return  # 1e-05 and 1E-05 are the same number
        with pytest.raises(UserError) as error:
            load_both(intact, checkpoint.read_state(intact))
        assert one_line(error, str(path), "remove")
    finally:
        path.write_bytes(whole)


def json_or_none(content: bytes) -> object:
    try:
        return json.loads(content)
    except ValueError:
        return None


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["flipped", "cut", "missing"])
def test_the_way_back_to_the_checkpoint_before_is_named_and_works(tmp_path: Path, name: str, damage: str) -> None:
    for iteration in (1, 2):
        saved_run(tmp_path, iteration=iteration)
    folder = tmp_path / "checkpoint-000002"
    if damage == "flipped":
        flip(folder / name, 20)
    elif damage == "cut":
        (folder / name).write_bytes((folder / name).read_bytes()[:-1])
    else:
        (folder / name).unlink()
    with pytest.raises(UserError) as error:
        load_both(tmp_path, checkpoint.read_state(tmp_path))
    assert one_line(
        error, f"{folder / name}: ", f"or remove {folder}: then checkpoint-000001, which is intact, is used"
    )
    shutil.rmtree(folder)
    with pytest.warns(UserWarning, match="checkpoint-000002, the last checkpoint, is gone; checkpoint-000001 is used"):
        state = checkpoint.read_state(tmp_path)
    assert state.iteration == 1
    load_both(tmp_path, state)
    saved_run(tmp_path, iteration=2)
    assert checkpoint.read_state(tmp_path).folder == "checkpoint-000002"


def test_a_damaged_checkpoint_is_not_the_way_back(tmp_path: Path) -> None:
    for iteration in (1, 2, 3):
        saved_run(tmp_path, iteration=iteration, keep=3)
    flip(tmp_path / "checkpoint-000003" / checkpoint.MODEL, 50)
    flip(tmp_path / "checkpoint-000002" / checkpoint.OPTIMIZER, 50)
    with pytest.raises(UserError, match="then checkpoint-000001, which is intact, is used"):
        load_both(tmp_path, checkpoint.read_state(tmp_path))
    flip(tmp_path / "checkpoint-000001" / checkpoint.MODEL, 50)
    with pytest.raises(UserError, match="or remove the run folder and train again"):
        load_both(tmp_path, checkpoint.read_state(tmp_path))


def test_without_its_state_file_a_run_has_the_newest_intact_checkpoint(tmp_path: Path) -> None:
    for iteration in (1, 2):
        saved_run(tmp_path, iteration=iteration)
    (tmp_path / checkpoint.STATE).unlink()
    assert checkpoint.has_checkpoint(tmp_path)
    assert checkpoint.read_state(tmp_path).iteration == 2
    flip(tmp_path / "checkpoint-000002" / checkpoint.MODEL, 50)
    assert checkpoint.read_state(tmp_path).iteration == 1
    (tmp_path / "checkpoint-000001" / storage.MANIFEST).unlink()
    assert not checkpoint.has_checkpoint(tmp_path)


def test_a_folder_that_was_never_named_is_replaced(tmp_path: Path) -> None:
    """The process was killed between the rename of the folder and the state file."""
    saved_run(tmp_path, iteration=1)
    state = (tmp_path / checkpoint.STATE).read_bytes()
    saved_run(tmp_path, iteration=2)
    (tmp_path / checkpoint.STATE).write_bytes(state)
    assert checkpoint.read_state(tmp_path).iteration == 1
    saved_run(tmp_path, iteration=2)
    assert checkpoint.read_state(tmp_path).folder == "checkpoint-000002"
    assert folders(tmp_path) == ["checkpoint-000001", "checkpoint-000002"]


def test_a_run_of_an_older_version_is_read_unverified(tmp_path: Path) -> None:
    saved_run(tmp_path)
    for name in (checkpoint.STATE, storage.MANIFEST):
        (tmp_path / "checkpoint-000003" / name).unlink()
    state = json.loads((tmp_path / checkpoint.STATE).read_text())
    old = {k: v for k, v in state.items() if k not in {"format", "manifest", "sha256"}}
    (tmp_path / checkpoint.STATE).write_text(json.dumps(old))
    load_both(tmp_path, checkpoint.read_state(tmp_path))
    saved_run(tmp_path, iteration=4)  # and is continued
    assert folders(tmp_path) == ["checkpoint-000003", "checkpoint-000004"]


@pytest.mark.parametrize("name", [checkpoint.MODEL, checkpoint.OPTIMIZER])
@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_a_file_cut_short(tmp_path: Path, name: str, keep: int) -> None:
    state = checkpoint.read_state(saved_run(tmp_path))
    path = tmp_path / state.folder / name
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UserError) as error:
        load_both(tmp_path, state)
    assert one_line(error, str(path), "damaged", "train again")
    sign_again(tmp_path)  # a file that was written like that
    with pytest.raises(UserError) as error:
        load_both(tmp_path, checkpoint.read_state(tmp_path))
    assert one_line(error, str(path), "damaged or cut short", "train again")


@pytest.mark.parametrize("name", [checkpoint.MODEL, checkpoint.OPTIMIZER])
def test_a_file_that_is_gone(tmp_path: Path, name: str) -> None:
    state = checkpoint.read_state(saved_run(tmp_path))
    (tmp_path / state.folder / name).unlink()
    with pytest.raises(UserError) as error:
        load_both(tmp_path, state)
    assert one_line(error, name, "missing", "train again")


def load_both(run: Path, state: checkpoint.State) -> None:
    detector = tiny_detector(2)
    checkpoint.load_model(run, state, detector)
    checkpoint.load_optimizer(run, state, Sgd().build(detector))


@pytest.mark.parametrize(
    ("num_classes", "heads"), [(3, Heads(embed_dim=6)), (2, Heads(embed_dim=5)), (2, Heads(embed_dim=6, stages=2))]
)
def test_a_model_of_another_shape(tmp_path: Path, num_classes: int, heads: Heads) -> None:
    state = checkpoint.read_state(saved_run(tmp_path))
    with pytest.raises(UserError) as error:
        checkpoint.load_model(tmp_path, state, tiny_detector(num_classes, heads=heads))
    assert one_line(error, checkpoint.MODEL, "another model")


@pytest.mark.parametrize(
    "tensors",
    [
        {"999.momentum_buffer": torch.zeros(1)},
        {"0.momentum_buffer": torch.zeros(3, 3, 3)},
        {"momentum": torch.zeros(1)},
        {"x.momentum_buffer": torch.zeros(1)},
    ],
)
def test_a_foreign_optimizer_file(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    state = checkpoint.read_state(saved_run(tmp_path))
    save_file(tensors, tmp_path / state.folder / checkpoint.OPTIMIZER)
    sign_again(tmp_path)
    with pytest.raises(UserError) as error:
        load_both(tmp_path, state)
    assert one_line(error, checkpoint.OPTIMIZER, "belongs to no parameter", "train again")


GOOD = {"iteration": 1, "folder": "checkpoint-000001", "classes": ["a"], "preprocess": {}, "seconds": 0.0}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "not json",
        "[]",
        "null",
        '"text"',
        "{}",
        json.dumps({k: v for k, v in GOOD.items() if k != "classes"}),
        json.dumps(GOOD | {"iteration": "many"}),
        json.dumps(GOOD | {"classes": 3}),
        json.dumps(GOOD | {"preprocess": "rgb"}),
        json.dumps(GOOD | {"seconds": None}),
        json.dumps(GOOD | {"seconds": float("inf")}),
        json.dumps(GOOD | {"iteration": float("inf")}),
        json.dumps(GOOD | {"iteration": -1}),
        json.dumps(GOOD | {"folder": "../elsewhere"}),
        json.dumps(GOOD | {"format": 2}),
    ],
)
def test_a_foreign_state_file(tmp_path: Path, content: str) -> None:
    (tmp_path / checkpoint.STATE).write_text(content)
    with pytest.raises(UserError) as error:
        checkpoint.read_state(tmp_path)
    assert one_line(error, str(tmp_path / checkpoint.STATE))


def test_a_good_state_file_is_read_and_a_missing_one_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        checkpoint.read_state(tmp_path)
    assert one_line(error, str(tmp_path / checkpoint.STATE), "no such file")
    (tmp_path / checkpoint.STATE).write_text(json.dumps(GOOD))
    with pytest.raises(UserError) as error:
        checkpoint.read_state(tmp_path)
    assert one_line(error, str(tmp_path / GOOD["folder"]), "missing, though state.json names it", "train again")
    (tmp_path / GOOD["folder"]).mkdir()
    assert checkpoint.read_state(tmp_path).classes == ("a",)


def test_checkpoints_of_later_iterations_than_the_current_one_are_removed(tmp_path: Path) -> None:
    """After going back to an older checkpoint, what had been trained beyond it belongs to another course."""
    for iteration in (1, 5, 6):
        saved_run(tmp_path, iteration=iteration, keep=3)
    saved_run(tmp_path, iteration=3, keep=3)
    assert folders(tmp_path) == ["checkpoint-000001", "checkpoint-000003"]
