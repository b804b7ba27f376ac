"""Count-limited selection: as many boxes as there are objects, none inside another (C-WSL, Gao et al. 2018)."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tag2box.maths.boxes import containment


def counted_boxes(
    boxes: Float[Tensor, "P 4"], scores: Float[Tensor, " P"], count: int, *, overlap: float = 0.1, openers: int = 100
) -> Int[Tensor, " s"]:
    """The rows of up to ``count`` boxes whose scores add up to the most, best first, found greedily.

    Each of the best boxes opens a set, which others join in the order of their scores while no box of the set has
    ``overlap`` of its area, or more, inside another. The set with the largest sum wins; the first of equals. Boxes of
    negative score never join: they are taken.
    """
    ranked = scores.argsort(descending=True, stable=True)
    if count <= 1 or len(ranked) == 0:
        return ranked[:1]
    boxes, scores = boxes[ranked], scores[ranked]
    chosen = torch.arange(min(openers, len(ranked)), device=boxes.device)[:, None]  # (o, members)
    may_join = (scores >= 0).expand(len(chosen), -1)
    total = scores[: len(chosen)]
    for _ in range(count - 1):
        last = chosen[:, -1]
        may_join = (may_join & (containment(boxes[last], boxes) < overlap)).scatter(1, last[:, None], False)
        joins = may_join.any(dim=1)
        if not joins.any():
            break
        first = torch.where(joins, may_join.byte().argmax(dim=1), chosen[:, 0])  # nobody fits: its opener, again
        total = total + torch.where(joins, scores[first], 0)
        chosen = torch.cat([chosen, first[:, None]], dim=1)
    return ranked[chosen[total.argmax()].unique()]
