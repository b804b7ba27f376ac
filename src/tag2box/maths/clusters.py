"""Proposal clusters: their centres, and the loss of a cluster as one bag (PCL, Tang et al. 2018)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tag2box.maths.boxes import iou
from tag2box.maths.kmeans import top_group
from tag2box.types import PseudoLabels


def cluster_centres(
    boxes: Float[Tensor, "P 4"],
    scores: Float[Tensor, " P"],
    *,
    groups: int = 3,
    graph_iou: float = 0.4,
    leave: int = 5,
    most: int = 5,
) -> tuple[Int[Tensor, " s"], Float[Tensor, " s"]]:
    """Centres of one class in one image, best first, and the best score among the neighbours of each.

    Args:
        groups: the proposals are those of the highest of so many k-means groups of scores.
        graph_iou: two of them are neighbours above this overlap.
        leave: once no more than this many are left, no further centre is looked for.
        most: keep at most so many centres.
    """
    ids = top_group(scores, groups).nonzero().flatten()
    ids = ids[scores[ids].argsort(descending=True, stable=True)]
    near = (iou(boxes[ids], boxes[ids]) > graph_iou).fill_diagonal_(True)
    centres, best = most_connected(near, leave)
    order = best.argsort(stable=True)[:most]  # ranks: the lowest is the best
    return ids[centres[order]], scores[ids[best[order]]]


def most_connected(near: Bool[Tensor, "t t"], leave: int) -> tuple[Int[Tensor, " s"], Int[Tensor, " s"]]:
    """Greedy centres of a graph whose nodes come best first, and the first node left among the neighbours of each.

    The node with the most neighbours left is a centre and goes with them, until no more than ``leave`` nodes remain.
    Of equally connected nodes the better one is taken.
    """
    graph = near.cpu().numpy()
    is_left = np.ones(len(graph), dtype=bool)
    degree = graph.sum(axis=1)
    found: list[tuple[int, int]] = []
    while is_left.any() and (not found or is_left.sum() > leave):
        centre = int(degree.argmax())
        members = np.flatnonzero(graph[centre] & is_left)
        found.append((centre, int(members[0])))
        is_left[members] = False
        degree -= graph[members].sum(axis=0)
        degree[members] = 0  # and those that are left have one or more
    centres, best = torch.tensor(found, dtype=torch.long, device=near.device).reshape(-1, 2).unbind(dim=1)
    return centres, best


def bag_loss(logits: Float[Tensor, "R c1"], labels: PseudoLabels, sizes: Sequence[int]) -> Float[Tensor, ""]:
    """L_cls of one stage with a cluster as one bag: -(sum of weights) log(mean probability) for each cluster.

    A cluster is what a seed owns of its class; background counts proposal by proposal. Divided by an image's proposals,
    then the mean over images. Where every cluster has one member this is ``refine_loss``.
    """
    log_p = logits.log_softmax(dim=1).gather(1, labels.cls[:, None]).squeeze(1)
    is_member = labels.cls < logits.shape[1] - 1
    means = _log_means(log_p[is_member], labels.owner[is_member], len(labels.seeds))
    entropy = -log_p.masked_scatter(is_member, means)
    per_image = torch.tensor(sizes, dtype=torch.long, device=logits.device)
    divisor = per_image.repeat_interleave(per_image) * max(len(sizes), 1)
    return (labels.weight * entropy / divisor).sum()


def _log_means(log_p: Float[Tensor, " m"], owner: Int[Tensor, " m"], count: int) -> Float[Tensor, " m"]:
    """Log of the mean probability in each member's cluster; by the largest, so that none underflows."""
    peak = log_p.new_full((count,), -torch.inf).scatter_reduce(0, owner, log_p.detach(), "amax")[owner]
    total = log_p.new_zeros(count).index_add(0, owner, (log_p - peak).exp())
    return (total / owner.bincount(minlength=count).clamp(min=1))[owner].log() + peak
