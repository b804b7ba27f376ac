from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from conftest import golden_names, load_golden
from tag2box.methods.pcl import top_group


def within(values: list[float], cuts: tuple[int, ...]) -> float:
    """Squares of distances to the means of the groups that the cuts make of sorted values."""
    ends = (0, *cuts, len(values))
    parts = [values[a:b] for a, b in pairwise(ends)]
    return sum(sum((x - sum(part) / len(part)) ** 2 for x in part) for part in parts)


def every_division(values: list[float], groups: int) -> list[tuple[float, int]]:
    """(scatter within groups, start of the highest) of every division into so many groups that are not empty."""
    ranked = sorted(values)
    return [(within(ranked, cuts), cuts[-1]) for cuts in combinations(range(1, len(ranked)), groups - 1)]


@pytest.mark.parametrize(
    ("scores", "top"),
    [
        ([], []),
        ([0.3], [True]),
        ([0.3, 0.1], [True, False]),
        ([0.2, 0.2], [True, True]),
        ([0.1, 0.9, 0.5], [False, True, False]),
        ([0.5] * 7, [True] * 7),  # no difference between them
        ([0.1, 0.8, 0.1, 0.8, 0.1], [False, True, False, True, False]),  # two values for three groups
        ([0.0, 0.01, 0.5, 0.51, 0.9, 0.91, 0.92], [False, False, False, False, True, True, True]),
        ([0.0, 0.02, 0.03, 0.04, 0.5, 0.05], [False, False, False, False, True, False]),
    ],
)
def test_the_highest_of_three_groups(scores: list[float], top: list[bool]) -> None:
    assert top_group(torch.tensor(scores), 3).tolist() == top


@given(st.lists(st.integers(0, 60), min_size=1, max_size=14), st.integers(2, 4))
def test_no_division_scatters_less_than_the_one_found(whole: list[int], groups: int) -> None:
    values = [x / 60 for x in whole]
    chosen = top_group(torch.tensor(values, dtype=torch.float64), groups).tolist()
    lowest = min(v for v, c in zip(values, chosen, strict=True) if c)
    assert chosen == [v >= lowest for v in values]
    if len(set(values)) >= groups:
        divisions = every_division(values, groups)
        best = min(cost for cost, _ in divisions)
        starts = {sorted(values)[start] for cost, start in divisions if cost <= best + 1e-12}
        assert lowest in starts
    else:
        assert lowest == max(values)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 31, 32, 33, 127, 300])
@pytest.mark.parametrize("groups", [2, 3, 5])
def test_the_dynamic_programme_is_that_written_with_loops(n: int, groups: int) -> None:
    """At sizes around powers of two, where the halving could slip; scores as lopsided as a softmax makes them."""
    scores = torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(n)).mul(3).softmax(dim=0)
    ranked = np.sort(scores.numpy())
    sums, squares = np.concatenate([[0], ranked.cumsum()]), np.concatenate([[0], (ranked**2).cumsum()])
    cost = squares - sums**2 / np.maximum(np.arange(n + 1), 1)
    start = np.zeros(n + 1, dtype=int)
    for _ in range(min(groups, n) - 1):
        ways = [
            [cost[i] + squares[j] - squares[i] - (sums[j] - sums[i]) ** 2 / (j - i) for i in range(j)]
            for j in range(1, n + 1)
        ]
        start = np.array([0, *(int(np.argmin(way)) for way in ways)])
        cost = np.array([0, *(min(way) for way in ways)])
    assert torch.equal(top_group(scores, groups), scores >= ranked[start[n]])


@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=20), st.randoms(use_true_random=False))
def test_order_does_not_matter_and_the_best_is_always_in(scores: list[float], random: object) -> None:
    order = list(range(len(scores)))
    random.shuffle(order)  # type: ignore[attr-defined]
    x = torch.tensor(scores)
    assert torch.equal(top_group(x, 3)[order], top_group(x[order], 3))
    assert top_group(x, 3)[x.argmax()]


@pytest.mark.parametrize("name", golden_names("pcl_*.npz"))
def test_groups_are_those_of_the_reference(name: str) -> None:
    g = load_golden(name)
    for c in g["positive_classes"].tolist():
        scores = torch.as_tensor(g["in_source_prob"])[:, c - g["in_im_labels"].shape[1]][g[f"c{c}_pool"]]
        top = g[f"c{c}_kmeans_labels"] == g[f"c{c}_kmeans_centers"].argmax()
        assert top_group(scores, 3).tolist() == top.tolist()


def test_nan_does_not_break_it() -> None:
    assert top_group(torch.tensor([float("nan"), 0.1, 0.2, 0.9]), 3).tolist() == [False, False, False, True]
