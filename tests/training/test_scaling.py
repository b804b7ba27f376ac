from __future__ import annotations

import pytest
import torch
from torch import nn

from tag2box.training.grad_cache import loss_scale, unscale


@pytest.mark.parametrize(
    ("grads", "scale"),
    [
        ([], 1.0),
        ([torch.zeros(0, 3)], 1.0),
        ([torch.zeros(2)], 1.0),
        ([torch.tensor([0.75])], 1.0),
        ([torch.tensor([-0.2]), torch.tensor([1e-3])], 4.0),
        ([torch.tensor([3e-6])], 2.0**18),
        ([torch.tensor([5.0])], 0.125),
        ([torch.tensor([torch.inf])], 1.0),
    ],
)
def test_the_scale_brings_the_largest_gradient_near_one(grads: list[torch.Tensor], scale: float) -> None:
    assert loss_scale(grads) == scale
    largest = max((float(g.abs().max()) for g in grads if g.numel()), default=0.0)
    assert largest in (0.0, torch.inf) or 0.5 <= largest * scale < 1


def parameters(*grads: float | None) -> list[nn.Parameter]:
    made = [nn.Parameter(torch.zeros(1)) for _ in grads]
    for p, g in zip(made, grads, strict=True):
        p.grad = None if g is None else torch.tensor([g])
    return made


def test_gradients_come_back_as_they_would_have_been() -> None:
    given = parameters(3.0, None, -8.0)
    unscale(given, 4.0)
    assert [p.grad if p.grad is None else p.grad.item() for p in given] == [0.75, None, -2.0]
    unscale(given, 1.0)
    assert given[0].grad is not None and given[0].grad.item() == 0.75


@pytest.mark.parametrize("overflow", [torch.inf, -torch.inf, torch.nan])
def test_an_overflow_anywhere_leaves_no_gradient(overflow: float) -> None:
    given = parameters(3.0, overflow)
    unscale(given, 4.0)
    assert [p.grad for p in given] == [None, None]
    before = [p.detach().clone() for p in given]
    torch.optim.AdamW(given, lr=1.0).step()  # stands still, decay and all
    assert all(torch.equal(a, b) for a, b in zip(before, given, strict=True))
