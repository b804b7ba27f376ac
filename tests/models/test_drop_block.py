from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from conftest import golden_names, load_golden
from tag2box.models.augment import mask_factors, noise_factors
from tag2box.models.drop_block import DropBlock, block_mask, drop_block
from tag2box.models.rng import StepRng, Stream, dropout


def row_rng_of(images, seed=3):
    return StepRng(seed, 0).row_rng(Stream.DROP_BLOCK, torch.tensor(images, dtype=torch.long))


def mask_with_loops(rand, block, gamma):
    mask = torch.ones_like(rand)
    count, height, width = rand.shape
    before, after = block // 2, (block - 1) // 2
    for r, y, x in (rand < gamma).nonzero().tolist():
        rows = slice(max(y - after, 0), min(y + before, height - 1) + 1)
        columns = slice(max(x - after, 0), min(x + before, width - 1) + 1)
        mask[r, rows, columns] = 0
    assert mask.shape == (count, height, width)
    return mask


@pytest.mark.parametrize("name", golden_names("dropblock_*.npz"))
def test_drop_block_equals_the_reference_forward_and_backward(name):
    golden = {key: torch.as_tensor(value) for key, value in load_golden(name).items()}
    block, drop = int(golden["in_block_size"]), float(golden["in_drop_prob"])
    assert torch.equal(
        block_mask(golden["in_rand"], block=block, gamma=float(golden["gamma"])), golden["out_block_mask"]
    )
    x = golden["in_x"].clone().requires_grad_()
    y = drop_block(x, golden["in_rand"], block=block, drop=drop)
    y.backward(golden["in_grad_y"])
    torch.testing.assert_close(y.detach(), golden["out_y"], rtol=1e-6, atol=0)
    torch.testing.assert_close(x.grad, golden["out_grad_x"], rtol=1e-6, atol=0)


@given(st.integers(0, 5), st.integers(1, 4), st.floats(0, 1), st.integers(0, 2**31))
def test_block_mask_equals_its_definition_written_with_loops(count, block, gamma, seed):
    rand = torch.rand(count, 7, 5, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(block_mask(rand, block=block, gamma=gamma), mask_with_loops(rand, block, gamma))


def test_no_proposals_stay_no_proposals():
    x = torch.zeros(0, 4, 7, 7)
    assert drop_block(x, torch.rand(0, 7, 7), block=3, drop=0.3).shape == x.shape
    assert DropBlock().draw(StepRng(3, 0), torch.zeros(0, dtype=torch.long), 7).shape == (0, 7, 7)
    assert mask_factors(torch.rand(0, 1, 7, 7), 0.3, rescale=True).shape == (0, 1, 7, 7)
    assert dropout(torch.zeros(0, 5), 0.5, row_rng_of([])).shape == (0, 5)
    assert (x * noise_factors(torch.randn(0, 1, 7, 7))).shape == x.shape


def test_a_batch_that_loses_every_cell_is_zero_not_nan():
    x = torch.randn(2, 3, 4, 4)
    assert torch.equal(drop_block(x, torch.zeros(2, 4, 4), block=3, drop=0.3), torch.zeros_like(x))
    assert torch.equal(mask_factors(torch.zeros(2, 1, 4, 4), 0.3, rescale=True), torch.zeros(2, 1, 4, 4))


def test_drop_block_without_drops_changes_nothing_and_follows_its_rng():
    images = [0, 0, 1, 1, 1, 2]
    assert torch.equal(DropBlock(drop=0).draw(StepRng(3, 0), torch.tensor(images), 7), torch.ones(6, 7, 7))
    first = DropBlock().draw(StepRng(3, 0), torch.tensor(images), 7)
    assert torch.equal(first, DropBlock().draw(StepRng(3, 0), torch.tensor(images), 7))
    assert not torch.equal(first, DropBlock().draw(StepRng(4, 0), torch.tensor(images), 7))
    assert not torch.equal(first, DropBlock(block=1).draw(StepRng(3, 0), torch.tensor(images), 7))
    rand = row_rng_of(images).uniform(7, 7)
    x = torch.randn(6, 3, 7, 7)
    assert torch.equal(x * first[:, None], drop_block(x, rand, block=3, drop=0.3))


def test_dropout_keeps_the_mean_and_does_nothing_without_an_rng():
    x = torch.ones(400, 50)
    dropped = dropout(x, 0.25, row_rng_of([0] * 400))
    assert set(dropped.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert dropped.mean().item() == pytest.approx(1.0, abs=0.02)
    assert dropout(x, 0.25, None) is x and dropout(x, 0.0, row_rng_of([0] * 400)) is x


def test_random_mask_keeps_a_cell_at_exactly_the_rate_and_masks_all_channels_alike():
    x = torch.ones(1, 2, 2, 2)
    rand = torch.tensor([[0.1, 0.25], [0.5, 0.9]]).view(1, 1, 2, 2)
    kept = torch.tensor([[0.0, 1.0], [1.0, 1.0]]).expand(1, 2, 2, 2)
    assert torch.equal(x * mask_factors(rand, 0.25), kept)
    assert torch.allclose(x * mask_factors(rand, 0.25, rescale=True), kept * 4 / 3)


def test_noise_scales_each_cell_by_one_plus_its_number():
    x = torch.tensor([[[[2.0, -1.0]], [[4.0, 0.0]]]])  # (1, 2, 1, 2)
    shared = torch.tensor([0.5, -2.0]).view(1, 1, 1, 2)
    assert (x * noise_factors(shared)).flatten().tolist() == [3.0, 1.0, 6.0, 0.0]
    own = torch.tensor([0.5, -2.0, 0.0, 1.0]).view(1, 2, 1, 2)
    assert (x * noise_factors(own)).flatten().tolist() == [3.0, 1.0, 4.0, 0.0]
