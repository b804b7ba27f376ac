"""Hypothesis strategies and small worlds shared by the tests."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from tag2box.types import AugmentedRois, Exemplars, LabelerInput, Proposals

CRITERION_CASES: list[tuple[tuple[int, ...], list[list[int]]]] = [
    ((0,), [[0, 0]]),  # no proposals, no tags
    ((0,), [[1, 0]]),  # a tag, but no proposal
    ((1,), [[1, 1]]),  # one proposal for two classes
    ((5,), [[0, 0]]),  # no tags
    ((4, 0, 1), [[1, 0], [1, 1], [0, 1]]),
    ((6,), [[1]]),  # one class
    ((7, 9), [[1] * 30, [0] * 29 + [1]]),  # many classes
]
"""Sizes and tags of batches that every criterion has to handle."""


@st.composite
def box_sets(draw: st.DrawFn, low: int = 0, high: int = 8) -> torch.Tensor:
    """Boxes on an integer grid: ties, duplicates, containment and touching edges all happen."""
    n = draw(st.integers(low, high))
    side = st.integers(0, 12)
    rows = [[draw(side), draw(side), draw(st.integers(1, 12)), draw(st.integers(1, 12))] for _ in range(n)]
    boxes = torch.tensor(rows, dtype=torch.float32).reshape(-1, 4)
    return torch.cat([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], dim=1)


def random_boxes(count: int, generator: torch.Generator, size: float = 100.0) -> torch.Tensor:
    corner = torch.rand(count, 2, generator=generator) * size
    extent = torch.rand(count, 2, generator=generator) * size / 2 + 4
    return torch.cat([corner, corner + extent], dim=1)


def no_exemplars(dim: int, stages: int = 3) -> Exemplars:
    none = torch.zeros(0, dtype=torch.long)
    return Exemplars(torch.zeros(0, dim), none, torch.zeros(0), none, tuple(torch.zeros(0) for _ in range(stages)))


def make_labeler_input(
    sizes: tuple[int, ...], tags: list[list[int]], *, dim: int = 8, stages: int = 3, seed: int = 0
) -> LabelerInput:
    """Labeler input of random boxes, scores and embeddings."""
    g = torch.Generator().manual_seed(seed)
    total, classes = sum(sizes), len(tags[0]) if tags else 1
    probs = tuple(torch.rand(total, classes, generator=g) for _ in range(stages))
    embed = torch.nn.functional.normalize(torch.randn(total, dim, generator=g), dim=1)
    wanted = torch.tensor(tags, dtype=torch.bool).reshape(len(sizes), classes)
    return LabelerInput(Proposals(random_boxes(total, g), sizes), wanted, probs, embed, no_exemplars(dim, stages))


def plain_views(inputs: LabelerInput, kinds: int = 2) -> object:
    """An ``AugmentRois`` that returns each proposal's own embedding, ``kinds`` times."""

    def make(rows: torch.Tensor) -> AugmentedRois:
        embed = inputs.embed[rows].expand(kinds, -1, -1)
        return AugmentedRois(embed, tuple(p[rows].expand(kinds, -1, -1) for p in inputs.probs))

    return make
