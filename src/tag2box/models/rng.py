"""Per-image RNG streams: the same draws whatever the batch, order or rank; and dropout that draws from them.

A batch that runs at once, image by image or spread over ranks gets the same dropped squares, masks and noise, and a
recomputed forward pass gets those of the first one.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from jaxtyping import Float, Int


class Stream(IntEnum):
    """The use of random numbers; each use has a stream of its own."""

    DROP_BLOCK = 0
    NECK = 1
    CLEAN_NECK = 2
    MASK = 3
    MASK_NECK = 4
    NOISE = 5
    NOISE_NECK = 6
    CONCRETE = 7
    REGION_NECK = 8


@dataclass(frozen=True)
class RowRng:
    """RNG of m rows: each image draws from its own generator, in the order of its rows."""

    images: Int[torch.Tensor, " m"]  # the image of each row, by its index in the whole batch
    generators: dict[int, torch.Generator]

    def uniform(self, *shape: int) -> Float[torch.Tensor, "m ..."]:
        """Draw from [0, 1): one tensor of ``shape`` per row."""
        return self._draw(torch.rand, shape)

    def normal(self, *shape: int) -> Float[torch.Tensor, "m ..."]:
        """Draw from N(0, 1): one tensor of ``shape`` per row."""
        return self._draw(torch.randn, shape)

    def copy(self) -> "RowRng":
        """An RNG that draws the same numbers from now on."""
        return RowRng(self.images, {image: generator.clone_state() for image, generator in self.generators.items()})

    def _draw(self, source: Callable[..., torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
        images, device = self.images, self.images.device
        counts = torch.bincount(images).tolist() if len(images) else []
        drawn = [
            source(count, *shape, generator=self.generators[image], device=device)
            for image, count in enumerate(counts)
            if count
        ]
        numbers = torch.cat([torch.zeros(0, *shape, device=device), *drawn])
        if bool((images.diff() >= 0).all()):
            return numbers
        return torch.empty_like(numbers).index_copy_(0, images.argsort(stable=True), numbers)


@dataclass(frozen=True, slots=True)
class StepRng:
    """All random streams of one iteration."""

    seed: int
    iteration: int

    def row_rng(self, stream: Stream, images: Int[torch.Tensor, " m"]) -> RowRng:
        """A new RNG for m rows, each of an image by its index in the whole batch. Equal calls give equal draws."""
        generators = {image: self._generator(stream, image, images.device) for image in images.unique().tolist()}
        return RowRng(images, generators)

    def _generator(self, stream: Stream, image: int, device: torch.device) -> torch.Generator:
        seed = np.random.SeedSequence([self.seed, self.iteration, image, stream]).generate_state(1, np.uint64)[0]
        return torch.Generator(device).manual_seed(int(seed >> np.uint64(1)))  # manual_seed takes a signed number


def dropout(x: Float[torch.Tensor, "R F"], rate: float, row_rng: RowRng | None) -> Float[torch.Tensor, "R F"]:
    """Zero values at ``rate`` and rescale the others by 1 / (1 - rate); the identity without an RNG (inference)."""
    if row_rng is None or rate == 0:
        return x
    return x * (row_rng.uniform(*x.shape[1:]) >= rate).to(x.dtype) / (1 - rate)


@contextmanager
def initial_seed(seed: int | None) -> Iterator[None]:
    """Initial weights are drawn from a seed of their own, if there is one; what comes after is not changed by it."""
    with torch.random.fork_rng([], enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        yield
