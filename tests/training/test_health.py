"""Training that diverges or learns nothing says so, and never replaces a good checkpoint by a bad one."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st

from tag2box import runs
from tag2box.cli import _is_terminated
from tag2box.cli.detect import detect
from tag2box.cli.train import resume, train
from tag2box.errors import Interrupted, Terminated, UserError
from tag2box.models.detector import Detector
from tag2box.recipes import Config
from tag2box.training import checkpoint, loop
from tag2box.training.loop import SpikeWatch
from tag2box.training.optim import Adam, Sgd
from tiny_world import same, small_config, small_data, small_network, stopping_at, story, weights


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    small_network(monkeypatch)
    small_data(tmp_path)
    return tmp_path


def spoil_network(monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Detector], object]) -> None:
    """Let the commands build a network that a test has changed."""
    build = runs.build_detector

    def other(config: Config, num_classes: int, *, pretrained: bool) -> Detector:
        detector = build(config, num_classes, pretrained=pretrained)
        spoil(detector)
        return detector

    monkeypatch.setattr(runs, "build_detector", other)


# ---------------------------------------------------------------- diverging


@pytest.mark.parametrize(
    "optimizer", [Sgd(lr=1e308), Sgd(bias_lr=math.inf), Adam(lr=1e30), Adam(lr=1e308), Sgd(lr=1e12)]
)
@pytest.mark.parametrize("every", [1, 4])
def test_a_rate_beyond_all_bounds_ends_with_one_line(small: Path, optimizer: Sgd | Adam, every: int) -> None:
    """Settings files cannot have such rates; programs can."""
    config = small_config(small, "plan.schedule.warmup=0", f"plan.checkpoint_every={every}")
    config = replace(config, plan=replace(config.plan, optimizer=optimizer))
    with pytest.raises(UserError) as error:
        train(config, small / "run")
    line = str(error.value)
    assert "\n" not in line and "training diverged: " in line and "iteration " in line
    assert "train a new run with a lower plan.optimizer.lr" in line
    assert "no checkpoint was saved before" in line or "the last good checkpoint is checkpoint-00000" in line
    for folder in (small / "run").glob("checkpoint-*"):
        assert checkpoint.non_finite(weights(small / "run")) is None, folder
    assert story(small / "run")[-1]["event"] != "end"


@pytest.mark.parametrize("lr", [math.nan, math.inf, -math.inf])
def test_a_rate_that_is_no_number_is_refused(small: Path, lr: float) -> None:
    config = small_config(small)
    with pytest.raises(UserError, match=r"plan\.optimizer\.lr: is -?(nan|inf), expected a positive number"):
        train(replace(config, plan=replace(config.plan, optimizer=Sgd(lr=lr))), small / "run")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_is_found_before_it_changes_the_weights(
    small: Path, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    calls: list[int] = []

    def hook(grad: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return grad if len(calls) < 4 else grad + value

    spoil_network(monkeypatch, lambda detector: detector.mil.cls.weight.register_hook(hook))
    with pytest.raises(UserError) as error:
        train(small_config(small, "plan.checkpoint_every=3"), small / "run")
    line = str(error.value)
    assert "training diverged: the loss is " in line
    assert f", the norm of its gradient {abs(value)} at iteration 4, first in mil.cls.weight; train a new run" in line
    assert line.endswith("the last good checkpoint is checkpoint-000003")
    assert detect(small / "run", [small / "photos"], min_score=0)  # with the good one


def test_the_check_of_gradients_changes_nothing(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(small_config(small), small / "run")
    monkeypatch.setattr(loop, "get_total_norm", lambda grads: torch.zeros(()))
    train(small_config(small), small / "unchecked")
    assert same(weights(small / "run"), weights(small / "unchecked"))


# ---------------------------------------------------------------- learning nothing


def test_photos_without_any_proposal_are_refused_before_the_run_is_started(small: Path) -> None:
    with pytest.raises(UserError, match=r"proposals: no proposals in any photo.+lower proposals\.min_side"):
        train(small_config(small, "proposals.min_side=1000"), small / "run")
    assert not runs.has_run(small / "run")


def test_equal_scores_are_said_to_be_dead(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(detector: Detector) -> None:
        detector.backbone.fc.bias.data.fill_(-1e4)  # behind a ReLU

    spoil_network(monkeypatch, kill)
    with pytest.warns(
        UserWarning, match="run: iteration 1: all proposals of a photo have the same scores; train a new"
    ):
        train(small_config(small), small / "run")
    (first, *_) = [event for event in story(small / "run") if event["event"] == "warning"]
    assert first["iteration"] == 1 and "same scores" in str(first["problem"])


def test_a_healthy_run_warns_of_nothing(small: Path, recwarn: pytest.WarningsRecorder) -> None:
    train(small_config(small, "plan.iterations=30", "plan.log_every=30", "plan.checkpoint_every=30"), small / "run")
    assert not [event for event in story(small / "run") if event["event"] == "warning"]
    assert not [str(one.message) for one in recwarn if one.category is UserWarning]


def spikes(losses: list[float]) -> list[int]:
    watch, found = SpikeWatch(), []
    for number, loss in enumerate(losses):
        watch.new.append(loss)
        found += [number] if watch.highest_ratio() is not None else []
    return found


@pytest.mark.parametrize(
    ("losses", "found"),
    [
        ([], []),
        ([1e9], []),
        ([1.0] * 19 + [50.0], []),  # too early to tell
        ([1.0] * 20 + [50.0], [20]),
        ([1.0] * 20 + [9.9], []),
        ([1.0] * 20 + [50.0] * 40, [20]),  # one rise
        ([1.0] * 20 + [50.0, 1.0, 50.0], [20, 22]),
        ([20.0] * 20 + [0.1] * 60 + [19.0], []),  # not above the first losses
        ([20.0] * 20 + [0.1] * 60 + [21.0], [80]),
        ([0.0] * 30 + [1.0], [30]),
    ],
)
def test_a_spike_is_far_above_the_median_and_above_the_first_losses(losses: list[float], found: list[int]) -> None:
    assert spikes(losses) == found


@given(st.lists(st.floats(min_value=0.5, max_value=4.9), max_size=90))
def test_losses_within_a_factor_of_ten_are_no_spikes(losses: list[float]) -> None:
    assert spikes(losses) == []


def test_the_highest_of_several_is_named() -> None:
    watch = SpikeWatch()
    assert watch.highest_ratio() is None
    watch.new.extend([2.0] * 20 + [40.0, 2.0, 80.0, 2.0])
    assert watch.highest_ratio() == 40
    assert watch.highest_ratio() is None


def test_a_spike_is_logged_and_shown(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([None, None, 33.3])
    monkeypatch.setattr(SpikeWatch, "highest_ratio", lambda self: next(answers, None))
    with pytest.warns(UserWarning, match="run: iteration 3: the loss was 33 times its median; train a new run"):
        train(small_config(small), small / "run")
    (event,) = [event for event in story(small / "run") if event["event"] == "warning"]
    assert event["iteration"] == 3 and str(event["problem"]).startswith("the loss was 33 times its median")


# ---------------------------------------------------------------- signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_training_after_the_iteration_and_saves(small: Path, number: signal.Signals) -> None:
    before = signal.getsignal(number)
    train(small_config(small), small / "unbroken")
    with pytest.raises(Interrupted, match="stopped after 3 of 6 iterations and saved") as stopped:
        train(small_config(small), small / "run", progress=stopping_at(3, lambda: signal.raise_signal(number)))
    assert signal.getsignal(number) == before
    assert _is_terminated(stopped.value) == (number == signal.SIGTERM)
    resume(small / "run")
    assert same(weights(small / "run"), weights(small / "unbroken"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_stops_at_once(small: Path, number: signal.Signals) -> None:
    def twice() -> None:
        signal.raise_signal(number)
        signal.raise_signal(number)

    with pytest.raises(Terminated if number == signal.SIGTERM else KeyboardInterrupt):
        train(small_config(small), small / "run", progress=stopping_at(3, twice))
    assert checkpoint.read_state(small / "run").iteration == 2


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes")]
)
def test_an_allocation_that_fails_is_one_line(small: Path, error: Exception) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(UserError, match=r"run: out of memory \(.+\); lower loader\.batch_size") as caught:
        train(small_config(small), small / "run", progress=stopping_at(3, fail))
    assert "\n" not in str(caught.value)
