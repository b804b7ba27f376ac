from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.optim import Optimizer

from tag2box.errors import UserError
from tag2box.models.detector import Detector, Heads
from tag2box.training import checkpoint
from tag2box.training.optim import Adam, Sgd, set_lr
from tiny import TinyBackbone, tiny_detector

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


def save(run: Path, detector: Detector, optimizer: Optimizer, iteration: int) -> None:
    checkpoint.save(run, detector, optimizer, iteration=iteration, classes=CLASSES, seconds=1.5)


def saved_run(run: Path, settings: Sgd | Adam | None = None, iteration: int = 3) -> Path:
    detector = tiny_detector(2)
    optimizer = (settings or Sgd()).build(detector)
    learn(detector, optimizer, range(3))
    save(run, detector, optimizer, iteration)
    return run


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


def test_only_the_newest_checkpoint_is_kept(tmp_path: Path) -> None:
    for iteration in (1, 2, 10):
        saved_run(tmp_path, iteration=iteration)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-000010", checkpoint.STATE]


def test_saving_the_same_iteration_again_replaces_it(tmp_path: Path) -> None:
    saved_run(tmp_path)
    detector = tiny_detector(2, seed=4)
    save(tmp_path, detector, Sgd().build(detector), 3)
    read = tiny_detector(2)
    checkpoint.load_model(tmp_path, checkpoint.read_state(tmp_path), read)
    assert torch.equal(read.mil.cls.weight, detector.mil.cls.weight)


def test_tensors_are_on_disk_before_the_state_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[str] = []
    sync, write_json = checkpoint.io.sync, checkpoint.io.write_json

    def named(path: Path, value: object) -> None:
        flushed.append("state")
        write_json(path, value)

    monkeypatch.setattr(checkpoint.io, "sync", lambda path: (flushed.append(path.name), sync(path)))
    monkeypatch.setattr(checkpoint.io, "write_json", named)
    saved_run(tmp_path, iteration=3)
    before = flushed[: flushed.index("state")]
    assert {checkpoint.MODEL, checkpoint.OPTIMIZER, ".checkpoint-000003", tmp_path.name} <= set(before)
    assert before[-1] == tmp_path.name  # the rename of the folder


def test_the_old_checkpoint_stands_until_the_new_one_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved_run(tmp_path, iteration=1)
    seen: list[set[str]] = []

    def broken(path: Path, value: object) -> None:
        seen.append({p.name for p in tmp_path.glob("checkpoint-*")})
        raise OSError("disk full")

    monkeypatch.setattr(checkpoint.io, "write_json", broken)
    with pytest.raises(OSError, match="disk full"):
        saved_run(tmp_path, iteration=2)
    assert seen == [{"checkpoint-000001", "checkpoint-000002"}]
    state = checkpoint.read_state(tmp_path)
    assert state.iteration == 1
    checkpoint.load_model(tmp_path, state, tiny_detector(2))


def test_a_save_that_breaks_off_leaves_the_old_one_and_the_next_cleans_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_run(tmp_path, iteration=1)

    def broken(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", broken)
        with pytest.raises(KeyboardInterrupt):
            saved_run(tmp_path, iteration=2)
    checkpoint.load_model(tmp_path, checkpoint.read_state(tmp_path), tiny_detector(2))
    saved_run(tmp_path, iteration=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-000002", checkpoint.STATE]


@pytest.mark.parametrize("name", [checkpoint.MODEL, checkpoint.OPTIMIZER])
@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_a_file_cut_short(tmp_path: Path, name: str, keep: int) -> None:
    state = checkpoint.read_state(saved_run(tmp_path))
    path = tmp_path / state.folder / name
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UserError) as error:
        load_both(tmp_path, state)
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
    assert checkpoint.read_state(tmp_path).classes == ("a",)
