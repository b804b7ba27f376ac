from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from tag2box.ops import kernels
from tag2box.ops.roi import _MIN_COMPILED_CELLS, _MaskedMean, masked_mean, masked_mean_torch


def numbers(rows: int, cells: int, width: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = 4 * torch.randn(rows, cells, width, generator=g)
    return x, torch.rand(rows, cells, generator=g) * 2 - 0.5, torch.randn(width, generator=g)


def by_loop(x: Tensor, factors: Tensor, bias: Tensor) -> Tensor:
    out = torch.zeros(x.shape[0], x.shape[2])
    for r in range(x.shape[0]):
        for f in range(x.shape[2]):
            cells = [min(max(float(factors[r, n] * x[r, n, f] + bias[f]), 0.0), 6.0) for n in range(x.shape[1])]
            out[r, f] = sum(cells) / len(cells)
    return out


@pytest.mark.parametrize(("rows", "cells", "width"), [(0, 4, 3), (1, 1, 1), (3, 9, 5), (7, 16, 33)])
def test_both_ways_match_the_loop(rows: int, cells: int, width: int) -> None:
    given_ = numbers(rows, cells, width)
    expected = by_loop(*given_)
    torch.testing.assert_close(masked_mean_torch(*given_), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(kernels.masked_mean_forward(*given_), expected, rtol=1e-5, atol=1e-6)


@given(st.integers(0, 10_000))
def test_the_compiled_gradients_are_those_of_plain_torch(seed: int) -> None:
    x, factors, bias = numbers(5, 4, 7, seed)
    inner = x * factors[:, :, None] + bias
    if bool(((inner.abs() < 1e-4) | ((inner - 6).abs() < 1e-4)).any()):
        return  # at a corner of ReLU6 rounding decides which side counts
    wanted = torch.randn(5, 7, generator=torch.Generator().manual_seed(seed))
    results = []
    for way in (masked_mean_torch, _MaskedMean.apply):
        leaves = [value.clone().requires_grad_() for value in (x, factors, bias)]
        results.append(torch.autograd.grad(way(*leaves), leaves, wanted))
    for ours, twin in zip(*results, strict=True):
        torch.testing.assert_close(ours, twin, rtol=1e-4, atol=1e-5)


def test_only_required_gradients_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[str] = []
    for name in ("masked_mean_backward", "masked_mean_factor_grad"):
        way = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, lambda *args, way=way, name=name: computed.append(name) or way(*args))
    x, factors, bias = numbers(2, 3, 4)
    _MaskedMean.apply(x.requires_grad_(), factors, bias).sum().backward()
    assert computed == ["masked_mean_backward"] and factors.grad is None and bias.grad is None


def test_a_convolution_commutes_with_factors_of_cells() -> None:
    """What the function is for: copies made of W f are copies of f sent through W."""
    g = torch.Generator().manual_seed(3)
    maps, weight = torch.randn(6, 9, 5, generator=g), torch.randn(8, 5, generator=g)
    _, factors, bias = numbers(6, 9, 8)
    own_way = torch.nn.functional.relu6((maps * factors[:, :, None]) @ weight.T + bias).mean(dim=1)
    torch.testing.assert_close(masked_mean(maps @ weight.T, factors, bias), own_way, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_and_small_jobs_agree(dtype: torch.dtype) -> None:
    x, factors, bias = (value.to(dtype) for value in numbers(_MIN_COMPILED_CELLS // (16 * 64) + 1, 16, 64))
    torch.testing.assert_close(
        masked_mean(x, factors, bias)[:3], masked_mean_torch(x[:3], factors[:3], bias), rtol=1e-5, atol=1e-6
    )


def test_no_gradient_passes_at_the_corners_of_relu6() -> None:
    x = torch.tensor([[[0.0], [6.0], [3.0], [7.0], [-1.0]]])
    factors, bias, grad = torch.ones(1, 5), torch.zeros(1), torch.full((1, 1), 5.0)
    of_x, of_bias = kernels.masked_mean_backward(x, factors, bias, grad)
    assert of_x.flatten().tolist() == [0, 0, 1, 0, 0] and of_bias.tolist() == [1]
    assert kernels.masked_mean_factor_grad(x, factors, bias, grad).tolist() == [[0, 0, 3, 0, 0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [0, 1, 9, 20])
def test_half_precision_is_computed_in_single_precision(dtype: torch.dtype, rows: int) -> None:
    """x is rounded, nothing else but its gradient; rows are converted a few at a time."""
    x, factors, bias = numbers(rows, 4, 7)
    half = x.to(dtype)
    grad = torch.randn(rows, 7)
    found = (
        kernels.masked_mean_forward(half, factors, bias),
        *kernels.masked_mean_backward(half, factors, bias, grad),
        kernels.masked_mean_factor_grad(half, factors, bias, grad),
    )
    expected = (
        kernels.masked_mean_forward(half.float(), factors, bias),
        *kernels.masked_mean_backward(half.float(), factors, bias, grad),
        kernels.masked_mean_factor_grad(half.float(), factors, bias, grad),
    )
    assert found[1].dtype == dtype and torch.equal(found[1], expected[1].to(dtype))
    assert all(torch.equal(found[i], expected[i]) for i in (0, 2, 3))
