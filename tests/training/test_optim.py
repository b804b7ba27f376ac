from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from tag2box.training.loop import Schedule
from tag2box.training.optim import Adam, Sgd, scale_momentum, set_lr
from tiny import tiny_detector


@pytest.mark.parametrize(
    ("iteration", "factor"),
    [
        (0, 1 / 3),
        (1, 1 / 3 + 2 / 3 / 20),
        (10, 2 / 3),
        (19, 1 / 3 + 2 / 3 * 19 / 20),
        (20, 1.0),
        (199, 1.0),
        (200, 0.1),
        (266, 0.1),
        (267, 0.01),
        (299, 0.01),
    ],
)
def test_the_learning_rate_of_a_run_of_300(iteration: int, factor: float) -> None:
    assert Schedule(warmup=20).factor(iteration, 300) == pytest.approx(factor)


def test_the_published_schedule() -> None:
    schedule = Schedule()
    factors = [schedule.factor(i, 30_000) for i in (0, 200, 19_999, 20_000, 26_699, 26_700, 29_999)]
    assert factors == pytest.approx([1 / 3, 1, 1, 0.1, 0.1, 0.01, 0.01])


@given(st.integers(0, 400))
def test_without_warm_up_and_steps_the_rate_stands_still(iteration: int) -> None:
    assert Schedule(warmup=0, steps=()).factor(iteration, 300) == 1.0


@given(st.integers(20, 299), st.integers(20, 299))
def test_after_the_warm_up_the_rate_never_rises(a: int, b: int) -> None:
    early, late = sorted((a, b))
    schedule = Schedule(warmup=20, steps=(0.3, 0.5, 0.9))
    assert schedule.factor(early, 300) >= schedule.factor(late, 300)


def test_cuts_count_the_steps_behind() -> None:
    schedule = Schedule(steps=(0.5, 0.75))
    assert [schedule.cuts(i, 8) for i in (-1, 0, 3, 4, 5, 6, 7)] == [0, 0, 0, 1, 1, 2, 2]


def test_warm_up_and_cuts_multiply_in_a_run_too_short_for_both() -> None:
    assert Schedule(warmup=10, warmup_from=0.5, steps=(0.5,)).factor(5, 8) == pytest.approx(0.1 * 0.75)


@pytest.mark.parametrize("settings", [Sgd(bias_lr=3.0), Adam(bias_lr=3.0)])
def test_biases_learn_faster_and_are_not_decayed(settings: Sgd | Adam) -> None:
    detector = tiny_detector(2)
    optimizer = settings.build(detector)
    set_lr(optimizer, 0.5)
    weights, biases = optimizer.param_groups
    assert (weights["lr"], weights["weight_decay"]) == (0.5, settings.weight_decay)
    assert (biases["lr"], biases["weight_decay"]) == (1.5, 0.0)
    names = {id(p): name for name, p in detector.named_parameters()}
    assert all(names[id(p)].endswith("bias") for p in biases["params"])
    assert not any(names[id(p)].endswith("bias") for p in weights["params"])


@pytest.mark.parametrize("settings", [Sgd(), Adam()])
@pytest.mark.parametrize("frozen", [True, False])
def test_every_parameter_that_learns_is_there_once_and_no_other(settings: Sgd | Adam, frozen: bool) -> None:
    detector = tiny_detector(2, frozen)
    given_ = [id(p) for group in settings.build(detector).param_groups for p in group["params"]]
    assert sorted(given_) == sorted(id(p) for p in detector.parameters() if p.requires_grad)


def linear(weight: float, bias: float) -> nn.Linear:
    layer = nn.Linear(1, 1)
    nn.init.constant_(layer.weight, weight)
    nn.init.constant_(layer.bias, bias)
    return layer


def test_sgd_matches_the_update_written_by_hand() -> None:
    layer = linear(2.0, -1.0)
    optimizer = Sgd(lr=0.1, momentum=0.9, weight_decay=0.01, bias_lr=2.0).build(layer)
    weight, bias, speed_w, speed_b = 2.0, -1.0, 0.0, 0.0
    for rate, x in ((0.05, 3.0), (0.1, -1.0), (0.1, 2.0)):
        set_lr(optimizer, rate)
        optimizer.zero_grad()
        layer(torch.tensor([[x]])).pow(2).sum().backward()
        optimizer.step()
        slope = 2 * (weight * x + bias)
        speed_w = 0.9 * speed_w + slope * x + 0.01 * weight
        speed_b = 0.9 * speed_b + slope
        weight, bias = weight - rate * speed_w, bias - 2 * rate * speed_b
        assert layer.weight.item() == pytest.approx(weight, rel=1e-4)
        assert layer.bias.item() == pytest.approx(bias, rel=1e-4)


def test_scaled_momentum_weighs_old_gradients_as_the_new_rate_would() -> None:
    layer = linear(0.0, 0.0)
    optimizer = Sgd(lr=1.0, momentum=0.5, weight_decay=0.0).build(layer)
    set_lr(optimizer, 1.0)
    layer.weight.grad, layer.bias.grad = torch.full((1, 1), 8.0), torch.zeros(1)
    optimizer.step()  # buffer 8, weight -8
    scale_momentum(optimizer, 0.1)
    set_lr(optimizer, 0.1)
    layer.weight.grad = torch.zeros(1, 1)
    optimizer.step()  # buffer 0.8 * 0.5, weight -8 - 0.1 * 0.4
    assert layer.weight.item() == pytest.approx(-8.04)


def test_scaling_before_the_first_step_and_on_adam_does_nothing() -> None:
    layer = linear(1.0, 1.0)
    scale_momentum(Sgd().build(layer), 0.1)
    optimizer = Adam().build(layer)
    layer(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    before = [value.clone() for state in optimizer.state.values() for value in state.values()]
    scale_momentum(optimizer, 0.1)
    after = [value for state in optimizer.state.values() for value in state.values()]
    assert len(after) == 6
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_adam_steps_by_its_rate_first() -> None:
    layer = linear(1.0, 1.0)
    optimizer = Adam(lr=0.01, weight_decay=0.0, bias_lr=2.0).build(layer)
    set_lr(optimizer, 0.01)
    layer(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    assert layer.weight.item() == pytest.approx(0.99, abs=1e-5)
    assert layer.bias.item() == pytest.approx(0.98, abs=1e-5)
