from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from conftest import golden_names, load_golden
from tag2box.methods.casd import Attention, attention, disagreement, stage_sum, upright
from tag2box.ops.roi import channel_mean
from tag2box.types import BatchMeta, Proposals, PseudoBoxes, PseudoLabels

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


@pytest.mark.parametrize("name", golden_names("casd_*.npz"))
def test_the_reference_agrees_in_attention_loss_and_gradient(name: str) -> None:
    """Its total is the mean over views of all losses, of which the consistency counts a tenth."""
    golden = {key: torch.as_tensor(value) for key, value in load_golden(name).items()}
    kept = [golden[key][0] for key in sorted(golden) if key.startswith("in_keep")]
    pooled = golden["in_pooled"].clone().requires_grad_()
    responses = pooled.mean(dim=1, keepdim=True)
    maps = attention(responses[:, 0])
    torch.testing.assert_close(maps.detach(), golden["out_attention_all"], rtol=1e-5, atol=1e-6)
    count = len(pooled) // VIEWS
    meta = BatchMeta(
        Proposals(torch.zeros(len(pooled), 4), (count,) * VIEWS),
        torch.ones(VIEWS, 1, dtype=torch.bool),
        views_per_image=VIEWS,
        flipped=MIRRORED,
    )
    stages = [foreground(rows, count) for rows in kept]
    loss = Attention(input_weight=0.1, roi_divisor="twice")(responses, stages, meta)
    torch.testing.assert_close(loss.detach(), 0.1 / VIEWS * golden["out_consistency_loss"], rtol=1e-5, atol=0)
    parts = [golden[key] for key in golden if key.startswith(("out_cls", "out_refine"))]
    torch.testing.assert_close(sum(parts) / VIEWS + loss.detach(), golden["out_total"], rtol=1e-5, atol=0)
    loss.backward()
    torch.testing.assert_close(pooled.grad, golden["grad_pooled"], rtol=1e-3, atol=1e-10)


def foreground(rows: Tensor, count: int) -> PseudoLabels:
    """Labels of one stage: these rows of every view are objects."""
    cls = torch.ones(count, dtype=torch.long).index_fill(0, rows, 0).repeat(VIEWS)
    none = torch.zeros(0, dtype=torch.long)
    boxes = torch.zeros(len(cls), 4)
    return PseudoLabels(cls, torch.ones(len(cls)), boxes, PseudoBoxes(none, none, torch.zeros(0)), cls - 1)


@pytest.mark.parametrize("counts", [(0,), (3,), (2, 0), (6, 5), (1, 4, 7)])
@pytest.mark.parametrize("roi_divisor", ["once", "twice"])
def test_the_normaliser_of_stages_is_that_of_the_loops(counts: tuple[int, ...], roi_divisor: str) -> None:
    values = [[0.1 * (i + 1) * (k + 1) for i in range(n)] for k, n in enumerate(counts)]
    terms = [torch.tensor(sum(own) / len(own) if own else 0.0) for own in values]
    expected = 0.0
    for own in values:
        for value in own:
            expected += value / len(own)
    if roi_divisor == "twice":
        expected /= max(len(values[-1]), 1)
    assert stage_sum(terms, counts, roi_divisor).item() == pytest.approx(expected)  # type: ignore[arg-type]


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
