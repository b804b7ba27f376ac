"""Concrete DropBlock: its equations, and a mask net whose output for a photo is independent of the batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from tag2box.models.adversary import BatchStatNorm, ConcreteDropBlock, MaskNet, concrete_centres, rescaled_by_photo
from tag2box.models.drop_block import DropBlock, keep_mask
from tag2box.models.rng import StepRng

CHANNELS, SIDE = 4, 5


def net(**settings: float) -> MaskNet:
    return ConcreteDropBlock(hidden=6, **settings).build(CHANNELS, 3).double()  # type: ignore[arg-type]


def photos_of(*counts: int) -> torch.Tensor:
    return torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))


def maps_of(count: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(count, CHANNELS, SIDE, SIDE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(st.integers(0, 4), st.floats(0.01, 1), st.sampled_from([0.01, 0.5]), st.integers(0, 2**31))
def test_centres_are_drawn_with_chance_p_and_exact(count: int, gamma: float, temperature: float, seed: int):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(count, 3, 3, generator=generator, dtype=torch.float64)
    rand = torch.rand(count, 3, 3, generator=generator, dtype=torch.float64)
    centres = concrete_centres(logits, rand, gamma=gamma, temperature=temperature)
    assert torch.equal(centres, (rand > 1 - (gamma * logits.sigmoid()).clamp(1e-6, 1 - 1e-6)).double())


def test_their_gradient_is_that_of_the_gumbel_softmax_over_both_outcomes():
    """Written with two Gumbel numbers, whose difference is logistic."""
    logits = torch.linspace(-2, 2, 12, dtype=torch.float64).view(1, 3, 4).requires_grad_()
    first, second = (-(-torch.rand(1, 3, 4, dtype=torch.float64).log()).log() for _ in range(2))
    p = 0.4 * logits.sigmoid()
    pair = torch.stack([p.log() + first, (1 - p).log() + second]) / 0.7
    (wanted,) = torch.autograd.grad(pair.softmax(dim=0)[0].sum(), logits)
    mine = concrete_centres(logits, (first - second).sigmoid(), gamma=0.4, temperature=0.7)
    (got,) = torch.autograd.grad(mine.sum(), logits)
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("rand", [0.0, 1e-30, 1 - 2**-24])
def test_no_number_breaks_the_gradient(rand: float):
    logits = torch.tensor([[[-200.0, 0.0, 200.0]]], requires_grad=True)
    concrete_centres(logits, torch.full((1, 1, 3), rand), gamma=1.0, temperature=0.01).sum().backward()
    assert logits.grad is not None and bool(logits.grad.isfinite().all())


@given(st.lists(st.integers(0, 3), max_size=4), st.integers(0, 2**31))
def test_kept_cells_are_rescaled_per_photo(counts: list[int], seed: int):
    images = photos_of(*counts) if counts else torch.zeros(0, dtype=torch.long)
    mask = (torch.rand(len(images), 2, 3, generator=torch.Generator().manual_seed(seed)) > 0.4).float()
    result = rescaled_by_photo(mask, images)
    for photo in images.unique().tolist():
        own = mask[images == photo]
        wanted = own * own.numel() / own.sum().clamp(min=1)
        torch.testing.assert_close(result[images == photo], wanted)
    assert result.shape == mask.shape


@pytest.mark.parametrize("counts", [(), (0,), (1,), (3, 0, 2)])
def test_factors_survive_few_proposals(counts: tuple[int, ...]):
    images = photos_of(*counts) if counts else torch.zeros(0, dtype=torch.long)
    made = net()
    drawn = made.draw(StepRng(0, 0), images, SIDE)
    assert made.factors(drawn, maps_of(len(images)), images).shape == (len(images), SIDE, SIDE)


def test_factors_of_a_photo_do_not_depend_on_the_batch():
    images, made = photos_of(3, 2), net(drop=1.0, block=2)
    maps, drawn = maps_of(5), made.draw(StepRng(0, 0), images, SIDE)
    together = made.factors(drawn, maps, images)
    alone = [made.factors(drawn[images == i], maps[images == i], images[images == i]) for i in (0, 1)]
    torch.testing.assert_close(together, torch.cat(alone))
    assert bool((together == 0).any()) and bool((together > 1).any())


def test_it_drops_cells_of_high_logits_and_only_the_net_learns():
    images, made = photos_of(200), net(drop=1.0, block=1)
    maps = maps_of(200).requires_grad_()
    drawn = made.draw(StepRng(0, 0), images, SIDE)
    factors = made.factors(drawn, maps, images)
    wanted = made(maps)
    assert wanted[factors == 0].mean() > wanted[factors > 0].mean()
    (factors * torch.randn(factors.shape)).sum().backward()
    assert maps.grad is None
    assert all(p.grad is not None and p.grad.any() for p in made.parameters())


def test_nothing_is_dropped_at_a_rate_of_zero():
    images, made = photos_of(4), net(drop=0.0)
    factors = made.factors(made.draw(StepRng(0, 0), images, SIDE), maps_of(4), images)
    assert torch.equal(factors, torch.ones_like(factors))


def test_squares_are_those_of_drop_block():
    centres = (torch.rand(5, 7, 7) < 0.1).float()
    mask = keep_mask(centres, 3)
    for r, y, x in centres.nonzero().tolist():
        assert not mask[r, max(y - 1, 0) : y + 2, max(x - 1, 0) : x + 2].any()
    assert keep_mask(torch.zeros(2, 3, 3), 3).all()


def test_its_weights_follow_the_seed_and_disturb_no_other_draw():
    state = torch.random.get_rng_state()
    first, second, other = (ConcreteDropBlock(hidden=2).build(3, seed) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(first.shortcut.weight, second.shortcut.weight)
    assert not torch.equal(first.shortcut.weight, other.shortcut.weight)
    assert DropBlock().build(3, 1) == DropBlock()


@pytest.mark.parametrize("shape", [(1, 2, 1, 1), (3, 2, 1, 1), (4, 3, 2, 5)])
def test_batch_norm_matches_the_loop_and_torchs(shape: tuple[int, int, int, int]) -> None:
    x, norm = torch.randn(shape, dtype=torch.float64), BatchStatNorm(shape[1]).double()
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    expected = torch.empty_like(x)
    for c in range(shape[1]):
        values = x[:, c].flatten().tolist()
        mean = sum(values) / len(values)
        std = (sum((v - mean) ** 2 for v in values) / len(values) + 1e-5) ** 0.5
        expected[:, c] = (x[:, c] - mean) / std * norm.weight[c] + norm.bias[c]
    torch.testing.assert_close(norm(x), expected)
    torch.testing.assert_close(norm.eval()(x), expected)  # the same in every mode
    if x[:, 0].numel() > 1:
        torch.testing.assert_close(
            norm(x), torch.nn.functional.batch_norm(x, None, None, norm.weight, norm.bias, training=True)
        )


def test_with_batch_norm_the_mask_net_has_512_channels_and_learns() -> None:
    made = ConcreteDropBlock(norm="batch", temperature=1.0, drop=1.0).build(CHANNELS, 3).double()
    assert [type(part) for part in made.inner if not isinstance(part, torch.nn.Conv2d | torch.nn.ReLU)] == [
        BatchStatNorm, BatchStatNorm,
    ]  # fmt: skip
    assert made.inner[0].out_channels == 512
    maps, images = torch.randn(6, CHANNELS, 3, 3).double(), torch.zeros(6, dtype=torch.long)
    factors = made.factors(torch.rand(6, 3, 3).double(), maps, images)
    (factors * torch.randn(6, 3, 3)).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in made.parameters())
