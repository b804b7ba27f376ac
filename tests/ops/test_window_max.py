from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from tag2box.ops import kernels as compiled, roi as plain
from tag2box.ops.roi import (
    WindowMaxima,
    Windows,
    find_maxima,
    find_maxima_torch,
    scatter_gradient,
    scatter_gradient_torch,
    window_max,
)

WAYS = {
    "torch": (find_maxima_torch, scatter_gradient_torch),
    "compiled": (compiled.window_max_forward, compiled.window_max_backward),
}


def find_with_loops(features: Tensor, windows: Windows) -> tuple[list, list]:
    """Value and cell of each maximum, a cell at a time: NaN first, then the largest, then the first."""
    width = features.shape[3]
    values, cells = [], []
    for row, image in enumerate(windows.image.tolist()):
        for channel in range(features.shape[1]):
            for b in range(windows.top.shape[1]):
                y, x = int(windows.top[row, b]), int(windows.left[row, b])
                places = [
                    (v, u)
                    for v in range(y, y + int(windows.height[row, b]))
                    for u in range(x, x + int(windows.width[row, b]))
                ]
                best = [(features[image, channel, v, u].item(), v * width + u) for v, u in places]
                value, cell = max(best, key=lambda p: (math.isnan(p[0]), p[0], -p[1])) if best else (0.0, -1)
                values.append(value)
                cells.append(cell)
    return values, cells


def spread_with_loops(grad: Tensor, cell: Tensor, image: Tensor, shape: torch.Size) -> Tensor:
    total = torch.zeros(shape[0], shape[1], shape[2] * shape[3], dtype=grad.dtype)
    for row in range(len(grad)):
        for channel in range(shape[1]):
            for g, place in zip(grad[row, channel], cell[row, channel].tolist(), strict=True):
                if place >= 0:
                    total[image[row], channel, place] += g
    return total.view(shape)


@st.composite
def jobs(draw: st.DrawFn, dtype: torch.dtype = torch.float32, special: bool = False) -> tuple[Tensor, Windows]:
    """Maps with many ties, and windows of all sizes, some empty, in any order of images."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    images, channels = draw(st.integers(1, 3)), draw(st.sampled_from([1, 3, 8, 13]))
    height, width = draw(st.integers(1, 12)), draw(st.integers(1, 20))
    features = torch.randint(-3, 3, (images, channels, height, width), generator=generator).to(dtype)
    if special:
        odd = torch.tensor([math.nan, -math.nan, math.inf, -math.inf, -0.0, 1e-45, -1e-45]).to(dtype)
        chosen = torch.randint(0, len(odd), features.shape, generator=generator)
        features = torch.where(torch.rand(features.shape, generator=generator) < 0.3, odd[chosen], features)
    shape = (draw(st.integers(0, 4)), draw(st.integers(1, 4)))

    def below(limit: Tensor | int, low: int) -> Tensor:
        return (low + torch.rand(shape, generator=generator) * (limit - low + 1)).long()

    top, left = below(height - 1, 0), below(width - 1, 0)
    image = torch.randint(0, images, shape[:1], generator=generator)
    return features, Windows(image, top, left, below(height - top, -1), below(width - left, -1))


def the_same(found: WindowMaxima, values: list, cells: list) -> None:
    expected = torch.tensor(values, dtype=found.value.dtype).reshape(found.value.shape)
    assert torch.equal(found.value.nan_to_num(99), expected.nan_to_num(99))
    assert found.cell.flatten().tolist() == cells


@pytest.mark.parametrize("way", WAYS)
@settings(deadline=None, max_examples=40)
@given(job=jobs(special=True))
def test_maxima_are_those_found_a_cell_at_a_time(way: str, job: tuple[Tensor, Windows]) -> None:
    the_same(WAYS[way][0](*job), *find_with_loops(*job))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@settings(deadline=None, max_examples=10)
@given(data=st.data())
def test_half_precision_is_exact_and_stays_half(way: str, dtype: torch.dtype, data: st.DataObject) -> None:
    job = data.draw(jobs(dtype))
    found = WAYS[way][0](*job)
    assert found.value.dtype == dtype
    the_same(found, *find_with_loops(*job))


def test_double_precision_separates_what_single_cannot() -> None:
    features = torch.tensor([1.0, 1.0 + 1e-12, 1.0], dtype=torch.float64).view(1, 1, 1, 3).requires_grad_()
    one = torch.ones(1, 1, dtype=torch.long)
    pooled = window_max(features, Windows(one[0] * 0, one * 0, one * 0, one, one * 3))
    pooled.sum().backward()
    assert pooled.item() == 1.0 + 1e-12
    assert features.grad.flatten().tolist() == [0, 1, 0]


@pytest.mark.parametrize("way", WAYS)
@settings(deadline=None, max_examples=30)
@given(job=jobs())
def test_gradients_go_where_the_loop_puts_them(way: str, job: tuple[Tensor, Windows]) -> None:
    features, windows = job
    cell = find_maxima_torch(features, windows).cell
    grad = torch.randint(-5, 6, cell.shape).float()  # whole numbers: sums are exact in any order
    got = WAYS[way][1](grad, cell, windows.image, features.shape)
    assert torch.equal(got, spread_with_loops(grad, cell, windows.image, features.shape))


def test_the_number_of_threads_changes_nothing() -> None:
    torch.manual_seed(3)
    features = torch.randn(2, 21, 9, 14)
    shape = (50, 6)
    top, left = torch.randint(0, 9, shape), torch.randint(0, 14, shape)
    windows = Windows(
        torch.arange(50) % 2,
        top,
        left,
        (torch.rand(shape) * (10 - top)).long(),
        (torch.rand(shape) * (15 - left)).long(),
    )
    grad, before = torch.randn(50, 21, 6), torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 7):
            torch.set_num_threads(threads)
            found = compiled.window_max_forward(features, windows)
            results.append((found, compiled.window_max_backward(grad, found.cell, windows.image, features.shape)))
    finally:
        torch.set_num_threads(before)
    for found, total in results[1:]:
        assert torch.equal(found.value, results[0][0].value) and torch.equal(found.cell, results[0][0].cell)
        assert torch.equal(total, results[0][1])
    assert torch.equal(results[0][0].cell, find_maxima_torch(features, windows).cell)


def test_large_jobs_on_a_cpu_are_compiled_and_small_or_double_ones_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setattr(compiled, "window_max_forward", lambda *args: called.append("find") or find_maxima_torch(*args))
    monkeypatch.setattr(
        compiled, "window_max_backward", lambda *args: called.append("spread") or scatter_gradient_torch(*args)
    )
    monkeypatch.setattr(plain, "_MIN_COMPILED_WINDOWS", 6)
    one = torch.ones(3, 1, dtype=torch.long)
    windows = Windows(one[:, 0] * 0, one * 0, one * 0, one, one)
    for channels, dtype, expected in ((1, torch.float32, []), (2, torch.float64, []), (2, torch.float32, ["find"])):
        called.clear()
        features = torch.zeros(1, channels, 2, 2, dtype=dtype)
        cell = find_maxima(features, windows).cell
        assert called == expected
        scatter_gradient(torch.ones(cell.shape, dtype=dtype), cell, windows.image, features.shape)
        assert called == expected * 1 + ["spread"] * len(expected)


@pytest.mark.parametrize("cells", [(1, 32767), (1, 32768), (260, 253)])
def test_maps_of_many_cells_need_wider_integers(cells: tuple[int, int]) -> None:
    torch.manual_seed(0)
    features = torch.randn(1, 2, *cells)
    one = torch.tensor([[0], [0]])
    windows = Windows(one[:, 0], one, one, torch.tensor([[1], [cells[0]]]), torch.tensor([[1], [cells[1]]]))
    found, plain_found = compiled.window_max_forward(features, windows), find_maxima_torch(features, windows)
    assert found.cell.dtype == plain_found.cell.dtype
    assert torch.equal(found.cell, plain_found.cell) and torch.equal(found.value, plain_found.value)
    assert found.cell[1, :, 0].tolist() == features.flatten(2).argmax(dim=2).flatten().tolist()


def test_memory_is_used_again_only_when_nothing_refers_to_it() -> None:
    shape = (1 << 22,)
    first = compiled.large_empty(shape, "float32")
    first[:] = 1
    second = compiled.large_empty(shape, "float32")
    second[:] = 2
    assert first.sum() == 1 << 22  # it was in use
    place, kept = first.ctypes.data, torch.from_numpy(first)[3:]
    del first
    third = compiled.large_empty(shape, "float32")
    assert third.ctypes.data != place  # a view of it still is
    del kept
    assert compiled.large_empty(shape, "float32").ctypes.data == place
