"""K-means of numbers on a line, solved exactly: neighbouring values share a group, so only the cuts are unknown."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def top_group(scores: Float[Tensor, " P"], groups: int) -> Bool[Tensor, " P"]:
    """Which scores are in the highest of so many k-means groups; equal scores stay together.

    The best cuts are found by dynamic programming over the sorted scores, so the answer has no random start and no
    local optimum. With fewer scores than groups every value is a group of its own.
    """
    if len(scores) == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    values = scores.double().nan_to_num()  # nan belongs nowhere: the loss will tell of it
    if len(values) <= groups:
        return values == values.max()
    ranked = values.sort().values
    sums = torch.cat([ranked.new_zeros(1), (ranked - ranked.mean()).cumsum(0)])
    between = _spread(sums, torch.zeros_like(sums, dtype=torch.long), torch.arange(len(sums), device=sums.device))
    for _ in range(groups - 2):
        between = _one_more_group(between, sums)
    starts = torch.arange(len(values), device=sums.device)
    last = between[:-1] + _spread(sums, starts, torch.full_like(starts, len(values)))
    return values >= ranked[last.argmax()]


def _spread(sums: Float[Tensor, " n1"], start: Int[Tensor, " a"], end: Int[Tensor, " a"]) -> Float[Tensor, " a"]:
    """What a group from ``start`` to ``end`` adds to the scatter between groups; k-means makes that the largest.

    Scatter within and between groups add up to a constant, and this one needs no sum of squares.
    """
    return (sums[end] - sums[start]).square() / (end - start).clamp(min=1)


def _one_more_group(between: Float[Tensor, " n1"], sums: Float[Tensor, " n1"]) -> Float[Tensor, " n1"]:
    """The largest scatter of the first j values, for all j, with one group more than ``between`` has.

    The best start of the last group never moves left as j grows. So every second j is settled between its settled
    neighbours, in ever finer steps: n log n comparisons, each step of them at once.
    """
    n, device = len(sums) - 1, sums.device
    best, start = torch.zeros_like(between), torch.zeros(n + 1, dtype=torch.long, device=device)
    step = 1 << (n.bit_length() - 1)
    while step:
        ends = torch.arange(step, n + 1, 2 * step, device=device)
        after = ends + step
        low = start[ends - step]
        high = torch.where(after <= n, start[after.clamp(max=n)], n).minimum(ends - 1)
        tried = high - low + 1
        owner = torch.arange(len(ends), device=device).repeat_interleave(tried)
        tries = torch.arange(len(owner), device=device) + (low - tried.cumsum(0) + tried)[owner]
        value = between[tries] + _spread(sums, tries, ends[owner])
        best[ends] = torch.full_like(between[ends], -torch.inf).scatter_reduce(0, owner, value, "amax")
        first = torch.where(value == best[ends][owner], tries, n)
        start[ends] = torch.full_like(ends, n).scatter_reduce(0, owner, first, "amin")
        step //= 2
    return best
