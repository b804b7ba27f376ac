from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from conftest import load_golden
from tag2box.methods.casd import attention, disagreement, upright
from tag2box.ops.roi import channel_mean

VIEWS, MIRRORED = 4, torch.tensor([False, True, False, True])


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def attention_with_loops(responses: Tensor) -> Tensor:
    result = torch.zeros_like(responses)
    for i, cells in enumerate(responses):
        values = cells.flatten().tolist()
        low, high = min(values), max(values)
        for y, line in enumerate(cells.tolist()):
            for x, value in enumerate(line):
                result[i, y, x] = 1 / (1 + math.exp(-((value - low) / (high - low) if high > low else 0)))
    return result


def disagreement_with_loops(maps: Tensor) -> float:
    views_per_image, count, height, width = maps.shape
    total = 0.0
    for v in range(views_per_image):
        for m in range(count):
            for y in range(height):
                for x in range(width):
                    best = max(float(maps[other, m, y, x]) for other in range(views_per_image))
                    total += (float(maps[v, m, y, x]) - best) ** 2 / (count * height * width)
    return total


def test_the_reference_agrees_in_attention_loss_and_gradient():
    """It takes 0.2 of the terms of its two stages, and then 1/4 x 0.1 of that for its total."""
    golden = {name: torch.as_tensor(value) for name, value in load_golden("casd_00.npz").items()}
    pooled = golden["in_pooled"].clone().requires_grad_()
    maps = attention(pooled.mean(dim=1))
    torch.testing.assert_close(maps.detach(), golden["out_attention_all"], rtol=1e-5, atol=1e-6)
    views_per_image = upright(maps.view(VIEWS, -1, 7, 7), MIRRORED)
    loss = 0.2 * sum(disagreement(views_per_image[:, golden[f"in_keep{stage}"][0]]) for stage in (1, 2))
    torch.testing.assert_close(loss.detach(), golden["out_consistency_loss"], rtol=1e-5, atol=0)
    (0.1 / 4 * loss).backward()
    torch.testing.assert_close(pooled.grad, golden["grad_pooled"], rtol=1e-3, atol=1e-10)


@pytest.mark.parametrize(("views_per_image", "count", "side"), [(1, 0, 3), (3, 0, 3), (1, 1, 1), (2, 1, 2), (4, 5, 3)])
def test_both_equal_their_definitions_written_with_loops(views_per_image: int, count: int, side: int):
    responses = numbers(views_per_image, count, side, side)
    maps = attention(responses)
    flat = responses.flatten(0, 1)
    torch.testing.assert_close(maps.flatten(0, 1), attention_with_loops(flat))
    assert disagreement(maps).item() == pytest.approx(disagreement_with_loops(maps) if count else 0.0)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 99), st.floats(0.1, 9), st.floats(-9, 9))
def test_attention_does_not_depend_on_the_scale_of_activations(
    count: int, side: int, seed: int, scale: float, shift: float
):
    responses = numbers(count, side + 1, side + 1, seed=seed)
    maps = attention(responses)
    torch.testing.assert_close(attention(scale * responses + shift), maps)
    assert bool((maps >= 0.5).all()) and bool((maps <= 1 / (1 + math.exp(-1)) + 1e-9).all())


def test_a_flat_map_has_no_preference_and_no_gradient():
    flat = torch.ones(2, 3, 3, requires_grad=True)
    maps = attention(flat)
    assert torch.equal(maps.detach(), torch.full((2, 3, 3), 0.5))
    (maps - 1).square().sum().backward()
    assert flat.grad is not None and not flat.grad.any()


def test_views_that_agree_once_flips_are_undone_have_no_loss():
    one = attention(numbers(5, 3, 3))
    seen = torch.stack([one, one.flip(2)])
    assert disagreement(upright(seen, torch.tensor([False, True]))) == 0
    assert disagreement(upright(seen, None)) > 0
    assert disagreement(one[None]) == 0


def test_only_less_attentive_cells_have_a_gradient():
    maps = torch.tensor([[[[0.5, 0.7]]], [[[0.6, 0.55]]]], requires_grad=True)
    disagreement(maps).backward()
    assert maps.grad is not None
    assert (maps.grad < 0).tolist() == [[[[True, False]]], [[[False, True]]]]
    assert (maps.grad == 0).sum() == 2


@pytest.mark.parametrize("count", [0, 1, 3, 130])
def test_the_mean_over_channels_and_its_gradient_are_those_of_plain_torch(count: int):
    grads = []
    weight = numbers(count, 4, seed=7)
    weight[1:2] = 0  # a proposal without weight
    for mean in (channel_mean, lambda x, b: torch.nn.functional.relu6(x + b).mean(dim=2)):
        x, bias = (4 * numbers(count, 4, 5)).requires_grad_(), numbers(5, seed=2).requires_grad_()
        result = mean(x, bias)
        (result * weight).sum().backward()
        grads.append((result.detach(), x.grad, bias.grad))
    for mine, wanted in zip(*grads, strict=True):
        torch.testing.assert_close(mine, wanted)
