"""Random numbers by image: what a photo draws does not depend on its company, on the order of work or on who works.

A batch that runs at once, image by image or spread over processes meets the same dropped squares, masks and noise; and
a second pass over an image meets those of the first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor


class Stream(IntEnum):
    """What numbers are drawn for; each has a stream of its own."""

    DROP_BLOCK = 0
    NECK = 1
    CLEAN_NECK = 2
    MASK = 3
    MASK_NECK = 4
    NOISE = 5
    NOISE_NECK = 6
    CONCRETE = 7


@dataclass(frozen=True, slots=True)
class StepRng:
    """All random numbers of an iteration."""

    seed: int
    iteration: int

    def row_rng(self, purpose: Stream, images: Int[Tensor, " m"]) -> RowRng:
        """Fresh dice for m rows, each of an image by its number in the whole batch. Equal calls give equal dice."""
        generators = {image: self._generator(purpose, image, images.device) for image in images.unique().tolist()}
        return RowRng(images, generators)

    def _generator(self, purpose: Stream, image: int, device: torch.device) -> torch.Generator:
        seed = np.random.SeedSequence([self.seed, self.iteration, image, purpose]).generate_state(1, np.uint64)[0]
        return torch.Generator(device).manual_seed(int(seed >> np.uint64(1)))  # manual_seed takes a signed number


@dataclass(frozen=True)
class RowRng:
    """Random numbers of rows, each image's from its own stream in the order of its rows."""

    images: Int[Tensor, " m"]
    generators: dict[int, torch.Generator]

    def uniform(self, *shape: int) -> Float[Tensor, "m ..."]:
        """Numbers from 0 up to 1, a tensor of ``shape`` a row."""
        return self._draw(torch.rand, shape)

    def normal(self, *shape: int) -> Float[Tensor, "m ..."]:
        """Numbers of the standard normal distribution, a tensor of ``shape`` a row."""
        return self._draw(torch.randn, shape)

    def _draw(self, source: Callable[..., Tensor], shape: tuple[int, ...]) -> Tensor:
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
