from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from conftest import golden_names, load_golden
from tag2box.ops import roi, roi as window_max
from tag2box.ops.roi import roi_align, roi_pool, roi_pool_inclusive


def pool_with_loops(features: Tensor, corners: Tensor, image_ids: Tensor, *, size: int, scale: float) -> Tensor:
    """RoIPool written down bin by bin."""
    height, width = features.shape[-2:]
    out = features.new_zeros(len(corners), features.shape[1], size, size)
    for r, corner in enumerate((corners * scale).tolist()):
        x1, y1, x2, y2 = (int(math.copysign(math.floor(abs(c) + 0.5), c)) for c in corner)
        step_x = np.float32(max(x2 - x1 + 1, 1)) / np.float32(size)
        step_y = np.float32(max(y2 - y1 + 1, 1)) / np.float32(size)
        for i in range(size):
            top = min(max(math.floor(np.float32(i) * step_y) + y1, 0), height)
            bottom = min(max(math.ceil(np.float32(i + 1) * step_y) + y1, 0), height)
            for j in range(size):
                left = min(max(math.floor(np.float32(j) * step_x) + x1, 0), width)
                right = min(max(math.ceil(np.float32(j + 1) * step_x) + x1, 0), width)
                if bottom > top and right > left:
                    out[r, :, i, j] = features[image_ids[r], :, top:bottom, left:right].amax((1, 2))
    return out


@pytest.mark.parametrize("name", golden_names("roi_pool_*.npz"))
@pytest.mark.parametrize("worth_compiling", [0, 1 << 60])
def test_pool_equals_the_reference_forward_and_backward(name, worth_compiling, monkeypatch):
    monkeypatch.setattr(window_max, "_MIN_COMPILED_WINDOWS", worth_compiling)
    golden = {key: torch.as_tensor(value) for key, value in load_golden(name).items()}
    rois = golden["in_rois"]
    call = {"size": 7, "scale": float(golden["in_scale"])}
    features = golden["in_x"].clone().requires_grad_()
    pooled = roi_pool_inclusive(features, rois[:, 1:], rois[:, 0].long(), **call)
    pooled.backward(golden["in_grad_y"])
    assert torch.equal(pooled.detach(), golden["out_y"])
    assert torch.equal(features.grad, golden["out_grad_x"])
    assert torch.equal(roi_pool_inclusive(features.detach(), rois[:, 1:], rois[:, 0].long(), **call), golden["out_y"])


@pytest.mark.parametrize("pool", [roi_pool, roi_align])
@pytest.mark.parametrize("worth_compiling", [0, 1 << 60])
def test_no_boxes_give_no_maps_and_no_gradient(pool, worth_compiling, monkeypatch):
    monkeypatch.setattr(window_max, "_MIN_COMPILED_WINDOWS", worth_compiling)
    features = torch.randn(2, 3, 5, 6, requires_grad=True)
    pooled = pool(features, torch.zeros(0, 4), torch.zeros(0, dtype=torch.long), size=7, scale=0.5)
    pooled.sum().backward()
    assert pooled.shape == (0, 3, 7, 7)
    assert features.grad is not None and not features.grad.any()


def test_exclusive_edges_end_on_the_pixel_before():
    features = torch.arange(16.0).view(1, 1, 4, 4)
    ids = torch.zeros(1, dtype=torch.long)
    assert roi_pool(features, torch.tensor([[0.0, 0.0, 2.0, 2.0]]), ids, size=1, scale=1.0).item() == 5
    assert roi_pool(features, torch.tensor([[0.0, 0.0, 3.0, 2.0]]), ids, size=1, scale=1.0).item() == 6


def test_halves_are_rounded_away_from_zero():
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 0.49999997, -0.2, 3.0])
    assert roi._round_half_away(x).tolist() == [1, 2, 3, -1, -2, 0, 0, 3]


def test_a_box_outside_the_map_pools_to_zero_and_sends_nothing_back():
    features = torch.full((1, 2, 4, 4), 3.0, requires_grad=True)
    pooled = roi_pool(
        features, torch.tensor([[100.0, 100.0, 140.0, 140.0]]), torch.zeros(1, dtype=torch.long), size=2, scale=1.0
    )
    pooled.sum().backward()
    assert not pooled.any() and not features.grad.any()


def test_the_gradient_of_a_tie_goes_to_the_first_cell_in_reading_order():
    features = torch.zeros(1, 1, 4, 4)
    features[0, 0, 0, 1] = -0.0  # equal to 0.0, so it must not lose to a later cell
    features.requires_grad_()
    box = torch.tensor([[1.0, 0.0, 4.0, 4.0]])
    roi_pool(features, box, torch.zeros(1, dtype=torch.long), size=1, scale=1.0).sum().backward()
    assert features.grad.nonzero().tolist() == [[0, 0, 0, 1]]


@st.composite
def maps_and_boxes(draw):
    """Maps with many ties, and boxes that may be degenerate, reversed, outside or absent."""
    seed = draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    height, width = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    features = torch.randint(-4, 5, (2, 3, height, width), generator=generator).float()
    count = draw(st.integers(0, 6))
    boxes = (torch.rand(count, 4, generator=generator) * 1.6 - 0.3) * 4 * max(height, width)
    if draw(st.booleans()):
        boxes = boxes.round()
    return features, boxes, torch.randint(0, 2, (count,), generator=generator)


@settings(deadline=None, max_examples=60)
@given(maps_and_boxes(), st.sampled_from([1, 2, 7]), st.sampled_from([0.25, 1 / 3]))
def test_pool_equals_its_definition_written_with_loops(inputs, size, scale):
    features, corners, ids = inputs
    expected = pool_with_loops(features, corners, ids, size=size, scale=scale)
    assert torch.equal(roi_pool_inclusive(features, corners, ids, size=size, scale=scale), expected)
    tracked = features.clone().requires_grad_()
    pooled = roi_pool_inclusive(tracked, corners, ids, size=size, scale=scale)
    assert torch.equal(pooled.detach(), expected)
    gradient = torch.ones_like(pooled)
    pooled.backward(gradient)
    # every bin that is not empty sends its whole gradient to one cell
    filled = pool_with_loops(torch.ones_like(features), corners, ids, size=size, scale=scale).sum()
    assert tracked.grad.sum() == filled


def test_chunks_do_not_change_the_result(monkeypatch):
    torch.manual_seed(0)
    features, ids = torch.randn(2, 5, 30, 33), torch.tensor([0, 1, 1, 0])
    boxes = torch.tensor([[0, 0, 33, 30], [3, 4, 9, 29], [20, 1, 21, 2], [5, 5, 30, 30.0]])
    results = []
    for chunk in (1, 1 << 20):
        monkeypatch.setattr(window_max, "_WINDOW_CHUNK", chunk)
        tracked = features.clone().requires_grad_()
        pooled = roi_pool(tracked, boxes, ids, size=3, scale=1.0)
        pooled.square().sum().backward()
        results.append((pooled.detach(), tracked.grad))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


def test_half_precision_maps_stay_half_precision():
    features = torch.randn(1, 2, 8, 8).half().requires_grad_()
    boxes, ids = torch.tensor([[0.0, 0.0, 8.0, 8.0]]), torch.zeros(1, dtype=torch.long)
    pooled = roi_pool(features, boxes, ids, size=2, scale=1.0)
    assert pooled.dtype == torch.float16
    assert torch.equal(pooled.detach(), torch.nn.functional.max_pool2d(features.detach().float(), 4).half())


def align_with_loops(features: Tensor, boxes: Tensor, image_ids: Tensor, *, size: int, scale: float) -> Tensor:
    """One bilinear sample at each bin's centre, with scalars."""
    height, width = features.shape[-2:]
    out = features.new_zeros(len(boxes), features.shape[1], size, size)
    for r, (x1, y1, x2, y2) in enumerate(boxes.tolist()):
        for i in range(size):
            y = min(max((y1 + (i + 0.5) / size * (y2 - y1)) * scale - 0.5, 0), height - 1)
            for j in range(size):
                x = min(max((x1 + (j + 0.5) / size * (x2 - x1)) * scale - 0.5, 0), width - 1)
                for row in range(height):
                    for column in range(width):
                        weight = max(1 - abs(y - row), 0) * max(1 - abs(x - column), 0)
                        out[r, :, i, j] += weight * features[image_ids[r], :, row, column]
    return out


def test_align_equals_its_definition_written_with_loops():
    torch.manual_seed(1)
    features = torch.randn(2, 3, 5, 4)
    boxes = torch.tensor([[0, 0, 32, 40], [-9, 3, 11.5, 60], [8, 8, 8, 8], [30, 30, 35, 39], [5, 7, 21, 19.0]])
    ids = torch.tensor([0, 1, 0, 1, 1])
    expected = align_with_loops(features, boxes, ids, size=4, scale=1 / 8)
    assert torch.allclose(roi_align(features, boxes, ids, size=4, scale=1 / 8), expected, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_align_keeps_its_precision(dtype):
    torch.manual_seed(2)
    features = torch.randn(1, 3, 5, 5).to(dtype)
    boxes, ids = torch.tensor([[3.0, 5.0, 30.0, 38.0]]), torch.zeros(1, dtype=torch.long)
    got = roi_align(features, boxes, ids, size=2, scale=1 / 8)
    assert got.dtype == dtype
    expected = roi_align(features.float(), boxes, ids, size=2, scale=1 / 8)
    assert torch.allclose(got.float(), expected, atol=torch.finfo(dtype).eps * 4)


def test_align_of_the_whole_map_at_its_own_size_is_the_map_and_has_its_gradient():
    features = torch.randn(1, 3, 6, 6, dtype=torch.float64, requires_grad=True)
    boxes, ids = torch.tensor([[0.0, 0.0, 96.0, 96.0]]), torch.zeros(1, dtype=torch.long)
    assert torch.allclose(roi_align(features, boxes, ids, size=6, scale=1 / 16), features)
    odd = torch.tensor([[3.0, 9.0, 71.0, 80.0]])
    assert torch.autograd.gradcheck(lambda f: roi_align(f, odd, ids, size=3, scale=1 / 16), features)


@pytest.mark.parametrize("rois", [0, 1, 40])
def test_the_kernel_of_roi_align_equals_plain_torch(rois: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(rois)
    features, corner = torch.randn(2, 21, 9, 14), 60 * torch.rand(rois, 2)
    boxes, image_ids = torch.cat([corner, corner + 70 * torch.rand(rois, 2)], dim=1), torch.arange(rois) % 2
    grad = torch.randn(rois, 21, 5, 5)
    results = []
    for least in (0, 1 << 62):
        monkeypatch.setattr(roi, "_MIN_COMPILED_CELLS", least)
        leaf = features.clone().requires_grad_()
        out = roi.roi_align(leaf, boxes, image_ids, size=5, scale=1 / 8)
        results.append((out.detach(), torch.autograd.grad(out, leaf, grad)[0]))
    torch.testing.assert_close(results[0][0], results[1][0], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(results[0][1], results[1][1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rois", [0, 1, 40])
def test_the_gradient_of_roi_align_is_the_same_in_every_memory_format(
    rois: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(rois)
    monkeypatch.setattr(roi, "_MIN_COMPILED_CELLS", 0)
    features, corner = torch.randn(2, 21, 9, 14, requires_grad=True), 60 * torch.rand(rois, 2)
    boxes, image_ids = torch.cat([corner, corner + 70 * torch.rand(rois, 2)], dim=1), torch.arange(rois) % 2
    out = roi.roi_align(features, boxes, image_ids, size=5, scale=1 / 8)
    grad = torch.randn(rois, 21, 5, 5)
    sliced = torch.stack([grad, grad], dim=-1)[..., 0]  # contiguous in neither format
    formats = grad, grad.contiguous(memory_format=torch.channels_last), sliced
    found = [torch.autograd.grad(out, features, one, retain_graph=True)[0] for one in formats]
    assert all(torch.equal(one, found[0]) for one in found)
    assert rois == 0 or found[0].any()
