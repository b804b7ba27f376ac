from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from tag2box.models.rng import StepRng, Stream

RNG = StepRng(5, 7)
IMAGES = st.lists(st.integers(0, 4), max_size=12).map(lambda images: torch.tensor(images, dtype=torch.long))


def drawn(images: torch.Tensor, *, rng: StepRng = RNG) -> torch.Tensor:
    return rng.row_rng(Stream.NOISE, images).normal(2, 3)


@pytest.mark.parametrize("images", [[], [0], [3], [2, 2, 0]])
def test_every_row_gets_numbers_of_its_own(images: list[int]) -> None:
    numbers = drawn(torch.tensor(images, dtype=torch.long))
    assert numbers.shape == (len(images), 2, 3)
    assert len(numbers.unique()) == numbers.numel()


@given(IMAGES)
def test_an_image_draws_the_same_alone_and_in_a_batch_in_any_order(images: torch.Tensor) -> None:
    together = drawn(images)
    for image in images.unique().tolist():
        rows = (images == image).nonzero().flatten()
        assert torch.equal(together[rows], drawn(images[rows]))


@pytest.mark.parametrize(
    "other",
    [StepRng(6, 7), StepRng(5, 8), StepRng(7, 5)],
    ids=["another seed", "another iteration", "the two exchanged"],
)
def test_seed_and_iteration_both_decide(other: StepRng) -> None:
    images = torch.tensor([0, 1])
    assert torch.equal(drawn(images), drawn(images))
    assert not torch.isin(drawn(images), drawn(images, rng=other)).any()


def test_every_stream_and_every_draw_differs() -> None:
    images = torch.tensor([0, 0, 1])
    draws = [StepRng(0, 0).row_rng(stream, images).uniform(4) for stream in Stream]
    row_rng = StepRng(0, 0).row_rng(Stream.NECK, images)
    draws += [row_rng.uniform(4), row_rng.uniform(4)]
    assert torch.equal(draws[Stream.NECK], draws[-2])  # the first draw of a new RNG is always the same
    del draws[-2]
    assert len(torch.cat(draws).unique()) == torch.cat(draws).numel()
    assert all(((t >= 0) & (t < 1)).all() for t in draws)
